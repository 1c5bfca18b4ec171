"""Resume through Lightning, which loads the weights first, wraps then, and loads the optimiser's state last."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

import powerprop as pp
from nets import batch, same
from resume import ALPHAS, SPARSIFIERS, plain, wrapped

lightning = pytest.importorskip("lightning")

pytestmark = [  # Lightning's own
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*reload a checkpoint mid-epoch"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]

STEPS, MORE = 6, 10


class Net(lightning.LightningModule):  # type: ignore[misc,name-defined]
    """A classifier that wraps its optimiser as Lightning wants it."""

    def __init__(self, method: str, base: str, alpha: float, seed: int) -> None:
        super().__init__()
        self.net = plain(seed)
        self.choice = method, base, alpha

    def training_step(self, _: Tensor, index: int) -> Tensor:
        x, y = batch(self.trainer.global_step)  # a loader's place in its epoch is Lightning's own affair
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> pp.Powerprop:
        method, base, alpha = self.choice
        return wrapped(self.net, method, base, alpha)


def fit(net: Any, steps: int, folder: Path, start: Path | None = None) -> pp.Powerprop:
    """Train to this step; every epoch ends in a checkpoint."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    saving = lightning.pytorch.callbacks.ModelCheckpoint(folder, save_top_k=-1, filename="{step}")
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        callbacks=[saving],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader: Any = DataLoader(torch.zeros(2, 1))  # type: ignore[arg-type]
    trainer.fit(net, loader, ckpt_path=None if start is None else str(start))
    optimizer = trainer.optimizers[0]
    assert isinstance(optimizer, pp.Powerprop)
    return optimizer


@pytest.mark.parametrize("method", SPARSIFIERS)
def test_fit_goes_on_bit_identically(method: str, tmp_path: Path) -> None:
    alpha = ALPHAS[[*SPARSIFIERS].index(method) % len(ALPHAS)]
    base = "momentum" if alpha == 2 else "adamw"
    whole = Net(method, base, alpha, seed=0)
    first = fit(whole, MORE, tmp_path)
    again = Net(method, base, alpha, seed=7)
    resumed = fit(again, MORE, tmp_path, tmp_path / f"step={STEPS}.ckpt")
    assert same(whole.net, again.net)
    assert first.active == resumed.active
    assert first.trainable == resumed.trainable
    for name, master in first.masters.items():
        assert torch.equal(master.theta(), resumed.masters[name].theta())


def test_the_weights_are_right_as_soon_as_they_are_loaded(tmp_path: Path) -> None:
    whole = Net("rigl", "adamw", 1.0, seed=0)
    fit(whole, STEPS, tmp_path)
    kept = [int(p.count_nonzero()) for p in whole.net.parameters()]
    again = Net("rigl", "adamw", 1.0, seed=7)
    fit(again, STEPS, tmp_path, tmp_path / f"step={STEPS}.ckpt")
    assert [int(p.count_nonzero()) for p in again.net.parameters()] == kept
    assert same(whole.net, again.net)


# --- half precision -------------------------------------------------------------------------------------------------


class Clipped(lightning.LightningModule):  # type: ignore[misc,name-defined]
    """Lightning evaluates its closure, and clips, inside the optimiser's step."""

    def __init__(self, base: str) -> None:
        super().__init__()
        self.net, self.base = plain(0), base
        self.norms: list[float] = []

    def training_step(self, _: Tensor, index: int) -> Tensor:
        x, y = batch(self.trainer.global_step)
        return F.cross_entropy(self.net(x.bfloat16()), y)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(norm(self.net))

    def configure_optimizers(self) -> pp.Powerprop:
        return pp.Powerprop(CLIPPED[self.base](self.net.parameters()), self.net, 2.0)


CLIPPED = {
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


def norm(model: torch.nn.Module) -> float:
    return torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()


@pytest.mark.parametrize("base", CLIPPED)
def test_half_precision_with_clipping_is_the_loop_by_hand(base: str, tmp_path: Path) -> None:
    steps, limit = 6, 0.05
    module = Clipped(base)
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        precision="bf16-true",
        gradient_clip_val=limit,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, DataLoader(torch.zeros(2, 1)))  # type: ignore[arg-type]
    hand, norms = plain(0).bfloat16(), []
    optimizer = pp.Powerprop(CLIPPED[base](hand.parameters()), hand, 2.0)
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(hand(x.bfloat16()), y).backward()
        norms.append(norm(hand))
        torch.nn.utils.clip_grad_norm_(hand.parameters(), limit)
        optimizer.step()
    assert all(p.dtype == torch.bfloat16 for p in module.net.parameters())
    assert module.norms == norms
    assert min(norms) > limit
    assert same(hand, module.net)
