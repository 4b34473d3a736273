"""Output files: what happens to one that exists, and how a new one appears whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import IO

from modalities.durability import atomic_file
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
def output_file(final: Path) -> Iterator[IO[bytes]]:
    """A file that appears whole when the block ends well; its folder is made if absent.

    Raises:
        DataError: It cannot be written.
    """
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(final) as file:
            yield file
    except OSError as error:
        raise DataError(f"cannot write {final}: {error.strerror}") from error
