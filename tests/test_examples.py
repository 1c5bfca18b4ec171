"""The examples in the docstrings of public names run, and say what they say."""

from __future__ import annotations

import doctest
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import powerprop as pp
from powerprop import continual, export

PUBLIC = {f"{m.__name__}.{n}": getattr(m, n) for m in (pp, export, continual) for n in m.__all__}
WITH_EXAMPLES = {name: each for name, each in PUBLIC.items() if ">>>" in (inspect.getdoc(each) or "")}


def world() -> dict[str, Any]:
    """What the examples take as given."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    x, y = torch.rand(128, 20), torch.arange(128) % 4
    return {
        "torch": torch, "pp": pp, "continual": continual, "model": model, "x": x, "y": y,
        "base": torch.optim.SGD(model.parameters(), lr=0.1), "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
        "batches": [(x[:64], y[:64]), (x[64:], y[64:])], "tasks": [(x, y), (x.flip(1), y)],
    }  # fmt: skip


# torch's own exporters still make a class that torch has deprecated.
@pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_of_docstrings_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    example = doctest.DocTestParser().get_doctest(inspect.getdoc(WITH_EXAMPLES[name]) or "", world(), name, None, 0)
    said: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=said.append)
    assert not said, "".join(said)


def test_what_is_called_has_an_example() -> None:
    """All that users call themselves; the rest is what they are given."""
    given = {"Choice", "Exported", "Sizes", "Prediction", "Task", "Source", "Objective", "Packing", "Rehearsal"}
    given |= {"Stateful", "Subnetworks", "TaskMasks", "BoundaryFinder", "RtF", "Elbo", "MultiLabel", "OneVsRest"}
    given |= {"Regression", "entropy_gradient", "infer", "GRID", "INFERENCES", "SCENARIOS", "STRATEGIES", "Scenario"}
    names = {name for name, each in PUBLIC.items() if not isinstance(each, ModuleType)}
    assert {name.rpartition(".")[2] for name in names - set(WITH_EXAMPLES)} <= given
