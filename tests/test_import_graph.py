"""The library imports torch, numpy and safetensors alone, and works where nothing else is installed."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "powerprop"
FILES = sorted(SOURCE.rglob("*.py"))
NEEDED = {"torch", "numpy", "safetensors"}
EXTRAS = {"onnx", "onnxruntime", "onnxscript"}
"""Of extras of its own, imported only by the function that needs them."""
INSTALLED = {"tyro", "rich", "matplotlib", "jinja2", "markupsafe", "PIL", "gymnasium", "metaworld", "tensorboard"}
"""What the paper's package needs, or some of it."""

LATER = 'import_module("powerprop_paper'

BLOCK = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
"""

WORK = """
from pathlib import Path
import torch
import powerprop as pp
from powerprop.cli import main

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
optimizer = pp.Powerprop(torch.optim.SGD(net.parameters(), lr=0.1), net, alpha=2.0)
x = torch.randn(128, 8)
for _ in range(20):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(net(x), (x[:, 0] > 0).long()).backward()
    optimizer.step()

pp.prune(net, 0.5)
zeros = sum(int((p == 0).sum()) for p in (net[0].weight, net[2].weight))
assert zeros == 0.5 * (8 * 16 + 16 * 2)
learner = pp.EfficientPackNet(net, lambda p: torch.optim.SGD(p, lr=0.1), steps=5, retrain_steps=2, alpha=2.0)
for task in range(2):
    learner.learn((x, (x[:, task] > 0).long()))
assert learner.predict(x, task=1).label.shape == (128,)

pp.save(net, "net.safetensors")
fast = pp.export.sparse(net.eval(), x)
assert torch.allclose(fast(x), net(x), atol=1e-5)
for command in ("inspect net.safetensors", "prune net.safetensors small.safetensors --sparsity 0.9",
                "export small.safetensors --format dense"):
    assert main(command.split()) == 0
assert main(["--help"]) == 0
"""


def imports(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """The package of every import, and whether importing the module is enough to import it."""
    inside = {id(node) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.Lambda) for node in ast.walk(f)}
    for node in ast.walk(tree):
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        yield from ((name.partition(".")[0], id(node) not in inside) for name in names)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_a_module_of_the_library_imports_nothing_of_the_paper(file: Path) -> None:
    own = sys.stdlib_module_names | NEEDED | {"powerprop"}
    for package, at_once in imports(ast.parse(file.read_text(encoding="utf-8"))):
        assert package in (own if at_once else own | EXTRAS)


def test_the_library_names_the_paper_s_package_where_it_looks_for_its_commands_alone() -> None:
    assert len(FILES) > 40
    assert [file.name for file in FILES if LATER in file.read_text(encoding="utf-8")] == ["cli.py"]


FOLDERS = {"sparse", "sparsify", "export", "continual"}
UPPER = {"__init__", "__main__", "cli", "commands", "flops"}
"""Modules that put others together."""
BELOW = {"core": {"sparse"}, "sparse": set(), "sparsify": {"sparse"}, "export": {"sparse"}, "continual": {"sparsify"}}
"""The folders that each part may import from, beside the core."""


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_no_arrow_of_the_library_leads_up(file: Path) -> None:
    first = file.relative_to(SOURCE).parts[0]
    part = first if first in FOLDERS else first.removesuffix(".py")
    if part in UPPER:
        return
    found = re.findall(r"^\s*(?:from|import) powerprop\.(\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    allowed = BELOW.get(part, BELOW["core"]) | {part}
    assert {name for name in found if name in FOLDERS | UPPER} <= allowed


def without(blocked: set[str], code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program where some packages are not installed."""
    program = [sys.executable, "-W", "error", "-c", BLOCK.format(blocked=blocked) + code]
    return subprocess.run(program, capture_output=True, text=True, cwd=folder, timeout=300)


def test_the_library_trains_prunes_learns_and_exports_alone(tmp_path: Path) -> None:
    done = without({"powerprop_paper", *INSTALLED}, WORK, tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "small.dense.safetensors").is_file()


@pytest.mark.parametrize(
    ("command", "missing"),
    [("run", {"powerprop_paper"}), ("list", INSTALLED), ("run", {"tyro"}), ("list", {"rich"}), ("run", {"jinja2"})],
)
def test_commands_of_the_paper_say_how_to_get_it(command: str, missing: set[str], tmp_path: Path) -> None:
    done = without(missing, f"from powerprop.cli import main; sys.exit(main([{command!r}, 'x']))", tmp_path)
    assert done.returncode == 2
    start, _, rest = done.stderr.partition(", which need ")
    assert start == f"error: powerprop {command} is one of the paper's experiments"
    name, _, advice = rest.partition(": ")
    assert name in missing
    assert advice == "pip install powerprop[paper]\n"


def test_the_library_loads_hardly_more_than_torch(tmp_path: Path) -> None:
    """`powerprop --help` waits for its imports: sharded tensors alone would bring half of torch's modules again."""
    code = "import torch; before = len(sys.modules); import powerprop.cli; print(len(sys.modules) - before)"
    done = without(set(), code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 250
