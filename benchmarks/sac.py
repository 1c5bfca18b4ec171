"""Updates of soft actor-critic a second, against a straightforward one: the same networks, sizes and losses.

The straightforward one has two critics one after the other, plain Adam, a loop over target weights, and gradients for
the critics in the policy's loss too. Short loops in turn, the best of many, one thread.
"""

from __future__ import annotations

import copy
import math
from functools import partial

import numpy as np
import torch
from torch import nn

from powerprop.continual import EfficientPackNet
from powerprop_paper.rl import SAC, Settings
from powerprop_paper.rl.networks import squashed
from timing import best_times

OBSERVATIONS, ACTIONS, ROWS = 39, 4, 5000
UPDATES, ROUNDS = 5, 30


def main() -> None:
    torch.set_num_threads(1)
    agents = {
        "here, actor and both critics": agent(),
        "here, Powerprop + EfficientPackNet": agent(partial(EfficientPackNet, alpha=1.5, gamma=None, grid=(0.1,))),
        "straightforward": Straightforward(),
    }
    found = best_times({name: each.update for name, each in agents.items()}, ROUNDS, UPDATES)
    slow = found["straightforward"]
    for name, seconds in found.items():
        print(f"{name:36}{1 / seconds:7.1f} updates/s  {slow / seconds:5.2f}x")


def agent(actor: object = None) -> SAC:
    options = {} if actor is None else {"actor": actor}
    made = SAC(OBSERVATIONS, ACTIONS, Settings(), **options)  # type: ignore[arg-type]
    made.begin()
    fill(made)
    return made


def fill(made: SAC) -> None:
    draw = np.random.default_rng(0)
    for _ in range(ROWS):
        before, after = draw.normal(size=(2, OBSERVATIONS)).astype(np.float32)
        made.replay.add(before, draw.uniform(-1, 1, ACTIONS).astype(np.float32), draw.uniform(0, 10), after, False)


class Net(nn.Module):
    """Four layers of 256, the first with layer norm and tanh."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        hidden = [part for _ in range(3) for part in (nn.Linear(256, 256), nn.LeakyReLU(0.2))]
        self.layers = nn.Sequential(
            nn.Linear(inputs, 256), nn.LayerNorm(256), nn.Tanh(), *hidden, nn.Linear(256, outputs)
        )

    def forward(self, *x: torch.Tensor) -> torch.Tensor:
        return self.layers(torch.cat(x, -1))


class Straightforward:
    """Soft actor-critic as most write it."""

    def __init__(self) -> None:
        self.source = agent()
        self.actor = Net(OBSERVATIONS, 2 * ACTIONS)
        self.critics = nn.ModuleList([Net(OBSERVATIONS + ACTIONS, 1) for _ in range(2)])
        self.targets = copy.deepcopy(self.critics)
        self.log_temperature = torch.ones((), requires_grad=True)
        parameters = (self.actor.parameters(), self.critics.parameters(), [self.log_temperature])
        self.adams = [torch.optim.Adam(each, lr=1e-3) for each in parameters]
        self.target_entropy = ACTIONS * math.log(0.089 * math.sqrt(2 * math.pi * math.e))

    def update(self) -> None:
        batch = self.source.replay.sample(128, self.source.generator("batches"))
        temperature = self.log_temperature.detach().exp()
        with torch.no_grad():
            action, likelihood = squashed(self.actor(batch.following), torch.randn(128, ACTIONS))
            values = [target(batch.following, action)[:, 0] for target in self.targets]
            backup = batch.reward + 0.99 * (1 - batch.ended) * (torch.minimum(*values) - temperature * likelihood)
        both = [critic(batch.observation, batch.action)[:, 0] for critic in self.critics]
        self.step(1, sum(0.5 * (q - backup).square().mean() for q in both), self.critics)
        action, likelihood = squashed(self.actor(batch.observation), torch.randn(128, ACTIONS))
        values = [critic(batch.observation, action)[:, 0] for critic in self.critics]
        self.step(0, (temperature * likelihood - torch.minimum(*values)).mean(), self.actor)
        self.adams[2].zero_grad()
        (-self.log_temperature * (likelihood.detach() + self.target_entropy).mean()).backward()
        self.adams[2].step()
        with torch.no_grad():
            for target, own in zip(self.targets.parameters(), self.critics.parameters(), strict=True):
                target.mul_(0.995).add_(own, alpha=0.005)

    def step(self, which: int, loss: torch.Tensor, net: nn.Module) -> None:
        self.adams[which].zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
        self.adams[which].step()


if __name__ == "__main__":
    main()
