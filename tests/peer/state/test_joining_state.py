"""A joiner begins from the state that the run key anchors or most members state, whatever some donors say."""

import asyncio
import random
import tempfile
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import swarm.checkpoint.many_donors
from peer.state.joining_state import BrokenOff, ChosenState, Find, JoiningState, agreed
from swarm.checkpoint.state import CHUNK_BYTES, StageState, chunk_hash, state_chunks, state_digest
from swarm.checkpoint.transfer import CHUNK, SNAPSHOT, Offer
from swarm.core.errors import TransientError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId, StageIndex, Step, Version
from swarm.core.state.stage_chain import StageChain
from swarm.core.transfers import MOST_DONORS
from swarm.host_protocol import ANCHOR
from swarm.identity.key import Identity
from swarm.network.memory import MemoryNetwork
from swarm.network.transport import Message
from tests.swarm.core.round.round_world import run_key, witness_identities
from tests.swarm_in_process import manifest_of, swarm_in_process
from tests.verification.exhibits import RUN_ID, SmallRun, small_settings
from verification.state.anchor import Anchor

STAGE = StageIndex(1)
MEMBERS = 7
STRANGERS = [Identity.from_seed(bytes([number]) * 32) for number in range(MOST_DONORS + 1)]
JOINER = Identity.from_seed(b"j" * 32)
HOST = witness_identities(1)[0]

Snapshot = tuple[StageState, StageChain]
Spoil = Callable[[int, bytes], bytes]


@dataclass(frozen=True)
class Truth:
    """A stage's honest past."""

    run: SmallRun
    snapshots: Mapping[int, Snapshot]
    """At versions 1 and 2."""

    @property
    def members(self) -> list[PeerId]:
        return [identity.peer_id for identity in self.run.peers[STAGE]]

    def digest(self, version: int) -> bytes:
        return state_digest(self.snapshots[version][0])

    def anchor(self, version: int) -> Anchor:
        return Anchor.of_chain(self.snapshots[version][1], self.digest(version)).signed_by(run_key())

    def made_up(self, version: int, *, weight: float) -> Snapshot:
        """A state that never was, with hashes and facts to match; above version 2, of that version."""
        state, chain = self.snapshots[min(version, 2)]
        weights = state.weights.copy()
        weights[0] = weight
        return replace(state, weights=weights, version=version), replace(chain, version=Version(version))


@pytest.fixture(scope="module")
def truth() -> Truth:
    run = SmallRun(small_settings(2), num_peers=MEMBERS)
    snapshots = {}
    for version in (1, 2):
        run.microbatch(version)
        run.step(0)
        run.step(STAGE)
        snapshots[version] = run.snapshot(STAGE)
    assert len(state_chunks(snapshots[1][0])) > 1
    return Truth(run, snapshots)


class Scene:
    """Donors, who serve what they like, a host that may be away, and a joiner."""

    def __init__(self, truth: Truth, anchor: Anchor | None) -> None:
        self.truth = truth
        self._made = tempfile.TemporaryDirectory()
        self.folder = Path(self._made.name)
        self.network = MemoryNetwork(random.Random(0))
        self.asked: list[tuple[PeerId, int]] = []
        """(donor, index) of every chunk."""
        self.joiner = self.network.transport(JOINER)
        self.broken_off = BrokenOff()
        self.anchor = anchor
        if anchor is not None:

            async def on_anchor(sender: PeerId, request: Message) -> Message:
                assert self.anchor is not None
                return Message({"anchor": self.anchor.to_value()})

            self.network.transport(HOST).serve(ANCHOR, on_anchor, max_body_bytes=0)

    def donor(
        self,
        index: int,
        snapshots: Mapping[int, Snapshot] | None = None,
        *,
        spoil: Spoil = lambda at, chunk: chunk,
        takes_s: float = 0.0,
    ) -> None:
        """Member `index` serves these snapshots, by default the honest ones; beyond the members a stranger does."""
        held = self.truth.snapshots if snapshots is None else snapshots
        identity = [*self.truth.run.peers[STAGE], *STRANGERS][index]
        transport = self.network.transport(identity)

        async def on_snapshot(sender: PeerId, request: Message) -> Message:
            wanted = request.meta["version"]
            version = max(held) if wanted is None else wanted
            if version not in held:
                raise TransientError(f"no snapshot of version {version} here")
            assert isinstance(version, int)
            state, chain = held[version]
            return offer_of(state, chain).to_message()

        async def on_chunk(sender: PeerId, request: Message) -> Message:
            fields = Fields("chunk request", request.meta)
            at = fields.integer("index")
            self.asked.append((identity.peer_id, at))
            await asyncio.sleep(takes_s)
            return Message({}, spoil(at, bytes(state_chunks(held[fields.integer("version")][0])[at])))

        transport.serve(SNAPSHOT, on_snapshot, max_body_bytes=0)
        transport.serve(CHUNK, on_chunk, max_body_bytes=0)

    def honest(self, *indices: int) -> None:
        for index in indices:
            self.donor(index)

    def wanted(self) -> JoiningState:
        run = self.truth.run
        return JoiningState(
            *(self.joiner, run.settings, RUN_ID, run_key().peer_id, HOST.peer_id, STAGE),
            *(run.replicas[STAGE][0].layout, self.folder, 0),
            self.broken_off,
        )

    async def join(
        self,
        *,
        newer_than: int = -1,
        members: list[PeerId] | None = None,
        donors: list[PeerId] | None = None,
        find: Find | None = None,
    ) -> Snapshot:
        members = self.truth.members if members is None else members
        donors = self.truth.members if donors is None else donors
        return await self.wanted().fetch(donors, members, newer_than=newer_than, find=find)


