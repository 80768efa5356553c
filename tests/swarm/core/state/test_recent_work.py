"""What each member did in the last versions: from certified results alone, and of the last sixteen with work."""

from dataclasses import replace

from swarm.core.canonical import pack, unpack
from swarm.core.ids import PeerId, Step, Version
from swarm.core.round.basis import leaders_of
from swarm.core.round.contribution import Exclusion, LeftOut, Rate, ReducedPart
from swarm.core.state.recent_work import RECENT_VERSIONS, RecentWork, Shares, done_in, founding_work, worked
from swarm.core.state.stage_chain import StageChain
from tests.swarm.core.state.test_stage_chain import PEERS, SETTINGS, _genesis, _result, _work

WORKER, IDLE, NEW = PEERS[0], PEERS[1], PEERS[3]


def worked_on(chain: StageChain, *workers: PeerId, joins: tuple[PeerId, ...] = ()) -> StageChain:
    works = {peer: (_work(100 * int(chain.version) + at),) for at, peer in enumerate(workers)}
    return chain.advance(_result(chain, works, joins=joins), SETTINGS)


def test_founders_are_equals_and_who_does_nothing_weighs_nothing_after_sixteen_versions() -> None:
    chain = StageChain.begin(_genesis(stage=1), SETTINGS)
    assert len({*chain.basis.work}) == 1
    left = []
    for _ in range(RECENT_VERSIONS):
        left.append(chain.basis.work_of[IDLE])
        chain = worked_on(chain, WORKER, PEERS[2])
    assert left == sorted(left, reverse=True)
    assert min(left) > 0
    assert chain.basis.work_of == {WORKER: 8 * RECENT_VERSIONS, IDLE: 0, PEERS[2]: 8 * RECENT_VERSIONS}
    facts = chain.facts(SETTINGS, num_parts=1, phase_s=1.0)
    assert IDLE not in facts.voters
    after = worked_on(chain, WORKER)
    assert after.leaders(Step(after.version))[-1] == IDLE


def test_versions_without_work_take_nobodys_weight() -> None:
    chain = worked_on(StageChain.begin(_genesis(stage=1), SETTINGS), WORKER)
    before = chain.basis.work_of
    for _ in range(2 * RECENT_VERSIONS):
        chain = chain.advance(_result(chain, {}), SETTINGS)
    assert chain.basis.work_of == before


def test_who_rests_loses_its_weight_with_time_and_who_comes_earns_it() -> None:
    chain = worked_on(StageChain.begin(_genesis(stage=1), SETTINGS), WORKER, joins=(NEW,))
    assert chain.basis.work_of[NEW] == 0
    chain = worked_on(chain, NEW)
    assert chain.basis.work_of[NEW] == 8
    for _ in range(RECENT_VERSIONS - 2):
        chain = worked_on(chain, NEW)
    assert chain.basis.work_of[WORKER] == 8, "of the version in which it worked"
    chain = worked_on(chain, NEW)
    assert chain.basis.work_of[WORKER] == 0


def without(chain: StageChain, slow: PeerId, *workers: PeerId) -> StageChain:
    """After a round that left out what this one had done."""
    works = {peer: (_work(100 * int(chain.version) + at),) for at, peer in enumerate((slow, *workers))}
    result = _result(chain, works)
    roster = result.roster
    (lost,) = [made for made in roster.contributions if made.peer_id == slow]
    rest = tuple(made for made in roster.contributions if made.peer_id != slow)
    parts = tuple(replace(part, contributors=tuple(made.peer_id for made in rest)) for part in result.parts)
    smaller = replace(roster, contributions=rest, left_out=(LeftOut(lost, ()),))
    return chain.advance(replace(result, roster=smaller, parts=parts), SETTINGS)


