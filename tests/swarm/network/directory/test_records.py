"""Directory records that were forged, moved or kept too long are refused."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.core.canonical import Value, pack, signed_bytes, unpack
from swarm.core.errors import LocalError, RemoteError
from swarm.identity.key import Identity
from swarm.network.directory.records import (
    CLOCK_SKEW_S,
    MAX_ADDRESSES,
    MAX_RECORD_BYTES,
    MAX_TTL_S,
    addresses_in,
    open_record,
    sign_record,
)

NOW = 1_700_000_000.0
ALICE, BOB = Identity.from_seed(bytes(32)), Identity.from_seed(bytes([1]) * 32)

GOLDEN = "85a765787069726573cb41d954fc43c00000a66669656c647381a172cb4004000000000000a7706565725f6964d934"


def data_of(**changes: Value) -> bytes:
    """Bytes of a record of Alice's with some of its values replaced after signing."""
    _, data = sign_record(ALICE, "run/stage-1", {"rate": 2.5}, ttl_s=15.0, now=NOW)
    value = unpack(data, max_bytes=MAX_RECORD_BYTES)
    assert isinstance(value, dict)
    return pack({**value, **changes})


def signed_by(identity: Identity, **statement: Value) -> bytes:
    """Bytes of a well signed record with any statement."""
    full: dict[str, Value] = {
        "topic": "t",
        "fields": {},
        "peer_id": identity.peer_id,
        "expires": NOW + 10,
        **statement,
    }
    return pack({**full, "signature": identity.sign(signed_bytes("directory-record", full))})


def test_record_goes_there_and_back_and_is_golden() -> None:
    record, data = sign_record(ALICE, "t", {"r": 2.5}, ttl_s=15.0, now=NOW)
    assert open_record(data, now=NOW) == record
    assert (record.topic, record.fields, record.peer_id, record.expires) == ("t", {"r": 2.5}, ALICE.peer_id, NOW + 15)
    assert data.hex().startswith(GOLDEN)
    assert sign_record(ALICE, "t", {"r": 2.5}, ttl_s=15.0, now=NOW)[1] == data


@pytest.mark.parametrize(
    "data",
    [
        data_of(topic="run/stage-2"),
        data_of(fields={"rate": 9.5}),
        data_of(peer_id=BOB.peer_id),
        data_of(expires=NOW + 16),
        data_of(signature=bytes(64)),
        data_of(signature=b""),
        signed_by(ALICE, peer_id=BOB.peer_id),
        signed_by(ALICE, peer_id="nobody"),
    ],
)
def test_record_changed_after_signing_is_refused(data: bytes) -> None:
    with pytest.raises(RemoteError) as info:
        open_record(data, now=NOW)
    assert info.value.kind == "signature"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80",
        pack([1, 2]),
        data_of(extra=1),
        data_of(topic=1),
        data_of(fields=[]),
        data_of(expires=int(NOW)),
        data_of(signature="text"),
        signed_by(ALICE, topic="t" * 201),
        signed_by(ALICE, fields={"big": bytes(MAX_RECORD_BYTES)}),
        data_of() + b"\0",
    ],
)
def test_malformed_record_is_refused(data: bytes) -> None:
    with pytest.raises(RemoteError) as info:
        open_record(data, now=NOW)
    assert info.value.kind == "malformed"


@pytest.mark.parametrize("expires", [NOW, NOW - 1, -math.inf, math.inf, math.nan, NOW + MAX_TTL_S + CLOCK_SKEW_S + 1])
def test_record_that_expired_or_never_will_is_refused(expires: float) -> None:
    with pytest.raises(RemoteError) as info:
        open_record(signed_by(ALICE, expires=expires), now=NOW)
    assert info.value.kind == "expired"


def test_record_is_live_until_its_expiry_and_forgiven_for_the_slack() -> None:
    data = data_of()
    assert open_record(data, now=NOW + 14.9).fields == {"rate": 2.5}
    with pytest.raises(RemoteError):
        open_record(data, now=NOW + 15)
    assert open_record(data, now=NOW + 16, slack_s=3).fields == {"rate": 2.5}
    with pytest.raises(RemoteError):
        open_record(data, now=NOW + 18, slack_s=3)


@pytest.mark.parametrize(
    "sign",
    [
        lambda: sign_record(ALICE, "t", {}, ttl_s=MAX_TTL_S + 1, now=NOW),
        lambda: sign_record(ALICE, "t", {}, ttl_s=0, now=NOW),
        lambda: sign_record(ALICE, "t" * 201, {}, ttl_s=1, now=NOW),
        lambda: sign_record(ALICE, "t", {"big": bytes(MAX_RECORD_BYTES)}, ttl_s=1, now=NOW),
    ],
)
def test_record_over_a_limit_is_not_signed(sign: Callable[[], object]) -> None:
    with pytest.raises(LocalError):
        sign()


@given(st.binary(max_size=300))
def test_any_bytes_are_refused_as_a_remote_fault(data: bytes) -> None:
    with pytest.raises(RemoteError):
        open_record(data, now=NOW)


@given(st.integers(0, len(data_of()) * 8 - 1))
def test_any_flipped_bit_is_refused(position: int) -> None:
    data = bytearray(data_of())
    data[position // 8] ^= 1 << position % 8
    with pytest.raises(RemoteError):
        open_record(bytes(data), now=NOW)


def test_what_is_dialled_on_a_strangers_word_is_a_few_machines_by_their_numbers() -> None:
    """A name, or what libp2p looks up as a list (dnsaddr), stands for a hundred addresses of others."""
    peer, relay = ALICE.peer_id, BOB.peer_id
    good = [f"/ip4/5.0.0.{number}/tcp/4001/p2p/{peer}" for number in range(MAX_ADDRESSES + 1)]
    circuit = f"/ip6/2a00::1/tcp/4002/p2p/{relay}/p2p-circuit/p2p/{peer}"
    named = f"/dns4/seed.example/tcp/4001/p2p/{peer}"
    bad = [
        *("/dnsaddr/victims.example/tcp/1", "/ip4/224.0.0.1/tcp/1", "/ip4/255.255.255.255/tcp/1", "/ip6/::/tcp/1"),
        *("/ip4/5.0.0.1/tcp/70000", "/ip4/5.0.0.1/tcp/1/ip4/5.0.0.2/tcp/1", "/unix/x/tcp/1", "/ip6/5.0.0.1/tcp/1"),
        *("/ip6zone/eth0/ip6/fe80::1/tcp/1", "/ip4/5.0.0.1/udp/1/quic", "/ip4/5.0.0.999/tcp/1", "no address"),
    ]
    assert addresses_in({"addresses": [named, *bad, circuit, *good]}) == [circuit, *good[: MAX_ADDRESSES - 1]]
    assert addresses_in({"addresses": [named, *bad]}, named=True) == [named]
    assert addresses_in({"addresses": "/ip4/5.0.0.1/tcp/1"}) == []
