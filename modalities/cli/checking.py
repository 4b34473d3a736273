"""Checking a config before anything heavy is imported."""

from __future__ import annotations

import os

import click

from modalities.config.faults import Fault, raise_on_errors, unique
from modalities.factory.plan import Plan
from modalities.run import check
from modalities.run_request import NUM_PROCESSES_VARIABLE, RunRequest


def check_or_exit(request: RunRequest) -> Plan:
    """Check the config; rank 0 tells warnings and notes.

    Raises:
        ConfigError: It has faults.
    """
    plan = check(request)
    if os.environ.get("RANK", "0") == "0" and NUM_PROCESSES_VARIABLE not in os.environ:
        tell_mild(plan.faults)
    raise_on_errors(plan.faults)
    return plan


def tell_mild(faults: list[Fault]) -> None:
    """Print the warnings and notes among the faults."""
    for fault in unique(faults):
        if fault.severity != "error":
            click.echo(fault.render(color="NO_COLOR" not in os.environ) + "\n", err=True)
