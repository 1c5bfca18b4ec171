"""Two ranks through torchrun: the same masks and weights as one process, and a killed rank that costs nothing.

This file is also the script that torchrun starts.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import nets
import powerprop as pp
import sparse
from powerprop_paper.data import Batches
from powerprop_paper.train import MetricsLog, evaluate, fit, load_checkpoint
from powerprop_paper.train.distributed import ALONE, RankBatches, Ranks, leave, process_group, under_torchrun
from powerprop_paper.train.precision import Precision

STEPS, KILLED_AT = 60, 37

RUNS = [(name, alpha) for name in ("dense", *sparse.METHODS) for alpha in (1.0, 2.0)]


def batches(seed: int = 0) -> Batches:
    x, y = nets.batch(0, 160)
    return Batches(x, y, 16, torch.Generator().manual_seed(seed))


def train_method(name: str, alpha: float, ranks: Ranks) -> dict[str, Tensor]:
    """200 steps; the weights, and the masks that the optimiser holds."""
    model = nets.net()
    base = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-3)
    optimizer = pp.Powerprop(base, model, alpha, sparsify=sparse.make(name, sparsity=0.7, steps=200, interval=20))
    fit(model, optimizer, RankBatches(batches(), ranks), 200, ranks=ranks)
    masks = {f"active.{n}": m for n, m in optimizer.active.items()}
    masks |= {f"trainable.{n}": m for n, m in optimizer.trainable.items()}
    return {**{n: t.clone() for n, t in model.state_dict().items()}, **masks}


def refusal(ranks: Ranks, broadcast: bool = False) -> str:
    """What `fit` says to ranks with weights of their own, which become those of rank 0 after the optimiser is made."""
    model = nets.net(seed=ranks.rank)
    base = torch.optim.SGD(model.parameters(), lr=0.02)
    optimizer = pp.Powerprop(base, model, 2.0, sparsify=pp.TopKAST(0.7, steps=200))
    if broadcast:
        model.load_state_dict(ranks.from_main(model.state_dict()))
    try:
        fit(model, optimizer, RankBatches(batches(), ranks), 1, ranks=ranks)
    except ValueError as error:
        return str(error)
    return ""


class Doomed(RankBatches):
    """Kills its own process, as an operator or the kernel would, in the middle of the training."""

    drawn = 0

    def __next__(self) -> tuple[Tensor, Tensor]:
        self.drawn += 1
        if self.drawn == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__next__()


def train_resumable(folder: Path, ranks: Ranks, kill: bool = False) -> nn.Module:
    """A network with batch norm and moving masks, checkpoints and a log."""
    torch.manual_seed(ranks.rank)  # what must not matter
    model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3))
    for i, p in enumerate(model.parameters()):
        nn.init.normal_(p, 0, 0.3, generator=torch.Generator().manual_seed(i))
    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = pp.Powerprop(base, model, 1.5, sparsify=pp.RigL(0.5, steps=STEPS, interval=7))
    source = (Doomed if kill and ranks.rank == 1 else RankBatches)(batches(), ranks)
    log = MetricsLog(folder / "metrics.jsonl") if ranks.main else None
    x, y = nets.batch(1, 64)
    fit(
        model,
        optimizer,
        source,
        STEPS,
        checkpoint=folder / "checkpoint.pt",
        checkpoint_every=10,
        log=log,
        log_every=7,
        evaluate=lambda model: {"accuracy": evaluate(model, x, y).accuracy},
        eval_every=20,
        ranks=ranks,
    )
    return model


def as_rank(folder: Path, task: str) -> None:
    """What one rank does."""
    torch.set_num_threads(1)
    with process_group() as ranks:
        folder.mkdir(parents=True, exist_ok=True)
        if task == "all":
            for name, alpha in RUNS:
                save_file(train_method(name, alpha, ranks), folder / f"{name}-{alpha}-{ranks.rank}.safetensors")
            (folder / f"apart-{ranks.rank}").write_text(refusal(ranks))
            (folder / f"late-{ranks.rank}").write_text(refusal(ranks, broadcast=True))
        model = train_resumable(folder, ranks, kill=task == "kill")
        save_file(model.state_dict(), folder / f"final-{ranks.rank}.safetensors")
        (folder / f"world-{ranks.rank}").write_text(f"{ranks.rank} of {ranks.world}")


def torchrun(folder: Path, task: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "--monitor-interval", "0.1", __file__, str(folder), task]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment, check=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job on two ranks that nothing has disturbed."""
    folder = tmp_path_factory.mktemp("ranks") / "whole"
    done = torchrun(folder, "all")
    assert done.returncode == 0, done.stderr
    return folder


def test_torchrun_is_recognised(whole: Path) -> None:
    assert [(whole / f"world-{r}").read_text() for r in (0, 1)] == ["0 of 2", "1 of 2"]
    assert not under_torchrun({"RANK": "0"})


