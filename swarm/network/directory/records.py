"""Directory records, made and checked: facts a peer states about itself, signed and expiring.

The signature covers topic, fields, peer id and expiry, so a record can be moved to no other topic, peer or time by
those who store it. A record proves who said it and nothing more: it is a hint.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from swarm.core.canonical import Value, pack, signed_bytes, unpack
from swarm.core.errors import LocalError, RemoteError
from swarm.core.ids import PeerId
from swarm.identity.key import Identity, verify
from swarm.network.addresses import is_dialled, is_numeric

MAX_RECORD_BYTES = 4096
MAX_TOPIC_CHARACTERS = 200
MAX_TTL_S = 300.0
"""No record may live longer than this: what a dead peer said is forgotten."""
CLOCK_SKEW_S = 3.0
"""Difference between two peers' clocks that is forgiven."""
MAX_ADDRESSES = 8
"""Of a peer, that are dialled."""
REMEMBERED_RECORDS = 1024
"""A record is looked up many times while it lives: so many of the last ones are not verified again."""

_DOMAIN = "directory-record"


@dataclass(frozen=True)
class Record:
    topic: str
    fields: dict[str, Value]
    peer_id: PeerId
    expires: float
    """Seconds since the epoch, by the clock of the peer that signed."""


def sign_record(
    identity: Identity, topic: str, fields: Mapping[str, Value], *, ttl_s: float, now: float
) -> tuple[Record, bytes]:
    """A record of this peer and its bytes. Raises LocalError when it is over a limit."""
    if not 0 < ttl_s <= MAX_TTL_S:
        raise LocalError(f"a record may live 0 to {MAX_TTL_S:g} s, not {ttl_s:g}")
    if len(topic) > MAX_TOPIC_CHARACTERS:
        raise LocalError(f"a topic of {len(topic)} characters is over the limit of {MAX_TOPIC_CHARACTERS}")
    record = Record(topic, dict(fields), identity.peer_id, now + ttl_s)
    data = pack({**_statement(record), "signature": identity.sign(signed_bytes(_DOMAIN, _statement(record)))})
    if len(data) > MAX_RECORD_BYTES:
        raise LocalError(f"the record under {topic!r} has {len(data)} bytes, over the limit of {MAX_RECORD_BYTES}")
    return record, data


def open_record(data: bytes, *, now: float, slack_s: float = 0.0) -> Record:
    """The record in a stranger's bytes, if it is signed by the peer it names and live; not to be changed.

    `slack_s` forgives that long after the expiry. Raises RemoteError otherwise.
    """
    record = _signed_record(bytes(data))
    if not is_live(record, now=now, slack_s=slack_s):
        raise RemoteError("expired", f"a directory record that expires {record.expires - now:+.1f} s from now")
    return record


def is_live(record: Record, *, now: float, slack_s: float = 0.0) -> bool:
    """Written so that a NaN fails too."""
    return now - slack_s < record.expires <= now + MAX_TTL_S + CLOCK_SKEW_S


@lru_cache(maxsize=REMEMBERED_RECORDS)
def _signed_record(data: bytes) -> Record:
    value = unpack(data, max_bytes=MAX_RECORD_BYTES)
    match value:
        case {
            "topic": str(topic),
            "fields": dict(fields),
            "peer_id": str(peer_id),
            "expires": float(expires),
            "signature": bytes(signature),
            **rest,
        } if not rest:
            record = Record(topic, fields, PeerId(peer_id), expires)
        case _:
            raise RemoteError("malformed", "a directory record without its fields")
    if len(topic) > MAX_TOPIC_CHARACTERS:
        raise RemoteError("malformed", f"a topic of {len(topic)} characters")
    if not verify(record.peer_id, signed_bytes(_DOMAIN, _statement(record)), signature):
        raise RemoteError("signature", f"a directory record that {peer_id[:60]!r} did not sign")
    return record


def newest_of(answers: Iterable[bytes], topic: str, *, now: float) -> tuple[dict[PeerId, tuple[Record, bytes]], int]:
    """Each peer's live record under `topic` that lives longest, with its bytes, in order; and how many were refused."""
    newest: dict[PeerId, tuple[Record, bytes]] = {}
    refused = 0
    for data in answers:
        try:
            record = open_record(data, now=now)
        except RemoteError:
            refused += 1
            continue
        known = newest.get(record.peer_id)
        if record.topic != topic:
            refused += 1
        elif known is None or known[0].expires < record.expires:
            newest[record.peer_id] = record, data
    return {peer_id: newest[peer_id] for peer_id in sorted(newest)}, refused


def addresses_in(fields: Mapping[str, Value], *, named: bool = False) -> list[str]:
    """Where a record says that its peer is: a few TCP multiaddresses; none if it says nothing that could be addresses.

    By number, unless `named`: a name may stand for a hundred others' numbers, and for others each time.
    """
    found = fields.get("addresses")
    texts = [item for item in found if isinstance(item, str)] if isinstance(found, list) else []
    return [text for text in texts if is_dialled(text) and (named or is_numeric(text))][:MAX_ADDRESSES]


def _statement(record: Record) -> dict[str, Value]:
    return {
        "topic": record.topic,
        "fields": record.fields,
        "peer_id": record.peer_id,
        "expires": record.expires,
    }
