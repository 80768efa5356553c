"""A simulated swarm: liars are banned and nobody else, never before they lie, and a seed tells all of it."""

from typing import Any

import pytest

from peer.adversary import strengths
from peer.sim import Outcome, SimulatedSwarm, TinyRun
from peer.sim.swarm import NOT_SIMULATED
from swarm.attacks import KINDS, Attack
from swarm.core.audit.chance import REVEALED_AFTER
from swarm.core.errors import SettingsError
from swarm.core.ids import Step
from swarm.core.pipeline.compute_mode import ComputeMode
from swarm.core.settings import AuditSettings, AveragingSettings, CodecSettings
from swarm.model.stage import StageModel
from verification.audit.amplified import TABLE, region_sizes
from verification.audit.running_bias import audits_needed

MUCH = AuditSettings(hop_budget=1.0, contribution_budget=1.5)
"""Each of three auditors draws half of the contributions whole, and a third of the microbatches."""
ALL = AuditSettings(hop_budget=3.0, contribution_budget=3.0)
"""Three auditors draw everything."""
SMALL: dict[str, Any] = {"audits": MUCH, "hidden_size": 16, "num_replicas": 4, "microbatches_per_step": 8}


def outcome_of(attacks: dict[tuple[int, int], str], *, steps: int, seed: int = 0, **fields: Any) -> Outcome:
    tiny = TinyRun(**(SMALL | fields))
    return SimulatedSwarm(tiny, attacks=attacks, seed=seed).run(steps)


def banned(outcome: Outcome) -> list[tuple[int, int]]:
    return [(ban.stage, ban.index) for ban in outcome.bans]


def test_nobody_is_banned_when_all_are_honest_and_everything_is_audited() -> None:
    outcome = outcome_of({}, steps=14, microbatches_per_step=12, codecs=CodecSettings(averaging="fp32"), audits=ALL)
    assert outcome.bans == outcome.quarantined == ()
    audits = outcome.audits
    assert audits.honest == audits.hops + audits.contributions, audits
    assert (audits.contributions, audits.hops) == (12 * 2 * 4 * 3, 12 * 2 * 12 * 3), audits
    assert (audits.suspicious, audits.frauds, audits.debts, audits.skipped) == (0, 0, 0, 0)
    assert 0 < audits.largest_honest_share <= 0.3, "sums of three microbatches depend on their order"
    assert outcome.held_out[14] < 0.8 * outcome.held_out[0], outcome.held_out


def test_peers_that_compute_sample_by_sample_and_those_that_do_not_agree_in_audits() -> None:
    by_sample = ComputeMode(1, recompute=True)
    plain = CodecSettings(activations="fp32", activation_gradients="fp32", averaging="fp32")
    swarm = SimulatedSwarm(
        TinyRun(**(SMALL | {"audits": ALL, "codecs": plain})),
        seed=0,
        model_of=lambda model, stage, index: StageModel(model, stage).computing(by_sample if index % 2 else None),
    )
    outcome = swarm.run(5)
    assert outcome.bans == outcome.quarantined == ()
    assert outcome.audits.differing > 0, "whoever computes otherwise has other bits"
    assert outcome.audits.largest_honest_share <= 0.3


@pytest.mark.soak
@pytest.mark.parametrize(("stage", "attack"), [(1, "sign_flip@4"), (0, "stale_weights@5"), (0, "activation_noise@4")])
def test_a_liar_is_banned_and_nobody_else_when_replicas_look(stage: int, attack: str) -> None:
    outcome = outcome_of({(stage, 2): attack}, steps=11)
    assert banned(outcome) == [(stage, 2)], outcome
    assert outcome.bans[0].step >= int(attack.partition("@")[2]), outcome.bans
    assert outcome.audits.acquitted == 0
    assert outcome.quarantined == ()


def test_liars_in_both_stages_are_banned_when_honest_peers_hear_them_whatever_they_plead() -> None:
    attacks = {
        (0, 1): "pleading_activation_negate@3",
        (0, 3): "pleading_zeros@3",
        (1, 0): "gradient_negate@3",
        (1, 2): "pleading_label_flip@5",
    }
    outcome = outcome_of(attacks, steps=13)
    assert sorted(banned(outcome)) == sorted(attacks)
    assert [ban.whole for ban in outcome.bans if (ban.stage, ban.index) == (0, 3)] == [True]
    assert [ban.whole for ban in outcome.bans if (ban.stage, ban.index) == (0, 1)] == [False]


