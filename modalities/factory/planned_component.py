"""One component of a plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from modalities.config.tree import Node, TreePath
from modalities.registry.interfaces import Anything, Interface
from modalities.registry.spec import Spec


@dataclass
class PlannedComponent:
    """One component that will be built.

    Args:
        path: Its place in the tree, which is its identity.
        spec: What the registry knows of it.
        node: Its entry.
        fields: Its fields; instances of other components are :class:`Pending`.
        provides: The interface it will have.
        needs: Paths of the components among its fields.
    """

    path: TreePath
    spec: Spec
    node: Node
    fields: dict[str, Any] = field(default_factory=dict)
    provides: type[Interface] = Anything
    needs: list[TreePath] = field(default_factory=list)
