"""Soft actor-critic: networks, replay and update by hand; every method on a toy; resume; Meta-World where installed."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
import warnings
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import runs
from powerprop.continual import EfficientPackNet, Naive, diagonal_fisher
from powerprop_paper.cli import main
from powerprop_paper.experiments import world
from powerprop_paper.experiments.world import EXPERIMENTS, METHODS, PRESETS, Method, MethodRows, bootstrap, make_agent
from powerprop_paper.rl import SAC, Paused, Policy, Replay, Settings, Transitions, interact, success_rate
from powerprop_paper.rl.envs import (
    CONTINUAL_WORLD,
    OBSERVATIONS,
    MetaWorld,
    MissingMetaWorldError,
    RenderingError,
    clip,
    task_name,
    write_gif,
)
from powerprop_paper.rl.loop import agent_state, load_agent
from powerprop_paper.rl.networks import TwinCritic, squashed
from powerprop_paper.run import Row, Rows
from powerprop_paper.train import CheckpointError, load_checkpoint, save_checkpoint

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

    def state(self) -> dict[str, Any]:
        return {"place": self.place, "steps": self.steps, "draw": self.draw.bit_generator.state}

    def load_state(self, state: dict[str, Any]) -> None:
        self.place, self.steps, self.draw.bit_generator.state = state["place"], state["steps"], state["draw"]


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
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5, generator)  # no log σ so large that it is cut off
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

TINY = replace(PRESETS["smoke"], steps=60, width=16, start=20, random_steps=20, updates=2, retrain_steps=2, examples=16)


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents of the experiment act in toys; A-GEM remembers little."""
    monkeypatch.setitem(OBSERVATIONS, "full", np.arange(3))
    monkeypatch.setattr(world, "ACTIONS", 2)
    monkeypatch.setattr(world, "MEMORY", 20)


def alpha_of(method: str) -> float:
    return 1.5 if "efficient" in method else 1.0


