"""Components in words: their fields and how they are written."""

from __future__ import annotations

from pydantic.fields import FieldInfo

from modalities.config.suggestions import did_you_mean
from modalities.config.tree import COMPONENT_KEY, CONFIG, VARIANT_KEY
from modalities.exceptions import UserError
from modalities.registry.describing import default_text, field_type_text
from modalities.registry.fields import names_of
from modalities.registry.registry import Registry
from modalities.registry.spec import SameAs


def describe_component(registry: Registry, kind: str, variant: str) -> str:
    """A component with its fields, for `modalities components KIND VARIANT`.

    Raises:
        UserError: There is none of that name.
    """
    if kind not in registry.kinds():
        hint = did_you_mean(kind, registry.kinds(), "component keys")
        raise UserError(f"there is no component_key `{kind}`\n  help: {hint}")
    spec = registry.get(kind, registry.renamed_variant(kind, variant) or variant)
    if spec is None:
        hint = did_you_mean(variant, registry.variants(kind), "variants")
        raise UserError(f"`{kind}` has no variant `{variant}`\n  help: {hint}")
    builds = spec.builds if isinstance(spec.builds, str) else spec.where
    lines = [
        f"{spec.name}: {spec.summary}",
        f"  builds    {builds if spec.is_available else 'known, not yet available'}",
    ]
    lines.append(f"  provides  {'what it wraps' if isinstance(spec.provides, SameAs) else spec.provides.__name__}")
    if spec.config.model_fields:
        lines.append("  fields")
    for name, field in spec.config.model_fields.items():
        aliases = [alias for alias in names_of(name, field) if alias != name]
        also = f" (or {', '.join(aliases)})" if aliases else ""
        lines.append(f"    {name}{also}: {field_type_text(field)} = {default_text(field)}")
        if field.description:
            lines.append(f"        {field.description}")
    lines += ["  short", *_example(spec.config.model_fields, kind, variant, short=True)]
    lines += ["  canonical", *_example(spec.config.model_fields, kind, variant, short=False)]
    return "\n".join(lines)


def _example(fields: dict[str, FieldInfo], kind: str, variant: str, short: bool) -> list[str]:
    """How the component is written; only what has no default place is filled in."""
    needed = {name: f for name, f in fields.items() if f.is_required() and not default_text(f).startswith("from ")}
    values = {name: _sample(field) for name, field in needed.items()}
    if short and not values:
        return [f"    {kind}: {variant}"]
    margin = "      " if short else "        "
    lines = (
        [f"    {kind}:"] + ([] if short else [f"      {COMPONENT_KEY}: {kind}"]) + [f"      {VARIANT_KEY}: {variant}"]
    )
    if not short:
        lines.append(f"      {CONFIG}:" + ("" if values else " {}"))
    return lines + [f"{margin}{name}: {value}" for name, value in values.items()]


def _sample(field: FieldInfo) -> str:
    kind = field_type_text(field).partition(",")[0]
    if kind.startswith("a "):
        return f"${{ref:my_{kind[2:].partition(' ')[0].lower()}}}"
    if " | " in kind:
        return kind.partition(" | ")[0]
    samples = {"int": "1", "float": "0.1", "true/false": "true", "text": "name", "path": "some/path"}
    if kind in samples:
        return samples[kind]
    return "[]" if kind.startswith("list") else "{}" if kind.startswith("mapping") else "…"
