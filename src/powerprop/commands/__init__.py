"""What the commands of the command line do, one file per group; `powerprop.cli` has their table.

Here is that of the commands for files of networks.
"""

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
