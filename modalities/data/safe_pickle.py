"""Reading the pickles of index files without running code from them."""

from __future__ import annotations

import io
import pickle
from typing import Any

from modalities.exceptions import DataError


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def load_spans(content: bytes, source: str) -> list[tuple[int, int]]:
    """Unpickle a list of (start, length) pairs.

    Args:
        content: The pickle.
        source: The file, for messages.

    Raises:
        DataError: It holds anything else.
    """
    try:
        spans = _PlainUnpickler(io.BytesIO(content)).load()
    except Exception as error:
        raise DataError(f"{source} holds no index: {error}; make it anew") from error
    if not isinstance(spans, list) or not all(_is_span(span) for span in spans):
        raise DataError(f"{source} holds no index: a list of (start, length) pairs of integers is expected")
    return spans


def _is_span(span: object) -> bool:
    return isinstance(span, tuple) and len(span) == 2 and all(type(number) is int and number >= 0 for number in span)
