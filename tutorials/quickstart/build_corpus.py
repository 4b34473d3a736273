"""Make the quickstart's data from plain-text novels: JSONL documents, one per chapter, and a BPE tokenizer.

Usage: python tutorials/quickstart/build_corpus.py FOLDER_OF_TXT_FILES
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = Path(__file__).resolve().parent
HELD_OUT = "persuasion"
END_OF_DOCUMENT = "<|endoftext|>"
VOCAB_SIZE = 4096
CHAPTER = re.compile(r"^\s*(?:CHAPTER|Chapter)\s+[0-9IVXLC]+\.?\s*$", re.MULTILINE)


def chapters(text: str) -> Iterator[str]:
    """Chapters with one line per paragraph and a blank line between paragraphs."""
    for chapter in CHAPTER.split(text):
        paragraphs = [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", chapter)]
        joined = "\n\n".join(paragraph for paragraph in paragraphs if paragraph)
        if len(joined) > 1000:  # title pages and tables of contents are shorter
            yield joined


def write_documents(path: Path, novels: list[Path]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for novel in novels:
            source = novel.stem.removeprefix("austen_")
            for number, text in enumerate(chapters(novel.read_text(encoding="utf-8")), start=1):
                file.write(json.dumps({"source": source, "chapter": number, "text": text}, ensure_ascii=False) + "\n")


def train_tokenizer(documents: Path, folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (json.loads(line)["text"] for line in documents.read_text(encoding="utf-8").split("\n") if line)
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_DOCUMENT,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="holds austen_<novel>.txt files")
    novels = sorted(parser.parse_args().folder.glob("austen_*.txt"))
    write_documents(HERE / "train.jsonl", [novel for novel in novels if HELD_OUT not in novel.stem])
    write_documents(HERE / "heldout.jsonl", [novel for novel in novels if HELD_OUT in novel.stem])
    train_tokenizer(HERE / "train.jsonl", HERE / "tokenizer")


if __name__ == "__main__":
    main()
