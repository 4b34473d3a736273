"""The components drawn."""

from __future__ import annotations

import re

from modalities.inspection.graph import dot, mermaid
from modalities.run import plan_of
from tests.composition.conftest import Composer


def test_nodes_are_in_build_order_and_edges_go_forward(composer: Composer) -> None:
    plan = plan_of(composer())
    text = mermaid(plan)
    labels = dict(re.findall(r'(c\d+)\["(\d+\. .*?)<br/>', text))
    assert len(labels) == len(plan.build_order())
    edges = re.findall(r'(c\d+) -->\|"(.*?)"\| (c\d+)', text)
    assert all(int(source[1:]) < int(target[1:]) for source, _, target in edges)
    names = {key: label.partition(" ")[2] for key, label in labels.items()}
    found = {(names[a], field, names[b]) for a, field, b in edges}
    assert {("model", "wrapped_model", "optimizer"), ("model_raw", "model", "sharded_model")} <= found


def test_dot_has_the_same_edges(composer: Composer) -> None:
    plan = plan_of(composer())
    one = re.findall(r'(c\d+) -->\|"(.*?)"\| (c\d+)', mermaid(plan))
    two = re.findall(r'(c\d+) -> (c\d+) \[label="(.*?)"\]', dot(plan))
    assert [(a, b) for a, _, b in one] == [(a, b) for a, b, _ in two]
    assert dot(plan).startswith("digraph")
    assert dot(plan).endswith("}")
