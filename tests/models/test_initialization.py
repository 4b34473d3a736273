from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from modalities.exceptions import UserError
from modalities.models.gpt2 import GPT2LLM, GPT2Block
from modalities.models.initialization import (
    ModelInitializationIF,
    initialize_model,
    make_composed_initialization,
    make_llama3_like_initialization,
)
from modalities.models.settings import SupportWeightInitModels, WeightInitTypes
from modalities.optim.optimizers import make_adam_w
from modalities.parallel.full_tensors import assign_full_
from modalities.parallel.parameter_names import clean_name


def composed(kind: str = "scaled", std: float | str = 0.02, hidden_dim: int | None = None) -> ModelInitializationIF:
    return make_composed_initialization(SupportWeightInitModels.GPT2, WeightInitTypes(kind), 0.0, std, hidden_dim, 2)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in model.state_dict().items()
    }


def spread(weight: Tensor) -> float:
    return weight.detach().std().item()


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(actual) == list(expected)
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


@pytest.mark.parametrize("tied", [False, True])
def test_meta_and_eager_models_get_the_same_bits(gpt2, tied) -> None:
    on_meta = gpt2(use_meta_device=True, use_weight_tying=tied)
    assert all(tensor.is_meta for tensor in on_meta.state_dict().values())
    torch.manual_seed(0)
    initialize_model(on_meta, composed())
    torch.manual_seed(1)
    eager = initialize_model(gpt2(use_weight_tying=tied), composed())
    assert_same_bits(weights_of(on_meta), weights_of(eager))
    assert (on_meta.transformer.lm_head.weight is on_meta.transformer.wte.weight) is tied


def test_another_seed_gives_other_weights_and_torchs_seed_is_the_default(gpt2) -> None:
    def first_weight(seed: int | None) -> Tensor:
        return initialize_model(gpt2(seed=seed), composed()).transformer.wte.weight

    assert not torch.equal(first_weight(1), first_weight(2))
    torch.manual_seed(1)
    assert torch.equal(first_weight(None), first_weight(1))


def test_several_parts(gpt2) -> None:
    parts = [gpt2(seed=1), gpt2(seed=2)]
    assert initialize_model(parts, composed()) is parts
    assert not torch.equal(parts[0].transformer.wte.weight, parts[1].transformer.wte.weight)


@pytest.mark.parametrize(
    ("kind", "embedding", "inner", "residual"),
    [
        ("plain", 0.02, 0.02, 0.02),
        ("scaled", 0.02, 0.02, 0.01),
        ("scaled_embed", math.sqrt(0.4), 0.02, 0.01),
    ],
)
def test_spread_of_the_composed_schemes(gpt2, kind, embedding, inner, residual) -> None:
    for activation_type, projections in (("swiglu", ("W", "V", "W_2")), ("gelu", ("c_fc", "c_fc", "c_proj"))):
        model = initialize_model(
            gpt2(n_embd=128, ffn_hidden=192, vocab_size=256, activation_type=activation_type, poe_type="ABSOLUTE"),
            composed(kind),
        )
        block, transformer = model.transformer.h["1"], model.transformer
        up, gate, down = (getattr(block.mlp, name).weight for name in projections)
        for weight in (transformer.wte.weight, transformer.wpe.weight, transformer.lm_head.weight):
            assert spread(weight) == pytest.approx(embedding, rel=0.05)
        for weight in (block.attn.q_attn.weight, block.attn.k_attn.weight, up, gate):
            assert spread(weight) == pytest.approx(inner, rel=0.05)
        for weight in (block.attn.c_proj.weight, down):
            assert spread(weight) == pytest.approx(residual, rel=0.05)
        assert not block.attn.q_attn.bias.any()
        assert not transformer.lm_head_norm.bias.any()
        assert bool((transformer.lm_head_norm.weight == 1).all())


def test_auto_spread(gpt2) -> None:
    model = initialize_model(gpt2(n_embd=128), composed("plain", "auto", 128))
    assert spread(model.transformer.wte.weight) == pytest.approx(math.sqrt(2 / (5 * 128)), rel=0.05)


@pytest.mark.parametrize(("depth_init", "expected"), [(True, [0.02 / 2**0.5, 0.01]), (False, [0.01, 0.01])])
def test_spread_like_llama3(gpt2, depth_init, expected) -> None:
    model = gpt2(n_embd=128, ffn_hidden=192, vocab_size=256, bias=False)
    initialize_model(model, make_llama3_like_initialization(2, 128, depth_init))
    assert spread(model.transformer.wte.weight) == pytest.approx(1, rel=0.05)
    assert spread(model.transformer.lm_head.weight) == pytest.approx(128**-0.5, rel=0.05)
    for block, std in zip(model.transformer.h.values(), expected, strict=True):
        assert spread(block.attn.q_attn.weight) == pytest.approx(0.02, rel=0.05)
        assert spread(block.mlp.W.weight) == pytest.approx(0.02, rel=0.05)
        for weight in (block.attn.c_proj.weight, block.mlp.V.weight, block.mlp.W_2.weight):
            assert spread(weight) == pytest.approx(std, rel=0.05)


