"""``modalities check``."""

from __future__ import annotations

from pathlib import Path

import click

from modalities.cli.options import config_option, experiments_root_option, import_option, import_user_modules


@click.command()
@config_option
@experiments_root_option
@import_option
def check(config: Path, experiments_root: Path, imports: tuple[str, ...]) -> None:
    """Check a config without starting anything; all faults are told at once."""
    from modalities.cli.checking import check_or_exit
    from modalities.run import RunRequest

    import_user_modules(imports)
    plan = check_or_exit(RunRequest(config, experiments_root))
    click.echo(f"{config}: no faults; {len(plan.build_order())} components would be built")
