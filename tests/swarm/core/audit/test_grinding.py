"""A member that fills in what it may choose until chance favours it."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from swarm.core.canonical import digest
from swarm.core.ids import MicrobatchId, PeerId, StageIndex, Step, Version
from swarm.core.pipeline.leases import LeaseTable
from swarm.core.round.contribution import Contribution, ReducedPart, Result, Roster, Work
from swarm.core.settings import RunSettings
from swarm.core.state.stage_chain import Genesis, StageChain
from tests.swarm.core.state.test_stage_chain import SETTINGS as RUN
from verification.audit.verdicts import jurors

SETTINGS: RunSettings = RUN
MEMBERS = tuple(PeerId(f"member {number:02}") for number in range(12))
LIARS = MEMBERS[3:6]
ACCUSED = MEMBERS[9]
TRIES = 1 << 12


def _chain() -> StageChain:
    genesis = Genesis(
        "run",
        StageIndex(1),
        Version(4),
        bytes(32),
        MEMBERS,
        LeaseTable(),
        PeerId("host"),
        PeerId("run key"),
        (),
    )
    return StageChain.begin(genesis, SETTINGS)


def _result(chain: StageChain, charges: tuple[bytes, ...] = ()) -> Result:
    """Of the version's round, led by the first liar, who knows everything in it before anybody else does."""
    made = []
    for number, peer in enumerate(chain.members):
        work = (Work(MicrobatchId(number), 0, Version(0), 8, bytes(32), bytes(32)),)
        one = Contribution(chain.run_id, chain.stage, Step(chain.version), chain.name, peer, work, (bytes(32),))
        made.append(replace(one, charges=charges) if peer == LIARS[0] else one)
    facts = chain.run_id, chain.stage, Step(chain.version), 0, 0, LIARS[0], chain.name, chain.members
    roster = Roster(*facts, tuple(made), (LIARS[0],), (), (), "full")
    return Result(roster, (ReducedPart(0, b"0" * 32, chain.members),), LIARS[0])


def _ground(chain: StageChain, favours: Callable[[Result], bool]) -> Iterator[Result]:
    """The results that favour the liar, of those it can make by what it says it brings before a jury."""
    for number in range(TRIES):
        result = _result(chain, (digest("nothing", [number]),))
        if favours(result):
            yield result


def _leads(chain: StageChain, result: Result) -> bool:
    after = chain.advance(result, SETTINGS)
    return after.leaders(Step(after.version + 1))[:3] in {
        (one, two, three) for one in LIARS for two in LIARS for three in LIARS
    }


def _judges(result: Result) -> bool:
    drawn = jurors(
        result.roster.members_after,
        accuser=MEMBERS[0],
        accused=ACCUSED,
        evidence_digest=bytes(32),
        next_name=result.new_name,
    )
    return set(drawn) <= set(LIARS)


def test_a_leader_grinds_its_own_charges_until_liars_lead_and_judge() -> None:
    chain = _chain()
    assert any(_ground(chain, lambda result: _leads(chain, result)))
    assert any(_ground(chain, _judges))