@pytest.mark.soak
def test_auditors_that_agree_without_a_replay_cost_no_more_than_their_own_audits() -> None:
    """One honest auditor of a liar, which plain luck would let two others find too: half of what it does is drawn."""
    attacks = {(1, 2): "sign_flip@4", (1, 0): "lazy_auditor@0", (1, 3): "lazy_auditor@0"}
    outcome = outcome_of(attacks, steps=16)
    assert banned(outcome) == [(1, 2)], "who is lazy does its own work, and is not accused"
    assert outcome.quarantined == ()


def test_who_shows_nothing_is_quarantined_after_three_debts() -> None:
    swarm = SimulatedSwarm(TinyRun(**SMALL), attacks={(0, 3): "withholding@3"}, seed=0)
    outcome = swarm.run(9)
    assert outcome.bans == ()
    assert outcome.quarantined == (swarm.peer(0, 3).peer_id,)


@pytest.mark.soak
def test_bits_that_flip_are_a_fault_and_who_has_the_third_stays_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strengths, "BIT_FLIP_SHARE", 1.0)  # in every microbatch: most flips are too small to be found
    swarm = SimulatedSwarm(TinyRun(**SMALL), attacks={(1, 2): "bit_flips@2"}, seed=0)
    broken, out_after = swarm.peer(1, 2).peer_id, []
    for _ in range(30):
        swarm.step()
        if swarm.outcome().quarantined:
            out_after.append(swarm.counts.faults)
    assert set(out_after) == {3}, (out_after, swarm.counts)
    assert swarm.outcome().quarantined == (broken,)
    assert swarm.bans == []


def test_outcome_is_the_same_when_the_seed_is() -> None:
    one, same, other = (outcome_of({(1, 1): "alie@1"}, steps=4, seed=seed) for seed in (7, 7, 8))
    assert one == same
    assert one.state_digests != other.state_digests


def test_replay_of_a_lie_shows_it_where_it_is_and_nothing_before() -> None:
    silent = AuditSettings(hop_budget=0.0, contribution_budget=0.0)
    swarm = SimulatedSwarm(TinyRun(**(SMALL | {"audits": silent})), attacks={(0, 2): "activation_noise@2"}, seed=0)
    for _ in range(4):
        swarm.step()
    assert swarm.bans == []
    shown = [swarm.shown(0, 2, step) for step in range(4)]
    assert [one.is_wrong for one in shown] == [False] * 4
    assert [one.wrong_microbatches for one in shown] == [(False, False)] * 2 + [(True, True)] * 2


def test_noise_within_tolerance_is_not_found() -> None:
    outcome = outcome_of({(0, 2): "in_tolerance_noise@2"}, steps=11)
    assert outcome.bans == outcome.quarantined == ()
    assert outcome.audits.frauds == 0
    assert outcome.audits.hops > 50, outcome.audits


def test_an_attack_that_has_no_place_is_refused() -> None:
    for attack in ("gradient_negate@2", "forged_records@2", "no_such@1"):
        with pytest.raises(SettingsError):
            SimulatedSwarm(TinyRun(), attacks={(0, 0): attack}, seed=0)


# -- every attack of the kit ----------------------------------------------------------------------------------

EVERYTHING = AuditSettings(hop_budget=3.0, contribution_budget=3.0, reducer_share=1.0)
BEGINS = 3

