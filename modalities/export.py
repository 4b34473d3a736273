"""What a run has trained, for other tools: checkpoint and config to a folder that stock transformers loads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from modalities.composition.compose import ConfigRequest, compose_config
from modalities.config.environment import Environment
from modalities.config.faults import raise_on_errors
from modalities.exceptions import CheckpointError
from modalities.factory.build import build
from modalities.factory.plan import Plan
from modalities.generate import config_beside
from modalities.registry.fields import Instance, Pending
from modalities.registry.interfaces import Model, Tokenizer
from modalities.run import plan_of
from modalities.run_folder import find_checkpoint

if TYPE_CHECKING:
    import torch

    from modalities.checkpointing.conversion.hugging_face.exporting import Export
    from modalities.data.tokenizers import PreTrainedHFTokenizer
    from modalities.models.components import GPT2LLMConfig


class ModelRecipe(BaseModel):
    """The model's entry of a training config."""

    model_config = ConfigDict(defer_build=True, extra="allow", arbitrary_types_allowed=True, protected_namespaces=())

    model_raw: Instance[Model]


class TokenizerRecipe(BaseModel):
    """The tokenizer's entry of a training config."""

    model_config = ConfigDict(defer_build=True, extra="allow", arbitrary_types_allowed=True)

    tokenizer: Instance[Tokenizer] | None = None


@dataclass(frozen=True)
class ExportRequest:
    """What the user asked for.

    Args:
        run: A run folder, or a checkpoint.
        output: Folder to be made.
        dtype: Of the weights; None for those of the checkpoint.
        max_shard_bytes: Of the weights in one file.
        verify: Prove the output with transformers.
        config: The training config; by default the one that the run folder keeps.
        tokenizer: Folder of a tokenizer, instead of the config's.
        with_tokenizer: Whether the tokenizer is exported.
        imports: Modules and ``.py`` files that register components.
        overrides: Hydra's override words for the config.
    """

    run: Path
    output: Path
    dtype: torch.dtype | None
    max_shard_bytes: int
    verify: bool = True
    config: Path | None = None
    tokenizer: Path | None = None
    with_tokenizer: bool = True
    imports: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()


def export(request: ExportRequest, on_bytes: Callable[[int], None]) -> Export:
    """Export what a run has trained.

    Args:
        request: What is wanted.
        on_bytes: Told how many bytes more are written.

    Raises:
        UserError: The checkpoint, its config or the tokenizer is not there, or no architecture expresses the model.
    """
    from modalities.checkpointing.conversion.hugging_face.exporting import export_hugging_face

    checkpoint = find_checkpoint(request.run)
    config = request.config or config_beside(request.run, checkpoint.path)
    environment = Environment(config, config.absolute().parent.parent, checkpoint.experiment_id)
    config_request = ConfigRequest(environment, request.overrides, imports=request.imports)
    settings = _settings_of(plan_of(compose_config(config_request, ModelRecipe)), config)
    tokenizer = _tokenizer_of(request, config_request, config) if request.with_tokenizer else None
    return export_hugging_face(
        checkpoint,
        settings,
        tokenizer,
        request.output,
        dtype=request.dtype,
        max_shard_bytes=request.max_shard_bytes,
        verify=request.verify,
        on_bytes=on_bytes,
    )


def _settings_of(plan: Plan, config: Path) -> GPT2LLMConfig:
    """The fields of the model, which is not built."""
    from modalities.models.components import GPT2LLMConfig

    raise_on_errors(plan.faults)
    root: Any = plan.roots["model_raw"]
    component = plan.components[root.path] if isinstance(root, Pending) else None
    if component is None or component.spec.config is not GPT2LLMConfig:
        found = component.spec.name if component is not None else "no component"
        raise CheckpointError(f"model_raw in {config} is {found}; only model.gpt2 is exported")
    return GPT2LLMConfig.model_validate(component.fields)


def _tokenizer_of(request: ExportRequest, config_request: ConfigRequest, config: Path) -> PreTrainedHFTokenizer:
    from modalities.data.tokenizers import PreTrainedHFTokenizer

    if request.tokenizer is not None:
        return PreTrainedHFTokenizer(str(request.tokenizer))
    found = build(plan_of(compose_config(config_request, TokenizerRecipe)), TokenizerRecipe).tokenizer
    if isinstance(found, PreTrainedHFTokenizer):
        return found
    what = "has no `tokenizer` entry" if found is None else f"names a {type(found).__name__}, which is not exported"
    raise CheckpointError(
        f"{config} {what}; name a folder with a tokenizer.json by --tokenizer, or leave it out by --no-tokenizer"
    )
