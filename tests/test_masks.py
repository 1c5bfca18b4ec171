"""Masks: set algebra by hand, one bit per weight on disk, and clear errors."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import powerprop as pp
from nets import net
from powerprop.masks import Masks, pack, unpack


def masks(**named: list[int]) -> Masks:
    return Masks({n: torch.tensor(v, dtype=torch.bool) for n, v in named.items()})


A = masks(x=[1, 1, 0, 0], y=[1, 0])
B = masks(x=[1, 0, 1, 0], y=[1, 1])


def test_set_algebra_by_hand() -> None:
    assert masks(x=[1, 0, 0, 0], y=[1, 0]) == A & B
    assert masks(x=[1, 1, 1, 0], y=[1, 1]) == A | B
    assert masks(x=[0, 1, 0, 0], y=[0, 0]) == A - B
    assert masks(x=[0, 0, 1, 1], y=[0, 1]) == ~A
    assert A != B


def test_counts_by_hand() -> None:
    assert (A.numel(), A.count()) == (6, 3)
    assert A.density() == A.sparsity() == 0.5
    assert A.overlap(B) == pytest.approx(2 / 3)
    assert B.overlap(A) == 0.5
    assert repr(A) == "Masks(2 weights, 3 of 6 kept, density 0.5000)"


def test_only_bool_tensors() -> None:
    with pytest.raises(TypeError, match=r"a mask must be a bool tensor, got torch\.float32 for 'x'"):
        Masks({"x": torch.ones(3)})


def test_different_weights_do_not_mix() -> None:
    with pytest.raises(ValueError, match=r"masks of different weights: \['x', 'y'\] against \['x'\]"):
        A & masks(x=[1, 0, 0, 0])
    with pytest.raises(ValueError, match=r"'y': masks of shapes \(2,\) and \(3,\)"):
        A | masks(x=[1, 0, 0, 0], y=[1, 0, 0])


@given(st.lists(st.booleans(), max_size=70))
def test_packing_is_lossless_and_one_bit_each(bits: list[bool]) -> None:
    mask = torch.tensor(bits, dtype=torch.bool)
    packed = pack(mask)
    assert packed.numel() == (len(bits) + 7) // 8
    assert torch.equal(unpack(packed, mask.shape), mask)


def test_a_mask_of_the_wrong_size_does_not_unpack() -> None:
    with pytest.raises(ValueError, match=r"a mask of shape \(3, 9\) packs to 4 bytes, got 2 of torch.uint8"):
        unpack(torch.zeros(2, dtype=torch.uint8), (3, 9))


def test_save_and_load_at_one_bit_per_weight(tmp_path: Path) -> None:
    kept = Masks({"w": torch.rand(1000, 80, generator=torch.Generator().manual_seed(0)) < 0.1, "v": torch.ones(3) > 0})
    file = tmp_path / "masks.safetensors"
    kept.save(file)
    assert Masks.load(file) == kept
    assert file.stat().st_size < 10_000 + 1_000


def test_truncated_and_foreign_files_are_named(tmp_path: Path) -> None:
    file = tmp_path / "masks.safetensors"
    A.save(file)
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"masks\.safetensors: not a complete safetensors file"):
        Masks.load(file)
    from safetensors.torch import save_file

    save_file({"x": torch.ones(2)}, str(file))
    with pytest.raises(ValueError, match="expected a file of format 'powerprop-masks-2', got None"):
        Masks.load(file)


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "masks.safetensors"
    A.save(file)

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        B.save(file)
    assert Masks.load(file) == A
    assert list(tmp_path.iterdir()) == [file]


def test_apply_and_read_back() -> None:
    model = net()
    kept = Masks.ones(model) - pp.magnitude_masks(model, 0.6)
    kept.apply(model)
    assert Masks.nonzero(model) == kept


def test_apply_names_what_does_not_fit() -> None:
    with pytest.raises(KeyError, match="the model has no weight 'x'; it has 0.weight"):
        A.apply(net())
    with pytest.raises(ValueError, match=r"'0\.weight' has shape \(12, 6\), its mask \(2,\)"):
        Masks({"0.weight": torch.ones(2) > 0}).apply(net())


def test_apply_changes_nothing_if_one_mask_does_not_fit() -> None:
    model = net()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    kept = dict(pp.magnitude_masks(model, 0.5))
    for bad in ({"4.weight": torch.ones(2) > 0}, {"9.weight": torch.ones(2) > 0}):
        with pytest.raises((KeyError, ValueError), match=r"[49]\.weight"):
            Masks({**kept, **bad}).apply(model)
        assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
