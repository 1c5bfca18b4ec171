"""The library imports torch, numpy and safetensors alone, and works where nothing else is installed."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

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
    names = {blocked!r}

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
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


def test_a_module_of_the_library_imports_nothing_of_the_paper() -> None:
    own = sys.stdlib_module_names | NEEDED | {"powerprop"}
    for file in FILES:
        for package, at_once in imports(ast.parse(file.read_text(encoding="utf-8"))):
            assert package in (own if at_once else own | EXTRAS), file


def test_the_library_names_the_paper_s_package_where_it_looks_for_its_commands_alone() -> None:
    assert len(FILES) > 40
    assert [file.name for file in FILES if LATER in file.read_text(encoding="utf-8")] == ["cli.py"]


FOLDERS = {"sparse", "sparsify", "export", "continual"}
UPPER = {"__init__", "__main__", "cli", "commands", "flops"}
"""Modules that put others together."""
BELOW = {
    "core": {"sparse"},
    "sparse": set(),
    "sparsify": {"sparse"},
    "export": {"sparse"},
    "continual": {"sparsify", "sparse"},
}
"""The folders that each part may import from, beside the core."""


def test_no_arrow_of_the_library_leads_up() -> None:
    for file in FILES:
        first = file.relative_to(SOURCE).parts[0]
        part = first if first in FOLDERS else first.removesuffix(".py")
        if part in UPPER:
            continue
        found = re.findall(r"^\s*(?:from|import) powerprop\.(\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
        allowed = BELOW.get(part, BELOW["core"]) | {part}
        assert {name for name in found if name in FOLDERS | UPPER} <= allowed, file


def test_modules_are_not_held_together_by_imports_for_types_alone() -> None:
    """But for the kernel, which takes the moves of its twin."""
    found = {file for file in FILES if "TYPE_CHECKING" in file.read_text(encoding="utf-8")}
    assert found <= {SOURCE / "kernel" / "__init__.py"}


def without(blocked: set[str], code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program where some packages are not installed."""
    program = [sys.executable, "-W", "error", "-c", BLOCK.format(blocked=blocked) + code]
    return subprocess.run(program, capture_output=True, text=True, cwd=folder, timeout=300)


def test_the_library_trains_prunes_learns_and_exports_alone(tmp_path: Path) -> None:
    done = without({"powerprop_paper", *INSTALLED}, WORK, tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "small.dense.safetensors").is_file()


ASKED = [("run", {"powerprop_paper"}), ("list", INSTALLED), ("run", {"tyro"}), ("list", {"rich"}), ("run", {"jinja2"})]
ASK = """
from powerprop.cli import main

for command, missing in {asked!r}:
    Blocked.names = missing
    assert main([command, "x"]) == 2
    for name in [name for name in sys.modules if name.partition(".")[0] in {{"powerprop_paper", *{installed!r}}}]:
        del sys.modules[name]
"""


def test_commands_of_the_paper_say_how_to_get_it(tmp_path: Path) -> None:
    done = without({"powerprop_paper"}, ASK.format(asked=ASKED, installed=INSTALLED), tmp_path)
    assert done.returncode == 0, done.stderr
    for (command, missing), line in zip(ASKED, done.stderr.splitlines(), strict=True):
        start, _, rest = line.partition(", which need ")
        assert start == f"error: powerprop {command} is one of the paper's experiments"
        name, _, advice = rest.partition(": ")
        assert name in missing
        assert advice == "pip install powerprop[paper]"


def test_the_library_loads_hardly_more_than_torch(tmp_path: Path) -> None:
    """`powerprop --help` waits for its imports: sharded tensors alone would bring half of torch's modules again."""
    code = "import torch; before = len(sys.modules); import powerprop.cli; print(len(sys.modules) - before)"
    done = without(set(), code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 250
