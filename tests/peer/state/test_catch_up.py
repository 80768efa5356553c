"""A peer that follows its stage asks donors now and then, however soon they answer and whatever they claim."""

import asyncio
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.red_team.virtual_time import run_virtually
from peer.round.step_state import StepParts
from peer.state import catch_up
from peer.state.catch_up import JOIN, PAUSE_S, CatchUp
from peer.state.joining_state import JoiningState
from swarm.bulk_digest import bulk_digest
from swarm.checkpoint.transfer import EARLY_PARTS, PART_BYTES
from swarm.core.errors import DiskFullError, MemoryFullError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId, Step
from swarm.core.state.stage_chain import StageChain
from swarm.host_protocol import RESULTS
from swarm.network.memory import MemoryNetwork
from swarm.network.transport import Message, Transport
from tests.swarm_in_process import identity_of
from tests.verification.exhibits import Done, SmallRun, small_settings

ME, DONOR = identity_of(0), identity_of(1)
FOR_S = 10.0
ADOPTS_S = 3.0
STEP_S, NUM_STEPS, FIRST = 4.0, 24, 6
"""From one version to the next; of the stage in all; that it has made when another comes."""
MOST_QUESTIONS = FOR_S / PAUSE_S + 1


def steps_at(run: SmallRun, chain: StageChain, **others: Any) -> Any:
    """What `CatchUp` looks at of a peer's steps: one that may join, and is at `chain`."""
    return SimpleNamespace(
        version=int(chain.version),
        is_over=False,
        usual_s=None,
        is_member=False,
        may_join=lambda peer: True,
        context=SimpleNamespace(settings=run.settings),
        chain=chain,
        replica=run.replicas[0][0],
        **others,
    )


def with_donor(steps: Any, mine: Transport, donor: PeerId, adopt: Any) -> CatchUp:
    """One donor alone."""
    rounds: Any = SimpleNamespace(steps=steps, adopt=adopt)
    ticket: Any = SimpleNamespace(to_value=lambda: {})
    return CatchUp(rounds, mine, lambda: {donor}, ticket, lambda: None, random.Random(0))


def following(steps: Any, mine: Transport, donor: PeerId, adopt: Any) -> asyncio.Task[None]:
    """As `with_donor`, under way."""
    return asyncio.ensure_future(with_donor(steps, mine, donor, adopt).run())


def stage_that_made(num_steps: int) -> tuple[SmallRun, list[Done]]:
    """One of one member."""
    run, done = SmallRun(small_settings(1), num_peers=1), []
    for _ in range(num_steps):
        run.microbatch(1)
        done.append(run.step(0))
    return run, done


def bodies_of(*done: Done) -> dict[bytes, Any]:
    """Their results' parts, by digest."""
    return {part.digest: body for one in done for part, body in zip(one.result.parts, one.bodies, strict=True)}


async def nothing_early(sender: PeerId, request: Message) -> Message:
    """An answer to `EARLY_PARTS`."""
    return Message({"parts": []})


async def end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("claims", ["nothing new", "a step that is not the next"])
def test_a_donor_that_never_waits_is_asked_after_a_pause(claims: str) -> None:
    run = SmallRun(small_settings(1), num_peers=1)
    run.microbatch(1)
    result = run.step(0).result
    asked_at: list[float] = []

    async def on_results(sender: PeerId, request: Message) -> Message:
        loop = asyncio.get_running_loop()
        asked_at.append(loop.time())
        if len(asked_at) > 2 * MOST_QUESTIONS:
            loop.stop()
        is_new = claims != "nothing new"
        meta = {"oldest": 0, "results": [result.packed] if is_new else []}
        return Message({"version": 2 if is_new else 1, **meta})

    async def main() -> None:
        network = MemoryNetwork(random.Random(0))
        mine, donor = network.transport(ME), network.transport(DONOR)
        donor.serve(RESULTS, on_results, max_body_bytes=0)
        steps: Any = SimpleNamespace(
            version=1,
            is_over=False,
            is_member=False,
            may_join=lambda peer: False,
            context=SimpleNamespace(settings=run.settings),
            chain=SimpleNamespace(members={}, name=b""),
            replica=run.replicas[0][0],
        )
        catching_up = following(steps, mine, DONOR.peer_id, adopt=None)
        await asyncio.sleep(FOR_S)
        await end(catching_up)

    run_virtually(main, rng=random.Random(0), on_unhandled=lambda context: None)
    assert len(asked_at) <= MOST_QUESTIONS


