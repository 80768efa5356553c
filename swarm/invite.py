"""A run's invite, written and read: the one line that a volunteer pastes.

    swarm://HOST:PORT/NAME#PAYLOAD

HOST:PORT is the host's gRPC service. PAYLOAD is base64url, without padding, of canonical MessagePack and the
first four bytes of a SHA-256 over the whole line: whoever mistypes a letter is told, and one run has one line.
"""

import base64
import binascii
import hashlib
import ipaddress
import re
from dataclasses import dataclass
from typing import Annotated

from swarm.core.canonical import Value, pack, unpack
from swarm.core.errors import RemoteError, SettingsError
from swarm.core.forms import Digest, Integer, Text
from swarm.core.ids import PeerId, RunId
from swarm.core.layout import AtMost
from swarm.core.record import Row
from swarm.identity.key import peer_id_bytes, peer_id_of
from swarm.manifest.signed_run import SignedRun

SCHEME = "swarm://"
FORMAT = 1
MAX_LINE = 2048
MAX_ADDRESSES = 8
MAX_ADDRESS = 128
MAX_VOUCHER = 64
CHECKSUM_BYTES = 4
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})*")
_ADDRESS = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/[0-9A-Za-z.:-]+/tcp/[0-9]{1,5}")
_PASTE_AGAIN = "paste the whole line again, as the host printed it"


@dataclass(frozen=True)
class _Payload(Row, kind="invite"):
    """What follows the run's name in a line."""

    format: int
    protocol: Annotated[int, Integer(low=1, high=1 << 16)]
    run_id: Digest
    run_key: Digest
    """The key's 32 bytes."""
    host_key: Digest
    certificate: Digest
    addresses: Annotated[tuple[Annotated[str, Text(MAX_ADDRESS)], ...], AtMost(MAX_ADDRESSES)]
    voucher: Annotated[str, Text(MAX_VOUCHER)]


@dataclass(frozen=True, kw_only=True)
class Invite:
    """What a stranger must know to join a run, and to tell it from any other."""

    host: str
    """Name or number of the machine where the host's gRPC service listens."""
    port: int
    name: str
    """What people call the run."""
    protocol: int
    """Number of the wire protocol (`swarm.release.PROTOCOL`)."""
    run_id: RunId
    run_key: PeerId
    certificate: bytes
    """SHA-256 of the service's TLS certificate."""
    host_key: PeerId
    """The host as a peer, and seed of the DHT."""
    addresses: tuple[str, ...]
    """Multiaddresses of the seed, each ending in /p2p/ and `host_key`."""
    voucher: str = ""
    """The secret that admits, where the run is not open."""

    def __post_init__(self) -> None:
        """Raises SettingsError that names the field."""
        _check_host(self.host)
        if not 1 <= self.port <= 65535:
            raise SettingsError(f"invite: port {self.port} is not from 1 to 65535; {_PASTE_AGAIN}")
        if not _NAME.fullmatch(self.name):
            raise SettingsError(f"invite: run name {self.name[:70]!r} is none; {_PASTE_AGAIN}")
        if not 0 < len(self.addresses) <= MAX_ADDRESSES:
            raise SettingsError(f"invite: {len(self.addresses)} addresses of the seed; 1 to {MAX_ADDRESSES} are needed")
        for address in self.addresses:
            plain = address.removesuffix(f"/p2p/{self.host_key}")
            if plain == address or len(plain) > MAX_ADDRESS or not _ADDRESS.fullmatch(plain):
                raise SettingsError(
                    f"invite: address {address[:MAX_ADDRESS]!r} is no /ip4/.../tcp/... multiaddress of {self.host_key}"
                )
        if len(self.voucher) > MAX_VOUCHER or not (self.voucher == "" or self.voucher.isalnum()):
            raise SettingsError(f"invite: voucher of {len(self.voucher)} characters is none; {_PASTE_AGAIN}")

    @property
    def target(self) -> str:
        """HOST:PORT of the gRPC service."""
        return f"{self.host}:{self.port}"

    def check_run(self, signed: SignedRun) -> None:
        """Raises RemoteError unless this is the run that the invite is to, under its run key."""
        if signed.run_key != self.run_key:
            raise RemoteError(
                "run_key", f"the run is signed by {signed.run_key}, the invite names {self.run_key} as its run key"
            )
        if signed.run_id != self.run_id:
            raise RemoteError(
                "run_id", f"the host serves run {signed.run_id[:12]}, the invite is to {self.run_id[:12]}"
            )

    def line(self) -> str:
        """The invite as one line."""
        head = f"{SCHEME}{self.target}/{self.name}"
        said = _Payload(
            format=FORMAT,
            protocol=self.protocol,
            run_id=bytes.fromhex(self.run_id),
            run_key=_key_bytes(self.run_key),
            host_key=_key_bytes(self.host_key),
            certificate=self.certificate,
            addresses=tuple(address.removesuffix(f"/p2p/{self.host_key}") for address in self.addresses),
            voucher=self.voucher,
        )
        payload = pack(said.to_value())
        line = f"{head}#{_encode(payload + _checksum(head, payload))}"
        if len(line) > MAX_LINE:
            raise SettingsError(
                f"invite: a line of {len(line)} characters; {MAX_LINE} are the most: give fewer addresses"
            )
        return line


