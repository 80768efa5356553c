"""Honest papers and bytes for tests: a small run whose peers' work is done here, one after another.

    run = SmallRun(small_settings(3), num_peers=2)
    exhibit = honest_exhibit(1)                       # of one microbatch at a middle stage of a run of its own
    first, middle, last = run.microbatch(number=0)    # one exhibit of each stage's peer; it counts in the next round
    done = run.step(0)                                # the round of stage 0: contributions, certified result, bodies

Replicas, codecs, headers, encoding, reduction and certificates are the real ones; only messages are left out.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from peer.pipeline.stage_pass import beside, numeric_class
from peer.round.work import ContributionEncoder, PartReducer
from peer.state.replica import StageReplica
from swarm.averaging.activations import ActivationCodec, activation_codec
from swarm.averaging.certified_gradient import squares_of
from swarm.averaging.seeds import part_seeds, reduced_seed
from swarm.bulk_digest import bulk_digest
from swarm.checkpoint.state import StageState, state_digest
from swarm.core.ids import MicrobatchId, PeerId, StageIndex, Step, Version
from swarm.core.pipeline.leases import LeaseTable, OpenChunk
from swarm.core.round.contribution import Contribution, ReducedPart, Result, Work
from swarm.core.settings import (
    BatchSettings,
    CodecSettings,
    DataSettings,
    ModelSettings,
    OptimizerSettings,
    RunSettings,
)
from swarm.core.state.stage_chain import Genesis, StageChain
from swarm.identity.key import Identity, verify
from swarm.model.initial import initial_weights
from swarm.model.stage import Saved, StageModel
from swarm.model.subspace import StageInput, given_on
from swarm.optim.stage_step import first_state, stage_clip_norm
from tests.swarm.core.audit.chances import HOST_CHAIN, chance_of, ticket_of
from tests.swarm.core.round.round_members import certified, result_of, roster_of
from tests.swarm.core.round.round_world import identities, run_key, witness_identities
from tests.swarm.model.tiny_models import VOCAB_SIZE, tiny_model
from verification.pipeline.exchanges import Exchange
from verification.pipeline.headers import BirthRecord, Direction, HopHeader, document_bounds
from verification.round.papers import NO_HEADER, Bytes, Exhibit, Papers

RUN_ID = "ab" * 32
EXACT = CodecSettings(activations="fp32", activation_gradients="fp32", averaging="fp32")
SEQUENCE_LENGTH = 16


def small_settings(num_stages: int = 2, *, codecs: CodecSettings = EXACT, **fields: Any) -> RunSettings:
    """Four layers of width 64 in 1 to 3 stages, 4 microbatches of 2 x 16 tokens a step; `fields` of RunSettings."""
    given: dict[str, Any] = {
        "name": "small",
        "protocol": 1,
        "model": tiny_model("llama", num_stages),
        "data": DataSettings(
            tokenizer="none",
            vocab_size=VOCAB_SIZE,
            token_bytes=1,
            num_train_tokens=1 << 16,
            num_held_out_tokens=1 << 10,
            train_digest=bytes(32),
            held_out_digest=bytes(32),
            sequence_length=SEQUENCE_LENGTH,
            chunk_tokens=1 << 12,
            seed=0,
        ),
        "batch": BatchSettings(microbatch_size=2, target_tokens=4 * 2 * SEQUENCE_LENGTH),
        "optimizer": OptimizerSettings(learning_rate=0.01, warmup_steps=2, total_steps=50),
    }
    return RunSettings(codecs=codecs, **(given | fields))


MOST_NUMBERS = 1 << 12
"""Of microbatches that a test takes through."""


@dataclass(frozen=True)
class Done:
    """A round of one stage."""

    chain: StageChain
    """Of the version the round started from."""
    result: Result
    """Certified."""
    bodies: Sequence[Bytes]
    """Of the result's parts."""
    contributions: dict[PeerId, Contribution]
    """Signed; of peers with work."""
    parts: dict[PeerId, Sequence[Bytes]]
    """Of each contribution, encoded."""


def _everybodys(sources: Sequence[Identity]) -> LeaseTable:
    """Whoever takes a microbatch through may use its id."""
    ids = ((0, MOST_NUMBERS),)
    return LeaseTable(len(sources), tuple(OpenChunk(at, source.peer_id, ids) for at, source in enumerate(sources)))