def test_what_a_round_has_reduced_is_here_before_its_result_and_is_fetched_once() -> None:
    run, (done,) = stage_that_made(1)
    donor, bodies = run.peers[0][0], bodies_of(done)
    false = [0, bytes(32)]  # the roster may change, and donors may lie
    named: list[Any] = [*([part.part, part.digest] for part in done.result.parts), false]
    asked: list[tuple[bytes, bool]] = []
    adopted: list[Any] = []

    async def main() -> None:
        network = MemoryNetwork(random.Random(0))
        mine, theirs = network.transport(ME), network.transport(donor)
        is_over = False
        steps = steps_at(run, done.chain, open_step=lambda step: SimpleNamespace(parts=StepParts(), leader=None))

        async def on_results(sender: PeerId, request: Message) -> Message:
            results: list[Any] = [done.result.packed] if is_over and request.meta["from"] == 0 else []
            return Message({"version": int(is_over), "oldest": 0, "results": results})

        async def on_early_parts(sender: PeerId, request: Message) -> Message:
            fields = Fields("request", request.meta)
            return Message({"parts": named[fields.integer("from") :] if fields.integer("step") == 0 else []})

        async def on_part(sender: PeerId, request: Message) -> Message:
            wanted = Fields("request", request.meta).octets("digest", length=32)
            asked.append((wanted, is_over))
            if wanted not in bodies:
                raise TransientError("it is not here")
            return Message({}, bodies[wanted])

        async def adopt(result: object, parts: object) -> None:
            adopted.append((result, parts))
            steps.version = 1

        for method, handler in ((RESULTS, on_results), (EARLY_PARTS, on_early_parts), (PART_BYTES, on_part)):
            theirs.serve(method, handler, max_body_bytes=0)
        catching_up = following(steps, mine, donor.peer_id, adopt)
        await asyncio.sleep(FOR_S)
        is_over = True
        await asyncio.sleep(FOR_S)
        await end(catching_up)

    run_virtually(main, rng=random.Random(0), on_unhandled=lambda context: None)
    assert adopted == [(done.result, done.bodies)]
    assert asked == [(part.digest, False) for part in done.result.parts]


def test_the_parts_of_a_result_come_while_the_one_before_is_taken() -> None:
    run, done = stage_that_made(3)
    donor, bodies = run.peers[0][0], bodies_of(*done)
    asked: list[tuple[bytes, int]] = []
    adopted: list[Any] = []

    async def main() -> None:
        network = MemoryNetwork(random.Random(0))
        mine, theirs = network.transport(ME), network.transport(donor)
        steps = steps_at(run, done[0].chain, open_step=lambda step: None)

        async def on_results(sender: PeerId, request: Message) -> Message:
            start = Fields("request", {"from": request.meta["from"]}).integer("from")
            results: list[Any] = [one.result.packed for one in done[start:]]
            return Message({"version": len(done), "oldest": 0, "results": results})

        async def on_part(sender: PeerId, request: Message) -> Message:
            wanted = Fields("request", request.meta).octets("digest", length=32)
            asked.append((wanted, steps.version))
            return Message({}, bodies[wanted])

        async def adopt(result: object, parts: object) -> None:
            await asyncio.sleep(ADOPTS_S)
            adopted.append((result, parts))
            steps.version += 1
            steps.chain = done[steps.version].chain if steps.version < len(done) else run.chains[0]

        for method, handler in ((RESULTS, on_results), (EARLY_PARTS, nothing_early), (PART_BYTES, on_part)):
            theirs.serve(method, handler, max_body_bytes=0)
        catching_up = following(steps, mine, donor.peer_id, adopt)
        await asyncio.sleep(len(done) * ADOPTS_S + 1.0)
        await end(catching_up)

    run_virtually(main, rng=random.Random(0), on_unhandled=lambda context: None)
    assert adopted == [(one.result, one.bodies) for one in done]
    first, *later = ([part.digest for part in one.result.parts] for one in done)
    early = [(digest, version) for version, digests in enumerate(later) for digest in digests]
    assert asked == [*((digest, 0) for digest in first), *early]