def is_invite(text: str) -> bool:
    return text.strip().lower().startswith(SCHEME)


def parse_invite(text: str) -> Invite:
    """The invite in a line. Raises SettingsError that names the field and what is wrong with it."""
    line = text.strip()
    if len(line) > MAX_LINE:
        raise SettingsError(f"invite: a line of {len(line)} characters; the longest has {MAX_LINE}; {_PASTE_AGAIN}")
    if not line.startswith(SCHEME):
        raise SettingsError(f"invite: {line[:20]!r} does not begin with {SCHEME}; {_PASTE_AGAIN}")
    head, hash_sign, encoded = line.partition("#")
    if not hash_sign:
        raise SettingsError(f"invite: no '#' follows the run's name: its second half is missing; {_PASTE_AGAIN}")
    authority, slash, name = head.removeprefix(SCHEME).partition("/")
    host, colon, port = authority.rpartition(":")
    if not slash or not colon or not re.fullmatch(r"[1-9][0-9]{0,4}", port):
        raise SettingsError(f"invite: {authority[:80]!r} is no HOST:PORT followed by the run's name; {_PASTE_AGAIN}")
    data = _decode(encoded)
    payload, checksum = data[:-CHECKSUM_BYTES], data[-CHECKSUM_BYTES:]
    expected = _checksum(head, payload)
    if checksum != expected:
        raise SettingsError(
            f"invite: its checksum is {checksum.hex()}, what it says gives {expected.hex()}: a letter is wrong or "
            f"missing; {_PASTE_AGAIN}"
        )
    try:
        return _of_payload(host, int(port), name, unpack(payload, max_bytes=MAX_LINE))
    except RemoteError as error:
        raise SettingsError(f"invite: {error}; ask the host for another") from error


def _of_payload(host: str, port: int, name: str, value: Value) -> Invite:
    if not isinstance(value, list) or not value or value[0] != FORMAT:
        raise SettingsError(
            f"invite: it is not of format {FORMAT}, which this release reads; "
            "upgrade with `pip install --upgrade homeswarm`"
        )
    said = _Payload.from_value(value)
    host_key = peer_id_of(said.host_key)
    return Invite(
        host=host,
        port=port,
        name=name,
        protocol=said.protocol,
        run_id=RunId(said.run_id.hex()),
        run_key=peer_id_of(said.run_key),
        certificate=said.certificate,
        host_key=host_key,
        addresses=tuple(f"{address}/p2p/{host_key}" for address in said.addresses),
        voucher=said.voucher,
    )


def _check_host(host: str) -> None:
    if host.startswith("[") and host.endswith("]"):
        try:
            number = ipaddress.IPv6Address(host[1:-1])
        except ValueError as error:
            raise SettingsError(f"invite: host {host[:80]} is no IPv6 address: {error}") from error
        if str(number) == host[1:-1]:
            return
    elif len(host) <= 253 and _HOST_NAME.fullmatch(host):
        return
    raise SettingsError(f"invite: host {host[:80]!r} is neither a name nor a number of a machine; {_PASTE_AGAIN}")


def _key_bytes(peer_id: PeerId) -> bytes:
    return peer_id_bytes(peer_id)[-32:]


def _checksum(head: str, payload: bytes) -> bytes:
    return hashlib.sha256(b"homeswarm/invite\0" + head.encode() + b"\0" + payload).digest()[:CHECKSUM_BYTES]


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise SettingsError(f"invite: what follows '#' is not base64url ({error}); {_PASTE_AGAIN}") from error
    if _encode(data) != text or len(data) <= CHECKSUM_BYTES:
        raise SettingsError(f"invite: what follows '#' is cut short or not canonical; {_PASTE_AGAIN}")
    return data
