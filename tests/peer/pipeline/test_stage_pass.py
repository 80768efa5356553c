"""One pass of a microbatch: daemon and virtual swarm come to the same bytes by the same function."""

import asyncio
from functools import partial

import pytest
import torch

from peer.adversary.attacked_pass import AttackedPass
from peer.adversary.hooks import HONEST
from peer.adversary.kinds import parse
from peer.pipeline.compute import Urgency
from peer.pipeline.exchange_store import ExchangeStore
from peer.pipeline.stage_pass import StagePass
from peer.round.work import ContributionEncoder, PartReducer
from peer.sim.pipeline import SimulatedPeer, carry
from swarm.core.audit.hash_chain import HashChain
from swarm.core.ids import MicrobatchId, StageIndex
from tests.peer.pipeline.hop_line import STEP, HopLine, LinePeer, hop_line
from tests.verification.exhibits import RUN_ID, SmallRun, tokens_and_targets
from verification.pipeline.exchanges import Exchange

NUMBERS = [MicrobatchId(number) for number in range(4)]
ATTACKED = 1
"""The stage whose peers misbehave, if any do."""


async def brought_home(line: HopLine, source: LinePeer, number: MicrobatchId) -> None:
    """As `peer.pipeline.source` does it."""
    stage_pass, (tokens_BL, targets_BL) = source.stage_pass, tokens_and_targets(line.settings, number)
    born = stage_pass.born("train", number, attempt=0, step=STEP, era=0, tokens_BL=tokens_BL, targets_BL=targets_BL)
    x = torch.from_numpy(born.tokens_BL)
    activation, saved = await source.thread.run(
        Urgency.BIRTH, lambda: stage_pass.forward(born.birth, x, born.targets, None)
    )
    assert source.downstream is not None
    answer = await source.downstream.send(activation)
    await source.work.backward(activation, saved, answer)


def simulated(line: HopLine, attack: str | None) -> list[list[SimulatedPeer]]:
    """The same peers at their beginning, in a virtual swarm."""
    run = SmallRun(line.settings, num_peers=2)
    peers = []
    for stage, pairs in enumerate(zip(*pair, strict=True) for pair in zip(run.peers, run.replicas, strict=True)):
        adversary = HONEST if attack is None or stage != ATTACKED else parse(attack)
        peers.append(
            [
                SimulatedPeer(
                    identity=identity,
                    stage=StageIndex(stage),
                    index=index,
                    stage_pass=AttackedPass(adversary, run.settings, RUN_ID, identity, replica),
                    encoder=ContributionEncoder(replica),
                    reducer=PartReducer(replica),
                    adversary=adversary,
                    draws=HashChain(bytes(32), 4),
                    exchanges=ExchangeStore.of_run(run.settings, identity.peer_id),
                )
                for index, (identity, replica) in enumerate(pairs)
            ]
        )
    return peers


def held(peer: LinePeer | SimulatedPeer, number: MicrobatchId) -> list[Exchange]:
    """Its calls of the microbatch, with all that is signed and sent in them."""
    return sorted(peer.exchanges.of(STEP, number), key=lambda exchange: exchange.forward.digest())


@pytest.mark.parametrize("attack", [None, "activation_negate", "gradient_noise", "dropped_batch"])
def test_daemon_and_virtual_swarm_give_the_same_bytes_for_the_same_microbatch(attack: str | None) -> None:
    async def main() -> None:
        async with hop_line() as line:
            for peer in line.peers[ATTACKED] if attack is not None else ():
                made = partial(AttackedPass, parse(attack)) if attack is not None else StagePass
                peer.work.stage_pass = peer.stage_pass = made(line.settings, RUN_ID, peer.identity, peer.replica)
            virtual = simulated(line, attack)
            for number in NUMBERS:
                await brought_home(line, line.peers[0][0], number)
                # Which peer of a stage takes it is the wiring's choice: in the virtual swarm the same one does.
                taken = [[held(peer, number) for peer in peers] for peers in line.peers]
                places = [next(place for place, calls in enumerate(row) if calls) for row in taken]
                way = [peers[place] for peers, place in zip(virtual, places, strict=True)]
                assert carry(way, number, STEP, *tokens_and_targets(line.settings, number)) is not None
                assert [held(peer, number) for peer in way] == [
                    row[place] for row, place in zip(taken, places, strict=True)
                ], "header by header, byte by byte"
            for peers, others in zip(line.peers, virtual, strict=True):
                for one, other in zip(peers, others, strict=True):
                    summed, same = one.replica.sum_of(STEP), other.replica.sum_of(STEP)
                    assert summed.work == same.work
                    assert torch.equal(summed.gradient.flat, same.gradient.flat)

    asyncio.run(main())