@pytest.mark.parametrize(("name", "alpha"), RUNS)
def test_two_ranks_are_one_process(whole: Path, name: str, alpha: float) -> None:
    """Weights and masks are the same bits on both ranks; one process differs from them by rounding alone."""
    one, two = (load_file(whole / f"{name}-{alpha}-{rank}.safetensors") for rank in (0, 1))
    alone = train_method(name, alpha, ALONE)
    start = nets.weights(nets.net())
    assert one.keys() == two.keys() == alone.keys()
    for key, tensor in one.items():
        assert torch.equal(tensor, two[key]), key
        if tensor.dtype == torch.bool:
            assert torch.equal(tensor, alone[key]), key
        else:
            assert torch.allclose(tensor, alone[key], rtol=1e-4, atol=1e-5), key
            assert not torch.equal(tensor, start[key]), f"{key} was not trained"


def test_ranks_that_do_not_start_alike_are_refused(whole: Path) -> None:
    """Weights that differ, and weights that became alike too late for φ and the masks: every rank hears what to do."""
    for rank in (0, 1):
        apart, late = ((whole / f"{name}-{rank}").read_text() for name in ("apart", "late"))
        assert apart.startswith("the ranks must start alike, but model.0.weight, model.0.bias, ")
        assert late.startswith("the ranks must start alike, but optimizer.state.0.powerprop_theta, ")
        for message in (apart, late):
            assert message.endswith("seed every rank alike, or broadcast the weights before the optimiser is made")
    assert refusal(ALONE) == ""


def test_a_killed_rank_costs_nothing(whole: Path, tmp_path: Path) -> None:
    """Killed in the middle and started again, the job ends in the same bits and the same log."""
    parts = tmp_path / "parts"
    killed = torchrun(parts, "kill")
    assert killed.returncode != 0
    assert not list(parts.glob("final-*"))
    assert load_checkpoint(parts / "checkpoint.pt")["step"] == 30
    done = torchrun(parts, "resume")
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        ours, theirs = (load_file(folder / f"final-{rank}.safetensors") for folder in (parts, whole))
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    both = [load_file(whole / f"final-{rank}.safetensors") for rank in (0, 1)]
    assert all(torch.equal(both[0][key], both[1][key]) for key in both[0]), "buffers included"
    assert (parts / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert len((whole / "metrics.jsonl").read_text().splitlines()) == 11


# --- without other processes ------------------------------------------------------------------------------------


def test_the_parts_of_a_batch_make_the_whole() -> None:
    x, y = next(batches())
    parts = [next(RankBatches(batches(), Ranks(rank, 4))) for rank in range(4)]
    assert torch.equal(torch.cat([part[0] for part in parts]), x)
    assert torch.equal(torch.cat([part[1] for part in parts]), y)


def test_the_state_of_batches_does_not_depend_on_the_number_of_ranks() -> None:
    first, again = RankBatches(batches(), Ranks(0, 2)), batches(seed=5)
    for _ in range(13):
        next(first)
    again.load_state_dict(first.state_dict())
    assert torch.equal(next(first)[0], next(again)[0][:8])


def test_alone_nothing_is_communicated() -> None:
    model = nn.Linear(3, 2)
    assert ALONE.wrap(model) is model
    assert ALONE.mean(torch.tensor(3.0)) == 3
    assert ALONE.agree(7, "the step") == 7
    ALONE.barrier()
    with process_group() as ranks:
        assert ranks == ALONE


def test_bad_input_is_repeated() -> None:
    with pytest.raises(ValueError, match=r"rank must be in \[0, 2\), got 2"):
        Ranks(2, 2)
    with pytest.raises(ValueError, match="10 rows cannot be shared equally by 4 ranks"):
        Ranks(0, 4).share(10)
    with pytest.raises(ValueError, match="precision must be one of float32, bfloat16, float16, got 'int8'"):
        Precision("int8")


# --- mixed precision --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_mixed_precision_learns_and_resumes(name: str, tmp_path: Path) -> None:
    """The passes are in 16 bits, the weights stay float32, and a run in two parts ends in the same bits."""

    def run(folder: Path, steps: int, name: str = name) -> tuple[nn.Module, list[torch.dtype]]:
        model, seen = nets.net(), []
        model[0].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
        optimizer = pp.Powerprop(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model, 2.0)
        precision = Precision(name)
        fit(model, optimizer, batches(), steps, checkpoint=folder / "c.pt", checkpoint_every=20, precision=precision)
        return model, seen

    model, seen = run(tmp_path / "whole", 60)
    assert set(seen) == {getattr(torch, name)}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    twin, start = run(tmp_path / "full", 60, "float32")[0], nets.net()
    x, y = nets.batch(0, 160)
    learnt = evaluate(start, x, y).loss - evaluate(twin, x, y).loss
    assert learnt > 0.3
    assert evaluate(model, x, y).loss == pytest.approx(evaluate(twin, x, y).loss, abs=0.1 * learnt)
    run(tmp_path / "parts", 40)
    assert nets.same(run(tmp_path / "parts", 60)[0], model)


def test_a_step_that_overflows_is_left_out() -> None:
    model, precision = nets.net(), Precision("float16")
    optimizer = pp.Powerprop(torch.optim.SGD(model.parameters(), lr=0.02), model, 2.0)
    before = nets.weights(model)
    precision.step(model(nets.batch(0)[0]).sum() * 1e35, optimizer)
    assert all(torch.equal(tensor, before[name]) for name, tensor in nets.weights(model).items())
    assert precision.scaler is not None
    assert precision.scaler.get_scale() == 2.0**15, "half of the scale it began with"


if __name__ == "__main__":
    as_rank(Path(sys.argv[1]), sys.argv[2])
    leave(0)
