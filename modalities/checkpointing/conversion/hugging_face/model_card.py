"""The ``README.md`` of an exported model."""

from __future__ import annotations

from modalities.checkpointing.conversion.hugging_face.architectures import Architecture
from modalities.checkpointing.discovery import Checkpoint
from modalities.models.components import GPT2LLMConfig


def model_card(
    name: str,
    architecture: Architecture,
    settings: GPT2LLMConfig,
    checkpoint: Checkpoint,
    num_parameters: int,
    max_difference: float | None,
    has_tokenizer: bool,
) -> str:
    """A model card in Markdown, with the metadata that https://huggingface.co/docs/hub/model-cards describes.

    Args:
        name: Of the folder.
        architecture: Of transformers.
        settings: Of the model.
        checkpoint: That was exported.
        num_parameters: Of the model; tied ones count once.
        max_difference: Largest absolute difference of the logits of transformers from ours; None if not compared.
        has_tokenizer: Whether the tokenizer is in the folder.
    """
    progress = checkpoint.progress
    told = (
        "The logits were not compared with those of the model that was trained."
        if max_difference is None
        else f"Its logits in fp32 differ by {max_difference:.1e} at most from those of the model that was trained."
    )
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags:",
        "- modalities",
        "---",
        "",
        f"# {name}",
        "",
        f"A language model of {num_parameters:,} parameters, trained with modalities and exported as "
        f"`{architecture.name}`. {told}",
        "",
        "| | |",
        "| --- | --- |",
        f"| experiment | {checkpoint.experiment_id} |",
        f"| steps | {progress.num_seen_steps:,} of {progress.num_target_steps:,} |",
        f"| tokens | {progress.num_seen_tokens:,} of {progress.num_target_tokens:,} |",
        f"| blocks, width | {settings.n_layer}, {settings.n_embd} |",
        f"| heads: queries, keys and values | {settings.n_head_q}, {settings.n_head_kv} |",
        f"| vocabulary, longest sequence | {settings.vocab_size}, {settings.sequence_length} |",
        "",
        "```python",
        f"from transformers import AutoModelForCausalLM{', AutoTokenizer' if has_tokenizer else ''}",
        "",
        'model = AutoModelForCausalLM.from_pretrained("FOLDER")',
        *(['tokenizer = AutoTokenizer.from_pretrained("FOLDER")'] if has_tokenizer else []),
        "```",
    ]
    return "\n".join(lines) + "\n"
