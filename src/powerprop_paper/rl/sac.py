"""Soft actor-critic that learns one task after the other, its actor and its critics each protected by a strategy.

    L(Q) = Σ_i ½ E[(Q_i(s, a) - y)²],   y = r + γ (1 - ended) (min_i Q̄_i(s', a') - τ log π(a'|s'))
    L(π) = E[τ log π(a|s) - min_i Q_i(s, a)],   a, a' drawn from π
    L(τ) = -E[log τ (log π(a|s) + H)],   H the entropy of Gaussian actions with a standard deviation of target_std

References: Haarnoja et al., Soft Actor-Critic, 2018; Wołczyk et al., Continual World, 2021, whose settings are the
defaults.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from powerprop.continual.data import derived_seed, to_device
from powerprop.continual.objective import Model
from powerprop.continual.packing.packnet import Packing
from powerprop.continual.replay import Replay as Rehearsing
from powerprop.continual.strategy import Naive, Strategy
from powerprop_paper.rl.networks import Actor, Policy, TwinCritic, Values, squashed

PURPOSES = ("actor", "critic", "exploring", "batches", "noise", "examples")
"""Of random numbers; each task has its own of every purpose."""


@dataclass(frozen=True)
class Settings:
    """The numbers of soft actor-critic.

    width: units of a hidden layer.
    layers: hidden layers.
    batch: transitions per update.
    discount: γ.
    lr: learning rate of Adam, for actor, critics and temperature.
    clip: the largest norm of a gradient; 0 is any.
    target_std: of every action before squashing, which the temperature aims at.
    polyak: the share of themselves that target networks keep in each update.
    replay: transitions that are kept of the task in hand.
    start: steps of a task before the first update.
    random_steps: steps at the beginning of a task whose actions are drawn uniformly.
    train_every: steps between trainings.
    updates: of a training.
    retrain_steps: updates after pruning, from the replay alone, for strategies that prune.
    examples: transitions that strategies which look at a task's data when it ends are shown; those with a memory
        of examples see all of the replay.
    """

    width: int = 256
    layers: int = 4
    batch: int = 128
    discount: float = 0.99
    lr: float = 1e-3
    clip: float = 1e-3
    target_std: float = 0.089
    polyak: float = 0.995
    replay: int = 1_000_000
    start: int = 1000
    random_steps: int = 10_000
    train_every: int = 50
    updates: int = 50
    retrain_steps: int = 100_000
    examples: int = 2560


class Transitions(NamedTuple):
    """Steps of an environment, a row for each."""

    observation: Tensor
    action: Tensor
    reward: Tensor
    following: Tensor
    """The observation afterwards."""
    ended: Tensor
    """1 where the episode came to its own end, so that nothing follows; 0 also where it was merely cut off."""


class Replay:
    """The latest steps of a task; of older ones than there is room for, the oldest go first.

    A transition is one row of one tensor, so that a batch is one look-up.

    capacity: the most transitions; memory is taken as they come.
    """

    def __init__(self, observations: int, actions: int, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"replay must have room for at least one transition, got {capacity}")
        self.parts = [observations, actions, 1, observations, 1]
        self.capacity = capacity
        self.rows = torch.empty(0, sum(self.parts))
        self.seen = 0

    def __len__(self) -> int:
        return min(self.seen, self.capacity)

    def add(
        self, observation: NDArray[np.float32], action: NDArray[np.float32], reward: float,
        following: NDArray[np.float32], ended: bool,
    ) -> None:  # fmt: skip
        """One step of the environment."""
        row = np.concatenate([observation, action, [reward], following, [ended]], dtype=np.float32)
        place = self.seen % self.capacity
        if place == len(self.rows):
            more = min(max(1024, len(self.rows)), self.capacity - len(self.rows))
            self.rows = torch.cat([self.rows, self.rows.new_empty(more, self.rows.shape[1])])
        self.rows[place] = torch.from_numpy(row)
        self.seen += 1

    def sample(self, count: int, generator: torch.Generator) -> Transitions:
        """Some transitions, each drawn from all."""
        if not self.seen:
            raise ValueError(f"there is nothing to draw {count} transitions from: nothing has happened yet")
        return self._apart(self.rows.index_select(0, torch.randint(len(self), (count,), generator=generator)))

    def all(self) -> Transitions:
        """Everything that is there."""
        return self._apart(self.rows[: len(self)])

    def _apart(self, rows: Tensor) -> Transitions:
        observation, action, reward, following, ended = torch.split(rows, self.parts, 1)
        return Transitions(observation, action, reward[:, 0], following, ended[:, 0])

    def state(self) -> dict[str, Tensor]:
        """The rows, and how many came by."""
        return {"rows": self.rows[: len(self)].clone(), "seen": torch.tensor(self.seen)}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """What `state` gave."""
        rows, seen = state["rows"], int(state["seen"])
        if rows.ndim != 2 or rows.shape[1] != sum(self.parts) or len(rows) != min(seen, self.capacity):
            wanted = (min(seen, self.capacity), sum(self.parts))
            raise ValueError(f"the saved replay must have rows of {wanted}, got {tuple(rows.shape)}")
        self.rows, self.seen = rows.clone(), seen


class SAC:
    """An agent. `begin`, then `explore`, `replay.add` and `update` as often as one likes, then `end`; see `interact`.

    observations, actions: how many numbers each has; actions are in [-1, 1].
    actor: makes the learner that protects the policy, as `functools.partial(EWC, strength=1e4)`; called as
        actor(model, optimizer, objective=…, heads="heads", …).
    critic: the same for both critics. Critics that are reset need no protection.
    reset_critic: both critics begin every task with new weights.
    """

    def __init__(
        self, observations: int, actions: int, settings: Settings | None = None, *,
        actor: Callable[..., Strategy] = Naive, critic: Callable[..., Strategy] = Naive, reset_critic: bool = True,
        seed: int = 0, device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        self.settings = settings = settings or Settings()
        self.device = torch.device(device)
        self.observations, self.actions, self.seed, self.reset_critic = observations, actions, seed, reset_critic
        self.generators: dict[str, torch.Generator] = {}
        self._task = 0
        size = {"width": settings.width, "layers": settings.layers}
        policy = Actor(observations, actions, **size, generator=self.generator("actor")).to(self.device)
        twins = TwinCritic(observations, actions, **size, generator=self.generator("critic")).to(self.device)
        shared: dict[str, Any] = {
            "heads": "heads", "batch_size": settings.batch, "clip": settings.clip or None, "seed": seed,
        }  # fmt: skip
        self.actor = actor(policy, self._adam, objective=Policy(self.actor_loss, actions), **shared)
        self.critic = critic(twins, self._adam, objective=Values(self.critic_loss), **shared)
        self.target_entropy = actions * math.log(settings.target_std * math.sqrt(2 * math.pi * math.e))
        self.log_temperatures: list[Tensor] = []

    # --- a task -------------------------------------------------------------------------------------------------

    def begin(self, steps: int | None = None) -> None:
        """Begin the next task: a new replay and temperature, new critics, optimisers without memory."""
        if self.reset_critic:
            seed = derived_seed(self.seed, self.actor.current, PURPOSES.index("critic"))
            self._twins.reset(torch.Generator().manual_seed(seed))
        for learner in (self.actor, self.critic):
            learner.begin(self.actor.current, steps=steps)
        self.log_temperatures.append(torch.ones((), requires_grad=True))
        self.open_task()

    def open_task(self) -> None:
        """What a task has for itself, while the learners have begun it."""
        self._task, self.generators = self.actor.current, {}
        self.temperature_adam = self._adam([self.log_temperatures[-1]])
        self.replay = Replay(self.observations, self.actions, self.settings.replay)
        self.new_targets()

    def update(self) -> None:
        """One step for both critics, the policy and the temperature, from one batch of the replay."""
        task = self._task
        batch = to_device(self.replay.sample(self.settings.batch, self.generator("batches")), self.device)
        with self.critic.viewing(task) as critic:
            loss = self.critic_loss(critic, batch, task)
        self.critic.step(loss, batch)

        with self.actor.viewing(task) as policy:
            loss, log_likelihood = self._actor_loss(policy, batch, task)
        self.actor.step(loss, batch)

        excess = (log_likelihood.detach() + self.target_entropy).mean()
        self._step_temperature(-excess)
        with torch.no_grad():
            torch._foreach_lerp_(self._targets, self._sources, 1 - self.settings.polyak)  # Q̄ += (1 - polyak)(Q - Q̄)

    def end(self) -> None:
        """End the task: strategies that prune do so and retrain from the replay, others look at what happened."""
        packing = [learner for learner in (self.actor, self.critic) if isinstance(learner, Packing)]
        for each in packing:
            each.prune()
        if self.critic in packing:
            self.new_targets()
        for _ in range(self.settings.retrain_steps if packing else 0):
            self.update()
        for learner in (self.actor, self.critic):
            learner.end(self._shown_to(learner))

    # --- the losses ---------------------------------------------------------------------------------------------

    def critic_loss(self, critic: Model, batch: Any, task: int) -> Tensor:
        """Σ_i ½ E[(Q_i(s, a) - y)²]."""
        batch = Transitions(*batch)
        values: Tensor = critic(torch.cat([batch.observation, batch.action], 1))
        return 0.5 * (values - self.backup(batch, task)).square().mean(1).sum()

    @torch.no_grad()
    def backup(self, batch: Transitions, task: int) -> Tensor:
        """y = r + γ (1 - ended) (min Q̄(s', a') - τ log π(a'|s'))."""
        with self.actor.viewing(task) as policy:
            action, log_likelihood = squashed(policy(batch.following), self._noise(batch))
        value = (
            self.target(torch.cat([batch.following, action], 1), task).amin(0) - self.temperature(task) * log_likelihood
        )
        return torch.addcmul(batch.reward, 1 - batch.ended, value, value=self.settings.discount)

    def actor_loss(self, policy: Model, batch: Any, task: int) -> Tensor:
        """E[τ log π(a|s) - min Q(s, a)]."""
        return self._actor_loss(policy, Transitions(*batch), task)[0]

    def _actor_loss(self, policy: Model, batch: Transitions, task: int) -> tuple[Tensor, Tensor]:
        action, log_likelihood = squashed(policy(batch.observation), self._noise(batch))
        # A critic that knows the task in hand alone is asked about the observations of others too (A-GEM).
        asked = self._task if isinstance(self.critic, Naive) else task
        with _held(self._twins), self.critic.viewing(asked) as critic:
            value = critic(torch.cat([batch.observation, action], 1)).amin(0)
        return (self.temperature(task) * log_likelihood - value).mean(), log_likelihood

    def temperature(self, task: int) -> Tensor:
        """τ, that of the entropy in the reward."""
        return self.log_temperatures[task].detach().exp()

    def _step_temperature(self, gradient: Tensor) -> None:
        most = self.settings.clip or math.inf
        self.log_temperatures[self._task].grad = gradient.clamp(-most, most)
        self.temperature_adam.step()

    def new_targets(self) -> None:
        """Target networks as the critics are now."""
        self.target = copy.deepcopy(self._twins).requires_grad_(False)
        self._targets: list[Tensor] = list(self.target.parameters())
        self._sources: list[Tensor] = list(self._twins.parameters())

    # --- acting -------------------------------------------------------------------------------------------------

    def explore(self, observation: NDArray[np.float32], step: int) -> NDArray[np.float32]:
        """An action for a step of the task in hand, counted from 1: uniform at first, then drawn from the policy."""
        generator = self.generator("exploring")
        if step <= self.settings.random_steps:
            return 2 * torch.rand(self.actions, generator=generator).numpy() - 1
        return self.act(observation, self._task, generator)

    @torch.no_grad()
    def act(
        self, observation: NDArray[np.float32], task: int, generator: torch.Generator | None = None
    ) -> NDArray[np.float32]:
        """What the policy of a task does; without a generator the most likely action."""
        x = torch.from_numpy(observation)[None].to(self.device)
        with self.actor.viewing(task) as policy:
            outputs = policy(x)[0].cpu()
        noise = torch.zeros(self.actions) if generator is None else torch.randn(self.actions, generator=generator)
        return squashed(outputs, noise)[0].numpy()

    # --- parts --------------------------------------------------------------------------------------------------

    def generator(self, purpose: str) -> torch.Generator:
        """Random numbers of the task in hand, which go on from call to call."""
        if purpose not in self.generators:
            seed = derived_seed(self.seed, self._task, PURPOSES.index(purpose))
            self.generators[purpose] = torch.Generator().manual_seed(seed)
        return self.generators[purpose]

    @property
    def _twins(self) -> TwinCritic:
        assert isinstance(self.critic.model, TwinCritic)
        return self.critic.model

    def _noise(self, batch: Transitions) -> Tensor:
        return torch.randn(len(batch.reward), self.actions, generator=self.generator("noise")).to(self.device)

    def _adam(self, parameters: list[Any]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=self.settings.lr, fused=True)

    def _shown_to(self, learner: Strategy) -> Transitions:
        if isinstance(learner, Rehearsing):
            return self.replay.all()
        return self.replay.sample(min(self.settings.examples, len(self.replay)), self.generator("examples"))


@contextmanager
def _held(module: nn.Module) -> Iterator[None]:
    """No gradients for the weights of a module, which would cost as much as those that are asked for."""
    module.requires_grad_(False)
    try:
        yield
    finally:
        module.requires_grad_(True)
