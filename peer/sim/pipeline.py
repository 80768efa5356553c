"""A microbatch's way through a line of peers, one of each stage, and its gradient's back; a line may be of one.

Each peer does what the daemon's does, checks of what came to it included, by the same `StagePass`; only calls are left
out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from peer.adversary.hooks import Adversary
from peer.pipeline.exchange_store import ExchangeStore
from peer.pipeline.stage_pass import Activation, Ids, StagePass, beside
from peer.round.work import ContributionEncoder, PartReducer
from peer.state.replica import StageReplica
from swarm.core.audit.hash_chain import HashChain
from swarm.core.errors import LocalError, RemoteError, TransientError
from swarm.core.ids import MicrobatchId, PeerId, StageIndex, Step
from swarm.identity.key import Identity
from swarm.model.stage import Saved
from swarm.model.subspace import StageInput
from verification.pipeline.exchanges import Exchange
from verification.pipeline.headers import HopHeader, document_bounds


@dataclass(frozen=True)
class SimulatedPeer:
    """What a peer has for itself."""

    identity: Identity
    stage: StageIndex
    index: int
    """Among the first peers of its stage."""
    stage_pass: StagePass
    encoder: ContributionEncoder
    reducer: PartReducer
    adversary: Adversary
    draws: HashChain
    exchanges: ExchangeStore

    @property
    def peer_id(self) -> PeerId:
        return self.identity.peer_id

    @property
    def replica(self) -> StageReplica:
        return self.stage_pass.replica

    @property
    def is_honest(self) -> bool:
        return self.adversary.attack is None


@dataclass(frozen=True)
class _Sent:
    """What a peer sent on, and keeps until the gradient comes."""

    peer: SimulatedPeer
    consumer: SimulatedPeer
    input_header: HopHeader | None
    """Of x; None at the source."""
    activation: Activation
    saved: Saved
    call: Exchange


def carry(
    line: Sequence[SimulatedPeer], number: MicrobatchId, step: Step, tokens_BL: Ids, targets_BL: Ids
) -> float | None:
    """The sum of token losses; None if a peer on the way refused what it was sent, or could make no finite message of
    it."""
    born = line[0].stage_pass.born(
        "train", number, attempt=0, step=step, era=0, tokens_BL=tokens_BL, targets_BL=targets_BL
    )
    try:
        sent: list[_Sent] = []
        last = line[-1].stage_pass
        x: StageInput = torch.from_numpy(born.tokens_BL)
        targets = last.tensors.targets(born.targets)
        header: HopHeader | None = None
        for peer, consumer in pairwise(line):
            activation, saved = peer.stage_pass.forward(born.birth, x, born.targets, header)
            call = activation.call(peer.stage_pass.forward_header(activation, consumer.peer_id))
            sent.append(_Sent(peer, consumer, header, activation, saved, call))
            (x, targets), header = consumer.stage_pass.opened(call, peer.peer_id), call.forward
        end = last.loss(born.birth, x, targets, header)
        answered: tuple[HopHeader, memoryview] | None = None
        if header is None:
            line[-1].exchanges.keep_born(born.birth, born.targets)
        else:
            assert end.gradient is not None
            answered = last.gradient_header(born.birth, end.version, end.gradient, header), end.gradient
        for one in reversed(sent):
            assert answered is not None
            answered = _back(one, *answered)
    except (LocalError, RemoteError, TransientError):
        return None
    return end.loss_sum


def held_out_loss(line: Sequence[SimulatedPeer], batches: Sequence[tuple[Ids, Ids]]) -> float:
    """Nats a token; of honest peers' weights, through the run's codecs."""
    loss_sum, count = 0.0, 0
    for tokens_BL, targets_BL in batches:
        ids, bounds = torch.from_numpy(tokens_BL), document_bounds(targets_BL)
        x: StageInput = ids
        for peer, consumer in pairwise(line):
            y_BLD, _ = peer.replica.model.forward(peer.replica.weights, x, keep=False, bounds=bounds)
            tensors, body = consumer.stage_pass.tensors, peer.stage_pass.tensors.sent(y_BLD)
            x = tensors.x(body, beside(tokens_BL, targets_BL, sends_ids=tensors.sends_ids))
        last = line[-1].replica
        targets = torch.from_numpy(targets_BL)
        found, num_tokens, _ = last.model.loss(last.weights, x, targets, keep=False, bounds=bounds)
        loss_sum, count = loss_sum + found, count + num_tokens
    return loss_sum / count


def _back(sent: _Sent, answer: HopHeader, grad_y_body: memoryview) -> tuple[HopHeader, memoryview] | None:
    """Header and bytes of the gradient of x; none at the source. Both ends of the call keep it."""
    stage_pass, activation = sent.peer.stage_pass, sent.activation
    answered = replace(sent.call, gradient=answer, answer=grad_y_body)
    sent.consumer.exchanges.keep(answered)
    grad_y = stage_pass.gradient_came(answered, sent.consumer.peer_id)
    sent.peer.exchanges.keep(answered)
    grad_x = stage_pass.backward(activation, sent.saved, grad_y, answer)
    if grad_x is None:
        return None
    assert sent.input_header is not None
    body = stage_pass.answered(grad_x)
    header = stage_pass.gradient_header(activation.birth, activation.version, body, sent.input_header, answer)
    return header, body
