"""Hops of few values are replayed and judged by the bounds of all hops: machines are cleared, liars are found."""

from dataclasses import replace

import pytest

from peer.sim import SimulatedSwarm, TinyRun
from swarm.core.settings import AuditSettings, CodecSettings, RunSettings
from swarm.model.stage import StageModel
from tests.pretend_device import PRETEND, counted

ALL = AuditSettings(hop_budget=3.0, contribution_budget=3.0)


class Narrow(TinyRun):
    """A quarter of the values between three stages."""

    def settings(self) -> RunSettings:
        settings = super().settings()
        return replace(settings, model=replace(settings.model, subspace=4, subspace_seed=3))


class NarrowRounded(Narrow):
    def settings(self) -> RunSettings:
        settings = super().settings()
        return replace(settings, model=replace(settings.model, compute_dtype="bf16"))


def swarm_of(run: type[TinyRun], wire: str, **attacks: str) -> SimulatedSwarm:
    """Every other peer is on another device; `attacks` by "s<stage>p<index>"."""
    codecs = CodecSettings(activations=wire, activation_gradients=wire, averaging="bf16")  # type: ignore[arg-type]
    tiny = run(num_stages=3, num_replicas=3, microbatches_per_step=3, audits=ALL, codecs=codecs)
    return SimulatedSwarm(
        tiny,
        attacks={(int(name[1]), int(name[3])): attack for name, attack in attacks.items()},
        seed=0,
        model_of=lambda model, stage, index: StageModel(model, stage, device=PRETEND if index % 2 else "cpu"),
    )


@pytest.mark.parametrize(
    ("run", "wire"), [pytest.param(Narrow, "int8", marks=pytest.mark.soak), (NarrowRounded, "int4")]
)
def test_nobody_is_charged_for_the_device_it_computes_on(run: type[TinyRun], wire: str) -> None:
    with counted() as copies:
        outcome = swarm_of(run, wire).run(3)
    audits = outcome.audits
    assert outcome.bans == outcome.quarantined == ()
    assert audits.honest == audits.hops + audits.contributions > 0
    assert audits.differing > 0, "the other device rounds otherwise"
    assert audits.largest_honest_share <= 0.3
    assert not copies.waits


ON_TENSORS = ("gradient_negate", "skipped_layers")
MORE_ON_TENSORS = (
    *("activation_noise", "sign_flip"),
    *("activation_swap", "activation_negate", "activation_zeros", "gradient_noise", "gradient_swap", "gradient_zeros"),
    *("stale_weights", "dropped_batch"),
)


@pytest.mark.parametrize(
    "attack", [*ON_TENSORS, *(pytest.param(attack, marks=pytest.mark.soak) for attack in MORE_ON_TENSORS)]
)
def test_a_liar_between_two_stages_is_banned_and_nobody_else(attack: str) -> None:
    codecs = CodecSettings(averaging="bf16")
    tiny = Narrow(num_stages=3, num_replicas=3, microbatches_per_step=3, audits=ALL, codecs=codecs)
    swarm = SimulatedSwarm(tiny, attacks={(1, 1): f"{attack}@1"}, seed=0)
    while not (outcome := swarm.outcome()).bans and outcome.steps < 8:
        swarm.step()
    assert [(ban.stage, ban.index) for ban in outcome.bans] == [(1, 1)], outcome
    assert {ban.kind for ban in outcome.bans} <= {"hop_mismatch", "replay_mismatch"}
    assert outcome.quarantined == ()
