"""Reinforcement learning: soft actor-critic that is protected by the strategies of continual learning."""

from powerprop_paper.rl.loop import Environment, Paused, agent_state, interact, load_agent, success_rate
from powerprop_paper.rl.networks import Policy
from powerprop_paper.rl.sac import SAC, Replay, Settings, Transitions

__all__ = [
    "SAC", "Environment", "Paused", "Policy", "Replay", "Settings", "Transitions", "agent_state", "interact",
    "load_agent", "success_rate",
]  # fmt: skip