class SmallRun:
    """A run with some peers in each stage, who do all of its work honestly."""

    def __init__(self, settings: RunSettings, *, num_peers: int = 1) -> None:
        """At most 16 peers in all. Stage s has `peers[s]`, whose replicas are `replicas[s]`, in one order."""
        num_stages = settings.model.num_stages
        self.states = _first_states(settings)
        self.settings = replace(settings, initial_state_digests=tuple(map(state_digest, self.states)))
        everyone = identities(num_stages * num_peers)
        self.peers = [everyone[stage * num_peers : (stage + 1) * num_peers] for stage in range(num_stages)]
        self.chains = [self._first_chain(stage) for stage in range(num_stages)]
        self.replicas = [self._replicas_of(stage, num_peers) for stage in range(num_stages)]

    def snapshot(self, stage: int) -> tuple[StageState, StageChain]:
        """The stage at its present version, as a replay of it begins: later steps leave it alone."""
        return self.replicas[stage][0].frozen_state(), self.chains[stage]

    def microbatch(
        self, number: int, *, index: int = 0, step: Step | None = None, attempt: int = 0
    ) -> tuple[Exhibit, ...]:
        """Take a microbatch through peer `index` of every stage; it counts in the round of `step` (by default the
        next one's) and its exhibits, one of each stage, pass `Exhibit.check` and `check_work`."""
        line = [replicas[index] for replicas in self.replicas]
        peers = [stage[index] for stage in self.peers]
        step = Step(line[0].version) if step is None else step
        tokens, targets = tokens_and_targets(self.settings, number)
        birth = self._birth(number, attempt, step, tokens, targets, peers[0])
        forward = activation_codec(self.settings.codecs.activations)
        backward = activation_codec(self.settings.codecs.activation_gradients)
        shape = (*tokens.shape, line[0].model.hop_width)
        sums = [replica.sum_of(step).gradient.flat for replica in line]
        versions, saved = [], []
        x_bodies: list[Bytes] = [tokens.astype("<i4").tobytes()]
        headers: list[HopHeader] = []
        x: StageInput = torch.from_numpy(tokens)
        for stage, replica in enumerate(line[:-1]):
            version, weights = replica.weights_for(step)
            y, kept = replica.model.forward(weights, x, keep=True, bounds=birth.document_bounds)
            assert kept is not None
            versions.append(version)
            saved.append(kept)
            x_bodies.append(forward.encode(y))
            parents = (birth.digest(), *(header.digest() for header in headers[-1:]))
            headers.append(
                self._header(
                    birth, stage, version, "forward", peers[stage], peers[stage + 1], parents, shape, x_bodies[-1]
                )
            )
            values = forward.decode(x_bodies[-1], shape)
            x = given_on(self.settings.model, values, torch.from_numpy(tokens))
        version, weights = line[-1].weights_for(step)
        versions.append(version)
        _, _, kept_loss = line[-1].model.loss(
            weights, x, torch.from_numpy(targets), keep=True, bounds=birth.document_bounds
        )
        assert kept_loss is not None
        grad = line[-1].model.loss_backward(kept_loss, sums[-1])
        gradients: list[tuple[HopHeader, Bytes]] = []
        """Of the gradient of each stage's x, from the last stage to the second."""
        for stage in reversed(range(1, len(line))):
            assert grad is not None
            body = backward.encode(grad)
            parents = (headers[stage - 1].digest(), *(after.digest() for after, _ in gradients[-1:]))
            header = self._header(
                birth, stage, versions[stage], "gradient", peers[stage], peers[stage - 1], parents, shape, body
            )
            gradients.append((header, body))
            grad = self._backward(line[stage - 1], saved[stage - 1], backward, body, shape, sums[stage - 1])
        gradients.reverse()
        exhibits = []
        for stage, replica in enumerate(line):
            first, last = stage == 0, stage == len(line) - 1
            papers = Papers(
                birth=birth,
                input_header=None if first else headers[stage - 1],
                forward_header=None if last else headers[stage],
                gradient_in=None if last else gradients[stage][0],
                gradient_out=None if first else gradients[stage - 1][0],
            )
            exhibits.append(
                Exhibit(
                    papers=papers,
                    version=versions[stage],
                    x=x_bodies[stage],
                    targets=beside(tokens, targets, sends_ids=self.settings.model.sends_ids),
                    y=b"" if last else x_bodies[stage + 1],
                    grad_y=b"" if last else gradients[stage][1],
                    grad_x=b"" if first else gradients[stage - 1][1],
                )
            )
            replica.record(step, work_of(papers, versions[stage]))
        return tuple(exhibits)

    def step(self, stage: int) -> Done:
        """Carry out the stage's round with all that its peers have done for its step; they take the step."""
        chain, replicas, step = self.chains[stage], self.replicas[stage], Step(self.chains[stage].version)
        facts = chain.facts(
            self.settings,
            num_parts=replicas[0].num_parts,
            phase_s=1.0,
        )
        made: dict[PeerId, Contribution] = {}
        parts: dict[PeerId, Sequence[Bytes]] = {}
        for identity, replica in zip(self.peers[stage], replicas, strict=True):
            closed = replica.close(step)
            me, num_parts = identity.peer_id, replica.num_parts
            seeds = part_seeds(chain.run_id, chain.stage, chain.version, me, num_parts=num_parts)
            encoded, digests = ContributionEncoder(replica).encode(step, closed, seeds)
            work = tuple(closed.work[key] for key in sorted(closed.work))
            known = me in chain.basis.link_of
            ticket = None if known else ticket_of(me, run_key(), run_id=chain.run_id, stage=stage)
            facts_of_it = chain.run_id, chain.stage, step, chain.name, me, work, tuple(digests)
            unsigned = Contribution(*facts_of_it, chance_of(me, step, ticket=ticket))
            made[me] = replace(unsigned, signature=identity.sign(unsigned.signed_bytes()))
            if work:
                parts[me] = encoded
        roster = roster_of(facts, commits=made)
        tokens = chain.weights_of(roster, self.settings)
        contributors = tuple(one.peer_id for one in roster.contributions)
        bodies, reduced = [], []
        for part in range(replicas[0].num_parts if contributors else 0):
            body, found = PartReducer(replicas[0]).reduce(
                part,
                [(tokens[peer], parts[peer][part]) for peer in contributors if tokens[peer] > 0],
                norm_cap=replicas[0].norm_cap(),
                seed=reduced_seed(chain.run_id, chain.stage, chain.version, part),
            )
            bodies.append(body)
            cut = replicas[0].parts()
            squares = squares_of(cut.result_codec(part), body, cut.size(part))
            reduced.append(ReducedPart(part, found, contributors, squares=squares))
        result = certified(facts, result_of(facts, roster, parts=tuple(reduced)))
        facts.check_result(result, verify, certified=True)
        self.chains[stage] = chain.advance(result, self.settings)
        for replica in replicas:
            gradient = replica.certified_gradient(result.parts, bodies)
            replica.swap(replica.next_version(gradient, self.chains[stage].name))
        return Done(chain, result, bodies, {peer: one for peer, one in made.items() if one.work}, parts)

    def _replicas_of(self, stage: int, num_peers: int) -> list[StageReplica]:
        state = replace(self.states[stage], name=self.chains[stage].name)
        model, clip_norm = _stage_model(self.settings.model, stage), _clip_norm(self.settings, stage)
        return [StageReplica(self.settings, model, state, clip_norm=clip_norm) for _ in range(num_peers)]

    def _first_chain(self, stage: int) -> StageChain:
        return StageChain.begin(
            Genesis(
                run_id=RUN_ID,
                stage=StageIndex(stage),
                version=Version(0),
                state_digest=self.settings.initial_state_digests[stage],
                members=tuple(sorted(identity.peer_id for identity in self.peers[stage])),
                leases=_everybodys(self.peers[0]) if stage == 0 else LeaseTable(),
                host=witness_identities(1)[0].peer_id,
                run_key=run_key().peer_id,
                neighbours=(),
                host_chain_end=HOST_CHAIN.end,
            ),
            self.settings,
        )

    def _birth(self, number: int, attempt: int, step: Step, tokens: Any, targets: Any, source: Identity) -> BirthRecord:
        return BirthRecord(
            run_id=RUN_ID,
            source=source.peer_id,
            kind="train",
            microbatch_id=MicrobatchId(number),
            attempt=attempt,
            step=step,
            shape=tokens.shape,
            num_targets=int((targets >= 0).sum()),
            tokens_digest=hashlib.sha256(tokens.astype("<i4").tobytes()).digest(),
            targets_digest=hashlib.sha256(targets.astype("<i4").tobytes()).digest(),
            document_bounds=document_bounds(targets),
        ).signed_by(source)

    def _header(
        self,
        birth: BirthRecord,
        stage: int,
        version: Version,
        direction: Direction,
        producer: Identity,
        consumer: Identity,
        parents: tuple[bytes, ...],
        shape: tuple[int, int, int],
        body: Bytes,
    ) -> HopHeader:
        codecs = self.settings.codecs
        return HopHeader(
            run_id=RUN_ID,
            stage=StageIndex(stage),
            version=version,
            microbatch_id=birth.microbatch_id,
            attempt=birth.attempt,
            direction=direction,
            producer=producer.peer_id,
            consumer=consumer.peer_id,
            parents=parents,
            shape=shape,
            dtype="fp32",
            codec=codecs.activations if direction == "forward" else codecs.activation_gradients,
            numeric_class=numeric_class(torch.device("cpu"), self.settings.model.compute_dtype),
            body_digest=bulk_digest(body),
        ).signed_by(producer)

    def _backward(
        self,
        replica: StageReplica,
        saved: Saved,
        codec: ActivationCodec,
        body: Bytes,
        shape: tuple[int, int, int],
        into: torch.Tensor,
    ) -> torch.Tensor | None:
        return replica.model.backward(saved, codec.decode(body, shape), into)


