"""How large the packages are and how finely cut: lines, files, modules with one importer, functions of a line or two.

    python benchmarks/size.py [SRC ...] [--tests TESTS]

SRC: folders that hold the packages (src); several, such as that of another working tree, are counted side by side. A
module has one importer if one other module of the same folder imports it, packages' own `__init__` apart. A function's
body is counted without its docstring.
"""

from __future__ import annotations

import argparse
import ast
from collections import defaultdict
from pathlib import Path

PACKAGES = ("powerprop", "powerprop_paper")


def modules(src: Path, package: str) -> dict[str, Path]:
    """Every module of a package by its name."""
    found = {}
    for path in sorted((src / package).rglob("*.py")):
        parts = path.relative_to(src).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(tree: ast.Module, known: dict[str, Path]) -> set[str]:
    """The known modules that a module imports, anywhere in it."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names & known.keys()


def functions(tree: ast.Module) -> list[int]:
    """The lines of every function's body, without its docstring."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            found.append(body[-1].end_lineno - body[0].lineno + 1 if body else 0)
    return found


def measured(src: Path, *packages: str) -> dict[str, str]:
    """What is counted of packages together."""
    known = {name: path for package in packages for name, path in modules(src, package).items()}
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in known.items()}
    importers = defaultdict(set)
    for name, tree in trees.items():
        if known[name].name != "__init__.py":
            for other in imported(tree, known) - {name}:
                importers[other].add(name)
    plain = [name for name, path in known.items() if not path.name.startswith("__")]
    bodies = [lines for tree in trees.values() for lines in functions(tree)]
    return {
        "lines": f"{sum(len(path.read_text(encoding='utf-8').splitlines()) for path in known.values()):,}",
        "files": str(len(known)),
        "one importer": str(sum(len(importers[name]) == 1 for name in plain)),
        "functions": str(len(bodies)),
        "of 1-2 lines": f"{sum(lines <= 2 for lines in bodies) / max(1, len(bodies)):.0%}",
        "median": str(sorted(bodies)[len(bodies) // 2] if bodies else 0),
    }


def folder(path: Path) -> dict[str, str]:
    """Lines and files below a folder."""
    files = list(path.rglob("*.py"))
    return {
        "lines": f"{sum(len(f.read_text(encoding='utf-8').splitlines()) for f in files):,}",
        "files": str(len(files)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("src", type=Path, nargs="*", default=[Path(__file__).parents[1] / "src"])
    parser.add_argument("--tests", type=Path, nargs="*", default=[])
    arguments = parser.parse_args()
    rows: dict[str, dict[str, str]] = {}
    for src in arguments.src:
        for package in PACKAGES:
            rows[f"{src}: {package}"] = measured(src, package)
        for part in ("sparsify", "export", "continual", "continual/packing"):
            rows[f"{src}: powerprop/{part}"] = folder(src / "powerprop" / part)
        rows[f"{src}: both"] = measured(src, *PACKAGES)
    rows |= {str(tests): folder(tests) for tests in arguments.tests}
    columns = list(next(iter(rows.values())))
    width = max(map(len, rows))
    print(" " * width, *(f"{column:>13}" for column in columns))
    for name, row in rows.items():
        print(f"{name:<{width}}", *(f"{row.get(column, ''):>13}" for column in columns))


if __name__ == "__main__":
    main()
