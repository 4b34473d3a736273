"""Turn a plan into objects: each component once, in dependency order."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from modalities.config.faults import Fault, raise_on_errors
from modalities.config.tree import CONFIG, Node, TreePath, dotted
from modalities.exceptions import ConfigError, UserError
from modalities.factory.plan import Plan
from modalities.factory.planned_component import PlannedComponent
from modalities.factory.rules import broken_rule
from modalities.factory.validation import THE_CONFIG, validate
from modalities.registry.fields import Pending, satisfies
from modalities.registry.registry import Registry

R = TypeVar("R", bound=BaseModel)


def build(plan: Plan, recipe: type[R]) -> R:
    """Build what the recipe needs.

    Args:
        plan: A plan for ``recipe``.
        recipe: The schema of the result.

    Raises:
        ConfigError: The plan has errors, or a value turned out wrong once it was known.
        UserError: A component refused its input; the message names the entry.
    """
    raise_on_errors(plan.faults)
    built: dict[TreePath, Any] = {}
    for component in plan.build_order():
        built[component.path] = _build_component(component, built)
    roots = {name: _with_instances(value, built) for name, value in plan.roots.items()}
    return _validated(recipe, roots, plan.tree, (), THE_CONFIG)


def _build_component(component: PlannedComponent, built: dict[TreePath, Any]) -> Any:
    spec, node = component.spec, component.node
    config_node = node.value.get(CONFIG) or Node({}, node.place)
    values = _with_instances(component.fields, built)
    model = _validated(spec.config, values, config_node, (*component.path, CONFIG), spec.name)
    message = broken_rule(spec.config, model, values)
    if message is not None:
        raise_on_errors([Fault("rule", f"{spec.name}: {message}", component.path, node.best_place)])
    arguments = {name: getattr(model, name) for name in type(model).model_fields}
    where = f"while building `{dotted(component.path)}` ({spec.name}) of {node.best_place}"
    try:
        instance = spec.builder()(**arguments)
    except UserError as error:
        raise type(error)(f"{error}\n  {where}") from error
    except Exception as error:
        error.add_note(where)
        raise
    if not satisfies(instance, component.provides):
        raise ConfigError(f"{spec.name} gave a {type(instance).__name__}, not a {component.provides.runtime}; {where}")
    return instance


def _validated(model: type[R], values: dict[str, Any], node: Node, path: TreePath, owner: str) -> R:
    try:
        return model.model_validate(values)
    except ValidationError:
        faults: list[Fault] = []
        validate(model, values, node, path, owner, Registry(), {}, faults)
        raise_on_errors(faults)
        raise


def _with_instances(value: Any, built: dict[TreePath, Any]) -> Any:
    if isinstance(value, Pending):
        return built[value.path]
    if isinstance(value, dict):
        return {key: _with_instances(child, built) for key, child in value.items()}
    if isinstance(value, list):
        return [_with_instances(child, built) for child in value]
    return value
