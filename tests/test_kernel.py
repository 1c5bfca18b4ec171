"""The compiled kernel as Python sees it: found or not, what it is trusted with, and the k-th smallest number."""

from __future__ import annotations

import importlib.util
import inspect
import re
import shutil
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import powerprop as pp
from powerprop import kernel
from powerprop.update import Move, power_update_

needs_kernel = pytest.mark.skipif(kernel._loaded()[0] is None, reason=kernel.backend())


@pytest.fixture(autouse=True)
def asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has made its choice; what a test loads anew does not inherit it."""
    monkeypatch.delenv("POWERPROP_KERNEL", raising=False)


def said(folder: Path) -> str:
    """What a copy of the kernel's package in this folder says, which must be usable whatever it finds there."""
    for file in Path(inspect.getfile(kernel)).parent.glob("*.[chp]*"):
        shutil.copy(file, folder)
    spec = importlib.util.spec_from_file_location(
        "probe", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    probe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(probe)
    text = str(probe.backend())
    move = Move(torch.full((3,), 0.75), torch.full((3,), 0.5), 2.0)
    assert len(probe.update([move])) == (0 if text.startswith("kernel: ") else 1)
    assert probe.kth_smallest(torch.arange(3.0), 1) == (1.0 if text.startswith("kernel: ") else None)
    assert len(text.splitlines()) == 1
    return text


def library() -> Path:
    (found,) = [path for folder in kernel.__path__ if (path := Path(folder, kernel._NAME)).is_file()]
    return found


def test_without_a_library_torch_does_the_work(tmp_path: Path) -> None:
    assert said(tmp_path).startswith("torch: the package was installed without its compiled kernel")


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"\x7fELF\x02" * 100, b"not a library" * 1000])
def test_a_broken_library_is_named_and_not_used(tmp_path: Path, content: bytes) -> None:
    (tmp_path / kernel._NAME).write_bytes(content)
    text = said(tmp_path)
    assert text.startswith("torch: the compiled kernel cannot be used:")
    assert kernel._NAME in text


@needs_kernel
@pytest.mark.parametrize("part", [0.02, 0.5, 0.97, 0.99999])
def test_a_library_that_was_cut_off_does_not_end_the_process(tmp_path: Path, part: float) -> None:
    content = library().read_bytes()
    (tmp_path / kernel._NAME).write_bytes(content[: int(part * len(content))])
    assert said(tmp_path).startswith("torch: the compiled kernel cannot be used:")


@needs_kernel
def test_somebody_elses_library_is_not_used(tmp_path: Path) -> None:
    shutil.copy(importlib.util.find_spec("_json").origin, tmp_path / kernel._NAME)  # type: ignore[union-attr, arg-type]
    assert said(tmp_path).startswith("torch: the compiled kernel cannot be used:")


@needs_kernel
def test_a_library_of_other_sources_is_not_used(tmp_path: Path) -> None:
    content = library().read_bytes()
    sums = b"".join(sha256(p.read_bytes()).hexdigest().encode() for p in map(library().with_name, kernel._SOURCES))
    assert content.count(sums) == 1
    (tmp_path / kernel._NAME).write_bytes(content.replace(sums, sums[::-1]))
    assert said(tmp_path).endswith("is of other sources than these: install the package again, or run `make kernel`")


@needs_kernel
def test_it_can_be_turned_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(library(), tmp_path)
    monkeypatch.setenv("POWERPROP_KERNEL", "0")
    assert said(tmp_path) == "torch: POWERPROP_KERNEL=0 turns the compiled kernel off"


@needs_kernel
def test_a_library_in_the_package_is_used_and_named(tmp_path: Path) -> None:
    shutil.copy(library(), tmp_path)
    assert said(tmp_path).startswith(f"kernel: {tmp_path}")


def test_the_backend_is_said_by_the_package() -> None:
    assert pp.backend() == kernel.backend()


# --- what it is trusted with ----------------------------------------------------------------------------------------


class Own(Tensor):
    """Anybody's subclass."""


