"""Faults of a config, each with its place, and the report that a user reads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from modalities.config.tree import Place, TreePath, dotted
from modalities.exceptions import ConfigError

MAX_FAULTS_SHOWN = 20


@dataclass
class Fault:
    """One thing that is wrong.

    Args:
        code: Its kind, stable for programs.
        message: What is wrong, in one sentence.
        path: Dotted place in the tree.
        place: Where it was set.
        span: Characters to underline.
        hints: What to do about it.
        related: Other places that matter, each with what it is.
        severity: ``error`` stops the run, ``warning`` doesn't.
    """

    code: str
    message: str
    path: TreePath = ()
    place: Place = field(default_factory=Place)
    span: int = 1
    hints: list[str] = field(default_factory=list)
    related: list[tuple[str, Place]] = field(default_factory=list)
    severity: str = "error"

    def render(self) -> str:
        """The fault as a few lines of text, with the line of the file it stands in."""
        where = f"   ({dotted(self.path)})" if self.path else ""
        lines = [f"{self.severity}[{self.code}]: {self.message}", f"  --> {self.place}{where}"]
        lines += _excerpt(self.place, self.span)
        lines += [f"  note: {what}: {place}" for what, place in self.related]
        lines += [f"  help: {hint}" for hint in self.hints if hint]
        return "\n".join(lines)


def errors_of(faults: Iterable[Fault]) -> list[Fault]:
    """Only the faults that stop a run; one wrong line copied by interpolation counts once."""
    unique = {(f.code, f.message, f.place): f for f in faults if f.severity == "error"}
    return list(unique.values())


def raise_on_errors(faults: Iterable[Fault]) -> None:
    """Raise all errors among the faults as one.

    Raises:
        ConfigError: There is at least one error.
    """
    errors = errors_of(faults)
    if not errors:
        return
    shown = [fault.render() for fault in errors[:MAX_FAULTS_SHOWN]]
    if len(errors) > MAX_FAULTS_SHOWN:
        shown.append(f"… and {len(errors) - MAX_FAULTS_SHOWN} more")
    count = "1 fault" if len(errors) == 1 else f"{len(errors)} faults"
    raise ConfigError("\n\n".join([*shown, f"The config has {count}; nothing was started."]), errors)


@lru_cache(maxsize=8)
def _lines_of(file: str) -> tuple[str, ...]:
    try:
        return tuple(Path(file).read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError):
        return ()


def _excerpt(place: Place, span: int) -> list[str]:
    lines = _lines_of(place.file) if place.file else ()
    if not 0 < place.line <= len(lines):
        return []
    text = lines[place.line - 1]
    margin = f"{place.line:>5} | "
    underline = "^" * max(1, min(span, len(text) - place.column + 1))
    return [margin + text, " " * (len(margin) - 2) + "| " + " " * (place.column - 1) + underline]
