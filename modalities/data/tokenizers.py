"""Tokenizers from local files; nothing is fetched."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from modalities.config.suggestions import did_you_mean
from modalities.exceptions import DataError


class TokenizerWrapper(ABC):
    """Text to token ids and back."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Differs where the ids of some text differ."""

    @property
    @abstractmethod
    def end_of_document_id(self) -> int | None:
        """The id that ends a document, if the tokenizer's files name one."""

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Ids of a text, without special tokens of the tokenizer's own."""

    @abstractmethod
    def decode(self, token_ids: list[int]) -> str:
        """Text of ids."""

    @abstractmethod
    def get_token_id(self, token: str) -> int:
        """Id of one token.

        Raises:
            DataError: The vocabulary has no such token.
        """

    def tokenize_batch(self, texts: list[str]) -> list[list[int]]:
        """Ids of several texts."""
        return [self.tokenize(text) for text in texts]


class PreTrainedHFTokenizer(TokenizerWrapper):
    """A tokenizer of the Hugging Face format.

    Args:
        pretrained_model_name_or_path: Folder that holds ``tokenizer.json``.
        max_length: Texts are cut to it if ``truncation``, filled up to it if ``padding``.
        truncation: Cut texts.
        padding: Fill up short texts.
        special_tokens: Further tokens, by role; added to the vocabulary if new.

    Raises:
        DataError: The folder holds no tokenizer.
    """

    def __init__(
        self,
        pretrained_model_name_or_path: str,
        max_length: int | None = None,
        truncation: bool = False,
        padding: bool | str = False,
        special_tokens: dict[str, str | list[str] | tuple[str, ...]] | None = None,
    ) -> None:
        from tokenizers import Tokenizer

        folder = Path(pretrained_model_name_or_path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise DataError(
                f"no tokenizer at {folder}: a local folder with a tokenizer.json is needed; "
                "save one with `save_pretrained`, since nothing is downloaded"
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:
            raise DataError(f"{file} is no tokenizer: {error}") from error
        self._settings = _read_json(folder / "tokenizer_config.json")
        self._special_tokens = dict(special_tokens or {})
        added = [token for tokens in self._special_tokens.values() for token in _as_list(tokens)]
        if added:
            self._tokenizer.add_special_tokens(added)
        if truncation:
            if max_length is None:
                raise DataError("truncation needs max_length")
            self._tokenizer.enable_truncation(max_length)
        if padding:
            pad_token = _token_text((special_tokens or {}).get("pad_token") or self._settings.get("pad_token"))
            if pad_token is None:
                raise DataError(f"padding needs a pad_token, and {folder} names none; give it in special_tokens")
            self._tokenizer.enable_padding(
                pad_id=self.get_token_id(pad_token),
                pad_token=pad_token,
                length=max_length if padding == "max_length" else None,
            )

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def fingerprint(self) -> str:
        return hashlib.blake2b(self._tokenizer.to_str().encode(), digest_size=16).hexdigest()

    @property
    def definition(self) -> str:
        """Its ``tokenizer.json``, with the tokens that were added."""
        return str(self._tokenizer.to_str())

    @property
    def settings(self) -> dict[str, Any]:
        """Its ``tokenizer_config.json``, with the roles of the tokens that were added."""
        return {**self._settings, **self._special_tokens}

    @property
    def end_of_document_id(self) -> int | None:
        return self._id_of(self._settings.get("eos_token"))

    def special_token_id(self, role: str) -> int | None:
        """The id of the token in a role such as ``eos_token``, if there is one."""
        return self._id_of(self.settings.get(role))

    def _id_of(self, token: Any) -> int | None:
        text = _token_text(token)
        found = self._tokenizer.token_to_id(text) if text is not None else None
        return None if found is None else int(found)

    def tokenize(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def tokenize_batch(self, texts: list[str]) -> list[list[int]]:
        return [list(e.ids) for e in self._tokenizer.encode_batch(texts, add_special_tokens=False)]

    def decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))

    def get_token_id(self, token: str) -> int:
        found = self._tokenizer.token_to_id(token)
        if found is None:
            specials = [t.content for t in self._tokenizer.get_added_tokens_decoder().values()]
            hint = did_you_mean(token, specials, "special tokens")
            raise DataError(f"the tokenizer has no token {token!r}; {hint}")
        return int(found)


class PreTrainedSPTokenizer(TokenizerWrapper):
    """A SentencePiece tokenizer.

    Args:
        tokenizer_model_file: The ``.model`` file.

    Raises:
        DataError: The file is no model, or the package sentencepiece is not installed.
    """

    def __init__(self, tokenizer_model_file: str) -> None:
        try:
            import sentencepiece
        except ImportError:
            raise DataError(
                "tokenizer pretrained_sp_tokenizer needs the package sentencepiece: pip install 'modalities[sentencepiece]'"
            ) from None
        self._file = Path(tokenizer_model_file)
        if not self._file.is_file():
            raise DataError(f"no SentencePiece model at {self._file}")
        try:
            self._tokenizer: Any = sentencepiece.SentencePieceProcessor(model_file=str(self._file))
        except RuntimeError as error:
            raise DataError(f"{self._file} is no SentencePiece model: {error}") from error

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.vocab_size())

    @property
    def fingerprint(self) -> str:
        return hashlib.blake2b(self._file.read_bytes(), digest_size=16).hexdigest()

    @property
    def end_of_document_id(self) -> int | None:
        found = int(self._tokenizer.eos_id())
        return None if found < 0 else found

    def tokenize(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text))

    def decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids))

    def get_token_id(self, token: str) -> int:
        found = int(self._tokenizer.piece_to_id(token))
        if self._tokenizer.id_to_piece(found) != token:
            raise DataError(f"{self._file} has no token {token!r}")
        return found


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{file} holds no JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _as_list(tokens: str | list[str] | tuple[str, ...]) -> list[str]:
    return [tokens] if isinstance(tokens, str) else list(tokens)


def _token_text(token: Any) -> str | None:
    """A token as tokenizer configs write it: its text, or a mapping with the text as ``content``."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
