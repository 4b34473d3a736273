"""Where checkpoints are put so that they are there whole or not at all: file systems, and stores of objects.

A file system renames in one step: a checkpoint is written under another name and gets its own at the end. A store of
objects (``s3://``, ``gs://``, any fsspec URL) cannot: there the manifest, written last, is what makes a checkpoint.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol

from modalities import durability
from modalities.checkpointing.manifest import MANIFEST_FILE
from modalities.checkpointing.paths import LAST_CHECKPOINT_INFO, parse_checkpoint_name
from modalities.durability import remove_tree, replace_file, temporary_path, write_file
from modalities.exceptions import UserError

logger = logging.getLogger(__name__)

TRASH_PREFIX = ".trash-"
SUPERSEDED_PREFIX = ".superseded-"
UNFINISHED_MARK = ".unfinished"
"""In a store of objects: lies in a checkpoint as long as it is being written."""

_URL = re.compile(r"(?P<protocol>[a-z][a-z0-9+.-]+):/{1,2}(?P<rest>[^/].*)?", re.DOTALL)
"""A Path has lost one of the slashes."""

_LEFTOVER = re.compile(
    rf"{re.escape(durability.TEMPORARY_PREFIX)}{re.escape(LAST_CHECKPOINT_INFO)}-eid_(?P<pointer_of>.+)"
    rf"|{re.escape(durability.TEMPORARY_PREFIX)}eid_(?P<probe_of>.+)-probe[12]"
    r"|\.(?:tmp|trash|superseded)-(?P<checkpoint>eid_.+-target_tokens_\d+(?:\.bin|\.json)?)(?:-[0-9a-f]{8}-\d+)?",
    re.DOTALL,
)


def as_location(path: Path | str) -> Path:
    """A path, or for an fsspec URL such as ``s3://bucket/runs`` what has the methods of a path.

    Raises:
        UserError: The library that reads URLs is not installed.
    """
    if not isinstance(path, str) and is_remote(path):
        return path
    url = _URL.fullmatch(str(path))
    if url is None:
        return Path(path)
    if importlib.util.find_spec("upath") is None:
        raise UserError(f"{path} is a URL, which needs universal-pathlib: pip install 'modalities[remote]'")
    from upath import UPath

    located: Any = UPath(f"{url['protocol']}://{url['rest'] or ''}")
    return located  # type: ignore[no-any-return]


def is_remote(location: Path) -> bool:
    """Whether a location is in a store of objects."""
    return bool(getattr(location, "protocol", ""))


def absolute(location: Path) -> Path:
    """A location that means the same from every working directory."""
    return location if is_remote(location) else location.absolute()


class Destination(Protocol):
    """A folder that a checkpoint is written into."""

    final: Path
    working: Path

    def begin(self) -> None:
        """Make ready for writing; every rank calls it."""

    def create(self, path: Path) -> IO[bytes]: ...
    def write(self, file: IO[bytes], data: bytes | memoryview) -> None: ...
    def sync(self, file: IO[bytes]) -> None: ...

    def commit(self, manifest: bytes) -> None:
        """Make the checkpoint exist; rank 0 calls it when all files are durable."""

    def abandon(self) -> None:
        """Remove what was written; a failure is a warning."""


def destination_of(final: Path, save_id: str) -> Destination:
    """Where a folder of that name is written."""
    return ObjectPrefix(final) if is_remote(final) else RenamedFolder(final, save_id)


class RenamedFolder:
    """A folder on a file system, written under a temporary name beside its own.

    Args:
        final: Its name once committed.
        save_id: Tells this try from others.
    """

    def __init__(self, final: Path, save_id: str) -> None:
        self.final = final
        self.working = temporary_path(final, save_id)

    def begin(self) -> None:
        durability.layer.make_folder(self.working)

    def create(self, path: Path) -> IO[bytes]:
        return durability.layer.create(path)

    def write(self, file: IO[bytes], data: bytes | memoryview) -> None:
        durability.layer.write(file, data)

    def sync(self, file: IO[bytes]) -> None:
        durability.layer.sync(file)

    def commit(self, manifest: bytes) -> None:
        write_file(self.working / MANIFEST_FILE, manifest)
        durability.layer.sync_folder(self.working)
        commit_names([(self.working, self.final)])

    def abandon(self) -> None:
        remove(self.working)


class ObjectPrefix:
    """A prefix in a store of objects; it is a checkpoint from the moment on that its manifest is there.

    Args:
        final: The prefix.
    """

    def __init__(self, final: Path) -> None:
        self.final = self.working = final
        self._is_committed = False

    def begin(self) -> None:
        filesystem: Any = getattr(self.final, "fs")  # noqa: B009
        filesystem.makedirs(getattr(self.final, "path"), exist_ok=True)  # noqa: B009
        (self.final / UNFINISHED_MARK).write_bytes(b"")
        # an older checkpoint of that name ends here, on whichever rank comes first: its data is about to be replaced
        (self.final / MANIFEST_FILE).unlink(missing_ok=True)

    def create(self, path: Path) -> IO[bytes]:
        return path.open("wb")

    def write(self, file: IO[bytes], data: bytes | memoryview) -> None:
        file.write(data)

    def sync(self, file: IO[bytes]) -> None:
        """An object is durable when it is closed."""

    def commit(self, manifest: bytes) -> None:
        (self.final / MANIFEST_FILE).write_bytes(manifest)  # the commit point in a store of objects
        self._is_committed = True
        (self.final / UNFINISHED_MARK).unlink(missing_ok=True)

    def abandon(self) -> None:
        # what fails behind the commit takes nothing with it
        if not self._is_committed:
            remove(self.final)


def commit_names(names: Sequence[tuple[Path, Path]]) -> None:
    """Give files or folders that are durable under temporary names their own, the one that decides last.

    What had these names before is put aside first; :func:`sweep` puts it back if the last step never came.

    Args:
        names: Temporary and final name of each, all in one folder.
    """
    folder = names[-1][1].parent
    superseded = []
    for _, final in reversed(names):
        if final.exists():
            aside = final.with_name(SUPERSEDED_PREFIX + final.name)
            remove_tree(aside)
            durability.layer.rename(final, aside)
            superseded.append(aside)
    for temporary, final in names[:-1]:
        durability.layer.rename(temporary, final)
    if len(names) > 1 or superseded:
        durability.layer.sync_folder(folder)
    durability.layer.rename(*names[-1])  # THE COMMIT POINT: from here on the checkpoint exists
    durability.layer.sync_folder(folder)
    for aside in superseded:
        remove(aside)


def point_at(folder: Path, named: Mapping[str, Path]) -> Path:
    """Let ``last_checkpoint_info.json`` name a checkpoint.

    Args:
        folder: Of the checkpoints.
        named: ``checkpoint_folder_path``, or ``model_checkpoint_path`` and ``optimizer_checkpoint_path``.

    Returns:
        The file.
    """
    pointer = folder / LAST_CHECKPOINT_INFO
    info = {key: str(absolute(path)) for key, path in named.items()}
    parsed = parse_checkpoint_name(next(iter(named.values())))
    # runs of other IDs may write to the same folder
    mark = f"eid_{parsed[0]}" if parsed is not None else ""
    replace_content(pointer, json.dumps(info, indent=2).encode() + b"\n", mark)
    return pointer


def replace_content(path: Path, content: bytes, mark: str = "") -> None:
    """Replace a small file in one step; the mark tells those apart that may do so at the same time."""
    if is_remote(path):
        path.write_bytes(content)  # a store replaces an object in one step
    else:
        replace_file(path, content, mark)


def discard(path: Path) -> None:
    """Delete a checkpoint's folder or file: first its name, then its content; a failure is a warning."""
    if is_remote(path):
        remove(path / MANIFEST_FILE)  # without it the rest is no checkpoint
        remove(path)
        return
    trash = path.with_name(TRASH_PREFIX + path.name)
    try:
        remove_tree(trash)
        durability.layer.rename(path, trash)
        durability.layer.sync_folder(path.parent)
    except FileNotFoundError:
        logger.warning("the checkpoint %s is gone already", path)
        return
    except OSError as error:
        logger.warning("could not delete the checkpoint %s: %s", path, error.strerror)
        return
    remove(trash)