def test_who_was_left_out_leads_behind_all_others_until_it_brings_something_again() -> None:
    chain = StageChain.begin(_genesis(stage=1), SETTINGS)
    slow, others = PEERS[0], PEERS[1:3]
    turns = set()
    assert not chain.basis.late
    chain = without(chain, slow, *others)
    assert chain.basis.late == (slow,)
    for _ in range(3 * len(chain.members)):  # also by work that was done before, and with none to bring
        early = chain.leaders(Step(chain.version + 1))
        assert early[-1] == slow
        chain = worked_on(chain, *others)
        assert chain.leaders(Step(chain.version)) == early
        assert chain.facts(SETTINGS, num_parts=1, phase_s=1.0).late == (slow,)
        turns.add(early[0])
    assert turns == set(others)
    assert StageChain.from_value(unpack(pack(chain.to_value()), max_bytes=1 << 16)) == chain
    chain = worked_on(chain, slow, *others)
    assert not chain.basis.late
    assert slow in {worked.leaders(Step(worked.version + 1))[0] for worked in led_by_turns(chain, slow, *others)}


def test_whose_parts_come_slowly_by_others_words_leads_behind_all_others_until_they_come_faster() -> None:
    members = PEERS[:4]
    chain = StageChain.begin(_genesis(stage=1, members=members), SETTINGS)
    slow, others = members[0], members[1:]

    def measured(octave: int) -> StageChain:
        """After a round of the others' work: what they say of the slow one's line, which brings nothing."""
        result = _result(chain, {peer: (_work(100 * int(chain.version) + at),) for at, peer in enumerate(others)})
        made = tuple(
            replace(one, rates=tuple(Rate(p, octave if p == slow else 17) for p in members if p != one.peer_id))
            for one in result.roster.contributions
        )
        return chain.advance(replace(result, roster=replace(result.roster, contributions=made)), SETTINGS)

    chain = measured(13)
    assert chain.basis.late == (slow,)
    for _ in range(8):
        assert chain.leaders(Step(chain.version + 1))[-1] == slow
        chain = measured(13)
    chain = measured(16)
    assert chain.basis.late == (slow,), "it has brought nothing since"
    chain = worked_on(chain, slow, *others)
    assert not chain.basis.late


def test_who_is_late_by_the_last_round_does_not_lead_the_next_one_and_the_others_keep_their_order() -> None:
    for number in range(6):
        chain = StageChain.begin(_genesis(stage=1, members=PEERS[:4]), SETTINGS)
        for _ in range(number):
            chain = worked_on(chain, *PEERS[:4])
        early = chain.leaders(Step(chain.version + 1))
        slow = early[0]
        chain = without(chain, slow, *early[1:])
        assert chain.leaders(Step(chain.version)) == (*early[1:], slow)
        assert chain.facts(SETTINGS, num_parts=1, phase_s=1.0).leaders == (*early[1:], slow)


def led_by_turns(chain: StageChain, *workers: PeerId) -> list[StageChain]:
    chains = []
    for _ in range(3 * len(workers)):
        chain = worked_on(chain, *workers)
        chains.append(chain)
    return chains


def test_where_all_were_late_somebody_leads_all_the_same() -> None:
    assert set(leaders_of(dict.fromkeys(PEERS, 8), Step(3), late=PEERS)) == set(PEERS)
    assert leaders_of({WORKER: 8, IDLE: 0, NEW: 0}, Step(3), late=(IDLE,)) == (WORKER, NEW, IDLE)


def test_who_leaves_and_comes_back_begins_anew() -> None:
    chain = worked_on(StageChain.begin(_genesis(stage=1), SETTINGS), WORKER, IDLE)
    chain = chain.advance(_result(chain, {}, leaves=(WORKER,)), SETTINGS)
    chain = chain.advance(_result(chain, {}, joins=(WORKER,)), SETTINGS)
    assert chain.basis.work_of[WORKER] == 0


def test_work_counts_by_the_share_of_parts_that_it_is_in() -> None:
    chain = StageChain.begin(_genesis(stage=1), SETTINGS)
    result = _result(chain, {WORKER: (_work(1),), IDLE: (_work(2),)})
    of_both, of_one = (
        ReducedPart(0, b"0" * 32, (WORKER, IDLE)),
        ReducedPart(0, b"1" * 32, (WORKER,), (Exclusion(IDLE, "malformed"),)),
    )
    counted = chain.weights_of(result.roster, SETTINGS)
    for parts, expected in (
        ((of_both, of_one, of_one, of_both), {WORKER: 8, IDLE: 4}),
        ((of_one, of_one), {WORKER: 8, IDLE: 0}),
        ((ReducedPart.empty(0), of_both), {WORKER: 8, IDLE: 8}),
        ((ReducedPart.empty(0),), {}),
    ):
        assert done_in(replace(result, parts=parts), counted) == expected


