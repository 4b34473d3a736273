"""The errors of modalities.

ModalitiesError
├── UserError                 something the user can put right; exit code 2, no traceback
│   ├── ConfigError           the YAML file or an override; carries every fault found
│   ├── DataError             a data file, an index or a tokenizer
│   └── CheckpointError       a checkpoint that is absent, incomplete or of another model
│       └── DamagedCheckpoint one that is not as it was written; an older one may serve
├── RegistrationError         a component registered twice or wrongly; a programmer's mistake
└── RunsPart                  two runs that were to be equal are not

Interrupted                   the run was asked to stop, saved a checkpoint and ended early
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class ModalitiesError(Exception):
    """Base of all errors raised on purpose."""


class UserError(ModalitiesError):
    """A mistake of the user's: the message says what, where, and what to do next."""


class ConfigError(UserError):
    """One or more faults of a config, each with its place.

    Args:
        message: The rendered report.
        faults: The :class:`~modalities.config.faults.Fault` objects it was made of, for programs.
    """

    def __init__(self, message: str, faults: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.faults = list(faults)


class DataError(UserError):
    """A data file, index or tokenizer that cannot be used."""


class CheckpointError(UserError):
    """A checkpoint that is absent, incomplete, or does not fit the model."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint that is not as it was written, found before anything was loaded from it."""


class RegistrationError(ModalitiesError):
    """A component was registered twice, or with a signature that cannot serve as a schema."""


class RunsPart(ModalitiesError):
    """A run is no longer that which it is checked against; the message names the first step and tensor."""


class Interrupted(ModalitiesError):
    """The run was asked to stop; everything up to here is saved.

    Args:
        message: What stopped it.
        is_preemption: Whether a scheduler asked, or a time limit came; for a scheduler this is a good end.
    """

    def __init__(self, message: str, *, is_preemption: bool = False) -> None:
        super().__init__(message)
        self.is_preemption = is_preemption
