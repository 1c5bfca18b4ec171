"""Gradients of every input by itself: without a loop, they are what a loop over the inputs gives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from powerprop.continual import Classification, Regression, diagonal_fisher
from powerprop.continual import importance as per_sample
from powerprop.continual.importance import mean_over_inputs, sensitivity

COUNT = 7


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Twice(nn.Module):
    """A layer that is called twice, one whose weight is used beside it, one that is not used, one held still."""

    def __init__(self) -> None:
        super().__init__()
        self.again, self.beside, self.unused, self.still, self.out = (nn.Linear(6, 6) for _ in range(5))
        self.still.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.again(torch.tanh(self.again(x))))
        x = self.beside(x) + F.linear(x, self.beside.weight.t())
        return self.out(input=torch.tanh(self.still(x)))


class Tied(nn.Module):
    """Two layers with one weight and biases of their own, and an output layer that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.first, self.second = nn.Embedding(5, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.out = nn.Linear(6, 5, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.second(torch.tanh(self.first(self.words(x)))).mean(1))


class Pictures(nn.Module):
    """Convolutions with strides, paddings, groups and dilations, batch and group norms, and a pooled end."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
            nn.Conv2d(8, 8, (2, 3), groups=4, dilation=(1, 2), padding="same"), nn.GroupNorm(2, 8), nn.ReLU(),
            nn.Conv2d(8, 6, 3, stride=(2, 1), padding=(2, 1), padding_mode="circular", bias=False), nn.ReLU(),
            nn.ConvTranspose2d(6, 6, 2),
        )  # fmt: skip
        self.line, self.out = nn.Conv1d(6, 6, 3, groups=3, padding=1), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.line(self.body(x).flatten(2))).mean(2))


class Scaled(nn.Linear):
    """A layer that is none of torch's: its weights are not what it multiplies by."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, torch.tanh(self.weight), self.bias)


def words(*shape: int) -> Tensor:
    return torch.randint(5, shape, generator=torch.Generator().manual_seed(0))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)), lambda: randn(COUNT, 6)),
    "linear 3-D": (lambda: nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Flatten(), nn.Linear(15, 4)),
                   lambda: randn(COUNT, 3, 6)),
    "convolutions": (Pictures, lambda: randn(COUNT, 3, 8, 8)),
    "used twice": (Twice, lambda: randn(COUNT, 6)),
    "tied": (Tied, lambda: words(COUNT, 3)),
    "attention": (lambda: nn.Sequential(nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), nn.Flatten(),
                                        nn.Linear(18, 4)), lambda: randn(COUNT, 3, 6)),
    "own layer": (lambda: nn.Sequential(Scaled(6, 5), nn.Linear(5, 4)), lambda: randn(COUNT, 6)),
    "weight norm": (lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)), nn.Linear(5, 4)),
                    lambda: randn(COUNT, 6)),
}  # fmt: skip


def made(name: str) -> tuple[nn.Module, Tensor]:
    network, inputs = NETWORKS[name]
    model = network().double()
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.copy_(0.5 * randn(*parameter.shape, seed=seed))
    return model, inputs()


def looped(model: nn.Module, loss: Callable[[Any], Tensor], x: Tensor, measure: Callable[[Tensor], Tensor]) -> Any:
    """The definition: one input after the other."""
    model.eval()
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    total: dict[str, Tensor] = {}
    for i in range(len(x)):
        found = torch.autograd.grad(loss(x[i : i + 1]), list(named.values()), allow_unused=True)
        for name, g in zip(named, found, strict=True):
            if g is not None:
                total[name] = total.get(name, 0) + measure(g) / len(x)
    return total


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("measure", [torch.square, torch.abs], ids=["square", "abs"])
@pytest.mark.parametrize("name", NETWORKS)
def test_what_a_loop_over_inputs_gives_however_they_are_batched(
    name: str, measure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = made(name)

    def loss(batch: Tensor) -> Tensor:
        return model(batch).square().sum(1).sqrt().mean()

    wanted = looped(model, loss, x, measure)
    for size, room in ((1, 2**24), (3, 2**24), (COUNT, 2**24), (COUNT, 600)):
        monkeypatch.setattr(per_sample, "ROOM", room)
        found = mean_over_inputs(model.train(), loss, torch.split(x, size), measure)
        assert model.training
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-12)
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    assert all(isinstance(p, nn.Parameter) for m in model.modules() for p in m._parameters.values() if p is not None)


def test_the_loss_of_a_batch_of_one_is_what_counts() -> None:
    """A loss that is no mean over inputs, of batches that are dictionaries."""
    model, x = made("linear")
    y = torch.tensor([0, 1, 2, 3, -100, 1, 0])

    def loss(batch: dict[str, Any]) -> Tensor:
        kept = (batch["y"] >= 0).double()
        return (kept * F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")).sum() / (kept.sum() + 1)

    found = mean_over_inputs(model, loss, [{"x": x, "y": y, "name": "all"}], torch.square)
    again = mean_over_inputs(model, loss, [{"x": x[i : i + 1], "y": y[i : i + 1]} for i in range(COUNT)], torch.square)
    for name, value in found.items():
        torch.testing.assert_close(value, again[name])


def test_what_cannot_be_vectorised_is_looped_over_with_a_warning() -> None:
    model = nn.GRU(3, 4, batch_first=True).double()
    x = randn(5, 6, 3)

    def loss(batch: Tensor) -> Tensor:
        return model(batch)[0].square().mean()

    with pytest.warns(UserWarning, match="GRU cannot be vectorised, its inputs are gone through one by one"):
        found = mean_over_inputs(model, loss, [x], torch.square)
    for name, value in looped(model, loss, x, torch.square).items():
        torch.testing.assert_close(found[name], value)


def test_data_without_rows_are_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="expected batches of tensors with a row for every input, got str"):
        mean_over_inputs(model, lambda b: model(b).sum(), ["text"], torch.square)
    with pytest.raises(ValueError, match="at least one input, got none"):
        mean_over_inputs(model, lambda b: model(b).sum(), [], torch.square)


