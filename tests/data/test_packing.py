"""From text to packed tokens: bytes, counts, refusals."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from modalities.data.files import FileExistencePolicy
from modalities.data.packed_file import (
    PackedFileWriter,
    info_path,
    open_tokens,
    read_document_spans,
    read_info,
    token_size_bytes,
)
from modalities.data.packing import Packing
from modalities.data.tokenizers import PreTrainedHFTokenizer, PreTrainedSPTokenizer
from modalities.exceptions import DataError

Write = Callable[..., Path]
ERROR = FileExistencePolicy.ERROR


def test_bytes_of_a_packed_file(tmp_path: Path) -> None:
    path = tmp_path / "data.pbin"
    with path.open("w+b") as file:
        writer = PackedFileWriter(file, vocab_size=300)
        writer.write_document([1, 299])
        writer.write_document([7])
        writer.finish()
    content = path.read_bytes()
    assert content[:12] == (6).to_bytes(8, "little") + (2).to_bytes(4, "little")
    assert content[12:18] == b"\x01\x00\x2b\x01\x07\x00"
    assert pickle.loads(content[18:]) == [(0, 4), (4, 2)] == read_document_spans(path)
    assert open_tokens(path).tolist() == [1, 299, 7]


@pytest.mark.parametrize(
    ("vocab_size", "width"), [(1, 1), (255, 1), (256, 1), (257, 2), (65535, 2), (65536, 2), (65537, 4), (2**32, 4)]
)
def test_bytes_per_token(vocab_size: int, width: int) -> None:
    assert token_size_bytes(vocab_size) == width


def test_an_id_beyond_the_vocabulary_is_refused_not_wrapped(tmp_path: Path) -> None:
    with (tmp_path / "x").open("w+b") as file, pytest.raises(DataError, match="token id 256 is not of the vocabulary"):
        PackedFileWriter(file, 256).write_document([256])


@pytest.mark.parametrize("empty_at", [0, 1, 2])
@pytest.mark.parametrize("empty", ["", " \n\t"])
def test_read_is_written_plus_empty(
    tmp_path: Path, write_jsonl: Write, tokenizer: PreTrainedHFTokenizer, empty_at: int, empty: str
) -> None:
    texts = ["the cat", "the dog"]
    texts.insert(empty_at, empty)
    report = Packing(write_jsonl(*texts), tokenizer, "<eod>").pack(tmp_path / "data.pbin", ERROR)
    assert report is not None
    assert (report.num_read, report.num_written, report.empty_lines) == (3, 2, [empty_at + 1])
    documents = [tokenizer.tokenize(text) for text in ("the cat", "the dog")]
    end = tokenizer.get_token_id("<eod>")
    assert open_tokens(tmp_path / "data.pbin").tolist() == [*documents[0], end, *documents[1], end]
    assert report.num_tokens == sum(map(len, documents)) + 2


def test_the_end_of_document_comes_exactly_once(
    tmp_path: Path, write_jsonl: Write, tokenizer: PreTrainedHFTokenizer
) -> None:
    Packing(write_jsonl("the cat<eod>", "the dog"), tokenizer, "<eod>").pack(tmp_path / "data.pbin", ERROR)
    assert open_tokens(tmp_path / "data.pbin").tolist().count(tokenizer.get_token_id("<eod>")) == 2


@pytest.mark.parametrize("text", ["a\u2028b\x85c\x0bd", "ø – 日本", "tab\tand\r\nlines", "\x00", "🙂" * 50])
def test_any_unicode_comes_back(
    tmp_path: Path, write_jsonl: Write, tokenizer: PreTrainedHFTokenizer, text: str
) -> None:
    Packing(write_jsonl(text), tokenizer, "<eod>").pack(tmp_path / "data.pbin", ERROR)
    assert tokenizer.decode(open_tokens(tmp_path / "data.pbin").tolist()[:-1]) == text


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b'{"title": "x"}', r"corpus\.jsonl:2: `\.text` gives"),
        (b'{"text": null}', r"corpus\.jsonl:2: `\.text` gives nothing"),
        (b'{"text": 5}', r"corpus\.jsonl:2: `\.text` gives a int"),
        (b'{"text": "\\ud800"}', r"corpus\.jsonl:2: half a surrogate pair"),
        (b'{"text": ', r"corpus\.jsonl:2: no valid JSON"),
        (b"[1]", r"corpus\.jsonl:2: `\.text` gives no text"),
    ],
)
def test_a_document_without_text_is_told_by_line_and_nothing_is_left(
    tmp_path: Path, write_jsonl: Write, tokenizer: PreTrainedHFTokenizer, line: bytes, told: str
) -> None:
    source = write_jsonl(raw=b'{"text": "the cat"}\n' + line + b"\n")
    with pytest.raises(DataError, match=told):
        Packing(source, tokenizer, "<eod>").pack(tmp_path / "data.pbin", ERROR)
    assert [path.name for path in tmp_path.iterdir() if "pbin" in path.name] == []


@pytest.mark.parametrize("pattern", [".a.b", ".a | .b", '.a["b"]'])
def test_patterns(tmp_path: Path, write_jsonl: Write, tokenizer: PreTrainedHFTokenizer, pattern: str) -> None:
    source = write_jsonl(raw=b'{"a": {"b": "the frog"}}\n')
    Packing(source, tokenizer, "<eod>", pattern).pack(tmp_path / "data.pbin", ERROR)
    assert open_tokens(tmp_path / "data.pbin").tolist()[:-1] == tokenizer.tokenize("the frog")


def test_bad_patterns_and_tokens_are_refused_before_reading(
    write_jsonl: Write, tokenizer: PreTrainedHFTokenizer
) -> None:
    with pytest.raises(DataError, match="is no jq"):
        Packing(write_jsonl("x"), tokenizer, "<eod>", ".[")
    with pytest.raises(DataError, match="no token '<end>'"):
        Packing(write_jsonl("x"), tokenizer, "<end>")


def test_the_file_is_made_anew_when_its_text_changes_and_only_then(
    tmp_path: Path, write_jsonl: Write, tokenizer: PreTrainedHFTokenizer
) -> None:
    target = tmp_path / "deep" / "data.pbin"
    Packing(write_jsonl("the cat"), tokenizer, "<eod>").ensure(target)
    first = target.stat().st_mtime_ns
    Packing(write_jsonl("the cat"), tokenizer, "<eod>").ensure(target)
    assert target.stat().st_mtime_ns == first
    Packing(write_jsonl("the dog and the cat"), tokenizer, "<eod>").ensure(target)
    assert open_tokens(target).tolist()[:-1] == tokenizer.tokenize("the dog and the cat")
    info = read_info(target)
    assert info is not None
    assert (info.num_documents, info.vocab_size) == (1, tokenizer.vocab_size)


def test_a_file_from_elsewhere_is_used_as_it_is(
    tmp_path: Path, write_jsonl: Write, tokenizer: PreTrainedHFTokenizer
) -> None:
    target = tmp_path / "data.pbin"
    packing = Packing(write_jsonl("the cat"), tokenizer, "<eod>")
    packing.pack(target, ERROR)
    info_path(target).unlink()
    before = target.stat().st_mtime_ns
    packing.ensure(target)
    assert target.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"short", "less than a header"),
        ((100).to_bytes(8, "little") + (2).to_bytes(4, "little") + bytes(20), "truncated"),
        ((4).to_bytes(8, "little") + (3).to_bytes(4, "little") + bytes(20), "3 bytes per token"),
        ((0).to_bytes(8, "little") + (2).to_bytes(4, "little") + pickle.dumps([]), "no tokens"),
    ],
)
def test_what_is_no_whole_packed_file_is_refused(tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / "bad.pbin").write_bytes(content)
    with pytest.raises(DataError, match=told):
        open_tokens(tmp_path / "bad.pbin")


def test_every_truncation_is_noticed(tmp_path: Path, write_jsonl: Write, tokenizer: PreTrainedHFTokenizer) -> None:
    target = tmp_path / "data.pbin"
    Packing(write_jsonl("the cat sat on the mat"), tokenizer, "<eod>").pack(target, ERROR)
    num_data_bytes = 12 + 2 * len(open_tokens(target))
    for size in range(num_data_bytes, -1, -1):
        os.truncate(target, size)
        with pytest.raises(DataError, match="truncated"):
            open_tokens(target)


def test_a_sentencepiece_tokenizer(tmp_path: Path, write_jsonl: Write) -> None:
    import sentencepiece

    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(["the cat sat on the mat and the dog sat on the log"] * 20))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(tmp_path / "tiny"), vocab_size=18, minloglevel=2
    )
    tokenizer = PreTrainedSPTokenizer(str(tmp_path / "tiny.model"))
    assert tokenizer.decode(tokenizer.tokenize("the cat sat")) == "the cat sat"
    assert tokenizer.end_of_document_id == tokenizer.get_token_id("</s>")
    report = Packing(write_jsonl("the cat"), tokenizer, "</s>").pack(tmp_path / "data.pbin", ERROR)
    assert report is not None
    assert open_tokens(tmp_path / "data.pbin").dtype == np.dtype("<u1")
    with pytest.raises(DataError, match="no token '<nothing>'"):
        tokenizer.get_token_id("<nothing>")


def test_a_folder_without_a_tokenizer_tells_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a local folder with a tokenizer\.json is needed"):
        PreTrainedHFTokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"no": "tokenizer"}))
    with pytest.raises(DataError, match="is no tokenizer"):
        PreTrainedHFTokenizer(str(tmp_path))
