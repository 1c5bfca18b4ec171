"""A user's file under mypy --strict: what the package says of its types is there, and is enough."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

USER = """
import torch

import powerprop as pp
from powerprop import continual

model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
optimizer = pp.Powerprop(torch.optim.SGD(model.parameters(), lr=0.1), model, alpha=1.5, sparsify=pp.RigL(0.5, steps=10))
masks: pp.Masks = pp.prune(model, 0.5)
share: float = pp.sparsity(model).total
fast = pp.export.sparse(model, torch.rand(4, 8))
learner = continual.EWC(model, lambda params: torch.optim.SGD(params, lr=0.1), steps=3)
answer: torch.Tensor = learner.predict(torch.rand(4, 8), task=0).label
pp.prune(model, "half")  # the one error
"""


def test_a_user_s_file_is_checked_strictly(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), "user.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert len(errors) == 1, done.stdout + done.stderr
    assert 'Argument 2 to "prune" has incompatible type "str"' in errors[0]
