"""This is where a record that somebody signs has its common half: the bytes, the signature, the form on the wire.

On the wire it is `{value, signature}`. The signature covers the domain and the canonical value.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from swarm.core.canonical import Value, signed_bytes
from swarm.core.fields import Fields
from swarm.core.ids import PeerId
from swarm.identity import Identity, verify


@dataclass(frozen=True)
class SignedRecord(ABC):
    """What a record says is its subclass's own, and so is whose signature makes it count."""

    DOMAIN: ClassVar[str]
    signature: bytes = field(default=b"", kw_only=True)

    @abstractmethod
    def signed_value(self) -> Value: ...

    def signed_bytes(self) -> bytes:
        return signed_bytes(self.DOMAIN, self.signed_value())

    def signed_by(self, identity: Identity) -> Self:
        return replace(self, signature=identity.sign(self.signed_bytes()))

    def is_signed_by(self, peer_id: PeerId) -> bool:
        return verify(peer_id, self.signed_bytes(), self.signature)

    def to_value(self) -> Value:
        return {"value": self.signed_value(), "signature": self.signature}


def opened(kind: str, value: Value) -> tuple[Fields, Fields]:
    """Readers of a signed record, `kind` in errors, and of its value."""
    outer = Fields(kind, value)
    return outer, Fields(kind, outer.message("value"))
