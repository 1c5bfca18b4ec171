"""Four texts one after the other in one small GPT: what is left of each after the last, in bits per byte.

The texts are of four kinds that every machine has: Shakespeare's plays, this library's Python, C++ headers that torch
brings, and Python's manual. All are read by bytes, with one head; which text it is is given.
"""

from __future__ import annotations

import hashlib
import math
import pydoc_data.topics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Final, Literal, NamedTuple

import torch
from torch import Tensor

import powerprop
from powerprop.continual import EWC, EfficientPackNet, JointTraining, Naive, Objective, Packing, Strategy, make_task
from powerprop_paper import data, models
from powerprop_paper.experiments import Columns, language, table
from powerprop_paper.experiments.language import GPTSettings
from powerprop_paper.pages import Column, Headline, Page, Percent, Section, Table, Value
from powerprop_paper.run import Experiment, Progress, Row, Rows, Run
from powerprop_paper.settings import Count, EachOnce, Natural
from powerprop_paper.train import local_device

BYTES = 256
TextName = Literal["Shakespeare", "Python sources", "C++ headers", "Python's manual"]
PLAYS: Final = "Shakespeare"
PYTHON: Final = "Python sources"
CPP: Final = "C++ headers"
MANUAL: Final = "Python's manual"
SAMPLE = 4
"""Windows of each text by whose logits it is told whether a network answers to the bit as before."""
ALPHA, LR, STRENGTH, GAMMA = 1.5, 2e-3, 1e4, 0.98
"""The power of Powerprop, the learning rate, λ of EWC, and the part of its performance that a sub-network must keep."""


class Way(NamedTuple):
    """A row of the table."""

    label: str
    kind: type[Strategy]
    alpha: float = 1.0


PACKING = ("efficient-packnet", "pp-efficient-packnet")
WAYS = {
    "naive": Way("Naive", Naive), "ewc": Way("EWC", EWC), PACKING[0]: Way("EfficientPackNet", EfficientPackNet),
    PACKING[1]: Way("Powerprop + EfficientPackNet", EfficientPackNet, ALPHA), "joint": Way("Joint", JointTraining),
}  # fmt: skip
"""The rows of the table."""


@dataclass(frozen=True, kw_only=True)
class Config(GPTSettings):
    """The settings of `gpt-texts`; `steps` are of each text."""

    size: Count = 300_000
    """bytes of each text, from its beginning"""
    order: Annotated[tuple[TextName, ...], EachOnce()] = (PLAYS, PYTHON, CPP, MANUAL)
    """of the texts"""
    width: Count = 128
    """of the network"""
    retrain_steps: Natural = 300
    """after pruning, on what is kept of a text"""
    steps: Count = 1_000
    """training steps of each text"""


PRESETS = {
    "smoke": Config(
        size=3_000, width=16, depth=1, heads=2, context=16, batch=4, steps=4, retrain_steps=2, seeds=1,
        order=(PYTHON, MANUAL),
    ),
    "cpu": Config(),
    "paper": Config(size=1_000_000, width=256, steps=6_000, retrain_steps=2_000),
}  # fmt: skip


# The texts.


def read(name: str, size: int) -> bytes:
    """The first bytes of a text."""
    if name == PLAYS:
        text = data.load_text()
        return text.decode(text.ids[:size]).encode()
    if name == MANUAL:
        topics = pydoc_data.topics.topics
        return "\n".join(topics[key] for key in sorted(topics)).encode()[:size]
    root, pattern = (Path(powerprop.__file__), "*.py") if name == PYTHON else (Path(torch.__file__), "*.h")
    folder = root.parent if name == PYTHON else root.parent / "include" / "ATen" / "core"
    content = b""
    for file in sorted(folder.rglob(pattern)):
        content += file.read_bytes()
        if len(content) >= size:
            break
    return content[:size]


def parts(cfg: Config, name: str) -> tuple[data.Part, data.Part, data.Part]:
    """Windows of a text that follow one another: to train on, to choose by, to report."""
    ids = torch.frombuffer(bytearray(read(name, cfg.size)), dtype=torch.uint8).long()
    ends = [round(len(ids) * (1 - part)) for part in (cfg.validation + cfg.test, cfg.test)]
    train, held_back, tested = (
        data.Part(*language.windows(part, cfg.context)) for part in torch.tensor_split(ids, ends)
    )
    return train, held_back, tested


# One job: learn the texts one after the other.


class NextSymbol(Objective):
    """Cross-entropy of every position."""

    mixes_tasks = True

    def loss(self, model: Any, batch: Any, task: Any) -> Tensor:
        """Mean nats per symbol."""
        x, y = batch
        return language.next_symbol(model(x), y)


