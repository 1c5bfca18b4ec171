"""Wanda and SparseGPT: against plain numpy, block by block, on models as others make them."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

import powerprop as pp
from powerprop.sparsify.calibrated import COLUMNS, DAMPING

Array = npt.NDArray[np.float64]
CRITERIA = ("wanda", "sparsegpt")
every_criterion = pytest.mark.parametrize("criterion", CRITERIA)


def layer(inputs: int = 24, outputs: int = 16) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs)


def rows(inputs: int = 24, count: int = 160) -> Tensor:
    """Inputs of different sizes that depend on each other."""
    generator = torch.Generator().manual_seed(1)
    mixed = torch.randn(count, inputs, generator=generator) @ torch.randn(inputs, inputs, generator=generator)
    return mixed * torch.linspace(0.1, 2, inputs)


# --- against numpy ------------------------------------------------------------------------------------------------


def best_of_groups(score: Array, n: int, m: int) -> npt.NDArray[np.bool_]:
    """The n highest of every m columns, row by row."""
    mask = np.zeros(score.shape, bool)
    for i, row in enumerate(score):
        for start in range(0, len(row), m):
            mask[i, start + np.argsort(-row[start : start + m], kind="stable")[:n]] = True
    return mask


def numpy_wanda(w: Array, x: Array, keep: float, groups: tuple[int, int] | None) -> tuple[Array, Array]:
    score = np.abs(w) * np.linalg.norm(x, axis=0)
    mask = best_of_groups(score, *(groups or (round(keep * w.shape[1]), w.shape[1])))
    return mask, w * mask


def numpy_sparsegpt(w: Array, x: Array, keep: float, groups: tuple[int, int] | None) -> tuple[Array, Array]:
    """With an inverse of its own for every column, where the other reads all of them off one factor."""
    w, hessian, width = w.copy(), x.T @ x, w.shape[1]
    hessian += DAMPING * np.mean(np.diag(hessian)) * np.eye(width)
    inverse = [np.linalg.inv(hessian[j:, j:]) for j in range(width)]
    d = np.array([each[0, 0] for each in inverse])
    mask = np.zeros(w.shape, bool)
    for j in range(width):
        if groups is None and j % COLUMNS == 0:
            end = min(j + COLUMNS, width)
            score = w[:, j:end] ** 2 / d[j:end]
            best = np.argsort(-score.ravel(), kind="stable")[: round(keep * score.size)]
            mask[:, j:end] = np.isin(np.arange(score.size), best).reshape(score.shape)
        if groups is not None and j % groups[1] == 0:
            part = slice(j, j + groups[1])
            mask[:, part] = best_of_groups(w[:, part] ** 2 / d[part], *groups)
        for i in np.flatnonzero(~mask[:, j]):
            w[i, j:] -= w[i, j] / d[j] * inverse[j][0]
            w[i, j] = 0
    return mask, w


@pytest.mark.parametrize("inputs", [24, 192])
@pytest.mark.parametrize("pattern", [None, "2:4", "1:3"])
@pytest.mark.parametrize(("criterion", "twin"), [("wanda", numpy_wanda), ("sparsegpt", numpy_sparsegpt)])
def test_masks_and_weights_are_those_of_numpy(
    criterion: str, twin: Callable[..., Any], pattern: str | None, inputs: int
) -> None:
    model, x = nn.Sequential(layer(inputs)), rows(inputs)
    before = model[0].weight.detach().double().numpy()
    groups = tuple(map(int, pattern.split(":"))) if pattern else None
    mask, weight = twin(before, x.double().numpy(), 0.25, groups)
    how: dict[str, Any] = {"pattern": pattern} if pattern else {"sparsity": 0.75}
    found = pp.prune(model, **how, criterion=criterion, data=x.split(40))
    assert np.array_equal(found["0.weight"].numpy(), mask)
    np.testing.assert_allclose(model[0].weight.detach().numpy(), weight, atol=1e-5)


def test_the_weights_that_stay_make_up_for_those_that_go() -> None:
    x, wanted, error = rows(), layer()(rows()), {}
    for criterion in ("magnitude", *CRITERIA):
        model = layer()
        pp.prune(model, 0.5, criterion=criterion, data=None if criterion == "magnitude" else [x])
        error[criterion] = float((model(x) - wanted).square().mean().detach())
    assert error["sparsegpt"] < 0.5 * error["wanda"] < 0.5 * error["magnitude"]


@every_criterion
@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.77, 0.99])
@pytest.mark.parametrize("distribution", ["uniform", "erk", "global"])
def test_as_many_stay_as_by_magnitude(criterion: str, sparsity: float, distribution: str) -> None:
    def make() -> nn.Module:
        return nn.Sequential(layer(), nn.ReLU(), layer(16, 150), layer(150, 3))

    asked = {n: int(m.sum()) for n, m in pp.magnitude_masks(make(), sparsity, distribution).items()}
    model = make()
    masks = pp.prune(model, sparsity, distribution, criterion=criterion, data=[rows()])
    assert {n: int(m.sum()) for n, m in masks.items()} == asked
    assert pp.Masks.nonzero(model) == masks


def test_rows_that_keep_one_more_are_those_that_need_it_most() -> None:
    model = nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[9.0, 1, 2], [8, 7, 6], [5, 4, 1]]))
    masks = pp.prune(model, 5 / 9, criterion="wanda", data=[torch.ones(1, 3)])
    assert masks["weight"].int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 0, 0]]


@every_criterion
def test_inputs_that_are_always_zero_go_first(criterion: str) -> None:
    model, x = layer(), rows()
    x[:, 5:11] = 0
    masks = pp.prune(model, 0.25, criterion=criterion, data=[x])
    assert not masks["weight"][:, 5:11].any()
    assert masks["weight"][:, :5].all()


# --- block by block -----------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Two linear layers on the residual stream, the second of which is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu()) + self.down(self.up(-x).relu())


class Net(nn.Module):
    """Blocks in a list, and a head that comes first in memory."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(8, 5)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


