"""A manifest that is not what it must be is told as damage, whatever is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import xxhash

from modalities.checkpointing.manifest import FileRecord, Manifest, Start, TensorRecord, parse_manifest
from modalities.exceptions import CheckpointError, DamagedCheckpoint
from modalities.progress import TrainingProgress

MANIFEST = Manifest(
    "dcp",
    "x",
    TrainingProgress(1, 2, 3, 4, 5),
    2,
    {"dp_shard": 2},
    "2026-01-31T12:00:00+0000",
    {"modalities": "0", "torch": "2"},
    None,
    {"__0_0.distcp": FileRecord(3, "a" * 32)},
    {"app.model.weight": TensorRecord("float32", [3, 4])},
    {"heldout loss": 1.5},
    Start(2, 10),
)
PATH = Path("manifest.json")


def _changed(**fields: Any) -> bytes:
    """A manifest with other content and the right checksum."""
    content = {**json.loads(MANIFEST.to_bytes()), **fields}
    del content["checksum"]
    content = {name: value for name, value in content.items() if value != "absent"}
    checksum = xxhash.xxh3_128_hexdigest(json.dumps(content, indent=1).encode())
    return json.dumps({**content, "checksum": checksum}, indent=1).encode() + b"\n"


def test_a_manifest_is_read_back() -> None:
    assert parse_manifest(MANIFEST.to_bytes(), PATH) == MANIFEST


def test_one_from_before_starts_were_counted_is_read() -> None:
    assert parse_manifest(_changed(start="absent"), PATH).start == Start(0, 0)


@pytest.mark.parametrize(
    "fields",
    [
        {"progress": "absent"},
        {"progress": {"num_seen_steps": "a"}},
        {"files": 3},
        {"files": {"a\0b": {"size": 1, "xxh3_128": ""}}},
        {"files": {"../a": {"size": 1, "xxh3_128": ""}}},
        {"files": {"/etc/passwd": {"size": 1, "xxh3_128": ""}}},
        {"saved_at": 3},
        {"saved_at": "yesterday"},
        {"format_version": "x"},
        {"world_size": 1.5},
        {"versions": []},
        {"tensors": {"a": {"dtype": "float32"}}},
    ],
)
def test_odd_content_is_damage(fields: dict[str, Any]) -> None:
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json"):
        parse_manifest(_changed(**fields), PATH)


@pytest.mark.parametrize("content", [b"", b"[", b"[" * 100_000, b"null", b"3", b"{}", b"\xff\xfe"])
def test_what_is_no_manifest_is_damage(content: bytes) -> None:
    with pytest.raises(DamagedCheckpoint, match="is damaged"):
        parse_manifest(content, PATH)


def test_a_newer_format_is_refused_by_name_whatever_else_is_in_it() -> None:
    with pytest.raises(CheckpointError, match="has format 999, made by modalities None"):
        parse_manifest(_changed(format_version=999, versions=[]), PATH)
