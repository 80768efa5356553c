"""Tensors in a file of the safetensors format, written from wherever they lie and read where the file lies.

Nothing of them is held in memory: what is written passes through, what is read is mapped.
(https://huggingface.co/docs/safetensors: the header's length, the header, which is JSON, the tensors' bytes.)
"""

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swarm.disk.mapped_file import mapped

_DTYPES = {"F64": "<f8", "F32": "<f4", "I8": "|i1", "U8": "|u1"}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
_METADATA = "__metadata__"
_ALIGNMENT_BYTES = 8
MOST_HEADER_BYTES = 64 << 20


def write_tensors(path: Path, tensors: Iterable[tuple[str, NDArray[Any]]], metadata: Mapping[str, str]) -> None:
    """One after another in the order given, which is that of the file. Raises OSError."""
    header, arrays, end = dict[str, Any]({_METADATA: dict(metadata)}), list[NDArray[Any]](), 0
    for name, array in tensors:
        start, end = end, end + array.nbytes
        header[name] = {"dtype": _NAMES[array.dtype], "shape": list(array.shape), "data_offsets": [start, end]}
        arrays.append(array)
    said = json.dumps(header, separators=(",", ":")).encode()
    said += b" " * (-len(said) % _ALIGNMENT_BYTES)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(said)) + said)
        for array in arrays:
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


class TensorFile:
    """A file of tensors, mapped. Raises OSError, or ValueError or KeyError for one that is damaged."""

    def __init__(self, path: Path) -> None:
        whole = mapped(path)
        (length,) = struct.unpack_from("<Q", whole) if len(whole) >= struct.calcsize("<Q") else (len(whole),)
        self._start = struct.calcsize("<Q") + length
        if length > MOST_HEADER_BYTES or self._start > len(whole):
            raise ValueError(f"{path}: a header of {length} bytes in a file of {len(whole)}")
        header = json.loads(bytes(whole[struct.calcsize("<Q") : self._start]))
        self.metadata: dict[str, str] = dict(header.pop(_METADATA, {}))
        self._tensors: dict[str, Any] = header
        self._whole = whole

    @property
    def names(self) -> list[str]:
        """In the order of the file."""
        return list(self._tensors)

    def flat(self, names: Iterable[str]) -> NDArray[Any]:
        """These tensors as one vector, read-only: they must lie one behind another, and be of one type."""
        first, end, dtypes = None, 0, set[str]()
        for name in names:
            start, stop = self._tensors[name]["data_offsets"]
            if first is not None and start != end:
                raise ValueError(f"{name} does not follow what is before it")
            first, end = (start if first is None else first), stop
            dtypes.add(_DTYPES[self._tensors[name]["dtype"]])
        if first is None or len(dtypes) != 1 or not 0 <= first <= end <= len(self._whole) - self._start:
            raise ValueError(f"tensors of types {sorted(dtypes)} from byte {first} to {end}")
        (dtype,) = dtypes
        return np.frombuffer(self._whole[self._start + first : self._start + end], dtype=dtype)
