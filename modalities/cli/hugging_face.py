"""``modalities checkpoint export-hf`` and ``import-hf``."""

from __future__ import annotations

from pathlib import Path

import click

from modalities.cli.options import Size, import_option, overrides_argument

_DTYPES = click.Choice(["float32", "bfloat16", "float16"])
_location = click.Path(path_type=Path)
_verify_option = click.option(
    "--verify/--no-verify",
    default=True,
    help="Compare logits with transformers', in fp32 on the CPU.",
    show_default=True,
)


@click.command("export-hf")
@click.argument("run", metavar="RUN", type=_location)
@click.argument("output", metavar="OUT", type=_location)
@click.option("--dtype", type=_DTYPES, default=None, help="Of the weights; default: those of the checkpoint.")
@click.option("--max-shard-size", "--max_shard_size", type=Size(), default="5GB", show_default=True, help="Per file.")
@_verify_option
@click.option("--config", type=_location, default=None, help="Default: the config in the run folder.")
@click.option("--tokenizer", type=_location, default=None, help="Folder; default: the config's.")
@click.option("--no-tokenizer", "--no_tokenizer", "without_tokenizer", is_flag=True, help="Export the model alone.")
@import_option
@overrides_argument
def export_hf(
    run: Path,
    output: Path,
    dtype: str | None,
    max_shard_size: int,
    verify: bool,
    config: Path | None,
    tokenizer: Path | None,
    without_tokenizer: bool,
    imports: tuple[str, ...],
    overrides: tuple[str, ...],
) -> None:
    """Write OUT, a folder that stock transformers loads without remote code, from a run folder or a checkpoint RUN.

    Weights, config, generation config, tokenizer and model card; the logits are compared before OUT has its name.
    """
    import torch

    from modalities.cli.output import as_size, byte_progress
    from modalities.export import ExportRequest, export

    request = ExportRequest(
        run,
        output,
        None if dtype is None else getattr(torch, dtype),
        max_shard_size,
        verify,
        config,
        tokenizer,
        not without_tokenizer,
        imports,
        overrides,
    )
    with byte_progress("exporting", None) as on_bytes:
        done = export(request, on_bytes)
    files = "1 file" if done.num_files == 1 else f"{done.num_files} files"
    click.echo(f"{output}: {done.architecture}, {as_size(done.num_bytes)} in {files}, {_verdict(done.max_difference)}")


@click.command("import-hf")
@click.argument("folder", metavar="FOLDER", type=_location)
@click.argument("output", metavar="OUT", type=_location)
@click.option("--dtype", type=_DTYPES, default="float32", show_default=True, help="Of the weights.")
@_verify_option
def import_hf(folder: Path, output: Path, dtype: str, verify: bool) -> None:
    """Write OUT, a folder like a run's, from a FOLDER of transformers: a checkpoint of step 0, its config, its tokenizer.

    `modalities generate --checkpoint OUT` continues texts with it. No code of the folder's own is run.
    """
    import torch

    from modalities.checkpointing.conversion.hugging_face.importing import import_hugging_face
    from modalities.cli.output import byte_progress

    with byte_progress("importing", None) as on_bytes:
        done = import_hugging_face(folder, output, dtype=getattr(torch, dtype), verify=verify, on_bytes=on_bytes)
    click.echo(f"{done.checkpoint}: {done.num_tensors} tensors of {done.architecture}, {_verdict(done.max_difference)}")
    if not done.has_tokenizer:
        click.echo(f"warning: {folder} has no tokenizer.json: name a tokenizer when you generate or train", err=True)


def _verdict(max_difference: float | None) -> str:
    if max_difference is None:
        return "not compared with transformers"
    return f"logits equal to transformers' within {max_difference:.1e}"