@every_criterion
def test_a_block_sees_what_the_blocks_before_it_have_become(criterion: str) -> None:
    x, model, byhand = rows(8), Net(), Net()
    pp.prune(model, 0.6, criterion=criterion, data=[(x[:100], "labels"), (x[100:], "labels")])
    for where in ("blocks.0.*.weight", "blocks.1.*.weight", "blocks.2.*.weight", "head.weight"):
        pp.prune(byhand, 0.6, criterion=criterion, data=[x], where=where)
    for (name, weight), other in zip(model.named_parameters(), byhand.parameters(), strict=True):
        torch.testing.assert_close(weight, other, msg=name)
    assert hooks(model) == 0


@every_criterion
def test_no_more_is_run_than_is_needed(criterion: str) -> None:
    model, seen = Net(), []
    for i, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, i=i: seen.append(i))
    pp.prune(model, 0.5, criterion=criterion, data=[rows(8)])
    assert seen == [0, 1, 2, 0, 0, 1, 0, 1, 2, 0, 1, 2]  # all, up to each block, and to the head


def test_inputs_are_those_of_one_block_at_a_time() -> None:
    """Whatever the number of batches and blocks, no more than a pass holds by itself is alive."""
    model, inputs, alive = Net(6), list[weakref.ref[Tensor]](), []

    def look(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs.append(weakref.ref(args[0]))
        alive.append(len({id(found) for each in inputs if (found := each()) is not None}))

    for block in model.blocks:
        block.up.register_forward_pre_hook(look)  # type: ignore[union-attr]
    pp.prune(model, 0.5, criterion="sparsegpt", data=(rows(8) for _ in range(10)))
    assert max(alive) <= 10 + 3  # the batches themselves, which are the first block's inputs


@every_criterion
@pytest.mark.parametrize("pattern", ["2:4", "1:4"])
def test_patterns(criterion: str, pattern: str) -> None:
    model = Net()
    pp.prune(model, pattern=pattern, criterion=criterion, data=[rows(8)], layers={"head.weight": 0.0})
    n, m = map(int, pattern.split(":"))
    for name, weight in model.named_parameters():
        if "blocks" in name and weight.ndim == 2:
            assert bool(((weight.view(-1, m) != 0).sum(1) == n).all()), name
    assert model.head.weight.all()


@every_criterion
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions(criterion: str, dtype: torch.dtype) -> None:
    model = Net().to(dtype)
    pp.prune(model, 0.5, criterion=criterion, data=[rows(8).to(dtype)])
    assert pp.sparsity(model).total == pytest.approx(0.5)
    assert model.head.weight.dtype == dtype


@every_criterion
def test_a_training_goes_on_from_it(criterion: str) -> None:
    model = Net()
    masks = pp.prune(model, 0.5, criterion=criterion, data=[rows(8)])
    optimizer = pp.Powerprop(torch.optim.Adam(model.parameters(), lr=1e-2), model, alpha=2.0)
    for _ in range(3):
        optimizer.zero_grad()
        model(rows(8)).square().mean().backward()
        optimizer.step()
    assert (pp.Masks.nonzero(model) - masks).count() == 0


# --- what is refused changes nothing ------------------------------------------------------------------------------


class Fails(Net):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 3:
            raise RuntimeError("three rows")
        return super().forward(x)


def broken_loader() -> Iterator[Tensor]:
    yield rows(8)
    raise OSError("the disk is gone")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"criterion": "obd"}, ValueError, "criterion must be one of magnitude, wanda, sparsegpt, got 'obd'"),
        ({"criterion": "wanda"}, ValueError, "criterion='wanda' needs batches of data, got data=None"),
        ({"data": [rows(8)]}, ValueError, "criterion='magnitude' looks at no data"),
        ({"criterion": "wanda", "data": []}, ValueError, "needs at least one batch of data, got none"),
        ({"criterion": "wanda", "data": broken_loader()}, OSError, "the disk is gone"),
        ({"criterion": "wanda", "data": [rows(8), rows(8, 3)]}, RuntimeError, "three rows"),
        ({"criterion": "sparsegpt", "data": [["text"]]}, TypeError, "a batch must be a tensor, begin with one or"),
        ({"criterion": "sparsegpt", "data": [rows(8), rows(8) / 0]}, FloatingPointError, "NaN or infinite in batch 1"),
    ],
)
def test_what_is_refused_changes_nothing(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    model = Fails().train()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=message):
        pp.prune(model, 0.5, **arguments)
    assert all(torch.equal(before[n], p) for n, p in model.state_dict().items())
    assert hooks(model) == 0
    assert model.training


