"""Whatever a stranger sends: a reader refuses it in so many words or takes it as it is, soon, and keeps nothing of it.

Readers are found in the source, so that a new one is tried without being listed; it fails if no honest sample of it is
made here. `make soak` tries at least a million inputs and prints how fast, and what was kept of them.
"""

import ast
import asyncio
import gc
import hashlib
import importlib
import json
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from bootstrap.audit.charges import OpenCharge
from peer.round.mail.fragments import Fragment
from swarm.averaging.activations import activation_codec
from swarm.averaging.codecs import vector_codec
from swarm.checkpoint.record import ArchivedFile, CheckpointRecord, CheckpointScores, Score
from swarm.checkpoint.state import chunk_hash, merkle_root, state_chunks, state_from_chunks
from swarm.checkpoint.transfer import Offer, _read_offer
from swarm.core.audit.honest_audits import Agreed, AuditsMade, HonestAudits
from swarm.core.audit.ticket import Ticket
from swarm.core.canonical import pack, unpack
from swarm.core.directory.posting import Posting
from swarm.core.errors import KINDS, LocalError, RemoteError
from swarm.core.forms import Wire
from swarm.core.ids import MicrobatchId, PeerId, StageIndex, Step, Version
from swarm.core.pipeline.data_order import DataOrder
from swarm.core.pipeline.leases import LeaseTable
from swarm.core.record import Record, Row, SignedValue
from swarm.core.round.contribution import Charge, Departure, Exclusion, Lack, LeftOut, Rate, ReducedPart, Share
from swarm.core.round.voting import Proof, Reconfiguration
from swarm.core.round.words import Reduction, Word, Words
from swarm.core.state.stage_chain import Genesis
from swarm.data.pieces import PieceList
from swarm.host_protocol import AccusationPiece, Credited, RelayOffer, StepReport
from swarm.manifest.amendment import packed_changes
from swarm.manifest.signed_run import NOTHING_BEFORE, Amendment, Ending
from swarm.manifest.value import settings_from_value
from swarm.network.bulk import framing
from swarm.network.bulk.direct import DirectOffer
from swarm.network.directory.dial_back import DialBackRequest, DialledAt, DialledBack
from swarm.network.directory.records import open_record, sign_record
from swarm.network.punch.puncher import Asked, Port, Side
from swarm.network.punch.seen import Seen
from swarm.network.service import decode_error, decode_meta
from swarm.network.transport import MAX_META_BYTES, Message
from tests import ROOT
from tests.swarm.core.mutations import MAX_BYTES, spoilt, spoilt_bytes, spoilt_value
from tests.swarm.core.round.round_members import (
    asked_commit,
    asked_result,
    certified,
    facts_and_rounds,
    proof_by,
    result_of,
    roster_of,
)
from tests.swarm.core.round.round_world import run_key, witness_identities
from tests.verification.audit.test_evidence import World, guilty_cases, world  # noqa: F401  (a fixture)
from verification.audit.evidence import MAGIC, Evidence, EvidenceHead, head_end
from verification.audit.owed import OwedAudit
from verification.audit.probation import Agreement
from verification.audit.tolerance import Grade
from verification.audit.verdicts import Accusation, Ban, Debt, JurorVote, Pardon, Plea, Promotion, Quarantine
from verification.replay.evidence_file import SignedVerdict
from verification.replay.judge import judge

ROOMS = ("swarm", "verification", "peer", "bootstrap")
MOST_S = 1.0
"""Of this thread's CPU time that one input may take."""
COMPILED_S = 60.0
"""As long if a kernel is compiled for it."""
LONG_MODE_INPUTS = 1_000_000
MOST_KEPT_BYTES = 50 << 20
NOW = 1e9
SHAPE = (2, 5, 70)
VECTOR_VALUES = 5000


@dataclass(frozen=True)
class Reader:
    """One way in. `read` raises what is documented, or AssertionError for a message that it took for another."""

    name: str
    samples: tuple[bytes, ...]
    read: Callable[[bytes], None]
    refuses: tuple[type[Exception], ...] = (RemoteError,)
    spoil: Callable[[bytes, random.Random], bytes] = spoilt

    def attack(self, number: int, *, most_s: float = MOST_S) -> bool:
        """Whether input `number`, always the same, was taken."""
        rng = random.Random(f"{self.name}/{number}")
        data = self.spoil(rng.choice(self.samples), rng)
        began, taken = time.thread_time(), True
        try:
            self.read(data)
        except self.refuses:
            taken = False
        except Exception as error:
            error.add_note(f"{self.name}, input {number}, of {len(data)} bytes: {data[:200].hex()}")
            raise
        took_s = time.thread_time() - began
        assert took_s < most_s, f"{self.name}, input {number}, of {len(data)} bytes, took {took_s:.2f} s"
        return taken


