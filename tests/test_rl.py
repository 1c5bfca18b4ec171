"""Soft actor-critic: networks, replay and update by hand; every method on a toy; resume; Meta-World where installed."""

from __future__ import annotations

import io
import json
import math
import warnings
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

from powerprop.cli import main
from powerprop.continual import EWC, VCL, EfficientPackNet, Naive, diagonal_fisher
from powerprop.experiments import EXPERIMENTS
from powerprop.experiments.harness.runner import run
from powerprop.experiments.rl import checkpoints
from powerprop.experiments.rl.config import CRITICS, METHODS, PRESETS
from powerprop.experiments.rl.measured import Measured, bootstrap
from powerprop.experiments.rl.methods import Arm, make_agent
from powerprop.experiments.rl.results import Evaluation, Learned
from powerprop.rl import SAC, Policy, Replay, Settings, Transitions, interact, success_rate
from powerprop.rl.clips import RenderingError, drawing, write_gif
from powerprop.rl.envs import CONTINUAL_WORLD, OBSERVATIONS, MetaWorld, MissingMetaWorldError, task_name
from powerprop.rl.networks import TwinCritic
from powerprop.rl.policy import squashed

SMALL = Settings(
    width=16, layers=2, batch=16, start=20, random_steps=20, train_every=10, updates=3, retrain_steps=3, examples=32
)

try:
    task_name("hammer")
    MISSING = ""
except MissingMetaWorldError as error:
    MISSING = str(error)
metaworld = pytest.mark.skipif(bool(MISSING), reason=MISSING or "installed")


class Toy:
    """A point on a line that must come to a goal; 25 steps."""

    def __init__(self, goal: float) -> None:
        self.goal = goal
        self.draw = np.random.default_rng(0)

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        self.draw = self.draw if seed is None else np.random.default_rng(seed)
        self.place, self.steps = self.draw.uniform(-1, 1), 0
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.place, self.steps = float(np.clip(self.place + 0.2 * action[0], -1, 1)), self.steps + 1
        away = abs(self.place - self.goal)
        return self._seen(), -away, False, self.steps == 25, {"success": float(away < 0.1)}

    def _seen(self) -> Any:
        return np.array([self.place, self.goal, 1.0])


def toy_agent(actor: Any = Naive, **options: Any) -> SAC:
    return SAC(3, 2, options.pop("settings", SMALL), actor=actor, **options)


def learn(agent: SAC, goal: float = 0.5, steps: int = 60) -> None:
    agent.begin(steps)
    interact(agent, Toy(goal), steps, seed=agent.actor.current)
    agent.end()


# --- by hand ------------------------------------------------------------------------------------------------------


def test_twin_critics_are_two_networks() -> None:
    generator = torch.Generator().manual_seed(0)
    twins = TwinCritic(3, 2, width=8, layers=2, generator=generator)
    x, a = torch.randn(5, 3, generator=generator), torch.randn(5, 2, generator=generator)
    both = twins(torch.cat([x, a], 1), 0)
    for i in range(2):
        h = torch.cat([x, a], 1) @ twins.first.weight[i] + twins.first.bias[i]
        h = torch.tanh(F.layer_norm(h, (8,)) * twins.norm.weight[i] + twins.norm.bias[i])
        h = F.leaky_relu(h @ twins.rest[0].weight[i] + twins.rest[0].bias[i], 0.2)
        head = twins.heads.get_submodule("0")
        assert torch.allclose(both[i], (h @ head.weight[i] + head.bias[i])[:, 0], atol=1e-6)
    assert not torch.equal(both[0], both[1])


def test_the_likelihood_of_squashed_actions() -> None:
    outputs, noise = torch.tensor([[0.3, -0.2, -1.0, 0.1]]), torch.tensor([[0.5, -1.0]])
    action, found = squashed(outputs, noise)
    u = outputs[:, :2] + outputs[:, 2:].exp() * noise
    normal = torch.distributions.Normal(outputs[:, :2], outputs[:, 2:].exp())
    assert torch.allclose(action, torch.tanh(u))
    assert torch.allclose(found, (normal.log_prob(u) - torch.log(1 - torch.tanh(u) ** 2)).sum(1), atol=1e-5)


