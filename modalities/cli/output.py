"""What commands write: tables on a terminal, aligned plain lines elsewhere, JSON for programs."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click


def show_table(headers: Sequence[str], rows: Sequence[Sequence[object]], numbers: Sequence[str] = ()) -> None:
    """Print a table.

    Args:
        headers: Of the columns.
        rows: Cells; None is shown as ``-``.
        numbers: Headers of the columns that are set flush right.
    """
    texts = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _show_rich_table(headers, texts, numbers)
        return
    widths = [max(len(row[index]) for row in (headers, *texts)) for index in range(len(headers))]
    for row in (headers, *texts):
        cells = [
            cell.rjust(width) if header in numbers else cell.ljust(width)
            for header, cell, width in zip(headers, row, widths, strict=True)
        ]
        click.echo("  ".join(cells).rstrip())


def show_json(content: Any) -> None:
    """Print one JSON document; numbers that are not finite are null."""
    click.echo(json.dumps(_finite(content), indent=1))


def as_size(num_bytes: int) -> str:
    """``1.5 GB``: in powers of ten, as disks are sold."""
    if num_bytes < 1000:
        return f"{num_bytes} B"
    size = float(num_bytes)
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 999.95:
            return f"{size:.1f} {unit}"
    return f"{size / 1000:.1f} TB"


@contextmanager
def byte_progress(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar over bytes on a terminal; gives what is told how many bytes more are done.

    Args:
        what: Is done, in a word.
        total: Bytes until the end, if that can be known.
    """
    if not sys.stderr.isatty() or total == 0:
        yield lambda num_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda num_bytes: bar.advance(task, num_bytes)


def _show_rich_table(headers: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[str]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    for header in headers:
        table.add_column(header, justify="right" if header in numbers else "left", overflow="fold")
    for row in rows:
        # as text: brackets of shapes are not markup
        table.add_row(*map(Text, row))
    Console(highlight=False).print(table)


def _finite(content: Any) -> Any:
    if isinstance(content, float) and not math.isfinite(content):
        return None
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(value) for value in content]
    return content