def test_layers_that_are_not_linear_or_not_reached() -> None:
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Conv2d(3, 4, 8), nn.Flatten(), nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"for linear layers, and '0.weight' is of a Conv2d; leave it dense by layers"):
        pp.prune(model, 0.5, criterion="wanda", data=[images])
    pp.prune(model, 0.5, criterion="wanda", data=[images], layers={"0.weight": 0.0})
    unused = nn.ModuleDict({"used": nn.Linear(8, 8), "not": nn.Linear(8, 8)})
    unused.forward = lambda x: unused["used"](input=x)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"the batches never call the layer of 'not.weight'"):
        pp.prune(unused, 0.5, criterion="wanda", data=[rows(8)])
    narrow = nn.Sequential(nn.Linear(8, 6))
    with pytest.raises(ValueError, match="needs a multiple of 3 inputs"):
        pp.prune(narrow, pattern="1:3", criterion="wanda", data=[rows(8)])


# --- Hugging Face -------------------------------------------------------------------------------------------------


def tiny(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2)
        return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    if kind == "bert":
        return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=32, **sizes))  # type: ignore[no-any-return]
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **sizes))  # type: ignore[no-any-return]


@every_criterion
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_models_of_hugging_face(kind: str, criterion: str) -> None:
    model = tiny(kind)
    ids = torch.randint(0, 32, (4, 12), generator=torch.Generator().manual_seed(0))
    batches = [{"input_ids": part, "attention_mask": torch.ones_like(part), "labels": part} for part in ids.split(2)]
    before = hooks(model)
    masks = pp.prune(model, pattern="2:4", criterion=criterion, data=batches)
    assert hooks(model) == before
    assert pp.sparsity(model).total == pytest.approx(0.5)
    conv1d = "transformer.h.1.mlp.c_fc.weight"
    if conv1d in masks:  # (inputs, outputs): groups are along the inputs
        assert bool((masks[conv1d].T.reshape(-1, 4).sum(1) == 2).all())
