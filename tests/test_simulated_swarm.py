"""A simulated swarm: liars are banned and nobody else, never before they lie, and a seed tells all of it."""

from typing import Any

import pytest

from peer.adversary import strengths
from peer.sim import Outcome, SimulatedSwarm, TinyRun
from swarm.core.compute_mode import ComputeMode
from swarm.core.errors import SettingsError
from swarm.core.settings import AuditSettings, CodecSettings
from swarm.model.stage import StageModel

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
    outcome = outcome_of({}, steps=30, microbatches_per_step=12, codecs=CodecSettings(averaging="fp32"), audits=ALL)
    assert outcome.bans == outcome.quarantined == ()
    audits = outcome.audits
    assert audits.honest == audits.hops + audits.contributions, audits
    assert (audits.contributions, audits.hops) == (28 * 2 * 4 * 3, 28 * 2 * 12 * 3), audits
    assert (audits.suspicious, audits.frauds, audits.debts, audits.skipped) == (0, 0, 0, 0)
    assert 0 < audits.largest_honest_share <= 0.3, "sums of three microbatches depend on their order"
    assert outcome.held_out[30] < 0.6 * outcome.held_out[0], outcome.held_out


def test_peers_that_compute_sample_by_sample_and_those_that_do_not_agree_in_audits() -> None:
    by_sample = ComputeMode(1, recompute=True)
    plain = CodecSettings(activations="fp32", activation_gradients="fp32", averaging="fp32")
    swarm = SimulatedSwarm(
        TinyRun(**(SMALL | {"audits": ALL, "codecs": plain})),
        seed=0,
        model_of=lambda model, stage, index: StageModel(model, stage).computing(by_sample if index % 2 else None),
    )
    outcome = swarm.run(8)
    assert outcome.bans == outcome.quarantined == ()
    assert outcome.audits.differing > 0, "whoever computes otherwise has other bits"
    assert outcome.audits.largest_honest_share <= 0.3


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


def test_bits_that_flip_are_a_fault_and_who_has_the_third_stays_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strengths, "BIT_FLIP_SHARE", 1.0)  # in every microbatch: most flips are too small to be found
    swarm = SimulatedSwarm(TinyRun(**SMALL), attacks={(1, 2): "bit_flips@2"}, seed=0)
    broken, out_after = swarm.peer(1, 2).peer_id, []
    for _ in range(24):
        swarm.step()
        if swarm.outcome().quarantined:
            out_after.append(swarm.counts.faults)
    assert set(out_after) == {3}, (out_after, swarm.counts)
    assert swarm.outcome().quarantined == (broken,)
    assert swarm.bans == []


def test_outcome_is_the_same_when_the_seed_is() -> None:
    one, same, other = (outcome_of({(1, 1): "alie@3"}, steps=6, seed=seed) for seed in (7, 7, 8))
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
    for attack in ("gradient_negate@2", "wrong_reducer@2", "no_such@1"):
        with pytest.raises(SettingsError):
            SimulatedSwarm(TinyRun(), attacks={(0, 0): attack}, seed=0)