# -- readers that are found -----------------------------------------------------------------------------------


def classes_with(method: str) -> list[type[Any]]:
    """Every class of the rooms that defines the method."""
    found: list[type[Any]] = []
    for path in sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        source = path.read_text()
        if f"def {method}(" not in source:
            continue
        names = [
            node.name
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.ClassDef)
            and any(isinstance(inside, ast.FunctionDef) and inside.name == method for inside in node.body)
        ]
        module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        found += [getattr(module, name) for name in names]
    return found


def records() -> list[type[Wire]]:
    """Every class of the rooms that is read from a value and says something; no bases of others."""
    found: dict[type[Wire], None] = {}
    for path in sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        source = path.read_text()
        if "record import " not in source and "(Wire)" not in source:
            continue
        module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        here = [one for one in vars(module).values() if isinstance(one, type) and one.__module__ == module.__name__]
        found |= dict.fromkeys(one for one in here if issubclass(one, Wire) and _says_something(one))
    return list(found)


def _says_something(kind: type[Wire]) -> bool:
    said = {field.name for field in fields(kind)} if is_dataclass(kind) else set()
    return not kind.__name__.startswith("_") and bool(said - {"signature"})


def value_reader(kind: type[Any], samples: tuple[bytes, ...]) -> Reader:
    """Of a class with `from_value`."""

    def read(data: bytes) -> None:
        value = unpack(data, max_bytes=MAX_META_BYTES)
        assert pack(value) == data
        again = pack(kind.from_value(value).to_value())
        assert again == data, f"{kind.__name__} was taken for another: {again[:200].hex()}"

    return Reader(kind.__name__, samples, read)


def parts_of(made: object) -> Iterator[object]:
    """All objects in an object's fields, and it."""
    if is_dataclass(made) and not isinstance(made, type):
        yield made
        for field in fields(made):
            yield from parts_of(getattr(made, field.name))
    elif isinstance(made, (tuple, list)):
        for item in made:
            yield from parts_of(item)


