"""Evidence: whole or refused, judged alike by whoever was never in the swarm, and of no use against the honest."""

import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from swarm.averaging.activations import activation_codec
from swarm.averaging.codecs import vector_codec
from swarm.averaging.parts import Parts
from swarm.averaging.seeds import part_seeds
from swarm.bulk_digest import bulk_digest
from swarm.checkpoint.state import chunk_hash, merkle_path, merkle_root, state_chunks, state_digest
from swarm.cli import ExitCode
from swarm.cli import run as run_command
from swarm.core.canonical import pack, unpack
from swarm.core.errors import LocalError, RemoteError
from swarm.core.ids import MicrobatchId, PeerId, StageIndex, Step, Version
from swarm.core.round.contribution import Contribution
from swarm.core.round.words import Malformed, Reduction
from swarm.core.settings import CodecSettings
from swarm.core.state.stage_chain import Genesis
from swarm.data.batches import BatchReader
from swarm.data.token_file import TokenFile, TokenWriter
from swarm.identity.key import Identity
from swarm.manifest.amendment import packed_changes
from swarm.manifest.signed_run import NOTHING_BEFORE, Amendment, SignedRun
from swarm.manifest.value import run_id, settings_bytes
from tests.swarm.core.audit.chances import HOST_CHAIN
from tests.swarm.core.round.round_members import resigned, vote_by
from tests.swarm.core.round.round_world import identity_of, run_key
from tests.verification import exhibits
from tests.verification.exhibits import Done, SmallRun, small_settings
from verification.audit.evidence import MAGIC, SUFFIX, Bytes, Evidence
from verification.kinds.data_fraud import DataFraud
from verification.kinds.equivocation import CastVote, Equivocation
from verification.kinds.hop_mismatch import HopMismatch
from verification.kinds.protocol_violation import ProtocolViolation
from verification.kinds.reducer_fraud import ReducerFraud
from verification.kinds.replay_mismatch import ReplayMismatch
from verification.kinds.step_fraud import OldChunk, StepFraud
from verification.pipeline.headers import BirthRecord
from verification.pipeline.hop_claim import NO_SIGNATURE, HopClaim
from verification.replay.judge import judge
from verification.replay.stepped_again import needs_of
from verification.replay.verdict import Verdict
from verification.round.papers import Exhibit
from verification.state.anchor import Anchor
from verification.state.past import Past
from verification.state.state_statement import StateStatement

STAGE = 1
MAX_BYTES = 1 << 26
CODED = CodecSettings(activations="int8", activation_gradients="int8", averaging="int8")

Makers = dict[str, Callable[[], Evidence]]


