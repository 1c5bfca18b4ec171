"""Reinforcement learning: soft actor-critic that is protected by the strategies of continual learning."""

from powerprop_paper.rl.loop import Environment, Paused, interact, success_rate
from powerprop_paper.rl.policy import Policy
from powerprop_paper.rl.replay import Replay, Transitions
from powerprop_paper.rl.sac import SAC, Settings

__all__ = ["SAC", "Environment", "Paused", "Policy", "Replay", "Settings", "Transitions", "interact", "success_rate"]
