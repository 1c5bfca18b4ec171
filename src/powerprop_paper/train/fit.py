"""A plain training loop that can be killed at any moment and goes on bit for bit where it was, and its checkpoints.

A checkpoint is one file, written atomically, read without running anything in it, and only if it is undamaged.
"""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.serialization import get_crc32_options, set_crc32_options

from powerprop.files import FileError, write_atomically
from powerprop.training import LossTally, NonFiniteError, Rates
from powerprop_paper.train.distributed import ALONE, BatchSource, Ranks
from powerprop_paper.train.log import MetricsLog
from powerprop_paper.train.precision import FULL, Precision

Loss = Callable[[Tensor, Tensor], Tensor]
Schedule = Callable[[int], float]

NO_LOG = {"log": 0, "log_checksum": 0}
FORMAT = "powerprop-checkpoint-1"
SHOWN = 4
"""How many entries that differ between ranks an error names."""


class CheckpointError(FileError):
    """A file that is not a whole checkpoint, or not one of this training."""


def save_checkpoint(path: str | Path, state: dict[str, Any]) -> None:
    """Write tensors, numbers, strings, lists and dicts to `path`; what was there stays until the new file is whole."""
    content = io.BytesIO()  # torch hides the error of a full disk behind one of its own
    with _checksums():
        torch.save({"format": FORMAT, "state": state}, content)
    write_atomically(path, content.getvalue())


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read what `save_checkpoint` wrote, onto the CPU; anything else is a `CheckpointError` that names the file."""
    with open(path, "rb") as file:
        try:
            _check_archive(file)
            found = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # a foreign file can make the parsers of torch and Python raise anything
            reason = str(error).partition("\n")[0]
            raise CheckpointError(f"{path} is damaged or not a checkpoint ({reason})") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT or not isinstance(found.get("state"), dict):
        raise CheckpointError(f"{path} was not written by powerprop: expected the format {FORMAT!r}")
    state: dict[str, Any] = found["state"]
    return state


def _check_archive(file: IO[bytes]) -> None:
    """Every part of the archive has its CRC-32, which torch itself does not look at."""
    with zipfile.ZipFile(file) as archive:
        for part in archive.infolist():
            if part.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{part.filename} in it is compressed, which torch does not do")
        if (damaged := archive.testzip()) is not None:
            raise ValueError(f"the content of {damaged} in it does not have its checksum")
    file.seek(0)


@contextmanager
def _checksums() -> Iterator[None]:
    """Have torch.save write checksums, also where they are switched off for speed."""
    before = get_crc32_options()
    set_crc32_options(True)
    try:
        yield
    finally:
        set_crc32_options(before)


def fit(
    model: nn.Module, optimizer: Optimizer, batches: BatchSource, steps: int, *, loss: Loss = cross_entropy,
    schedule: Schedule | None = None, clip: float | None = None, checkpoint: str | Path | None = None,
    checkpoint_every: int = 1000, log: MetricsLog | None = None, log_every: int = 100,
    evaluate: Callable[[nn.Module], dict[str, float]] | None = None, eval_every: int | None = None,
    progress: Callable[[int, dict[str, float]], None] | None = None, precision: Precision = FULL,
    ranks: Ranks = ALONE,
) -> None:  # fmt: skip
    """Train `model` for `steps` steps; with a checkpoint on the disk, go on from there.

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
    counts = {"steps": steps, "checkpoint_every": checkpoint_every, "log_every": log_every, "eval_every": eval_every}
    for name, number in counts.items():
        if number is not None and number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    if clip is not None and not 0 < clip < math.inf:
        raise ValueError(f"clip must be positive and finite, or None, got {clip}")
    device = next(model.parameters()).device
    with _scheduled(optimizer, schedule) as set_rates:
        tally = LossTally(device, ranks.mean)
        parts = {"model": model, "optimizer": optimizer, "batches": batches, "loss": tally, **precision.parts()}
        start = ranks.agree(_resume(checkpoint, parts, log, steps, ranks, device), "the step of the checkpoint")
        _check_alike(model, optimizer, ranks)
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
                random = ranks.gather(_random_state(device))
                if ranks.main:
                    position = {"log": log.position(), "log_checksum": log.checksum()} if log else NO_LOG
                    states = {name: part.state_dict() for name, part in parts.items()}
                    save_checkpoint(checkpoint, {"step": step, **position, **states, "random": random})
                ranks.barrier()
        ranks.broadcast_buffers(model)


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
    path: str | Path | None, parts: dict[str, Any], log: MetricsLog | None, steps: int, ranks: Ranks,
    device: torch.device,
) -> int:  # fmt: skip
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
    _set_random_state(state["random"], ranks.rank, device)
    return step


def _random_state(device: torch.device) -> dict[str, Tensor]:
    """Where torch's generators of the CPU and of this device stand."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _set_random_state(states: Sequence[dict[str, Tensor]], rank: int, device: torch.device) -> None:
    """Set them to where those of this rank stood; a rank that was not there draws on as it does."""
    if rank >= len(states):
        return
    torch.set_rng_state(states[rank]["cpu"])
    if device.type == "cuda" and "cuda" in states[rank]:
        torch.cuda.set_rng_state(states[rank]["cuda"], device)


def _check_alike(model: nn.Module, optimizer: Optimizer, ranks: Ranks) -> None:
    """Raise unless the weights, the masks and all else that the optimiser holds are the same on every rank.

    DDP sends rank 0's weights to the others, but masks come from the weights that each rank had before.
    """
    if ranks.world == 1:
        return
    marks = dict(_marks("model", dict(model.named_parameters())))
    marks |= _marks("optimizer", optimizer.state_dict())
    found = ranks.gather(marks)
    names = dict.fromkeys(name for each in found for name in each)
    if differing := [name for name in names if len({each.get(name) for each in found}) > 1]:
        more = f" and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
        raise ValueError(
            f"the ranks must start alike, but {', '.join(differing[:SHOWN])}{more} differ between them; "
            "seed every rank alike, or broadcast the weights before the optimiser is made"
        )


def _marks(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """A checksum of every tensor and the text of every number within, by the path to it."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _marks(f"{name}.{key}", part)
    elif isinstance(value, (list, tuple)):
        yield from _marks(name, dict(enumerate(value)))
    elif isinstance(value, Tensor):
        checksum = zlib.crc32(value.detach().cpu().flatten().view(torch.uint8).numpy().data)
        yield name, f"{tuple(value.shape)} {checksum}"
    elif value is None or isinstance(value, (bool, int, float, str)):
        yield name, repr(value)


def _due(step: int, steps: int, every: int | None) -> bool:
    return step == steps or (every is not None and step % every == 0)


def _check_weights(model: nn.Module, step: int) -> None:
    for name, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            raise NonFiniteError(f"{name} has NaN or infinite values after step {step}; a lower learning rate may help")


def triangle(done: float, peak: float) -> float:
    """The learning rate when a fraction of the training is done: a linear rise to 1 at `peak`, a linear fall to 0."""
    return done / peak if done < peak else (1 - done) / (1 - peak)
