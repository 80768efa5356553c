"""Peers on CPUs and on another device in one stage: they audit each other, and only liars are found."""

from dataclasses import replace

import pytest

from peer.sim import SimulatedSwarm, TinyRun
from swarm.core.settings import AuditSettings, CodecSettings, RunSettings
from swarm.model.stage import StageModel
from tests.pretend_device import OTHERS, counted

ALL = AuditSettings(hop_budget=3.0, contribution_budget=3.0)
"""Three auditors draw everything."""


class Rounded(TinyRun):
    """A run computed in bf16."""

    def settings(self) -> RunSettings:
        settings = super().settings()
        return replace(settings, model=replace(settings.model, compute_dtype="bf16"))


def swarm_of(tiny: TinyRun, device: str, **attacks: str) -> SimulatedSwarm:
    """Every other peer is on the other device; `attacks` by "s<stage>p<index>"."""
    by_place = {(int(name[1]), int(name[3])): attack for name, attack in attacks.items()}
    return SimulatedSwarm(
        tiny,
        attacks=by_place,
        seed=0,
        model_of=lambda model, stage, index: StageModel(model, stage, device=device if index % 2 else "cpu"),
    )


@pytest.mark.parametrize(
    ("run", "wire", "width"),
    [
        (Rounded, "int4", 16),
        *(pytest.param(TinyRun, *sizes, marks=pytest.mark.soak) for sizes in (("int8", 16), ("int4h", 128))),
    ],
)
@pytest.mark.parametrize("device", OTHERS)
def test_nobody_is_charged_for_the_device_it_computes_on(
    run: type[TinyRun], wire: str, width: int, device: str
) -> None:
    codecs = CodecSettings(activations=wire, activation_gradients=wire, averaging="bf16")  # type: ignore[arg-type]
    tiny = run(hidden_size=width, num_replicas=4, microbatches_per_step=4, audits=ALL, codecs=codecs)
    swarm = swarm_of(tiny, device)
    with counted() as copies:
        outcome = swarm.run(3)
    audits = outcome.audits
    assert outcome.bans == outcome.quarantined == ()
    assert audits.honest == audits.hops + audits.contributions > 0
    assert audits.frauds == 0
    assert audits.differing > 0, "the other device rounds otherwise"
    assert audits.largest_honest_share <= 0.3
    assert not copies.waits, "replays neither"


@pytest.mark.parametrize("place", ["s1p1", pytest.param("s1p2", marks=pytest.mark.soak)])
@pytest.mark.parametrize("device", OTHERS)
def test_a_liar_is_banned_whichever_device_it_has(place: str, device: str) -> None:
    tiny = TinyRun(hidden_size=16, num_replicas=4, microbatches_per_step=4, audits=ALL)
    outcome = swarm_of(tiny, device, **{place: "sign_flip@1"}).run(5)
    assert [(ban.stage, ban.index) for ban in outcome.bans] == [(int(place[1]), int(place[3]))]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("wire", "attack", "kind"),
    [
        ("int8", "sign_flip@1", "replay_mismatch"),
        ("int4h", "gradient_negate@1", "hop_mismatch"),
        ("int4", "sign_flip@1", "replay_mismatch"),
        ("int8", "gradient_negate@1", "hop_mismatch"),
    ],
)
@pytest.mark.parametrize("device", OTHERS)
def test_in_bf16_a_negated_gradient_is_a_ban_and_nobody_else_is_touched(
    device: str, wire: str, attack: str, kind: str
) -> None:
    codecs = CodecSettings(activations=wire, activation_gradients=wire)  # type: ignore[arg-type]
    tiny = Rounded(hidden_size=64, num_replicas=3, microbatches_per_step=3, audits=ALL, codecs=codecs)
    outcome = swarm_of(tiny, device, s1p1=attack).run(5)
    assert [(ban.stage, ban.index, ban.kind) for ban in outcome.bans] == [(1, 1, kind)]
    assert outcome.quarantined == ()
    assert 0 < outcome.audits.largest_honest_share <= 0.5
