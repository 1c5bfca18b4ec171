"""The notebooks run from top to bottom, quickly, and are committed without outputs."""

import json
from functools import partial
from pathlib import Path

import pytest

from powerprop_paper import data

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_run(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data, "load", partial(data.load, download=False))
    namespace: dict[str, object] = {"__name__": "__notebook__"}
    for number, cell in enumerate(json.loads(notebook.read_text(encoding="utf-8"))["cells"]):
        if cell["cell_type"] != "code":
            continue
        assert not cell["outputs"], f"cell {number} of {notebook.name} has outputs; clear them"
        try:
            exec(compile("".join(cell["source"]), f"{notebook.name}, cell {number}", "exec"), namespace)
        except data.DataNotFound as missing:
            pytest.skip(f"{missing}")


def test_all_notebooks_are_there() -> None:
    names = "continual", "export", "language-models", "sparse-training", "start"
    assert [n.name for n in NOTEBOOKS] == [f"{name}.ipynb" for name in names]
