"""Initialisation whose weights depend on seed and names alone.

For each parameter the full tensor is drawn on the CPU in fp32, from a generator seeded with the model's seed and the
parameter's name; a rank keeps its shard. So one rank or many, FSDP1, FSDP2 or none, meta device or not, give the same
bits. The price is that each rank draws everything: about a minute for 8 billion parameters.
"""

from __future__ import annotations

import hashlib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from modalities.exceptions import UserError
from modalities.models.materialization import finished_parameters
from modalities.models.settings import SupportWeightInitModels, WeightInitTypes
from modalities.parallel.full_tensors import assign_full_
from modalities.parallel.parameter_names import clean_name
from modalities.parallel.process_group import from_rank_zero

Fill = Callable[[Tensor, torch.Generator], object]


class ModelInitializationIF(ABC):
    """A way of giving a model its first weights."""

    @abstractmethod
    def initialize_in_place(self, model: nn.Module) -> None:
        """Set every parameter; those of norms are ones and zeros already.

        Args:
            model: With memory, perhaps sharded by FSDP2; FSDP1's parameters are whole.
        """


@dataclass(frozen=True)
class Rule:
    """Parameters whose name holds ``pattern`` are filled by ``fill``."""

    pattern: str
    fill: Fill


class RuleInitialization(ModelInitializationIF):
    """Initialisation by rules; the last one that matches a name counts.

    Args:
        name: How messages call it.
        rules: The rules. Names that hold ``norm`` are left alone if no rule matches them.
        refused: Names that hold this pattern are an error.
    """

    def __init__(self, name: str, rules: list[Rule], refused: str | None = None) -> None:
        self.name = name
        self.rules = rules
        self.refused = refused

    def initialize_in_place(self, model: nn.Module) -> None:
        """See the interface.

        Raises:
            UserError: A parameter has no rule, or is refused.
        """
        parameters = {clean_name(name): parameter for name, parameter in model.named_parameters()}
        self._check(parameters)
        seed = seed_of(model)
        for name, parameter in parameters.items():
            if (rule := self._rule_for(name)) is not None:
                full_tensor = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
                rule.fill(full_tensor, generator_for(seed, name))
                assign_full_(parameter, full_tensor)

    def _rule_for(self, name: str) -> Rule | None:
        return next((rule for rule in reversed(self.rules) if re.search(rule.pattern, name)), None)

    def _check(self, parameters: dict[str, nn.Parameter]) -> None:
        refused = [name for name in parameters if self.refused is not None and re.search(self.refused, name)]
        if refused:
            raise UserError(
                f"model_initialization {self.name} has no values for biases, but the model has {_some(refused)}: "
                "set the model's bias to false, or use the composed initialisation"
            )
        unknown = [name for name in parameters if self._rule_for(name) is None and "norm" not in name]
        if unknown:
            raise UserError(
                f"model_initialization {self.name} is for GPT2 models and has no rule for {_some(unknown)}: "
                "initialise this model with a component of your own"
            )


def seed_of(model: nn.Module) -> int:
    """The model's seed, else torch's on rank 0."""
    seed: int | None = getattr(model, "seed", None)
    return from_rank_zero(torch.initial_seed()) if seed is None else seed


