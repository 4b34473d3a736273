"""``modalities check``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from modalities.cli.options import experiments_root_option, takes_config


@click.command()
@takes_config
@experiments_root_option
@click.option("--world-size", type=click.IntRange(min=1), default=None, help="Check for that many processes.")
@click.option("--multirun", "-m", is_flag=True, help="Check every job of a sweep.")
@click.option(
    "--last_checkpoint_info_file_path",
    "last_checkpoint_info",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    default=None,
    help="Check a config for `modalities warmstart` with that last_checkpoint_info.json.",
)
@click.option(
    "--as",
    "recipe_name",
    default=None,
    metavar="KIND",
    help="What the file is for: training, packing, …; by default what its entries tell.",
)
@click.option("--format", "output_format", type=click.Choice(["text", "json"]), default="text", show_default=True)
def check(
    config: Path,
    config_folders: tuple[Path, ...],
    imports: tuple[str, ...],
    overrides: tuple[str, ...],
    experiments_root: Path,
    world_size: int | None,
    multirun: bool,
    last_checkpoint_info: Path | None,
    recipe_name: str | None,
    output_format: str,
) -> int:
    """Check a config without starting anything; all faults are told at once.

    OVERRIDE is path=value, +path=value to add, ~path to remove, slot=variant to choose a component.
    """
    from modalities.cli.checking import tell_mild
    from modalities.config.faults import raise_on_errors
    from modalities.exceptions import ConfigError
    from modalities.recipes import name_of, recipe_of
    from modalities.run import check as check_request
    from modalities.run import jobs_of_sweep
    from modalities.run_request import RunRequest

    recipe = _recipe(recipe_name) or recipe_of
    request = RunRequest(
        config,
        experiments_root,
        last_checkpoint_info=last_checkpoint_info,
        overrides=overrides,
        config_folders=config_folders,
        imports=imports,
        num_processes=world_size,
    )
    jobs = jobs_of_sweep(request, recipe) if multirun else [overrides]
    faults, plans = [], []
    for words in jobs:
        try:
            plans.append(check_request(request.with_overrides(words), recipe=recipe))
            faults += plans[-1].faults
        except ConfigError as error:
            if not error.faults or output_format == "text":
                raise
            faults += error.faults
    if output_format == "json":
        from modalities.config.faults import unique

        told = [fault.as_json() for fault in unique(faults)]
        is_fine = all(fault["severity"] != "error" for fault in told)
        click.echo(json.dumps({"config": str(config), "ok": is_fine, "faults": told}, indent=2))
        return 0 if is_fine else 2
    tell_mild(faults)
    raise_on_errors(faults)
    plan = plans[0]
    kind = f" ({name_of(plan.recipe)} config)" if name_of(plan.recipe) != "training" else ""
    number = f" in {len(jobs)} jobs" if multirun else ""
    num_built = len(plan.build_order())
    click.echo(f"{config}: no faults{kind}{number}; {num_built} component{'s' * (num_built != 1)} would be built")
    return 0


def _recipe(name: str | None):  # type: ignore[no-untyped-def]
    from modalities.config.suggestions import did_you_mean
    from modalities.exceptions import UserError
    from modalities.recipes import RECIPES

    if name is not None and name not in RECIPES:
        raise UserError(f"--as {name}: there is no such kind of config\n  help: {did_you_mean(name, RECIPES, 'kinds')}")
    return RECIPES.get(name) if name is not None else None