IN_WINDOWS = [kind for kind, stages in KINDS.items() if stages == "the only"]
FOUND: dict[str, str] = {
    # kind: what its evidence is called, where all is audited and the liar does not plead
    **dict.fromkeys(("sign_flip", "sign_flip_1000", "alie", "ipm", "zeros", "copied_gradient"), "replay_mismatch"),
    **dict.fromkeys(("partial_work", "row_bias", "slow_bias", "long_gradient"), "replay_mismatch"),
    **dict.fromkeys(("activation_noise", "activation_swap", "activation_negate", "activation_zeros"), "hop_mismatch"),
    **dict.fromkeys(("gradient_noise", "gradient_swap", "gradient_negate", "gradient_zeros"), "hop_mismatch"),
    "wrong_reducer": "reducer_fraud",
    "equivocating_reducer": "equivocation",
    "two_votes": "equivocation",
    "wrong_state": "step_fraud",
    "copied_papers": "false_work",
    **dict.fromkeys(IN_WINDOWS, "replay_mismatch"),
}
"""Of the others more than one kind of evidence may come first, or none."""
LEFT_OUT = {
    "forged_records": "it lies in the directory, of which the virtual swarm has none: everybody knows who is there",
    "replayed_records": "it lies in the directory",
    "inflated_records": "it lies in the directory, and of how long work waits: work is dealt out, and waits for nobody",
    "charges": "it brings charges of which there is no case: here a case is judged at once",
}
UNHARMFUL = frozenset(
    {
        "in_tolerance_noise",  # by its name
        "claimed_ids",  # nobody votes for a contribution of which nothing is shown; nothing proves that it is false
        "bit_flips",  # a fault, and most flips are too small to be found
        "nan_gradient",  # its maker's own contribution is left out
        "omitting_reducer",  # whom it leaves out proves it by its own bytes: not simulated
        "omitting_leader",  # nobody votes for a roster without who is there, and another leads
        "equivocating_leader",  # neither roster is voted for, and another leads
        "framing",  # whoever gets its header refuses it, and the microbatch is lost
        "written_result",  # nobody votes for it, and another leads
        "grinding",  # nothing is drawn by what it writes; with another value than its chain has, it is left out
        "sybil_flood",  # nobody votes for a roster that names strangers
        "lying_juror",  # nobody is accused
        "lazy_auditor",  # nobody sees that a draw was not followed
    }
)
"""Nobody is banned or kept out for them here."""


WINDOWS: dict[str, Any] = {
    "num_stages": 1,
    "microbatches_per_step": 2,
    "averaging": AveragingSettings(local_steps=3),
    "codecs": CodecSettings(averaging="int2"),
}
OTHERWISE: dict[str, dict[str, Any]] = {"row_bias": {"vocab_size": 1024}} | dict.fromkeys(IN_WINDOWS, WINDOWS)
"""What an attack needs: rows that no token touches, and no block of an int8 wire with them; or windows."""


ALIKE = frozenset(
    {
        *("sign_flip_1000", "ipm", "alie", "zeros", "copied_gradient"),  # as sign_flip: another gradient as a whole
        *("partial_work", "dropped_batch", "long_gradient", "other_data"),
        *("activation_noise", "activation_swap", "activation_zeros"),  # as activation_negate: another hop as a whole
        *("gradient_noise", "gradient_swap", "gradient_zeros"),  # as gradient_negate
        *("skipped_layers", "stale_weights"),  # both of these as those
        *("lazy_window_20", "lazy_window_30", "lazy_window_50", "lazy_window_90"),  # as lazy_window_10, and larger
        *("small_moments", "negated_moments", "bent_layer"),  # as bent_row
        "slow_bias",  # as row_bias
        "nan_weights",  # as nan_gradient
        *("equivocating_leader", "omitting_leader", "lying_juror", "in_tolerance_noise"),  # have tests of their own
        *("sybil_flood", "lazy_auditor"),  # nothing comes of them, as of claimed_ids
    }
)
"""What comes of them comes of others as well, or is tested below: `make test` has those."""


def stage_for(kind: str) -> int:
    return 1 if Attack(kind).works_in(1, 2) else 0


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.soak if kind in ALIKE else ()) for kind in KINDS]
)
def test_every_attack_on_tensors_papers_parts_or_votes_runs_and_harms_no_honest_peer(kind: str) -> None:
    stage = stage_for(kind)
    attacks = {(stage, 2): f"{kind}@{BEGINS}"}
    if kind in LEFT_OUT:
        assert kind in NOT_SIMULATED, LEFT_OUT[kind]
        with pytest.raises(SettingsError):
            outcome_of(attacks, steps=1)
        return
    fields = SMALL | {"audits": EVERYTHING, "microbatches_per_step": 4} | OTHERWISE.get(kind, {})
    swarm = SimulatedSwarm(TinyRun(**fields), attacks=attacks, seed=0)
    liar, steps = swarm.peer(stage, 2).peer_id, 20 if "reducer" in kind else 9  # who reduces takes turns
    while not (outcome := swarm.outcome()).bans + outcome.quarantined and outcome.steps < steps:
        swarm.step()
    assert {ban.peer_id for ban in outcome.bans} | {*outcome.quarantined} <= {liar}, outcome
    assert all(ban.step >= BEGINS for ban in outcome.bans)
    if kind in UNHARMFUL:
        assert outcome.bans == outcome.quarantined == ()
        return
    assert outcome.bans or outcome.quarantined, f"{kind} does nothing here: {outcome}"
    if kind in FOUND:
        assert [ban.kind for ban in outcome.bans] == [FOUND[kind]]


