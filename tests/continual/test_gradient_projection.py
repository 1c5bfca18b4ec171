"""GPM and OWM: what is projected away, and that earlier inputs are answered as before."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from powerprop import Powerprop
from powerprop.continual import GPM, OWM, Regression
from powerprop.continual.gradient_projection import grown, without
from powerprop.continual.layers import joined, patches, put
from tasks import OPTIMIZERS, every_optimizer, toy_model, toy_task


def gram(*columns: list[float]) -> Tensor:
    R = torch.tensor(columns, dtype=torch.float64).T
    return R @ R.T


def test_basis_has_as_few_directions_as_hold_the_share() -> None:
    R = gram([3.0, 0.0, 0.0], [0.0, 1.0, 0.0])  # nine tenths of it along the first axis
    none = torch.zeros(3, 0, dtype=torch.float64)
    assert grown(none, R, 0.9).abs().tolist() == [[1.0], [0.0], [0.0]]
    assert grown(none, R, 0.91).shape == (3, 2)
    assert grown(none, R, 1.0).shape == (3, 2)


def test_basis_grows_by_what_it_misses() -> None:
    first = grown(torch.zeros(3, 0, dtype=torch.float64), gram([1.0, 0.0, 0.0]), 0.97)
    assert torch.equal(grown(first, gram([2.0, 0.1, 0.0]), 0.97), first)  # it holds 99.8% of that already
    both = grown(first, gram([1.0, 0.0, 1.0]), 0.97)
    torch.testing.assert_close(both @ both.T, torch.diag(torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)))


def test_recursion_is_the_closed_form() -> None:
    A = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    closed = torch.eye(5) - A @ torch.linalg.inv(A.T @ A + 0.3 * torch.eye(7)) @ A.T
    one_by_one, blocks = torch.eye(5, dtype=torch.float64), torch.eye(5, dtype=torch.float64)
    for column in A.T:
        one_by_one = without(one_by_one, column[None], 0.3)
    for part in torch.split(A.T, 3):
        blocks = without(blocks, part, 0.3)
    torch.testing.assert_close(one_by_one, closed)
    torch.testing.assert_close(blocks, closed)


def test_one_step_of_the_recursion_by_hand() -> None:
    P = without(torch.eye(2), torch.tensor([[2.0, 0.0]]), 1.0)  # k = (2, 0), 1 - 4 / (1 + 4)
    torch.testing.assert_close(P, torch.tensor([[0.2, 0.0], [0.0, 1.0]]))


def line(kind: type, optimizer: str, **options: object) -> GPM | OWM:
    """A linear layer whose first task has inputs along the first axis only."""
    model = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.3, -0.2, 0.4], [-0.1, 0.5, 0.2]]))
    ours = kind(model, OPTIMIZERS[optimizer], objective=Regression(), steps=20, batch_size=8, **options)
    ours.learn((torch.tensor([[1.0, 0.0, 0.0]]).repeat(16, 1), torch.ones(16, 2)))
    return ours


@every_optimizer
def test_steps_have_no_part_in_the_subspace_whatever_the_optimiser(optimizer: str) -> None:
    ours = line(GPM, optimizer)
    x = torch.randn(32, 3, generator=torch.Generator().manual_seed(1))
    before = ours.model.weight.detach().clone()
    ours.learn((x, -torch.ones(32, 2)))
    moved = ours.model.weight.detach() - before
    assert torch.equal(moved[:, 0], torch.zeros(2))
    assert moved[:, 1:].abs().min() > 1e-3


def test_sgd_of_owm_is_the_published_update() -> None:
    ours = line(OWM, "sgd")
    P, weight = ours.directions.matrix[""], ours.model.weight.detach().clone()
    assert float(P[0, 0]) < 0.05
    assert torch.equal(P[1:, 1:], torch.eye(2))
    ours.begin(1, steps=1)
    x = torch.ones(4, 3)
    (gradient,) = torch.autograd.grad((loss := ours.model(x).square().mean()), ours.model.weight, retain_graph=True)
    ours.step(loss)
    torch.testing.assert_close(ours.model.weight.detach(), weight - 0.3 * gradient @ P)


@pytest.mark.parametrize("kind", [GPM, OWM])
def test_whatever_calls_the_optimiser(kind: type) -> None:
    ours = line(kind, "adam")
    before = ours.model.weight.detach()[:, 0].clone()
    ours.begin(1, steps=20)
    for _ in range(20):
        ours.optimizer.zero_grad()
        (ours.model(torch.ones(4, 3)) - 5).square().mean().backward()
        ours.optimizer.step()
    torch.testing.assert_close(ours.model.weight.detach()[:, 0], before, atol=0 if kind is GPM else 0.01, rtol=0)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("options", [{}, {"padding": 1, "stride": 2}, {"padding": "same", "padding_mode": "circular"}])
def test_patches_are_what_a_convolution_multiplies(bias: bool, options: dict) -> None:
    layer = nn.Conv2d(2, 3, 3, bias=bias, **options)
    x = torch.randn(4, 2, 6, 6)
    found = patches(layer, x) @ joined(layer).T
    torch.testing.assert_close(found.transpose(1, 2).reshape(layer(x).shape), layer(x))


def test_joined_and_put_are_opposites() -> None:
    layer, other = nn.Conv2d(2, 3, 3), nn.Conv2d(2, 3, 3)
    put(other, joined(layer))
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), other.parameters(), strict=True))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(4 * 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.norm(self.conv(x))).flatten(1))


@pytest.mark.parametrize(("kind", "options"), [(GPM, {"threshold": 1.0, "growth": 0.0}), (OWM, {"ridge": 1e-6})])
def test_convolutions_answer_earlier_inputs_as_before(kind: type, options: dict) -> None:
    ours = kind(Small(), OPTIMIZERS["adam"], objective=Regression(), steps=30, batch_size=2, **options)
    generator = torch.Generator().manual_seed(0)
    x, other = torch.randn(2, 1, 4, 4, generator=generator)[:1], torch.randn(32, 1, 4, 4, generator=generator)
    ours.learn((x, torch.ones(1, 2)))
    before = ours.predict(x, 0)
    ours.learn((other, -torch.ones(32, 2)))
    torch.testing.assert_close(ours.predict(x, 0), before, atol=1e-3, rtol=0)


def test_memory_is_that_of_the_matrices() -> None:
    ours = OWM(toy_model(), OPTIMIZERS["sgd"], steps=2)
    ours.learn(toy_task(0))
    assert ours.memory_bytes() == 4 * (13**2 + 33**2 + 33**2)
    gpm = GPM(toy_model(), OPTIMIZERS["sgd"], steps=2)
    gpm.learn(toy_task(0))
    assert gpm.memory_bytes() == 4 * sum(m.numel() for m in gpm.directions.matrix.values()) > 0


def test_thresholds_by_layer() -> None:
    ours = GPM(toy_model(), OPTIMIZERS["sgd"], steps=2, threshold={"fc1": 0.5, "fc2": 0.99, "fc3": 1.0}, growth=0.0)
    ours.learn(toy_task(0))
    ranks = [ours.directions.matrix[name].shape[1] for name in ("fc1", "fc2", "fc3")]
    assert ranks[0] < ranks[1] < ranks[2]
    with pytest.raises(ValueError, match="no number for the layer 'fc2'"):
        GPM(toy_model(), OPTIMIZERS["sgd"], threshold={"fc1": 0.5})
    with pytest.raises(ValueError, match=r"threshold must be in \(0, 1\], got 1.4"):
        GPM(toy_model(), OPTIMIZERS["sgd"], threshold=1.4)


@pytest.mark.parametrize("kind", [GPM, OWM])
def test_data_is_needed_at_the_end(kind: type) -> None:
    ours = kind(toy_model(), OPTIMIZERS["sgd"], steps=2)
    ours.begin(0)
    with pytest.raises(ValueError, match=r"say end\(loader\)"):
        ours.end()


@pytest.mark.parametrize("kind", [GPM, OWM])
def test_alpha_is_refused_wherever_it_comes_from(kind: type) -> None:
    model, grouped = toy_model(), toy_model()
    before = [p.detach().clone() for p in model.parameters()]
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=f"{kind.__name__} needs alpha = 1, got alpha = 1.5"):
        kind(model, base, alpha=1.5)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    groups = [{"params": list(grouped.parameters()), "alpha": 2.0}]
    for optimizer in (torch.optim.SGD(groups, lr=0.1), Powerprop(base, model, alpha=2.0)):
        with pytest.raises(ValueError, match="needs alpha = 1, got alpha = 2"):
            kind(grouped if optimizer.param_groups[0].get("alpha") else model, optimizer)
