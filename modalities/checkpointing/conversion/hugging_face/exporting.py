"""A checkpoint as a folder that stock transformers loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from modalities.checkpointing.conversion.hugging_face.configuration import config_of
from modalities.checkpointing.conversion.hugging_face.model_card import model_card
from modalities.checkpointing.conversion.hugging_face.obstacles import choose_architecture
from modalities.checkpointing.conversion.hugging_face.proving import (
    expected_of,
    loaded_model,
    prove,
    prove_tokenizer,
    require_transformers,
)
from modalities.checkpointing.conversion.hugging_face.tensors import digests_of, exported_tensors, meta_model
from modalities.checkpointing.conversion.hugging_face.tokenizer_files import NO_TOKENIZER, tokenizer_files
from modalities.checkpointing.conversion.lazy_tensor import Tally
from modalities.checkpointing.conversion.output import new_output
from modalities.checkpointing.conversion.proof import prove_output
from modalities.checkpointing.conversion.safetensors_writing import DEFAULT_MAX_SHARD_BYTES, write_safetensors
from modalities.checkpointing.discovery import Checkpoint
from modalities.checkpointing.reading.sources import open_source
from modalities.checkpointing.verification import check_content, check_structure
from modalities.data.tokenizers import PreTrainedHFTokenizer
from modalities.durability import write_file
from modalities.exceptions import DamagedCheckpoint
from modalities.models.components import GPT2LLMConfig

CONFIG_FILE = "config.json"


@dataclass(frozen=True)
class Export:
    """What was written.

    Args:
        architecture: Of transformers.
        num_bytes: Of the weights.
        num_files: With weights.
        max_difference: Largest absolute difference of logits; None if they were not compared.
    """

    architecture: str
    num_bytes: int
    num_files: int
    max_difference: float | None


def export_hugging_face(
    checkpoint: Checkpoint,
    settings: GPT2LLMConfig,
    tokenizer: PreTrainedHFTokenizer | None,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
    verify: bool = True,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
) -> Export:
    """Write weights, config, generation config, tokenizer and model card; one tensor in memory at a time.

    Args:
        checkpoint: Of either kind.
        settings: Of its model.
        tokenizer: Of its model; None leaves it out.
        folder: To be made; has its name when all is written and proven.
        dtype: Of the weights; None for those of the checkpoint.
        max_shard_bytes: Of the weights in one file.
        verify: Load the folder with transformers and compare with our model. Both models are in memory
            then, in fp32.
        on_bytes: Told how many bytes more are written.

    Raises:
        DamagedCheckpoint: The checkpoint is not as it was written.
        CheckpointError: No architecture expresses the model, the checkpoint is not of it, the folder is there already,
            or transformers computes something else.
    """
    architecture = choose_architecture(settings)
    if verify:
        require_transformers("export-hf")
    _require_whole(checkpoint)
    source = open_source(checkpoint.path)
    tally = Tally(on_bytes)
    tensors = exported_tensors(source, settings, architecture, dtype, tally)
    tokens = (
        NO_TOKENIZER if tokenizer is None else tokenizer_files(tokenizer, settings.sequence_length, settings.vocab_size)
    )
    embedding = next(
        tensor for tensor in tensors.values() if tensor.form.shape == (settings.vocab_size, settings.n_embd)
    )
    config = {**config_of(settings, architecture, embedding.form.dtype), **tokens.special_ids}
    generation = {**{key: value for key, value in tokens.special_ids.items() if value is not None}, "use_cache": True}
    with new_output(folder) as temporary:
        temporary.mkdir()
        records = write_safetensors(temporary, tensors, max_shard_bytes=max_shard_bytes)
        prove_output(open_source(temporary), digests_of(tensors, tally), {}, on_bytes)
        write_file(temporary / CONFIG_FILE, _as_json(config))
        write_file(temporary / "generation_config.json", _as_json(generation))
        for name, content in tokens.files.items():
            write_file(temporary / name, content)
        difference = None
        if verify:
            model = loaded_model(settings, source, dtype)
            difference = prove(temporary, model, expected_of(model))
            if tokenizer is not None:
                prove_tokenizer(temporary, tokenizer)
        num_parameters = sum(parameter.numel() for parameter in meta_model(settings).parameters())
        card = model_card(
            folder.name, architecture, settings, checkpoint, num_parameters, difference, tokenizer is not None
        )
        write_file(temporary / "README.md", card.encode())
    num_bytes = sum(tensor.form.num_bytes for tensor in tensors.values())
    num_files = sum(name.endswith(".safetensors") for name in records)
    return Export(architecture.name, num_bytes, num_files, difference)


def _require_whole(checkpoint: Checkpoint) -> None:
    manifest, findings = check_structure(checkpoint)
    if manifest is not None and not findings:
        findings = check_content(checkpoint.folder, manifest.files)
    if findings:
        raise DamagedCheckpoint(f"the checkpoint {checkpoint.path} is damaged: {'; '.join(map(str, findings))}")


def _as_json(content: object) -> bytes:
    return json.dumps(content, indent=2).encode() + b"\n"
