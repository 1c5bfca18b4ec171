"""Hugging Face's Trainer around Powerprop: every method, accumulation, bfloat16, tied weights, resuming; adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import powerprop as pp

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:.*(pin_memory|use_cpu|torch_dtype|deprecated).*")

STEPS = 6
METHODS = {
    "dense": lambda: None,
    "rigl": lambda: pp.RigL(0.8, steps=STEPS, interval=2),
    "gradual": lambda: pp.IterativePruning(0.8, steps=STEPS, interval=1),
}


def llama(tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=12, tie_word_embeddings=tied,
    )  # fmt: skip
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def texts() -> list[dict[str, torch.Tensor]]:
    """Counting."""
    starts = torch.randint(0, 32, (64, 1), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in (starts + torch.arange(12)) % 32]


def trainer(model: nn.Module, method: str, out: Path, **options: Any) -> Any:
    base = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = pp.Powerprop(base, model, alpha=1.5, sparsify=METHODS[method]())
    settings: dict[str, Any] = {
        "output_dir": str(out), "max_steps": STEPS, "per_device_train_batch_size": 4, "use_cpu": True,
        "report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True,
        "dataloader_pin_memory": False, **options,
    }  # fmt: skip
    arguments = transformers.TrainingArguments(**settings)
    return transformers.Trainer(model, arguments, train_dataset=texts(), optimizers=(optimizer, None))


def kept(optimizer: Any) -> pp.Powerprop:
    """Ours, inside accelerate's."""
    found = getattr(optimizer, "optimizer", optimizer)
    assert isinstance(found, pp.Powerprop)
    return found


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bf16", [False, True])
def test_trains_with_accumulation(method: str, bf16: bool, tmp_path: Path) -> None:
    model = llama()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    found = trainer(model, method, tmp_path, gradient_accumulation_steps=2, bf16=bf16)
    found.train()
    assert all(p.dtype == torch.float32 and bool(p.isfinite().all()) for p in model.parameters())
    assert any(not torch.equal(before[name], p) for name, p in model.named_parameters())
    if method != "dense":
        assert pp.sparsity(model).total == pytest.approx(0.8, abs=0.01)
        assert pp.Masks.nonzero(model) - kept(found.optimizer).active == ~pp.Masks.ones(model)


@pytest.mark.parametrize("method", METHODS)
def test_resumes_bit_for_bit(method: str, tmp_path: Path) -> None:
    whole, first, second = llama(), llama(), llama()
    trainer(whole, method, tmp_path / "whole").train()
    trainer(first, method, tmp_path / "parts", save_strategy="steps", save_steps=STEPS // 2).train()
    again = trainer(second, method, tmp_path / "parts")
    again.train(resume_from_checkpoint=str(tmp_path / "parts" / f"checkpoint-{STEPS // 2}"))
    for (name, wanted), resumed in zip(whole.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(wanted, resumed), name


def test_a_head_that_is_tied_to_the_embedding_stays_dense(tmp_path: Path) -> None:
    model = llama(tied=True)
    found = trainer(model, "rigl", tmp_path)
    found.train()
    assert "lm_head.weight" not in kept(found.optimizer).masters
    assert model.lm_head.weight is model.model.embed_tokens.weight  # type: ignore[union-attr]
    assert bool(model.lm_head.weight.all())  # type: ignore[union-attr,operator]


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter beside it, in PEFT's names."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        self.lora_A = nn.Linear(layer.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))  # type: ignore[no-any-return]


def test_adapters_train_with_alpha_inside_a_frozen_model(tmp_path: Path) -> None:
    model = llama().requires_grad_(False)
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj, 4)
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    found = trainer(model, "dense", tmp_path)
    assert {name.split(".")[-2] for name in kept(found.optimizer).masters} == {"lora_A"}
    found.train()
    trained = dict(model.named_parameters())
    assert all(torch.equal(p, trained[name]) for name, p in frozen.items())
    assert all(bool(p.any()) for name, p in trained.items() if "lora_B" in name)
