"""Language models: text as numbers, the transformer, and the experiments with it at smoke scale."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from powerprop.select import select
from powerprop_paper import models
from powerprop_paper.data import DataCorrupt, DataNotFound, Windows, load_text
from powerprop_paper.experiments import language
from powerprop_paper.experiments.language import LanguageSettings, oneshot, sparse, texts
from powerprop_paper.models.gpt import continued
from powerprop_paper.run import Experiment, Row, Rows, RunError
from runs import run_smoke, table

# --- text ---------------------------------------------------------------------------------------------------------


def test_characters_and_bytes(tmp_path: Path) -> None:
    file = tmp_path / "own.txt"
    file.write_text("naïve", encoding="utf-8")
    text = load_text(str(file))
    assert (text.name, text.symbols, text.ids.tolist()) == ("own.txt", "aenvï", [2, 0, 4, 3, 1])
    assert text.decode(text.ids) == "naïve"
    raw = load_text(str(file), "bytes")
    assert (raw.kinds, raw.ids.tolist()) == (256, list("naïve".encode()))
    assert raw.decode(raw.ids[:3]) == "na\N{REPLACEMENT CHARACTER}"


def test_parts_follow_one_another(tmp_path: Path) -> None:
    file = tmp_path / "own.txt"
    file.write_text("0123456789" * 10)
    text = load_text(str(file))
    train, held_back, tested = text.parts(0.05, 0.1)
    assert [len(train), len(held_back), len(tested)] == [85, 5, 10]
    assert text.decode(torch.cat([train, held_back, tested])) == "0123456789" * 10


def test_what_is_no_text(tmp_path: Path, no_data_places: None) -> None:
    with pytest.raises(DataNotFound, match="name a file that exists, or 'tinyshakespeare'"):
        load_text(str(tmp_path / "none.txt"))
    for content, message in ((b"x", "at least two characters"), (b"\xff\xfe\xfd", "no UTF-8 text .* read it by bytes")):
        (tmp_path / "odd").write_bytes(content)
        with pytest.raises(DataCorrupt, match=message):
            load_text(str(tmp_path / "odd"))
    with pytest.raises(DataNotFound, match=r"data set 'tinyshakespeare' was not found(.|\n)*put the file"):
        load_text(download=False)
    wrong = tmp_path / "cache" / "powerprop" / "tinyshakespeare" / "input.txt"
    wrong.parent.mkdir(parents=True)
    wrong.write_text("First Citizen")
    with pytest.raises(DataCorrupt, match="sha256 .* expected 86c4e6aa"):
        load_text(download=False)


def test_tiny_shakespeare() -> None:
    try:
        text = load_text(download=False)
    except DataNotFound as error:
        pytest.skip(str(error))
    assert (len(text.ids), text.kinds) == (1_115_394, 65)
    assert text.decode(text.ids[:14]) == "First Citizen:"


def test_windows_are_shifted_by_one_and_resume() -> None:
    batches = Windows(torch.arange(50), 8, 3, torch.Generator().manual_seed(0))
    x, y = next(batches)
    assert x.shape == (3, 8)
    assert torch.equal(y, x + 1)
    assert bool((x.diff(dim=1) == 1).all())
    state = batches.state_dict()
    wanted = next(batches)
    batches.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(next(batches), wanted, strict=True))
    with pytest.raises(ValueError, match="longer than the context of 50, got 50"):
        Windows(torch.arange(50), 50, 3, torch.Generator())


# --- the transformer ----------------------------------------------------------------------------------------------


def net(**options: Any) -> models.GPT:
    return models.gpt(11, 16, 2, 2, 8, generator=torch.Generator().manual_seed(0), **options)


def test_the_sizes() -> None:
    blocks = models.gpt(65).blocks
    assert sum(p.numel() for p in blocks.parameters() if p.ndim == 2) == 12 * 4 * 128**2 == 786_432


def test_a_position_sees_what_is_before_it_alone() -> None:
    model, ids = net(), torch.randint(11, (1, 8), generator=torch.Generator().manual_seed(1))
    changed = ids.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 11
    same = (model(ids) - model(changed)).abs().amax(dim=2)[0] < 1e-6
    assert same.tolist() == [True] * 5 + [False] * 3


@pytest.mark.parametrize("tied", [False, True])
def test_weights_and_initial_values(tied: bool) -> None:
    model = net(tied=tied)
    chosen = select(model)
    assert ("head.weight" in chosen) == (not tied)
    assert set(select(model, language.BLOCKS)) == set(chosen) - {"head.weight"}
    assert all(bool(weight.all()) for weight in chosen.values())
    assert chosen["blocks.0.up.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    assert chosen["blocks.0.down.weight"].std().item() == pytest.approx(0.01, rel=0.1)
    logits = model(torch.zeros(2, 8, dtype=torch.long))
    assert nn.functional.cross_entropy(logits.flatten(0, 1), torch.arange(16) % 11).item() == pytest.approx(
        math.log(11), abs=0.1
    )


def test_what_a_network_cannot_be() -> None:
    with pytest.raises(ValueError, match="width must be a multiple of the 3 heads, got 16"):
        models.gpt(11, 16, heads=3)
    with pytest.raises(ValueError, match="at most 8 positions, got 9"):
        net()(torch.zeros(1, 9, dtype=torch.long))


def test_a_text_goes_on_the_same_from_the_same_seed() -> None:
    start = torch.arange(11)
    first, second = (continued(net(), start, 20, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, second)
    assert len(first) == 20


# --- the experiments ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alphabet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file in which every word is one of four."""
    file = tmp_path_factory.mktemp("text") / "words.txt"
    chooser = random.Random(0)
    file.write_text(" ".join(chooser.choice(["alpha", "beta", "gamma", "delta"]) for _ in range(900)))
    return file


