"""A peer is its key: an Ed25519 key pair whose public half is the libp2p peer id itself.

A peer id is the base58 form of `00 24 08 01 12 20` and the 32 bytes of the public key (libp2p's "identity"
multihash), so whoever knows a peer id can check that peer's signatures without asking anybody.
Specification: https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md
"""

import hashlib
from functools import lru_cache

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from swarm.core.errors import SettingsError
from swarm.core.ids import PeerId

_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_BASE58_VALUES = {letter: value for value, letter in enumerate(_BASE58)}

_PEER_ID_PREFIX = bytes.fromhex("002408011220")
_PEER_ID_LETTERS = 52
_KEY_FILE_PREFIX = bytes.fromhex("08011240")
"""Protobuf PrivateKey {type: Ed25519, data: 64 bytes}; data is the seed, then the public key."""
_KEY_FILE_BYTES = 68

_MOST_REMEMBERED = 4096
_found_good: set[tuple[PeerId, bytes, bytes]] = set()
"""Who signed, the signature, and the digest of what it is over."""


class Identity:
    """A peer's own key pair. Signing takes 20 us."""

    def __init__(self, private_key: Ed25519PrivateKey) -> None:
        self._private_key = private_key
        self._public_bytes = private_key.public_key().public_bytes_raw()
        self.peer_id = peer_id_of(self._public_bytes)

    @classmethod
    def generate(cls) -> "Identity":
        """A new identity from the operating system's randomness."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> "Identity":
        """The identity of a 32-byte seed, the same on every machine."""
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @classmethod
    def from_key_file_bytes(cls, data: bytes) -> "Identity":
        """The identity in a p2pd key file. Raises SettingsError that tells a foreign key format by name."""
        if len(data) != _KEY_FILE_BYTES or not data.startswith(_KEY_FILE_PREFIX):
            raise SettingsError(_explain_format(data))
        identity = cls.from_seed(data[4:36])
        if data[36:] != identity._public_bytes:
            raise SettingsError("identity file: its public key does not belong to its private key; restore a backup")
        return identity

    def to_key_file_bytes(self) -> bytes:
        """The 68 bytes p2pd reads: `08 01 12 40`, seed, public key. Whoever has them is this peer."""
        return _KEY_FILE_PREFIX + self._private_key.private_bytes_raw() + self._public_bytes

    def sign(self, data: bytes) -> bytes:
        """Ed25519 signature (RFC 8032), 64 bytes. `data` begins with a domain tag (`core.canonical.signed_bytes`)."""
        signature = self._private_key.sign(data)
        _remember(_remembered(self.peer_id, data, signature))  # a voter is shown its own votes in each certificate
        return signature

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"  # never the key


def verify(peer_id: PeerId, data: bytes, signature: bytes) -> bool:
    """Whether `signature` is the peer's over `data`. Malformed ids and signatures are simply not the peer's.

    What was found good is remembered for a while: a round shows its votes and facts again with each of its phases.
    """
    public_key = _public_key(peer_id)
    if public_key is None:
        return False
    try:
        key = _remembered(peer_id, data, signature)
        if key in _found_good:
            return True
        public_key.verify(signature, data)
    except (InvalidSignature, ValueError, TypeError):
        return False
    _remember(key)
    return True


def _remembered(peer_id: PeerId, data: bytes, signature: bytes) -> tuple[PeerId, bytes, bytes]:
    return (peer_id, signature, hashlib.blake2b(data, digest_size=32).digest())


def _remember(key: tuple[PeerId, bytes, bytes]) -> None:
    if len(_found_good) >= _MOST_REMEMBERED:
        _found_good.clear()
    _found_good.add(key)


def is_peer_id(text: str) -> bool:
    """Whether `text` is a well-formed Ed25519 peer id, in its one canonical spelling."""
    return _public_key(PeerId(text)) is not None


def peer_id_of(public_bytes: bytes) -> PeerId:
    """Peer id of a 32-byte Ed25519 public key."""
    return PeerId(_base58_encode(_PEER_ID_PREFIX + public_bytes))


def peer_id_bytes(peer_id: PeerId) -> bytes:
    """The 38 bytes that libp2p puts on the wire for `peer_id`. Raises ValueError for a malformed id."""
    public_key = _public_key(peer_id)
    if public_key is None:
        raise ValueError(f"{peer_id!r} is not an Ed25519 peer id")
    return _PEER_ID_PREFIX + public_key.public_bytes_raw()


def peer_id_from_bytes(data: bytes) -> PeerId:
    """Inverse of `peer_id_bytes`. Raises ValueError for any other kind of peer id (RSA, secp256k1)."""
    if len(data) != len(_PEER_ID_PREFIX) + 32 or not data.startswith(_PEER_ID_PREFIX):
        raise ValueError(f"{data[:40].hex()} is not an Ed25519 peer id")
    return peer_id_of(data[len(_PEER_ID_PREFIX) :])


@lru_cache(maxsize=4096)
def _public_key(peer_id: PeerId) -> Ed25519PublicKey | None:
    """The key inside a peer id; None for anything but its one canonical spelling."""
    if not isinstance(peer_id, str) or len(peer_id) != _PEER_ID_LETTERS:
        return None
    number = 0
    for letter in peer_id:
        if letter not in _BASE58_VALUES:
            return None
        number = number * 58 + _BASE58_VALUES[letter]
    try:
        # The leading zero byte of the id is spelled by the leading "1" and is not part of the number.
        data = b"\0" + number.to_bytes(len(_PEER_ID_PREFIX) + 31, "big")
    except OverflowError:
        return None
    if not data.startswith(_PEER_ID_PREFIX) or _base58_encode(data) != peer_id:
        return None
    return Ed25519PublicKey.from_public_bytes(data[len(_PEER_ID_PREFIX) :])


def _base58_encode(data: bytes) -> str:
    number = int.from_bytes(data, "big")
    letters = []
    while number:
        number, value = divmod(number, 58)
        letters.append(_BASE58[value])
    num_leading_zeros = len(data) - len(data.lstrip(b"\0"))
    return _BASE58[0] * num_leading_zeros + "".join(reversed(letters))


def _explain_format(data: bytes) -> str:
    if data.startswith(b"-----BEGIN"):
        found = "a PEM key"
    elif data.startswith(bytes.fromhex("08011220")) and len(data) == 36:
        found = "a py-libp2p Ed25519 key (32 bytes, without the public key)"
    elif data.startswith(b"\x08\x00"):
        found = "an RSA key, as hivemind generates them"
    elif data.startswith(b"\x08\x02"):
        found = "a secp256k1 key"
    else:
        found = f"{len(data)} bytes of another format"
    return (
        f"identity file: holds {found}, but a p2pd Ed25519 key is needed "
        f"({_KEY_FILE_BYTES} bytes: 08 01 12 40, seed, public key); name another path to have one made"
    )
