"""A peer's word on a tensor, laid beside what its neighbours hold of it: true where it is honest, proved where not."""

from dataclasses import replace

import pytest

from swarm.bulk_digest import bulk_digest
from swarm.checkpoint.state import state_chunks, state_digest
from swarm.core.canonical import Value
from swarm.core.errors import RemoteError
from swarm.core.ids import StageIndex, Version
from swarm.core.settings import RunSettings
from swarm.identity.key import Identity
from swarm.manifest.signed_run import SignedRun
from swarm.manifest.value import run_id, settings_bytes
from tests.swarm.core.round.round_world import run_key
from tests.verification import exhibits
from tests.verification.exhibits import SmallRun, received, sent, small_settings, tokens_and_targets
from verification.audit.evidence import Evidence
from verification.audit.tolerance import Grade
from verification.kinds.hop_mismatch import HopMismatch
from verification.pipeline.exchanges import Exchange, read_exchanges
from verification.pipeline.headers import HopHeader, check_hop, forward_parents
from verification.pipeline.hop_claim import HopClaim, claims_of
from verification.replay.compared import compared_claim
from verification.replay.judge import judge
from verification.replay.stage_replay import StageReplay
from verification.round.papers import Bytes, Exhibit
from verification.state.anchor import Anchor
from verification.state.past import Past

STAGES = 3


def narrow(subspace: int) -> RunSettings:
    settings = small_settings(STAGES)
    return replace(settings, model=replace(settings.model, subspace=subspace, subspace_seed=subspace))


def claims_at(run: SmallRun, shown: tuple[Exhibit, ...], stage: int, number: int = 0) -> list[HopClaim]:
    """What the neighbours of a stage's first peer hold of it."""
    peer = run.peers[stage][0].peer_id
    before = [sent(shown[stage - 1])] if stage else []
    after = [received(shown[stage + 1])] if stage < STAGES - 1 else []
    ids = tokens_and_targets(run.settings, number)[0].astype("<i4").tobytes() if not stage else None
    return claims_of(peer, before, after, ids=ids)


def begun(run: SmallRun, stage: int) -> StageReplay:
    replay = StageReplay(run.settings, stage)
    replay.begin(*run.snapshot(stage))
    return replay


def compared(replay: StageReplay, claim: HopClaim) -> Grade:
    return compared_claim(replay, claim).grade


def lied(claim: HopClaim, identity: Identity) -> HopClaim:
    """The claim as its maker would have signed it for the negated tensor, in fp32 over fp32."""
    body = bytes(claim.claimed)
    negated = b"".join(body[at : at + 3] + bytes([body[at + 3] ^ 0x80]) for at in range(0, len(body), 4))
    header = replace(claim.header, body_digest=bulk_digest(negated))
    return replace(claim, header=header.signed_by(identity), claimed=negated)


@pytest.mark.parametrize("subspace", [1, 4])
def test_what_neighbours_hold_of_honest_work_is_true_at_every_stage(subspace: int) -> None:
    run = SmallRun(narrow(subspace))
    replays = [begun(run, stage) for stage in range(STAGES)]
    shown = run.microbatch(0)
    directions = []
    for stage, replay in enumerate(replays):
        for claim in claims_at(run, shown, stage):
            claim.check(run.settings, run_id=exhibits.RUN_ID)
            assert compared(replay, claim) is Grade.HONEST
            directions.append((stage, claim.header.direction))
    assert directions == [(0, "forward"), (1, "forward"), (1, "gradient"), (2, "gradient")]


def test_a_lie_is_seen_though_its_maker_shows_and_lists_nothing() -> None:
    run = SmallRun(small_settings(STAGES))
    replays = [begun(run, stage) for stage in range(STAGES)]
    shown = run.microbatch(0)
    for stage, replay in enumerate(replays):
        for claim in claims_at(run, shown, stage):
            lie = lied(claim, run.peers[stage][0])
            lie.check(run.settings, run_id=exhibits.RUN_ID)
            assert compared(replay, lie) is Grade.FRAUD


@pytest.mark.parametrize("subspace", [1, 4])
def test_a_claim_is_refused_when_anything_in_it_is_not_what_its_header_names(subspace: int) -> None:
    run = SmallRun(narrow(subspace))
    shown = run.microbatch(0)
    other = run.microbatch(1)
    for stage in range(STAGES):
        for claim in claims_at(run, shown, stage):
            spoilt = [
                replace(claim, claimed=bytes(len(claim.claimed))),
                replace(claim, x=bytes(len(claim.x))),
                replace(claim, birth=other[0].papers.birth),
                replace(claim, header=replace(claim.header, version=Version(1))),
                replace(claim, header=replace(claim.header, stage=StageIndex(STAGES))),
                replace(claim, header=claim.header.signed_by(run.peers[(stage + 1) % STAGES][0])),
            ]
            if claim.x_header is not None:
                spoilt.append(replace(claim, x_header=None))
                spoilt.append(replace(claim, x_header=other[stage].papers.input_header, x=other[stage].x))
            if claim.grad_header is not None:
                spoilt.append(replace(claim, grad_header=None))
                spoilt.append(replace(claim, grad_y=bytes(len(claim.grad_y))))
            if claim.targets:
                half = len(claim.targets) // 2
                spoilt.append(replace(claim, targets=bytes(len(claim.targets))))
                spoilt.append(replace(claim, targets=bytes(half) + bytes(claim.targets[half:])))
                spoilt.append(replace(claim, targets=bytes(claim.targets[:half]) + bytes(half)))
            for bad in spoilt:
                with pytest.raises(RemoteError):
                    bad.check(run.settings, run_id=exhibits.RUN_ID)
            with pytest.raises(RemoteError):
                claim.check(run.settings, run_id="cd" * 32)


