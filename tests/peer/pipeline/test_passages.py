"""A lost peer's microbatch goes on in the stages after it: they compute nothing twice, and whoever replaces it gets
their gradient."""

import asyncio
import gc
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from peer.pipeline import passages
from peer.pipeline.compute import Urgency
from peer.pipeline.downstream import Refused
from peer.pipeline.passages import MOST_WAITING, Arrival, Passages, Passed
from peer.pipeline.stage_pass import StagePass
from swarm.averaging.activations import activation_codec
from swarm.core.errors import RemoteError
from swarm.core.ids import MicrobatchId, PeerId, Version
from swarm.core.settings import CodecSettings
from swarm.model.stage import Saved
from tests.peer.pipeline.hop_line import STEP, HopLine, LinePeer, hop_line
from tests.swarm.model.tiny_models import tiny_model
from tests.verification.exhibits import RUN_ID, SmallRun, honest_exhibit, small_settings
from verification.audit.tolerance import Grade, relative_error
from verification.pipeline.exchanges import Exchange
from verification.pipeline.headers import BirthRecord
from verification.pipeline.hop_claim import HopClaim, claims_of
from verification.replay.compared import MAGNIFIED, compared_claim, stands_for
from verification.replay.stage_replay import StageReplay
from verification.round.papers import Exhibit

NUMBER = MicrobatchId(0)


def all_exchanges(line: HopLine, of: LinePeer) -> tuple[list[Exchange], list[Exchange]]:
    """What the neighbours of a peer, the dead ones too, and the peer itself hold of the microbatch: came, and went."""
    held = [
        exchange
        for peers in line.peers[max(0, of.stage - 1) : of.stage + 2]
        for peer in peers
        for others in line.peers
        for other in others
        for exchange in peer.exchanges.with_partner(STEP, NUMBER, other.peer_id)
    ]
    came = [exchange for exchange in held if exchange.forward.consumer == of.peer_id and exchange.gradient]
    return came, [exchange for exchange in held if exchange.forward.producer == of.peer_id and exchange.gradient]


def audited(line: HopLine, peer: LinePeer) -> list[HopClaim]:
    """Everything the peer signed of the microbatch, replayed and found honest."""
    claims = {claim.header.digest(): claim for claim in claims_of(peer.peer_id, *all_exchanges(line, peer))}
    replay = StageReplay(line.settings, peer.stage)
    replay.hold(Version(0), line.run.states[peer.stage].weights, None, ahead_is_known=True)
    for claim in claims.values():
        claim.check(line.settings, run_id=RUN_ID)
        assert compared_claim(replay, claim).grade is Grade.HONEST
    replay.release()
    return list(claims.values())


def assert_summed_once(line: HopLine, stage: int) -> None:
    """One live peer of the stage has the microbatch in its sum, once, with the gradient that it has undisturbed."""
    holders = [peer for peer in line.peers[stage] if peer.replica.num_done(STEP)]
    assert len(holders) == 1
    (holder,) = holders
    assert holder.peer_id in line.of_stage(stage)
    undisturbed = SmallRun(line.settings)
    undisturbed.microbatch(0)
    expected = undisturbed.replicas[stage][0].sum_of(STEP).gradient.flat
    torch.testing.assert_close(holder.replica.sum_of(STEP).gradient.flat, expected, rtol=1e-4, atol=1e-6)
    work = holder.replica.sum_of(STEP).work[NUMBER]
    exhibit = holder.exchanges.exhibit(STEP, work)
    assert exhibit is not None
    exhibit.check(holder.peer_id, run_id=RUN_ID, stage=line.run.chains[stage].stage, num_stages=4)
    exhibit.check_work(work, holder.peer_id)


