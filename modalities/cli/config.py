"""``modalities config``: configs shown, compared, drawn, explained and upgraded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from modalities.cli.options import config_folder_option, import_option, takes_config

if TYPE_CHECKING:
    from modalities.composition.compose import ComposedConfig


@click.group()
def config() -> None:
    """Show, compare, draw, explain and upgrade configs."""


@config.command()
@takes_config
@click.option("--short", is_flag=True, help="The shortest form that means the same, interpolations kept.")
@click.option("--provenance", is_flag=True, help="Write behind each value where it comes from.")
def show(short: bool, provenance: bool, **given: Any) -> None:
    """Print a config as it is understood: canonical, interpolations answered."""
    from modalities.config.faults import raise_on_errors
    from modalities.inspection.showing import show as show_canonical
    from modalities.inspection.showing import show_short

    composed = _composed(**given)
    raise_on_errors(composed.faults)
    click.echo(show_short(composed) if short else show_canonical(composed, provenance), nl=False)


@config.command()
@click.argument("old", type=click.Path(path_type=Path))
@click.argument("new", type=click.Path(path_type=Path))
@config_folder_option
@import_option
def diff(old: Path, new: Path, config_folders: tuple[Path, ...], imports: tuple[str, ...]) -> int:
    """Compare two configs in meaning, defaults included; exit code 1 if they differ."""
    from modalities.config.faults import raise_on_errors
    from modalities.inspection.differences import diff_text, differences

    sides = []
    for file in (old, new):
        composed = _composed(file, config_folders, imports, ())
        raise_on_errors(composed.faults)
        sides.append(composed)
    found = differences(*sides)
    if found:
        click.echo(diff_text(found))
    return 1 if found else 0


@config.command()
@takes_config
@click.option("--format", "output_format", type=click.Choice(["mermaid", "dot"]), default="mermaid", show_default=True)
def graph(output_format: str, **given: Any) -> None:
    """Draw the components, numbered in build order, with an arrow to each that needs them."""
    from modalities.config.faults import raise_on_errors
    from modalities.inspection.graph import dot, mermaid
    from modalities.run import plan_of

    plan = plan_of(_composed(**given))
    raise_on_errors(plan.faults)
    draw: Callable[[Any], str] = dot if output_format == "dot" else mermaid
    click.echo(draw(plan))


@config.command()
@click.option("--for", "kind", default="training", show_default=True, help="Kind of config: training, packing, …")
@import_option
def schema(kind: str, imports: tuple[str, ...]) -> None:
    """Print a JSON schema: editors with a YAML language server complete names and fields by it."""
    import json

    from modalities.composition.imports import import_modules
    from modalities.composition.schema import Schema
    from modalities.config.suggestions import did_you_mean
    from modalities.exceptions import UserError
    from modalities.inspection.json_schema import json_schema
    from modalities.recipes import RECIPES
    from modalities.registry.registry import Registry

    import_modules(imports)
    if kind not in RECIPES:
        raise UserError(
            f"--for {kind}: there is no such kind of config\n  help: {did_you_mean(kind, RECIPES, 'kinds')}"
        )
    click.echo(json.dumps(json_schema(Schema(Registry.standard(), RECIPES[kind])), separators=(",", ":")))


@config.command()
@click.argument("path")
@takes_config
def explain(path: str, **given: Any) -> None:
    """Tell what the value at PATH (such as optimizer.lr) is, who set it, what it means and who uses it."""
    from modalities.inspection.explaining import explain as explain_value
    from modalities.run import plan_of

    composed = _composed(**given)
    click.echo(explain_value(composed, plan_of(composed), path))


@config.command()
@click.argument("file", type=click.Path(path_type=Path))
@config_folder_option
@import_option
@click.option("--write", is_flag=True, help="Change the file instead of printing the result.")
def upgrade(file: Path, config_folders: tuple[Path, ...], imports: tuple[str, ...], write: bool) -> None:
    """Rewrite a config in today's short form, keeping comments and meaning."""
    from modalities.durability import atomic_file
    from modalities.inspection.upgrading import upgrade as upgraded_text

    text = upgraded_text(_composed(file, config_folders, imports, ()), file)
    if not write:
        click.echo(text, nl=False)
        return
    with atomic_file(file) as opened:
        opened.write(text.encode("utf-8"))
    click.echo(f"{file}: upgraded", err=True)


def _composed(
    config: Path, config_folders: tuple[Path, ...], imports: tuple[str, ...], overrides: tuple[str, ...]
) -> ComposedConfig:
    from modalities.recipes import recipe_of
    from modalities.run import compose
    from modalities.run_request import RunRequest

    request = RunRequest(config, overrides=overrides, config_folders=config_folders, imports=imports)
    return compose(request, recipe_of)
