"""Generating text with what a run has trained: config and checkpoint to model and tokenizer to text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from modalities.composition.compose import ConfigRequest, compose_config
from modalities.config.environment import Environment
from modalities.exceptions import UserError
from modalities.factory.build import build
from modalities.registry.fields import Instance
from modalities.registry.interfaces import Model, Tokenizer
from modalities.registry.registry import Registry
from modalities.run import plan_of
from modalities.run_folder import RunFolder, find_checkpoint


class GenerationRecipe(BaseModel):
    """What generating reads of a training config; the rest is not even looked at."""

    model_config = ConfigDict(defer_build=True, extra="allow", arbitrary_types_allowed=True, protected_namespaces=())

    model_raw: Instance[Model]
    tokenizer: Instance[Tokenizer] | None = None


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Args:
        max_new_tokens: Tokens to draw at most.
        temperature: Logits are divided by it; 0 takes the likeliest token.
        top_k: Draw among the k likeliest tokens.
        top_p: Draw among the fewest tokens whose probabilities add up to p.
        seed: Of the draws.
    """

    max_new_tokens: int = 200
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0


def generate(
    checkpoint_path: Path,
    prompt: str,
    sampling: Sampling,
    config: Path | None = None,
    tokenizer_path: Path | None = None,
    registry: Registry | None = None,
    imports: tuple[str, ...] = (),
    overrides: tuple[str, ...] = (),
) -> Iterator[str]:
    """Continue a prompt; the pieces of text come as they are drawn.

    Args:
        checkpoint_path: A run folder, or a checkpoint.
        prompt: The text to continue.
        sampling: How tokens are drawn.
        config: The training config; by default the one that the run folder keeps.
        tokenizer_path: Folder of a tokenizer, instead of the config's.
        registry: With components of one's own.
        imports: Modules and ``.py`` files that register components.
        overrides: Hydra's override words for the config.

    Raises:
        UserError: The checkpoint, its config or the tokenizer is not there, or a sampling value is out of range.
    """
    from modalities.checkpointing.torch_checkpoint_loading import TorchCheckpointLoading
    from modalities.data.tokenizers import PreTrainedHFTokenizer
    from modalities.inference.text_generation import generate_tokens

    checkpoint = find_checkpoint(checkpoint_path)
    config = config or config_beside(checkpoint_path, checkpoint.path)
    environment = Environment(config, config.absolute().parent.parent, checkpoint.experiment_id)
    request = ConfigRequest(environment, overrides, imports=imports)
    plan = plan_of(compose_config(request, GenerationRecipe, registry))
    if tokenizer_path is not None:
        plan.roots.pop("tokenizer", None)
    recipe = build(plan, GenerationRecipe)
    tokenizer = PreTrainedHFTokenizer(str(tokenizer_path)) if tokenizer_path is not None else recipe.tokenizer
    if tokenizer is None:
        raise UserError(f"{config} has no `tokenizer` entry; name the tokenizer's folder with --tokenizer")
    model = TorchCheckpointLoading(None).load_model_checkpoint(recipe.model_raw, checkpoint.path)
    prompt_ids = tokenizer.tokenize(prompt)
    end_of_document_id = tokenizer.end_of_document_id
    ids = generate_tokens(
        model,
        prompt_ids,
        sampling.max_new_tokens,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.seed,
        end_of_document_id,
    )
    return _as_text(tokenizer.decode, ids)


def _as_text(decode: object, ids: Iterator[int]) -> Iterator[str]:
    """Pieces of text; a character of several tokens comes when it is whole."""
    assert callable(decode)
    drawn: list[int] = []
    told = ""
    for token_id in ids:
        drawn.append(token_id)
        text: str = decode(drawn)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[len(told) :]
            told = text


def config_beside(given: Path, checkpoint: Path) -> Path:
    """The resolved config that the run folder keeps.

    Args:
        given: What the user named.
        checkpoint: What it stands for.

    Raises:
        UserError: There is none.
    """
    for folder in (given, checkpoint.parent.parent, checkpoint.parent):
        config = RunFolder(folder).resolved_config
        if config.is_file():
            return config
    raise UserError(
        f"no {RunFolder(Path()).resolved_config.name} beside {checkpoint}; name the training config with --config"
    )