def honest(shown: World, evidence: list[Evidence]) -> list[object]:
    """Objects that hold every message with `from_value` between them."""
    facts, _ = facts_and_rounds(4)
    roster = roster_of(facts, joins=(run_key().peer_id,))
    roster = replace(roster, leaves=(Departure(facts.members[0], "gone"),), neighbours=facts.members[:2])
    result = certified(facts, result_of(facts, roster_of(facts)))
    proof = proof_by(facts, 1, bound=result.roster.certificate)
    changed = Reconfiguration(facts.stage, facts.step, facts.previous_name, 1, facts.voters, signature=bytes(64))
    chain = shown.rounds[1].chain
    order = DataOrder.of_run(shown.run.settings)
    leases = LeaseTable().advance(consumed=(), members=chain.members, order=order, ids_each=40)
    leases = leases.advance(
        consumed=[MicrobatchId(number) for number in (1, 2, 5, 9)], members=chain.members[:1], order=order, ids_each=40
    )
    host = witness_identities(1)[0].peer_id
    genesis = Genesis(
        chain.run_id,
        StageIndex(0),
        Version(3),
        bytes(32),
        chain.members,
        leases,
        host,
        run_key().peer_id,
        facts.members[:2],
        bytes(32),
        signature=bytes(64),
    )
    papers = shown.mismatch(shown.contribution, shown.parts).exhibits[0].papers
    charge = (chain.run_id, shown.accused, StageIndex(1), Version(3), "equivocation", bytes(32))
    ticket = Ticket(chain.run_id, shown.accused, StageIndex(1), bytes(32), signature=bytes(64))
    without_one = ReducedPart(0, bytes([1] * 32), facts.members[1:], (Exclusion(facts.members[0], "malformed"),))
    vote = JurorVote(*charge, host, Step(5), host, Grade.FRAUD, signature=bytes(64))
    heads = [EvidenceHead.from_bytes(data[: head_end(data)]) for data in (one.to_bytes() for one in evidence)]
    return [
        *heads,
        *(case for one in evidence for case in _cases_of(one)),
        *(round_ for done in shown.rounds for round_ in (done.chain, done.result)),
        shown.signed,
        shown.anchor,
        roster,
        result.parts[0].outcome,
        chain.basis,
        Proof(proof.promises, result.certificate, changed),
        replace(asked_result(facts, result), proof=proof),
        asked_commit(facts, result),
        Words((64,) * 4, 0.5, (Word(0, bytes(64)), Word(1, bytes(64), (bytes(64),))), (result.certificate.votes[0],)),
        genesis,
        replace(shown.mismatch(shown.contribution, shown.parts).past, beginning=genesis),
        Ban(*charge, signature=bytes(64)),
        Quarantine(*charge, (vote, vote)),
        Quarantine(*charge, signature=bytes(64)),
        SignedVerdict(shown.signed, Ban(*charge, signature=bytes(64))),
        SignedVerdict(shown.signed, Quarantine(*charge, (vote, vote))),
        Pardon(chain.run_id, shown.accused, Version(3), False, signature=bytes(64)),
        Ending(chain.run_id, 0, Version(3), packed_changes({"optimizer.total_steps": 9}), signature=bytes(64)),
        Amendment(
            chain.run_id,
            1,
            NOTHING_BEFORE,
            Version(3),
            packed_changes({"optimizer.total_steps": 9}),
            signature=bytes(64),
        ),
        Accusation(*charge),
        Promotion(chain.run_id, shown.accused, StageIndex(1), Version(3), signature=bytes(64)),
        Debt(chain.run_id, shown.accused, Version(3), signature=bytes(64)),
        Posting(
            chain.run_id, shown.accused, StageIndex(1), StageIndex(0), era=2, version=Version(3), signature=bytes(64)
        ),
        Plea(chain.run_id, shown.accused, StageIndex(1), Version(3), bytes(32), (bytes(32),) * 2, signature=bytes(64)),
        Agreement(
            run_id=chain.run_id,
            stage=StageIndex(1),
            step=Step(3),
            newcomer=shown.accused,
            examiner=host,
            signature=bytes(64),
        ),
        shown.contribution.chance,
        replace(
            shown.contribution.chance,
            ticket=Ticket(chain.run_id, host, StageIndex(1), bytes(32), signature=bytes(64)),
        ),
        replace(shown.contribution, rates=(Rate(host, 20),), charges=(Charge(host, bytes(32)),)),
        LeftOut(shown.contribution, (Lack(host, bytes(64)),)),
        ReducedPart(0, bytes([1] * 32), facts.members, shares=(Share(0, host, bytes(32)),)),
        without_one,
        replace(
            Reduction.of(result.roster, without_one, dict.fromkeys(facts.members, 64), norm_cap=0.5, reducer=host),
            signature=bytes(64),
        ),
        OwedAudit(
            run_id=chain.run_id,
            stage=StageIndex(1),
            step=Step(2),
            auditor=host,
            target=shown.accused,
            reveal=bytes(32),
            what="hop",
            number=3,
            reason="gone",
            birth=papers.birth,
            header=papers.gradient_out,
            signature=bytes(64),
        ),
        ticket,
        CheckpointRecord(
            chain.run_id,
            8,
            True,
            (bytes(32),) * 2,
            (ArchivedFile("stage-0/state.bin", 99, bytes(32)),),
            signature=bytes(64),
        ),
        CheckpointScores(chain.run_id, 8, (Score("arc_easy", "acc", 0.25),), signature=bytes(64)),
        AccusationPiece(shown.accused, bytes(32), 1 << 30, 4 << 20),
        OpenCharge(StageIndex(1), Step(5), host, shown.accused, bytes(32)),
        Fragment(3, 9),
        DirectOffer(bytes(16), bytes(32), 4001, None),
        _punch_question(host),
        DialBackRequest((4001,), (4001,), (_seen(host),)),
        DialledBack((DialledAt("203.0.113.5", answers=True), DialledAt("2001:db8::5", answers=False))),
        RelayOffer(peer_id=host, addresses=("/ip4/203.0.113.5/tcp/4004",), refusal="it is full"),
        PieceList(3 << 20, bytes(96)),
        Credited(num_tokens=4096, num_microbatches=8, num_steps=3, rank=2, num_ranked=5),
        _step_report().audits,
        *_step_report().audits.honest,
        _step_report().audits.honest[0].gradient,
        _step_report(),
    ]