@dataclass(frozen=True)
class World:
    """A run of two stages with three peers each, at version 3; stage 1 was anchored at version 1."""

    run: SmallRun
    signed: SignedRun
    data: Path
    anchor: Anchor
    state_chunks: tuple[Bytes, ...]
    rounds: tuple[Done, Done]
    """Of versions 1 and 2 of the stage."""
    shown: dict[PeerId, tuple[Exhibit, ...]]
    """Of the work in the second of these rounds."""

    @property
    def accused(self) -> PeerId:
        return self.run.peers[STAGE][0].peer_id

    @property
    def contribution(self) -> Contribution:
        return self.rounds[1].contributions[self.accused]

    @property
    def parts(self) -> tuple[Bytes, ...]:
        return tuple(self.rounds[1].parts[self.accused])

    def mismatch(
        self, contribution: Contribution, parts: Sequence[Bytes], shown: Sequence[Exhibit] | None = None
    ) -> ReplayMismatch:
        return ReplayMismatch(
            contribution=contribution,
            parts=tuple(parts),
            exhibits=self.shown[self.accused] if shown is None else tuple(shown),
            past=Past(beginning=self.anchor, results=(self.rounds[0].result,)),
            state_chunks=self.state_chunks,
            bodies=(tuple(self.rounds[0].bodies),),
        )

    def step(self, chunk: int, *, change: int | None = None) -> StepFraud:
        """The accused's word for the state of the present version, and all that chunk `chunk` of it follows from.

        `change` is a byte of that chunk that it has otherwise.
        """
        state, chain = self.run.snapshot(STAGE)
        bodies = [bytearray(body) for body in state_chunks(state)]
        if change is not None:
            bodies[chunk][change] ^= 1
        hashes, total = [chunk_hash(body) for body in bodies], sum(map(len, bodies))
        said = StateStatement(
            run_id=chain.run_id,
            stage=chain.stage,
            version=chain.version,
            name=chain.name,
            peer_id=self.accused,
            state_digest=merkle_root(hashes, total),
            total_bytes=total,
        ).signed_by(identity_of(self.accused))
        needs = needs_of(self.state_chunks[0], chunk, layout=state.layout, cut=Parts(state.layout.num_values))
        old_hashes = [chunk_hash(old) for old in self.state_chunks]
        return StepFraud(
            statement=said,
            chunk=chunk,
            leaf=hashes[chunk],
            path=merkle_path(hashes, chunk),
            past=Past(beginning=self.anchor, results=tuple(done.result for done in self.rounds)),
            old_chunks=tuple(
                OldChunk(index=index, path=merkle_path(old_hashes, index), body=self.state_chunks[index])
                for index in needs.old_chunks
            ),
            parts=needs.parts,
            bodies=tuple(tuple(done.bodies[part] for part in needs.parts) for done in self.rounds),
        )

    def reduction(self, part: int = 0) -> tuple[Reduction, tuple[Bytes, ...]]:
        """An honest reducer's word for a part, and its inputs."""
        done = self.rounds[1]
        roster = done.result.roster
        weights = done.chain.weights_of(roster, self.run.settings)
        made = Reduction.of(
            roster, done.result.parts[part], weights, norm_cap=None, reducer=roster.reducers[part]
        ).signed_by(identity_of(roster.reducers[part]))
        return made, tuple(done.parts[one.peer_id][part] for one in made.inputs)

    def birth(self, number: int) -> BirthRecord:
        """As an honest source makes it."""
        reader = BatchReader(self.run.settings, TokenFile(self.data, 1))
        tokens, targets = reader.batch(MicrobatchId(number))
        source = self.run.peers[0][0]
        digests = [hashlib.sha256(values.astype("<i4").tobytes()).digest() for values in (tokens, targets)]
        record = replace(
            self.shown[self.accused][0].papers.birth,
            microbatch_id=MicrobatchId(number),
            num_targets=targets.size,
            tokens_digest=digests[0],
            targets_digest=digests[1],
            document_bounds=(),
        )
        return record.signed_by(source)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    data = tmp_path_factory.mktemp("data") / "train.tokens"
    with TokenWriter(data, 1) as writer:
        writer.write(np.random.default_rng(0).integers(0, 97, 1 << 16))
    given = small_settings(2, codecs=CODED)
    given = SmallRun(replace(given, data=replace(given.data, train_digest=writer.pieces.digest))).settings
    unsigned = SignedRun(settings_bytes(given), run_key().peer_id)
    signed_run = replace(unsigned, signature=run_key().sign(unsigned.signed_bytes()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exhibits, "RUN_ID", run_id(given, run_key().peer_id))
        run = SmallRun(given, num_peers=3)
        _round(run, 0)
        state, chain = run.snapshot(STAGE)
        anchor = Anchor.of_chain(chain, state_digest(state)).signed_by(run_key())
        chunks = tuple(bytes(chunk) for chunk in state_chunks(state))
        first, _ = _round(run, 10)
        second, shown = _round(run, 20)
        yield World(run, signed_run, data, anchor, chunks, (first, second), shown)


def _round(run: SmallRun, first: int) -> tuple[Done, dict[PeerId, tuple[Exhibit, ...]]]:
    """Two microbatches at every peer, and the step; what the stage's peers can show of them."""
    shown = {
        identity.peer_id: tuple(run.microbatch(first + 2 * index + number, index=index)[STAGE] for number in range(2))
        for index, identity in enumerate(run.peers[STAGE])
    }
    run.step(0)
    return run.step(STAGE), shown


# -- what liars sign --------------------------------------------------------------------------------------


def _with_parts(made: Contribution, parts: Sequence[Bytes]) -> Contribution:
    """The contribution, signed for other parts."""
    return resigned(replace(made, part_digests=tuple(bulk_digest(part) for part in parts)))


def _scaled(world: World, by: float) -> list[Bytes]:
    """The accused's parts, so many times as long, rounded alike."""
    codec, parts = vector_codec("int8"), Parts(world.run.snapshot(STAGE)[0].layout.num_values)
    made = world.contribution
    seeds = part_seeds(made.run_id, made.stage, Version(int(made.step)), world.accused, num_parts=len(parts))
    scaled: list[Bytes] = []
    for body, where, seed in zip(world.parts, parts, seeds, strict=True):
        values = np.empty(where.stop - where.start, dtype=np.float32)
        codec.decode(body, values)
        scaled.append(codec.encode(values * np.float32(by), seed=seed))
    return scaled


def _negated(part: Bytes) -> bytearray:
    codec = vector_codec("int8")
    num_values = next(n for n in range(len(part)) if codec.encoded_bytes(n) == len(part))
    values = np.empty(num_values, dtype=np.float32)
    codec.decode(part, values)
    return codec.encode(-values, seed=bytes(32))


def _not_finite(part: Bytes) -> bytes:
    """With a scale that is no number."""
    return b"\xc0\x7f" + bytes(part)[2:]


def _equivocation(world: World) -> Equivocation:
    return Equivocation(one=world.contribution, other=_with_parts(world.contribution, [b"other"]))


def _changed(world: World, body: Bytes, factor: float) -> bytearray:
    """An activation or its gradient, times a factor."""
    codec, settings = activation_codec("int8"), world.run.settings
    shape = (settings.batch.microbatch_size, settings.data.sequence_length, 64)
    return codec.encode(factor * codec.decode(body, shape))


def _two_activations(world: World, factor: float, *, version: int | None = None) -> Equivocation:
    """Of stage 0: a header that was sent, and the same for an activation times a factor."""
    shown = world.shown[world.accused][0]
    one = shown.papers.input_header
    assert one is not None
    body = _changed(world, shown.x, factor)
    other = replace(
        one,
        body_digest=bulk_digest(body),
        consumer=world.run.peers[STAGE][1].peer_id,
        version=one.version if version is None else Version(version),
    )
    return Equivocation(one=one, other=other.signed_by(identity_of(one.producer)), bodies=(shown.x, body))


def _lying_hop(world: World) -> tuple[Contribution, Exhibit]:
    """An exhibit whose gradient was negated before it was signed, and the contribution that lists it."""
    honest = world.shown[world.accused][0]
    assert honest.papers.gradient_out is not None
    body = _changed(world, honest.grad_x, -1.0)
    header = replace(honest.papers.gradient_out, body_digest=bulk_digest(body))
    papers = replace(honest.papers, gradient_out=header.signed_by(identity_of(world.accused)))
    return world.contribution, replace(honest, papers=papers, grad_x=body)


def _hop_mismatch(world: World, shown: Exhibit) -> HopMismatch:
    """What the neighbours of the last stage's peer show of the gradient it signed."""
    header = shown.papers.gradient_out
    assert header is not None
    assert shown.papers.input_header is not None
    claim = HopClaim(
        birth=shown.papers.birth,
        header=header,
        x_header=replace(shown.papers.input_header, signature=NO_SIGNATURE),
        grad_header=None,
        claimed=shown.grad_x,
        x=shown.x,
        targets=shown.targets,
        grad_y=b"",
    )
    past = world.mismatch(world.contribution, ())
    return HopMismatch(claim=claim, past=past.past, state_chunks=past.state_chunks, bodies=past.bodies)


def _vote(world: World, value: bytes) -> CastVote:
    facts = world.rounds[1].chain.facts(world.run.settings, num_parts=1, phase_s=1.0)
    vote = vote_by(facts, world.accused, "result", 3, value)
    return CastVote.of(facts.election, "result", 3, value, vote, None)


def guilty_cases(world: World) -> Makers:
    """Evidence of every kind, against who did it."""
    lying_reduction, inputs = world.reduction()
    lying_reduction = replace(lying_reduction, digest=bytes(32)).signed_by(identity_of(lying_reduction.reducer))
    negated = [_negated(part) for part in world.parts]
    broken = [_not_finite(part) for part in world.parts]
    listing, lying_hop = _lying_hop(world)
    gradient = world.shown[world.accused][0].papers.gradient_out
    assert gradient is not None
    garbage = _not_finite(world.shown[world.accused][0].grad_x)
    bad_hop = replace(gradient, body_digest=bulk_digest(garbage)).signed_by(identity_of(world.accused))
    swapped = replace(world.birth(7), targets_digest=bytes(32)).signed_by(world.run.peers[0][0])
    run = world.signed
    return {
        "two contributions": lambda: _equivocation(world).to_evidence(run),
        "two votes": lambda: Equivocation(one=_vote(world, bytes(32)), other=_vote(world, b"1" * 32)).to_evidence(run),
        "two reductions": lambda: Equivocation(one=world.reduction()[0], other=lying_reduction).to_evidence(run),
        "two activations": lambda: _two_activations(world, 0.5).to_evidence(run),
        "undecodable part": lambda: ProtocolViolation(
            message=_with_parts(world.contribution, broken), part=0, body=broken[0]
        ).to_evidence(run),
        "undecodable reduction": lambda: ProtocolViolation(
            message=replace(lying_reduction, digest=bulk_digest(broken[0])).signed_by(
                identity_of(lying_reduction.reducer)
            ),
            part=0,
            body=broken[0],
        ).to_evidence(run),
        "reduction of other squares": lambda: ProtocolViolation(
            message=replace(world.reduction()[0], squares=0.5).signed_by(identity_of(lying_reduction.reducer)),
            part=0,
            body=world.rounds[1].bodies[0],
        ).to_evidence(run),
        "left out a good part": lambda: ProtocolViolation(
            message=_leaving_out(world, inputs[0]), part=1, body=inputs[0]
        ).to_evidence(run),
        "undecodable hop": lambda: ProtocolViolation(message=bad_hop, part=0, body=garbage).to_evidence(run),
        "wrong reduction": lambda: ReducerFraud(reduction=lying_reduction, bodies=inputs).to_evidence(run),
        "wrong weights": lambda: world.step(0, change=1 << 19).to_evidence(run),
        "wrong moments": lambda: world.step(1, change=77).to_evidence(run),
        "wrong norms": lambda: world.step(0, change=100).to_evidence(run),
        "swapped targets": lambda: DataFraud(birth=swapped).to_evidence(run),
        "negated contribution": lambda: world.mismatch(_with_parts(world.contribution, negated), negated).to_evidence(
            run
        ),
        "negated gradient": lambda: world.mismatch(listing, (), [lying_hop]).to_evidence(run),
        "negated hop": lambda: _hop_mismatch(world, lying_hop).to_evidence(run),
    }


def _leaving_out(world: World, body: Bytes) -> Reduction:
    """A reducer's word that these bytes of a contributor stand for no values."""
    made, _ = world.reduction()
    out = Malformed(made.inputs[0].peer_id, bulk_digest(body))
    return replace(made, inputs=made.inputs[1:], malformed=(out,)).signed_by(identity_of(made.reducer))


def honest_cases(world: World) -> Makers:
    """Evidence of every kind against somebody honest: genuine in all it shows."""
    reduction, inputs = world.reduction()
    hop = world.shown[world.accused][0].papers.gradient_out
    assert hop is not None
    run = world.signed
    later = resigned(replace(world.contribution, step=Step(9)))
    return {
        "two steps": lambda: Equivocation(one=world.contribution, other=later).to_evidence(run),
        "the same twice": lambda: Equivocation(one=world.contribution, other=world.contribution).to_evidence(run),
        "activations at two versions": lambda: _two_activations(world, 0.5, version=1).to_evidence(run),
        "activations nearly the same": lambda: _two_activations(world, 1.001).to_evidence(run),
        "part": lambda: ProtocolViolation(message=world.contribution, part=0, body=world.parts[0]).to_evidence(run),
        "hop": lambda: ProtocolViolation(message=hop, part=0, body=world.shown[world.accused][0].grad_x).to_evidence(
            run
        ),
        "left out nonsense": lambda: ProtocolViolation(
            message=_leaving_out(world, _not_finite(inputs[0])), part=1, body=_not_finite(inputs[0])
        ).to_evidence(run),
        "reduced part": lambda: ProtocolViolation(
            message=reduction, part=0, body=world.rounds[1].bodies[0]
        ).to_evidence(run),
        "reduction": lambda: ReducerFraud(reduction=reduction, bodies=inputs).to_evidence(run),
        "step": lambda: world.step(0).to_evidence(run),
        "step's last chunk": lambda: world.step(len(world.state_chunks) - 1).to_evidence(run),
        "birth": lambda: DataFraud(birth=world.birth(7)).to_evidence(run),
        "contribution": lambda: world.mismatch(world.contribution, world.parts).to_evidence(run),
        "gradient": lambda: world.mismatch(world.contribution, (), world.shown[world.accused][1:]).to_evidence(run),
    }


GUILTY = (
    "two contributions",
    "two votes",
    "two reductions",
    "two activations",
    "undecodable part",
    "undecodable reduction",
    "reduction of other squares",
    "left out a good part",
    "undecodable hop",
    "wrong reduction",
    "wrong weights",
    "wrong moments",
    "wrong norms",
    "swapped targets",
    "negated contribution",
    "negated gradient",
    "negated hop",
)
HONEST = (
    "two steps",
    "the same twice",
    "activations at two versions",
    "activations nearly the same",
    "part",
    "left out nonsense",
    "reduced part",
    "hop",
    "reduction",
    "step",
    "step's last chunk",
    "birth",
    "contribution",
    "gradient",
)


# -- in a process of its own ------------------------------------------------------------------------------

VERIFIER = """
import contextlib, io, json, socket, sys

def refused(*arguments, **named):
    raise OSError("no network here")

from swarm.cli import run
socket.socket.connect = socket.getaddrinfo = refused
outcomes = []
for path in sys.argv[2:]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = run(["evidence", "verify", path, "--json", "--data", sys.argv[1]])
    outcomes.append([int(code), json.loads(printed.getvalue())])
print(json.dumps(outcomes))
"""


def test_a_fresh_process_without_a_network_comes_to_the_same_verdicts(world: World, tmp_path: Path) -> None:
    cases = {**guilty_cases(world), **honest_cases(world)}
    assert set(cases) == {*GUILTY, *HONEST}
    paths = []
    for number, make in enumerate(cases.values()):
        paths.append(tmp_path / f"{number}{SUFFIX}")
        paths[-1].write_bytes(b"".join(make().chunks()))
    alone = ["unshare", "--net"] if os.geteuid() == 0 and shutil.which("unshare") else []
    command = [*alone, sys.executable, "-c", VERIFIER, str(world.data), *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=280)
    outcomes = dict(zip(cases, json.loads(done.stdout), strict=True))
    for name, (code, outcome) in outcomes.items():
        assert (code, outcome["proven"]) == ((0, True) if name in GUILTY else (3, False)), (name, outcome)
        assert outcome["run_key"] == run_key().peer_id
        assert outcome["accused"] == cases[name]().accused
    for name in ("contribution", "gradient"):
        figures = outcomes[name][1]["figures"]
        errors = [figure for what, figure in figures.items() if what.endswith("error")]
        assert errors
        assert max(errors) < 1e-3


# -- whole or refused -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(world: World) -> dict[str, bytes]:
    """The guilty cases as files."""
    return {name: make().to_bytes() for name, make in guilty_cases(world).items()}


def _read(data: Bytes) -> Evidence:
    return Evidence.from_bytes(data, max_bytes=MAX_BYTES)


def _flipped(data: bytes, at: int) -> bytearray:
    changed = bytearray(data)
    changed[at] ^= 1 << at % 8
    return changed


def _sections(data: bytes) -> dict[str, range]:
    """Where the head, the blobs and the closing digest lie."""
    start = len(MAGIC) + 4
    (size,) = struct.unpack_from("<I", data, len(MAGIC))
    return {
        "opening": range(start),
        "head": range(start, start + size),
        "blobs": range(start + size, len(data) - 32),
        "closing": range(len(data) - 32, len(data)),
    }


@pytest.mark.parametrize("name", GUILTY)
def test_a_file_with_any_one_byte_changed_is_refused(files: dict[str, bytes], name: str) -> None:
    data = files[name]
    for section, where in _sections(data).items():
        some = where if section != "blobs" and len(where) < 1 << 13 else where[:: max(1, len(where) // 200)]
        for at in some:
            with pytest.raises(RemoteError) as caught:
                _read(_flipped(data, at))
            assert caught.value.kind == "evidence", (section, at)
    for shorter in (data[:-1], data[: len(data) // 2], data[:30], b"", data + b"0"):
        with pytest.raises(RemoteError):
            _read(shorter)


def _resealed(data: bytes, at: int) -> bytearray:
    """The file with a byte changed by someone who knows how to close it again."""
    changed = _flipped(data, at)
    where = _sections(data)
    if at in where["blobs"]:
        head = unpack(bytes(changed[where["head"].start : where["head"].stop]), max_bytes=MAX_BYTES)
        assert isinstance(head, dict)
        blobs, start = head["blobs"], where["blobs"].start
        assert isinstance(blobs, list)
        for entry in blobs:
            assert isinstance(entry, list)
            assert isinstance(entry[0], int)
            entry[1] = bulk_digest(changed[start : start + entry[0]])
            start += entry[0]
        changed[where["head"].start : where["head"].stop] = pack(head)
    return changed[:-32] + hashlib.sha256(changed[:-32]).digest()


def _verdict(data: Bytes, world: World) -> Verdict | None:
    """None if the file proves nothing, or nothing in the run of this world."""
    try:
        return judge(_read(data), data=world.data, run_key=run_key().peer_id)
    except RemoteError:
        return None


@pytest.mark.parametrize("name", GUILTY)
def test_a_changed_and_resealed_file_proves_nothing(world: World, files: dict[str, bytes], name: str) -> None:
    """Whatever byte an accuser changes: what is signed, certified or committed to no longer fits."""
    data = files[name]
    where = _sections(data)
    head = where["head"] if len(data) < 1 << 14 else where["head"][:: max(1, len(where["head"]) // 24)]
    for at in (*head[:: max(1, len(head) // 96)], *where["blobs"][:: max(1, len(where["blobs"]) // 8)]):
        found = _verdict(_resealed(data, at), world)
        assert found is None or not found.guilty, (at, found)


def test_every_field_of_the_head_is_bound(world: World) -> None:
    made = guilty_cases(world)["negated contribution"]()
    other = world.run.peers[STAGE][1].peer_id
    stranger = Identity.from_seed(bytes(32))
    unsigned = replace(made.run, run_key=stranger.peer_id)
    for changed in (
        replace(made, accused=other),
        replace(made, stage=StageIndex(0)),
        replace(made, version=Version(1)),
        replace(made, kind="protocol_violation"),
        replace(made, run=replace(made.run, signature=bytes(64))),
        replace(made, run=replace(unsigned, signature=stranger.sign(unsigned.signed_bytes()))),
        replace(made, blobs=made.blobs[:-1]),
        replace(made, blobs=(*made.blobs, b"")),
    ):
        with pytest.raises(RemoteError):
            judge(changed)


def test_evidence_is_the_same_after_it_was_read(files: dict[str, bytes]) -> None:
    for data in files.values():
        made = _read(data)
        assert made.to_bytes() == data
        assert made.digest() == data[-32:]
    with pytest.raises(RemoteError):
        Evidence.from_bytes(data, max_bytes=len(data) - 1)


@hypothesis_settings(max_examples=80, deadline=None)
@given(st.data())
def test_no_bytes_do_more_than_be_refused(files: dict[str, bytes], data: st.DataObject) -> None:
    """Heads of any value under a right seal, and any bytes at all."""
    plain = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text(max_size=8) | st.binary()
    good = _read(files["two votes"])
    head = unpack(files["two votes"][_sections(files["two votes"])["head"].start : -32], max_bytes=MAX_BYTES)
    assert isinstance(head, dict)
    values = st.recursive(plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner))
    name = data.draw(st.sampled_from([*sorted(head), "more"]))
    value = data.draw(values.filter(lambda value: value != head.get(name)))
    packed = pack({**head, name: value})
    sealed = MAGIC + struct.pack("<I", len(packed)) + packed
    sealed += hashlib.sha256(sealed).digest()
    assert _refused(sealed) or _read(sealed) != good
    with pytest.raises(RemoteError):
        judge(_read(sealed))
    assert _refused(data.draw(st.binary(max_size=200)))
    assert _refused(MAGIC + data.draw(st.binary(max_size=200)))


def _refused(data: bytes) -> bool:
    """Whether reading raises RemoteError("evidence"); any other error is the test's."""
    try:
        _read(data)
    except RemoteError as error:
        return error.kind == "evidence"
    return False


# -- what a verdict rests on ------------------------------------------------------------------------------


def test_a_run_under_another_key_proves_nothing_here(world: World) -> None:
    """An accuser can sign the run's settings, and an anchor of any weights, with a key of its own."""
    mine = Identity.from_seed(b"m" * 32)
    unsigned = SignedRun(world.signed.settings, mine.peer_id)
    mine_run = replace(unsigned, signature=mine.sign(unsigned.signed_bytes()))
    anchored = replace(world.anchor, chain=replace(world.anchor.chain, run_key=mine.peer_id)).signed_by(mine)
    case = world.mismatch(world.contribution, world.parts)
    evidence = replace(case, past=replace(case.past, beginning=anchored)).to_evidence(mine_run)
    assert evidence.run_id != world.anchor.run_id, "the same settings under another key are another run"
    with pytest.raises(RemoteError, match="key"):
        judge(evidence, run_key=run_key().peer_id)
    with pytest.raises(RemoteError):  # what was signed here is of this run
        judge(case.to_evidence(mine_run))


def test_work_of_before_an_amendment_is_judged_by_the_settings_that_were_in_force(world: World) -> None:
    """An honest step, laid beside settings that came later, would look like a lie."""
    rate = packed_changes({"optimizer.learning_rate": 0.5})
    later = Amendment(world.signed.run_id, 1, NOTHING_BEFORE, Version(9), rate).signed_by(run_key())
    amended, case = replace(world.signed, amendments=(later,)), world.step(0)
    as_it_was = case.to_evidence(amended.under(0))
    assert as_it_was.run.could_be_of(int(as_it_was.version), amended, shows_era=True)
    assert not judge(_read(as_it_was.to_bytes())).guilty
    as_it_is = case.to_evidence(amended)
    assert as_it_is.run_id == as_it_was.run_id
    assert as_it_is.settings.optimizer.learning_rate == 0.5
    assert not as_it_is.run.could_be_of(int(as_it_is.version), amended, shows_era=True)
    for wrong in (as_it_is, world.mismatch(world.contribution, world.parts).to_evidence(amended)):
        with pytest.raises(RemoteError, match="a past under 0 amendments"):
            judge(_read(wrong.to_bytes()))
    unsigned = replace(later, signature=bytes(64))
    with pytest.raises(RemoteError, match="not signed by the run key"):
        judge(case.to_evidence(replace(amended, amendments=(unsigned,))))


@pytest.mark.parametrize(("by", "factor", "before", "after"), [(1.012, 2.0, True, False), (1.004, 0.5, False, True)])
def test_the_bounds_of_a_judgement_are_those_that_the_run_key_had_set_when_the_work_was_done(
    world: World, by: float, factor: float, before: bool, after: bool
) -> None:
    """Wider, a claim is honest that was fraud, and narrower the reverse; what was done before stays what it was."""
    parts = _scaled(world, by)
    case = world.mismatch(_with_parts(world.contribution, parts), parts)

    def amended(at: int) -> SignedRun:
        changes = packed_changes({"audits.contribution_bounds": factor})
        change = Amendment(world.signed.run_id, 1, NOTHING_BEFORE, Version(at), changes)
        return replace(world.signed, amendments=(change.signed_by(run_key()),))

    done_at = int(world.contribution.step)
    later, as_it_was = amended(done_at + 1), case.to_evidence(amended(done_at + 1).under(0))
    assert as_it_was.run.could_be_of(int(as_it_was.version), later, shows_era=True)
    assert judge(_read(as_it_was.to_bytes()), run_key=run_key().peer_id).guilty is before
    assert not case.to_evidence(later).run.could_be_of(int(as_it_was.version), later, shows_era=True)

    in_force = amended(int(world.anchor.version))
    anchored = replace(world.anchor, chain=replace(world.anchor.chain, amendments=1)).signed_by(run_key())
    begun = replace(case.past, beginning=anchored)
    as_it_is = replace(case, past=begun).to_evidence(in_force)
    assert as_it_is.run.could_be_of(int(as_it_is.version), in_force, shows_era=True)
    assert judge(_read(as_it_is.to_bytes()), run_key=run_key().peer_id).guilty is after


def test_nobody_but_the_run_key_changes_bounds(world: World) -> None:
    parts = _scaled(world, 1.012)
    case = world.mismatch(_with_parts(world.contribution, parts), parts)
    changes = packed_changes({"audits.contribution_bounds": 2.0})
    mine = Amendment(world.signed.run_id, 1, NOTHING_BEFORE, world.anchor.version, changes).signed_by(
        identity_of(world.accused)
    )
    with pytest.raises(RemoteError, match="not signed by the run key"):
        judge(case.to_evidence(replace(world.signed, amendments=(mine,))))


def test_an_honest_part_is_not_held_against_a_cut_that_begins_or_ends_with_its_step(world: World) -> None:
    """Under other stages it has another length, and no honest program writes that: all of a stage were to be banned."""
    cut = packed_changes({"model.stage_layers": [[0, 2], [2, 4]]})
    at = Version(int(world.contribution.step))
    amendment = Amendment(world.signed.run_id, 1, NOTHING_BEFORE, at, cut).signed_by(run_key())
    amended = replace(world.signed, amendments=(amendment,))
    case = ProtocolViolation(message=world.contribution, part=len(world.parts) - 1, body=world.parts[-1])
    as_it_is, as_it_was = case.to_evidence(amended), case.to_evidence(amended.under(0))
    assert not judge(_read(as_it_was.to_bytes())).guilty
    assert judge(_read(as_it_is.to_bytes())).guilty
    for evidence in (as_it_is, as_it_was):  # an era ends and another begins with this step: it does not say in which
        assert not evidence.run.could_be_of(int(evidence.version), amended, shows_era=False)


def test_a_past_that_is_not_certified_proves_nothing(world: World) -> None:
    negated = [_negated(part) for part in world.parts]
    case = world.mismatch(_with_parts(world.contribution, negated), negated)
    assert judge(case.to_evidence(world.signed)).guilty
    (result,), (bodies,) = case.past.results, case.bodies
    mine = Identity.from_seed(b"m" * 32)
    honest = world.shown[world.accused]
    for changed in (
        replace(case, past=replace(case.past, beginning=replace(world.anchor, signature=bytes(64)))),
        replace(case, past=replace(case.past, beginning=world.anchor.signed_by(mine))),
        replace(case, past=replace(case.past, results=(replace(result, certificate=None),))),
        replace(case, past=replace(case.past, results=()), bodies=()),
        replace(case, bodies=((_negated(bodies[0]), *bodies[1:]),)),
        replace(case, state_chunks=(*case.state_chunks[:-1], bytes(len(case.state_chunks[-1])))),
        replace(case, exhibits=honest[:1]),
        replace(case, exhibits=honest[::-1]),
        replace(case, parts=tuple(world.parts)),
        replace(case, contribution=replace(case.contribution, signature=bytes(64))),
    ):
        with pytest.raises(RemoteError):
            judge(changed.to_evidence(world.signed))


def test_an_honest_contribution_to_another_lineage_is_not_replayed_on_this_one(world: World) -> None:
    """A stage that began again elsewhere has the same steps on other weights."""
    elsewhere = resigned(replace(world.contribution, previous_name=bytes(32)))
    with pytest.raises(RemoteError) as caught:
        judge(world.mismatch(elsewhere, world.parts).to_evidence(world.signed))
    assert caught.value.kind == "fork"


def test_a_stage_s_genesis_is_a_beginning_too() -> None:
    given = SmallRun(small_settings(2)).settings
    unsigned = SignedRun(settings_bytes(given), run_key().peer_id)
    signed_run = replace(unsigned, signature=run_key().sign(unsigned.signed_bytes()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exhibits, "RUN_ID", run_id(given, run_key().peer_id))
        run = SmallRun(given)
        shown = run.microbatch(0)[STAGE]
        done = run.step(STAGE)
    accused, chain = run.peers[STAGE][0].peer_id, done.chain
    genesis = Genesis(
        run_id=chain.run_id,
        stage=chain.stage,
        version=chain.version,
        state_digest=run.settings.initial_state_digests[STAGE],
        members=chain.members,
        leases=chain.leases,
        host=chain.host,
        run_key=chain.run_key,
        neighbours=(),
        host_chain_end=HOST_CHAIN.end,
    )
    assert genesis.name == chain.name
    genesis = replace(genesis, signature=run_key().sign(genesis.signed_bytes()))
    case = ReplayMismatch(
        contribution=done.contributions[accused],
        parts=tuple(done.parts[accused]),
        exhibits=(shown,),
        past=Past(beginning=genesis),
        state_chunks=tuple(state_chunks(run.states[STAGE])),
        bodies=(),
    )
    found = judge(_read(case.to_evidence(signed_run).to_bytes()))
    assert not found.guilty, found.reason
    assert max(found.figures[name] for name in found.figures if name.endswith("error")) < 1e-5
    for wrong in (replace(genesis, signature=bytes(64)), replace(genesis, run_key=accused)):
        with pytest.raises(RemoteError):
            judge(replace(case, past=Past(beginning=wrong)).to_evidence(signed_run))


def test_an_anchor_survives_the_wire_and_names_one_version(world: World) -> None:
    made = world.anchor
    assert Anchor.from_value(unpack(pack(made.to_value()), max_bytes=MAX_BYTES)) == made
    made.check(run_id=made.run_id, run_key=run_key().peer_id)
    with pytest.raises(RemoteError):
        made.check(run_id="another", run_key=run_key().peer_id)
    for changed in (replace(made, version=Version(9)), replace(made, name=bytes(32)), replace(made, run_id="another")):
        with pytest.raises(RemoteError):
            Anchor.from_value(changed.to_value())


def test_data_fraud_needs_the_run_s_own_tokens(world: World, tmp_path: Path) -> None:
    evidence = guilty_cases(world)["swapped targets"]()
    with pytest.raises(LocalError, match="--data"):
        judge(evidence)
    other = tmp_path / "other.tokens"
    other.write_bytes(bytes(1 << 16))
    with pytest.raises(LocalError, match="has digest"):
        judge(evidence, data=other)
    assert judge(evidence, data=world.data).guilty


def test_a_vote_signs_what_the_election_says(world: World) -> None:
    facts = world.rounds[1].chain.facts(world.run.settings, num_parts=1, phase_s=1.0)
    assert _vote(world, bytes(32)).signed_bytes() == facts.election.ballot("result", 3, bytes(32))


def test_a_reduction_of_other_inputs_is_not_the_reducer_s(world: World) -> None:
    made, inputs = world.reduction()
    fewer = replace(made, inputs=made.inputs[1:])
    for wrong, bodies in ((fewer, inputs[1:]), (made, inputs[1:]), (made, (*inputs[:-1], b"other"))):
        with pytest.raises(RemoteError):
            judge(ReducerFraud(reduction=wrong, bodies=bodies).to_evidence(world.signed))


# -- the command ------------------------------------------------------------------------------------------


def test_files_are_listed_and_shown(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, broken = tmp_path / f"good{SUFFIX}", tmp_path / f"broken{SUFFIX}"
    data = guilty_cases(world)["two contributions"]().to_bytes()
    good.write_bytes(data)
    broken.write_bytes(data[:-1])
    (tmp_path / "empty.evidence").write_bytes(b"")
    assert run_command(["evidence", "list", str(tmp_path), "--json"]) == ExitCode.OK
    listed = {Path(one["file"]).stem: one for one in json.loads(capsys.readouterr().out)}
    assert listed["good"]["accused"] == world.accused
    assert "closing" in listed["broken"]["broken"]
    assert "no evidence" in listed["empty"]["broken"]
    assert run_command(["evidence", "show", str(good)]) == ExitCode.OK
    shown = capsys.readouterr().out
    assert world.accused in shown
    assert "equivocation" in shown
    assert run_command(["evidence", "show", str(good), "--json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["facts"]["of"] == "contribution"
    assert run_command(["evidence", "show", str(broken)]) == ExitCode.FAILED
    assert run_command(["evidence", "show", str(tmp_path / "none")]) == ExitCode.BAD_INPUT
    capsys.readouterr()
    assert run_command(["evidence", "verify", str(good)]) == ExitCode.OK
    assert "proven: equivocation" in capsys.readouterr().out
    assert run_command(["evidence", "verify", str(good), "--run-key", world.accused]) == ExitCode.NOT_PROVEN
    assert run_command(["evidence", "verify", str(broken)]) == ExitCode.NOT_PROVEN
    capsys.readouterr()
    assert run_command(["evidence", "verify", str(good), str(good)]) == ExitCode.OK
    assert capsys.readouterr().out.count(f"{good}: proven: equivocation") == 2
    assert run_command(["evidence", "verify", str(broken), str(good), "--json"]) == ExitCode.NOT_PROVEN
    outcomes = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(outcome["file"], outcome["proven"]) for outcome in outcomes] == [(str(broken), False), (str(good), True)]
    assert run_command(["evidence", "verify"]) == ExitCode.BAD_INPUT


def test_what_is_in_evidence_acts_on_no_terminal_and_is_no_markup(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Anybody makes a file of evidence, and whoever looks at it had a traceback, or his terminal's commands given."""
    made = guilty_cases(world)["two contributions"]()
    file = tmp_path / f"[red]one{SUFFIX}"
    file.write_bytes(replace(made, facts={"[/free]\x1b[2J": 1, "link=x": "[conceal]"}).to_bytes())
    assert run_command(["evidence", "show", str(file)]) == ExitCode.OK
    shown = capsys.readouterr().out
    assert r"[/free]\x1b[2J" in shown
    assert "[red]one" in shown
    assert "\x1b" not in shown
    assert run_command(["evidence", "verify", str(file)]) == ExitCode.NOT_PROVEN
    assert run_command(["evidence", "list", str(tmp_path)]) == ExitCode.OK
    assert "\x1b" not in capsys.readouterr().out
