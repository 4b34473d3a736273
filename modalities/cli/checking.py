"""Checking a config before anything heavy is imported."""

from __future__ import annotations

import os

import click

from modalities.config.faults import raise_on_errors
from modalities.factory.plan import Plan
from modalities.run import NUM_PROCESSES_VARIABLE, RunRequest, check


def check_or_exit(request: RunRequest) -> Plan:
    """Check the config; rank 0 tells the warnings.

    Raises:
        ConfigError: It has faults.
    """
    plan = check(request)
    if os.environ.get("RANK", "0") == "0" and NUM_PROCESSES_VARIABLE not in os.environ:
        for fault in plan.faults:
            if fault.severity == "warning":
                click.echo(fault.render() + "\n", err=True)
    raise_on_errors(plan.faults)
    return plan