def remove(path: Path) -> None:
    """Delete a file or a whole folder; a failure is a warning."""
    try:
        if is_remote(path):
            filesystem: Any = getattr(path, "fs")  # noqa: B009
            with suppress(FileNotFoundError):
                filesystem.rm(getattr(path, "path"), recursive=True)  # noqa: B009
        else:
            remove_tree(path)
    except OSError as error:
        logger.warning("could not remove %s: %s", path, error.strerror)


def sweep(folder: Path, experiment_id: str) -> list[str]:
    """Clean up what an earlier process of this run left behind when it was killed; the run must hold the lock.

    Args:
        folder: Of the checkpoints.
        experiment_id: Only what carries this ID is touched.

    Returns:
        What was found, in words.
    """
    if not folder.is_dir():
        return []
    if is_remote(folder):
        return _sweep_store(folder, experiment_id)
    told = []
    leftovers = [path for path in sorted(folder.iterdir()) if _left_by(path) == experiment_id]
    aside = [path for path in leftovers if path.name.startswith(SUPERSEDED_PREFIX)]
    # decided before anything is put back
    committed = {path: _deciding_name(path).exists() for path in aside}
    for path in aside:
        final = path.with_name(path.name.removeprefix(SUPERSEDED_PREFIX))
        if committed[path]:
            remove(path)
        else:
            durability.layer.rename(path, final)
            told.append(f"{final.name} was about to be replaced when the run was killed: it is back")
    for path in leftovers:
        if path not in aside:
            remove(path)
            told.append(f"removed {path.name}, left behind by a run that was killed")
    if told:
        durability.layer.sync_folder(folder)
    return told


def _sweep_store(folder: Path, experiment_id: str) -> list[str]:
    told = []
    for path in list(folder.iterdir()):
        parsed = parse_checkpoint_name(path)
        if parsed is None or parsed[0] != experiment_id or not (path / UNFINISHED_MARK).is_file():
            continue
        if (path / MANIFEST_FILE).is_file():
            (path / UNFINISHED_MARK).unlink()
        else:
            remove(path)
            told.append(f"removed {path.name}, left behind by a run that was killed")
    return told


def _left_by(path: Path) -> str | None:
    """The experiment that a name of something unfinished tells; None for any other name."""
    match = _LEFTOVER.fullmatch(path.name)
    if match is None:
        return None
    if (named := match["pointer_of"] or match["probe_of"]) is not None:
        return named
    parsed = parse_checkpoint_name(path.with_name(match["checkpoint"]))
    return parsed[0] if parsed is not None else None


def _deciding_name(aside: Path) -> Path:
    """Whose presence tells that what replaced it is whole: itself, or for a full file the model's."""
    name = aside.name.removeprefix(SUPERSEDED_PREFIX)
    model = re.sub(r"-(?:optimizer|resume_state|manifest)(-seen_steps_.*)\.(?:bin|json)$", r"-model\1.bin", name)
    return aside.with_name(model)