def smoke(experiment: Experiment, alphabet: Path) -> Experiment:
    """The preset with that file."""
    config = replace(experiment.presets["smoke"], text=str(alphabet), test=0.1, validation=0.1)
    return replace(experiment, presets={"smoke": config})


def test_gpt_oneshot(tmp_path: Path, alphabet: Path) -> None:
    experiment = smoke(oneshot.EXPERIMENTS["gpt-oneshot"], alphabet)
    summary = run_smoke(experiment, tmp_path)
    shown = table(summary, "Nats against sparsity")
    labels = ["AdamW", "Powerprop, α = 2", "AdamW, L1 penalty 0.1", "AdamW, weight decay 0.5"]
    assert [row["0"] for row in shown] == labels
    assert all(0 < row["80%"]["mean"] < 4 and row["80%"]["n"] == 2 for row in shown)
    by_criterion = table(summary, "Nats by criterion")
    assert {row["pruned by"] for row in by_criterion} == set(oneshot.WAYS)
    assert len(table(summary, "Text")) == 2 * len(labels)


def test_gpt_sparse(tmp_path: Path, alphabet: Path) -> None:
    summary = run_smoke(smoke(sparse.EXPERIMENTS["gpt-sparse"], alphabet), tmp_path)
    methods = sparse.PRESETS["smoke"].methods
    shown = {row["method"]: row for row in table(summary, "Nats by method")}
    assert list(shown) == [sparse.METHODS[name].label for name in methods]
    assert shown["Dense"]["80%"] == shown["Dense"]["90% (ERK)"]
    assert all(0 < row["80%"]["mean"] < 4 for row in shown.values())
    assert [(row["runs"], row["exact"]) for row in table(summary, "Exact counts")] == [(4, 4), (4, 4)]
    cost = {row["method"]: row for row in table(summary, "Training FLOPs")}
    assert "Dense" not in cost
    assert 0.2 < cost["RigL"]["80%"] < cost["Iterative pruning"]["80%"] < 1
    assert {figure["file"] for figure in summary["sections"][0]["figures"]} == {"sparsity.svg", "cost.svg"}


def sparse_row(method: str, lr: float, test: float) -> Row:
    return Row({**sparse.job(method, "uniform 0.8", lr, 0), "validation": test, "test": test}, Path())


def test_gpt_sparse_chooses_by_nats_and_says_what_powerprop_adds() -> None:
    tried = Rows([sparse_row("rigl", 1e-3, 1.9), sparse_row("rigl", 2e-3, 1.8), sparse_row("pp-rigl", 2e-3, 1.7)])
    config = replace(sparse.PRESETS["smoke"], methods=("dense", "rigl", "pp-rigl"), lrs=(1e-3, 2e-3))
    assert sparse.choose(config, tried, "rigl") == 2e-3
    found = sparse.headline(config, tried.where(lr=2e-3))
    assert found is not None
    assert found.ours == "RigL 1.700 against 1.800"
    with pytest.raises(RunError, match=r"SET diverged with everything that was tried: 0.001, 0.002"):
        sparse.choose(config, tried, "set")
    with pytest.raises(ValueError, match="method must be one of .*, got 'lottery'"):
        replace(config, methods=("lottery",))


def test_gpt_texts(tmp_path: Path) -> None:
    summary = run_smoke(texts.EXPERIMENTS["gpt-texts"], tmp_path)
    shown = {row["0"]: row for row in table(summary, "Bits per byte")}
    assert list(shown) == [way.label for way in texts.WAYS.values()]
    for name, found in shown.items():
        packed = "PackNet" in name
        assert found["earlier texts to the bit"] == f"{int(packed)} of 1 runs"
        assert (found["forgotten"]["mean"] == 0) == packed
        assert (found["weights used"]["mean"] < 1) == packed
        assert found["mean"]["mean"] < 8.1
    assert [row["bytes"] for row in table(summary, "Texts")] == [3000, 3000]


