"""The data of a task: what a loader yields is what methods see, in training and when a task ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from powerprop.continual import Source
from strategies import STRATEGIES, loss_of, make, same_bits, state, tensors

pytestmark = pytest.mark.filterwarnings("ignore:.*for the tasks to come", "ignore:.*sub-network")
OWN = 20
"""The first rows of the data are the task's own; the others are of another one."""


def data() -> TensorDataset:
    x, y = tensors("classification", 0, 100)
    x[OWN:] += 100
    return TensorDataset(x, y)


def source(loader: Any) -> Source:
    return Source(loader, 8, torch.Generator, torch.device("cpu"))


SAMPLED: dict[str, dict[str, Any]] = {
    "sampler": {"batch_size": 8, "sampler": SubsetRandomSampler(range(OWN))},
    "batch sampler": {"batch_sampler": BatchSampler(SubsetRandomSampler(range(OWN)), 8, drop_last=False)},
    "batches": {"batch_sampler": [list(range(8)), list(range(8, OWN))]},
    "one by one": {"batch_size": None, "sampler": BatchSampler(SequentialSampler(range(OWN)), 5, False)},
}


@pytest.mark.parametrize("kind", SAMPLED)
def test_a_loader_is_gone_through_as_it_was_given(kind: str) -> None:
    seen = torch.cat([x for x, _ in source(DataLoader(data(), **SAMPLED[kind])).in_order()])
    assert len(seen) == OWN
    assert seen.max() <= 1


def test_replacement_weights_and_dropped_rests_count_too() -> None:
    twice = RandomSampler(range(OWN), replacement=True, num_samples=70, generator=torch.Generator().manual_seed(0))
    weights = WeightedRandomSampler([1.0] * OWN + [0.0] * 80, 30)
    for sampler, count in ((twice, 70), (weights, 30)):
        seen = torch.cat([x for x, _ in source(DataLoader(data(), 8, sampler=sampler)).in_order()])
        assert len(seen) == count
        assert seen.max() <= 1
    assert len(list(source(DataLoader(data(), 8, drop_last=True)).in_order())) == 12


@pytest.mark.parametrize("how", ["learn", "end"])
@pytest.mark.parametrize("name", [n for n in STRATEGIES if n not in ("dgr", "rtf")])  # these take pixels in [0, 1]
def test_no_example_that_a_sampler_leaves_out_is_learned_from(name: str, how: str) -> None:
    """Where the other rows are, only numbers that are none: whatever looks at them would show it."""
    spoiled = TensorDataset(*(t.clone() for t in data().tensors))
    spoiled.tensors[0][OWN:] = torch.nan

    def loader(of: TensorDataset) -> DataLoader:
        shuffle = torch.Generator().manual_seed(1)
        return DataLoader(of, 8, sampler=SubsetRandomSampler(range(OWN), generator=shuffle))

    learners = []
    for of in (data(), spoiled):
        ours, batches = make(name), loader(of)
        if how == "learn":
            ours.learn(batches, epochs=2)
        else:
            ours.begin(steps=3)
            for batch in batches:
                ours.step(loss_of(ours, batch), batch)
            ours.end(batches)
        learners.append(ours)
    assert same_bits(*(state(each) for each in learners))
    for part in learners[1].parts.values():
        assert not any(t.isnan().any() for t in part.state()[0].values() if t.is_floating_point())


def test_the_memory_holds_what_was_sampled() -> None:
    ours = make("er", memory=None)
    ours.learn(DataLoader(data(), 8, sampler=SubsetRandomSampler(range(OWN))), epochs=1)
    assert len(ours.parts["memory"]) == OWN  # type: ignore[arg-type]


def test_the_global_generator_shuffles_alike_in_every_run() -> None:
    """A loader that shuffles draws from it; `learn` and `end` give it a seed of the task, and put its state back."""
    first, second = make("er"), make("er")
    for ours in (first, second):
        torch.manual_seed(id(ours) % 1000)
        before = torch.get_rng_state()
        ours.learn(DataLoader(data(), 8, shuffle=True), epochs=1)
        assert torch.equal(before, torch.get_rng_state())
    assert same_bits(state(first), state(second))
    assert same_bits(*(each.parts["memory"].state()[0] for each in (first, second)))