@pytest.mark.parametrize("protected", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns_two_tasks(method: str, protected: bool, toys: None) -> None:
    if protected:  # critics that are not reset
        strategy = world.strategy(TINY, method, alpha_of(method))
        agent = SAC(3, 2, TINY.sac, actor=strategy, critic=strategy, reset_critic=False)
    else:
        agent = make_agent(TINY, method, alpha_of(method), 0, "cpu")
    before = [p.clone() for p in agent.actor.model.parameters()]
    for goal in (0.5, -0.5):
        learn(agent, goal)
    assert agent.actor.current == agent.critic.current == 2
    assert any(not torch.equal(a, b) for a, b in zip(before, agent.actor.model.parameters(), strict=False))
    assert all(torch.isfinite(p).all() for p in agent.actor.model.parameters())
    assert 0 <= success_rate(agent, Toy(0.5), 0, 2, 1) <= 1


def test_packing_is_the_published_algorithm() -> None:
    """A full network is trained on, as the paper does; it does not turn to masks over frozen weights."""
    actor = make_agent(TINY, "efficient-packnet", 1.5, 0, "cpu").actor
    assert isinstance(actor, EfficientPackNet)
    assert (actor.when_full, actor.gamma, actor.grid, actor.optimizer.alpha) == ("train", None, (0.1,), 1.5)


def test_the_numbers_of_soft_actor_critic_stand_once() -> None:
    """The experiment has only those that its presets change, with the same defaults."""
    paper = PRESETS["paper"].sac
    assert paper == Settings()
    assert PRESETS["cpu"].sac == Settings(random_steps=1_000, retrain_steps=3_000)


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
    models = [p.detach().clone() for learner in (agent.actor, agent.critic) for p in learner.model.parameters()]
    return [*models, *agent.log_temperatures]


def saved(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    """By way of the disk."""
    save_checkpoint(path, state)
    return load_checkpoint(path)


def same(one: SAC, other: SAC) -> bool:
    return all(torch.equal(a, b) for a, b in zip(state(one), state(other), strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_resume_between_tasks_is_exact(method: str, tmp_path: Path, toys: None) -> None:
    agent, other = (make_agent(TINY, method, alpha_of(method), 0, "cpu") for _ in range(2))
    learn(agent)
    found = saved(tmp_path / "c.pt", agent_state(agent))
    learn(agent, -0.5)
    load_agent(other, found)
    learn(other, -0.5)
    assert same(agent, other)


@pytest.mark.parametrize("at", [13, 30, 60], ids=["before any update", "in an episode", "at the end"])
@pytest.mark.parametrize("method", METHODS)
def test_resume_inside_a_task_is_exact(method: str, at: int, tmp_path: Path, toys: None) -> None:
    """The second task is stopped in the middle of an episode; a new agent goes on, to the end of the task."""
    kept: list[dict[str, Any]] = []
    agent, other = (make_agent(TINY, method, alpha_of(method), 0, "cpu") for _ in range(2))
    learn(agent)
    environment = Toy(-0.5)

    def save(here: Paused) -> None:
        if here.step == at:
            now = {"agent": agent_state(agent), "environment": environment.state(), "step": here.step}
            kept.append(saved(tmp_path / "c.pt", {**now, "seen": torch.from_numpy(here.observation)}))

    agent.begin(60)
    interact(agent, environment, 60, seed=1, on_step=save)
    agent.end()

    [found], again = kept, Toy(-0.5)
    load_agent(other, found["agent"])
    again.load_state(found["environment"])
    interact(other, again, 60, seed=1, paused=Paused(found["step"], found["seen"].numpy()))
    other.end()
    assert same(agent, other)
    assert torch.equal(agent.replay.rows[:60], other.replay.rows[:60])
    assert again.state() == environment.state()


def test_an_agent_that_learns_a_task_is_not_loaded_into() -> None:
    agent, other = toy_agent(), toy_agent()
    other.begin(60)
    with pytest.raises(ValueError, match="the agent is learning task 0: load into one that is not"):
        load_agent(other, agent_state(agent))


def test_an_agent_that_diverged_is_not_saved() -> None:
    agent = toy_agent()
    agent.begin(60)
    interact(agent, Toy(0.5), 30, seed=0)
    agent.critic.tally.add(torch.tensor(float("nan")))
    with pytest.raises(FloatingPointError, match="the loss is nan"):
        agent_state(agent)


# --- numbers ------------------------------------------------------------------------------------------------------


def ran(seed: int, trained: list[float], final: list[float], curve: Any = ()) -> Row:
    result = {"curve": list(curve), "trained": trained, "packed": trained, "final": final, "moved": [0.25, 0.5]}
    return Row({"method": "fine-tuning", "alpha": 1.0, "seed": seed, **result}, Path("nowhere"))


def test_success_and_forgetting() -> None:
    rows = Rows([ran(0, [1.0, 0.8], [0.2, 0.8]), ran(1, [0.6, 1.0], [0.6, 1.0])])
    measured = MethodRows(Method("fine-tuning"), rows)
    assert measured.success.mean == pytest.approx((0.5 + 0.8) / 2)
    assert measured.forgetting.mean == pytest.approx((0.4 + 0.0) / 2)
    assert world.task_table(replace(TINY, tasks=("reach", "push")), [measured]).rows[0][1] == "0.80 → 0.80 → 0.40"
    assert measured.moved == 0.25  # of the last task there is nothing to say


def test_a_curve_begins_with_its_task() -> None:
    way = [{"step": 10, "success": [0.2]}, {"step": 20, "success": [0.4, 0.6]}]
    measured = MethodRows(Method("fine-tuning"), Rows([ran(0, [1.0, 0.8], [0.2, 0.8], way)]))
    curves = [measured.curve(task) for task in (0, 1, 2)]
    assert [(list(c.positions), c.runs.tolist()) for c in curves if c] == [([10, 20], [[0.2, 0.4]]), ([20], [[0.6]])]
    assert curves[2] is None


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
        ({"reward": "v3"}, "reward must be one of v1, v2, got 'v3'"),
        ({"tasks": ()}, "tasks must be some"),
        ({"tasks": ("hammer", 3)}, "tasks must be a text, got 3"),
        ({"start": 0}, "start must be at least 1, got 0"),
        ({"alphas": (0.5,)}, "alphas must be at least 1, got 0.5"),
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
    with pytest.raises(Exception, match=r"before calling env.reset\(\)"):
        environment.step(np.zeros(4))
    for _ in range(2):
        environment.reset()
        assert [environment.step(np.zeros(4))[3] for _ in range(200)] == [False] * 199 + [True]


@metaworld
def test_an_unknown_task_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", "continual-world", "--preset", "smoke", "--tasks", "hamer", "--out", str(tmp_path / "run")]
    assert main(command) == 2
    assert capsys.readouterr().err == "error: Meta-World has no task 'hamer'; did you mean hammer?\n"
    assert not (tmp_path / "run").exists()


def steps(environment: MetaWorld, actions: Any) -> list[Any]:
    """What is seen and rewarded; after an episode the next one begins."""
    found: list[Any] = []
    for action in actions:
        observation, reward, _, cut, info = environment.step(action)
        found.append((observation.tobytes(), reward, info["success"]))
        if cut:
            found.append(environment.reset()[0].tobytes())
    return found


@metaworld
@pytest.mark.parametrize("reward", ["v1", "v2"])
@pytest.mark.parametrize("name", CONTINUAL_WORLD)
def test_an_environment_goes_on_to_the_bit(name: str, reward: str, tmp_path: Path) -> None:
    """Saved in the middle of its second episode, by way of the disk into a new one: the rest of it and the next."""
    actions = np.random.default_rng(0).uniform(-1, 1, (420, 4))
    whole, resumed = MetaWorld(name, reward), MetaWorld(name, reward)
    whole.reset(seed=5)
    steps(whole, actions[:270])
    resumed.load_state(saved(tmp_path / "c.pt", whole.state()))
    assert steps(resumed, actions[270:]) == steps(whole, actions[270:])
    new = MetaWorld(name, reward)  # an evaluation depends on its seed alone, not on the episodes before
    assert [each.reset(seed=6)[0].tobytes() for each in (new, whole)].count(new.reset(seed=6)[0].tobytes()) == 2
    assert steps(new, actions[:9]) == steps(whole, actions[:9])


@metaworld
def test_a_state_of_another_task_is_refused() -> None:
    environment = MetaWorld("reach")
    environment.reset(seed=0)
    with pytest.raises(ValueError, match="the saved environment is of 'reach', expected 'hammer'"):
        MetaWorld("hammer").load_state(environment.state())


@metaworld
def test_a_machine_that_cannot_draw_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "nothing")
    with pytest.raises(RenderingError, match="no frames can be drawn through nothing"):
        MetaWorld("reach").frame()
    assert os.environ["MUJOCO_GL"] == "nothing"


@metaworld
def test_a_clip_shows_an_episode() -> None:
    environment = MetaWorld("reach")
    environment.reset(seed=0)
    try:
        environment.frame()
    except RenderingError as error:
        pytest.skip(str(error))
    frames = clip(SAC(39, 4, SMALL), environment, 0, seed=1)
    assert {frame.shape for frame in frames} == {(120, 160, 3)}
    assert len(frames) <= 51
    assert np.std(frames[0]) > 10
    assert not np.array_equal(frames[0], frames[-1])
    assert "MUJOCO_GL" not in os.environ


def test_clips_are_animations(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed: pip install 'powerprop[rl]'")
    write_gif([np.full((6, 8, 3), value, np.uint8) for value in (0, 100, 200)], tmp_path / "a.gif")
    with image.open(tmp_path / "a.gif") as found:
        assert (found.size, found.n_frames) == ((8, 6), 3)


# --- the experiment -----------------------------------------------------------------------------------------------


@metaworld
def test_the_experiment_at_smoke_scale(tmp_path: Path) -> None:
    found = runs.run_smoke(EXPERIMENTS["continual-world"], tmp_path)
    naive, packed = found["sections"][0]["tables"][0]["rows"]
    assert [naive[0], packed[0]] == ["fine-tuning", "Powerprop + EfficientPackNet (α = 1.5)"]
    assert float(naive[3]) > 0
    assert packed[3] == "0"  # bit-identical
    assert packed[4] == pytest.approx(0.15, abs=0.06)
    assert found["numbers"]["success fine-tuning"][1:] == [None, None]  # of one seed there is no interval
    page = (tmp_path / "report.html").read_text()
    assert "data:image/gif" in page or "There are no clips" in page


KILLED = [
    "run", "continual-world", "--preset", "smoke", "--methods", "efficient-packnet", "--steps", "120",
    "--evaluate-every", "60", "--checkpoint-every", "30", "--workers", "1",
]  # fmt: skip


@metaworld
def test_killed_inside_a_task_and_resumed_is_bit_identical(tmp_path: Path) -> None:
    """kill -9 in the middle of an episode, in the first task and in the second: the same bytes as without."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main([*KILLED, "--out", str(whole)]) == 0
    for task in (0, 1):
        kill_inside(task, parts)
    assert main([*KILLED, "--out", str(parts)]) == 0
    [one], [other] = (list(out.glob("jobs/learn/*")) for out in (whole, parts))
    files = sorted(path.name for path in one.iterdir())
    assert {"checkpoint.pt", "metrics.jsonl", "row.json"} <= set(files)
    for name in (each for each in files if each != "checkpoint.pt"):  # whose pickle notes which strings were shared
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    for name in ("actor", "critic"):
        found = [load_checkpoint(job / "checkpoint.pt")["agent"][name] for job in (one, other)]
        assert found[0]["data"] == found[1]["data"]
        assert all(torch.equal(tensor, found[1]["tensors"][n]) for n, tensor in found[0]["tensors"].items())
    assert (whole / "summary.json").read_bytes() == (parts / "summary.json").read_bytes()


def kill_inside(task: int, out: Path) -> None:
    """Kill the run when it has been saved inside of this task, and before the task ends."""
    program = [sys.executable, "-m", "powerprop", *KILLED, "--out", str(out)]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 120
    while not is_inside(task, out):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL
    assert is_inside(task, out)


def is_inside(task: int, out: Path) -> bool:
    """True if the checkpoint is of this task and not of its end."""
    found = [load_checkpoint(path) for path in out.glob("jobs/learn/*/checkpoint.pt")]
    there = [(len(each["records"]["packed"]), each["inside"]["step"]) for each in found if each["inside"]]
    return any(at == task and step < 120 for at, step in there)


@metaworld
def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.pt").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"checkpoint\.pt is damaged .*; delete .* to begin this agent anew"):
        world.learn(PRESETS["smoke"], tmp_path, lambda done, values: None, "fine-tuning", 1.0, 0)
