"""A microbatch's papers: no field can be changed, no hop can be taken for another."""

import hashlib
from collections.abc import Callable
from dataclasses import fields, replace

import pytest

from swarm.bulk_digest import bulk_digest
from swarm.core.canonical import Value, pack, unpack
from swarm.core.errors import RemoteError
from swarm.core.ids import MicrobatchId, PeerId, StageIndex, Step, Version
from swarm.identity.key import Identity
from verification.pipeline.headers import BirthRecord, HopHeader, check_birth, check_hop

SOURCE, SENDER, CONSUMER = (Identity.from_seed(bytes([number]) * 32) for number in (1, 2, 3))
RUN_ID = "ab" * 32
BODY = b"activation bytes"

BIRTH = BirthRecord(
    run_id=RUN_ID,
    source=SOURCE.peer_id,
    kind="train",
    microbatch_id=MicrobatchId(300_001),
    attempt=30,
    step=Step(3),
    shape=(4, 128),
    num_targets=500,
    tokens_digest=hashlib.sha256(b"tokens").digest(),
    targets_digest=hashlib.sha256(b"targets").digest(),
    prefix_length=2,
    document_bounds=(5, 17),
).signed_by(SOURCE)
HOP = HopHeader(
    run_id=RUN_ID,
    stage=StageIndex(1),
    version=Version(2),
    microbatch_id=MicrobatchId(300_001),
    attempt=30,
    direction="forward",
    producer=SENDER.peer_id,
    consumer=CONSUMER.peer_id,
    parents=(BIRTH.digest(), hashlib.sha256(b"upstream").digest()),
    shape=(4, 128, 64),
    dtype="fp32",
    codec="int8",
    numeric_class="torch-2.13/cpu/fp32",
    body_digest=bulk_digest(BODY),
).signed_by(SENDER)

OTHERS: dict[str, list[object]] = {
    "run_id": ["cd" * 32],
    "source": [SENDER.peer_id],
    "kind": ["evaluate", "generate"],
    "microbatch_id": [MicrobatchId(300_002), MicrobatchId(0)],
    "attempt": [29, 0],
    "step": [Step(4)],
    "shape": [(128, 4), (4, 127), (4, 128, 65), (2, 256)],
    "num_targets": [499, 0],
    "tokens_digest": [bytes(32)],
    "targets_digest": [bytes(32)],
    "prefix_length": [0],
    "document_bounds": [(), (5, 18)],
    "era": [1],
    "signature": [bytes(64)],
    "stage": [StageIndex(0), StageIndex(2)],
    "version": [Version(3)],
    "direction": ["gradient"],
    "producer": [SOURCE.peer_id],
    "consumer": [SOURCE.peer_id],
    "parents": [
        (),
        (BIRTH.digest(),),
        (hashlib.sha256(b"upstream").digest(), BIRTH.digest()),
        (BIRTH.digest(), hashlib.sha256(b"upstream").digest(), BIRTH.digest()),
    ],
    "dtype": ["bf16"],
    "codec": ["fp32"],
    "numeric_class": ["torch-2.13/cuda/fp32"],
    "body_digest": [bytes(32)],
}


def _check(header: HopHeader, *, birth: BirthRecord = BIRTH, body: bytes = BODY, **expected: object) -> None:
    wanted: dict[str, object] = {
        "sender": SENDER.peer_id,
        "consumer": CONSUMER.peer_id,
        "stage": StageIndex(1),
        "direction": "forward",
        "shape": (4, 128, 64),
        "codec": "int8",
        "parents": (BIRTH.digest(), None),
        "delay": 1,
        **expected,
    }
    check_hop(header, birth, body, **wanted)  # type: ignore[arg-type]


def test_good_papers_pass() -> None:
    check_birth(BIRTH, run_id=RUN_ID)
    _check(HOP)
    for view in (bytearray(BODY), memoryview(BODY)):
        _check(HOP, body=view)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [field.name for field in fields(BirthRecord)])
def test_no_field_of_a_birth_record_can_be_changed(name: str) -> None:
    for other in OTHERS[name]:
        with pytest.raises(RemoteError) as caught:
            check_birth(replace(BIRTH, **{name: other}), run_id=RUN_ID)
        assert caught.value.kind == ("protocol" if name == "run_id" else "signature")


@pytest.mark.parametrize("name", [field.name for field in fields(HopHeader)])
def test_no_field_of_a_hop_header_can_be_changed(name: str) -> None:
    for other in OTHERS[name]:
        with pytest.raises(RemoteError) as caught:
            _check(replace(HOP, **{name: other}))
        assert caught.value.peer_id == SENDER.peer_id
        assert caught.value.kind in {"protocol", "digest", "signature"}