def learn(cfg: Config, folder: Path, progress: Progress, strategy: str, seed: int) -> dict[str, Any]:
    """Bits per byte of every text after each, what is used, and whether earlier texts are answered to the bit."""
    learner = make_learner(cfg, strategy, seed)
    texts = [parts(cfg, name) for name in cfg.order]
    matrix: list[list[float]] = []
    before: list[Tensor] = []
    for number, (train, held_back, _) in enumerate(texts):
        learner.learn(make_task(train, held_back, name=cfg.order[number], index=number))
        seen = range(number + 1)
        matrix.append([-learner.score(texts[task][2], task=task) / math.log(2) for task in seen])
        before.append(logits(learner, texts[number][2], number))
        progress((number + 1) / len(texts), {"bits": matrix[-1][-1]})
    same = [torch.equal(then, logits(learner, texts[task][2], task)) for task, then in enumerate(before)]
    used = learner.used() if isinstance(learner, Packing) else 1.0
    return {"bits": matrix, "used": used, "same": same[:-1]}


def logits(learner: Strategy, part: data.Part, task: int) -> Tensor:
    """What the network of a text answers to its first windows."""
    found: Tensor = learner.predict(part.x[:SAMPLE], task=task)
    return found.detach().cpu()


def make_learner(cfg: Config, strategy: str, seed: int) -> Strategy:
    """The learner, with the first weights of its seed."""
    generator = torch.Generator().manual_seed(seed)
    model = models.gpt(BYTES, cfg.width, cfg.depth, cfg.heads, cfg.context, generator=generator).to(local_device())
    options: dict[str, Any] = {"strength": STRENGTH, "labels": "empirical"} if strategy == "ewc" else {}
    if strategy in PACKING:
        options = {"gamma": GAMMA, "retrain_steps": cfg.retrain_steps}
    _, kind, alpha = WAYS[strategy]
    return kind(
        model, partial(torch.optim.AdamW, lr=LR, weight_decay=0.0), objective=NextSymbol(), steps=cfg.steps,
        batch_size=cfg.batch, seed=seed, clip=language.CLIP, alpha=alpha,
        schedule=lambda phase, done: language.rate(done), **options,
    )  # fmt: skip


# The page.


def main(cfg: Config, run: Run) -> Page:
    """Every strategy from every seed."""
    run.prepare(lambda: [parts(cfg, name) for name in cfg.order])
    rows = run.map(learn, [{"strategy": name, "seed": seed} for name in WAYS for seed in range(cfg.seeds)])
    contents = {name: read(name, cfg.size) for name in cfg.order}
    read_columns: Columns = [
        ("", lambda name: name), ("bytes", lambda name: len(contents[name])),
        ("sha256 begins with", lambda name: hashlib.sha256(contents[name]).hexdigest()[:16]),
    ]  # fmt: skip
    intro = (
        f"One GPT of {cfg.depth} blocks with {language.size(cfg, cfg.width)} weights and one head reads "
        f"{len(cfg.order)} texts one after the other, {cfg.steps:,} steps of {cfg.batch} windows of {cfg.context} "
        f"bytes each. Reported is the last {cfg.test:.0%} of each text; which text it is is given. Biases, norms and "
        "embeddings freeze after the first text where weights are packed."
    )
    return Page(
        "Four texts one after the other in a small GPT", intro,
        [
            Section("Bits per byte after the last text", tables=[bits_table(cfg, rows)]),
            Section("The texts", tables=[table("Texts", read_columns, cfg.order)]),
        ],
        "The paper has no language models.", headline=headline(rows),
    )  # fmt: skip


def last(row: Row, text: int | None = None) -> float:
    """Bits per byte after the last text, of one or averaged over all."""
    return float(fmean(row["bits"][-1]) if text is None else row["bits"][-1][text])


def bits_table(cfg: Config, rows: Rows) -> Table:
    """A row for each strategy, a column for each text."""

    def mean(of: Callable[[Row], float]) -> Callable[[str], Value]:
        return lambda name: rows.where(strategy=name).mean(of)

    def exact(name: str) -> str:
        found = rows.where(strategy=name).finished
        return f"{sum(map(all, found.values('same')))} of {len(found)} runs"

    columns: Columns = [
        ("", lambda name: WAYS[name].label),
        *((Column(name, "min", 3), mean(partial(last, text=i))) for i, name in enumerate(cfg.order)),
        (Column("mean", "min", 3), mean(last)), (Column("forgotten", digits=3), mean(forgotten)),
        (Percent("weights used"), mean(lambda row: float(row["used"]))), ("earlier texts to the bit", exact),
    ]  # fmt: skip
    caption = "Forgotten: bits per byte lost since each text was learned, mean over all texts but the last."
    return table("Bits per byte", columns, WAYS, caption)


def forgotten(row: Row) -> float:
    """Bits per byte lost since a text was learned, in the mean."""
    return fmean(after - bits[-1] for bits, after in zip(row["bits"][:-1], row["bits"][-1], strict=False))


def headline(rows: Rows) -> Headline:
    """Bits per byte after the last text, of every strategy."""
    found = {way.label: rows.where(strategy=name).mean(last) for name, way in WAYS.items()}
    ours = "; ".join(f"{label} {bits.mean:.3f}" for label, bits in found.items() if bits)
    return Headline("Bits per byte after the last of four texts, mean over all", ours, "no language models")


EXPERIMENTS = {
    "gpt-texts": Experiment(
        "gpt-texts", "four texts one after the other in one small GPT", "not in the paper", PRESETS, main
    ),
}
