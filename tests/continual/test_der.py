"""Memories that are filled with every step: an online reservoir for ER, and dark experience replay."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from powerprop.continual import DER, ER, DERpp
from strategies import make, network, tensors


def batches(task: int) -> list[Any]:
    x, y = tensors("classification", task)
    return list(zip(x.split(16), y.split(16), strict=True))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


@pytest.mark.parametrize("kind", [DER, DERpp])
def test_every_step_is_that_of_the_equation(kind: type[DER]) -> None:
    """Against a loop by hand that draws the same examples."""
    ours = kind(network(3), sgd, memory=24, rehearsed=10, batch_size=16, strength=0.7)
    plain = copy.deepcopy(ours.model).train()
    other = sgd(plain.parameters())
    for task in range(2):
        ours.begin()
        for x, y in batches(task):
            buffer, draw = ours.buffer, torch.Generator()
            loss = F.cross_entropy(plain(x), y)
            if len(buffer):
                draw.set_state(ours.generator("rehearsed").get_state())
                rows = buffer.draw(10, draw)
                (z,) = buffer.beside(rows)
                loss = loss + 0.7 * (plain(buffer.batch(rows)[0]) - z).square().mean()
            if len(buffer) and kind is DERpp:
                bx, by = buffer.batch(buffer.draw(10, draw))
                loss = loss + 0.5 * F.cross_entropy(plain(bx), by)
            answered = plain(x).detach()
            other.zero_grad()
            loss.backward()
            other.step()
            seen = buffer.seen
            ours.step(F.cross_entropy(ours.model(x), y), (x, y))
            assert ours.buffer.seen == seen + 16
            found = (ours.buffer.beside(torch.arange(len(ours.buffer)))[0][:, None] - answered).abs().amax(2).amin(1)
            assert (found < 1e-6).any()  # what it answered before the step is what is kept
            pairs = zip(ours.model.parameters(), plain.parameters(), strict=True)
            assert all(torch.allclose(p, q, atol=1e-6) for p, q in pairs)
        ours.end()
    assert len(ours.buffer) == 24


def test_every_example_of_an_online_stream_is_kept_as_often() -> None:
    counts = torch.zeros(128)
    for seed in range(60):
        ours = make("er-online", seed=seed, memory=32)
        for task in range(2):
            ours.begin()
            for i, (x, y) in enumerate(batches(task)):
                marked = x.clone()
                marked[:, 0] = torch.arange(64 * task + 16 * i, 64 * task + 16 * i + 16)
                ours.step(F.cross_entropy(ours.model(x), y), (marked, y))
            ours.end()
        kept = ours.buffer.columns[0][:, 0].long()  # type: ignore[attr-defined]
        assert len(set(kept.tolist())) == 32
        assert torch.equal(ours.buffer.tasks, kept // 64)  # type: ignore[attr-defined]
        counts[kept] += 1
    assert counts.sum() == 60 * 32
    parts = counts.view(4, 32).sum(1) / (60 * 32)
    assert torch.allclose(parts, torch.full((4,), 0.25), atol=0.04)


def test_the_task_in_hand_is_rehearsed_online() -> None:
    ours = ER(network(3), sgd, memory=50, fill="step", batch_size=16)
    ours.begin()
    for x, y in batches(0):
        ours.step(F.cross_entropy(ours.model(x), y), (x, y))
    assert len(ours.buffer) == 50
    assert ours.now is not None
    ours.now.batch = batches(0)[0]
    found = ours.rehearse()
    assert found is not None
    assert [each.weight for each in found] == [0.5]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="fill must be 'end' or 'step', got 'always'"):
        make("er", fill="always")
    for name, option in (("der", "strength"), ("der++", "labels_strength")):
        with pytest.raises(ValueError, match=f"{option} must be at least 0, got -1"):
            make(name, **{option: -1})
