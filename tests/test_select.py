"""What a weight is: a matrix or kernel that multiplies inputs, in layers of torch, of libraries and of one's own."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import powerprop as pp
import zoo
from powerprop.select import select
from powerprop_paper import models


def beside(layer: nn.Module) -> nn.Sequential:
    """The layer, and an ordinary one."""
    return nn.Sequential(layer, nn.Linear(4, 2))


ZOO: list[tuple[Callable[[], nn.Module], set[str]]] = [
    (lambda: nn.Linear(3, 1), {"weight"}),
    (lambda: nn.LazyLinear(1), {"weight"}),
    (lambda: nn.Bilinear(2, 3, 4), {"weight"}),
    (lambda: nn.Conv2d(1, 4, 1), {"weight"}),
    (lambda: nn.ConvTranspose1d(2, 4, 3), {"weight"}),
    (lambda: nn.MultiheadAttention(4, 2, add_bias_kv=True), {"in_proj_weight", "out_proj.weight"}),
    (
        lambda: nn.MultiheadAttention(4, 2, kdim=3, vdim=5),
        {"q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"},
    ),
    (lambda: nn.GRU(3, 4), {"weight_ih_l0", "weight_hh_l0"}),
    (lambda: nn.LSTM(3, 4, proj_size=2), {"weight_ih_l0", "weight_hh_l0", "weight_hr_l0"}),
    (lambda: nn.LSTMCell(3, 4), {"weight_ih", "weight_hh"}),
    (lambda: nn.Sequential(nn.LayerNorm([2, 3]), nn.Embedding(3, 4), nn.PReLU(3), nn.Linear(4, 4)), {"3.weight"}),
    (lambda: nn.Sequential(zoo.ScaledRMSNorm(), zoo.NormLinear()), {"1.weight"}),
    (lambda: zoo.Conv1D(4, 6), {"weight"}),
    (zoo.Experts, {"gate_up_proj", "down_proj", "w1", "W_q"}),
    (zoo.VisionEmbeddings, {"projection.weight"}),
    (zoo.Block, {"kernel", "text_projection", "post_weight"}),
    (zoo.Lists, {"weights.0", "weights.1"}),
    (zoo.TiedLanguageModel, {"mlp.weight"}),
]


@pytest.mark.parametrize(("make", "wanted"), ZOO)
def test_what_is_a_weight(make: Callable[[], nn.Module], wanted: set[str]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Lazy modules are a new feature")
        model = make()
    assert set(select(model)) == wanted


@pytest.mark.parametrize("make", [models.lenet_300_100, models.conv6, models.resnet18, models.resnet20, models.alexnet])
def test_the_networks_of_the_experiments_have_the_weights_of_their_layers(make: Callable[[], nn.Module]) -> None:
    model = make()
    layers = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))}
    assert list(select(model)) == [n for n, _ in model.named_parameters() if n in layers]


# --- left out, and said ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "named", "rest"),
    [
        (zoo.LoraLinear, ["lora_A", "lora_B"], {"weight"}),
        (zoo.StateSpace, ["A_log"], {"in_proj.weight"}),
        (zoo.HomeMadeTable, ["embed_weight"], {"proj.weight"}),
        (lambda: beside(parametrizations.weight_norm(nn.Linear(3, 4))), ["0.weight"], {"1.weight"}),
        (lambda: beside(parametrizations.spectral_norm(nn.Conv2d(3, 4, 2))), ["0.weight"], {"1.weight"}),
        (lambda: beside(nn.utils.spectral_norm(nn.Linear(3, 4))), ["0.weight"], {"1.weight"}),
        (lambda: beside(pp.reparametrize(nn.Linear(3, 4), 2.0)), ["0.weight"], {"1.weight"}),
    ],
)
def test_what_is_left_out_is_named_in_one_warning(
    make: Callable[[], nn.Module], named: list[str], rest: set[str]
) -> None:
    model = make()
    with pytest.warns(UserWarning, match="not chosen as weights: .* where=") as caught:
        chosen = select(model)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert all(name in str(caught[0].message) for name in named)
    assert set(chosen) == rest


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_the_old_weight_norm_is_named_too() -> None:
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 4)), nn.utils.weight_norm(nn.GRU(4, 2), "weight_hh_l0"))
    with pytest.warns(UserWarning, match=r"0\.weight, 1\.weight_hh_l0: computed by a parametrisation; remove it first"):
        assert set(select(model)) == {"1.weight_ih_l0"}


def test_the_warning_points_at_the_line_that_wraps() -> None:
    model = beside(parametrizations.weight_norm(nn.Linear(3, 4)))
    with pytest.warns(UserWarning, match=r"0\.weight") as caught:
        pp.Powerprop(torch.optim.SGD(model.parameters(), lr=0.1), model)
    assert {w.filename for w in caught} == {__file__}


def test_parametrised_norms_and_tables_are_nobody_s_loss() -> None:
    model = beside(parametrizations.weight_norm(nn.Embedding(3, 4)))
    assert set(select(model)) == {"1.weight"}


def test_a_parametrised_buffer_is_no_weight() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mask_weight", torch.ones(2, 2))
    nn.utils.parametrize.register_parametrization(model, "mask_weight", nn.Identity())
    assert set(select(model)) == {"weight"}


# --- nothing, and nonsense ------------------------------------------------------------------------------------------

USES: list[Callable[[nn.Module], object]] = [
    lambda m: pp.prune(m, 0.5),
    lambda m: pp.magnitude_masks(m, 0.5),
    pp.sparsity,
    lambda m: pp.reparametrize(m, 2.0),
    lambda m: pp.layer_densities(m, 0.5),
    lambda m: pp.Powerprop(torch.optim.SGD(m.parameters(), lr=0.1), m),
    pp.Masks.ones,
]


@pytest.mark.parametrize("use", USES)
def test_nothing_chosen_is_an_error_that_names_what_there_is(use: Callable[[nn.Module], object]) -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.LayerNorm(3))
    with pytest.raises(ValueError, match=r"no weight was chosen: .* Sequential .* it has 0\.weight \(5, 3\), 1\.w"):
        use(model)


def test_a_predicate_that_chooses_nothing() -> None:
    with pytest.raises(ValueError, match=r"no weight was chosen: where=<function .*> chooses none"):
        pp.sparsity(nn.Linear(2, 2), where=lambda name, param: False)
    with pytest.raises(ValueError, match=r"where=\[\] chooses none"):
        pp.sparsity(nn.Linear(2, 2), where=[])


@pytest.mark.parametrize("bad", [3, 0.5, [3], ["weight", None]])
def test_where_of_a_wrong_kind(bad: object) -> None:
    with pytest.raises(TypeError, match=r"where must be a name pattern, several, or a predicate .*, got "):
        pp.prune(nn.Linear(2, 2), 0.5, where=bad)  # type: ignore[arg-type]


def test_a_model_of_a_wrong_kind() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got dict"):
        pp.sparsity({"weight": torch.ones(2, 2)})  # type: ignore[arg-type]


def test_only_floating_point_counts() -> None:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"floating-point parameters of this Linear .* it has weight \(2, 2\), bias"):
        select(model)


# --- what newly counts also works -------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_recurrent_layers_learn_sparse(alpha: float) -> None:
    model = nn.LSTM(3, 8)
    x = torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(0))
    optimizer = pp.Powerprop(torch.optim.SGD(model.parameters(), lr=0.1), model, alpha, sparsify=pp.Static(0.5))
    before = model(x)[0].detach()
    for _ in range(3):
        optimizer.zero_grad()
        model(x)[0].square().sum().backward()
        optimizer.step()
    assert not torch.equal(model(x)[0], before)
    assert pp.sparsity(model).total == 0.5


def test_the_textbook_form_of_recurrent_layers() -> None:
    model = nn.LSTM(3, 8)
    x = torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(0))
    before = model(x)[0].detach()
    pp.reparametrize(model, 2.0)
    assert torch.allclose(model(x)[0], before, atol=1e-6)
    model(x)[0].sum().backward()
    phi = dict(model.named_parameters())["parametrizations.weight_ih_l0.original"]
    assert phi.grad is not None
    with torch.no_grad():
        phi.zero_()
    assert not torch.allclose(model(x)[0], before, atol=1e-3)


# --- models of a library that many use --------------------------------------------------------------------------------

TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.mark.filterwarnings("ignore")  # what the library itself warns of at import is not ours
def test_hugging_face_models() -> None:
    transformers = pytest.importorskip("transformers")
    gpt2 = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=50, bos_token_id=0, eos_token_id=0)
    )
    block = "transformer.h.0"
    wanted = {f"{block}.{name}.weight" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
    assert set(pp.prune(gpt2, 0.5)) == wanted
    assert pp.sparsity(gpt2).total == 0.5
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY, num_key_value_heads=2, vocab_size=50))
    assert len(select(llama)) == 8
    vit = transformers.ViTForImageClassification(transformers.ViTConfig(**TINY, image_size=16, patch_size=8))
    linear = {f"{n}.weight" for n, m in vit.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))}
    assert set(select(vit)) == linear
    mixtral = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**TINY, num_key_value_heads=2, vocab_size=50, num_local_experts=2)
    )
    assert {"gate_up_proj", "down_proj"} <= {n.rpartition(".")[2] for n in select(mixtral)}


def test_many_layers_take_linear_time() -> None:
    def seconds(layers: int) -> float:
        model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(layers)))
        start = time.process_time()
        assert len(select(model)) == layers
        return time.process_time() - start

    seconds(10)
    assert seconds(2000) < 40 * max(seconds(200), 1e-3)
