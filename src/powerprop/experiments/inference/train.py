"""Task inference told straight: every method, at several sizes of groups, on tasks that differ in several ways.

`shortlist` compares inputs with mean inputs that were stored for every task, one or one per class, which the paper's
method does not have; `exhaustive`, `oneshot` and `binary` know the sub-networks alone. Besides: which inputs of no task
are noticed, at how many false alarms.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD

from powerprop import data, models
from powerprop.continual import EfficientPackNet, infer
from powerprop.continual.packing.infer import entropies
from powerprop.continual.packing.signature import SAMPLED, Sample, Signatures
from powerprop.experiments.harness.experiment import Experiment, Job, Results
from powerprop.experiments.harness.parallel import Progress
from powerprop.experiments.inference.config import PRESETS, Config
from powerprop.experiments.inference.report import BY_CLASS, findings
from powerprop.experiments.inference.streams import foreign, make_stream
from powerprop.train.distributed import local_device


def jobs(config: Config, results: Results) -> list[Job]:
    """Every stream, plain and standardised, with and without superfluous outputs, from every seed."""
    names = ("seed", "stream", "inputs", "superfluous")
    every = product(range(config.seeds), config.streams, config.inputs, config.superfluous)
    settings = [dict(zip(names, values, strict=True)) for values in every]
    return [Job("{stream}-{inputs}-{superfluous}-seed{seed}".format(**each), each) for each in settings]


def prepare(config: Config) -> None:
    """Find the data, or download them, before several processes ask for them."""
    data.load("mnist").split_validation(config.validation)
    data.load("notmnist")


def run_job(config: Config, job: Job, folder: Path, progress: Progress) -> dict[str, Any]:
    """Learn all tasks, then ask every method; a job that was stopped goes on after the last task it learned."""
    images, seed = _images(config), job.settings["seed"]
    stream = make_stream(config, job.settings["stream"], job.settings["inputs"], seed, images)
    classes = len(stream[0].classes or ())
    learner = _learner(config, classes + job.settings["superfluous"], seed)
    checkpoint = folder / "learner.safetensors"
    if checkpoint.exists():
        learner.load(checkpoint)
    for task in stream[learner.current :]:
        learner.learn(task)
        learner.save(checkpoint)
        progress(learner.current / (len(stream) + 1), {"task": learner.current})
    accuracy = [_mean(learner.predict(task.test().x, task.index).label == task.test().y) for task in stream]
    signatures = {kind: _signatures(kind, stream) for kind in ("task", "class")}
    rates = _rates(config, learner, stream, signatures, bool(job.settings["superfluous"]))
    found = _unknown(config, learner, stream, signatures, foreign(config, stream[0], images, seed))
    return {"note": images.note, "accuracy": fmean(accuracy), "used": learner.used(), "rates": rates, "unknown": found}


def _images(config: Config) -> data.Images:
    images = data.load("mnist").to(local_device())
    x, y = images.train_x[-config.images :], images.train_y[-config.images :]
    return data.Images(images.name, x, y, images.test_x, images.test_y, images.class_names, images.note)


def _learner(config: Config, outputs: int, seed: int) -> EfficientPackNet:
    model = models.mlp([784, config.width, config.width, outputs], generator=torch.Generator().manual_seed(seed))
    return EfficientPackNet(
        model.to(local_device()), lambda params: SGD(params, lr=config.lr), alpha=config.alpha, gamma=config.gamma,
        steps=config.steps, retrain_steps=config.retrain_steps, prunings=config.prunings, clip=1.0, seed=seed,
        pruning_steps=config.pruning_steps, reuse="output", batch_size=config.batch,
    )  # fmt: skip


def _signatures(kind: Any, stream: data.Stream) -> Signatures:
    """What a learner made with these means keeps of its tasks; it trains alike, so that one is trained for both."""
    signatures = Signatures(kind)
    for task in stream:
        x, y = task.train()
        stride = max(1, len(x) // SAMPLED)
        signatures.add(Sample(x[::stride], y[::stride], task.validation().x))
    return signatures


def _rates(
    config: Config, learner: EfficientPackNet, stream: data.Stream, signatures: dict[str, Signatures], more: bool
) -> dict[str, dict[str, float]]:
    """rates[method][group]: the fraction of test images whose task is inferred rightly, the mean over tasks."""
    found: dict[str, dict[str, list[float]]] = {}
    for task in stream:
        x = task.test().x[: config.probe]
        for group in config.groups:
            for method in _methods(more):
                name, single = method, group == 1 and method.startswith(("oneshot", "binary"))
                if method == BY_CLASS:
                    name = "shortlist"
                learner.nets.signatures = signatures["class" if method == BY_CLASS else "task"]
                asked = x[: config.probe_single] if single else x
                right = infer(learner.nets, asked, learner.objective, name, group) == task.index
                found.setdefault(method, {}).setdefault(str(group), []).append(_mean(right))
    return {method: {group: fmean(each) for group, each in of.items()} for method, of in found.items()}


def _methods(superfluous: bool) -> list[str]:
    more = ["oneshot-superfluous", "binary-superfluous"] if superfluous else []
    return ["exhaustive", "shortlist", BY_CLASS, "oneshot", "binary", *more]


def _unknown(
    config: Config, learner: EfficientPackNet, stream: data.Stream, signatures: dict[str, Signatures],
    strange: dict[str, Tensor],
) -> dict[str, dict[str, float]]:  # fmt: skip
    """unknown[by][kind]: the fraction of single images that is flagged, "known" being those of the tasks' test sets.

    By the distance to means, and by the entropy of the surest sub-network with a limit from validation images too.
    """
    known = torch.cat([task.test().x[: config.probe] for task in stream])
    held = torch.cat([task.validation().x[: config.probe] for task in stream])
    kinds, found = {"known": known, **strange}, {}
    for kind, each in signatures.items():
        learner.nets.signatures = each
        label = f"distance to the mean of a {kind}"
        found[label] = {name: _mean(learner.predict(x, unknown=config.rate).task == -1) for name, x in kinds.items()}
    surest = {name: entropies(learner.nets, x, learner.objective).amin(0) for name, x in kinds.items()}
    limit = entropies(learner.nets, held, learner.objective).amin(0).quantile(1 - config.rate)
    found["entropy of the surest"] = {name: _mean(each > limit) for name, each in surest.items()}
    return found


def _mean(right: Tensor) -> float:
    return float(right.double().mean())


EXPERIMENT = Experiment(
    name="task-inference",
    title="every way to infer tasks, and inputs of no task",
    paper="section 4.2 describes the inference; no table compares its forms",
    presets=PRESETS, prepare=prepare, jobs=jobs, run_job=run_job,
    report=lambda config, results, out: findings(config, jobs(config, results), results, out),
)  # fmt: skip
