"""The experiments on where powers diverge, on rules that choose α, and on rates scaled by hand."""

from pathlib import Path

import pytest
import torch

import powerprop as pp
import runs
import standin
from nets import net, train
from powerprop_paper import data
from powerprop_paper.experiments import by_hand, choosing, stability
from powerprop_paper.experiments.choosing import Hypergradient, choose, parse, share
from powerprop_paper.run import Rows


def row(network: str = "LeNet", **values: object) -> Rows:
    return runs.rows_of([{"network": network, "test": 0.9, "pruned": 0.5, **values}])


def test_what_counts_as_learned() -> None:
    assert stability.learned(row(), "LeNet")
    assert not stability.learned(row(test=0.11), "LeNet")
    assert stability.learned(row(test=2.1), "GPT")
    assert not stability.learned(row(test=3.3), "GPT")
    assert not stability.learned(row(diverged="the loss is nan"), "LeNet")
    assert stability.said(row(), "LeNet") == "90.0 (50)"
    assert stability.said(row(test=0.1), "LeNet") == "10.0 (50), learns nothing"
    assert stability.said(row(diverged="the loss is nan"), "LeNet") == "diverged"


def test_muon_has_the_matrices_and_adamw_the_rest() -> None:
    model = net()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, pp.Powerprop(stability.base_of(model, "Muon", 0.01), model, 2.0), 3)
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_the_share_of_the_largest_tenth() -> None:
    weight = torch.ones(2, 10)
    assert share(weight) == pytest.approx(0.1)
    weight[0, 0] = weight[1, 3] = 9.0
    assert share(weight) == pytest.approx(162 / 180)


@pytest.mark.parametrize(
    ("rule", "first", "last"), [("fixed 2", 2.0, 2.0), ("rising 3", 1.0, 3.0), ("falling 3", 3.0, 1.0)]
)
def test_lines_of_powers(rule: str, first: float, last: float) -> None:
    model = net()
    base = torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1)
    optimizer = pp.Powerprop(base, model)
    choice = choose(optimizer, *parse(rule), 10)
    found = []
    for _ in range(11):
        train(model, optimizer, 1)
        found.append(choice.groups[0]["alpha"])
    assert (found[0], found[-1]) == pytest.approx((first, last))


def test_the_hypergradient_is_that_of_the_rule() -> None:
    """∂Δ/∂α by finite differences of the matched update, from the same weights and proposals."""
    draw = torch.Generator().manual_seed(0)
    before, gradient = torch.randn(20, 30, generator=draw), torch.randn(20, 30, generator=draw)

    def moved(alpha: float) -> tuple[torch.Tensor, Hypergradient]:
        layer = torch.nn.Linear(30, 20, bias=False)
        layer.weight.data.copy_(before)
        optimizer = pp.Powerprop(torch.optim.SGD([{"params": [layer.weight]}], lr=1e-4), layer)
        choice = Hypergradient(optimizer, 0.0)
        choice.groups[0]["alpha"] = alpha
        layer.weight.grad = gradient.clone()
        optimizer.step()
        return layer.weight.detach().double() - before, choice

    wanted = (moved(1.51)[0] - moved(1.49)[0]) / 0.02
    found = moved(1.5)[1].turned[0].double() * 2 / 1.5**2
    assert torch.cosine_similarity(wanted.flatten(), found.flatten(), dim=0) > 0.99


def test_a_rule_that_is_none_is_an_error() -> None:
    with pytest.raises(ValueError, match="a rule must be one of fixed, rising, falling, share, hypergradient and a nu"):
        choosing.Config(rules=("fixed 2", "cleverly 3"))
    with pytest.raises(ValueError, match="rules must have 'fixed 2' among them, got"):
        choosing.Config(rules=("fixed 3",))


def test_smoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "load", standin.load)
    text = data.Text("made up", torch.randint(65, (60_000,), generator=torch.Generator().manual_seed(0)), None)
    monkeypatch.setattr(data, "load_text", lambda *_: text)
    summary = runs.run_smoke(stability.EXPERIMENTS["rate-stability"], tmp_path / "stability")
    rows = runs.table(summary, "LeNet: dense")
    assert [each["optimiser"] for each in rows] == ["SGD", "SGD"]
    summary = runs.run_smoke(by_hand.EXPERIMENTS["rate"], tmp_path / "by hand")
    rows = runs.table(summary, "split-mnist")
    assert [each["0"] for each in rows] == list(by_hand.WAYS.values())
    assert all(each["accuracy"]["n"] == 1 for each in rows)
    summary = runs.run_smoke(choosing.EXPERIMENTS["choosing-alpha"], tmp_path / "choosing")
    rows = runs.table(summary, "GPT: nats")
    assert [each["rule"] for each in rows] == list(choosing.PRESETS["smoke"].rules)
    assert all(each["dense"]["n"] == 2 for each in rows)