@pytest.mark.parametrize(("part_s", "is_slow"), [(1.5, False), (3.0, True)])
def test_who_has_a_result_later_than_the_next_round_begins_asks_to_join_when_it_lacks_none(
    part_s: float, is_slow: bool
) -> None:
    """On slow lines it was on the roster a round early, and was taken off again, over and over."""
    run, done = stage_that_made(NUM_STEPS)
    donor, bodies = run.peers[0][0], bodies_of(*done)
    lacking: list[int] = []

    async def main() -> None:
        network = MemoryNetwork(random.Random(0))
        mine, theirs = network.transport(ME), network.transport(donor)
        loop = asyncio.get_running_loop()
        began = loop.time()
        steps = steps_at(run, done[0].chain, open_step=lambda step: None)

        def version() -> int:
            return min(NUM_STEPS - 1, FIRST + int((loop.time() - began) / STEP_S))

        async def on_results(sender: PeerId, request: Message) -> Message:
            start = Fields("request", {"from": request.meta["from"]}).integer("from")
            results: list[Any] = [one.result.packed for one in done[start : version()]]
            return Message({"version": version(), "oldest": 0, "results": results})

        async def on_part(sender: PeerId, request: Message) -> Message:
            await asyncio.sleep(part_s / len(done[0].result.parts))
            return Message({}, bodies[Fields("request", request.meta).octets("digest", length=32)])

        async def on_join(sender: PeerId, request: Message) -> Message:
            lacking.append(version() - steps.version)
            return Message({"version": version() + 1})

        async def adopt(result: object, parts: object) -> None:
            steps.version += 1
            steps.chain = done[steps.version].chain

        served = {RESULTS: on_results, PART_BYTES: on_part, JOIN: on_join, EARLY_PARTS: nothing_early}
        for method, handler in served.items():
            theirs.serve(method, handler, max_body_bytes=0)
        catching_up = following(steps, mine, donor.peer_id, adopt)
        await asyncio.sleep((NUM_STEPS - FIRST) * STEP_S)
        await end(catching_up)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(catch_up, "PARTS_LOOKED_AT", 1)
        run_virtually(main, rng=random.Random(0), on_unhandled=lambda context: None)
    assert lacking[0] == (0 if is_slow else 1)


def test_what_nobody_has_certified_is_not_waited_for_for_long() -> None:
    """A member names a result of its own that follows the stage's, and lets its parts drip."""
    run, done = stage_that_made(2)
    donor, genuine = run.peers[0][0], bodies_of(done[0])
    ended: list[float] = []

    async def main() -> None:
        network = MemoryNetwork(random.Random(0))
        mine, theirs = network.transport(ME), network.transport(donor)
        loop = asyncio.get_running_loop()
        steps = steps_at(run, done[0].chain, open_step=lambda step: None)

        async def on_results(sender: PeerId, request: Message) -> Message:
            results: list[Any] = [one.result.packed for one in done]
            return Message({"version": 2, "oldest": 0, "results": results})

        async def on_part(sender: PeerId, request: Message) -> Message:
            body = genuine.get(Fields("request", request.meta).octets("digest", length=32))
            if body is None:
                await asyncio.sleep(1e6)
            return Message({}, body or b"")

        async def adopt(result: object, parts: object) -> None:
            steps.version += 1
            steps.chain = done[1].chain

        theirs.serve(RESULTS, on_results, max_body_bytes=0)
        theirs.serve(PART_BYTES, on_part, max_body_bytes=0)
        began = loop.time()
        await with_donor(steps, mine, donor.peer_id, adopt)._take(done[0].result, done[1].result, donor.peer_id)
        ended.append(loop.time() - began)

    run_virtually(main, rng=random.Random(0), on_unhandled=lambda context: None)
    assert ended[0] <= run.settings.deadlines.call_s + 1.0


