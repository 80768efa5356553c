"""The host's share in the beacon: told for what is certified, the same after a restart, another in another era."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bootstrap.audit.beacon import KEPT_ERAS, HostBeacon, HostChains
from bootstrap.round.followed_stage import FollowedStage
from swarm.core.audit.beacon import Beacon
from swarm.core.audit.chance import HostWord
from swarm.core.errors import TransientError
from swarm.core.ids import PeerId
from swarm.identity.key import Identity
from swarm.network.transport import Message
from tests.verification.exhibits import SmallRun, small_settings

RUN_KEY, OTHER = Identity.from_seed(b"k" * 32), Identity.from_seed(b"o" * 32)
STAGE = 1


def chains(key: Identity = RUN_KEY) -> HostChains:
    settings: Any = SimpleNamespace(optimizer=SimpleNamespace(total_steps=100), model=SimpleNamespace(num_stages=2))
    return HostChains(cast(Any, SimpleNamespace(run_id="run", run_key=key, settings=settings)))


class Followed(SimpleNamespace):
    """A stage that the host follows, at a version."""

    def __init__(self, version: int, *, era: int = 0, lineage: bytes = bytes(32)) -> None:
        super().__init__(chain=SimpleNamespace(version=version, era=era, lineage=lineage))


def test_a_host_that_is_started_again_has_the_same_chains_and_others_in_another_era() -> None:
    one, again, other = chains(), chains(), chains(OTHER)
    assert one.end(STAGE, 0) == again.end(STAGE, 0)
    ends = [one.end(stage, era) for stage in (0, 1) for era in (0, 1)]
    assert len({*ends, other.end(STAGE, 0)}) == 5
    one.make(2)
    assert {era for _, era in one._made} <= {1, 2}
    assert len(one._made) == 2 * KEPT_ERAS


def test_it_speaks_of_versions_that_are_certified_and_of_no_later_one() -> None:
    own, stages = chains(), cast("dict[int, FollowedStage]", {})
    beacon = HostBeacon(own, stages)

    def ask(lineage: bytes = bytes(32)) -> HostWord:
        meta: Any = {"stage": STAGE, "lineage": lineage}
        reply = asyncio.run(beacon._on_beacon(PeerId("anybody"), Message(meta)))
        return HostWord.from_value(cast(Any, reply.meta)["said"])

    with pytest.raises(TransientError):
        ask()
    before = HostWord(0, own.end(STAGE, 0))
    for version in (0, 1, 2, 40):  # it was away from the third to the fortieth
        stages[STAGE] = cast(FollowedStage, Followed(version))
        said = ask()
        assert said.num_versions == version
        assert said.follows(before)
        before = said
    with pytest.raises(TransientError, match="another beginning"):
        ask(b"1" * 32)
    stages[STAGE] = cast(FollowedStage, Followed(50, era=1))
    assert ask().follows(HostWord(0, own.end(STAGE, 1)))
    assert not ask().follows(before)


def test_it_draws_as_members_do_who_have_heard_it() -> None:
    run = SmallRun(small_settings(2))
    run.microbatch(0)
    run.step(0)
    roster = run.step(STAGE).result.roster
    own, stages = chains(), cast("dict[int, FollowedStage]", {STAGE: Followed(0)})
    host = HostBeacon(own, stages)
    with pytest.raises(TransientError, match="has not spoken of step 0"):
        host.of(roster)
    stages[STAGE] = cast(FollowedStage, Followed(3))
    assert host.of(roster) == Beacon.of(roster, HostWord(1, own.of(STAGE, 0).reveal(0)))