def test_replay_is_first_in_first_out() -> None:
    replay = Replay(1, 1, capacity=3)
    for i in range(5):
        replay.add(np.float32([i]), np.float32([-i]), 10 * i, np.float32([i + 1]), i == 4)
    everything = replay.all()
    assert sorted(everything.reward.tolist()) == [20, 30, 40]
    assert everything.ended.sum() == 1
    other = Replay(1, 1, capacity=3)
    other.load_state(replay.state())
    draws = [each.sample(8, torch.Generator().manual_seed(0)) for each in (replay, other)]
    assert all(torch.equal(a, b) for a, b in zip(*draws, strict=True))
    with pytest.raises(ValueError, match="nothing to draw 8 transitions from"):
        Replay(1, 1, 3).sample(8, torch.Generator())
    with pytest.raises(ValueError, match=r"must have rows of \(3, 5\), got \(2, 5\)"):
        other.load_state({"rows": torch.zeros(2, 5), "seen": torch.tensor(7)})


class Constant(nn.Module):
    """Networks whose outputs are known."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.tensor(values))


class TwoValues(Constant):
    def forward(self, x: Tensor, task: int = 0) -> Tensor:
        return self.values[:, None] + x[:, 3:].sum(1)


def test_targets_and_losses_by_hand() -> None:
    agent = toy_agent()
    agent.begin()
    agent.log_temperatures[0] = torch.tensor(math.log(0.5), requires_grad=True)
    agent.target = TwoValues(3.0, 2.0)  # type: ignore[assignment]
    agent._noise = lambda batch: torch.zeros(2, 2)  # type: ignore[method-assign]
    mean, log_std = 0.4, -1.0

    def policy(x: Tensor) -> Tensor:
        return torch.tensor([mean, mean, log_std, log_std]).expand(len(x), 4)

    agent.actor.viewing = lambda task: nullcontext(policy)  # type: ignore[method-assign]
    batch = Transitions(torch.zeros(2, 3), torch.tensor([[0.1, 0.2], [0.3, 0.4]]), torch.tensor([1.0, 2.0]),
                        torch.zeros(2, 3), torch.tensor([0.0, 1.0]))  # fmt: skip
    likelihood = 2 * (-log_std - 0.5 * math.log(2 * math.pi) - math.log(1 - math.tanh(mean) ** 2))
    follows = 2.0 + 2 * math.tanh(mean) - 0.5 * likelihood  # the smaller of both critics, and the entropy
    y = [1.0 + 0.99 * follows, 2.0]  # nothing follows the end
    assert agent.backup(batch, 0).tolist() == pytest.approx(y, rel=1e-5)
    q = [[5.0 + 0.3, 5.0 + 0.7], [6.0 + 0.3, 6.0 + 0.7]]
    expected = sum(0.5 * np.mean([(q[i][n] - y[n]) ** 2 for n in range(2)]) for i in range(2))
    assert agent.critic_loss(TwoValues(5.0, 6.0), batch, 0).item() == pytest.approx(expected, rel=1e-5)
    agent.critic.viewing = lambda task: nullcontext(TwoValues(5.0, 6.0))  # type: ignore[method-assign]
    expected = 0.5 * likelihood - (5.0 + 2 * math.tanh(mean))
    assert agent.actor_loss(policy, batch, 0).item() == pytest.approx(expected, rel=1e-5)


def test_the_temperature_rises_where_actions_are_too_alike() -> None:
    agent = toy_agent()
    agent.begin()
    assert agent.target_entropy == pytest.approx(2 * (math.log(0.089) + 0.5 * math.log(2 * math.pi * math.e)))
    before = agent.temperature(0).item()
    agent._step_temperature(torch.tensor(-5.0))  # log π + H = 5: too sure
    assert agent.temperature(0) > before


def test_an_update_moves_targets_by_half_a_percent() -> None:
    agent = toy_agent()
    agent.begin()
    for _ in range(20):
        agent.replay.add(*(np.random.default_rng(1).normal(size=n).astype(np.float32) for n in (3, 2)), 1.0,
                         np.zeros(3, np.float32), False)  # fmt: skip
    before = [p.clone() for p in agent.target.parameters()]
    agent.update()
    for old, new, own in zip(before, agent.target.parameters(), agent.critic.model.parameters(), strict=True):
        assert torch.allclose(new, 0.995 * old + 0.005 * own, atol=1e-7)
        assert own.requires_grad


def test_the_fisher_information_of_a_policy_is_that_of_drawn_actions() -> None:
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(2, 4)
    x = torch.randn(6, 2, generator=generator)
    found = diagonal_fisher(model, [(x,)], Policy(lambda model, batch, task: torch.zeros(()), 2))
    _, log_std = model(x).detach().chunk(2, 1)
    squares = torch.cat([torch.exp(-2 * log_std), torch.full_like(log_std, 2.0)], 1)  # E[(∂ log p / ∂output)²]
    assert torch.allclose(found["bias"], squares.mean(0), atol=1e-5)
    assert torch.allclose(found["weight"], (squares[:, :, None] * x[:, None].square()).mean(0), atol=1e-5)


def test_it_learns() -> None:
    agent = toy_agent(settings=Settings(
        width=32, layers=2, batch=64, lr=4e-3, clip=1.0, start=100, random_steps=200, train_every=10, updates=10,
        target_std=0.3,
    ))  # fmt: skip
    agent.begin()
    interact(agent, Toy(0.5), 1000, seed=0)
    assert success_rate(agent, Toy(0.5), 0, 10, seed=3) >= 0.8  # 0.3 after 500 steps


# --- methods ------------------------------------------------------------------------------------------------------

TINY = replace(PRESETS["smoke"], steps=60, width=16, layers=2, memory=20, batch=16, start=20, random_steps=20,
               train_every=10, updates=2, retrain_steps=2, examples=16)  # fmt: skip


@pytest.mark.parametrize("critic", CRITICS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns_two_tasks(method: str, critic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OBSERVATIONS, "full", np.arange(3))
    monkeypatch.setattr("powerprop.experiments.rl.methods.ACTIONS", 2)
    agent = make_agent(replace(TINY, critic=critic), Arm(method, 1.5 if "efficient" in method else 1.0), 0, "cpu")
    before = [p.clone() for p in agent.actor.model.parameters()]
    for goal in (0.5, -0.5):
        learn(agent, goal)
    assert agent.actor.current == agent.critic.current == 2
    assert any(not torch.equal(a, b) for a, b in zip(before, agent.actor.model.parameters(), strict=False))
    assert all(torch.isfinite(p).all() for p in agent.actor.model.parameters())
    assert 0 <= success_rate(agent, Toy(0.5), 0, 2, 1) <= 1


@pytest.mark.parametrize("critic", [Naive, partial(EfficientPackNet, gamma=None, grid=(0.3,))])
def test_actions_of_the_first_task_are_bit_identical_after_the_second(critic: Any) -> None:
    actor = partial(EfficientPackNet, alpha=1.5, gamma=None, grid=(0.1,))
    agent = toy_agent(actor, critic=critic, reset_critic=critic is Naive)
    learn(agent)
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    before = agent.actor.predict(x, 0)
    rate = success_rate(agent, Toy(0.5), 0, 3, 7)
    learn(agent, -0.5)
    assert torch.equal(agent.actor.predict(x, 0), before)
    assert success_rate(agent, Toy(0.5), 0, 3, 7) == rate
    assert not torch.equal(agent.actor.predict(x, 1), before)
    naive = toy_agent()
    learn(naive)
    before = naive.actor.predict(x, 0)
    learn(naive, -0.5)
    assert not torch.equal(naive.actor.predict(x, 0), before)


def test_critics_are_reset_and_the_temperature_begins_anew() -> None:
    agent = toy_agent()
    learn(agent)
    weight = agent.critic.model.first.weight.clone()
    assert agent.temperature(0) < math.e
    agent.begin()
    assert not torch.equal(agent.critic.model.first.weight, weight)
    assert agent.temperature(1).item() == pytest.approx(math.e)
    assert len(agent.replay) == 0


# --- resume -------------------------------------------------------------------------------------------------------


def state(agent: SAC) -> list[Tensor]:
    return [p.detach().clone() for learner in (agent.actor, agent.critic) for p in learner.model.parameters()]


@pytest.mark.parametrize(
    "actor",
    [Naive, partial(EWC, strength=10.0), partial(EfficientPackNet, alpha=1.5, gamma=None, grid=(0.1,))],
    ids=["naive", "ewc", "efficient-packnet"],
)
def test_resume_at_a_boundary_is_exact(actor: Any, tmp_path: Path) -> None:
    agent, other = toy_agent(actor), toy_agent(actor)
    learn(agent)
    checkpoints.save_boundary(tmp_path, agent, {"trained": [1.0]})
    learn(agent, -0.5)
    assert checkpoints.load_boundary(tmp_path, other) == {"trained": [1.0]}
    learn(other, -0.5)
    assert all(torch.equal(a, b) for a, b in zip(state(agent), state(other), strict=True))
    assert other.temperature(0) == agent.temperature(0)
    assert checkpoints.load_boundary(tmp_path / "empty", toy_agent()) == {}


@pytest.mark.parametrize(
    "actor",
    [Naive, partial(VCL, examples=60, samples=1), partial(EfficientPackNet, alpha=1.5, gamma=None, grid=(0.1,))],
    ids=["naive", "vcl", "efficient-packnet"],
)
def test_resume_inside_a_task_loses_the_episode_alone(actor: Any, tmp_path: Path) -> None:
    agent, other = toy_agent(actor), toy_agent(actor)
    for each in (agent, other):
        learn(each)
        each.begin(60)
    interact(agent, Toy(-0.5), 30, seed=3)
    checkpoints.save_inside(tmp_path, agent, 30, {"curve": []})
    assert checkpoints.load_inside(tmp_path, other) == (30, {"curve": []})
    for each in (agent, other):  # the same updates from the same replay
        for _ in range(3):
            each.update()
    assert all(torch.equal(a, b) for a, b in zip(state(agent), state(other), strict=True))
    assert torch.equal(agent.log_temperatures[-1], other.log_temperatures[-1])
    interact(other, Toy(-0.5), 60, seed=4, done=30)
    assert other.replay.seen == 60
    other.end()
    other.begin()
    assert checkpoints.load_inside(tmp_path, other) is None  # of a task that is over


# --- numbers ------------------------------------------------------------------------------------------------------


def test_success_and_forgetting() -> None:
    runs = [
        Learned(seed, [], trained, trained, final, [0.0, 0.0], 1.0, 1.0, [])
        for seed, trained, final in ((0, [1.0, 0.8], [0.2, 0.8]), (1, [0.6, 1.0], [0.6, 1.0]))
    ]
    measured = Measured(Arm("fine-tuning", 1.0), runs)
    assert measured.success().mean == pytest.approx((0.5 + 0.8) / 2)
    assert measured.forgetting().mean == pytest.approx((0.4 + 0.0) / 2)
    assert measured.of_task(0) == pytest.approx((0.8, 0.8, 0.4))


def test_a_curve_begins_with_its_task() -> None:
    way = [Evaluation(10, [0.2]), Evaluation(20, [0.4, 0.6])]
    runs = [Learned(0, way, [1.0, 0.8], [1.0, 0.8], [0.2, 0.8], [0.0, 0.0], 1.0, 1.0, [])]
    measured = Measured(Arm("fine-tuning", 1.0), runs)
    assert measured.curve(0) == ([10, 20], [[0.2, 0.4]])
    assert measured.curve(1) == ([20], [[0.6]])


def test_bootstrap_intervals() -> None:
    found = bootstrap(list(np.random.default_rng(0).normal(size=400)))
    assert found.low is not None
    assert found.high is not None
    assert found.high - found.low == pytest.approx(2 * 1.645 / 20, rel=0.1)  # a normal mean of 400 values
    assert str(bootstrap([0.5])) == "0.50"
    two = bootstrap([0.0, 1.0])
    assert (two.low, two.high) == (0.0, 1.0)
    with pytest.raises(ValueError, match="at least one value"):
        bootstrap([])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": ("sgd",)}, "methods must be one of fine-tuning, a-gem"),
        ({"kept": 0.0}, r"kept must be in \(0, 1\], got 0.0"),
        ({"reward": "v3"}, "reward must be one of v1, v2, got 'v3'"),
        ({"tasks": ()}, "tasks must be some"),
        ({"critic": "none"}, "critic must be one of reset, protected, got 'none'"),
        ({"discount": 1.0}, r"discount must be in \[0, 1\), got 1.0"),
    ],
)
def test_bad_settings(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(PRESETS["smoke"], **change)


# --- Meta-World ---------------------------------------------------------------------------------------------------


def scripted(environment: MetaWorld, policy: Any, seed: int) -> bool:
    """Whether an episode of one of Meta-World's own policies succeeds."""
    observation, cut = environment.reset(seed=seed)[0], False
    while not cut:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of constants in Meta-World's own policies
            action = np.clip(policy.get_action(observation.astype(np.float64)), -1, 1)
        observation, reward, ended, cut, info = environment.step(action)
        assert 0 <= reward <= 10
        assert not ended
        if info["success"]:
            return True
    assert environment.steps == 200
    return False


