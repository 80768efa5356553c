"""A stage's work done again by who was not there: its versions to the byte, its microbatches, its contributions."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from swarm.averaging.activations import activation_codec
from swarm.checkpoint.state import state_digest
from swarm.core.errors import LocalError, RemoteError
from swarm.core.ids import StageIndex, Step, Version
from swarm.core.round.contribution import Result
from swarm.core.settings import (
    AveragingCodecName,
    AveragingSettings,
    CodecSettings,
    OptimizerSettings,
    Packing,
    RunSettings,
)
from swarm.model.families import canonical_config_json
from tests.swarm.model.tiny_models import CONFIGS
from tests.verification.exhibits import EXACT, RUN_ID, Done, SmallRun, honest_exhibit, small_settings, work_of
from verification.replay import Replayed, StageReplay
from verification.round.papers import Exhibit

Floats = NDArray[np.float32]

CODED = CodecSettings(activations="int8", activation_gradients="int8", averaging="int8")
EXTRAPOLATING: dict[str, Any] = {
    "optimizer": OptimizerSettings(correction="extrapolate", learning_rate=0.01, warmup_steps=2, total_steps=50),
    "averaging": AveragingSettings(delay=1, sync_steps=0),
}


def begun(run: SmallRun, stage: int) -> StageReplay:
    replay = StageReplay(run.settings, stage)
    replay.begin(*run.snapshot(stage))
    return replay


def decoded(replay: StageReplay, body: Any) -> Floats | None:
    """None of what is not there. Both codecs of these runs are one."""
    codec = activation_codec(replay.settings.codecs.activations)
    return codec.decode(body, (2, 16, 64)).numpy() if body is not None and len(body) else None


def back(replay: StageReplay, exhibit: Exhibit) -> tuple[Floats | None, Floats | None]:
    """The gradient of x as it was claimed, and as it came out."""
    sent = replayed(replay, exhibit)[0].grad_x
    return decoded(replay, exhibit.grad_x), decoded(replay, sent.body if sent else None)


def replayed(replay: StageReplay, exhibit: Exhibit) -> tuple[Replayed, Floats]:
    """With the parameter gradients."""
    into = torch.zeros(replay.layout.num_values)
    return replay.microbatch(exhibit, exhibit.papers.birth.step, into), into.numpy()


def error(claimed: Floats | None, right: Floats | None) -> float:
    """Relative L2."""
    assert claimed is not None
    assert right is not None
    return float(np.linalg.norm(claimed - right) / np.linalg.norm(right))


# -- microbatches -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("documents", ["packed", "masked"])
@pytest.mark.parametrize("codecs", [EXACT, CODED])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_honest_claims_are_replayed(stage: int, codecs: CodecSettings, documents: Packing) -> None:
    settings = small_settings(3, codecs=codecs)
    run = SmallRun(replace(settings, data=replace(settings.data, documents=documents)))
    replay = begun(run, stage)
    exhibit = run.microbatch(5)[stage]
    assert bool(exhibit.papers.birth.document_bounds) == (documents == "masked")
    exhibit.check(run.peers[stage][0].peer_id, run_id=RUN_ID, stage=StageIndex(stage), num_stages=3)
    made, gradient = replayed(replay, exhibit)
    there = (decoded(replay, exhibit.y), decoded(replay, made.y.body if made.y else None))
    pairs = [there, back(replay, exhibit)]
    for claimed, right, is_there in zip(*zip(*pairs, strict=True), (stage < 2, stage > 0), strict=True):
        assert (claimed is not None) == (right is not None) == is_there
        if is_there:
            assert error(claimed, right) < 1e-6
            assert codecs is EXACT or np.array_equal(claimed, right)
    assert (made.loss_sum is not None) == (stage == 2)
    assert error(gradient, run.replicas[stage][0].sum_of(Step(0)).gradient.flat.numpy()) < 1e-6


LIES: dict[str, Callable[[Floats], NDArray[Any]]] = {
    "negated": lambda values: -values,
    "zeros": np.zeros_like,
    "noised": lambda values: values + np.random.default_rng(0).normal(0, 0.5 * values.std(), values.shape),
    "of another sample": lambda values: values[::-1].copy(),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_false_claims_differ_grossly(stage: int, lie: str) -> None:
    run = SmallRun(small_settings(3, codecs=CODED))
    replay, codec = begun(run, stage), activation_codec("int8")

    def told(body: Any) -> bytearray:
        values = codec.decode(body, (2, 16, 64)).numpy()
        return codec.encode(torch.from_numpy(LIES[lie](values).astype(np.float32)))

    honest = run.microbatch(5)[stage]
    right, _ = replayed(replay, honest)
    if stage < 2:
        assert right.y is not None
        assert error(decoded(replay, told(honest.y)), right.y.exact) > 0.3
    if stage > 0:
        assert right.grad_x is not None
        assert error(decoded(replay, told(honest.grad_x)), right.grad_x.exact) > 0.3


def test_claim_of_older_weights_is_no_claim_of_these() -> None:
    run = SmallRun(small_settings(2))
    old = begun(run, 1)
    exhibit = run.microbatch(0)[1]
    run.step(1)
    new = begun(run, 1)
    papers = exhibit.papers
    assert papers.gradient_out is not None
    moved = replace(papers, gradient_out=replace(papers.gradient_out, version=Version(1)))
    born = replace(moved, birth=replace(papers.birth, step=Step(1)))
    pretended = replace(exhibit, papers=born, version=Version(1))
    assert error(*back(old, exhibit)) < 1e-6
    assert error(*back(new, pretended)) > 1e-3


@pytest.mark.parametrize(
    ("stage", "body"), [(0, "x"), (0, "grad_y"), (1, "x"), (1, "grad_y"), (2, "x"), (2, "targets")]
)
@pytest.mark.parametrize("nonsense", [b"", b"\xff" * 40, None], ids=["empty", "short", "no numbers"])
def test_malformed_bytes_are_refused_and_leave_the_sum(stage: int, body: str, nonsense: bytes | None) -> None:
    run = SmallRun(small_settings(3))
    exhibit = run.microbatch(0)[stage]
    held = getattr(exhibit, body)
    changed: dict[str, Any] = {body: b"\xff\xff\xff\x7f" * (len(held) // 4) if nonsense is None else nonsense}
    bad = replace(exhibit, **changed)
    into = torch.zeros(run.replicas[stage][0].layout.num_values)
    with pytest.raises(RemoteError, match=r"bytes|not finite|lie in"):
        begun(run, stage).microbatch(bad, Step(0), into)
    assert not into.any()


def test_microbatch_of_another_step_shape_or_number_of_targets_is_refused() -> None:
    run = SmallRun(small_settings(2))
    replay, exhibit = begun(run, 1), run.microbatch(0)[1]
    into = torch.zeros(replay.layout.num_values)
    birth = exhibit.papers.birth
    for other, said in (
        (replace(birth, step=Step(1)), "microbatch of step 1"),
        (replace(birth, shape=(1, 32)), r"shape \(1, 32\)"),
        (replace(birth, num_targets=birth.num_targets - 1), "birth record says"),
    ):
        with pytest.raises(RemoteError, match=said):
            replay.microbatch(replace(exhibit, papers=replace(exhibit.papers, birth=other)), Step(0), into)
    assert not into.any()


# -- versions ---------------------------------------------------------------------------------------------


def trained(run: SmallRun, steps: int) -> list[list[Done]]:
    """Rounds by stage; both peers of a stage work in each."""
    done: list[list[Done]] = [[] for _ in run.replicas]
    for step in range(steps):
        for index in range(len(run.peers[0])):
            run.microbatch(2 * step + index, index=index)
        for stage in range(len(run.replicas)):
            done[stage].append(run.step(stage))
    return done


@pytest.mark.parametrize(
    "settings",
    [
        small_settings(2),
        small_settings(2, codecs=CODED, averaging=AveragingSettings(rule="mean")),
        small_settings(2, optimizer=OptimizerSettings(moments="int8", correction="nadamw", learning_rate=0.01)),
        small_settings(2, optimizer=OptimizerSettings(name="sgd", max_norm=0.01)),
    ],
    ids=["adamw", "int8 codecs", "int8 moments", "sgd, clipped"],
)
def test_state_rebuilt_from_a_snapshot_has_the_bytes_of_the_replicas(settings: RunSettings) -> None:
    run = SmallRun(settings, num_peers=2)
    replays = [begun(run, stage) for stage in range(2)]
    for stage, rounds in enumerate(trained(run, 3)):
        for done in rounds:
            replays[stage].advance(done.result, done.bodies)
        for replica in run.replicas[stage]:
            assert state_digest(replays[stage].state) == state_digest(replica.state)
        assert replays[stage].chain == run.chains[stage]
        assert replays[stage].version == 3


def test_step_without_work_only_counts_on() -> None:
    run = SmallRun(small_settings(2), num_peers=2)
    replay = begun(run, 0)
    done = run.step(0)
    replay.advance(done.result, done.bodies)
    assert state_digest(replay.state) == state_digest(run.replicas[0][0].state)
    assert replay.state.weights.tobytes() == run.states[0].weights.tobytes()


def test_result_that_does_not_follow_or_is_not_certified_is_refused_and_changes_nothing() -> None:
    run = SmallRun(small_settings(2), num_peers=2)
    replay = begun(run, 0)
    before = state_digest(replay.state)
    (first, second), _ = trained(run, 2)

    def refused(result: Result, bodies: Any, said: str) -> None:
        with pytest.raises(RemoteError, match=said):
            replay.advance(result, bodies)
        assert state_digest(replay.state) == before
        assert replay.version == 0

    body = bytearray(first.bodies[0])
    body[5] ^= 1
    refused(first.result, [body], "differs from its digest")
    refused(first.result, [], "0 bodies for a result of 1 parts")
    refused(second.result, second.bodies, "another run, stage or step")
    refused(replace(first.result, certificate=None), first.bodies, "not certified")
    certificate = second.result.certificate
    refused(replace(first.result, certificate=certificate), first.bodies, "certificate is for another")
    parts = tuple(replace(part, digest=bytes([1]) * 32) for part in first.result.parts)
    refused(replace(first.result, parts=parts), first.bodies, "not signed")
    replay.advance(first.result, first.bodies)
    replay.advance(second.result, second.bodies)
    assert state_digest(replay.state) == state_digest(run.replicas[0][0].state)


def test_snapshot_of_another_version_stage_or_optimizer_is_refused() -> None:
    run = SmallRun(small_settings(2))
    state, chain = run.snapshot(0)
    other, other_chain = run.snapshot(1)
    replay = StageReplay(run.settings, 0)
    for wrong, of, said in (
        (replace(state, version=1), chain, "not the one named"),
        (replace(state, name=bytes(32)), chain, "not the one named"),
        (other, other_chain, "another stage"),
        (other, chain, "another stage or model"),
        (replace(state, moments={}), chain, "moments"),
        (replace(state, moments={"first": state.moments["first"]}), chain, "needs"),
    ):
        with pytest.raises(RemoteError, match=said):
            replay.begin(wrong, of)
    with pytest.raises(LocalError, match="has not begun"):
        replay.state  # noqa: B018
    replay.begin(state, chain)
    assert replay.version == 0


# -- extrapolation and delay ------------------------------------------------------------------------------


def test_stale_microbatches_are_replayed_on_the_version_they_were_computed_on() -> None:
    run = SmallRun(small_settings(2, **EXTRAPOLATING))
    replay = begun(run, 1)
    for step in range(2):
        run.microbatch(step)
        done = run.step(1)
        run.step(0)
        replay.advance(done.result, done.bodies)
    late = begun(run, 1)
    early = run.microbatch(10, step=Step(3))[1]  # on version 2, extrapolated
    plain = run.microbatch(11, step=Step(2))[1]
    for exhibit in (early, plain):
        assert error(*back(replay, exhibit)) < 1e-6
    assert replay.weights_for(Step(3))[1] is not replay.weights_for(Step(2))[1]
    with pytest.raises(LocalError, match="needs the one before"):  # a snapshot does not tell what version 1 was
        replayed(late, early)
    assert error(*back(late, plain)) < 1e-6

    done = run.step(1)
    replay.advance(done.result, done.bodies)
    assert error(*back(replay, early)) < 1e-6
    run.step(0)
    fresh = run.microbatch(12, step=Step(3))[1]
    done = run.step(1)
    parts = done.parts[run.peers[1][0].peer_id]
    found = replay.contribution([early, fresh], Step(3))
    assert error(replay.decoded_contribution(parts), found) < 1e-6
    replay.advance(done.result, done.bodies)
    with pytest.raises(LocalError, match="version 2 is not held"):
        replayed(replay, early)


# -- contributions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("stage", [0, 2])
def test_honest_contribution_is_replayed_and_a_false_one_differs(stage: int, name: AveragingCodecName) -> None:
    run = SmallRun(small_settings(3, codecs=replace(CODED, averaging=name)), num_peers=2)
    replay = begun(run, stage)
    exhibits = [run.microbatch(number)[stage] for number in range(2)]
    run.microbatch(2, index=1)
    me = run.peers[stage][0].peer_id
    done = run.step(stage)
    for exhibit, work in zip(exhibits, done.contributions[me].work, strict=True):
        exhibit.check_work(work, me)
        assert work == work_of(exhibit.papers, Version(0))
    claimed, right = replay.decoded_contribution(done.parts[me]), replay.contribution(exhibits, Step(0))
    assert error(claimed, right) < 1e-6
    assert error(replay.decoded_contribution(done.parts[run.peers[stage][1].peer_id]), right) > 0.3
    assert error(-claimed, right) > 1.9
    assert error(claimed, replay.contribution(exhibits[:1], Step(0))) > 0.3


def test_contribution_of_several_parts_is_replayed() -> None:
    settings = small_settings(2, codecs=CODED)
    config = canonical_config_json(CONFIGS["llama"] | {"vocab_size": 6_000})
    run = SmallRun(replace(settings, model=replace(settings.model, config_json=config)), num_peers=2)
    replay = begun(run, 0)
    exhibit = run.microbatch(0, index=1)[0]
    done = run.step(0)
    parts = done.parts[run.peers[0][1].peer_id]
    assert len(parts) == replay.num_parts == 2
    assert error(replay.decoded_contribution(parts), replay.contribution([exhibit], Step(0))) < 1e-6
    assert error(replay.decoded_contribution(parts), np.roll(replay.contribution([exhibit], Step(0)), 1)) > 0.3
    replay.advance(done.result, done.bodies)
    assert state_digest(replay.state) == state_digest(run.replicas[0][0].state)


def test_malformed_contribution_is_refused() -> None:
    run = SmallRun(small_settings(2))
    replay = begun(run, 0)
    run.microbatch(0)
    (part,) = run.step(0).parts[run.peers[0][0].peer_id]
    for bodies, said in (([], "0 parts, not 1"), ([part, part], "2 parts"), ([part[:-1]], "bytes where")):
        with pytest.raises(RemoteError, match=said):
            replay.decoded_contribution(bodies)


@pytest.mark.parametrize("name", ["int4", "topk"])
def test_contribution_with_a_residual_is_not_replayed(name: AveragingCodecName) -> None:
    settings = small_settings(2, codecs=replace(EXACT, averaging=name))
    with pytest.raises(LocalError, match="without the residual"):
        StageReplay(settings, 0).contribution([honest_exhibit(0, settings)], Step(0))


def test_contribution_is_of_one_peer() -> None:
    run = SmallRun(small_settings(2), num_peers=2)
    exhibits = [run.microbatch(index, index=index)[0] for index in range(2)]
    for mixed in (exhibits, []):
        with pytest.raises(LocalError, match="of one"):
            begun(run, 0).contribution(mixed, Step(0))


def test_a_replica_that_loaded_a_state_waits_for_a_step_before_it_computes_ahead() -> None:
    """Others compute the next step on extrapolated weights, which need the version before too: it would look guilty."""
    optimizer = OptimizerSettings(learning_rate=0.01, warmup_steps=2, total_steps=50, correction="extrapolate")
    run = SmallRun(small_settings(2, optimizer=optimizer, averaging=AveragingSettings(delay=1, sync_steps=0)))
    for number in range(3):
        run.microbatch(number)
        for stage in (0, 1):
            run.step(stage)
    replica = run.replicas[0][0]
    ahead = Step(replica.version + 1)
    assert replica.can_compute(ahead)
    replica.restore(replica.frozen_state(), era=0)
    assert replica.can_compute(Step(replica.version))
    assert not replica.can_compute(ahead)
    run.microbatch(3)
    run.step(0)
    assert replica.can_compute(Step(replica.version + 1))