def honest_exhibit(stage: int = 0, settings: RunSettings | None = None, *, number: int = 0) -> Exhibit:
    """What the honest peer of a stage shows of one microbatch at version 0, in a `SmallRun` of three stages or of
    these settings, with one peer a stage."""
    return SmallRun(settings or small_settings(3)).microbatch(number)[stage]


def received(exhibit: Exhibit) -> Exchange:
    """What the exhibit's peer took in and answered, at any stage but the first."""
    papers = exhibit.papers
    assert papers.input_header is not None, "nothing comes in at stage 0"
    return Exchange(
        birth=papers.birth,
        forward=papers.input_header,
        gradient=papers.gradient_out,
        activation=exhibit.x,
        targets=exhibit.targets,
        answer=exhibit.grad_x,
    )


def sent(exhibit: Exhibit) -> Exchange:
    """What the exhibit's peer sent on and got back, at any stage but the last."""
    papers = exhibit.papers
    assert papers.forward_header is not None, "nothing is sent on at the last stage"
    return Exchange(
        birth=papers.birth,
        forward=papers.forward_header,
        gradient=papers.gradient_in,
        activation=exhibit.y,
        targets=exhibit.targets,
        answer=exhibit.grad_y,
    )


def work_of(papers: Papers, version: Version) -> Work:
    """The entry that a contribution has for these papers."""
    birth = papers.birth
    output = papers.gradient_in.digest() if papers.gradient_in is not None else NO_HEADER
    return Work(birth.microbatch_id, birth.attempt, version, birth.num_targets, papers.input_digest, output)


def tokens_and_targets(settings: RunSettings, number: int) -> tuple[Any, Any]:
    """int64 (B, L) each, drawn from the number; a few targets are not counted, and, where a run has documents by
    themselves, some begin with these."""
    rng = np.random.default_rng(number)
    shape = (settings.batch.microbatch_size, settings.data.sequence_length)
    tokens, targets = (rng.integers(0, settings.data.vocab_size, shape) for _ in range(2))
    targets[rng.random(shape) < 0.1] = -100
    if settings.data.documents == "masked":
        targets[rng.random(shape) < 0.1] = -101
    return tokens, targets


def _first_states(settings: RunSettings) -> list[StageState]:
    """Of version 0, without a name."""
    states = []
    for stage, flat in enumerate(_first_weights(settings.model)):
        layout = _stage_model(settings.model, stage).layout
        states.append(first_state(settings, layout, flat))
    return states


@cache
def _first_weights(model: ModelSettings) -> list[NDArray[np.float32]]:
    return list(initial_weights(model, 0, None))


@cache
def _stage_model(model: ModelSettings, stage: int) -> StageModel:
    return StageModel(model, stage)


@cache
def _clip_norm(settings: RunSettings, stage: int) -> float:
    return stage_clip_norm(settings, stage)
