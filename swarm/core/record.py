"""Records: what goes over the wire as one value, declared by the annotated fields of a frozen dataclass.

Reader and writer follow from the fields (`swarm.core.layout`): every one must have been sent, and no other.
"""

import re
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Protocol, Self

from swarm.core.canonical import Packed, Value, signed_bytes
from swarm.core.forms import SIGNATURE, Wire, Writer, as_map, lacks
from swarm.core.kept import once
from swarm.core.layout import Beside, layout_of


class _Declared(Wire):
    """What its fields say. In errors it is called what its class is, unless the class gives another `kind`."""

    KIND: ClassVar[str]

    def __init_subclass__(cls, kind: str = "", **others: Any) -> None:
        super().__init_subclass__(**others)
        cls.KIND = kind or re.sub(r"(?<!^)(?=[A-Z])", " ", cls.__name__).lower()

    @classmethod
    def _made(cls, *items: Any, **fields: Any) -> Self:
        make: Callable[..., Self] = cls
        made = make(*items, **fields)
        made._check_fields()
        return made

    def _check_fields(self) -> None:
        """Raises RemoteError("malformed") if fields that are each in order contradict one another."""


class Record(_Declared):
    """On the wire a map."""

    def to_value(self) -> dict[str, Value]:
        return layout_of(type(self)).write(self)

    @classmethod
    def from_value(cls, value: Value) -> Self:
        """Raises RemoteError("malformed")."""
        return cls._made(**layout_of(cls).read(as_map(cls.KIND, value)))


class Row(_Declared):
    """On the wire a list: its fields in order, without their names."""

    def to_value(self) -> Value:
        return self.writer(shallow=False)(self)

    @classmethod
    def writer(cls, *, shallow: bool) -> Writer:
        return layout_of(cls).row_writer(shallow=shallow)

    @classmethod
    def from_value(cls, value: Value) -> Self:
        """Raises RemoteError("malformed")."""
        return cls._made(*layout_of(cls).read_row(value))


class PackedOnce(Record):
    """A large record that goes into many messages and digests."""

    @once
    def packed(self) -> Packed:
        """Its value, packed once."""
        return Packed(self._shallow_map())

    @classmethod
    def writer(cls, *, shallow: bool) -> Writer:
        return attrgetter("packed") if shallow else cls.to_value

    def _shallow_map(self) -> dict[str, Value]:
        return layout_of(type(self)).write(self, shallow=True)


class Signer(Protocol):
    """Whose signature a record may have."""

    def sign(self, data: bytes) -> bytes: ...


@dataclass(frozen=True)
class Signed(Record):
    """A record with its signature among its fields; it covers the domain and a canonical value."""

    DOMAIN: ClassVar[str]
    signature: Annotated[bytes, SIGNATURE, Beside()] = field(default=b"", kw_only=True)

    @abstractmethod
    def signed_value(self) -> Value: ...

    def signed_bytes(self) -> bytes:
        return signed_bytes(self.DOMAIN, self.signed_value())

    def signed_by(self, key: Signer) -> Self:
        return replace(self, signature=key.sign(self.signed_bytes()))


@dataclass(frozen=True)
class SignedValue(Signed):
    """On the wire {value, signature}, and what else stands beside: the value is what is signed."""

    def signed_value(self) -> dict[str, Value]:
        return layout_of(type(self), "signed").write(self)

    def shallow_value(self) -> Value:
        """What is signed, to be packed at once."""
        return layout_of(type(self), "signed").write(self, shallow=True)

    def signed_bytes(self) -> bytes:
        return signed_bytes(self.DOMAIN, self.shallow_value())

    def to_value(self) -> dict[str, Value]:
        return {"value": self.signed_value(), **layout_of(type(self), "beside").write(self)}

    @classmethod
    def from_value(cls, value: Value) -> Self:
        """Raises RemoteError("malformed")."""
        outer = dict(as_map(cls.KIND, value))
        if "value" not in outer:
            raise lacks(cls.KIND, "value")
        read = layout_of(cls, "signed").read(as_map(cls.KIND, outer.pop("value")))
        return cls._made(**read, **layout_of(cls, "beside").read(outer))


@dataclass(frozen=True)
class SignedOnce(SignedValue, PackedOnce):
    """A large one: what is signed is packed once too."""

    def shallow_value(self) -> Value:
        return self.packed_value

    @once
    def packed_value(self) -> Packed:
        """What is signed, packed once."""
        return Packed(super().shallow_value())

    def _shallow_map(self) -> dict[str, Value]:
        return {"value": self.packed_value, **layout_of(type(self), "beside").write(self, shallow=True)}
