"""From JSONL text to a packed token file."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modalities.data.files import FileExistencePolicy, output_file
from modalities.data.packed_file import PackedFileInfo, PackedFileWriter, read_info, write_info
from modalities.data.raw_index import create_raw_index, read_raw_index
from modalities.data.tokenizers import TokenizerWrapper
from modalities.exceptions import DataError
from modalities.parallel.process_group import on_rank_zero

logger = logging.getLogger(__name__)

_BATCH_SIZE = 256


@dataclass
class PackingReport:
    """What became of the documents; read = written + empty.

    Args:
        num_read: Lines read.
        num_written: Documents written.
        empty_lines: Numbers, from 1, of the lines whose text is empty or white space; they are left out.
        num_tokens: Tokens written.
    """

    num_read: int = 0
    num_written: int = 0
    empty_lines: list[int] = field(default_factory=list)
    num_tokens: int = 0

    def __str__(self) -> str:
        text = f"{self.num_written} documents, {self.num_tokens:,} tokens"
        if self.empty_lines:
            shown = ", ".join(map(str, self.empty_lines[:10])) + (", …" if len(self.empty_lines) > 10 else "")
            text += f"; {len(self.empty_lines)} empty documents left out (lines {shown})"
        return text


class Packing:
    """A recipe for a packed file.

    Args:
        src_path: One JSON document per line.
        tokenizer: Text to ids.
        eod_token: Ends each document, exactly once.
        jq_pattern: What of a document is its text.
        index_path: Where the index of the source goes; beside the packed file if not given.

    Raises:
        DataError: The end-of-document token is not of the vocabulary, or the pattern is no jq.
    """

    def __init__(
        self,
        src_path: Path,
        tokenizer: TokenizerWrapper,
        eod_token: str,
        jq_pattern: str = ".text",
        index_path: Path | None = None,
    ) -> None:
        self.src_path, self.tokenizer, self.index_path = src_path, tokenizer, index_path
        self.jq_pattern = jq_pattern
        self.end_of_document_id = tokenizer.get_token_id(eod_token)
        self._text_of = text_extractor(jq_pattern)

    def ensure(self, dst_path: Path) -> None:
        """Make the packed file on rank 0 unless it is there and of this source, tokenizer and pattern."""

        def pack_if_needed() -> None:
            info = read_info(dst_path)
            if dst_path.exists() and (info is None or self._is_current(info)):
                return
            reason = "is not there" if not dst_path.exists() else "was made of another text or tokenizer"
            report = self.pack(dst_path, FileExistencePolicy.OVERRIDE)
            logger.info("%s %s: packed %s: %s", dst_path, reason, self.src_path, report)

        on_rank_zero(pack_if_needed)

    def pack(self, dst_path: Path, file_existence_policy: FileExistencePolicy) -> PackingReport | None:
        """Index, tokenize and pack; on an error nothing is left under the output's name.

        Returns:
            What became of the documents, or None if the file existed and was skipped.

        Raises:
            DataError: A document has no text, or a file cannot be read or written.
        """
        if not file_existence_policy.allows(dst_path):
            return None
        index_path = self.index_path or dst_path.with_suffix(".idx")
        index_policy = FileExistencePolicy.SKIP if self.index_path else FileExistencePolicy.OVERRIDE
        create_raw_index(self.src_path, index_path, index_policy)
        report = PackingReport()
        with output_file(dst_path) as file:
            writer = PackedFileWriter(file, self.tokenizer.vocab_size)
            texts = self._texts(read_raw_index(index_path), report)
            while batch := list(itertools.islice(texts, _BATCH_SIZE)):
                for ids in self.tokenizer.tokenize_batch(batch):
                    if not ids or ids[-1] != self.end_of_document_id:
                        ids.append(self.end_of_document_id)
                    writer.write_document(ids)
            if writer.num_documents == 0:
                raise DataError(f"{self.src_path} holds no text: all {report.num_read} documents are empty")
            writer.finish()
        report.num_written, report.num_tokens = writer.num_documents, writer.num_tokens
        assert report.num_read == report.num_written + len(report.empty_lines)
        write_info(dst_path, self._info(writer))
        return report

    def _texts(self, spans: list[tuple[int, int]], report: PackingReport) -> Iterator[str]:
        with self.src_path.open("rb") as source:
            for number, (start, length) in enumerate(spans, start=1):
                source.seek(start)
                line = source.read(length)
                if len(line) < length:
                    raise DataError(f"{self.src_path} is shorter than its index tells; index it again")
                text = self._text(line, number)
                report.num_read += 1
                if text.strip():
                    yield text
                else:
                    report.empty_lines.append(number)

    def _text(self, line: bytes, number: int) -> str:
        where = f"{self.src_path}:{number}"
        try:
            text = self._text_of(line)
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{where}: `{self.jq_pattern}` gives no text: {error}") from error
        if not isinstance(text, str):
            shown = "nothing" if text is None else f"a {type(text).__name__}"
            raise DataError(f"{where}: `{self.jq_pattern}` gives {shown}, not a text; check jq_pattern or the document")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(f"{where}: half a surrogate pair at character {error.start}; repair the text") from error
        return text

    def _info(self, writer: PackedFileWriter) -> PackedFileInfo:
        return PackedFileInfo(
            num_documents=writer.num_documents,
            num_tokens=writer.num_tokens,
            vocab_size=self.tokenizer.vocab_size,
            max_token_id=writer.max_token_id,
            end_of_document_id=self.end_of_document_id,
            tokenizer_fingerprint=self.tokenizer.fingerprint,
            jq_pattern=self.jq_pattern,
            source_name=self.src_path.name,
            source_fingerprint=_fingerprint(self.src_path),
        )

    def _is_current(self, info: PackedFileInfo) -> bool:
        return (
            info.tokenizer_fingerprint == self.tokenizer.fingerprint
            and info.jq_pattern == self.jq_pattern
            and info.end_of_document_id == self.end_of_document_id
            and (not self.src_path.exists() or info.source_fingerprint == _fingerprint(self.src_path))
        )


def _fingerprint(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def text_extractor(pattern: str) -> Callable[[bytes], Any]:
    """A function from a line to what the pattern takes of it; plain field paths need no jq."""
    names = pattern.strip().split(".")
    if names[0] == "" and len(names) > 1 and all(name.isidentifier() for name in names[1:]):

        def take(line: bytes) -> Any:
            value = json.loads(line)
            for name in names[1:]:
                value = value[name]
            return value

        return take
    import jq

    try:
        program = jq.compile(pattern)
    except ValueError as error:
        raise DataError(f"jq_pattern `{pattern}` is no jq: {error}") from error
    return lambda line: program.input_text(line.decode("utf-8")).first()
