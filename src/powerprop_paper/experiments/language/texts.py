"""Four texts one after the other in one small GPT: what is left of each after the last, in bits per byte.

The texts are of four kinds that every machine has: Shakespeare's plays, this library's Python, C++ headers that torch
brings, and Python's manual. All are read by bytes, with one head; which text it is is given.
"""

from __future__ import annotations

import hashlib
import math
import pydoc_data.topics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
from torch import Tensor

import powerprop
from powerprop.continual import EWC, EfficientPackNet, JointTraining, Naive, Objective, Packing, Strategy, make_task
from powerprop_paper import data, models
from powerprop_paper.experiments import language
from powerprop_paper.experiments.language import LanguageSettings
from powerprop_paper.pages import Column, Headline, Page, Percent, Section, Table, Value
from powerprop_paper.run import Experiment, Progress, Row, Rows, Run
from powerprop_paper.settings import Count, EachOnce, Fraction, Natural, NonNegative, Positive, Power, require
from powerprop_paper.train import local_device

BYTES = 256
PLAYS, PYTHON, CPP, MANUAL = "Shakespeare", "Python sources", "C++ headers", "Python's manual"
TEXTS = (PLAYS, PYTHON, CPP, MANUAL)
SAMPLE = 4
"""Windows of each text by whose logits it is told whether a network answers to the bit as before."""
KINDS: dict[str, type[Strategy]] = {
    "naive": Naive, "ewc": EWC, "efficient-packnet": EfficientPackNet, "pp-efficient-packnet": EfficientPackNet,
    "joint": JointTraining,
}  # fmt: skip
LABELS = {
    "naive": "Naive", "ewc": "EWC", "efficient-packnet": "EfficientPackNet",
    "pp-efficient-packnet": "Powerprop + EfficientPackNet", "joint": "Joint",
}  # fmt: skip


@dataclass(frozen=True)
class Config(LanguageSettings):
    """The settings of `gpt-texts`; `steps` are of each text."""

    size: Count = 300_000
    """bytes of each text, from its beginning"""
    order: Annotated[tuple[str, ...], EachOnce()] = TEXTS
    """of the texts"""
    width: Count = 128
    """of the network"""
    strategies: Annotated[tuple[str, ...], EachOnce()] = tuple(KINDS)
    """rows of the table"""
    alpha: Power = 1.5
    """the power of Powerprop"""
    lr: Positive = 2e-3
    """learning rate"""
    strength: NonNegative = 1e4
    """λ of EWC"""
    gamma: Fraction = 0.98
    """a sub-network may lose 1 - γ of its nats to the dense network"""
    retrain_steps: Natural = 300
    """after pruning, on what is kept of a text"""
    steps: Count = 1_000
    """training steps of each text"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.strategies:
            require(name in KINDS, f"strategy must be one of {', '.join(KINDS)}, got {name!r}")
        for name in self.order:
            require(name in TEXTS, f"a text must be one of {', '.join(TEXTS)}, got {name!r}")


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
    options: dict[str, Any] = {"EWC": {"strength": cfg.strength, "labels": "empirical"}}.get(
        KINDS[strategy].__name__, {}
    )
    if KINDS[strategy] is EfficientPackNet:
        options = {"gamma": cfg.gamma, "retrain_steps": cfg.retrain_steps}
    return KINDS[strategy](
        model, partial(torch.optim.AdamW, lr=cfg.lr, weight_decay=0.0), objective=NextSymbol(), steps=cfg.steps,
        batch_size=cfg.batch, seed=seed, clip=cfg.clip, alpha=cfg.alpha if strategy.startswith("pp-") else 1.0,
        schedule=lambda phase, done: language.rate(done, cfg.warmup), **options,
    )  # fmt: skip


# The page.


def main(cfg: Config, run: Run) -> Page:
    """Every strategy from every seed."""
    run.prepare(lambda: [parts(cfg, name) for name in cfg.order])
    rows = run.map(learn, [{"strategy": name, "seed": seed} for name in cfg.strategies for seed in range(cfg.seeds)])
    sections = [
        Section("Bits per byte after the last text", "", (), [bits_table(cfg, rows)]),
        Section("The texts", "", (), [texts_table(cfg)]),
    ]
    intro = (
        f"One GPT of {cfg.depth} blocks with {language.size(cfg, cfg.width)} weights and one head reads "
        f"{len(cfg.order)} texts one after the other, {cfg.steps:,} steps of {cfg.batch} windows of {cfg.context} "
        f"bytes each. Reported is the last {cfg.test:.0%} of each text; which text it is is given. Biases, norms and "
        "embeddings freeze after the first text where weights are packed."
    )
    return Page(
        "Four texts one after the other in a small GPT", intro, sections, "The paper has no language models.", (),
        headline(cfg, rows),
    )  # fmt: skip


def last(row: Row) -> list[float]:
    """Bits per byte of every text after the last."""
    found: list[float] = row["bits"][-1]
    return found


def bits_of(row: Row, text: int) -> float:
    """Bits per byte of one text after the last."""
    return last(row)[text]


def bits_table(cfg: Config, rows: Rows) -> Table:
    """A row for each strategy, a column for each text."""
    columns: list[str | Column] = [
        "", *(Column(name, "min", 3) for name in cfg.order), Column("mean", "min", 3), Column("forgotten", digits=3),
        Percent("weights used"), "earlier texts to the bit",
    ]  # fmt: skip
    shown: list[list[Value]] = []
    for name in cfg.strategies:
        found = rows.where(strategy=name)
        each = [found.mean(partial(bits_of, text=i)) for i in range(len(cfg.order))]
        exact = f"{sum(map(all, found.values('same')))} of {len(found.finished)} runs"
        ends = (found.mean(lambda row: fmean(last(row))), found.mean(forgotten), found.mean("used"))
        shown.append([LABELS[name], *each, *ends, exact])
    caption = "Forgotten: bits per byte lost since each text was learned, mean over all texts but the last."
    return Table("Bits per byte", columns, shown, caption)


def forgotten(row: Row) -> float:
    """Bits per byte lost since a text was learned, in the mean."""
    learned: Sequence[float] = [bits[-1] for bits in row["bits"]]
    return fmean(after - then for after, then in zip(last(row)[:-1], learned, strict=False))


def texts_table(cfg: Config) -> Table:
    """What was read, to the bit."""
    shown: list[list[Value]] = []
    for name in cfg.order:
        content = read(name, cfg.size)
        shown.append([name, len(content), hashlib.sha256(content).hexdigest()[:16]])
    return Table("Texts", ["", "bytes", "sha256 begins with"], shown)


def headline(cfg: Config, rows: Rows) -> Headline | None:
    """Bits per byte after the last text, of every strategy."""
    found = {LABELS[name]: rows.where(strategy=name).mean(lambda row: fmean(last(row))) for name in cfg.strategies}
    ours = "; ".join(f"{label} {bits.mean:.3f}" for label, bits in found.items() if bits)
    return Headline("Bits per byte after the last of four texts, mean over all", ours, "no language models")


EXPERIMENTS = {
    "gpt-texts": Experiment(
        "gpt-texts", "four texts one after the other in one small GPT", "not in the paper", PRESETS, main
    ),
}