def test_what_is_under_way_after_a_lost_peer_is_computed_once_and_answers_its_replacement() -> None:
    async def main() -> None:
        async with hop_line() as line:
            for peer in line.peers[3]:
                peer.thread.hold()
            answering = line.send(0)
            last = await line.holder(3)
            lost, middle = await line.holder(1), await line.holder(2)
            middle.thread.more_s = 100.0  # nobody would choose it but for what it holds
            await line.kill(lost)
            replacement = line.other(lost)
            await line.until(lambda: middle.thread.jobs[Urgency.CODEC] == 1)  # it has looked at what came again
            last.thread.go_on()
            answer = await answering
            assert answer.header is not None
            assert answer.header.producer == replacement.peer_id
            assert [line.jobs(stage, Urgency.FORWARD) for stage in (1, 2, 3)] == [2, 1, 1]
            assert middle.counters.adopted == 1
            assert middle.counters.bad_messages == {}
            for stage in (1, 2, 3):
                assert_summed_once(line, stage)
            signed = audited(line, middle)
            directions = sorted(claim.header.direction for claim in signed)
            assert directions == ["forward", "gradient", "gradient"]  # one to the lost peer, one to its replacement
            consumers = {claim.header.consumer for claim in signed if claim.header.direction == "gradient"}
            assert consumers == {lost.peer_id, replacement.peer_id}
            assert len(audited(line, replacement)) == 2

    asyncio.run(main())


def test_a_gradient_that_only_the_lost_peer_had_is_given_again() -> None:
    async def main() -> None:
        async with hop_line() as line:
            for peer in line.peers[2]:
                peer.thread.hold()
            answering = line.send(0)
            middle, lost = await line.holder(2), await line.holder(1)
            lost.thread.hold()  # it gets its gradient, and does nothing with it
            middle.thread.go_on()
            await line.until(lambda: middle.server.in_flight == 0)
            middle.thread.more_s = 100.0
            await line.kill(lost)
            answer = await answering
            assert answer.header is not None
            assert answer.header.producer == line.other(lost).peer_id
            assert [line.jobs(stage, Urgency.FORWARD) for stage in (2, 3)] == [1, 1]
            assert middle.counters.adopted == 1
            for stage in (1, 2, 3):
                assert_summed_once(line, stage)

    asyncio.run(main())


def test_what_a_lost_source_had_sent_counts_once_in_every_stage_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passages, "NOTICE_S", 0.05)

    async def main() -> None:
        async with hop_line() as line:
            for peer in line.peers[3]:
                peer.thread.hold()
            source = line.peers[0][0]
            answering = line.send(0, source)
            last = await line.holder(3)
            answering.cancel()
            await line.kill(source)
            await asyncio.sleep(0.1)
            last.thread.go_on()
            await line.until(lambda: not any(peer.server.in_flight for peers in line.peers for peer in peers))
            assert [line.jobs(stage, Urgency.FORWARD) for stage in (1, 2, 3)] == [1, 1, 1]
            for stage in (1, 2, 3):
                assert_summed_once(line, stage)

    asyncio.run(main())


class Otherwise(StagePass):
    """Sends on something else."""

    def output(self, birth: BirthRecord, x: torch.Tensor) -> tuple[Version, torch.Tensor, Saved]:
        version, y_BLD, saved = super().output(birth, x)
        return version, y_BLD * 1.01, saved


def test_what_a_lost_peer_computed_otherwise_is_computed_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passages, "NOTICE_S", 0.05)

    async def main() -> None:
        async with hop_line() as line:
            for peer in line.peers[1]:
                peer.thread.hold()
            for peer in line.peers[3]:
                peer.thread.hold()
            answering = line.send(0)
            lost = await line.holder(1)
            lost.work.stage_pass = Otherwise(line.settings, RUN_ID, lost.identity, lost.replica)
            lost.thread.go_on()
            await line.holder(3)
            middle = await line.holder(2)
            middle.thread.more_s = 100.0
            await line.kill(lost)
            line.other(lost).thread.go_on()
            await line.until(lambda: middle.counters.bad_messages == {"other_activation": 1})
            for peer in line.peers[3]:
                peer.thread.go_on()
            await answering
            assert middle.counters.adopted == 0
            assert middle.thread.jobs[Urgency.FORWARD] == 2
            for stage in (1, 2):
                assert_summed_once(line, stage)  # and what is summed is of the replacement's activation
            assert len(audited(line, line.other(lost))) == 2
            await line.until(lambda: sum(peer.server.in_flight for peer in line.peers[3]) == 0)

    asyncio.run(main())


