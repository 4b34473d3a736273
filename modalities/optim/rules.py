"""What must hold between fields of optimizers and schedulers. Free of torch: checked from the config."""

from __future__ import annotations


def one_implementation(foreach: bool, fused: bool) -> str | None:
    """torch updates in few calls or in one kernel, not in both."""
    return "foreach and fused are both true: choose one" if foreach and fused else None


def has_a_length(total_steps: int | None, epochs: int | None, steps_per_epoch: int | None) -> str | None:
    """A cycle has an end."""
    if total_steps is None and (epochs is None or steps_per_epoch is None):
        return "needs total_steps, or epochs and steps_per_epoch"
    return None


def warmup_fits(warmup_steps: int, total_steps: int) -> str | None:
    """Warming up is a part of the whole."""
    if warmup_steps > total_steps:
        return f"warmup_steps {warmup_steps} is more than total_steps {total_steps}"
    return None