class Counting(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.calls += 1
        return func(*args, **(kwargs or {}))


def moves() -> dict[str, Move]:
    """Moves that are not for the kernel, each for one reason."""
    target, before, mask = torch.full((4, 6), 0.75), torch.full((4, 6), 0.5), torch.ones(4, 6, dtype=torch.bool)
    both, wide = torch.full((60,), 0.75), torch.full((4, 12), 0.75)
    return {
        "float64": Move(target.double(), before.double(), 2.0),
        "gaps": Move(wide[:, ::2], before, 2.0),
        "gaps before": Move(target.clone(), (wide - 0.25)[:, ::2], 2.0),
        "another order": Move(torch.full((6, 4), 0.75).t(), before, 2.0),
        "expanded before": Move(target.clone(), torch.tensor([[0.5]]).expand(4, 6), 2.0),
        "expanded mask": Move(target.clone(), before, 2.0, active=torch.ones(4, 1, dtype=torch.bool).expand(4, 6)),
        "mask of another order": Move(target.clone(), before, 2.0, trainable=torch.ones(6, 4).bool().t()),
        "θ of another order": Move(target.clone(), before, 2.0, theta=torch.zeros(6, 4).t()),
        "overlap": Move(both[:50], both[10:], 2.0),
        "θ over the target": Move(both[:50], torch.full((50,), 0.5), 2.0, theta=both[:50]),
        "subclass": Move(target.clone().as_subclass(Own), before, 2.0),
        "subclass before": Move(target.clone(), before.as_subclass(Own), 2.0),
        "subclass mask": Move(target.clone(), before, 2.0, active=mask.as_subclass(Own)),
        "negated": Move(target.clone(), torch._neg_view(-before), 2.0),
        "zeros without memory": Move(target.clone(), torch._efficientzerotensor((4, 6)), 2.0),
        "meta": Move(target.to("meta"), before.to("meta"), 2.0),
    }


@pytest.mark.parametrize("reason", moves())
def test_what_is_not_for_the_kernel_is_done_by_torch(reason: str) -> None:
    move = moves()[reason]
    assert kernel._row(move) is None
    wanted = move.before.clone() * 2.25 if reason != "overlap" else None  # 1/2, pushed by 1/4: 1/2·(3/2)²
    power_update_([move])
    if wanted is not None and reason != "meta":
        assert torch.equal(move.target.as_subclass(Tensor), wanted.as_subclass(Tensor).to(move.target.dtype))


@needs_kernel
def test_memory_that_is_gone_is_not_touched() -> None:
    """FSDP frees what it does not need: torch itself would read there."""
    for freed in (0, 50):
        target, before = torch.ones(30), torch.ones(30)
        before.untyped_storage().resize_(freed)
        assert kernel._row(Move(target, before, 2.0)) is None
        assert kernel._row(Move(target, torch.ones(30), 2.0, active=torch.ones(30).bool())) is not None


@pytest.mark.parametrize("wrong", ["before", "active", "trainable", "theta"])
def test_tensors_that_do_not_fit_are_an_error_and_change_nothing(wrong: str) -> None:
    kind = torch.bool if wrong in ("active", "trainable") else torch.float32
    fine, before = Move(torch.full((3,), 0.75), torch.full((3,), 0.5), 2.0), torch.full((4, 6), 0.5)
    for other in (
        *(torch.ones(s, dtype=kind) for s in ((1,), (4, 5), (6, 4), (24,))),
        torch.ones(4, 6).double(),
        torch.ones(4, 6, dtype=kind, device="meta"),
    ):
        move = Move(torch.full((4, 6), 0.75), before, 2.0)._replace(**{wrong: other})
        said = f"{wrong} must be {kind} of shape (4, 6) on cpu, as the target is, got {other.dtype} of shape"
        with pytest.raises(ValueError, match=re.escape(said)):
            power_update_([fine, move])
        assert torch.equal(move.target, torch.full((4, 6), 0.75))
        assert torch.equal(fine.target, torch.full((3,), 0.75))


@needs_kernel
def test_inside_of_modes_and_transforms_operations_are_torchs() -> None:
    target, before = torch.full((4,), 0.75), torch.full((4,), 0.5)
    with Counting() as counting:
        power_update_([Move(target, before, 2.0)])
    assert counting.calls > 3
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(before)
        power_update_([Move(mode.from_tensor(target), fake, 2.0)])

    def through(target: Tensor, before: Tensor) -> Tensor:
        target = target.clone()
        power_update_([Move(target, before, 2.0)])
        return target

    targets = torch.full((3, 4), 0.75)
    with pytest.raises(RuntimeError, match="Batching rule not implemented for aten::_foreach"):
        torch.func.vmap(through, (0, None))(targets, before)
    assert torch.equal(torch.func.functionalize(through)(targets[0], before), torch.full((4,), 1.125))


@needs_kernel
def test_parameters_are_for_the_kernel_and_their_versions_count() -> None:
    weight, theta = nn.Parameter(torch.full((4,), 0.75)), torch.full((4,), 0.5)
    square = (weight * 1).square().sum()
    with torch.no_grad():
        move = Move(weight, theta, 2.0, theta=theta)
        assert kernel._row(move) is not None
        loss, versions = (weight * weight).sum(), (weight._version, theta._version)
        power_update_([move])
        assert weight._version > versions[0]
        assert theta._version > versions[1]
    assert torch.equal(weight, torch.full((4,), 1.125))
    assert torch.equal(theta, torch.full((4,), 1.125))
    square.backward()
    del loss
    stale = (weight * weight).sum()
    with torch.no_grad():
        power_update_([Move(weight, torch.full((4,), 0.5), 2.0)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


def test_leaves_that_record_are_refused_as_torch_refuses_them() -> None:
    weight = nn.Parameter(torch.ones(3))
    with pytest.raises(RuntimeError, match="leaf Variable"):
        power_update_([Move(weight, torch.ones(3), 2.0)])


# --- the k-th smallest ----------------------------------------------------------------------------------------------


@needs_kernel
@given(
    st.lists(st.floats(width=32, allow_nan=False) | st.sampled_from([0.0, -0.0, 1.0]), min_size=1, max_size=300),
    st.integers(0, 3),
    st.data(),
)
def test_the_kth_smallest_is_that_of_a_sorted_list(values: list[float], nans: int, data: st.DataObject) -> None:
    numbers = torch.tensor(values + [float("nan")] * nans, dtype=torch.float32)
    k = data.draw(st.integers(0, len(numbers) - 1))
    assert np.array_equal(kernel.kth_smallest(numbers, k), np.sort(numbers.numpy())[k], equal_nan=True)


@pytest.mark.parametrize("k", [-1, 3, 10**12])
def test_positions_outside_are_errors(k: int) -> None:
    with pytest.raises(ValueError, match=rf"k must be in \[0, 3\), got {k}"):
        kernel.kth_smallest(torch.ones(3), k)


def test_other_numbers_are_for_somebody_else() -> None:
    for values in (
        torch.ones(3).double(),
        torch.ones(6)[::2],
        torch.ones(3).as_subclass(Own),
        torch.ones(3, device="meta"),
    ):
        assert kernel.kth_smallest(values, 1) is None
