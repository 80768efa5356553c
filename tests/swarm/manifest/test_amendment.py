"""What may be amended, and what an amendment makes of a run's settings."""

from dataclasses import replace

import pytest

from swarm.core.errors import RemoteError, SettingsError
from swarm.core.ids import Version
from swarm.identity.key import Identity
from swarm.manifest.amendment import amendable_fields, amended, packed_changes, read_changes, told
from swarm.manifest.signed_run import NOTHING_BEFORE, Amendment, SignedRun
from swarm.manifest.value import settings_bytes
from tests.swarm.manifest.test_value import SETTINGS

KEY, OTHER = (Identity.from_seed(bytes([number] * 32)) for number in (1, 2))


def test_steps_schedule_batch_bounds_limits_and_cut_may_be_amended_and_nothing_else() -> None:
    assert amendable_fields() == (
        "batch.target_tokens",
        "optimizer.learning_rate",
        "optimizer.warmup_steps",
        "optimizer.total_steps",
        "optimizer.schedule",
        "optimizer.decay_steps",
        "optimizer.final_learning_rate_share",
        "audits.activation_bounds",
        "audits.gradient_bounds",
        "audits.contribution_bounds",
        "limits.founders_per_stage",
        "limits.max_peers_per_stage",
        "limits.max_in_flight",
        "limits.min_replicas",
        "limits.rebalance_s",
        "limits.refill_s",
        "limits.max_microbatch_attempts",
        "model.stage_layers",
    )


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["model.config=3"], r"model\.config cannot be amended; end the run and start a new one .* model\.config = 3"),
        (["codecs.averaging='fp32'"], r"codecs\.averaging cannot be amended"),
        (["data.seed=4"], r"data\.seed cannot be amended"),
        (["optimizer.totalsteps=4"], r"did you mean optimizer\.total_steps\?"),
        (["optimizer.total_steps"], "give FIELD=VALUE"),
        (["optimizer.total_steps=many"], "is no TOML value"),
        (["optimizer.total_steps=0"], "greater than or equal to 1"),
        (["optimizer.total_steps=3", "optimizer.warmup_steps=5"], "warmup_steps = 5 is more than"),
        (["optimizer.decay_steps=5"], "is of schedule"),
        (["optimizer.schedule='wsd'", "optimizer.decay_steps=190"], "decay_steps = 190 and warmup_steps = 20 together"),
        (["optimizer.total_steps=3", "optimizer.total_steps=4"], "given twice"),
        (["audits.gradient_bounds=2.1"], r"audits\.gradient_bounds = 2\.1 .*less than or equal to 2"),
        (["audits.contribution_bounds=0.4"], r"audits\.contribution_bounds = 0\.4 .*greater than or equal to 0\.5"),
        (["audits.hop_budget=0.4"], r"audits\.hop_budget cannot be amended"),
        (["model.stages=99"], "is more than the model's"),
        (["model.stages=2", "model.stage_layers=[1, 1]"], "both given"),
        ([f"optimizer.total_steps={SETTINGS.optimizer.total_steps}"], "changes nothing"),
    ],
)
def test_a_bad_change_is_refused_by_name(texts: list[str], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        read_changes(texts, SETTINGS)


def test_changes_are_told_and_made() -> None:
    total = SETTINGS.optimizer.total_steps
    changes = read_changes([f"optimizer.total_steps = {2 * total}", "optimizer.learning_rate=1"], SETTINGS)
    assert changes == {"optimizer.learning_rate": 1.0, "optimizer.total_steps": 2 * total}
    assert f"optimizer.total_steps: {total} -> {2 * total}" in told(SETTINGS, changes)
    made = amended(SETTINGS, changes)
    assert made == replace(SETTINGS, optimizer=replace(SETTINGS.optimizer, total_steps=2 * total, learning_rate=1.0))


def run_with(*amendments: Amendment) -> SignedRun:
    return SignedRun(settings_bytes(SETTINGS), KEY.peer_id, amendments).signed_by(KEY)


def chain() -> tuple[Amendment, Amendment]:
    run, one_more = run_with(), SETTINGS.optimizer.total_steps + 1
    first = Amendment(
        run.run_id, 1, NOTHING_BEFORE, Version(4), packed_changes({"optimizer.total_steps": one_more})
    ).signed_by(KEY)
    second = Amendment(
        run.run_id, 2, first.name, Version(9), packed_changes({"optimizer.total_steps": one_more + 1})
    ).signed_by(KEY)
    return first, second


def test_amendments_in_order_are_in_force_and_the_run_is_the_same() -> None:
    first, second = chain()
    run = SignedRun.from_value(run_with(first, second).to_value())
    assert run.run_id == run_with().run_id
    total = SETTINGS.optimizer.total_steps
    assert [run.under(number).in_force.optimizer.total_steps - total for number in range(3)] == [0, 1, 2]
    with pytest.raises(RemoteError, match="3 amendments, 2 are known"):
        run.under(3)


def test_amendments_that_do_not_follow_or_are_not_the_keys_are_refused() -> None:
    first, second = chain()
    for wrong in (
        (second,),
        (second, first),
        (first, replace(second, version=Version(3))),
        (first.signed_by(OTHER),),
        (replace(first, run_id="f" * 64).signed_by(KEY),),
    ):
        with pytest.raises(RemoteError, match="amendment"):
            SignedRun.from_value(run_with(*wrong).to_value())
    other = replace(first, changes=packed_changes({"data.seed": 3})).signed_by(KEY)
    with pytest.raises(RemoteError, match="cannot be amended"):
        assert run_with(other).in_force


def test_what_was_done_at_a_version_was_done_under_the_amendments_in_force_there() -> None:
    run = run_with(*chain())

    def versions(number: int, *, shows_era: bool) -> list[int]:
        under = run.under(number)
        return [version for version in range(12) if under.could_be_of(version, run, shows_era=shows_era)]

    # At the version itself the states of both eras are signed for.
    assert [versions(number, shows_era=True) for number in range(3)] == [
        [0, 1, 2, 3, 4],
        [4, 5, 6, 7, 8, 9],
        [9, 10, 11],
    ]
    assert [versions(number, shows_era=False) for number in range(3)] == [[0, 1, 2, 3], [5, 6, 7, 8], [10, 11]]
