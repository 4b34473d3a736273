"""A folder of transformers as a folder like a run's: a checkpoint of step 0, and the config of its model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from modalities.checkpointing.conversion.dcp_writing import write_dcp
from modalities.checkpointing.conversion.hugging_face.architectures import Architecture
from modalities.checkpointing.conversion.hugging_face.configuration import BIAS, SHIFTS, ZEROS_KEY, settings_of
from modalities.checkpointing.conversion.hugging_face.proving import (
    expected_of,
    loaded_model,
    prove,
    require_transformers,
)
from modalities.checkpointing.conversion.hugging_face.tensors import (
    biases_of,
    digests_of,
    imported_tensors,
    read_stored,
)
from modalities.checkpointing.conversion.hugging_face.tokenizer_files import copied_files
from modalities.checkpointing.conversion.lazy_tensor import Tally
from modalities.checkpointing.conversion.output import new_output
from modalities.checkpointing.conversion.proof import prove_output
from modalities.checkpointing.paths import checkpoint_name
from modalities.checkpointing.reading.safetensors_files import is_safetensors
from modalities.checkpointing.reading.sources import TensorSource, open_source
from modalities.durability import fsync, write_file
from modalities.exceptions import CheckpointError
from modalities.models.components import GPT2LLMConfig
from modalities.progress import TrainingProgress

CONFIG_FILE = "config.resolved.yaml"
"""As in a run's folder."""

_TOKENIZER_FOLDER = "tokenizer"


@dataclass(frozen=True)
class Import:
    """What was written.

    Args:
        architecture: Of transformers.
        checkpoint: Its folder.
        num_tensors: In it.
        has_tokenizer: Whether the folder had a tokenizer that is read here.
        max_difference: Largest absolute difference of logits; None if they were not compared.
    """

    architecture: str
    checkpoint: Path
    num_tensors: int
    has_tokenizer: bool
    max_difference: float | None


def import_hugging_face(
    source_folder: Path,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    verify: bool = True,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
) -> Import:
    """Write a checkpoint, its config and the tokenizer; one tensor in memory at a time.

    Args:
        source_folder: With ``config.json`` and safetensors files.
        folder: To be made; has its name when all is written and proven.
        dtype: Of the weights; models are built in fp32, and widening to it loses nothing.
        verify: Load the source with transformers and compare with our model, loaded from what was written.
        on_bytes: Told how many bytes more are written.

    Raises:
        CheckpointError: The folder is not what transformers writes, no model of ours computes the same, the output is
            there already, or the two compute something else.
    """
    config = _read_config(source_folder)
    _require_safetensors(source_folder)
    if verify:
        require_transformers("import-hf")
    source = open_source(source_folder)
    architecture, settings = _settings(config, source)
    tally = Tally(on_bytes)
    tensors = imported_tensors(source, settings, architecture, dtype, tally)
    tokenizer = copied_files(source_folder)
    experiment_id = re.sub(r"[^\w.+@=-]", "_", folder.name).lstrip(".+@=-_") or "imported"
    name = checkpoint_name(experiment_id, TrainingProgress(0, 0, 0, 0))
    with new_output(folder) as temporary:
        written = temporary / "checkpoints" / name
        written.mkdir(parents=True)
        write_dcp(written, {"app": {"model": tensors}}, experiment_id, TrainingProgress(0, 0, 0, 0))
        prove_output(open_source(written), digests_of(tensors, tally), {}, on_bytes)
        text = yaml.safe_dump(_config_tree(settings, bool(tokenizer)), sort_keys=False, allow_unicode=True)
        write_file(temporary / CONFIG_FILE, text.encode())
        if tokenizer:
            (temporary / _TOKENIZER_FOLDER).mkdir()
            for file, content in tokenizer.items():
                write_file(temporary / _TOKENIZER_FOLDER / file, content)
            fsync(temporary / _TOKENIZER_FOLDER)
        fsync(written)
        fsync(written.parent)
        difference = None
        if verify:
            model = loaded_model(settings, open_source(written), None)
            difference = prove(source_folder, model, expected_of(model))
    return Import(architecture.name, folder / "checkpoints" / name, len(tensors), bool(tokenizer), difference)


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{folder} is no folder of transformers: it has no config.json")
    try:
        config = json.loads(file.read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} holds no JSON object")
    return config


def _require_safetensors(folder: Path) -> None:
    if is_safetensors(folder):
        return
    pickles = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
    if pickles:
        raise CheckpointError(
            f"{folder} holds its weights as pickles ({pickles[0]}), which can run code and are not read: where you trust "
            f"them, AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained(NEW) writes safetensors"
        )
    raise CheckpointError(f"{folder} has neither model.safetensors nor model.safetensors.index.json")


def _settings(config: dict[str, Any], source: TensorSource) -> tuple[Architecture, GPT2LLMConfig]:
    """The settings, with biases left out that an export added as zeros and that are still zeros."""
    architecture, settings = settings_of(config)
    told = config.get(ZEROS_KEY) or []
    zeros = [
        field
        for field in (BIAS, *SHIFTS)
        if field in told
        if not any(read_stored(source, name).any() for name in biases_of(field, settings, architecture))
    ]
    return settings_of(config, zeros) if zeros else (architecture, settings)


def _config_tree(settings: GPT2LLMConfig, has_tokenizer: bool) -> dict[str, Any]:
    """The canonical config: the model, and the tokenizer beside it."""
    fields = settings.model_dump(mode="json", exclude_none=True)
    tree: dict[str, Any] = {"model_raw": {"component_key": "model", "variant_key": "gpt2", "config": fields}}
    if has_tokenizer:
        path = "${modalities_env:config_folder_path}/" + _TOKENIZER_FOLDER
        tree["tokenizer"] = {
            "component_key": "tokenizer",
            "variant_key": "pretrained_hf_tokenizer",
            "config": {"pretrained_model_name_or_path": path},
        }
    return tree
