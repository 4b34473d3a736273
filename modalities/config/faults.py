"""Faults of a config, each with its place, and the report that a user reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modalities.config.tree import Place, TreePath, dotted
from modalities.exceptions import ConfigError

MAX_FAULTS_SHOWN = 20
MAX_RELATED_SHOWN = 5
MAX_LINE_SHOWN = 160

_STYLES = {
    "error": "\x1b[1;31m",
    "warning": "\x1b[1;33m",
    "note": "\x1b[1;36m",
    "help": "\x1b[32m",
    "margin": "\x1b[34m",
    "bold": "\x1b[1m",
    "plain": "\x1b[0m",
}


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
        severity: ``error`` stops the run; ``warning`` and ``note`` do not.
        covers: The missing thing that this misspelt one was meant to be.
        asked_for: Places that would have given a missing value.
        is_copy: Whether the value was copied here from elsewhere, where it may be at fault as well.
    """

    code: str
    message: str
    path: TreePath = ()
    place: Place = field(default_factory=Place)
    span: int = 1
    hints: list[str] = field(default_factory=list)
    related: list[tuple[str, Place]] = field(default_factory=list)
    severity: str = "error"
    covers: TreePath = ()
    asked_for: tuple[str, ...] = ()
    is_copy: bool = False

    def render(self, color: bool = False) -> str:
        """The fault as a few lines of text, with the line of the file it stands in.

        Args:
            color: Mark the parts with a terminal's colours.
        """

        def paint(text: str, style: str) -> str:
            return f"{_STYLES[style]}{text}{_STYLES['plain']}" if color else text

        where = f"   ({dotted(self.path)})" if self.path else ""
        lines = [paint(f"{self.severity}[{self.code}]", self.severity) + paint(f": {self.message}", "bold")]
        lines.append(paint("  --> ", "margin") + f"{self.place}{where}")
        lines += [paint(line, "margin") if line.endswith("^") else line for line in _excerpt(self.place, self.span)]
        lines += [paint("  note: ", "margin") + f"{what}: {place}" for what, place in self.related[:MAX_RELATED_SHOWN]]
        if len(self.related) > MAX_RELATED_SHOWN:
            lines.append(f"  note: and {len(self.related) - MAX_RELATED_SHOWN} more places")
        lines += [paint("  help: ", "help") + hint for hint in self.hints if hint]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """The fault for programs: an editor, a CI job."""
        return {
            "severity": self.severity,
            "code": self.code,
            "message": self.message,
            "path": dotted(self.path),
            **_place_as_json(self.place),
            "span": self.span,
            "hints": [hint for hint in self.hints if hint],
            "related": [{"what": what, **_place_as_json(place)} for what, place in self.related],
        }


def _place_as_json(place: Place) -> dict[str, Any]:
    return {"file": place.file, "line": place.line, "column": place.column, "origin": place.origin}


def unique(faults: Iterable[Fault]) -> list[Fault]:
    """Faults in the order of the files, each once; one wrong line copied by interpolation counts once."""
    found: dict[object, Fault] = {}
    for fault in sorted(faults, key=lambda f: f.is_copy):
        found.setdefault(_identity(fault), fault)
    return sorted(
        found.values(), key=lambda f: (f.place.file is None, f.place.file or "", f.place.line, f.place.column)
    )


def _identity(fault: Fault) -> object:
    # one wrong value is one fault, however many fields take it
    return (fault.code, fault.place) if fault.code == "bad-value" else (fault.code, fault.message, fault.place)


def without_consequences(faults: Sequence[Fault]) -> list[Fault]:
    """Leave out missing values that would have come from a place that is at fault itself."""
    broken = [path for f in faults if f.severity == "error" for path in (f.path, f.covers) if path]

    def is_consequence(fault: Fault) -> bool:
        sources = [place.split(".")[: 2 if place.startswith("settings.") else 1] for place in fault.asked_for]
        return any(list(map(str, path[: len(source)])) == source for source in sources for path in broken)

    return [fault for fault in faults if not is_consequence(fault)]


def errors_of(faults: Iterable[Fault]) -> list[Fault]:
    """Only the faults that stop a run, in the order of the files, each once."""
    return unique(fault for fault in faults if fault.severity == "error")


def report(errors: Sequence[Fault], color: bool = False) -> str:
    """The text that a user reads about the errors of a config."""
    shown = [fault.render(color) for fault in errors[:MAX_FAULTS_SHOWN]]
    if len(errors) > MAX_FAULTS_SHOWN:
        shown.append(f"… and {len(errors) - MAX_FAULTS_SHOWN} more; `modalities check --format json` lists them all")
    count = "1 fault" if len(errors) == 1 else f"{len(errors)} faults"
    return "\n\n".join([*shown, f"The config has {count}; nothing was started."])


def raise_on_errors(faults: Iterable[Fault]) -> None:
    """Raise all errors among the faults as one.

    Raises:
        ConfigError: There is at least one error.
    """
    errors = errors_of(faults)
    if errors:
        raise ConfigError(report(errors), errors)


def _lines_of(file: str) -> list[str]:
    try:
        return Path(file).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def _excerpt(place: Place, span: int) -> list[str]:
    lines = _lines_of(place.file) if place.file and span else []
    if not 0 < place.line <= len(lines):
        return []
    text = lines[place.line - 1]
    if len(text) > MAX_LINE_SHOWN:
        text = text[: MAX_LINE_SHOWN - 1] + "…"
    if place.column > len(text):
        return []
    margin = f"{place.line:>5} | "
    underline = "^" * max(1, min(span, len(text) - place.column + 1))
    return [margin + text, " " * (len(margin) - 2) + "| " + " " * (place.column - 1) + underline]
