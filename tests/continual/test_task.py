"""Tasks made of tensors, and the random state of a task."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from powerprop.continual import make_task
from powerprop.continual.data import drawing_from


def pair(size: int, labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return torch.arange(float(size))[:, None], torch.arange(size) % 2 if labels is None else labels


@given(size=st.integers(2, 200), seed=st.integers(0, 5))
def test_a_tenth_of_the_rows_validates(size: int, seed: int) -> None:
    task = make_task(pair(size), seed=seed)
    held, rest = (part.x[:, 0].tolist() for part in (task.validation(), task.train()))
    assert len(held) == max(1, size // 10)
    assert sorted([*held, *rest]) == list(range(size))
    assert held == sorted(held)
    assert rest == sorted(rest)
    assert task.train().y.tolist() == [row % 2 for row in rest]
    assert task.test().x[:, 0].tolist() == held
    assert make_task(pair(size), seed=seed).validation().x[:, 0].tolist() == held


def test_held_back_rows_are_not_periodic() -> None:
    rows = make_task(pair(2000)).validation().x[:, 0].long()
    assert 80 < int((rows % 2).sum()) < 120  # of 200: even and odd rows alike
    assert len(rows.diff().unique()) > 10


def test_sorted_labels_are_all_validated() -> None:
    task = make_task(pair(600, torch.arange(600) // 200))
    assert task.validation().y.unique().tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", [torch.uint8, torch.int32, torch.int64])
def test_labels_of_any_integer_kind_serve(kind: torch.dtype) -> None:
    task = make_task(pair(20, (torch.arange(20) % 3).to(kind)))
    assert task.classes == (0, 1, 2)
    assert task.train().y.dtype == torch.int64


def test_targets_of_other_kinds_have_no_classes() -> None:
    task = make_task((torch.randn(20, 3), torch.randn(20, 2)))
    assert task.classes is None
    with pytest.raises(ValueError, match="targets are not labels"):
        task.global_labels(torch.zeros(1, dtype=torch.long))


LABELS = torch.arange(4)
BAD = [
    (pair(4, LABELS + 3), None, (3, 4, 5, 6), r"'x': labels of train must be 0..3 \(classes=\(3, .*, 6\)\), got 3..6"),
    (pair(4), pair(4, LABELS), (7, 8), r"'x': labels of validation must be 0..1 \(classes=\(7, 8\)\), got 0..3"),
    (pair(4, LABELS - 1), None, None, r"'x': labels of train must be 0..2 .*, got -1..2"),
    (pair(4, LABELS.float()), None, (0, 1), r"'x': classes are of labels, .*, but train has torch.float32 \(4,\)"),
    (pair(4, torch.eye(4).long()), None, (0, 1), r"'x': classes are of labels, .*, but train has torch.int64 \(4, 4\)"),
    (pair(4), pair(0), None, "'x': validation has no inputs"),
    (pair(1), None, None, "'x': expected two or more inputs to hold some back for validation, got 1"),
    (pair(4), pair(4, LABELS[:3]), None, "'x': validation: expected as many labels as inputs, got 4 and 3"),
]  # fmt: skip


@pytest.mark.parametrize(("train", "validation", "classes", "message"), BAD)
def test_bad_tasks(
    train: tuple[Tensor, Tensor], validation: tuple[Tensor, Tensor] | None, classes: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=f"task {message}"):
        make_task(train, validation, name="x", classes=classes)


def test_bad_test_data() -> None:
    with pytest.raises(ValueError, match="task 'task 4': test has no inputs"):
        make_task(pair(4), test=pair(0), index=4)


def test_drawing_from_a_seed_leaves_every_generator_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    before = torch.get_rng_state()
    with drawing_from(7, torch.device("cpu")):
        drawn = torch.rand(5)
    assert torch.equal(drawn, torch.rand(5, generator=torch.Generator().manual_seed(7)))
    assert torch.equal(torch.get_rng_state(), before)
    assert not seeded


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_drawing_from_a_seed_on_a_gpu() -> None:
    device = torch.device("cuda")
    before = torch.cuda.get_rng_state_all()
    with drawing_from(7, device):
        drawn = torch.rand(5, device=device)
    assert torch.equal(drawn, torch.rand(5, device=device, generator=torch.Generator(device).manual_seed(7)))
    assert all(torch.equal(*pair) for pair in zip(before, torch.cuda.get_rng_state_all(), strict=True))
