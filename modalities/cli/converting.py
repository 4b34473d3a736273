"""``modalities checkpoint convert``: one kind of checkpoint into another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from modalities.cli.options import Size
from modalities.cli.output import as_size, byte_progress, show_json, show_table

if TYPE_CHECKING:
    from modalities.checkpointing.conversion.converting import Conversion
    from modalities.checkpointing.manifest import FileRecord


@click.command("convert")
@click.argument("location", metavar="CHECKPOINT", type=click.Path(path_type=Path))
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--to",
    type=click.Choice(["dcp", "fsdp1", "bin", "safetensors"]),
    help="What OUT becomes; by default what its suffix tells.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Type of the model's floating-point tensors; by default as they are. The optimizer's keep theirs.",
)
@click.option(
    "--max-shard-size",
    "--max_shard_size",
    "max_shard_bytes",
    type=Size(),
    default="5GB",
    show_default=True,
    help="Of a safetensors file in a folder.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, for programs.")
def convert_command(
    location: Path, out: Path, to: str | None, dtype: str | None, max_shard_bytes: int, as_json: bool
) -> int:
    """Convert a CHECKPOINT of any kind; the source is verified first, and OUT is read back before it gets its name.

    OUT that ends in .bin, .pt or .safetensors is one file with the weights. Otherwise it is a folder: with `--to dcp` or
    `--to fsdp1` it gets a checkpoint with all that the source has, with `--to safetensors` it gets shards and an index.
    One tensor at a time is in memory.
    """
    import torch

    from modalities.checkpointing.conversion.converting import convert, target_of
    from modalities.checkpointing.storage import as_location

    target = target_of(out, to)
    torch_dtype = getattr(torch, dtype) if dtype is not None else None
    done = convert(as_location(location), out.absolute(), target, torch_dtype, max_shard_bytes, byte_progress)
    _show(done, as_json)
    if not done.is_proven:
        click.echo(
            f"warning: {done.source} has no manifest, so nobody can tell whether it is as it was written", err=True
        )
    return 0


def _show(done: Conversion, as_json: bool) -> None:
    if as_json:
        show_json({**asdict(done), "source": str(done.source), "output": str(done.output)})
        return
    sides: list[tuple[str, Mapping[str, FileRecord]]] = [("source", done.source_files), ("output", done.files)]
    rows = [
        [side, name, as_size(record.size), record.xxh3_128] for side, files in sides for name, record in files.items()
    ]
    show_table(["side", "file", "size", "xxh3-128"], rows, ("size",))
    for note in done.notes:
        click.echo(f"note: {note}")
    what = "verified by its manifest" if done.is_proven else "not verified, it has no manifest"
    click.echo(f"{done.num_tensors} tensors; source {what}; output read back, bit for bit")
    click.echo(f"{done.kind}: {done.output}")
