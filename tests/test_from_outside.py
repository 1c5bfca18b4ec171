"""Methods from outside the package: they keep the contracts, and stand in tables and reports beside the others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import powerprop as pp
import sparse
import strategies
from continual import test_strategy_contract as strategy_contract
from powerprop.continual import STRATEGIES, Strategy
from powerprop.sparsify import SET
from powerprop.sparsify.calibrated import CRITERIA
from powerprop_paper.experiments.baselines.strategies import EXPERIMENTS as LEARNING
from powerprop_paper.experiments.sparse import EXPERIMENTS as TRAINING
from powerprop_paper.report.style import AZURE, VIOLET, Look, method_look
from powerprop_paper.run import Experiment
from powerprop_paper.sparse_methods import METHODS, SPARSIFIERS, add
from runs import PRESET, digits, run_smoke, table
from sparsify import test_sparsify_contract as sparsify_contract


@pytest.fixture(autouse=True)
def _small_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("powerprop_paper.data.load", digits)


def shown(experiment: Experiment, title: str, folder: Path, **settings: Any) -> list[str]:
    """The first column of a table of this experiment, whose report shows them all."""
    config = replace(experiment.presets[PRESET], seeds=1, **settings)
    summary = run_smoke(replace(experiment, presets={PRESET: config}), folder := folder / "run")
    names = [next(iter(row.values())) for row in table(summary, title)]
    report = (folder / "report.html").read_text(encoding="utf-8")
    assert all(name in report for name in names)
    return names


@dataclass(eq=False)
class Leftmost(SET):
    """SET that grows the first weights of each layer."""

    label: ClassVar[str] = "Leftmost"
    look: ClassVar[tuple[str, str]] = ("violet", "*")

    def growth(self, optimizer: pp.Powerprop, name: str) -> Tensor:
        param = optimizer.masters[name].param
        return torch.arange(param.numel(), 0, -1, dtype=param.dtype).view_as(param)


def test_a_sparsifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sparse.METHODS, "leftmost", lambda **k: Leftmost(**{"interval": 7, **k}))
    for alpha in (1.0, 2.0):
        sparsify_contract.test_asked_sparsity_and_exact_zeros("leftmost", alpha)
        sparsify_contract.test_resume_is_bit_identical("leftmost", alpha)
    for rows, name in ((SPARSIFIERS, "leftmost"), (METHODS, "leftmost"), (METHODS, "pp-leftmost")):
        monkeypatch.setitem(rows, name, None)  # gone afterwards
    add(Leftmost)
    methods = ("dense", "leftmost", "pp-leftmost")
    names = shown(
        TRAINING["sparse-training"], "Test accuracy", tmp_path, methods=methods, extended=(), cycles=(), steps=10
    )
    assert names == ["Dense", "Leftmost", "Powerprop + Leftmost"]
    assert method_look(names[-1]) == Look(VIOLET, "*")


class Decay(Strategy):
    """Let every task pull the weights of the one before a little towards zero: λ Σ |θ|."""

    look: ClassVar[tuple[str, str]] = ("azure", "*")

    def __init__(self, model: nn.Module, optimizer: Any, *, strength: float = 1e-4, **options: Any) -> None:
        super().__init__(model, optimizer, **options)
        self.strength = strength

    def penalty(self) -> Tensor:
        return self.strength * torch.stack([p.abs().sum() for p in self.model.parameters()]).sum()


def test_a_strategy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(strategies.STRATEGIES, "decay", strategies.Row(Decay, {"strength": 1e-3}))
    monkeypatch.setitem(STRATEGIES, "Decay", Decay)
    strategy_contract.test_a_loop_of_ones_own_is_the_same_to_the_bit("decay", "regression")
    strategy_contract.test_learns_two_tasks("decay", "classification")
    strategy_contract.test_saved_after_a_task_it_goes_on_to_the_bit("decay", "classification", tmp_path)
    names = shown(
        LEARNING["permuted-mnist-strategies"],
        "permuted-mnist, all tasks",
        tmp_path,
        strategies=("Naive", "Decay"),
        powerprop=("Decay",),
        scenarios=("domain-incremental",),
    )
    assert names == ["Naive", "Decay", "Powerprop + Decay"]
    assert method_look(names[-1]) == Look(AZURE, "*")


def test_a_criterion(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of the inputs that are largest on average, whatever they are themselves."""

    def choose(weight: Tensor, sums: Tensor, keep: int, pattern: str | None) -> tuple[Tensor, Tensor]:
        mask = torch.zeros_like(weight, dtype=torch.bool)
        mask[:, sums.argsort(descending=True, stable=True)[: keep // len(weight)]] = True
        return mask, weight

    monkeypatch.setitem(CRITERIA, "loud", (lambda x: x.abs().sum(0), choose))
    net = nn.Sequential(nn.Linear(4, 3))
    masks = pp.prune(net, 0.5, criterion="loud", data=[torch.tensor([[0.1, 3.0, -2.0, 0.2]])])
    assert masks["0.weight"].tolist() == [[False, True, True, False]] * 3
    assert pp.sparsity(net).total == 0.5
    with pytest.raises(ValueError, match="criterion='loud' needs batches of data, got data=None"):
        pp.prune(net, 0.5, criterion="loud")