@pytest.mark.parametrize(
    "name", ["run_id", "stage", "microbatch_id", "attempt", "direction", "consumer", "shape", "codec", "body_digest"]
)
def test_a_header_for_another_hop_is_refused_though_it_is_signed(name: str) -> None:
    for other in OTHERS[name]:
        with pytest.raises(RemoteError) as caught:
            _check(replace(HOP, **{name: other}).signed_by(SENDER))
        assert caught.value.kind == ("digest" if name == "body_digest" else "protocol")


def test_a_version_that_the_step_cannot_have_is_refused_though_it_is_signed() -> None:
    for version, delay in ((1, 1), (4, 1), (2, 0), (1 << 40, 1)):
        with pytest.raises(RemoteError) as caught:
            _check(replace(HOP, version=Version(version)).signed_by(SENDER), delay=delay)
        assert caught.value.kind == "protocol"


def test_a_header_of_another_sender_is_refused() -> None:
    with pytest.raises(RemoteError) as caught:
        _check(HOP, sender=SOURCE.peer_id)
    assert caught.value.kind == "protocol"
    with pytest.raises(RemoteError) as caught:
        _check(HOP.signed_by(SOURCE))
    assert caught.value.kind == "signature"


def test_other_bytes_and_other_parents_are_refused() -> None:
    with pytest.raises(RemoteError) as caught:
        _check(HOP, body=BODY + b"\0")
    assert caught.value.kind == "digest"
    with pytest.raises(RemoteError) as caught:
        _check(HOP, parents=(bytes(32), None))
    assert caught.value.kind == "protocol"


def test_a_birth_record_of_another_run_is_refused() -> None:
    with pytest.raises(RemoteError) as caught:
        check_birth(BIRTH, run_id="cd" * 32)
    assert caught.value.kind == "protocol"
    assert caught.value.peer_id == SOURCE.peer_id


@pytest.mark.parametrize("record", [BIRTH, HOP])
def test_what_is_written_is_read(record: BirthRecord | HopHeader) -> None:
    again = type(record).from_value(unpack(pack(record.to_value()), max_bytes=1 << 16))
    assert again == record
    assert again.digest() == record.digest()


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value.update(kind="guess"),
        lambda value: value.update(shape=[4]),
        lambda value: value.update(shape=[4, 128, 1]),
        lambda value: value.update(shape=[4, -128]),
        lambda value: value.update(num_targets=513),
        lambda value: value.update(shape=[0, 128], num_targets=0, document_bounds=[]),
        lambda value: value.update(shape=[1 << 62, 0], num_targets=0, prefix_length=0, document_bounds=[]),
        lambda value: value.update(shape=[1 << 20, 1 << 20]),
        lambda value: value.update(prefix_length=129),
        lambda value: value.update(document_bounds=[128]),
        lambda value: value.update(document_bounds=[512]),
        lambda value: value.update(document_bounds=[17, 5]),
        lambda value: value.update(tokens_digest=bytes(31)),
        lambda value: value.update(more=1),
        lambda value: value.pop("step"),
    ],
)
def test_malformed_birth_records_are_refused(change: Callable[[dict[str, Value]], object]) -> None:
    value = BIRTH.signed_value()
    assert isinstance(value, dict)
    change(value)
    with pytest.raises(RemoteError) as caught:
        BirthRecord.from_value({"value": value, "signature": bytes(64)})
    assert caught.value.kind == "malformed"


@pytest.mark.parametrize(
    "change",
    [
        {"direction": "sideways"},
        {"parents": [bytes(32)] * 3},
        {"parents": [bytes(31)]},
        {"shape": [1, 2, 3, 4]},
        {"dtype": "x" * 17},
        {"producer": "p" * 65},
        {"body_digest": b""},
        {"more": 1},
    ],
)
def test_malformed_hop_headers_are_refused(change: dict[str, Value]) -> None:
    value = HOP.signed_value()
    assert isinstance(value, dict)
    with pytest.raises(RemoteError) as caught:
        HopHeader.from_value({"value": {**value, **change}, "signature": bytes(64)})
    assert caught.value.kind == "malformed"


def test_an_unknown_peer_id_is_simply_not_the_signer() -> None:
    with pytest.raises(RemoteError) as caught:
        check_birth(replace(BIRTH, source=PeerId("nobody")), run_id=RUN_ID)
    assert caught.value.kind == "signature"


def test_the_bytes_that_are_signed_never_change() -> None:
    """Computed once from the first release of the format. A change here is a change of the protocol's number."""
    assert BIRTH.digest().hex() == "d284ca347c29e7ed14f6ea8f05d456d651618fde2109c3ea043265fd087ff280"
    assert HOP.digest().hex() == "cdf361d2f073c5758e4cabf6f1fa85de5668cdeefbdf1b10faf80bf478f27723"
    assert BIRTH.signature.hex() == (
        "164785455dd492adeab9bb6cf02460c472059e8a3eab14d07777ce9da3ed3ed0"
        "9994736cb2ab70558c8e18c97abcfa8cdafdbd2eaa29ef0613fd6721a744c801"
    )