def test_llama3_like_refuses_biases(gpt2) -> None:
    with pytest.raises(UserError, match=r"gpt2_llama3_like has no values for biases.*q_attn\.bias"):
        initialize_model(gpt2(), make_llama3_like_initialization(2, 32, True))


class HeadForgotten(ModelInitializationIF):
    def initialize_in_place(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if "lm_head.weight" not in name and "norm" not in name:
                nn.init.zeros_(parameter)


def test_a_parameter_left_out_is_named(gpt2) -> None:
    with pytest.raises(UserError, match=r"did not set, or set to NaN, transformer\.lm_head\.weight"):
        initialize_model(gpt2(), HeadForgotten())


def test_a_model_of_other_names_is_refused() -> None:
    with pytest.raises(UserError, match=r"no rule for 0\.weight, 0\.bias"):
        initialize_model(nn.Sequential(nn.Linear(2, 2)), composed())


class WithHiddenBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def reset_parameters(self) -> None:
        self.table.copy_(torch.arange(3.0))


def test_buffers_are_computed_anew(gpt2) -> None:
    model = gpt2(use_meta_device=True)
    with torch.device("meta"):
        model.transformer["extra"] = WithHiddenBuffer()
    initialize_model(model, composed())
    assert model.transformer.extra.table.tolist() == [0, 1, 2]
    eager = gpt2().transformer.h["0"].attn.qkv_transforms[0].inv_freq
    assert torch.equal(model.transformer.h["0"].attn.qkv_transforms[0].inv_freq, eager)


def test_clean_names() -> None:
    assert clean_name("module._fsdp_wrapped_module.h.0._checkpoint_wrapped_module._orig_mod.module.w") == "h.0.module.w"


def on_two_ranks(work: Callable[..., None], folder: Path, *arguments: object) -> None:
    """Run ``work(rank, *arguments)`` on two forked gloo ranks that meet through a file."""
    mp.start_processes(_joined, args=(work, folder / "meeting", arguments), nprocs=2, start_method="fork")


def _joined(rank: int, work: Callable[..., None], meeting: Path, arguments: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.pop("MASTER_ADDR", None)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    try:
        work(rank, *arguments)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _check_wrappers(rank: int, make: Callable[..., GPT2LLM], tied: bool) -> None:
    expected = weights_of(initialize_model(make(use_weight_tying=tied), composed()))
    # ranks that were seeded apart must still agree
    torch.manual_seed(rank)

    sharded = make(use_meta_device=True, use_weight_tying=tied)
    mesh = init_device_mesh("cpu", (2,))
    for block in sharded.transformer.h.values():
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    initialize_model(sharded, composed())
    assert_same_bits(weights_of(sharded), expected)
    _check_it_trains(sharded)

    wrapped = FSDP(
        make(use_weight_tying=tied),
        auto_wrap_policy=ModuleWrapPolicy({GPT2Block}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    initialize_model(wrapped, composed())
    with FSDP.summon_full_params(wrapped):
        found = {clean_name(name): p.detach().clone() for name, p in wrapped.named_parameters()}
    assert [name for name, value in found.items() if not torch.equal(value, expected[name])] == []
    _check_it_trains(wrapped)


def _check_it_trains(model: nn.Module) -> None:
    optimizer = make_adam_w(0.01, model, (0.9, 0.95), 1e-8, 0.1, ["embedding", "layernorm"], None, None)
    token_ids = torch.arange(24).view(2, 12)
    losses = []
    for _ in range(3):
        logits = model({"input_ids": token_ids[:, :-1]})["logits"]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), token_ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("tied", [False, True])
def test_wrappers_and_ranks_do_not_change_a_bit(gpt2, tied, tmp_path) -> None:
    on_two_ranks(_check_wrappers, tmp_path, gpt2, tied)


def _check_torchs_seed(rank: int, make: Callable[..., GPT2LLM]) -> None:
    torch.manual_seed(0)
    expected = weights_of(initialize_model(make(seed=0), composed()))
    torch.manual_seed(rank)
    assert_same_bits(weights_of(initialize_model(make(seed=None), composed())), expected)


def test_without_a_seed_rank_zeros_counts(gpt2, tmp_path) -> None:
    on_two_ranks(_check_torchs_seed, tmp_path, gpt2)


def _check_assignment(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for shape in ((5, 3), (1, 4), (4,)):
        full = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
        for placement in (Shard(0), Shard(len(shape) - 1), Replicate()):
            parameter = distribute_tensor(torch.zeros(shape), mesh, [placement])
            assign_full_(parameter, full)
            assert torch.equal(parameter.full_tensor(), full)
    with pytest.raises(ValueError, match="shape"):
        assign_full_(torch.zeros(2), torch.zeros(3))


def test_full_tensors_reach_uneven_shards(tmp_path) -> None:
    on_two_ranks(_check_assignment, tmp_path)


def _check_common_error(rank: int, make: Callable[..., GPT2LLM]) -> None:
    # one row: only rank 0 has a part of it
    model = make(vocab_size=1, use_meta_device=True)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(UserError, match="lm_head"):
        initialize_model(model, HeadForgotten())


def test_all_ranks_learn_of_a_parameter_left_out(gpt2, tmp_path) -> None:
    on_two_ranks(_check_common_error, tmp_path, gpt2)
