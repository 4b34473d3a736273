"""The index of JSONL files."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modalities.data.files import FileExistencePolicy
from modalities.data.raw_index import create_raw_index, read_raw_index
from modalities.exceptions import DataError

Write = Callable[..., Path]


@pytest.mark.parametrize(
    ("raw", "spans"),
    [
        (b'{"a":1}\n{"b":22}\n', [(0, 7), (8, 8)]),
        (b'{"a":1}\n{"b":22}', [(0, 7), (8, 8)]),
        (b'{"a":1}\r\n{"b":2}\r\n', [(0, 7), (9, 7)]),
        (b'\xef\xbb\xbf{"a":1}\n{"b":2}\n', [(3, 7), (11, 7)]),
        ('{"a":"x\u2028y\x85z"}\n{"b":"ø"}\n'.encode(), [(0, 16), (17, 10)]),
    ],
)
def test_starts_and_lengths_in_bytes(write_jsonl: Write, raw: bytes, spans: list[tuple[int, int]]) -> None:
    source = write_jsonl(raw=raw)
    index = create_raw_index(source)
    assert index == source.with_suffix(".idx")
    assert pickle.loads(index.read_bytes()) == spans == read_raw_index(index)


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (b'{"a":1}\n\n{"b":2}\n', r"corpus\.jsonl:2: a blank line"),
        (b'{"a":1}\n{"b":\n', r"corpus\.jsonl:2: no valid JSON"),
        (b'{"a":"\xff"}\n', r"corpus\.jsonl:1: no valid JSON"),
        (b"", "empty"),
    ],
)
def test_a_bad_line_is_told_by_number_and_nothing_is_left(write_jsonl: Write, raw: bytes, told: str) -> None:
    source = write_jsonl(raw=raw)
    with pytest.raises(DataError, match=told):
        create_raw_index(source)
    assert list(source.parent.iterdir()) == [source]


def test_an_existing_index_is_an_error_kept_or_replaced(write_jsonl: Write) -> None:
    source = write_jsonl("one", "two")
    index = source.with_suffix(".idx")
    index.write_bytes(b"old")
    with pytest.raises(DataError, match="exists already"):
        create_raw_index(source)
    create_raw_index(source, file_existence_policy=FileExistencePolicy.SKIP)
    assert index.read_bytes() == b"old"
    create_raw_index(source, file_existence_policy=FileExistencePolicy.OVERRIDE)
    assert len(read_raw_index(index)) == 2


class _Hostile:
    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.proof}",)


@pytest.mark.parametrize(
    "content", [b"", b"nonsense", pickle.dumps([(0, "x")]), pickle.dumps({"a": 1}), pickle.dumps([(-1, 2)])]
)
def test_what_is_no_index_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.idx").write_bytes(content)
    with pytest.raises(DataError, match=r"bad\.idx holds no index"):
        read_raw_index(tmp_path / "bad.idx")


def test_a_hostile_index_runs_nothing(tmp_path: Path) -> None:
    (tmp_path / "bad.idx").write_bytes(pickle.dumps(_Hostile(tmp_path / "proof")))
    with pytest.raises(DataError, match="system"):
        read_raw_index(tmp_path / "bad.idx")
    assert not (tmp_path / "proof").exists()