def test_a_header_that_names_two_births_holds_nobody_to_either() -> None:
    """Else its maker could have another peer's answer to the one replayed with the targets of the other."""
    run = SmallRun(small_settings(2))
    one, other = run.microbatch(0), run.microbatch(1)
    stage0 = run.peers[0][0]
    forward, births = one[0].papers.forward_header, [shown[0].papers.birth for shown in (one, other)]
    assert forward is not None
    for named in (births, births[::-1], births[1:]):
        both = replace(forward, parents=tuple(birth.digest() for birth in named)).signed_by(stage0)
        for birth in births:
            with pytest.raises(RemoteError, match="does not name what it was made from"):
                check_hop(
                    both,
                    replace(birth, microbatch_id=both.microbatch_id, attempt=both.attempt),
                    bytes(one[0].y),
                    sender=stage0.peer_id,
                    consumer=both.consumer,
                    stage=StageIndex(0),
                    direction="forward",
                    shape=both.shape,
                    codec=both.codec,
                    parents=forward_parents(births[0].digest(), 0),
                    delay=0,
                )
        answered = one[1].papers.gradient_out
        assert answered is not None
        answer = replace(answered, parents=(both.digest(),)).signed_by(run.peers[1][0])
        for birth, targets in zip(births, (one[1].targets, other[1].targets), strict=True):
            framed = HopClaim(
                birth=birth,
                header=answer,
                x_header=replace(both, signature=bytes(64)),
                grad_header=None,
                claimed=one[1].grad_x,
                x=one[1].x,
                targets=targets,
                grad_y=b"",
            )
            with pytest.raises(RemoteError):
                framed.check(run.settings, run_id=exhibits.RUN_ID)


def test_a_gradient_is_not_laid_beside_another_peers_answer() -> None:
    """A microbatch that was sent on twice came back twice: only the answer that was used makes a claim."""
    run = SmallRun(small_settings(STAGES))
    shown = run.microbatch(0)
    answer = received(shown[2])
    assert answer.gradient is not None
    again = replace(answer, gradient=replace(answer.gradient, numeric_class="another"))
    found = claims_of(run.peers[1][0].peer_id, [sent(shown[1 - 1])], [again])
    assert [claim.header.direction for claim in found] == ["forward"]


def test_exchanges_are_read_as_they_are_written() -> None:
    shown = SmallRun(small_settings(STAGES)).microbatch(0)
    made = [sent(shown[0]), received(shown[2])]
    body = b"".join(bytes(part) for one in made for part in one.bodies)
    value: dict[str, Value] = {"exchanges": [one.to_value() for one in made]}
    assert [_plain(one) for one in read_exchanges(value, body)] == [_plain(one) for one in made]
    for spoilt in (body[:-1], body + b"\0"):
        with pytest.raises(RemoteError):
            read_exchanges(value, spoilt)


def _plain(one: Exchange) -> tuple[object, ...]:
    return (one.birth, one.forward, one.gradient, *(bytes(body) for body in one.bodies))


@pytest.mark.parametrize("steps", [0, 2])
def test_evidence_of_a_hop_is_judged_from_the_file_alone(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    settings = SmallRun(small_settings(2)).settings
    unsigned = SignedRun(settings_bytes(settings), run_key().peer_id)
    signed_run = replace(unsigned, signature=run_key().sign(unsigned.signed_bytes()))
    monkeypatch.setattr(exhibits, "RUN_ID", run_id(settings, run_key().peer_id))
    run = SmallRun(settings)
    state, chain = run.snapshot(1)
    anchor = Anchor.of_chain(chain, state_digest(state)).signed_by(run_key())
    chunks = tuple(bytes(chunk) for chunk in state_chunks(state))
    done = []
    for number in range(steps):
        run.microbatch(number)
        run.step(0)
        done.append(run.step(1))
    shown = run.microbatch(10)
    (honest,) = claims_of(run.peers[1][0].peer_id, [sent(shown[0])], [])
    past = Past(beginning=anchor, results=tuple(one.result for one in done))
    bodies: tuple[tuple[Bytes, ...], ...] = tuple(tuple(one.bodies) for one in done)

    def judged(claim: HopClaim) -> bool:
        case = HopMismatch(claim=claim, past=past, state_chunks=chunks, bodies=bodies)
        evidence = Evidence.from_bytes(case.to_evidence(signed_run).to_bytes(), max_bytes=1 << 30)
        return judge(evidence, run_key=run_key().peer_id).guilty

    assert judged(lied(honest, run.peers[1][0]))
    assert not judged(honest)
    other_era = replace(honest.birth, era=7)
    with pytest.raises(RemoteError):
        judged(replace(honest, birth=other_era))
    if steps:
        earlier: HopHeader = replace(honest.header, version=Version(steps - 1))
        with pytest.raises(RemoteError):  # the past leads past it
            judged(replace(honest, header=earlier.signed_by(run.peers[1][0])))