def test_donors_are_told_how_much_is_lacking() -> None:
    run, (done,) = stage_that_made(1)
    donor, num_parts = run.peers[0][0], 8
    bodies = {bulk_digest(body): body for body in (bytes([index]) for index in range(num_parts))}
    largest_bytes = run.replicas[0][0].parts().result_bytes(0)
    came, told = 0, list[tuple[int, int]]()

    async def main() -> None:
        network = MemoryNetwork(random.Random(0))
        mine, theirs = network.transport(ME), network.transport(donor)
        line = asyncio.Lock()
        steps = steps_at(run, done.chain, open_step=lambda step: None)

        async def on_part(sender: PeerId, request: Message) -> Message:
            nonlocal came
            fields = Fields("request", request.meta)
            told.append((came, fields.integer("lacks_bytes")))
            async with line:
                await asyncio.sleep(1.0)
            came += 1
            return Message({}, bodies[fields.octets("digest", length=32)])

        theirs.serve(PART_BYTES, on_part, max_body_bytes=0)
        named = {digest: index for index, digest in enumerate(bodies)}
        await with_donor(steps, mine, donor.peer_id, cast(Any, None))._fetch_parts(donor.peer_id, Step(0), named)

    run_virtually(main, rng=random.Random(0), on_unhandled=lambda context: None)
    assert told[0] == (0, num_parts * largest_bytes)
    assert told[-1][0] > 0
    assert all(lacks_bytes == (num_parts - there) * largest_bytes for there, lacks_bytes in told)


def test_where_the_stage_is_counts_by_members_words_and_anew_when_it_goes_back() -> None:
    run, (done,) = stage_that_made(1)
    member, nothing = run.peers[0][0].peer_id, cast(Any, None)
    catching_up = with_donor(steps_at(run, done.chain), nothing, member, nothing)
    for version, donor in ((3, member), (10**12, DONOR.peer_id), (4, member), (4, member), (6, member)):
        catching_up._stage_is_at(version, donor)
    assert [version for _, version in catching_up._stage_was] == [3, 4, 6]
    catching_up._stage_is_at(5, member)
    assert [version for _, version in catching_up._stage_was] == [5]


def test_a_disk_that_takes_no_state_ends_it_and_so_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    run, (done,) = stage_that_made(1)

    async def fetch(*arguments: object, **options: object) -> object:
        raise DiskFullError("make room")

    monkeypatch.setattr(JoiningState, "fetch", fetch)

    async def main() -> None:
        steps = steps_at(run, done.chain)
        steps.context.snapshots = SimpleNamespace(folder=Path())
        mine = MemoryNetwork(random.Random(0)).transport(ME)
        catching_up = with_donor(steps, mine, DONOR.peer_id, adopt=None)
        catching_up.load_anew()
        async with asyncio.timeout(FOR_S):
            await catching_up.run()

    with pytest.raises(DiskFullError, match="make room"):
        run_virtually(main, rng=random.Random(0), on_unhandled=lambda context: None)


@pytest.mark.parametrize("was_wrong", [False, True])
def test_a_state_that_could_not_be_taken_whole_is_loaded_again(
    monkeypatch: pytest.MonkeyPatch, was_wrong: bool
) -> None:
    """Memory gave out in the middle: half a state was trained on, and nobody knew."""
    run, (done,) = stage_that_made(1)
    fetched_above, taken = list[int](), 0

    async def fetch(*arguments: object, newer_than: int, **options: object) -> object:
        fetched_above.append(newer_than)
        return run.states[0], run.chains[0]

    monkeypatch.setattr(JoiningState, "fetch", fetch)

    async def begin_again(state: object, chain: StageChain) -> None:
        nonlocal taken
        taken += 1
        if taken == 1:
            raise MemoryFullError("for the test")

    async def main() -> None:
        steps = steps_at(run, done.chain)
        steps.context.snapshots = SimpleNamespace(folder=Path())
        mine = MemoryNetwork(random.Random(0)).transport(ME)
        catching_up = with_donor(steps, mine, DONOR.peer_id, adopt=None)
        catching_up._rounds.taking = cast(Any, SimpleNamespace(begin_again=begin_again))
        if was_wrong:
            catching_up.load_anew()
        else:
            with pytest.raises(MemoryFullError):
                await catching_up._load_snapshot(DONOR.peer_id, newer_than=0)
        following = asyncio.ensure_future(catching_up.run())
        await asyncio.sleep(FOR_S)
        await end(following)

    run_virtually(main, rng=random.Random(0), on_unhandled=lambda context: None)
    assert taken == 2
    assert fetched_above == [-1 if was_wrong else 0, -1]