def generator_for(seed: int, name: str) -> torch.Generator:
    """A CPU generator that depends on nothing but the seed and the name."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:7], "little"))


def make_composed_initialization(
    model_type: SupportWeightInitModels,
    weight_init_type: WeightInitTypes,
    mean: float,
    std: float | str,
    hidden_dim: int | None,
    num_layers: int | None,
) -> RuleInitialization:
    """Normal weights.

    ``plain``: standard deviation ``std``, where ``auto`` is sqrt(2 / (5 hidden_dim))
    (https://arxiv.org/abs/1910.05895), and zero biases. ``scaled``: also projections onto the residual stream with
    std / sqrt(2 num_layers), as GPT-2 does. ``scaled_embed``: also embeddings and head with sqrt(0.4)
    (https://arxiv.org/abs/2312.16903).

    Raises:
        UserError: ``hidden_dim`` or ``num_layers`` is needed and absent.
    """
    width = _needed(hidden_dim, "hidden_dim", "std auto") if std == "auto" else 1
    plain_std = math.sqrt(2 / (5 * width)) if std == "auto" else float(std)
    rules = [
        Rule(r"\b(wte|wpe|lm_head)\.weight$", normal(mean, plain_std)),
        Rule(r"\battn\.(q_attn|k_attn|v_attn|c_proj)\.weight$", normal(mean, plain_std)),
        Rule(r"\bmlp\.(W|V|W_2|c_fc|c_proj)\.weight$", normal(mean, plain_std)),
        Rule(r"\b(attn|mlp)\.(?!\w*norm)\w+\.bias$", zeros),
    ]
    if weight_init_type is not WeightInitTypes.PLAIN:
        depth = _needed(num_layers, "num_layers", f"weight_init_type {weight_init_type.value}")
        residual = normal(mean, plain_std / math.sqrt(2 * depth))
        rules.append(Rule(r"\b(attn\.c_proj|mlp\.W_2|mlp\.c_proj)\.weight$", residual))
    if weight_init_type is WeightInitTypes.SCALED_EMBED:
        rules.append(Rule(r"\b(wte|wpe|lm_head)\.weight$", normal(mean, math.sqrt(0.4))))
    return RuleInitialization("composed", rules)


def make_llama3_like_initialization(num_layers: int, n_embd: int, depth_init: bool) -> RuleInitialization:
    """As torchtitan initialises Llama 3.

    Embedding: standard normal. Head: std 1 / sqrt(n_embd), cut off at 3 std. Queries, keys, values and the gate (W, or
    c_fc): std 0.02. Attention's output, V and W_2 (or c_proj): 0.02 / sqrt(2 d), where d is the block's own number,
    counted from 1, with ``depth_init``, else the number of blocks; these cut off at an absolute 2.
    """
    head_std = n_embd**-0.5
    rules = [
        Rule(r"\bwte\.weight$", normal(0.0, 1.0)),
        Rule(r"\bwpe\.weight$", normal(0.0, 0.02)),
        Rule(r"\blm_head\.weight$", truncated_normal(head_std, 3 * head_std)),
        Rule(r"\battn\.(q_attn|k_attn|v_attn)\.weight$", truncated_normal(0.02, 2.0)),
        Rule(r"\bmlp\.(W|c_fc)\.weight$", truncated_normal(0.02, 2.0)),
    ]
    for layer in range(num_layers):
        std = 0.02 / math.sqrt(2 * (layer + 1 if depth_init else num_layers))
        pattern = rf"\bh\.{layer}\.(attn\.c_proj|mlp\.V|mlp\.W_2|mlp\.c_proj)\.weight$"
        rules.append(Rule(pattern, truncated_normal(std, 2.0)))
    return RuleInitialization("gpt2_llama3_like", rules, refused=r"\b(attn|mlp)\.(?!\w*norm)\w+\.bias$")


def initialize_model(
    model: nn.Module | list[nn.Module], model_initializer: ModelInitializationIF
) -> nn.Module | list[nn.Module]:
    """Give a model, or each of its parts, memory where it has none, and fresh weights and buffers, in place.

    All ranks must call it.

    Raises:
        UserError: The initialiser left parameters out or made some of them NaN.
    """
    for part in model if isinstance(model, list) else [model]:
        with finished_parameters(part):
            model_initializer.initialize_in_place(part)
    return model


def normal(mean: float, std: float) -> Fill:
    return lambda tensor, generator: tensor.normal_(mean, std, generator=generator)


def truncated_normal(std: float, bound: float) -> Fill:
    """Mean 0, cut off at ``-bound`` and ``bound``, in absolute units."""
    return lambda tensor, generator: nn.init.trunc_normal_(tensor, 0.0, std, -bound, bound, generator=generator)


def zeros(tensor: Tensor, _generator: torch.Generator) -> None:
    tensor.zero_()


def _needed(value: int | None, name: str, reason: str) -> int:
    if value is None:
        raise UserError(f"model_initialization composed: {reason} needs {name}")
    return value


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
