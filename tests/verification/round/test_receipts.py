"""Entries held against the papers they name: an honest one is always borne out, a false one proves itself."""

from dataclasses import replace
from functools import cache

import pytest

from benchmarks.round.drawn_papers import Neighbours, papers_of
from benchmarks.round.drawn_papers import settings_of as three_stages
from benchmarks.round.drawn_papers import work_of as entry_of
from swarm.core.errors import RemoteError
from swarm.core.ids import MicrobatchId, PeerId, StageIndex, Step, Version
from swarm.core.round.contribution import Contribution, Work, counted_work
from swarm.core.round.facts import WorkLimits
from swarm.core.state.result_size import most_work
from swarm.identity.key import Identity, verify
from swarm.manifest.signed_run import SignedRun
from swarm.manifest.value import run_id, settings_bytes
from tests.swarm.core.audit.chances import HOST_CHAIN, NO_CHANCE, chance_of, said_by, ticket_of
from tests.swarm.core.round.round_world import facts_of, identities, identity_of, run_key
from tests.verification import exhibits
from tests.verification.exhibits import SmallRun, small_settings, work_of
from verification.kinds.false_work import FalseWork, entry_check
from verification.pipeline.headers import HopHeader
from verification.replay.judge import judge
from verification.round.papers import Papers
from verification.round.receipts import are_of, check_receipts, why_false

SETTINGS = small_settings(3)
RUN_ID = run_id(SETTINGS, run_key().peer_id)
STAGES = pytest.mark.parametrize("stage", range(3))