def test_who_reduces_wrongly_is_found_at_its_first_turn_where_a_stage_has_few_parts() -> None:
    """At the default budget, which is meant for stages of many parts."""
    quiet = SMALL | {"audits": AuditSettings(hop_budget=0.0, contribution_budget=0.0)}
    swarm = SimulatedSwarm(TinyRun(**quiet), attacks={(1, 2): "wrong_reducer@0"}, seed=0)
    liar, turns = swarm.peer(1, 2).peer_id, []
    while not swarm.outcome().bans and swarm.version < 9:
        swarm.step()
        roster = swarm.stages[1].rounds[Step(swarm.version - 1)].roster
        assert roster.num_parts == 1
        turns += [roster.step] if liar in roster.reducers else []
    assert [(ban.peer_id, ban.kind, ban.step) for ban in swarm.outcome().bans] == [(liar, "reducer_fraud", turns[0])]


def test_what_two_birth_records_stand_for_is_refused_and_nobody_is_credited_with_it() -> None:
    swarm = SimulatedSwarm(TinyRun(**SMALL), attacks={(0, 2): f"framing@{BEGINS}"}, seed=0)
    liar = swarm.peer(0, 2).peer_id
    for step in range(BEGINS + 3):
        lost = swarm.outcome().lost_microbatches
        swarm.step()
        done = {
            stage.stage: {
                work.microbatch_id for made in stage.rounds[Step(step)].roster.contributions for work in made.work
            }
            for stage in swarm.stages
        }
        assert done[0] == done[1], "what stage 1 refused is in no contribution to stage 0 either"
        of_liar = [
            work
            for made in swarm.stages[0].rounds[Step(step)].roster.contributions
            if made.peer_id == liar
            for work in made.work
        ]
        assert bool(of_liar) == (step < BEGINS)
        assert (swarm.outcome().lost_microbatches > lost) == (step >= BEGINS)


@pytest.mark.soak
def test_where_who_leads_writes_into_the_result_another_leads() -> None:
    swarm = SimulatedSwarm(TinyRun(**SMALL), attacks={(1, 2): f"written_result@{BEGINS}"}, seed=0)
    liar, stage, written = swarm.peer(1, 2).peer_id, swarm.stages[1], 0
    for step in range(20):
        leads = stage.chain.facts(swarm.settings, num_parts=1, phase_s=1.0).leader_of(0) == liar
        swarm.step()
        result = stage.rounds[Step(step)].outcome.result
        written += step >= BEGINS and leads
        assert (result.roster.view > 0) == (step >= BEGINS and leads)
        assert all(part.squares < strengths.WRITTEN_SQUARES for part in result.parts)
    assert written > 1


def test_a_grinding_member_gets_what_it_would_get_anyway_and_one_step_in_eight_nothing() -> None:
    quiet = SMALL | {"audits": AuditSettings(hop_budget=0.0, contribution_budget=0.0)}
    drawn = []
    for attacks in ({}, {(1, 2): "grinding@0"}):
        swarm = SimulatedSwarm(TinyRun(**quiet), attacks=attacks, seed=0)
        liar = swarm.peer(1, 2).peer_id
        found = []
        for step in range(9):
            stage = swarm.stages[1]
            leaders = stage.chain.leaders(Step(swarm.version))
            is_member = liar in stage.chain.members
            swarm.step()
            roster = stage.rounds[Step(step)].roster
            charged = {len(made.charges) for made in roster.contributions if made.peer_id == liar}
            if attacks and charged:
                assert max(charged) > 0, "it has written something"
            if attacks and step == 7:
                assert charged == set(), "its value is not on its chain"
                assert [one.peer_id for one in roster.leaves] == [liar]
                break
            assert is_member
            found.append((leaders, roster.reducers))
        drawn.append(found[:7])
    honest, ground = drawn
    assert ground == honest


