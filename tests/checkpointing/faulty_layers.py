"""File layers that stop, fail, or forget what was not made durable."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from modalities.durability import FileLayer


class CountingLayer(FileLayer):
    """Counts its operations, and does something at one of them.

    Args:
        at: Number of the operation, from 1; 0 for none.
        instead: What is done then, before the operation.
    """

    def __init__(self, at: int = 0, instead: Callable[[str], None] = lambda _: None) -> None:
        self.at, self.instead = at, instead
        self.num_operations = 0
        self.names: list[str] = []

    def _count(self, name: str) -> None:
        self.num_operations += 1
        self.names.append(name)
        if self.num_operations == self.at:
            self.instead(name)

    def make_folder(self, path: Path) -> None:
        self._count("make_folder")
        super().make_folder(path)

    def create(self, path: Path) -> IO[bytes]:
        self._count("create")
        return super().create(path)

    def write(self, file: IO[bytes], data: Any) -> None:
        half = memoryview(data)[: len(data) // 2]
        if self.num_operations + 1 == self.at:
            super().write(file, half)
        self._count("write")
        super().write(file, memoryview(data)[len(half) :] if self.num_operations == self.at else data)

    def sync(self, file: IO[bytes]) -> None:
        self._count("sync")
        super().sync(file)

    def sync_folder(self, path: Path) -> None:
        self._count("sync_folder")
        super().sync_folder(path)

    def rename(self, source: Path, target: Path) -> None:
        self._count("rename")
        super().rename(source, target)

    def remove_file(self, path: Path) -> None:
        self._count("remove_file")
        super().remove_file(path)

    def remove_folder(self, path: Path) -> None:
        self._count("remove_folder")
        super().remove_folder(path)


def die(_: str) -> None:
    """End the process at once, as SIGKILL does."""
    os._exit(9)


class PowerLossLayer(FileLayer):
    """Keeps account of what would be on the disk if the power went now.

    A file's content is there as of its last sync, a name as of the last sync of its folder. What was not synced may be
    there or not.

    Args:
        root: Folder that everything happens in; durable.
        after_each: Called after every operation.
    """

    def __init__(self, root: Path, after_each: Callable[[PowerLossLayer], None]) -> None:
        self.root = root
        self.after_each = after_each
        self.tree = _Folder()
        for path in sorted(root.rglob("*")):
            node: _Node = _Folder() if path.is_dir() else _File(path.read_bytes())
            self._parent(path).durable[path.name] = self._parent(path).live[path.name] = node

    def image(self, target: Path, *, lazy: bool) -> None:
        """Write what the disk would hold.

        Args:
            target: A new folder.
            lazy: The disk has kept nothing that it did not have to; else every name, but still only synced content.
        """
        _render(self.tree, target, lazy=lazy)

    def make_folder(self, path: Path) -> None:
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        super().make_folder(path)
        for folder in reversed(missing):
            self._parent(folder).live[folder.name] = _Folder()
        self.after_each(self)

    def create(self, path: Path) -> IO[bytes]:
        file = super().create(path)
        self._parent(path).live[path.name] = _File(b"")
        self.after_each(self)
        return file

    def write(self, file: IO[bytes], data: Any) -> None:
        super().write(file, data)
        self.after_each(self)

    def sync(self, file: IO[bytes]) -> None:
        super().sync(file)
        path = Path(file.name)
        node = self._parent(path).live[path.name]
        assert isinstance(node, _File)
        node.synced = path.read_bytes()
        self.after_each(self)

    def sync_folder(self, path: Path) -> None:
        super().sync_folder(path)
        folder = self._folder(path)
        folder.durable = dict(folder.live)
        self.after_each(self)

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self._parent(target).live[target.name] = self._parent(source).live.pop(source.name)
        self.after_each(self)

    def remove_file(self, path: Path) -> None:
        super().remove_file(path)
        self._parent(path).live.pop(path.name, None)
        self.after_each(self)

    def remove_folder(self, path: Path) -> None:
        super().remove_folder(path)
        del self._parent(path).live[path.name]
        self.after_each(self)

    def _parent(self, path: Path) -> _Folder:
        return self._folder(path.parent)

    def _folder(self, path: Path) -> _Folder:
        folder = self.tree
        for name in path.relative_to(self.root).parts:
            inner = folder.live[name]
            assert isinstance(inner, _Folder)
            folder = inner
        return folder


class _Node:
    pass


class _File(_Node):
    def __init__(self, synced: bytes) -> None:
        self.synced = synced


class _Folder(_Node):
    def __init__(self) -> None:
        self.live: dict[str, _Node] = {}
        self.durable: dict[str, _Node] = {}


def _render(folder: _Folder, target: Path, *, lazy: bool) -> None:
    target.mkdir(parents=True)
    for name, node in (folder.durable if lazy else folder.live).items():
        if isinstance(node, _Folder):
            _render(node, target / name, lazy=lazy)
        elif isinstance(node, _File):
            (target / name).write_bytes(node.synced)