@cache
def truth() -> tuple[tuple[Papers, ...], tuple[Papers, ...]]:
    """What the peers of three stages have for each of two microbatches."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(exhibits, "RUN_ID", RUN_ID)  # the run's own, as a judge needs it
        run = SmallRun(SETTINGS)
        shown = [run.microbatch(number) for number in range(2)]
    one, other = (tuple(replace(exhibit.papers, gradient_out=None) for exhibit in of) for of in shown)
    return one, other


@cache
def peer_of(stage: int) -> PeerId:
    return SmallRun(SETTINGS).peers[stage][0].peer_id


def stranger() -> PeerId:
    known = {peer_of(stage) for stage in range(3)}
    return next(identity.peer_id for identity in identities(4) if identity.peer_id not in known)


def contribution(stage: int, *work: Work, step: int = 0, peer: PeerId | None = None) -> Contribution:
    unsigned = Contribution(
        RUN_ID, StageIndex(stage), Step(step), bytes(32), peer or peer_of(stage), work, (bytes(32),), NO_CHANCE
    )
    return replace(unsigned, signature=identity_of(unsigned.peer_id).sign(unsigned.signed_bytes()))


def entry(stage: int) -> tuple[Papers, Work]:
    papers = truth()[0][stage]
    return papers, work_of(papers, Version(0))


def known(peer: PeerId, stage: int) -> bool:
    return True


@STAGES
def test_honest_work_is_borne_out(stage: int) -> None:
    papers, work = entry(stage)
    made = contribution(stage, work)
    assert are_of(papers, work, made, SETTINGS)
    assert why_false(papers, work, made, SETTINGS) is None
    assert check_receipts(papers, work, made, SETTINGS, is_of_stage=known)
    assert not check_receipts(papers, work, made, SETTINGS, is_of_stage=lambda peer, of: False)


@STAGES
@pytest.mark.parametrize("field", ["microbatch_id", "attempt", "num_tokens", "step", "peer"])
def test_an_entry_that_says_otherwise_than_its_papers_is_a_lie_that_proves_itself(stage: int, field: str) -> None:
    papers, work = entry(stage)
    if field == "step":
        made = contribution(stage, work, step=1)
    elif field == "peer":
        made = contribution(stage, work, peer=stranger())  # it lists what another did
    else:
        changed = {"microbatch_id": MicrobatchId(7), "attempt": 3, "num_tokens": work.num_tokens + 1}[field]
        work = replace(work, **{field: changed})
        made = contribution(stage, work)
    assert are_of(papers, work, made, SETTINGS)
    assert why_false(papers, work, made, SETTINGS) is not None
    told: list[FalseWork] = []
    check = entry_check(SETTINGS, is_of_stage=known, on_lie=told.append)
    with pytest.raises(RemoteError):
        check(made, 0, papers.to_value())
    assert [case.accused for case in told] == [made.peer_id]
    verdict = judge(told[0].to_evidence(signed_run()), run_key=run_key().peer_id)
    assert verdict.guilty, verdict.reason


@STAGES
def test_papers_of_another_microbatch_prove_nothing_and_are_not_taken(stage: int) -> None:
    """Whoever shows them may have made them up: only what an entry names convicts."""
    _, work = entry(stage)
    made, others = contribution(stage, work), truth()[1][stage]
    assert not are_of(others, work, made, SETTINGS)
    told: list[FalseWork] = []
    with pytest.raises(RemoteError, match="other papers"):
        entry_check(SETTINGS, is_of_stage=known, on_lie=told.append)(made, 0, others.to_value())
    assert not told
    with pytest.raises(RemoteError, match="not those that the entry names"):
        judge(FalseWork(contribution=made, entry=0, papers=others).to_evidence(signed_run()))


@STAGES
def test_an_honest_entry_cannot_be_made_to_look_false(stage: int) -> None:
    """Whoever accuses may leave papers out, exchange them, or spoil what no digest covers: their signatures."""
    papers, work = entry(stage)
    made = contribution(stage, work)
    spoilt = [replace(papers, birth=replace(papers.birth, signature=bytes(64)))]
    for name in ("input_header", "forward_header", "gradient_in"):
        header: HopHeader | None = getattr(papers, name)
        swapped = getattr(truth()[1][stage], name)
        changes = [None, swapped] if header is not None else [truth()[0][1].input_header]
        spoilt += [replace(papers, **{name: change}) for change in changes]
        if header is not None:
            spoilt.append(replace(papers, **{name: replace(header, signature=bytes(64))}))
            for field, value in (("consumer", peer_of(0)), ("attempt", 9), ("parents", ()), ("stage", StageIndex(7))):
                spoilt.append(replace(papers, **{name: replace(header, **{field: value})}))
    for birth in (replace(papers.birth, step=Step(9)), truth()[1][stage].birth):
        spoilt.append(replace(papers, birth=birth))
    for shown in spoilt:
        guilty = are_of(shown, work, made, SETTINGS) and why_false(shown, work, made, SETTINGS) is not None
        assert not guilty, shown
        try:
            verdict = judge(FalseWork(contribution=made, entry=0, papers=shown).to_evidence(signed_run()))
        except RemoteError:
            continue
        assert not verdict.guilty, verdict.reason


@pytest.mark.parametrize("name", ["input_header", "gradient_in"])
def test_a_header_that_its_maker_has_not_signed_is_no_receipt(name: str) -> None:
    papers, work = entry(1)
    made = contribution(1, work)
    forged = replace(papers, **{name: replace(getattr(papers, name), signature=bytes(64))})
    with pytest.raises(RemoteError, match="not signed"):
        check_receipts(forged, work, made, SETTINGS, is_of_stage=known)


@cache
def signed_run() -> SignedRun:
    key = run_key()
    unsigned = SignedRun(settings_bytes(SETTINGS), key.peer_id)
    return replace(unsigned, signature=key.sign(unsigned.signed_bytes()))


def test_two_neighbours_in_league_have_papers_for_twice_a_step_and_no_more() -> None:
    """A source and a peer of the next stage sign for each other, and compute nothing: what replays are for."""
    each = 16  # microbatches a step, which four honest members do together
    settings = three_stages(each)
    near, accomplice, honest = Neighbours.made_up(), identities(5)[0], identities(5)[1:]
    stage, step = StageIndex(1), Step(0)
    facts = replace(facts_of(5), run_id=RUN_ID, stage=stage, step=step, previous_name=bytes(32), num_parts=1)
    facts = replace(facts, said=said_by(HOST_CHAIN, step), links={})

    def made(me: Identity, ids: range) -> Contribution:
        shown = [papers_of(settings, RUN_ID, stage, step, MicrobatchId(number), me, near) for number in ids]
        work = tuple(entry_of(papers, Version(0)) for papers in shown)
        ticket = ticket_of(me.peer_id, run_key(), run_id=RUN_ID, stage=stage)
        unsigned = Contribution(
            RUN_ID,
            stage,
            step,
            bytes(32),
            me.peer_id,
            work,
            (bytes(32),),
            chance_of(me.peer_id, step, ticket=ticket),
        )
        check = entry_check(settings, is_of_stage=known, on_lie=_nobody)
        assert all(check(unsigned, entry, papers.to_value()) for entry, papers in enumerate(shown))
        return replace(unsigned, signature=me.sign(unsigned.signed_bytes()))

    most = most_work(each)
    contributions = [made(me, range(each // 4 * at, each // 4 * (at + 1))) for at, me in enumerate(honest)]
    contributions.append(made(accomplice, range(most)))
    weights = {one.peer_id: sum(item.num_tokens for item in counted_work(one, None)) for one in contributions}
    share = weights[accomplice.peer_id] / sum(weights.values())
    assert share == pytest.approx(2 / 3)
    members = tuple(sorted(one.peer_id for one in contributions))
    facts = replace(facts, limits=WorkLimits(max_work=most), members=members)
    facts.check_contribution(contributions[-1], verify)
    with pytest.raises(RemoteError, match="are the most"):
        facts.check_contribution(made(accomplice, range(most + 1)), verify)


def _nobody(case: FalseWork) -> None:
    raise AssertionError(f"{case.accused} is taken to lie")
