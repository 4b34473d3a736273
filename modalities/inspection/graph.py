"""A config's components as a graph: an arrow from each component to those that need it, in build order."""

from __future__ import annotations

from collections.abc import Callable

from modalities.config.tree import CONFIG, TreePath, dotted
from modalities.factory.plan import Plan, pending_paths
from modalities.factory.planned_component import PlannedComponent


def mermaid(plan: Plan) -> str:
    """The graph as a Mermaid flowchart."""
    return _draw(
        plan,
        "flowchart TD",
        lambda key, label: f'    {key}["{label.replace(chr(10), "<br/>")}"]',
        lambda source, target, label: f'    {source} -->|"{label}"| {target}',
        "",
    )


def dot(plan: Plan) -> str:
    """The graph in Graphviz's DOT."""
    return _draw(
        plan,
        "digraph config {\n    node [shape=box]",
        lambda key, label: f'    {key} [label="{label.replace(chr(10), chr(92) + "n")}"]',
        lambda source, target, label: f'    {source} -> {target} [label="{label}"]',
        "\n}",
    )


def _draw(
    plan: Plan,
    head: str,
    node: Callable[[str, str], str],
    edge: Callable[[str, str, str], str],
    tail: str,
) -> str:
    order = plan.build_order()
    keys: dict[TreePath, str] = {component.path: f"c{index}" for index, component in enumerate(order, start=1)}
    lines = [head]
    for index, component in enumerate(order, start=1):
        lines.append(node(keys[component.path], f"{index}. {_shown(component.path)}\n{component.spec.name}"))
    for component in order:
        for field, needed in _needs(component):
            lines.append(edge(keys[needed], keys[component.path], field))
    return "\n".join(lines) + tail


def _needs(component: PlannedComponent) -> list[tuple[str, TreePath]]:
    return [(field, path) for field, value in component.fields.items() for path in dict.fromkeys(pending_paths(value))]


def _shown(path: TreePath) -> str:
    return dotted(tuple(key for key in path if key != CONFIG))
