"""Reinforcement learning: soft actor-critic that is protected by the strategies of continual learning."""

from powerprop.rl.loop import Environment, interact, success_rate
from powerprop.rl.policy import Policy
from powerprop.rl.replay import Replay, Transitions
from powerprop.rl.sac import SAC, Settings

__all__ = ["SAC", "Environment", "Policy", "Replay", "Settings", "Transitions", "interact", "success_rate"]