def test_leaders_that_omit_or_equivocate_hold_up_no_round_and_change_no_gradient() -> None:
    quiet = SMALL | {"audits": AuditSettings(hop_budget=0.0, contribution_budget=0.0)}
    for kind in ("equivocating_leader", "sybil_flood"):
        swarm = SimulatedSwarm(TinyRun(**quiet), attacks={(1, 2): f"{kind}@0"}, seed=0)
        liar, has_led = swarm.peer(1, 2).peer_id, False
        for _ in range(6):
            swarm.step()
            roster = swarm.stages[1].rounds[Step(swarm.version - 1)].roster
            has_led |= roster.leader == liar or roster.view > 0
            assert len(roster.contributions) == 4
        assert has_led, "the liar led once, or another did after it"
        assert len(swarm.stages[1].chain.members) == 4


@pytest.mark.parametrize("num_replicas", [2, 4])
def test_an_omitting_leader_leaves_out_nobody(num_replicas: int) -> None:
    """Of two: neighbours and host vote too, and hear the other of itself. Of four: the others hear it. Another leads
    then."""
    quiet = SMALL | {"audits": AuditSettings(hop_budget=0.0, contribution_budget=0.0), "num_replicas": num_replicas}
    swarm = SimulatedSwarm(TinyRun(**quiet), attacks={(1, 1): "omitting_leader@0"}, seed=0)
    views = []
    for _ in range(8):
        swarm.step()
        roster = swarm.stages[1].rounds[Step(swarm.version - 1)].roster
        views.append(roster.view)
        assert len(roster.members) == len(roster.contributions) == num_replicas
    assert any(views), "the liar led, and another led after it"


def test_two_lying_jurors_mislead_and_the_run_key_does_not_follow() -> None:
    attacks = {(1, 0): "false_accuser@2", **{(1, index): "lying_juror@0" for index in (1, 2, 3)}}
    swarm = SimulatedSwarm(TinyRun(**(SMALL | {"num_replicas": 6, "audits": EVERYTHING})), attacks=attacks, seed=0)
    outcome = swarm.run(8)
    assert outcome.bans == ()
    assert outcome.quarantined == (swarm.peer(1, 0).peer_id,), "three untrue accusations"
    assert outcome.audits.juries == outcome.audits.acquitted == 3
    assert outcome.audits.misled >= 1


# -- biases inside the tolerance ------------------------------------------------------------------------------


@pytest.mark.soak
def test_a_bias_where_no_token_is_is_found_in_the_first_audit_of_it() -> None:
    for wire in ("fp32", "int8"):
        codecs = CodecSettings(averaging=wire)  # type: ignore[arg-type]
        outcome = outcome_of({(0, 2): "row_bias@2"}, steps=6, audits=ALL, codecs=codecs, vocab_size=1024)
        assert banned(outcome) == [(0, 2)], outcome
        assert outcome.bans[0].step == 2
        assert outcome.audits.led == 0


@pytest.mark.soak
def test_a_bias_below_every_bound_is_found_after_as_many_audits_as_the_law_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(strengths, "SLOW_BIAS_SHARE", 4e-4)
    codecs, begins = CodecSettings(averaging="fp32"), 2
    swarm = SimulatedSwarm(
        TinyRun(**(SMALL | {"audits": ALL, "codecs": codecs})), attacks={(1, 2): "slow_bias@2"}, seed=0
    )
    liar, moved = swarm.peer(1, 2).peer_id, []
    while liar not in swarm.outcome().quarantined and swarm.version < 60:
        swarm.step()
        if int(swarm.version) > begins and liar not in swarm.outcome().quarantined:
            shown = swarm.audits[1].moved(Step(swarm.version - 1), liar)
            moved.append(shown.whole)
            assert shown.measured < TABLE["fp32", "fp32"].fraud
    outcome = swarm.outcome()
    assert outcome.bans == ()
    assert outcome.quarantined == (liar,)
    assert outcome.audits.frauds == outcome.audits.acquitted == 0
    # The auditor's sum meets the law, then the run key's does: of what is the same in every audit, half at least.
    needed = audits_needed(
        min(moved) / 2, TABLE["fp32", "fp32"], tests=len(region_sizes(swarm.peer(1, 2).replica.layout.num_values)) + 1
    )
    assert needed is not None
    assert begins + 5 + 5 <= swarm.version <= begins + needed + needed + REVEALED_AFTER, (moved, needed)
