"""``modalities components``."""

from __future__ import annotations

import click

from modalities.cli.options import import_option


@click.command()
@click.argument("kind", required=False)
@click.argument("variant", required=False)
@import_option
def components(kind: str | None, variant: str | None, imports: tuple[str, ...]) -> None:
    """List the components, those of one KIND, or one VARIANT with its fields."""
    from modalities.composition.imports import import_modules
    from modalities.config.suggestions import did_you_mean
    from modalities.exceptions import UserError
    from modalities.inspection.components import describe_component
    from modalities.registry.registry import Registry

    import_modules(imports)
    registry = Registry.standard()
    if kind is not None and variant is not None:
        click.echo(describe_component(registry, kind, variant))
        return
    if kind is not None and kind not in registry.kinds():
        raise UserError(f"there is no component_key `{kind}`\n  help: {did_you_mean(kind, registry.kinds(), 'keys')}")
    for found_kind in registry.kinds() if kind is None else [kind]:
        click.echo(found_kind)
        for found in registry.variants(found_kind):
            spec = registry.get(found_kind, found)
            assert spec is not None
            click.echo(f"  {found:<44} {spec.summary}{'' if spec.is_available else ' (not yet available)'}")
