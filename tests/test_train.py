"""The training loop: what it computes, what it writes, and that it resumes bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from powerprop import Powerprop, Static
from powerprop_paper.train import (
    CheckpointError,
    MetricsLog,
    NonFiniteError,
    evaluate,
    fit,
    load_checkpoint,
    read_metrics,
    save_checkpoint,
)
from powerprop_paper.train.precision import Precision


class RandomBatches:
    """Batches drawn with a generator from a fixed set; raises at step `stop_at`, as a kill would."""

    def __init__(self, stop_at: int | None = None) -> None:
        maker = torch.Generator().manual_seed(1)
        self.x = torch.randn(64, 5, generator=maker)
        self.y = torch.randint(3, (64,), generator=maker)
        self.generator = torch.Generator().manual_seed(2)
        self.drawn, self.stop_at = 0, stop_at

    def __next__(self) -> tuple[Tensor, Tensor]:
        self.drawn += 1
        if self.drawn == self.stop_at:
            raise KeyboardInterrupt
        rows = torch.randint(64, (8,), generator=self.generator)
        return self.x[rows], self.y[rows]

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state(), "drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.drawn = state["drawn"]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.BatchNorm1d(7), nn.Dropout(0.2), nn.Linear(7, 3))


def train(folder: Path, stop_at: int | None = None, make: Any = torch.optim.SGD, **options: Any) -> nn.Module:
    model = net()
    optimizer = make(model.parameters(), lr=0.1, **({"momentum": 0.9} if make is torch.optim.SGD else {}))
    with MetricsLog(folder / "metrics.jsonl") as log:
        fit(
            model,
            optimizer,
            RandomBatches(stop_at),
            53,
            checkpoint=folder / "checkpoint.pt",
            checkpoint_every=10,
            log=log,
            log_every=7,
            schedule=lambda step: 1 - step / 53,
            evaluate=lambda model: {"accuracy": evaluate(model, RandomBatches().x, RandomBatches().y).accuracy},
            eval_every=20,
            **options,
        )
    return model


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("stop_at", [3, 10, 11, 29, 53])
def test_a_stopped_run_ends_in_the_same_bits(tmp_path: Path, make: Any, stop_at: int) -> None:
    whole = train(tmp_path / "whole", make=make)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "parts", stop_at, make=make)
    resumed = train(tmp_path / "parts", make=make)
    for (name, a), b in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert (tmp_path / "whole/metrics.jsonl").read_bytes() == (tmp_path / "parts/metrics.jsonl").read_bytes()


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    first = train(tmp_path)
    again = train(tmp_path, stop_at=1)  # would raise at the first batch
    assert torch.equal(first[0].weight, again[0].weight)


def test_metrics_are_the_mean_loss_of_each_interval(tmp_path: Path) -> None:
    losses: list[float] = []

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        losses.append(nn.functional.cross_entropy(logits, labels).item())
        return nn.functional.cross_entropy(logits, labels)

    train(tmp_path, loss=loss)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [7, 14, 20, 21, 28, 35, 40, 42, 49, 53]
    assert rows[0]["loss"] == pytest.approx(sum(losses[:7]) / 7)
    assert rows[-1]["loss"] == pytest.approx(sum(losses[49:53]) / 4)
    assert [row["step"] for row in rows if "accuracy" in row] == [20, 40, 53]


class Rates(torch.optim.SGD):
    """Notes the learning rates of every step."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.seen: list[list[float]] = []

    def step(self, closure: Any = None) -> Any:
        self.seen.append([group["lr"] for group in self.param_groups])
        return super().step(closure)


def two_rates() -> tuple[nn.Module, Rates]:
    model = nn.Linear(5, 3)
    return model, Rates([{"params": [model.weight], "lr": 0.5}, {"params": [model.bias], "lr": 2.0}], lr=1.0)


def falling(step: int) -> float:
    return 1 / (1 + step)


FELL = [[0.5, 2.0], [0.5 / 2, 2.0 / 2], [0.5 / 3, 2.0 / 3]]


@pytest.mark.parametrize("name", ["float32", "float16"])
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_are_clipped_to_the_norm_asked(name: str, masked: bool) -> None:
    """One step of SGD at a rate of 1 is as long as the norm; of the weights that masks let move, if there are any."""
    model = nn.Sequential(nn.Linear(5, 3))
    base = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = Powerprop(base, model, 1.0, sparsify=Static(0.5)) if masked else base
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    fit(model, optimizer, RandomBatches(), 1, clip=1e-3, precision=Precision(name))
    moved = [(p.detach() - before[n]).flatten() for n, p in model.named_parameters()]
    assert torch.cat(moved).norm().item() == pytest.approx(1e-3, rel=1e-3)


def test_a_second_training_has_the_same_rates_again() -> None:
    model, optimizer = two_rates()
    fit(model, optimizer, RandomBatches(), 3, schedule=falling)
    with pytest.raises(KeyboardInterrupt):
        fit(model, optimizer, RandomBatches(stop_at=3), 3, schedule=falling)
    fit(model, optimizer, RandomBatches(), 3, schedule=falling)
    assert optimizer.seen == [pytest.approx(rates) for rates in [*FELL, *FELL[:2], *FELL]]


def test_rates_changed_between_two_trainings_count() -> None:
    model, optimizer = two_rates()
    fit(model, optimizer, RandomBatches(), 3, schedule=falling)
    optimizer.param_groups[1]["lr"] = 4.0
    fit(model, optimizer, RandomBatches(), 2, schedule=falling)
    assert optimizer.seen[3:] == [pytest.approx(rates) for rates in ([0.5, 4.0], [0.25, 2.0])]