def _seen(host: PeerId) -> Seen:
    return Seen(host, host, "203.0.113.5", 4001, 1_700_000_000_000, signature=bytes(64))


def _punch_question(host: PeerId) -> Asked:
    seen = _seen(host)
    side = Side(DirectOffer(bytes(16), bytes(32), 4001, None), (Port((seen,)),), moves=False, num_streams=2, took_ms=20)
    return Asked(bytes(16), near=False, side=side)


def _step_report() -> StepReport:
    made = AuditsMade(
        run_id="run",
        auditor=PeerId("auditor"),
        stage=StageIndex(7),
        version=7,
        numeric_class="torch-2.13.0/cpu-avx2/bf16",
        honest=(HonestAudits(numeric_class="torch-2.13.0/cuda-sm90/bf16", gradient=Agreed(3, 0.25)),),
        signature=bytes(64),
    )
    examples: dict[Any, Any] = {int: 7, float: 0.5, bytes: bytes(32), AuditsMade: made}
    types = get_type_hints(StepReport)
    return StepReport(**{field.name: examples.get(types[field.name], ()) for field in fields(StepReport)})


def _cases_of(evidence: Evidence) -> list[object]:
    return [evidence.run, *(kind.from_evidence(evidence) for kind in CASES if evidence.kind == kind.KIND)]


CASES = classes_with("from_evidence")
BASES = (Wire, Record, Row, SignedValue)


# -- readers of another form ----------------------------------------------------------------------------------


def evidence_readers(evidence: list[Evidence], tokens: Path) -> list[Reader]:
    """A file whole, and the case in it; and what the host does with it."""
    files = tuple(one.to_bytes() for one in evidence)

    def read(data: bytes) -> Evidence:
        made = Evidence.from_bytes(data, max_bytes=MAX_BYTES)
        assert made.to_bytes() == data
        return made

    def read_case(data: bytes) -> None:
        made = read(data)
        for kind in CASES:
            if made.kind == kind.KIND:
                assert kind.from_evidence(made).to_evidence(made.run).to_bytes() == data
        assert made.settings

    def judged(data: bytes) -> None:
        judge(read(data), data=tokens)

    refuses = (RemoteError, LocalError)
    return [
        Reader("evidence", files, read_case, spoil=spoilt_evidence),
        Reader("judgement", files, judged, refuses=refuses, spoil=spoilt_evidence),
    ]


def spoilt_evidence(sample: bytes, rng: random.Random) -> bytes:
    """With other bytes, or closed again after a change of its head or of a blob, which its head then names or not."""
    if rng.random() < 0.1:
        return spoilt_bytes(sample, rng)
    start = len(MAGIC) + 4
    (head_bytes,) = struct.unpack_from("<I", sample, len(MAGIC))
    head, body = sample[start : start + head_bytes], sample[start + head_bytes : -32]
    value = unpack(head, max_bytes=MAX_BYTES)
    assert isinstance(value, dict)
    chance = rng.random()
    if chance < 0.5:
        value = {**value, "facts": spoilt_value(value["facts"], rng)}
    elif chance < 0.7:
        made = spoilt_value(value, rng)
        value = made if isinstance(made, dict) else {}
    else:
        body = spoilt_bytes(body[:4096], rng) + body[4096:]
        value = {**value, "blobs": [[len(body), hash_of(body)]]} if rng.random() < 0.3 else value
    try:
        head = pack(value)
    except TypeError:
        head = b"\x91" * 40
    data = MAGIC + struct.pack("<I", len(head)) + head + body
    return data + hash_of(data)


