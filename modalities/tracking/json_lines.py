"""Files of one JSON object per line that a run appends to, and goes back in when it is resumed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Add a line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def records_in(path: Path) -> Iterator[dict[str, Any]]:
    """Every whole line; a kill may have left half of one at the end. Without a file there are none."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            if _is_whole(line):
                yield json.loads(line)


def rewind(path: Path, stays: Callable[[Mapping[str, Any]], bool]) -> None:
    """Move lines to a file beside, ``<name>.superseded.jsonl``.

    Args:
        path: May be absent.
        stays: Whether a line stays; half a line never does.
    """
    if not path.exists():
        return
    kept, superseded = [], []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        (kept if _is_whole(line) and stays(json.loads(line)) else superseded).append(line)
    if not superseded:
        return
    with path.with_suffix(".superseded.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(line if line.endswith("\n") else line + "\n" for line in superseded)
    rewritten = path.with_name(f".tmp-{path.name}")
    rewritten.write_text("".join(kept), encoding="utf-8")
    rewritten.replace(path)


def _is_whole(line: str) -> bool:
    return line.endswith("\n") and line.startswith("{")