def test_an_error_of_the_network_is_its_own_and_leaves_it_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(4, 2))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        mean_over_inputs(model, lambda b: model(b).sum(), [torch.ones(2, 2)], torch.square)
    assert all(isinstance(module.weight, nn.Parameter) and not module._forward_hooks for module in model)


# --- the Fisher information of a classifier ---------------------------------------------------------------------


def classifier() -> tuple[nn.Linear, Tensor, Tensor, Tensor]:
    """Logits Wx + b of which gradients are known: (p - onehot) xᵀ."""
    model = nn.Linear(3, 4).double()
    with torch.no_grad():
        model.weight.copy_(randn(4, 3, seed=1)), model.bias.copy_(randn(4, seed=2))
    x, y = randn(COUNT, 3), torch.tensor([0, 1, 2, 3, 0, 1, 2])
    return model, x, y, model(x).softmax(1).detach()


def by_hand(p: Tensor, y: Tensor, x: Tensor) -> Tensor:
    return ((p - F.one_hot(y, 4)).square().t() @ x.square()) / len(x)


def test_the_labels_of_the_data() -> None:
    model, x, y, p = classifier()
    found = diagonal_fisher(model, [(x, y)], Classification(), labels="empirical")
    torch.testing.assert_close(found["weight"], by_hand(p, y, x))
    torch.testing.assert_close(found["bias"], (p - F.one_hot(y, 4)).square().mean(0))


def test_the_likeliest_labels() -> None:
    model, x, y, p = classifier()
    found = diagonal_fisher(model, [(x, y)], Classification(), labels="predicted")
    torch.testing.assert_close(found["weight"], by_hand(p, p.argmax(1), x))


def test_the_mean_over_all_labels_is_the_fisher_information() -> None:
    """Σ_c p_c (p - e_c)² = p(1 - p)."""
    model, x, y, p = classifier()
    for batches in ([(x, y)], [(x[:2], y[:2]), (x[2:], y[2:])]):
        found = diagonal_fisher(model, batches, Classification(), labels="expected")
        torch.testing.assert_close(found["weight"], (p * (1 - p)).t() @ x.square() / COUNT)


def test_labels_that_are_drawn_are_the_same_on_average_and_for_the_same_seed() -> None:
    model, x, y, p = classifier()
    x, y, p = x.repeat(3000, 1), y.repeat(3000), p.repeat(3000, 1)
    found, again, other = (
        diagonal_fisher(model, [(x, y)], Classification(), generator=torch.Generator().manual_seed(seed))["weight"]
        for seed in (0, 0, 1)
    )
    assert torch.equal(found, again)
    assert not torch.equal(found, other)
    torch.testing.assert_close(found, (p * (1 - p)).t() @ x.square() / len(x), rtol=0.1, atol=0.01)


def test_the_labels_of_the_data_make_the_squared_gradient_of_the_loss_as_it_is() -> None:
    """(Wx - y)² / 4 outputs: the gradient is (Wx - y) xᵀ / 2."""
    model, x, _, _ = classifier()
    y = randn(COUNT, 4, seed=3)
    found = diagonal_fisher(model, [(x, y)], Regression(), labels="empirical")
    error = (model(x) - y).detach()
    torch.testing.assert_close(found["weight"], (error / 2).square().t() @ x.square() / COUNT)


def test_unknown_labels_are_refused() -> None:
    model, x, y, _ = classifier()
    with pytest.raises(ValueError, match="labels must be one of sampled, expected, predicted, empirical, got 'true'"):
        diagonal_fisher(model, [(x, y)], Classification(), labels="true")  # type: ignore[arg-type]


def test_sensitivity_of_a_linear_layer() -> None:
    """|∂‖Wx + b‖²/∂W| = 2 |f| |x|ᵀ."""
    model, x, y, _ = classifier()
    outputs = model(x).detach().abs()
    found = sensitivity(model, [(x, y)], Classification())
    torch.testing.assert_close(found["weight"], 2 * outputs.t() @ x.abs() / COUNT)
    torch.testing.assert_close(found["bias"], 2 * outputs.mean(0))


def test_the_mean_of_the_outputs_is_as_many_times_less() -> None:
    model, x, y, _ = classifier()
    summed, mean = (sensitivity(model, [(x, y)], Classification(), mean=mean) for mean in (False, True))
    torch.testing.assert_close(mean["weight"], summed["weight"] / 4)


def test_outputs_of_classes_that_are_yet_to_come_do_not_matter() -> None:
    """Two of four classes are seen: the importances are those of a layer that has these two alone."""
    model, x, y, _ = classifier()
    small, objective = torch.nn.Linear(3, 2, dtype=x.dtype), Classification("stream", among="seen")
    objective.begin(0, (1, 3))
    with torch.no_grad():
        small.weight.copy_(model.weight[[1, 3]])
        small.bias.copy_(model.bias[[1, 3]])
    for labels in ("predicted", "expected"):
        found = diagonal_fisher(model, [(x, y % 2)], objective, labels=labels)["weight"]
        expected = diagonal_fisher(small, [(x, y % 2)], Classification(), labels=labels)["weight"]
        torch.testing.assert_close(found[[1, 3]], expected)
        assert not found[[0, 2]].any()
    found, expected = sensitivity(model, [(x, y)], objective), sensitivity(small, [(x, y)], Classification())
    torch.testing.assert_close(found["bias"][[1, 3]], expected["bias"])
