"""This is where a microbatch passes through a line of peers, one of each stage, and its gradient back.

Hooks, codecs, headers and exhibits are those of `peer.source` and `peer.hops`, in their order; only calls are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from peer.adversary import Adversary, At
from peer.downstream import numeric_class
from peer.exhibits import ExhibitStore
from peer.replica import StageReplica
from swarm.averaging.activations import activation_codec
from swarm.bulk_digest import bulk_digest
from swarm.core.contribution import Work
from swarm.core.errors import LocalError, RemoteError
from swarm.core.ids import MicrobatchId, PeerId, StageIndex, Step, Version
from swarm.core.settings import RunSettings
from swarm.identity import Identity
from swarm.model.stage import Saved
from verification.draws import HashChain
from verification.headers import BirthRecord, Direction, HopHeader, ids_bytes, signed
from verification.papers import Bytes, Exhibit, Papers


@dataclass(frozen=True)
class SimulatedPeer:
    """What a peer has for itself."""

    identity: Identity
    stage: StageIndex
    index: int
    """Among the first peers of its stage."""
    replica: StageReplica
    adversary: Adversary
    draws: HashChain
    exhibits: ExhibitStore

    @property
    def peer_id(self) -> PeerId:
        return self.identity.peer_id

    @property
    def is_honest(self) -> bool:
        return self.adversary.attack is None


@dataclass(frozen=True)
class _Sent:
    """What a peer sent on, and keeps until the gradient comes."""

    version: Version
    x: Bytes
    saved: Saved
    header: HopHeader
    body: Bytes


class Pipeline:
    """Carries microbatches."""

    def __init__(self, settings: RunSettings, run_id: str, hidden_size: int) -> None:
        self._run_id = run_id
        self._forward = activation_codec(settings.codecs.activations)
        self._backward = activation_codec(settings.codecs.activation_gradients)
        self._shape = (settings.batch.microbatch_size, settings.data.sequence_length, hidden_size)
        self._numeric_class = numeric_class("cpu", settings.model.compute_dtype)

    def carry(
        self,
        line: Sequence[SimulatedPeer],
        number: MicrobatchId,
        step: Step,
        batch: tuple[NDArray[np.int64], NDArray[np.int64]],
    ) -> float | None:
        """The sum of token losses; None if a peer on the way could make no finite message of what it was sent."""
        tokens_BL, targets_BL = batch
        source, at = line[0], At(step, number)
        vocab_size = source.replica.model.vocab_size
        targets_BL = source.adversary.targets(at, torch.from_numpy(targets_BL), vocab_size=vocab_size).numpy()
        birth = self._birth(source, number, step, tokens_BL, targets_BL)
        try:
            sent = self._there(line, birth, at, tokens_BL)
            return self._back(line, birth, at, tokens_BL, targets_BL, sent)
        except (LocalError, RemoteError):
            return None

    def held_out_loss(
        self, line: Sequence[SimulatedPeer], batches: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]]
    ) -> float:
        """Nats a token; of honest peers' weights, through the run's codecs."""
        loss_sum, count = 0.0, 0
        for tokens_BL, targets_BL in batches:
            x = torch.from_numpy(tokens_BL)
            for peer in line[:-1]:
                y_BLD, _ = peer.replica.model.forward(peer.replica.weights_for(_now(peer))[1], x, keep=False)
                x = self._forward.decode(self._forward.encode(y_BLD), self._shape)
            last = line[-1].replica
            weights = last.weights_for(_now(line[-1]))[1]
            found, num_tokens, _ = last.model.loss(weights, x, torch.from_numpy(targets_BL), keep=False)
            loss_sum, count = loss_sum + found, count + num_tokens
        return loss_sum / count

    # -- there and back -----------------------------------------------------------------------------------

    def _there(
        self, line: Sequence[SimulatedPeer], birth: BirthRecord, at: At, tokens_BL: NDArray[np.int64]
    ) -> list[_Sent]:
        sent: list[_Sent] = []
        x, x_body = torch.from_numpy(tokens_BL), ids_bytes(tokens_BL)
        for peer, consumer in pairwise(line):
            model = peer.replica.model
            version, weights = peer.replica.weights_for(at.step)
            weights = peer.adversary.weights(at, model, version, weights)
            y, saved = model.forward(weights, x, keep=True)
            assert saved is not None
            y = peer.adversary.activation(at, weights, x, y)
            body = self._forward.encode(y)
            parents = (birth.digest(), *(before.header.digest() for before in sent[-1:]))
            header = self._header(peer, consumer.peer_id, birth, version, "forward", parents, body)
            sent.append(_Sent(version, x_body, saved, header, body))
            x, x_body = self._forward.decode(body, self._shape), bytes(body)
        return sent

    def _back(
        self,
        line: Sequence[SimulatedPeer],
        birth: BirthRecord,
        at: At,
        tokens_BL: NDArray[np.int64],
        targets_BL: NDArray[np.int64],
        sent: Sequence[_Sent],
    ) -> float:
        targets, before = ids_bytes(targets_BL), sent[-1]
        last, adversary = line[-1].replica, line[-1].adversary
        version, weights = last.weights_for(at.step)
        weights = adversary.weights(at, last.model, version, weights)
        labels = adversary.targets(at, torch.from_numpy(targets_BL), vocab_size=last.model.vocab_size)
        x = self._forward.decode(before.body, self._shape)
        loss_sum, num_targets, kept = last.model.loss(weights, x, labels, keep=True)
        assert kept is not None
        into, grad_y = last.sum_of(at.step).gradient.flat, kept.grad_y_BLD
        adversary.adding(at, into)
        found = last.model.loss_backward(replace(kept, grad_y_BLD=adversary.output_gradient(at, grad_y)), into)
        adversary.added(at, into, num_tokens=num_targets)
        assert found is not None
        grad_x: torch.Tensor = adversary.activation_gradient(at, found, grad_y)
        last.record(at.step, _work(birth, version, before.header.digest(), bytes(32)))
        body: Bytes = self._backward.encode(grad_x)
        own = self._header(line[-1], line[-2].peer_id, birth, version, "gradient", (before.header.digest(),), body)
        papers = Papers(
            birth=birth, input_header=before.header, forward_header=None, gradient_in=None, gradient_out=own
        )
        line[-1].exhibits.keep(
            at.step, Exhibit(papers=papers, x=before.body, targets=targets, y=b"", grad_y=b"", grad_x=body)
        )
        for place in reversed(range(len(sent))):
            upstream = sent[place - 1].header if place else None
            own, body = self._backward_at(line[place], birth, at, sent[place], upstream, own, body, targets)
        return loss_sum

    def _backward_at(
        self,
        peer: SimulatedPeer,
        birth: BirthRecord,
        at: At,
        sent: _Sent,
        input_header: HopHeader | None,
        gradient_in: HopHeader,
        grad_y_body: Bytes,
        targets: bytes,
    ) -> tuple[HopHeader, Bytes]:
        """Header and bytes of the gradient of x; at stage 0 those that came, for nobody."""
        replica, adversary = peer.replica, peer.adversary
        grad_y = self._backward.decode(grad_y_body, self._shape)
        into = replica.sum_of(at.step).gradient.flat
        adversary.adding(at, into)
        grad_x = replica.model.backward(sent.saved, adversary.output_gradient(at, grad_y), into)
        adversary.added(at, into, num_tokens=birth.num_targets)
        input_digest = input_header.digest() if input_header is not None else birth.digest()
        if grad_x is not None:
            grad_x = adversary.activation_gradient(at, grad_x, grad_y)
        replica.record(at.step, _work(birth, sent.version, input_digest, gradient_in.digest()))
        own, body = None, memoryview(b"")
        if grad_x is not None:
            assert input_header is not None
            body = self._backward.encode(grad_x)
            parents = (input_header.digest(), gradient_in.digest())
            own = self._header(peer, input_header.producer, birth, sent.version, "gradient", parents, body)
        papers = Papers(
            birth=birth,
            input_header=input_header,
            forward_header=sent.header,
            gradient_in=gradient_in,
            gradient_out=own,
        )
        peer.exhibits.keep(
            at.step, Exhibit(papers=papers, x=sent.x, targets=targets, y=sent.body, grad_y=grad_y_body, grad_x=body)
        )
        return (gradient_in, grad_y_body) if own is None else (own, body)

    # -- papers -------------------------------------------------------------------------------------------

    def _birth(
        self,
        source: SimulatedPeer,
        number: MicrobatchId,
        step: Step,
        tokens_BL: NDArray[np.int64],
        targets_BL: NDArray[np.int64],
    ) -> BirthRecord:
        return signed(
            BirthRecord.of_batch(
                self._run_id,
                source.peer_id,
                "train",
                number,
                attempt=0,
                step=step,
                tokens_BL=tokens_BL,
                targets_BL=targets_BL,
            ),
            source.identity,
        )

    def _header(
        self,
        producer: SimulatedPeer,
        consumer: PeerId,
        birth: BirthRecord,
        version: Version,
        direction: Direction,
        parents: tuple[bytes, ...],
        body: Bytes,
    ) -> HopHeader:
        codec = self._forward if direction == "forward" else self._backward
        return signed(
            HopHeader(
                run_id=self._run_id,
                stage=producer.stage,
                version=version,
                microbatch_id=birth.microbatch_id,
                attempt=birth.attempt,
                direction=direction,
                producer=producer.peer_id,
                consumer=consumer,
                parents=parents,
                shape=self._shape,
                dtype="fp32",
                codec=codec.name,
                numeric_class=self._numeric_class,
                body_digest=bulk_digest(body),
            ),
            producer.identity,
        )


def _work(birth: BirthRecord, version: Version, input_header: bytes, output_header: bytes) -> Work:
    return Work(birth.microbatch_id, birth.attempt, version, birth.num_targets, input_header, output_header)


def _now(peer: SimulatedPeer) -> Step:
    return Step(peer.replica.version)