def test_a_checkpoint_does_not_bring_its_fallen_rates_along(tmp_path: Path) -> None:
    model, optimizer = two_rates()
    fit(model, optimizer, RandomBatches(), 3, schedule=falling, checkpoint=tmp_path / "c.pt")
    model, optimizer = two_rates()
    fit(model, optimizer, RandomBatches(), 3, schedule=falling, checkpoint=tmp_path / "c.pt")
    assert optimizer.seen == []
    fit(model, optimizer, RandomBatches(), 3, schedule=falling)
    assert optimizer.seen == [pytest.approx(rates) for rates in FELL]


def test_without_a_schedule_rates_are_left_alone() -> None:
    model, optimizer = two_rates()
    fit(model, optimizer, RandomBatches(), 1, evaluate=lambda _: optimizer.param_groups[0].update(lr=9.0) or {})
    assert [group["lr"] for group in optimizer.param_groups] == [9.0, 2.0]


def test_progress_sees_the_latest_values() -> None:
    model, seen = net(), []
    fit(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        RandomBatches(),
        4,
        log_every=2,
        evaluate=lambda model: {"accuracy": 0.5},
        progress=lambda step, values: seen.append((step, set(values))),
    )
    assert seen == [(2, {"loss"}), (4, {"loss", "accuracy"})]


def test_nan_is_an_error_and_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    calls = 0

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        value = nn.functional.cross_entropy(logits, labels)
        return value * torch.nan if calls == 15 else value

    model, file = net(), tmp_path / "c.pt"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(NonFiniteError, match=r"the loss is nan at step 20 \(or up to 5 steps before\)"):
        fit(model, optimizer, RandomBatches(), 50, loss=loss, checkpoint=file, checkpoint_every=10, log_every=14)
    state = load_checkpoint(file)
    assert state["step"] == 10
    assert all(torch.isfinite(value).all() for value in state["model"].values())


def test_non_finite_weights_are_not_saved(tmp_path: Path) -> None:
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=float("inf"))
    with pytest.raises(NonFiniteError, match="weight has NaN or infinite values after step 1"):
        fit(model, optimizer, RandomBatches(), 9, checkpoint=tmp_path / "c.pt", checkpoint_every=1)
    assert not (tmp_path / "c.pt").exists()


ODD = [{name: 0} for name in ("steps", "log_every", "checkpoint_every")]
ODD += [{"clip": clip} for clip in (0.0, -1.0, float("nan"), float("inf"))]


@pytest.mark.parametrize("option", ODD, ids=str)
def test_odd_counts_and_norms_are_refused(option: dict[str, Any]) -> None:
    [(name, value)] = option.items()
    wanted = "positive and finite, or None" if name == "clip" else "at least 1"
    with pytest.raises(ValueError, match=f"{name} must be {wanted}, got {value}"):
        fit(*two_rates(), RandomBatches(), **{"steps": 3, **option})


def test_fewer_steps_than_the_checkpoint_is_an_error(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fit(model, optimizer, RandomBatches(), 5, checkpoint=tmp_path / "c.pt")
    with pytest.raises(CheckpointError, match=r"c\.pt was made at step 5, after the 3 steps asked for"):
        fit(model, optimizer, RandomBatches(), 3, checkpoint=tmp_path / "c.pt")


@pytest.mark.parametrize("name", ["model", "log_checksum", "random"])
def test_a_checkpoint_that_lacks_a_part_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, stop_at=15)
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, {part: value for part, value in load_checkpoint(path).items() if part != name})
    with pytest.raises(CheckpointError, match=rf"checkpoint\.pt is not a checkpoint of fit: it has no {name}; delete "):
        train(tmp_path)


def test_a_failing_save_keeps_the_old_file(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c.pt", {"step": 1})
    with pytest.raises(AttributeError):
        save_checkpoint(tmp_path / "c.pt", {"step": lambda: 2})
    assert load_checkpoint(tmp_path / "c.pt") == {"step": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["c.pt"]


def test_a_log_that_was_cut_short_is_an_error(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "m.jsonl") as log:
        log.write(1, loss=2.0)
        with pytest.raises(ValueError, match=r"m.jsonl has 25 bytes, but its checkpoint was made at 40"):
            log.rewind(40)


@pytest.mark.parametrize("asked", [True, None])
def test_tensorboard_gets_the_same_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: bool | None) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.setenv("POWERPROP_TENSORBOARD", "1")
    with MetricsLog(tmp_path / "m.jsonl", tensorboard=asked) as log:
        log.write(1, loss=2.0)
    assert json.loads((tmp_path / "m.jsonl").read_text()) == {"step": 1, "loss": 2.0}
    assert list((tmp_path / "tensorboard").glob("events.*"))


def test_evaluate_by_hand() -> None:
    model = nn.Sequential(nn.Dropout(0.9), nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        model[1].weight.copy_(torch.eye(2))
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 1.0]])
    score = evaluate(model, x, torch.tensor([0, 1, 1]), batch=2)
    assert score.accuracy == pytest.approx(2 / 3)
    expected = [0.3132617, 0.3132617, 1.3132617]  # log(1 + e^-1) twice, log(1 + e)
    assert score.loss == pytest.approx(sum(expected) / 3, rel=1e-6)
    assert model.training


def test_evaluate_leaves_frozen_layers_frozen() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.1), nn.Linear(2, 2))
    model[0].eval()
    evaluate(model, torch.zeros(3, 2), torch.zeros(3, dtype=torch.long))
    assert [module.training for module in model] == [False, True, True]


def test_evaluate_refuses_sets_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="got 3 inputs and 2 labels"):
        evaluate(nn.Linear(1, 2), torch.zeros(3, 1), torch.zeros(2, dtype=torch.long))
