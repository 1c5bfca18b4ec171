"""What all sparse-training methods refuse, warn of and allow."""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import powerprop as pp
from nets import batch, net, train
from powerprop.sparsify import Method
from rows import KAST, Rows, push, sgd


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pp.RigL(1.4, steps=10), r"sparsity must be in \[0, 1\), got 1\.4"),
        (lambda: pp.Static(1.0), r"sparsity must be in \[0, 1\), got 1\.0"),
        (lambda: pp.Static(0.5, distribution="even"), "distribution must be one of uniform, erk, global, got 'even'"),
        (lambda: pp.SET(0.5), r"stop=0\.75 is a fraction of steps: give steps="),
        (lambda: pp.SET(0.5, steps=0), "steps must be a positive whole number of optimiser steps, got 0"),
        (lambda: pp.SET(0.5, steps=10.5), r"steps must be a positive whole number of optimiser steps, got 10\.5"),  # type: ignore[arg-type]
        (lambda: pp.SET(0.5, steps=10, fraction=1.5), r"fraction must be in \(0, 1\], got 1\.5"),
        (
            lambda: pp.SET(0.5, steps=10, interval=0),
            "interval must be a positive whole number of optimiser steps, got 0",
        ),
        (lambda: pp.SET(0.5, steps=10, interval=-3), "interval must be a positive whole number .*, got -3"),
        (lambda: pp.SET(0.5, steps=10, interval=0.1), r"interval must be a positive whole number .*, got 0\.1"),  # type: ignore[arg-type]
        (lambda: pp.TopKAST(0.5, interval=0.1), r"interval must be a positive whole number .*, got 0\.1"),  # type: ignore[arg-type]
        (lambda: pp.RigL(0.5, steps=10, stop=1.5), r"stop must be a step .* or a fraction of steps .*, got 1\.5"),
        (lambda: pp.DSR(0.5, steps=10, threshold=0.0), r"threshold must be more than 0, got 0\.0"),
        (lambda: pp.IterativePruning(0.5), r"start=0\.2 is a fraction of steps: give steps="),
        (
            lambda: pp.IterativePruning(0.5, start=5, stop=5, interval=1),
            "start must come before stop, got start=5, stop=5",
        ),
        (lambda: pp.TopKAST(0.5, backward_sparsity=0.8), r"backward_sparsity must be at most sparsity=0\.5, got 0\.8"),
        (
            lambda: pp.TopKAST(0.5, backward_sparsity=-1),
            r"sparsity must be in \[0, 1\), got -1 for 'backward_sparsity'",
        ),
        (lambda: pp.TopKAST(0.5, decay=-0.1), r"decay must be at least 0 and finite, got -0\.1"),
        (lambda: pp.TopKAST(0.5, decay=math.inf), r"decay must be at least 0 and finite, got inf"),
        (lambda: pp.TopKAST(0.5, decay=math.nan), r"decay must be at least 0 and finite, got nan"),
        (lambda: pp.TopKAST(0.5, freeze=0.5), r"freeze=0\.5 is a fraction of steps: give steps="),
    ],
)
def test_bad_arguments_are_repeated(make: Callable[[], Method], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_pattern_that_matches_nothing() -> None:
    with pytest.raises(ValueError, match=r"layers='conv\.\*' matches no weight; there are a\.weight"):
        sgd(Rows(a=KAST), pp.SNIP(0.5, layers={"conv.*": 0.0}))


@pytest.mark.parametrize(
    "method", [pp.RigL(0.97, steps=9, interval=3), pp.TopKAST(0.97), pp.IterativePruning(0.97, steps=9)]
)
def test_a_layer_that_keeps_nothing_is_worth_a_warning(method: Method) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1))
    with pytest.warns(UserWarning, match=r"'1\.weight' keeps none of its 16 weights at sparsity=0\.97") as caught:
        optimizer = sgd(model, method)
    assert len(caught) == 1
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()


def test_one_method_serves_one_optimiser() -> None:
    method = pp.Static(0.5)
    sgd(Rows(a=KAST), method)
    with pytest.raises(ValueError, match="this Static already belongs to an optimiser"):
        sgd(Rows(a=KAST), method)


RIGL = partial(pp.RigL, steps=1000)


