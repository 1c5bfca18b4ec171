"""Networks: sizes known from the literature, names, initialisation, heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from powerprop.select import select
from powerprop_paper import models

GREY, COLOUR, LARGE = (2, 1, 28, 28), (2, 3, 32, 32), (2, 3, 64, 64)
NETWORKS: dict[str, tuple[Callable[..., nn.Module], int, tuple[int, ...], int]] = {
    "lenet_300_100": (models.lenet_300_100, 266_610, GREY, 10),
    "mlp": (lambda **kw: models.mlp([784, 1000, 1000, 10], **kw), 1_796_010, GREY, 10),
    "conv6": (models.conv6, 2_262_602, COLOUR, 10),
    "conv6 batch norm": (lambda **kw: models.conv6(batch_norm=True, **kw), 2_262_602 + 896, COLOUR, 10),
    "fast_cifar": (models.fast_cifar, 498_114, COLOUR, 10),
    "fast_cifar narrow": (lambda **kw: models.fast_cifar(100, widths=(8, 16), **kw), 7_868, COLOUR, 100),
    "alexnet": (models.alexnet, 6_519_808, COLOUR, 10),
    "resnet18": (models.resnet18, 11_689_512, LARGE, 1000),
    "resnet50": (models.resnet50, 25_557_032, LARGE, 1000),
    "resnet20": (models.resnet20, 269_722, COLOUR, 10),
}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


@pytest.mark.parametrize("name", NETWORKS)
def test_size_output_and_seed(name: str) -> None:
    make, parameters, shape, classes = NETWORKS[name]
    global_state = torch.get_rng_state()
    model = make(generator=seeded())
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert same(model, make(generator=seeded()))
    assert not same(model, make(generator=seeded(1)))
    assert torch.equal(global_state, torch.get_rng_state())
    output = model.eval()(torch.rand(shape, generator=seeded()))
    assert output.shape == (2, classes)
    assert output.isfinite().all()
    assert not torch.equal(output[0], output[1])


@pytest.mark.parametrize("name", ["lenet_300_100", "conv6 batch norm", "fast_cifar", "alexnet", "resnet20"])
def test_every_parameter_gets_a_gradient(name: str) -> None:
    make, _, shape, _ = NETWORKS[name]
    model = make(generator=seeded())
    model(torch.rand(shape, generator=seeded())).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def test_without_a_generator_the_global_seed_decides() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        a = models.lenet_300_100()
        torch.manual_seed(3)
        assert same(a, models.lenet_300_100())
        assert not same(a, models.lenet_300_100())


@pytest.mark.parametrize(
    ("init", "std"),
    [
        ("glorot_normal", math.sqrt(2 / (784 + 300))),
        ("truncated_fan_in", 0.8796 / math.sqrt(784)),  # a unit normal cut off at 2 has the standard deviation 0.8796
        ("he_normal", math.sqrt(2 / 784)),
    ],
)
def test_initialisers_have_their_standard_deviation(init: str, std: float) -> None:
    model = models.lenet_300_100(init=init, generator=seeded())
    weight = model.get_parameter("fc1.weight")
    assert weight.std().item() == pytest.approx(std, rel=0.01)
    assert weight.mean().item() == pytest.approx(0, abs=0.02 * std)
    assert not model.get_parameter("fc1.bias").any()
    if init == "truncated_fan_in":
        assert weight.abs().max() <= 2 / math.sqrt(784)


def test_glorot_counts_the_field_of_a_convolution() -> None:
    weight = models.conv6(generator=seeded()).get_parameter("conv6.weight")
    assert weight.std().item() == pytest.approx(math.sqrt(2 / (256 * 9 + 256 * 9)), rel=0.01)


def test_names_of_small_networks() -> None:
    assert [n for n, _ in models.lenet_300_100().named_parameters()] == [
        f"fc{i}.{kind}" for i in (1, 2, 3) for kind in ("weight", "bias")
    ]
    conv6 = models.conv6().state_dict()
    assert list(conv6)[:2] == ["conv1.weight", "conv1.bias"]
    assert conv6["fc1.weight"].shape == (256, 4096)
    narrow = models.conv6(width=0.25, batch_norm=True).state_dict()
    assert narrow["conv6.weight"].shape == (64, 64, 3, 3)
    assert "conv1.bias" not in narrow
    assert "bn1.running_mean" in narrow


def test_resnet50_has_the_usual_checkpoint_layout() -> None:
    state = models.resnet50().state_dict()
    expected = {
        "conv1.weight": (64, 3, 7, 7),
        "bn1.running_var": (64,),
        "layer1.0.conv1.weight": (64, 64, 1, 1),
        "layer1.0.downsample.0.weight": (256, 64, 1, 1),
        "layer1.0.downsample.1.num_batches_tracked": (),
        "layer2.0.conv2.weight": (128, 128, 3, 3),
        "layer3.5.conv3.weight": (1024, 256, 1, 1),
        "layer4.2.bn3.bias": (2048,),
        "fc.weight": (1000, 2048),
        "fc.bias": (1000,),
    }
    assert {key: tuple(state[key].shape) for key in expected} == expected
    assert len(state) == 320
    assert list(state)[:7] == [
        "conv1.weight",
        "bn1.weight",
        "bn1.bias",
        "bn1.running_mean",
        "bn1.running_var",
        "bn1.num_batches_tracked",
        "layer1.0.conv1.weight",
    ]
    assert "layer1.1.downsample.0.weight" not in state
    assert len(models.resnet18().state_dict()) == 122
    assert "layer1.0.downsample.0.weight" not in models.resnet18().state_dict()


def test_resnet_strides_and_norm_statistics() -> None:
    model = models.resnet50(generator=seeded())
    assert model.get_submodule("layer2.0.conv1").stride == (1, 1)
    assert model.get_submodule("layer2.0.conv2").stride == (2, 2)
    assert torch.equal(model.bn1.running_var, torch.ones(64))
    assert torch.equal(model.bn1.running_mean, torch.zeros(64))
    assert model.bn1.num_batches_tracked == 0


def test_the_output_layer_starts_at_zero_only_if_asked() -> None:
    assert models.resnet18(10).fc.weight.any()
    zero = models.resnet18(10, zero_init_last=True, generator=seeded())
    assert not zero.fc.weight.any()
    assert torch.equal(zero.conv1.weight, models.resnet18(10, generator=seeded()).conv1.weight)


def test_padded_shortcut_by_hand() -> None:
    shortcut = models.resnet20().layer2[0].downsample
    x = torch.arange(2 * 16 * 4 * 4.0).view(2, 16, 4, 4)
    out = shortcut(x)
    assert out.shape == (2, 32, 2, 2)
    assert torch.equal(out[:, 8:24], x[:, :, ::2, ::2])
    assert not out[:, :8].any()
    assert not out[:, 24:].any()


@pytest.mark.parametrize(
    "model", [models.mlp([784, 20, 2], heads=3), models.alexnet(2, heads=3)], ids=["mlp", "alexnet"]
)
def test_heads_answer_for_their_task(model: nn.Module) -> None:
    model.eval()
    x = torch.rand((4, 784) if isinstance(model, models.MLP) else (4, 3, 32, 32), generator=seeded())
    outputs = [model(x, task) for task in range(3)]
    assert all(output.shape == (4, 2) for output in outputs)
    assert not torch.equal(outputs[0], outputs[1])
    assert {name for name, _ in model.named_parameters() if name.startswith("heads.2")} >= {"heads.2.weight"}
    model.get_parameter("heads.1.weight").data.zero_()
    assert torch.equal(model(x, 0), outputs[0])
    for bad in (None, 3, -1):
        with pytest.raises(ValueError, match=rf"task must be in 0\.\.2 .*got {bad}"):
            model(x, bad)


def test_dropout_acts_in_training_only() -> None:
    model = models.alexnet(generator=seeded())
    x = torch.rand(COLOUR, generator=seeded())
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: models.lenet_300_100(init="uniform"), "init must be one of glorot_normal, .* got 'uniform'"),
        (lambda: models.mlp([784]), r"sizes must be two or more positive widths, input first, got \[784\]"),
        (lambda: models.mlp([784, 0, 10]), r"sizes must be .* got \[784, 0, 10\]"),
        (lambda: models.mlp([4, 2], heads=-1), "heads must be 0 .* got -1"),
        (lambda: models.conv6(width=0), "width must be positive, got 0"),
        (lambda: models.mlp([4, 2])(torch.zeros(1, 4), 1), "one output layer for all tasks, got task=1"),
        *(
            (partial(models.fast_cifar, widths=widths), "widths must be one to four positive numbers of channels, got ")
            for widths in ((), (0,), (1, 2, 3, 4, 5))
        ),
    ],
)
def test_bad_input_is_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_the_weights_of_the_fast_network() -> None:
    model = models.fast_cifar(generator=seeded())
    assert sum(w.numel() for w in select(model).values()) == 496_928
    assert model.fc.weight.any(), "a last layer of zeros could not learn under α > 1"


def test_the_fast_network_keeps_its_memory_format() -> None:
    x = torch.rand(COLOUR, generator=seeded())
    plain, last = (models.fast_cifar(generator=seeded()).eval() for _ in range(2))
    last.to(memory_format=torch.channels_last)
    inner = last.blocks(last.stem(x.to(memory_format=torch.channels_last)))
    assert inner.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(plain(x), last(x.to(memory_format=torch.channels_last)), atol=1e-5)
