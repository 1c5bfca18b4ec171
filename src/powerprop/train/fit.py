"""A plain training loop that can be killed at any moment and goes on bit for bit where it was."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from powerprop.files import FileError
from powerprop.train.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from powerprop.train.distributed import ALONE, Ranks
from powerprop.train.log import MetricsLog
from powerprop.train.precision import FULL, Precision
from powerprop.train.randomness import random_state, set_random_state
from powerprop.train.rates import Rates
from powerprop.train.same_start import check_alike

Loss = Callable[[Tensor, Tensor], Tensor]
Schedule = Callable[[int], float]


class BatchSource(Protocol):
    """An endless iterator of (inputs, labels) whose position is part of a checkpoint."""

    def __next__(self) -> tuple[Tensor, Tensor]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class NonFiniteError(FloatingPointError):
    """Training has left the finite numbers."""


def fit(
    model: nn.Module,
    optimizer: Optimizer,
    batches: BatchSource,
    steps: int,
    *,
    loss: Loss = functional.cross_entropy,
    schedule: Schedule | None = None,
    clip: float | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 1000,
    log: MetricsLog | None = None,
    log_every: int = 100,
    evaluate: Callable[[nn.Module], dict[str, float]] | None = None,
    eval_every: int | None = None,
    progress: Callable[[int, dict[str, float]], None] | None = None,
    precision: Precision = FULL,
    ranks: Ranks = ALONE,
) -> None:
    """Train `model` for `steps` steps; with a checkpoint on the disk, go on from there.

    Args:
        batches: endless source of (inputs, labels); moved to the model's device here.
        loss: `loss(model(inputs), labels)`.
        schedule: factor of the learning rates at step 0, 1, …, which afterwards are what they were; None leaves them
            alone.
        clip: largest norm of the gradient of the weights that are trained; None leaves it as it is.
        checkpoint: file for model, optimiser, batches, step and log position; it stays after the last step.
        log: receives the mean training loss every `log_every` steps and what `evaluate(model)` returns
            every `eval_every` steps (None: after the last step only).
        progress: called with the step and the latest values whenever something was measured.
        precision: of the forward and backward pass; weights and updates are float32.
        ranks: the processes that train together, each on its part of the batch. All call `fit` alike, with the same
            weights and the same state of the optimiser, and measure together; rank 0 alone writes the checkpoint, and
            all go on from it. Others need no log.

    Raises:
        NonFiniteError: the loss or a weight is NaN or infinite. Looked at every `log_every` steps and before each
            checkpoint, so that the last good checkpoint is never overwritten.
        ValueError: the ranks do not start alike.
    """
    _check_positive(steps=steps, checkpoint_every=checkpoint_every, log_every=log_every, eval_every=eval_every or 1)
    if clip is not None and not 0 < clip < math.inf:
        raise ValueError(f"clip must be positive and finite, or None, got {clip}")
    device = next(model.parameters()).device
    with _scheduled(optimizer, schedule) as set_rates:
        tally = LossTally(device, ranks)
        parts = {"model": model, "optimizer": optimizer, "batches": batches, "loss": tally, **precision.parts()}
        start = ranks.agree(_resume(checkpoint, parts, log, steps, ranks, device), "the step of the checkpoint")
        check_alike(model, optimizer, ranks)
        network = ranks.wrap(model)
        latest: dict[str, float] = {}
        model.train()
        for step in range(start + 1, steps + 1):
            set_rates(step - 1)
            inputs, labels = next(batches)
            optimizer.zero_grad()
            with precision.autocast(device):
                value = loss(network(inputs.to(device)), labels.to(device))
            precision.step(value, optimizer, clip)
            tally.add(value)

            measured: dict[str, float] = {}
            if _due(step, steps, log_every):
                measured["loss"] = tally.take(step)
            if evaluate is not None and _due(step, steps, eval_every):
                ranks.broadcast_buffers(model)
                measured |= evaluate(model)
            if measured:
                latest |= measured
                if log is not None:
                    log.write(step, **measured)
                if progress is not None:
                    progress(step, latest)
            if checkpoint is not None and _due(step, steps, checkpoint_every):
                tally.mean(step)
                _check_weights(model, step)
                random = ranks.gather(random_state(device))
                if ranks.main:
                    save_checkpoint(checkpoint, _state(parts, log, step) | {"random": random})
                ranks.barrier()
        ranks.broadcast_buffers(model)


class LossTally:
    """The running mean of the loss, kept on its device so that no step waits for it; part of the checkpoint."""

    def __init__(self, device: torch.device, ranks: Ranks = ALONE) -> None:
        self.ranks = ranks
        self.total = torch.zeros((), device=device)
        self.count = 0

    def add(self, value: Tensor) -> None:
        self.total += value.detach()
        self.count += 1

    def mean(self, step: int) -> float:
        """The mean of the losses since the last `take`, on all ranks; NaN or infinity among them is an error."""
        self.total = self.ranks.mean(self.total)
        mean = self.total.item() / max(self.count, 1)
        if not math.isfinite(mean):
            when = f"at step {step} (or up to {self.count - 1} steps before)"
            raise NonFiniteError(f"the loss is {mean} {when}; a lower learning rate may help")
        return mean

    def take(self, step: int) -> float:
        mean = self.mean(step)
        self.total.zero_()
        self.count = 0
        return mean

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total.copy_(state["total"])
        self.count = state["count"]


@contextmanager
def _scheduled(optimizer: Optimizer, schedule: Schedule | None) -> Iterator[Callable[[int], None]]:
    """A function that sets the learning rates of a step. At the end they are what they were, also after an error."""
    rates = Rates(optimizer)
    if schedule is None:
        yield lambda step: None
        return
    try:
        yield lambda step: rates.scale(schedule(step))
    finally:
        rates.scale(1.0)


def _resume(
    path: str | Path | None,
    parts: dict[str, Any],
    log: MetricsLog | None,
    steps: int,
    ranks: Ranks,
    device: torch.device,
) -> int:
    """Bring everything to the state of the checkpoint, if there is one, and return its step."""
    if path is None or not Path(path).exists():
        if log is not None:
            log.rewind(0)
        return 0
    advice = f"delete {path} to start this training from its beginning"
    try:
        state = load_checkpoint(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {advice}") from None
    if missing := {*parts, "step", "log", "log_checksum", "random"} - state.keys():
        raise CheckpointError(f"{path} is not a checkpoint of fit: it has no {', '.join(sorted(missing))}; {advice}")
    step: int = state["step"]
    if step > steps:
        raise CheckpointError(f"{path} was made at step {step}, after the {steps} steps asked for")
    if log is not None:
        try:
            log.rewind(state["log"], state["log_checksum"])
        except FileError as error:
            raise CheckpointError(f"{error}; {advice}") from None
    for name, part in parts.items():
        part.load_state_dict(state[name])
    set_random_state(state["random"], ranks.rank, device)
    return step


def _state(parts: dict[str, Any], log: MetricsLog | None, step: int) -> dict[str, Any]:
    position, checksum = (0, 0) if log is None else (log.position(), log.checksum())
    return {"step": step, "log": position, "log_checksum": checksum} | {
        name: part.state_dict() for name, part in parts.items()
    }


def _due(step: int, steps: int, every: int | None) -> bool:
    return step == steps or (every is not None and step % every == 0)


def _check_weights(model: nn.Module, step: int) -> None:
    for name, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            raise NonFiniteError(f"{name} has NaN or infinite values after step {step}; a lower learning rate may help")


def _check_positive(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
