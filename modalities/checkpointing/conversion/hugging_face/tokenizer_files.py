"""A tokenizer as the files that transformers' ``AutoTokenizer`` reads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modalities.data.tokenizers import PreTrainedHFTokenizer
from modalities.exceptions import CheckpointError

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
_ADDS_TOKENS = ("TemplateProcessing", "BertProcessing", "RobertaProcessing")
_COPIED = (
    TOKENIZER_FILE,
    TOKENIZER_CONFIG_FILE,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


@dataclass(frozen=True)
class TokenizerFiles:
    """What an export tells of a tokenizer.

    Args:
        files: Content by name.
        special_ids: ``bos_token_id``, ``eos_token_id`` and ``pad_token_id``, None where there is none.
    """

    files: dict[str, bytes]
    special_ids: dict[str, int | None]


NO_TOKENIZER = TokenizerFiles({}, dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")))
"""Of an export without one; the ids are written as none, since architectures have others by default."""


def tokenizer_files(tokenizer: PreTrainedHFTokenizer, sequence_length: int, vocab_size: int) -> TokenizerFiles:
    """The files of a tokenizer.

    Training tokenizes without special tokens: what would add them to each text is left out, so that ``AutoTokenizer``
    gives the same ids.

    Args:
        tokenizer: Of the model.
        sequence_length: Longest sequence of the model, in tokens.
        vocab_size: Of the model.

    Raises:
        CheckpointError: The tokenizer has more ids than the model.
    """
    if tokenizer.vocab_size > vocab_size:
        raise CheckpointError(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model a vocab_size of {vocab_size}: "
            "name the tokenizer that the model was trained with by --tokenizer"
        )
    content = json.loads(tokenizer.definition)
    content |= {
        "truncation": None,
        "padding": None,
        "post_processor": _without_added_tokens(content.get("post_processor")),
    }
    config = {
        **tokenizer.settings,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": sequence_length,
    }
    for entry in ("auto_map", "add_bos_token", "add_eos_token", "add_prefix_space", "backend", "is_local"):
        config.pop(entry, None)
    special_ids = {f"{name}_id": tokenizer.special_token_id(name) for name in _SPECIAL_TOKENS if name != "unk_token"}
    files = {TOKENIZER_FILE: _as_json(content), TOKENIZER_CONFIG_FILE: _as_json(config)}
    return TokenizerFiles(files, special_ids)


def copied_files(folder: Path) -> dict[str, bytes]:
    """The tokenizer's files in a folder of transformers; empty if it has no ``tokenizer.json``."""
    if not (folder / TOKENIZER_FILE).is_file():
        return {}
    return {name: (folder / name).read_bytes() for name in _COPIED if (folder / name).is_file()}


def _without_added_tokens(processor: Any) -> Any:
    if not isinstance(processor, dict):
        return None
    if processor.get("type") in _ADDS_TOKENS:
        return None
    if processor.get("type") == "Sequence":
        kept = [inner for part in processor["processors"] if (inner := _without_added_tokens(part)) is not None]
        return {**processor, "processors": kept} if kept else None
    return processor


def _as_json(content: Any) -> bytes:
    return json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n"
