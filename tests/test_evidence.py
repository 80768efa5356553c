"""Evidence: whole or refused, judged alike by whoever was never in the swarm, and of no use against the honest."""

import contextlib
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

from swarm.averaging.codecs import vector_codec
from swarm.checkpoint.state import state_chunks, state_digest
from swarm.core.canonical import pack, unpack
from swarm.core.contribution import Contribution, Result
from swarm.core.errors import LocalError, RemoteError
from swarm.core.ids import MicrobatchId, PeerId, Step
from swarm.core.settings import CodecSettings
from swarm.core.stage_chain import Genesis
from swarm.data.batches import BatchReader
from swarm.data.token_file import TokenFile, TokenWriter
from swarm.host_protocol import SignedRun
from swarm.identity import Identity
from swarm.manifest_value import run_id, settings_bytes
from tests import exhibits
from tests.exhibits import Done, SmallRun, small_settings
from tests.round_members import resigned, roster_of, signed, vote_by
from tests.round_world import identity_of, run_key
from verification.anchor import Anchor
from verification.evidence import MAGIC, SUFFIX, Bytes, Evidence
from verification.headers import BirthRecord
from verification.headers import signed as signed_record
from verification.kinds.data_fraud import DataFraud
from verification.kinds.equivocation import CastVote, Equivocation
from verification.kinds.protocol_violation import ProtocolViolation
from verification.kinds.reducer_fraud import ReducerFraud
from verification.kinds.replay_mismatch import ReplayMismatch
from verification.papers import Exhibit
from verification.past import Past
from verification.reduction import Reduction
from verification.replay.judge import judge
from verification.replay.verdict import Verdict

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

    def reduction(self, part: int = 0) -> tuple[Reduction, tuple[Bytes, ...]]:
        """An honest reducer's word for a part, and its inputs."""
        done = self.rounds[1]
        roster = done.result.roster
        weights = done.chain.weights_of(Result(roster, (), roster.leader))
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
        )
        return signed_record(record, source)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    data = tmp_path_factory.mktemp("data") / "train.tokens"
    with TokenWriter(data, 1) as writer:
        writer.write(np.random.default_rng(0).integers(0, 97, 1 << 16))
    given = small_settings(2, codecs=CODED)
    given = SmallRun(replace(given, data=replace(given.data, train_digest=writer.digest))).settings
    unsigned = SignedRun(settings_bytes(given), run_key().peer_id)
    signed_run = replace(unsigned, signature=run_key().sign(unsigned.signed_bytes()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exhibits, "RUN_ID", run_id(given))
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
    return resigned(replace(made, part_digests=tuple(hashlib.sha256(part).digest() for part in parts)))


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


def _lying_hop(world: World) -> tuple[Contribution, Exhibit]:
    """An exhibit whose gradient was negated before it was signed, and the contribution that lists it."""
    honest = world.shown[world.accused][0]
    assert honest.papers.gradient_out is not None
    grad_x = bytearray(honest.grad_x)
    grad_x[: len(grad_x) // 16] = bytes(reversed(grad_x[: len(grad_x) // 16]))
    from swarm.averaging.activations import activation_codec

    codec = activation_codec("int8")
    shape = honest.papers.gradient_out.shape
    assert len(shape) == 3
    body = codec.encode(-codec.decode(honest.grad_x, shape))
    header = replace(honest.papers.gradient_out, body_digest=hashlib.sha256(body).digest())
    papers = replace(honest.papers, gradient_out=signed_record(header, identity_of(world.accused)))
    return world.contribution, replace(honest, papers=papers, grad_x=body)


def _vote(world: World, value: bytes) -> CastVote:
    facts = world.rounds[1].chain.facts(num_parts=1, phase_s=1.0, max_tokens=99)
    vote = vote_by(facts, world.accused, "result", 3, value)
    return CastVote.of(facts.election, "result", 3, value, vote, None)


def _rosters(world: World) -> Equivocation:
    facts = world.rounds[1].chain.facts(num_parts=1, phase_s=1.0, max_tokens=99)
    one = roster_of(facts, commits=world.rounds[1].contributions)
    return Equivocation(one=one, other=signed(replace(one, reason="another")))


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
    bad_hop = signed_record(replace(gradient, body_digest=hashlib.sha256(garbage).digest()), identity_of(world.accused))
    swapped = signed_record(replace(world.birth(7), targets_digest=bytes(32)), world.run.peers[0][0])
    run = world.signed
    return {
        "two contributions": lambda: _equivocation(world).to_evidence(run),
        "two votes": lambda: Equivocation(one=_vote(world, bytes(32)), other=_vote(world, b"1" * 32)).to_evidence(run),
        "two rosters": lambda: _rosters(world).to_evidence(run),
        "two reductions": lambda: Equivocation(one=world.reduction()[0], other=lying_reduction).to_evidence(run),
        "undecodable part": lambda: ProtocolViolation(
            message=_with_parts(world.contribution, broken), part=0, body=broken[0]
        ).to_evidence(run),
        "undecodable hop": lambda: ProtocolViolation(message=bad_hop, part=0, body=garbage).to_evidence(run),
        "wrong reduction": lambda: ReducerFraud(reduction=lying_reduction, bodies=inputs).to_evidence(run),
        "swapped targets": lambda: DataFraud(birth=swapped).to_evidence(run),
        "negated contribution": lambda: world.mismatch(_with_parts(world.contribution, negated), negated).to_evidence(
            run
        ),
        "negated gradient": lambda: world.mismatch(listing, (), [lying_hop]).to_evidence(run),
    }


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
        "part": lambda: ProtocolViolation(message=world.contribution, part=0, body=world.parts[0]).to_evidence(run),
        "hop": lambda: ProtocolViolation(message=hop, part=0, body=world.shown[world.accused][0].grad_x).to_evidence(
            run
        ),
        "reduction": lambda: ReducerFraud(reduction=reduction, bodies=inputs).to_evidence(run),
        "birth": lambda: DataFraud(birth=world.birth(7)).to_evidence(run),
        "contribution": lambda: world.mismatch(world.contribution, world.parts).to_evidence(run),
        "gradient": lambda: world.mismatch(world.contribution, (), world.shown[world.accused][1:]).to_evidence(run),
    }


GUILTY = (
    "two contributions",
    "two votes",
    "two rosters",
    "two reductions",
    "undecodable part",
    "undecodable hop",
    "wrong reduction",
    "swapped targets",
    "negated contribution",
    "negated gradient",
)
HONEST = ("two steps", "the same twice", "part", "hop", "reduction", "birth", "contribution", "gradient")
SMALL = GUILTY[:8]


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
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    outcomes = dict(zip(cases, json.loads(done.stdout), strict=True))
    for name, (code, outcome) in outcomes.items():
        assert (code, outcome["proven"]) == ((0, True) if name in GUILTY else (3, False)), (name, outcome)
        assert outcome["run_key"] == run_key().peer_id
        assert outcome["accused"] == cases[name]().accused
