"""Text as token ids: UTF-8 bytes, or by a tokenizer.json of Hugging Face's `tokenizers`."""

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from swarm.core.errors import SettingsError

log = logging.getLogger(__name__)

BYTES = "bytes"
COMPARED_CHARACTERS = 1 << 16
"""Of the first texts, encoded both ways: only equal ids are trusted."""


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

    @property
    def end_of_document(self) -> int | None:
        """The id that closes each document; None where there is none."""

    def encode_documents(self, texts: Sequence[str]) -> list[npt.NDArray[np.integer]]:
        """Ids of each document, closed by the end-of-document id where the tokenizer has one."""


class ByteTokenizer:
    """An id is a byte of UTF-8. Byte 0 ends a document: no text file holds it (see `swarm.data.corpus`)."""

    name = BYTES
    identity = BYTES
    vocab_size = 256
    end_of_document: int | None = 0

    def encode_documents(self, texts: Sequence[str]) -> list[npt.NDArray[np.integer]]:
        return [np.frombuffer(text.encode() + b"\0", dtype=np.uint8) for text in texts]


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

        from swarm.data.cutting import CutTexts, can_cut  # with its kernels: who reads a manifest needs none

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
        self.end_of_document = self._end_id(file.parent)
        self._cut = CutTexts(self._tokenizer) if can_cut(json.loads(file.read_bytes())) else None
        self._left_to_compare = COMPARED_CHARACTERS

    def encode_documents(self, texts: Sequence[str]) -> list[npt.NDArray[np.integer]]:
        if self._cut is None:
            found = self._whole(texts)
        else:
            by_cuttings = self._cut.encode(texts)
            rest = [at for at, ids in enumerate(by_cuttings) if ids is None]
            whole = dict(zip(rest, self._whole([texts[at] for at in rest]), strict=True))
            found = [whole[at] if ids is None else ids for at, ids in enumerate(by_cuttings)]
            if self._left_to_compare > 0 and not self._is_the_same(texts, found):
                log.warning("%s gives other ids for cut texts: it encodes them whole, which is slower", self.name)
                self._cut = None
                return self.encode_documents(texts)
        if self.end_of_document is None:
            return found
        return [np.append(ids, self.end_of_document) for ids in found]

    def _whole(self, texts: Sequence[str]) -> list[npt.NDArray[np.integer]]:
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False) if texts else []
        return [np.array(one.ids, dtype=np.int32) for one in encoded]

    def _is_the_same(self, texts: Sequence[str], found: Sequence[npt.NDArray[np.integer]]) -> bool:
        """Compares as many of the first texts as are still to be compared."""
        count = 0
        while count < len(texts) and self._left_to_compare > 0:
            self._left_to_compare -= len(texts[count])
            count += 1
        return all(map(np.array_equal, self._whole(texts[:count]), found[:count]))

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
