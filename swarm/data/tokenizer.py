"""Text as token ids: UTF-8 bytes, or by a tokenizer.json of Hugging Face's `tokenizers`."""

import hashlib
import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from swarm.core.errors import SettingsError

BYTES = "bytes"


class Tokenizer(Protocol):
    """Text to ids. Equal `identity` means equal ids for every text."""

    @property
    def name(self) -> str:
        """What the run's settings call it."""

    @property
    def identity(self) -> str: ...

    @property
    def vocab_size(self) -> int:
        """Every id is below this."""

    def encode_document(self, text: str) -> npt.NDArray[np.integer]:
        """Ids of a document, closed by the end-of-document id where the tokenizer has one."""


class ByteTokenizer:
    """An id is a byte of UTF-8. Byte 0 ends a document: no text file holds it (see `swarm.data.corpus`)."""

    name = BYTES
    identity = BYTES
    vocab_size = 256

    def encode_document(self, text: str) -> npt.NDArray[np.integer]:
        return np.frombuffer(text.encode() + b"\0", dtype=np.uint8)


class FileTokenizer:
    """A tokenizer.json, or a folder with one, as `save_pretrained` writes it."""

    def __init__(self, path: Path) -> None:
        """Raises SettingsError if there is no tokenizer there."""
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise SettingsError(
                f'data.tokenizer = "{path}" has no tokenizer.json; give "bytes", a tokenizer.json, or a folder '
                "written by save_pretrained() of a fast tokenizer"
            )
        import tokenizers

        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the Rust extension raises plain Exception
            raise SettingsError(
                f'data.tokenizer = "{path}" cannot be read ({error}); save the tokenizer again with save_pretrained()'
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.name = path.name if path.is_dir() else path.parent.name
        self.identity = hashlib.sha256(file.read_bytes()).hexdigest()
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids, default=-1) + 1
        self._end_of_document = self._end_id(file.parent)

    def encode_document(self, text: str) -> npt.NDArray[np.integer]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if self._end_of_document is not None:
            ids.append(self._end_of_document)
        return np.array(ids, dtype=np.int64)

    def _end_id(self, folder: Path) -> int | None:
        """Id of the folder's `eos_token`; None where tokenizer_config.json names none."""
        try:
            token = json.loads((folder / "tokenizer_config.json").read_text()).get("eos_token")
        except (OSError, ValueError, AttributeError):
            return None
        content = token.get("content") if isinstance(token, dict) else token
        found = self._tokenizer.token_to_id(content) if isinstance(content, str) else None
        return None if found is None else int(found)


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer called "bytes", or the one at this path. Raises SettingsError if there is none."""
    return ByteTokenizer() if name == BYTES else FileTokenizer(Path(name))