@pytest.mark.parametrize(("dtype", "codec", "share"), [("fp32", "fp32", 1e-5), ("bf16", "fp32", 1e-3)])
def test_a_gradient_is_signed_for_only_where_a_replay_cannot_be_fraud(dtype: Any, codec: Any, share: float) -> None:
    codecs = CodecSettings(activations=codec, activation_gradients=codec, averaging="fp32")
    settings = small_settings(3, codecs=codecs, model=tiny_model("llama", 3, compute_dtype=dtype))
    shape = (2, 16, 64)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x_body, near, far = (activation_codec(codec).encode(x * (1 + off)) for off in (0.0, 0.5 * share, 2 * share))
    assert stands_for(settings, x_body, near, shape)
    assert not stands_for(settings, x_body, far, shape)


def test_a_worst_difference_in_what_came_in_is_no_fraud_in_the_gradient() -> None:
    replica = SmallRun(small_settings(3)).replicas[1][0]
    _, weights = replica.weights_for(STEP)
    generator = torch.Generator().manual_seed(0)
    x, grad_y, away = (torch.randn((2, 16, 64), generator=generator) for _ in range(3))
    into = torch.zeros(replica.layout.num_values)

    def gradient(x: torch.Tensor) -> torch.Tensor:
        _, saved = replica.model.forward(weights, x, keep=True)
        assert saved is not None
        found = replica.model.backward(saved, grad_y, into)
        assert found is not None
        return found

    honest = gradient(x)
    for _ in range(8):  # to where it is magnified most, as far as steps along what came out lead there
        away *= 1e-5 * torch.linalg.vector_norm(x) / torch.linalg.vector_norm(away)
        off = relative_error(honest.numpy(), gradient(x + away).numpy())
        assert off < MAGNIFIED * 1e-5
        away = gradient(x + away) - honest


def test_a_strangers_call_is_answered_and_neither_adopts_nor_outlives_itself() -> None:
    async def main() -> None:
        async with hop_line() as line:
            stranger, middle = line.peers[1][0], line.peers[2][0]
            middle.is_before_nobody = True
            for peer in line.peers[3]:
                peer.thread.hold()
            activation = line.activation(0, line.peers[0][0])
            assert stranger.downstream is not None
            stranger.downstream.update_peers({middle.peer_id})
            header_of = replace(activation, parents=(activation.birth.digest(), bytes(32)))
            calling = asyncio.ensure_future(stranger.downstream.send(header_of))
            await line.holder(3)
            calling.cancel()
            await line.until(lambda: middle.server.in_flight == 0)
            again = asyncio.ensure_future(stranger.downstream.send(header_of))
            await line.until(lambda: middle.thread.jobs[Urgency.FORWARD] == 2)
            for peer in line.peers[3]:
                peer.thread.go_on()
            await again
            assert middle.counters.adopted == 0

    asyncio.run(main())


# -- what becomes of a passage ----------------------------------------------------------------------------


@cache
def _honest() -> Exhibit:
    return honest_exhibit(1)


def arrival(number: int = 0) -> Arrival:
    """Of other microbatches only the number differs: nobody looks at more here."""
    papers, exhibit = _honest().papers, _honest()
    assert papers.input_header is not None
    birth = replace(papers.birth, microbatch_id=MicrobatchId(number))
    x, targets = memoryview(exhibit.x), memoryview(exhibit.targets)
    return Arrival(PeerId("caller"), birth, papers.input_header, x, targets)


def passages_of(*, living: set[str], longest_s: float = 0.2, most: int = 2) -> Passages:
    return Passages(longest_s=longest_s, most_orphans=most, most_done=most, lives=lambda peer: peer in living)


async def never() -> Passed:
    await asyncio.Event().wait()
    raise AssertionError