def test_what_is_forgotten_is_what_a_text_has_lost_since_it_was_learned() -> None:
    found = Row({"bits": [[3.0], [3.5, 4.0], [3.75, 4.5, 2.0]]}, Path())
    assert texts.forgotten(found) == pytest.approx((0.75 + 0.5) / 2)
    with pytest.raises(ValueError, match="order must be one of Shakespeare, .*, got 'Latin'"):
        replace(texts.PRESETS["smoke"], order=("Latin",))


def row(method: oneshot.Method, lr: float, dense: float, pruned: list[float]) -> Row:
    """A network with these nats on validation text and on test text."""
    nats = {"dense": {"validation": dense, "test": dense}, "validation": pruned, "pruned": {oneshot.WAYS[0]: pruned}}
    return Row({"width": 16, **method._asdict(), "lr": lr, "seed": 0, **nats}, Path())


def test_the_rate_is_that_of_the_best_pruned_of_the_good_dense_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    config, plain = replace(oneshot.PRESETS["smoke"], lrs=(1e-3, 2e-3, 4e-3)), oneshot.Method()
    tuning = Rows([row(plain, 1e-3, 1.6, [2.0]), row(plain, 2e-3, 1.61, [1.9]), row(plain, 4e-3, 1.7, [1.8])])
    assert oneshot.choose(config, tuning, plain, 16) == 2e-3
    lost = Rows([Row({"width": 16, **plain._asdict(), "lr": 1e-3, "seed": 0, "diverged": "nan"}, Path())])
    with pytest.raises(RunError, match=r"AdamW diverged with everything that was tried: 0.001, 0.002, 0.004"):
        oneshot.choose(config, lost, plain, 16)
    monkeypatch.setattr(oneshot, "TOLERANCE", 0.0)
    assert oneshot.choose(config, tuning, plain, 16) == 1e-3


def test_the_headline_is_of_the_best_power() -> None:
    config = replace(oneshot.PRESETS["smoke"], alphas=(1.0, 1.5, 2.0), l1s=(), decays=(), lrs=(4e-3,))
    methods = [oneshot.Method(alpha) for alpha in config.alphas]
    nats = ([1.7, 2.0], [1.72, 1.9], [1.73, 1.8])
    rows = Rows(row(method, 4e-3, 1.6, pruned) for method, pruned in zip(methods, nats, strict=True))
    lrs = {(16, method): 4e-3 for method in methods}
    stats, found = oneshot.verdict_of(config, oneshot.networks(config, rows, lrs))
    assert found is not None
    assert found.what.startswith("Powerprop, α = 2 against AdamW")
    assert found.ours == "dense 1.600 against 1.600; pruned 1.800 against 2.000"
    assert [stat.value for stat in stats] == ["1.800 nats", "2.000 nats"]


def test_the_penalty_shrinks_weights_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "WEIGHT_DECAY", 0.0)
    model = net()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = oneshot.make_optimizer(model, oneshot.Method(l1=0.5), 0.01)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        wanted = before[name]
        if name in optimizer.masters:
            wanted = wanted.sign() * (wanted.abs() - 0.01 * 0.5).clamp_min(0)
        torch.testing.assert_close(p.detach(), wanted)


def test_the_schedule() -> None:
    assert [round(language.rate(done, 0.2), 3) for done in (0.0, 0.1, 0.2, 0.6, 1.0)] == [0.0, 0.5, 1.0, 0.5, 0.0]


def test_nats_are_those_of_windows_that_follow_one_another() -> None:
    config, model = replace(oneshot.PRESETS["smoke"], context=4), models.gpt(5, 8, 1, 2, 4)
    ids = torch.randint(5, (11,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        losses = [
            nn.functional.cross_entropy(model(ids[None, i : i + 4])[0], ids[i + 1 : i + 5]).item() for i in (0, 4)
        ]
    assert language.nats(config, model, ids) == pytest.approx(sum(losses) / 2, rel=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alphas": (2.0,)}, r"alphas must have 1, the baseline, got \(2.0,\)"),
    ],
)
def test_bad_settings(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(oneshot.PRESETS["smoke"], **change)


def test_a_text_that_is_too_short(alphabet: Path) -> None:
    with pytest.raises(ValueError, match=r"longer than the context of 1000, got \d+, \d+, \d+"):
        language.splits(LanguageSettings(text=str(alphabet), context=1000))