@metaworld
@pytest.mark.parametrize("name", CONTINUAL_WORLD)
def test_scripted_policies_succeed(name: str) -> None:
    from metaworld.policies import ENV_POLICY_MAP

    environment, policy = MetaWorld(name), ENV_POLICY_MAP[f"{name}-v3"]()
    first, _ = environment.reset(seed=0)
    assert first.shape == (39,)
    assert any(scripted(environment, policy, seed) for seed in range(3))  # they do not always succeed
    again, _ = environment.reset(seed=0)
    assert np.array_equal(first, again)
    short = MetaWorld(f"{name}-v3", "v1", "short")
    seen, _ = short.reset(seed=0)
    assert np.array_equal(seen, first[[0, 1, 2, 4, 5, 6, 11, 12, 13, 36, 37, 38]])
    assert math.isfinite(short.step(np.zeros(4))[1])


@metaworld
def test_names_and_limits_of_tasks() -> None:
    with pytest.raises(ValueError, match=r"no task 'faucet-clos'; did you mean faucet-close"):
        MetaWorld("faucet-clos")
    with pytest.raises(ValueError, match="reward must be one of v1, v2, got 'v3'"):
        MetaWorld("hammer", "v3")
    with pytest.raises(ValueError, match="observation must be one of full, short, got 'long'"):
        MetaWorld("hammer", observation="long")
    environment = MetaWorld("reach")
    with pytest.raises(RuntimeError, match="an episode has 200 steps"):
        environment.step(np.zeros(4))


