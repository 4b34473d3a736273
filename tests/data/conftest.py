"""A tiny tokenizer and JSONL files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from modalities.data.tokenizers import PreTrainedHFTokenizer

END = "<eod>"


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer of 300 tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(
        ["the cat sat on the mat and the dog on the log with the frog in the fog"] * 9, trainer
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": END}}))
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> PreTrainedHFTokenizer:
    return PreTrainedHFTokenizer(str(tokenizer_folder))


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Writes texts as documents, or raw bytes as they are."""

    def write(*texts: str, raw: bytes | None = None, name: str = "corpus.jsonl") -> Path:
        path = tmp_path / name
        lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
        path.write_bytes(lines.encode() if raw is None else raw)
        return path

    return write
