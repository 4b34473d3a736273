"""Output files: what happens to one that exists, and how a new one appears whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import IO

from modalities.exceptions import DataError


class FileExistencePolicy(Enum):
    """What to do where the output file exists."""

    SKIP = "skip"
    ERROR = "error"
    OVERRIDE = "override"

    def allows(self, path: Path) -> bool:
        """Whether to write the file.

        Raises:
            DataError: It exists, and that is an error.
        """
        if not path.exists():
            return True
        if self is FileExistencePolicy.ERROR:
            raise DataError(f"{path} exists already; use --file_existence_policy override or skip")
        return self is FileExistencePolicy.OVERRIDE


@contextmanager
def atomic_file(final: Path) -> Iterator[IO[bytes]]:
    """A file that gets its name when the block ends well, durable, replacing what was there; otherwise it is gone."""
    temporary = final.with_name(f".tmp-{final.name}-{os.getpid()}")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(final)
        descriptor = os.open(final.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise DataError(f"cannot write {final}: {error.strerror}") from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
