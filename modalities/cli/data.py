"""``modalities data``."""

from __future__ import annotations

from pathlib import Path

import click

from modalities.cli.options import overrides_argument

_POLICY_OPTION = click.option(
    "--file_existence_policy",
    "--file-existence-policy",
    "policy",
    type=click.Choice(["error", "skip", "override"]),
    default="error",
    show_default=True,
    help="What to do if the output exists.",
)


@click.group()
def data() -> None:
    """Index and pack training data."""


@data.command("create_raw_index")
@click.argument("src_path", type=click.Path(path_type=Path))
@click.option(
    "--index_path", "--index-path", type=click.Path(path_type=Path), default=None, help="Default: SRC with .idx."
)
@_POLICY_OPTION
def create_raw_index_command(src_path: Path, index_path: Path | None, policy: str) -> None:
    """Index the JSONL file SRC_PATH: where each document starts and how long it is."""
    from modalities.data.files import FileExistencePolicy
    from modalities.data.raw_index import create_raw_index, read_raw_index

    written = create_raw_index(src_path, index_path, FileExistencePolicy(policy))
    click.echo(f"{written}: {len(read_raw_index(written))} documents")


@data.command("pack_encoded_data")
@click.argument("config_path", type=click.Path(path_type=Path))
@overrides_argument
@_POLICY_OPTION
def pack_encoded_data_command(config_path: Path, overrides: tuple[str, ...], policy: str) -> None:
    """Tokenize and pack the JSONL file that CONFIG_PATH names.

    OVERRIDE is path=value, such as settings.dst_path=out.pbin or tokenizer.truncation=true.
    """
    from modalities.data.files import FileExistencePolicy
    from modalities.data.packing import Packing
    from modalities.data.recipes import PackingRecipe
    from modalities.run import build_from_file

    recipe = build_from_file(config_path, PackingRecipe, overrides=overrides)
    settings = recipe.settings
    packing = Packing(settings.src_path, recipe.tokenizer, settings.eod_token, settings.jq_pattern, settings.index_path)
    destination = settings.dst_path or settings.src_path.with_suffix(".pbin")
    report = packing.pack(destination, FileExistencePolicy(policy))
    click.echo(f"{destination}: {'exists, skipped' if report is None else report}")
