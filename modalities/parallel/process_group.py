"""The job's processes: joining them, and agreeing among them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from modalities.exceptions import Interrupted, ModalitiesError, UserError
from modalities.parallel.bounded import call_within

T = TypeVar("T")

_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TOLD_KEY = "modalities/rank-zero-tells"


def machine_device() -> torch.device:
    """The device this process computes on: its accelerator, else the CPU."""
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", "0")))


def global_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@contextmanager
def process_group(timeout: timedelta = timedelta(minutes=30)) -> Iterator[None]:
    """Join the processes that a launcher started, or be a group of one; leave them at the end.

    Raises:
        UserError: The launcher's variables are incomplete.
    """
    if dist.is_initialized():
        yield
        return
    device = machine_device()
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 or "MASTER_ADDR" in os.environ:
        absent = [name for name in _LAUNCHER_VARIABLES if name not in os.environ]
        if absent:
            raise UserError(
                f"the launcher left {', '.join(absent)} unset; start several processes with `--nproc N` or torchrun"
            )
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        yield
        # without it a finished gloo job aborts now and then when the interpreter exits
        barrier()
    except Interrupted:
        # all ranks have agreed to stop, so it is an end like any other
        barrier()
        raise
    except UserError as error:
        told = _told_by_rank_zero()
        raise (error if told else type(error)(f"rank {global_rank()}: {error}")) from error
    finally:
        dist.destroy_process_group()


def _told_by_rank_zero(patience_s: float = 5) -> bool:
    """Whether rank 0 met a mistake too and tells it, so that this rank need not; rank 0 itself says yes at once.

    A launcher ends all ranks when the first one leaves. Ranks other than 0 therefore wait, lest the one that tells the
    user is ended before it has spoken.
    """
    if world_size() == 1:
        return True
    store = torch.distributed.distributed_c10d._get_default_store()

    def told() -> bool:
        if global_rank() == 0:
            store.set(_TOLD_KEY, "1")
            return True
        deadline = time.monotonic() + patience_s
        while not store.check([_TOLD_KEY]):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    try:
        return call_within(patience_s + 1, told)
    except RuntimeError:
        # the store went with the process that held it, which is rank 0: it has told why
        return True
    except TimeoutError:
        # the store's process is frozen: who knows what the others could tell
        return global_rank() == 0


def barrier() -> None:
    """Wait for all ranks."""
    if world_size() > 1:
        dist.monitored_barrier() if dist.get_backend() == "gloo" else dist.barrier()


def from_rank_zero(value: T) -> T:
    """The value that rank 0 passed, on every rank."""
    if world_size() == 1:
        return value
    carrier = [value]
    dist.broadcast_object_list(carrier, src=0, device=torch.device("cpu"))
    return carrier[0]


def on_rank_zero(work: Callable[[], T]) -> T:
    """Do the work on rank 0 and give its result to all; its error is everyone's.

    Raises:
        UserError: The work raised one on rank 0.
        ModalitiesError: The work raised something else on rank 0.
    """
    result: T | None = None
    error: Exception | None = None
    if global_rank() == 0:
        try:
            result = work()
        except Exception as caught:
            error = caught
    message = f"{error}" if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    kind, text, result = from_rank_zero((_kind_of(error), message, result))
    if error is not None:
        raise error
    if kind is not None:
        raise kind(f"rank 0: {text}")
    return result  # type: ignore[return-value]


def all_gathered(value: T) -> list[T]:
    """What every rank brings, by rank, on every rank; all ranks must call it."""
    if world_size() == 1:
        return [value]
    gathered: list[T | None] = [None] * world_size()
    dist.all_gather_object(gathered, value)
    return gathered  # type: ignore[return-value]


def fail_together(error: Exception | None) -> None:
    """Raise on every rank if any rank brings an error; all ranks must call it.

    Args:
        error: What went wrong on this rank, if anything did.

    Raises:
        Exception: This rank's own error, or a :class:`ModalitiesError` that names the first failing rank and its cause.
    """
    if world_size() == 1:
        if error is not None:
            raise error
        return
    told: list[tuple[type[ModalitiesError] | None, str]] = [(None, "")] * world_size()
    dist.all_gather_object(told, (_kind_of(error), str(error) if isinstance(error, UserError) else repr(error)))
    if error is not None:
        raise error
    for rank, (kind, text) in enumerate(told):
        if kind is not None:
            raise kind(f"rank {rank}: {text}")


def _kind_of(error: Exception | None) -> type[ModalitiesError] | None:
    if error is None:
        return None
    return type(error) if isinstance(error, UserError) else ModalitiesError
