"""Commands for the files of networks: inspect, prune, export, bench-model."""

from collections.abc import Callable

from powerprop.commands.bench import bench_model
from powerprop.commands.checkpoint import CommandError
from powerprop.commands.export import export
from powerprop.commands.inspect import inspect
from powerprop.commands.prune import prune
from powerprop.export.programs import MissingOnnxError

__all__ = ["COMMANDS", "ERRORS", "CommandError"]

COMMANDS: dict[str, Callable[..., None]] = {
    "inspect": inspect,
    "prune": prune,
    "export": export,
    "bench-model": bench_model,
}
ERRORS = (CommandError, MissingOnnxError)
"""What the user can put right: shown as one line."""