def offer_of(state: StageState, chain: StageChain | None) -> Offer:
    chunks = state_chunks(state)
    hashes = tuple(chunk_hash(chunk) for chunk in chunks)
    return Offer(STAGE, state.version, state_digest(state), hashes, sum(map(len, chunks)), chain)


def everything(scene: Scene, *, liars: int, lie: Mapping[int, Snapshot]) -> None:
    """The first members lie, the others are honest."""
    for index in range(liars):
        scene.donor(index, {**scene.truth.snapshots, **lie})
    scene.honest(*range(liars, MEMBERS))


# -- with the host ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [2, 99])
@pytest.mark.parametrize("liars", [1, 2, MEMBERS - 1])
def test_the_anchored_state_is_taken_whatever_donors_claim(truth: Truth, liars: int, version: int) -> None:
    async def play() -> None:
        scene = Scene(truth, truth.anchor(2))
        everything(scene, liars=liars, lie={version: truth.made_up(version, weight=7.0)})
        state, chain = await scene.join()
        assert state_digest(state) == truth.digest(2)
        assert chain == truth.snapshots[2][1]

    asyncio.run(play())


def test_who_was_cut_off_when_it_began_and_is_there_now_gives_chunks_too(
    truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newcomer of a stage of three came while one of them was cut off for a minute: its line was idle for ten."""
    monkeypatch.setattr(swarm.checkpoint.many_donors, "LOOK_FOR_MORE_S", 0.05)

    async def play() -> None:
        def not_the_last(at: int, chunk: bytes) -> bytes:
            if at:
                raise TransientError("its line is full")
            return chunk

        scene = Scene(truth, truth.anchor(2))
        scene.donor(0, spoil=not_the_last, takes_s=0.4)
        looks = 0

        async def find() -> list[PeerId]:
            nonlocal looks
            looks += 1
            if looks == 1:
                raise TransientError("the directory does not answer")
            scene.honest(1)
            return truth.members

        state, _ = await scene.join(donors=truth.members[:1], find=find)
        assert state_digest(state) == truth.digest(2)
        assert looks >= 2
        assert truth.members[1] in {donor for donor, _ in scene.asked}

    asyncio.run(play())


def first_alone(at: int, chunk: bytes) -> bytes:
    """A line that was cut off after one chunk."""
    if at:
        raise TransientError("it is cut off")
    return chunk


async def broke_off(scene: Scene) -> None:
    """The joiner has the first chunk of version 1; then a newer one is anchored."""
    scene.donor(0, spoil=first_alone)
    with pytest.raises(TransientError, match="cut off"):
        await scene.join(donors=scene.truth.members[:1], find=nobody)
    scene.anchor = scene.truth.anchor(2)
    scene.asked.clear()


async def nobody() -> list[PeerId]:
    return []


@pytest.fixture
def looks_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarm.checkpoint.many_donors, "LOOK_S", 0.01)
    monkeypatch.setattr(swarm.checkpoint.many_donors, "LOOK_FOR_MORE_S", 0.02)


@pytest.mark.usefixtures("looks_soon")
def test_a_state_that_broke_off_is_gone_on_with_though_a_newer_one_is_anchored(truth: Truth) -> None:
    """Snapshots came every 8 versions, and a state took longer: each try began anew, with gigabytes already here."""

    async def play() -> None:
        scene = Scene(truth, truth.anchor(1))
        await broke_off(scene)
        scene.honest(1)
        state, chain = await scene.join(donors=truth.members[1:2])
        assert state_digest(state) == truth.digest(1)
        assert chain == truth.snapshots[1][1]
        assert sorted(at for _, at in scene.asked) == list(range(1, len(state_chunks(state))))
        assert scene.broken_off == BrokenOff()

    asyncio.run(play())


@pytest.mark.usefixtures("looks_soon")
@pytest.mark.parametrize("why", ["nobody has it", "it is too old", "it is another past", "a newer one is wanted"])
def test_a_state_that_broke_off_and_leads_nowhere_is_let_go(truth: Truth, why: str) -> None:
    async def play() -> None:
        scene = Scene(truth, truth.anchor(1))
        await broke_off(scene)
        begun = scene.broken_off.chosen
        assert begun is not None
        assert len(scene.broken_off.chunks) == 1
        scene.donor(1, {2: truth.snapshots[2]} if why == "nobody has it" else None, spoil=first_alone)
        if why == "it is too old":
            old = Version(1 - truth.run.settings.retained_results)
            scene.broken_off.chosen = replace(begun, chain=replace(begun.chain, version=old))
        if why == "it is another past":
            scene.broken_off.chosen = replace(begun, chain=replace(begun.chain, lineage=bytes(32)))
        newer_than = 1 if why == "a newer one is wanted" else -1
        with pytest.raises(TransientError, match="cut off"):
            await scene.join(donors=truth.members[1:2], newer_than=newer_than, find=nobody)
        chosen = scene.broken_off.chosen
        assert chosen is not None
        assert chosen.version == 2
        hashes = set(offer_of(*truth.snapshots[2]).hashes)
        assert scene.broken_off.chunks.keys() <= hashes, "no try's chunks pile up on those of others"

    asyncio.run(play())


def test_a_state_that_every_donor_has_dropped_meanwhile_is_waited_for_by_nobody(truth: Truth) -> None:
    """They have the next one, and say so at once: no look later, as where the own line is away."""

    async def play() -> None:
        scene = Scene(truth, truth.anchor(1))

        def dropped(at: int, chunk: bytes) -> bytes:
            scene.anchor = truth.anchor(2)
            scene.donor(0, {2: truth.snapshots[2]})
            raise TransientError("no chunk of version 1 here")

        scene.donor(0, spoil=dropped)
        async with asyncio.timeout(10.0):
            with pytest.raises(TransientError, match="nobody gives version 1 any more; 2 is anchored"):
                await scene.join(donors=truth.members[:1])
            state, _ = await scene.join(donors=truth.members[:1])
        assert state.version == 2

    asyncio.run(play())


def test_strangers_take_no_members_place(truth: Truth) -> None:
    """A directory named eight strangers first, who let the chunks drip: no member was ever asked."""
    strangers = [stranger.peer_id for stranger in STRANGERS]

    async def play() -> None:
        scene = Scene(truth, truth.anchor(2))
        scene.honest(*range(MEMBERS + len(STRANGERS)))
        state, _ = await scene.join(donors=[*strangers, *truth.members])
        assert state_digest(state) == truth.digest(2)
        assert {donor for donor, _ in scene.asked} <= set(truth.members)
        chosen = ChosenState(truth.digest(2), truth.snapshots[2][1], "anchored")
        known, more = [*strangers, *truth.members], scene.wanted()._more_holders
        assert [*await more(known, chosen)] == [*truth.members, *strangers[: MOST_DONORS - MEMBERS]]
        assert [*await more(known, chosen, strangers[:MOST_DONORS])] == truth.members, "though no place is free"

    asyncio.run(play())


def test_strangers_who_have_no_state_are_not_all_who_are_asked(truth: Truth) -> None:
    async def play() -> None:
        scene = Scene(truth, truth.anchor(2))
        scene.honest(MEMBERS + MOST_DONORS)
        state, _ = await scene.join(donors=[*truth.members, *(stranger.peer_id for stranger in STRANGERS)])
        assert state_digest(state) == truth.digest(2)

    asyncio.run(play())


def test_chunks_come_from_several_donors_and_a_corrupt_one_from_another(truth: Truth) -> None:
    async def play() -> None:
        scene = Scene(truth, truth.anchor(2))
        scene.honest(1, 2)
        scene.donor(0, spoil=lambda at, chunk: bytes([chunk[0] ^ 1]) + chunk[1:])
        state, _ = await scene.join()
        assert state_digest(state) == truth.digest(2)
        spoilt = truth.members[0]
        assert sum(donor == spoilt for donor, _ in scene.asked) == 1, "it is not asked again"
        assert {donor for donor, _ in scene.asked} - {spoilt}, "another gave that chunk"
        assert {at for _, at in scene.asked} == set(range(len(state_chunks(state))))

    asyncio.run(play())


@pytest.mark.usefixtures("looks_soon")
@pytest.mark.parametrize("spoilt", [b"", b"x" * CHUNK_BYTES])
def test_the_joiner_refuses_when_every_donor_gives_other_chunks(truth: Truth, spoilt: bytes) -> None:
    async def play() -> None:
        scene = Scene(truth, truth.anchor(2))
        for index in range(MEMBERS):
            scene.donor(index, spoil=lambda at, chunk: spoilt)
        with pytest.raises(TransientError, match=r"does not have its hash|no donor of 7 is left"):
            await scene.join()

    asyncio.run(play())


def test_the_joiner_refuses_when_no_donor_has_what_is_anchored(truth: Truth) -> None:
    async def play() -> None:
        scene = Scene(truth, truth.anchor(2))
        for index in range(MEMBERS):
            scene.donor(index, {1: truth.snapshots[1], 2: truth.made_up(2, weight=7.0)})
        with pytest.raises(TransientError, match="version 2 of stage 1 is anchored by the run key; no donor of 7"):
            await scene.join()
        assert scene.asked == []

    asyncio.run(play())


def test_an_anchored_version_that_is_here_already_is_no_news(truth: Truth) -> None:
    async def play() -> None:
        scene = Scene(truth, truth.anchor(2))
        scene.honest(*range(MEMBERS))
        with pytest.raises(TransientError, match="one above 2 is wanted"):
            await scene.join(newer_than=2)
        state, _ = await scene.join(newer_than=1)
        assert state.version == 2

    asyncio.run(play())


@pytest.mark.parametrize("wrong", ["signature", "run"])
def test_an_anchor_that_the_run_key_did_not_sign_is_none(truth: Truth, wrong: str) -> None:
    lie = truth.made_up(2, weight=7.0)
    anchor = Anchor.of_chain(lie[1], state_digest(lie[0]))
    if wrong == "run":
        anchor = replace(anchor, run_id="another", chain=replace(anchor.chain, run_id="another"))
    forged = anchor.signed_by(run_key() if wrong == "run" else JOINER)

    async def play() -> None:
        scene = Scene(truth, forged)
        everything(scene, liars=2, lie={2: lie})
        state, _ = await scene.join()
        assert state_digest(state) == truth.digest(2), "the members decide"

    asyncio.run(play())


# -- without the host -------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [2, 99])
def test_without_the_host_more_than_two_thirds_of_the_members_decide(truth: Truth, version: int) -> None:
    async def play() -> None:
        scene = Scene(truth, None)
        everything(scene, liars=2, lie={version: truth.made_up(version, weight=7.0)})
        state, chain = await scene.join()
        assert state_digest(state) == truth.digest(2)
        assert chain == truth.snapshots[2][1]

    asyncio.run(play())


def test_without_the_host_three_liars_of_seven_are_enough_to_make_the_joiner_refuse(truth: Truth) -> None:
    async def play() -> None:
        scene = Scene(truth, None)
        lie = truth.made_up(2, weight=7.0)
        for index in range(3):
            scene.donor(index, {2: lie})
        scene.honest(3, 4, 5, 6)
        with pytest.raises(TransientError, match="more than two thirds of its 7 members, 7 of which answered"):
            await scene.join()
        assert scene.asked == []

    asyncio.run(play())


def test_facts_that_differ_under_one_digest_are_no_agreement(truth: Truth) -> None:
    async def play() -> None:
        scene = Scene(truth, None)
        state, chain = truth.snapshots[2]
        for index in range(3):
            scene.donor(index, {2: (state, replace(chain, era=chain.era + 1))})
        scene.honest(3, 4, 5, 6)
        with pytest.raises(TransientError, match="more than two thirds"):
            await scene.join()

    asyncio.run(play())


def test_the_version_before_is_taken_while_members_have_not_all_made_the_next_snapshot(truth: Truth) -> None:
    async def play() -> None:
        scene = Scene(truth, None)
        scene.honest(0, 1, 2)
        for index in range(3, MEMBERS):
            scene.donor(index, {1: truth.snapshots[1]})
        state, _ = await scene.join()
        assert state.version == 1
        assert state_digest(state) == truth.digest(1)
        with pytest.raises(TransientError, match="above version 1"):
            await scene.join(newer_than=1)

    asyncio.run(play())


def test_whoever_is_no_member_has_no_word(truth: Truth) -> None:
    async def play() -> None:
        scene = Scene(truth, None)
        lie = truth.made_up(99, weight=7.0)
        for index in range(3, MEMBERS):
            scene.donor(index, {99: lie})
        scene.honest(0, 1, 2)
        state, _ = await scene.join(members=truth.members[:3])
        assert state_digest(state) == truth.digest(2)

    asyncio.run(play())


def test_agreement_counts_members_and_takes_the_newest(truth: Truth) -> None:
    old, new = (offer_of(*truth.snapshots[version]) for version in (1, 2))
    three = truth.members[:3]
    assert agreed(three, {}) is None
    assert agreed(three, dict.fromkeys(three[:2], new)) is None, "two of three are not more than two thirds"
    found = agreed(three, dict.fromkeys(truth.members, new))
    assert found is not None
    assert (found.version, found.digest, found.reason) == (2, truth.digest(2), "stated by 3 of 3 members")
    assert agreed(three, {**dict.fromkeys(three, new), three[0]: old}) is None
    assert agreed(three, dict.fromkeys(three, replace(new, chain=None))) is None


# -- in a running swarm -----------------------------------------------------------------------------------


def test_a_peer_that_comes_late_ends_with_the_bytes_of_the_others(tmp_path: Path) -> None:
    manifest = manifest_of(
        optimizer={"total_steps": 24},
        limits={"founders_per_stage": 2},
        checkpoint={"every_steps": 24, "snapshot_every": 2},
    )

    async def train() -> dict[str, Any]:
        async with swarm_in_process(manifest, tmp_path, peers=(1, 2), evaluate_tokens=64) as swarm:
            await swarm.add_peer(0)
            await swarm.until_version(8)  # results of the first steps are held no more: it needs a snapshot
            late = await swarm.add_peer(1)
            await swarm.until(
                lambda: any(e["event"] == "joined" and e["peer_id"] == late.peer_id for e in swarm.events)
            )
            return await swarm.finished()

    report = asyncio.run(train())
    assert report["steps"] == 24
    assert {stage: len(digests) for stage, digests in report["state_digests"].items()} == {"0": 2, "1": 3}
    for digests in report["state_digests"].values():
        assert len(set(digests.values())) == 1


def test_a_peer_that_went_back_to_a_step_which_it_leads_comes_on_again(tmp_path: Path) -> None:
    """As after a start with an old snapshot: who reports to itself is told by nobody that the step is over."""
    manifest = manifest_of(
        optimizer={"total_steps": 200},
        limits={"founders_per_stage": 3},
        checkpoint={"every_steps": 200, "snapshot_every": 2},
        deadlines={"call_s": 1.0},
    )

    async def train() -> set[str]:
        async with swarm_in_process(manifest, tmp_path, peers=(3, 3), evaluate_tokens=64) as swarm:
            reported = swarm.host.progress.digests

            def of_all() -> list[set[str]]:
                later = (reported[version].get(1, {}) for version in sorted(reported) if version > 6)
                return [set(replicas.values()) for replicas in later if len(replicas) == 3]

            await swarm.until_version(3)
            chain, state = swarm.of_stage(1)[0].steps.chain, deepcopy(swarm.of_stage(1)[0].steps.replica.state)
            leader = chain.leaders(Step(chain.version))[0]
            (back,) = [peer.rounds.taking for peer in swarm.of_stage(1) if peer.peer_id == leader]
            await swarm.until_version(5)
            await back.begin_again(state, chain)
            await swarm.until(lambda: bool(of_all()), timeout_s=60.0)
            return of_all()[0]

    assert len(asyncio.run(train())) == 1