async def left(held: Passages, come: Arrival) -> Any:
    """A passage whose caller's call has broken."""
    passage = held.begin(come, never())
    calling = asyncio.ensure_future(held.wait(passage, come.sender))
    await asyncio.sleep(0)
    calling.cancel()
    await asyncio.wait({calling})
    return passage


def test_an_orphan_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passages, "NOTICE_S", 0.05)

    async def main() -> None:
        held = passages_of(living=set(), longest_s=1.0)
        passage = await left(held, arrival())
        assert held.num_orphans == 1
        await asyncio.wait({passage.task}, timeout=0.1)
        assert not passage.task.done()
        await asyncio.wait({passage.task}, timeout=30.0)
        assert passage.task.cancelled()
        assert held.num_orphans == 0
        assert held.of(passage.arrival.birth.digest()) is None

    asyncio.run(main())


@pytest.mark.parametrize("is_source", [True, False])
def test_what_an_orphan_came_to_is_looked_at_when_its_caller_is_gone(is_source: bool) -> None:
    """A source that lies about its targets, and dies: its microbatch is refused, and nobody waits for that."""
    unhandled: list[Any] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context["message"]))
        held, fails = passages_of(living=set()), asyncio.Event()

        async def refused() -> Passed:
            await fails.wait()
            raise RemoteError("digest", "targets differ from the birth record")

        come = replace(arrival(), sender=arrival().birth.source) if is_source else arrival()
        passage = held.begin(come, refused())
        calling = asyncio.ensure_future(held.wait(passage, come.sender))
        await asyncio.sleep(0)
        calling.cancel()
        await asyncio.wait({calling})
        fails.set()
        await asyncio.wait({passage.task})

    asyncio.run(main())
    gc.collect()
    assert unhandled == []


def test_what_a_living_caller_lets_go_of_ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passages, "NOTICE_S", 0.01)

    async def main() -> None:
        passage = await left(passages_of(living={"caller"}, longest_s=60.0), arrival())
        await asyncio.wait({passage.task}, timeout=5.0)
        assert passage.task.cancelled()

    asyncio.run(main())


def test_orphans_and_results_are_bounded_and_end_with_their_step() -> None:
    async def main() -> None:
        held = passages_of(living=set(), longest_s=60.0)
        orphans = [await left(held, arrival(number)) for number in range(3)]
        assert held.num_orphans == 2
        await asyncio.wait({orphans[2].task})
        assert orphans[2].task.cancelled()
        held.forget(0)
        assert held.num_orphans == 2
        held.forget(1)
        assert held.num_orphans == 0

        async def made(come: Arrival) -> Passed:
            return Passed(0.0, 1, memoryview(b""), come.header)

        for number in range(3):
            come = arrival(number)
            assert await held.wait(held.begin(come, made(come)), come.sender) is not None
        await asyncio.sleep(0)
        assert [held.of(arrival(number).birth.digest()) is not None for number in range(3)] == [False, True, True]
        come = replace(arrival(3), sender=arrival(3).birth.source)
        assert await held.wait(held.begin(come, made(come)), come.sender) is not None
        await asyncio.sleep(0)
        assert held.of(come.birth.digest()) is None, "nobody takes a source's place"
        await held.stop()

    asyncio.run(main())


def test_several_callers_wait_for_one_passage_up_to_a_limit() -> None:
    async def main() -> list[Passed | None]:
        held, come, goes_on = passages_of(living=set()), arrival(), asyncio.Event()

        async def work() -> Passed:
            await goes_on.wait()
            return Passed(1.5, 1, memoryview(b"gradient"), come.header)

        passage = held.begin(come, work())
        waiting = [asyncio.ensure_future(held.wait(passage, PeerId(f"{n}"))) for n in range(MOST_WAITING)]
        await asyncio.sleep(0)
        with pytest.raises(Refused, match="wait for this microbatch"):
            await held.wait(passage, PeerId("one more"))
        waiting[0].cancel()
        await asyncio.wait({waiting[0]})
        assert held.num_orphans == 0
        goes_on.set()
        return [await one for one in waiting[1:]]

    assert {made.loss_sum for made in asyncio.run(main()) if made is not None} == {1.5}