def hash_of(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def state_readers(shown: World) -> list[Reader]:
    state, chain = shown.run.snapshot(1)
    chunks = [bytes(chunk) for chunk in state_chunks(state)]
    first = 4096

    def read_state(data: bytes) -> None:
        given = [data, *chunks[1:]] if len(chunks) > 1 else [data]
        root = merkle_root([chunk_hash(chunk) for chunk in given], sum(map(len, given)))
        made = state_from_chunks(state.layout, given, root)
        assert b"".join(state_chunks(made)) == b"".join(given)

    def spoil(sample: bytes, rng: random.Random) -> bytes:
        (length,) = struct.unpack_from("<I", sample)
        header = spoilt(sample[4 : 4 + length], rng)
        if rng.random() < 0.2 or len(header) > first - 4:
            return spoilt_bytes(sample[:first], rng) + sample[first:]
        return (struct.pack("<I", len(header)) + header).ljust(first, b"\0") + sample[first:]

    offer = Offer(1, chain.version, bytes(32), (bytes(32), b"1" * 32), 2 << 20, chain).to_message()

    def read_offer(data: bytes) -> None:
        meta = decode_meta(data)
        made = _read_offer(Message(meta, offer.body), state.layout)
        assert pack(made.to_message().meta) == data

    return [
        Reader("StageState", (chunks[0],), read_state, spoil=spoil),
        Reader("Offer", (pack(offer.meta),), read_offer),
    ]


def codec_readers() -> list[Reader]:
    rng = np.random.default_rng(0)
    made: list[Reader] = []
    for name in ("fp32", "bf16", "int8", "int4", "topk"):
        codec = vector_codec(name)  # type: ignore[arg-type]
        samples = tuple(
            bytes(codec.encode(rng.standard_normal(VECTOR_VALUES, np.float32) * scale, seed=bytes(32)))
            for scale in (1.0, 0.0, 1e37)
        )
        made.append(Reader(f"vector {name}", samples, partial(_read_vector, codec), spoil=spoilt_bytes_mostly))
    for name in ("fp32", "bf16", "int8", "int4", "int4h"):
        activations = activation_codec(name)  # type: ignore[arg-type]
        tensors = rng.standard_normal((2, *SHAPE), np.float32) * np.float32([[[[1.0]]], [[[1e30]]]])
        samples = tuple(bytes(activations.encode(_tensor(tensor))) for tensor in tensors)
        made.append(Reader(f"hop {name}", samples, partial(_read_hop, activations), spoil=spoilt_bytes_mostly))
    return made


def _tensor(values: Any) -> Any:
    import torch

    return torch.from_numpy(np.ascontiguousarray(values))


def _read_vector(codec: Any, data: bytes) -> None:
    out = np.empty(VECTOR_VALUES, np.float32)
    codec.decode(data, out)
    assert (np.abs(out) < 2.0**126).all()
    if codec.name in ("fp32", "bf16"):
        again = np.empty_like(out)
        codec.decode(bytes(codec.encode(out, seed=bytes(32))), again)
        assert again.tobytes() == out.tobytes()


def _read_hop(codec: Any, data: bytes) -> None:
    out = codec.decode(data, SHAPE)
    assert tuple(out.shape) == SHAPE
    assert bool((out.abs() < 2.0**126).all())


def spoilt_bytes_mostly(sample: bytes, rng: random.Random) -> bytes:
    """Of the same length more often than not, or nobody looks inside."""
    made = spoilt_bytes(sample, rng)
    return made[: len(sample)].ljust(len(sample), b"\xff") if rng.random() < 0.7 else made


def network_readers() -> list[Reader]:
    meta = {"kind": "busy", "message": "64 open calls\n"}
    request, _ = framing.encode_request("forward", Message(meta), timeout_s=3.0)
    reply = framing.encode_error(framing.Status.REMOTE, "malformed", "no")
    _, record = sign_record(run_key(), "stage/0", {"addresses": ["/ip4/1.2.3.4"], "a": 1}, ttl_s=60.0, now=NOW)
    loop, ends = asyncio.new_event_loop(), (RemoteError, EOFError)

    def read_error(data: bytes) -> None:
        kind, message = decode_error(decode_meta(data))
        assert kind in KINDS
        assert message.isprintable()

    def read_head(read_one: Callable[[socket.socket], Any], data: bytes) -> None:
        async def whole(stream: socket.socket) -> Message | RemoteError | EOFError | None:
            try:
                head = await read_one(stream)
                return await framing.read_content(stream, head, window_s=5.0) if head.body_bytes < 1 << 20 else None
            except ends as error:  # raised through `run_until_complete`, it would keep the body until it is collected
                return error.with_traceback(None)

        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            theirs.sendall(data[: 1 << 16])
            theirs.close()
            found = loop.run_until_complete(whole(ours))
        if isinstance(found, ends):
            raise found

    def read_record(data: bytes) -> None:
        made = open_record(data, now=NOW)
        assert made.peer_id == run_key().peer_id

    return [
        Reader("error", (pack(meta),), read_error),
        Reader("request", (request,), partial(read_head, framing.read_request_head), ends, spoilt_bytes),
        Reader("reply", (reply,), partial(read_head, framing.read_reply_head), ends, spoilt_bytes),
        Reader("record", (record,), read_record),
    ]


def settings_reader(shown: World) -> Reader:
    def read(data: bytes) -> None:
        settings_from_value(unpack(data, max_bytes=MAX_BYTES))

    def spoil(sample: bytes, rng: random.Random) -> bytes:
        if rng.random() < 0.6:
            return spoilt(sample, rng)
        value: Any = unpack(sample, max_bytes=MAX_BYTES)
        config = json.loads(value["model"]["config_json"])
        config[rng.choice((*config, "layer_types", "rope_scaling", "head_dim"))] = spoilt_value(
            rng.choice((7, "x", None, [1, 2], {"rope_type": "yarn", "factor": 2.0}, 1e-5)), rng
        )
        text = json.dumps(config, sort_keys=True, separators=(",", ":"), default=lambda octets: octets.hex())
        return pack({**value, "model": {**value["model"], "config_json": text}})

    return Reader("settings", (shown.signed.settings,), read, spoil=spoil)


@pytest.fixture(scope="module")
def readers(world: World) -> list[Reader]:  # noqa: F811
    evidence = [make() for make in guilty_cases(world).values()]
    samples: dict[type[Any], set[bytes]] = {}
    for made in parts_of(honest(world, evidence)):
        samples.setdefault(type(made), set()).update([pack(made.to_value())] if isinstance(made, Wire) else [])
    found = records()
    assert set(classes_with("from_value")) <= {*found, *BASES}
    unknown = [kind.__name__ for kind in found if not samples.get(kind)]
    assert not unknown, f"no honest sample of {', '.join(unknown)}: give one in `honest`"
    return [
        *(value_reader(kind, tuple(sorted(samples[kind], key=len)[:12])) for kind in found),
        *evidence_readers(evidence, world.data),
        *state_readers(world),
        *codec_readers(),
        *network_readers(),
        settings_reader(world),
    ]


# -- the tests ------------------------------------------------------------------------------------------------


def test_honest_messages_are_taken(readers: list[Reader]) -> None:
    for reader in readers:
        for sample in reader.samples:
            reader.read(sample)


def test_readers_of_every_room_are_found(readers: list[Reader]) -> None:
    names = {reader.name for reader in readers}
    assert {"Contribution", "HopHeader", "StepReport", "Ban", "Papers", "LeaseTable", "CastVote"} <= names
    assert len(names) == len(readers)


def test_nothing_but_a_refusal_comes_of_a_spoilt_message(readers: list[Reader]) -> None:
    begun = _warmed_up(readers)

    @hypothesis_settings(max_examples=80, deadline=None, derandomize=True, database=None)
    @given(st.integers(0, 1 << 40))
    def attack_all(number: int) -> None:
        for reader in readers:
            reader.attack(number)

    attack_all()
    assert _grown_since(begun) < MOST_KEPT_BYTES, f"{_grown_since(begun) >> 20} MiB were kept"


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_nothing_but_a_refusal_comes_of_a_million_spoilt_messages(
    readers: list[Reader], capsys: pytest.CaptureFixture[str]
) -> None:
    begun, began = _warmed_up(readers), time.monotonic()
    tried, taken = ([0] * len(readers) for _ in range(2))
    spent_s = [0.0] * len(readers)
    for _ in range(LONG_MODE_INPUTS):
        at = min(range(len(readers)), key=spent_s.__getitem__)  # each has an equal share of the time
        started = time.thread_time()
        taken[at] += readers[at].attack(tried[at])
        spent_s[at] += time.thread_time() - started
        tried[at] += 1
    took_s, grown = time.monotonic() - began, _grown_since(begun)
    with capsys.disabled():
        print(f"\n{LONG_MODE_INPUTS} inputs to {len(readers)} readers in {took_s:.0f} s:", end=" ")
        print(f"{LONG_MODE_INPUTS / took_s:.0f} a second, RSS grew by {grown / (1 << 20):.1f} MiB")
        for reader, count, kept in sorted(zip(readers, tried, taken, strict=True), key=lambda row: row[1]):
            print(f"  {reader.name:18} {count:8} inputs, {kept:7} taken")
    assert grown < MOST_KEPT_BYTES, f"{grown >> 20} MiB were kept"


def _warmed_up(readers: list[Reader]) -> int:
    """Bytes of this process once all is there that is made once: compiled kernels, full caches."""
    for reader in readers:
        for number in range(30):
            reader.attack(number, most_s=COMPILED_S)
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def _grown_since(before: int) -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss) - before
