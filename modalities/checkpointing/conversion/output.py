"""Files and folders that a conversion writes: they have their names when they are whole, and replace nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from modalities import durability
from modalities.checkpointing.storage import commit_names, is_remote
from modalities.durability import remove_tree, temporary_path
from modalities.exceptions import CheckpointError


@contextmanager
def new_output(final: Path) -> Iterator[Path]:
    """One file or folder; as :func:`new_outputs`."""
    with new_outputs([final]) as (temporary,):
        yield temporary


@contextmanager
def new_outputs(finals: Sequence[Path]) -> Iterator[list[Path]]:
    """Names to write under, which become the final ones when the block ends well; otherwise what was written is gone.

    What an earlier try left under these names, since it was killed, is removed first.

    Args:
        finals: Of files whose content is durable, or folders of such, at the end of the block; all in one folder, which
            is made if need be. The last one must be written, and decides whether all are there; others may be left out.

    Raises:
        CheckpointError: One is there already, or cannot be written.
    """
    folder = finals[-1].parent
    if is_remote(folder):
        raise CheckpointError(f"{folder} is a URL: a conversion writes to file systems only; copy its output there")
    refuse_existing(finals)
    temporary = [temporary_path(final) for final in finals]
    made = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    try:
        durability.layer.make_folder(folder)
        for path in temporary:
            remove_tree(path)
        yield temporary
        for path in filter(Path.is_dir, temporary):
            durability.layer.sync_folder(path)
        refuse_existing(finals)
        written = [pair for pair in zip(temporary, finals, strict=True) if pair[0].exists()]
        commit_names(written)
    except BaseException as error:
        # what cannot even be removed is told by the first failure
        with suppress(OSError):
            for path in temporary:
                remove_tree(path)
            for parent in made:
                parent.rmdir()
        if isinstance(error, OSError):
            raise CheckpointError(f"cannot write {finals[-1]}: {error.strerror or error}") from error
        raise


def refuse_existing(finals: Sequence[Path]) -> None:
    """Check that nothing has these names.

    Raises:
        CheckpointError: Something has.
    """
    for final in finals:
        if final.exists() or final.is_symlink():
            raise CheckpointError(
                f"{final} exists already and is not overwritten: give another name, or remove it first"
            )