def test_a_stage_that_begins_again_keeps_what_is_certified_of_its_members() -> None:
    chain = StageChain.begin(_genesis(stage=1), SETTINGS)
    for _ in range(RECENT_VERSIONS):
        chain = worked_on(chain, WORKER)
    work = founding_work(PEERS[:3], chain.basis.work_of, step_tokens=4096)
    again = StageChain.begin(replace(_genesis(stage=1), version=Version(40), work=work), SETTINGS)
    assert again.basis.work_of == {WORKER: 8 * RECENT_VERSIONS, IDLE: 0, PEERS[2]: 0}
    assert founding_work(PEERS[:3], {}, step_tokens=6144) == (RECENT_VERSIONS * 2048,) * 3
    assert founding_work(PEERS[:3], {NEW: 5}, step_tokens=0) == (RECENT_VERSIONS,) * 3


def test_whoever_begins_at_an_anchor_has_the_same_weights() -> None:
    """The chain that an anchor bears is bounded, and goes on as the others' does."""
    chain = StageChain.begin(_genesis(stage=1), SETTINGS)
    for number in range(40):
        other = StageChain.from_value(unpack(pack(chain.to_value()), max_bytes=1 << 20))
        works = {peer: (_work(1000 + 10 * number + at),) for at, peer in enumerate(chain.members) if (at + number) % 3}
        result = _result(chain, works)
        chain, other = chain.advance(result, SETTINGS), other.advance(result, SETTINGS)
        assert chain == other
        assert all(len(one.tokens) <= RECENT_VERSIONS for one in chain.recent_work)


def test_a_round_in_which_one_comes_and_another_goes_counts_for_those_who_stay() -> None:
    before = (RecentWork(WORKER, (4,) * RECENT_VERSIONS), RecentWork(IDLE, (7,)))
    after = worked(before, {WORKER: 9, IDLE: 3}, (WORKER, NEW))
    assert after == (RecentWork(WORKER, (*(4,) * (RECENT_VERSIONS - 1), 9)), RecentWork(NEW, ()))


def test_versions_in_which_one_brought_nothing_are_counted_until_it_brings_something() -> None:
    recent = (RecentWork(WORKER, (4,)), RecentWork(IDLE, (7,)))
    for _ in range(20):
        recent = worked(recent, {WORKER: 9}, (WORKER, IDLE))
        recent = worked(recent, {}, (WORKER, IDLE))
    assert [one.idle for one in recent] == [0, 20]
    assert [one.idle for one in worked(recent, {IDLE: 1}, (WORKER, IDLE))] == [1, 0]


def test_where_no_neighbour_signs_a_step_counts_an_even_share_twice_or_a_quarter_more_than_was_proven() -> None:
    recent = [RecentWork(WORKER, (8,) * 12 + (640, 320, 320, 320, 320)), RecentWork(IDLE, (0, 0, 800))]
    shares = Shares.of_work(recent, microbatches_per_step=10, microbatch_targets=8)
    assert shares.of(NEW) == 10
    assert shares.of(WORKER) == 50, "the 640 are more than four versions old"
    assert shares.of(IDLE) == 125


def test_a_chain_of_one_stage_counts_no_more_of_a_member_than_its_share() -> None:
    layers = ((0, SETTINGS.model.stage_layers[-1][1]),)
    settings = replace(SETTINGS, model=replace(SETTINGS.model, stage_layers=layers))
    chain = StageChain.begin(_genesis(), settings)
    shares = chain.shares(settings)
    assert shares is not None
    own = chain.leases.ids_of(WORKER)
    greedy = tuple(_work(number) for number in own[: shares.of(WORKER) + 3])
    result = _result(chain, {WORKER: greedy, IDLE: (_work(chain.leases.ids_of(IDLE)[0]),)})
    assert chain.weights_of(result.roster, settings) == {WORKER: 8 * shares.of(WORKER), IDLE: 8}
    after = chain.advance(result, settings)
    assert own[shares.of(WORKER)] in after.leases.ids_of(WORKER), "what does not count is not used up"