LOADED = identity_of(2)


def catches_up(*, gives_parts: bool, says: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[int]]:
    """The version that a peer comes to which misses three results, and above which versions it wanted a state.

    One donor has loaded the stage's newest state, and says that it has no older results; another, who says that it is
    at version `says`, names them all.
    """
    run, done = stage_that_made(3)
    bodies, wanted_above = bodies_of(*done), list[int]()

    async def fetch(*arguments: object, newer_than: int, **options: object) -> object:
        wanted_above.append(newer_than)
        raise TransientError("no newer state is anchored")

    monkeypatch.setattr(JoiningState, "fetch", fetch)

    async def main() -> int:
        network = MemoryNetwork(random.Random(0))
        mine, theirs, loaded = (network.transport(one) for one in (ME, run.peers[0][0], LOADED))
        steps = steps_at(run, done[0].chain, open_step=lambda step: None)
        steps.context.snapshots = SimpleNamespace(folder=Path())

        async def on_results(sender: PeerId, request: Message) -> Message:
            start = Fields("request", {"from": request.meta["from"]}).integer("from")
            results: list[Any] = [one.result.packed for one in done[start:]]
            return Message({"version": says, "oldest": 0, "results": results})

        async def on_loaded(sender: PeerId, request: Message) -> Message:
            return Message({"version": 3, "oldest": 3, "results": []})

        async def on_part(sender: PeerId, request: Message) -> Message:
            if not gives_parts:
                raise TransientError("not now")
            return Message({}, bodies[Fields("request", request.meta).octets("digest", length=32)])

        async def adopt(result: object, parts: object) -> None:
            steps.version += 1
            steps.chain = done[steps.version].chain if steps.version < len(done) else run.chains[0]

        theirs.serve(RESULTS, on_results, max_body_bytes=0)
        theirs.serve(PART_BYTES, on_part, max_body_bytes=0)
        loaded.serve(RESULTS, on_loaded, max_body_bytes=0)
        catching_up = with_donor(steps, mine, theirs.peer_id, adopt)
        catching_up.behind(LOADED.peer_id)
        following = asyncio.ensure_future(catching_up.run())
        async with asyncio.timeout(FOR_S):
            while steps.version < 3 and not (wanted_above and not gives_parts):
                catching_up.behind(LOADED.peer_id if not gives_parts or not steps.version else theirs.peer_id)
                await asyncio.sleep(PAUSE_S)
        await end(following)
        return int(steps.version)

    return run_virtually(main, rng=random.Random(0), on_unhandled=lambda context: None), wanted_above


def test_one_donor_that_has_no_older_results_has_nobody_load_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had just loaded the newest state itself, and said so truthfully: gigabytes came in the place of a few."""
    assert catches_up(gives_parts=True, says=3, monkeypatch=monkeypatch) == (3, [])


def test_who_names_results_and_gives_none_holds_up_nobody_who_needs_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    assert catches_up(gives_parts=False, says=3, monkeypatch=monkeypatch) == (0, [0])


def test_a_state_is_loaded_where_the_one_that_is_chosen_is_far_ahead_and_not_where_somebody_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    version, wanted_above = catches_up(gives_parts=True, says=1 << 60, monkeypatch=monkeypatch)
    assert version == 3
    assert wanted_above
    assert min(wanted_above) >= 3, "results up to there are less than a state"
