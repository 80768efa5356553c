"""What is in a step's sum can be shown, whoever lets go of the microbatch and when."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from peer.pipeline import stage_work
from peer.pipeline.compute import Urgency
from peer.pipeline.stage_pass import StagePass
from peer.round.work import ContributionEncoder
from swarm.core.ids import MicrobatchId
from tests.peer.pipeline.hop_line import STEP, HopLine, LinePeer, hop_line

NUMBER = MicrobatchId(0)
COMPUTES = {1: "backward", 3: "loss_begun"}
"""Of a middle stage and of the last one: what adds to the sum."""


class Slow:
    """A step of a pass that is done, and then takes its time."""

    def __init__(self, peer: LinePeer, name: str) -> None:
        self.is_done, self._goes_on = threading.Event(), threading.Event()
        done: Callable[..., Any] = getattr(peer.stage_pass, name)

        def slow(*arguments: Any) -> Any:
            made = done(*arguments)
            self.is_done.set()
            assert self._goes_on.wait(60.0)
            return made

        setattr(peer.stage_pass, name, slow)

    def go_on(self) -> None:
        self._goes_on.set()


def assert_shown(peer: LinePeer, *, num_done: int) -> None:
    """So many microbatches are in the peer's sum, and it can show each."""
    assert peer.replica.num_done(STEP) == num_done
    for work in peer.replica.sum_of(STEP).work.values():
        assert peer.exchanges.exhibit(STEP, work) is not None


def only_peer(line: HopLine, stage: int) -> LinePeer:
    """The one of the stage to which all of the stage before send."""
    peer = line.peers[stage][0]
    for sender in line.peers[stage - 1]:
        assert sender.downstream is not None
        sender.downstream.update_peers({peer.peer_id})
    return peer


@pytest.mark.parametrize("stage", sorted(COMPUTES))
def test_what_is_added_while_its_caller_lets_go_of_it_is_kept(stage: int) -> None:
    async def main() -> None:
        async with hop_line() as line:
            peer = only_peer(line, stage)
            slow = Slow(peer, COMPUTES[stage])
            answering = line.send(0)
            await line.until(slow.is_done.is_set)
            stopping = asyncio.ensure_future(peer.server.stop())  # as a passage is given up
            await asyncio.sleep(0.05)
            slow.go_on()
            await stopping
            answering.cancel()
            assert_shown(peer, num_done=1)

    asyncio.run(main())


@pytest.mark.parametrize("stage", sorted(COMPUTES))
def test_what_has_not_begun_when_its_caller_lets_go_of_it_is_never_computed(stage: int) -> None:
    async def main() -> None:
        async with hop_line() as line:
            peer = only_peer(line, stage)
            if stage == 3:
                peer.thread.hold()
                answering = line.send(0)
                await line.until(lambda: peer.server.in_flight == 1)
            else:
                for other in line.peers[2]:
                    other.thread.hold()
                answering = line.send(0)
                await line.holder(2)
                peer.thread.hold()
                for other in line.peers[2]:
                    other.thread.go_on()
                await line.until(lambda: not any(other.server.in_flight for other in line.peers[2]))
            await asyncio.sleep(0.05)
            await peer.server.stop()
            answering.cancel()
            peer.thread.go_on()
            await peer.thread.run(Urgency.ROUND, lambda: None)
            assert_shown(peer, num_done=0)

    asyncio.run(main())


@pytest.mark.parametrize("given_up", [False, True])
def test_a_gradient_that_finds_no_memory_is_encoded_later(given_up: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_work, "RETRY_S", 0.01)

    async def main() -> None:
        async with hop_line() as line:
            peer = only_peer(line, 1)
            left, encode = [2], peer.stage_pass.answering

            def answering(grad_x_BLD: torch.Tensor) -> Callable[[], memoryview]:
                left[0] -= 1
                if left[0] >= 0:
                    raise MemoryError
                return encode(grad_x_BLD)

            peer.stage_pass.answering = answering  # type: ignore[method-assign]
            sending = line.send(0)
            if given_up:
                await line.until(lambda: left[0] < 2)
                await peer.server.stop()
                sending.cancel()
            else:
                await sending
            assert left == [-1]
            assert_shown(peer, num_done=1)

    asyncio.run(main())


@pytest.mark.parametrize("stage", sorted(COMPUTES))
def test_a_sum_with_what_cannot_be_shown_is_not_contributed(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_work, "RETRY_S", 0.01)

    class NotFinite(StagePass):
        def answering(self, grad_x_BLD: torch.Tensor) -> Callable[[], memoryview]:
            return super().answering(grad_x_BLD * torch.inf)

    async def main() -> None:
        async with hop_line() as line:
            peer = only_peer(line, stage)
            one = peer.stage_pass
            peer.work.stage_pass = NotFinite(line.settings, one.run_id, peer.identity, peer.replica)
            sending = line.send(0)
            await line.until(lambda: peer.replica.num_done(STEP) == 1)
            await line.until(lambda: not peer.replica.sum_of(STEP).gradient.flat.isfinite().any())
            sending.cancel()
            summed = peer.replica.close(STEP)
            assert ContributionEncoder(peer.replica).encode(STEP, summed, [bytes(32)] * peer.replica.num_parts) == (
                [],
                [],
            )

    asyncio.run(main())