@metaworld
def test_an_unknown_task_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", "continual-world", "--preset", "smoke", "--tasks", "hamer", "--out", str(tmp_path / "run")]
    assert main(command) == 2
    assert capsys.readouterr().err == "error: Meta-World has no task 'hamer'; did you mean hammer?\n"
    assert not (tmp_path / "run").exists()


@metaworld
def test_a_machine_that_cannot_draw_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "nothing")
    with pytest.raises(RenderingError, match="no frames can be drawn through nothing"), drawing(MetaWorld("reach")):
        pass


def test_clips_are_animations(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed: pip install 'powerprop[rl]'")
    write_gif([np.full((6, 8, 3), value, np.uint8) for value in (0, 100, 200)], tmp_path / "a.gif")
    with image.open(tmp_path / "a.gif") as found:
        assert (found.size, found.n_frames) == ((8, 6), 3)


@metaworld
def test_the_experiment_at_smoke_scale(tmp_path: Path) -> None:
    experiment, console = EXPERIMENTS["continual-world"], Console(file=io.StringIO())
    findings = run(experiment, "smoke", PRESETS["smoke"], tmp_path, 1, console)
    assert findings is not None
    assert len(findings.table.rows) == 2
    rows = json.loads((tmp_path / "summary.json").read_text())["rows"]
    assert [row["method"] for row in rows] == ["fine-tuning", "efficient-packnet"]
    assert rows[0]["moved"] > 0
    assert rows[1]["moved"] == 0  # bit-identical
    assert rows[1]["runs"][0]["used"] == pytest.approx(0.15, abs=0.06)
    page = (tmp_path / "report.html").read_text()
    assert "data:image/gif" in page or "There are no clips" in page
