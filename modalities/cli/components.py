"""``modalities components``."""

from __future__ import annotations

import click

from modalities.cli.options import import_option, import_user_modules


@click.command()
@click.argument("kind", required=False)
@click.argument("variant", required=False)
@import_option
def components(kind: str | None, variant: str | None, imports: tuple[str, ...]) -> None:
    """List the components, those of one KIND, or one VARIANT with its fields."""
    from modalities.config.suggestions import did_you_mean
    from modalities.exceptions import UserError
    from modalities.registry.registry import Registry

    import_user_modules(imports)
    registry = Registry.standard()
    if kind is not None and kind not in registry.kinds():
        raise UserError(f"there is no component_key `{kind}`\n  help: {did_you_mean(kind, registry.kinds(), 'keys')}")
    if kind is not None and variant is not None:
        spec = registry.get(kind, variant)
        if spec is None:
            known = registry.variants(kind)
            raise UserError(f"`{kind}` has no variant `{variant}`\n  help: {did_you_mean(variant, known, 'variants')}")
        click.echo(
            f"{spec.name} — {spec.summary}\n  builds {spec.builds if isinstance(spec.builds, str) else spec.where}"
        )
        for name, field in spec.config.model_fields.items():
            default = "required" if field.is_required() else f"default {field.default!r}"
            click.echo(f"  {name:<28} {default:<22} {field.description or ''}")
        return
    for found_kind in registry.kinds() if kind is None else [kind]:
        click.echo(found_kind)
        for found in registry.variants(found_kind):
            spec = registry.get(found_kind, found)
            assert spec is not None
            click.echo(f"  {found:<44} {spec.summary}")