@pytest.mark.parametrize(
    ("other", "mine", "message"),
    [
        (pp.SET(0.5, steps=1000), RIGL(0.5), "method='SET', not 'RigL'"),
        (RIGL(0.75), RIGL(0.5), r"sparsity=0\.75, not 0\.5"),
        (RIGL(0.5, distribution="erk"), RIGL(0.5), "distribution='erk', not 'uniform'"),
        (pp.TopKAST(0.5, backward_sparsity=0.25), pp.TopKAST(0.5), r"backward_sparsity=0\.25, not 0\.0"),
    ],
)
def test_the_state_of_another_method_is_refused(other: Method, mine: Method, message: str) -> None:
    state = sgd(Rows(a=KAST), other).state_dict()
    with pytest.raises(ValueError, match=f"the state was saved with {message}"):
        sgd(Rows(a=KAST), mine).load_state_dict(state)


def test_whole_numbers_of_any_kind_are_steps() -> None:
    methods = pp.SET(0.5, steps=np.int64(40), interval=np.int32(5)), pp.TopKAST(0.5, interval=np.int64(5))  # type: ignore[arg-type]
    assert [(m.steps, m.interval) for m in methods] == [(40, 5), (None, 5)]
    assert all(type(m.interval) is int for m in methods)


def test_a_method_prints_as_it_was_made() -> None:
    assert (
        repr(pp.Static(0.5, seed=3))
        == "Static(sparsity=0.5, distribution='uniform', steps=None, layers=None, seed=3, pattern=None)"
    )


@pytest.mark.parametrize("method", [pp.RigL(0.8, steps=400), pp.SNFS(0.8, steps=400), pp.DSR(0.8, steps=400)])
def test_weights_cannot_be_added_once_the_masks_are_laid_out(method: Method) -> None:
    model = net()
    optimizer = pp.Powerprop(torch.optim.SGD(model[0].parameters(), lr=0.1), model, 1.0, sparsify=method)
    with pytest.raises(ValueError, match=rf"{type(method).__name__} .*cannot take in '4\.weight' later"):
        optimizer.add_param_group({"params": model[4].parameters()})
    optimizer.add_param_group({"params": [model[4].bias]})  # type: ignore[list-item]
    assert [len(g["params"]) for g in optimizer.param_groups] == [2, 1]
    train(model, optimizer, 4)
    assert list(optimizer.masters) == ["0.weight"]


def test_a_dense_layer_simply_trains() -> None:
    model, twin = net(), net()
    method = pp.RigL(0.0, steps=4000, interval=1000)
    train(model, pp.Powerprop(torch.optim.SGD(model.parameters(), lr=0.1), model, 1.0, sparsify=method), 10)
    train(twin, torch.optim.SGD(twin.parameters(), lr=0.1), 10)
    x, _ = batch(0)
    assert torch.equal(model(x), twin(x))


def test_snip_without_any_score_names_the_layer_of_zeros() -> None:
    model = Rows(a=[0.0] * 8)
    optimizer = sgd(model, pp.SNIP(0.5), 1.0)
    with pytest.raises(ValueError, match=r"SNIP's scores .* are all 0, .*: 'a\.weight' hold zeros alone"):
        push(model, optimizer, a=[1.0] * 8)


def test_masks_that_would_never_move_are_worth_a_warning() -> None:
    message = r"RigL never moves .* at step 100 \(interval\), .* from step 90 \(stop=0\.75, steps=120\)"
    with pytest.warns(UserWarning, match=message):
        sgd(Rows(a=KAST), pp.RigL(0.5, steps=120))
    with pytest.warns(UserWarning, match=r"SNFS never moves .* at step 100 .* from step 60 \(stop=1\.0, steps=60\)"):
        sgd(Rows(a=KAST), pp.SNFS(0.5, steps=60))
    with pytest.warns(
        UserWarning, match=r"IterativePruning prunes all at once, at step 40 \(stop=0\.8\): its interval of 90"
    ):
        sgd(Rows(a=KAST), pp.IterativePruning(0.5, steps=50, interval=90))


def test_training_goes_on_for_longer() -> None:
    short, longer = pp.RigL(0.5, steps=1000), pp.RigL(0.5, steps=2000)
    saved = sgd(Rows(a=KAST), short)
    short.step = 7
    sgd(Rows(a=KAST), longer).load_state_dict(saved.state_dict())
    assert (longer.step, longer.steps) == (7, 2000)
