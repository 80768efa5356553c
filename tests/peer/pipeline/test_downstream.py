"""Where a microbatch goes whose next stage says that its step is over."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from peer.pipeline import downstream
from peer.pipeline.compute import Urgency
from peer.pipeline.downstream import METHOD, Refused
from peer.pipeline.stage_pass import LossPass
from swarm.core.errors import RemoteError, TransientError
from swarm.core.ids import MicrobatchId, PeerId
from swarm.network.transport import Message
from tests.peer.pipeline.hop_line import STEP, LinePeer, hop_line
from tests.verification.exhibits import tokens_and_targets

NUMBER = MicrobatchId(0)


def says_closed(peer: LinePeer) -> None:
    """Whatever it is sent."""

    async def refuse(sender: PeerId, request: Message) -> Message:
        return Message({"status": "closed", "reason": "it is over"})

    peer.transport.serve(METHOD, refuse, max_body_bytes=1 << 20)


def test_one_that_says_every_step_is_over_ends_none() -> None:
    async def scenario() -> None:
        async with hop_line() as line:
            says_closed(line.peers[1][0])
            for number in range(4):
                await line.send(number)
            assert line.peers[1][1].counters.microbatches == 4

    asyncio.run(scenario())


@pytest.mark.parametrize("num_there", [1, 2])
def test_what_all_who_are_there_say_is_believed_at_once(num_there: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downstream, "CLOSED_S", 60.0)

    async def scenario() -> None:
        async with hop_line() as line:
            if num_there == 1:
                await line.kill(line.peers[1][1])
            for peer in line.peers[1]:
                says_closed(peer)
            async with asyncio.timeout(30.0):
                with pytest.raises(Refused, match="it is over"):
                    await line.send(0)

    asyncio.run(scenario())


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_what_would_spoil_the_step_is_a_bad_answer_of_whoever_sent_it(what: str) -> None:
    """A loss that no report may say had the host deaf to the first stage; a gradient that overflows took all that was
    done in the step."""

    async def scenario() -> None:
        async with hop_line() as line:
            liar, honest = line.peers[-1]
            stage_pass: Any = liar.work.stage_pass
            loss_begun, loss_gradient = stage_pass.loss_begun, stage_pass.loss_gradient
            if what == "loss":
                stage_pass.loss_begun = lambda *given: partial(_lies, loss_begun(*given))
            else:
                stage_pass.loss_gradient = lambda *given: loss_gradient(*given) * 2.0**90
            found: list[dict[str, int]] = []
            for number in range(16):
                answer = await line.send(number)
                assert 0 < answer.loss_sum < 1e4
                found = [peer.counters.bad_messages for peer in line.peers[-2] if peer.counters.bad_messages]
                if found:
                    break
            assert {*found[0]} == {"malformed" if what == "loss" else "protocol"}
            assert honest.counters.microbatches > 0

    asyncio.run(scenario())


def _lies(made: Callable[[], LossPass]) -> LossPass:
    return made()._replace(loss_sum=1e61)


def test_no_microbatch_is_taken_that_was_born_under_another_key() -> None:
    """Stage 0's auditors look at what their members have read, and saw nothing of it."""

    async def scenario() -> None:
        async with hop_line() as line:
            source, other = line.peers[0]
            tokens_BL, targets_BL = tokens_and_targets(line.settings, NUMBER)
            born = other.stage_pass.born(
                "train", NUMBER, attempt=0, step=STEP, era=0, tokens_BL=tokens_BL, targets_BL=targets_BL
            )
            x = torch.from_numpy(born.tokens_BL)
            activation, _ = await source.thread.run(
                Urgency.BIRTH, lambda: source.stage_pass.forward(born.birth, x, born.targets, None)
            )
            assert source.downstream is not None
            async with asyncio.timeout(60.0):
                with pytest.raises((RemoteError, TransientError)):
                    await source.downstream.send(activation)
            assert source.counters.bad_messages["protocol"] > 0
            assert [peer.counters.microbatches for peer in line.peers[1]] == [0, 0]

    asyncio.run(scenario())
