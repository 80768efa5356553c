"""A replica whose windows begin before the version that they are on is there."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from peer.round.work import ContributionEncoder
from peer.state.replica import StageReplica
from swarm.averaging.encoded import Encoded
from swarm.core.errors import LocalError
from swarm.core.ids import MicrobatchId, Step, Version
from swarm.core.round.contribution import Work
from swarm.model.stage import StageModel
from swarm.optim.carried_moments import CarriedMoments
from swarm.optim.local_window import LocalWindow, WindowThere, own_start
from swarm.optim.stage_step import first_state
from tests.pretend_device import OTHERS
from tests.swarm_in_process import manifest_of, prepare

BATCH, LOCAL_STEPS = 2, 4
SEED = bytes(32)


def replica_in(folder: Path, device: str = "cpu") -> StageReplica:
    tables: dict[str, dict[str, Any]] = {
        "model": {"stages": 1},
        "batch": {"microbatch_size": 1, "target_tokens": 32},
        "codecs": {"averaging": "int8"},
        "averaging": {"local_steps": LOCAL_STEPS, "delay": 1, "sync_steps": 0},
    }
    run = prepare(manifest_of(**tables), folder)
    settings = replace(run.settings, batch=replace(run.settings.batch, target_tokens=BATCH * 16))
    assert settings.microbatches_per_step == BATCH
    model = StageModel(settings.model, 0, device=device)
    rng = np.random.default_rng(1)
    state = first_state(settings, model.layout, rng.standard_normal(model.layout.num_values, dtype=np.float32))
    return StageReplica(settings, model, state, clip_norm=1e9)


def work_through(replica: StageReplica, step: int, num_batches: int, *, seed: int) -> None:
    """That many inner steps of the window."""
    rng = np.random.default_rng(seed)
    for _ in range(num_batches * BATCH):
        version, _ = replica.weights_for(Step(step))
        held = replica.sum_of(Step(step))
        held.gradient.flat += float(rng.standard_normal())
        one = MicrobatchId(1000 * step + len(held.work))
        replica.record(Step(step), Work(one, 0, version, 16, bytes(32), bytes(32)))


def said_by(replica: StageReplica, step: int) -> list[memoryview]:
    seeds = [bytes([part % 251]) * 32 for part in range(replica.num_parts)]
    accumulation = replica.close(Step(step))
    accumulation.said = ContributionEncoder(replica).encode(Step(step), accumulation, seeds)[0]
    return [*accumulation.said]


def own_weights(replica: StageReplica, said: list[memoryview]) -> np.ndarray:
    return own_start(CarriedMoments(replica.settings, replica.layout), replica.state, said)[0]


def result_of(replica: StageReplica, said: list[memoryview]) -> list[Encoded]:
    """As if this member and one that has not moved were all."""
    parts, made = replica.parts(), list[Encoded]()
    for part, body in enumerate(said):
        values = np.empty(parts.size(part), dtype=np.float32)
        parts.contribution_codec(part).decode(body, values)
        made.append(parts.result_codec(part).encode(values / np.float32(2), seed=SEED))
    return made


def window_weights(replica: StageReplica, step: int) -> np.ndarray:
    window = replica.sum_of(Step(step)).window
    assert window is not None
    weights = window.weights
    return weights.cpu().numpy() if isinstance(weights, torch.Tensor) else weights.copy()


@pytest.mark.parametrize("device", ["cpu", *OTHERS])
def test_a_window_begins_from_what_its_peer_has_said_and_goes_where_the_result_is_as_it_comes(
    device: str, tmp_path: Path
) -> None:
    replica = replica_in(tmp_path, device)
    assert replica.can_compute(Step(0))
    assert not replica.can_compute(Step(1))
    work_through(replica, 0, LOCAL_STEPS, seed=2)
    assert not replica.can_compute(Step(1)), "its window is at its end, and nothing is said of it"
    said = said_by(replica, 0)
    assert replica.can_compute(Step(1))

    before, own = replica.state, own_weights(replica, said)
    assert replica.weights_for(Step(1))[0] == Version(0)
    np.testing.assert_array_equal(window_weights(replica, 1), own)
    assert not np.array_equal(own, before.weights)

    work_through(replica, 1, 1, seed=3)
    way = window_weights(replica, 1) - own
    made, parts = result_of(replica, said), replica.parts()
    ahead = own.copy()
    for part in range(0, len(parts.gradient), 2):
        values = np.empty(parts.size(part), dtype=np.float32)
        parts.result_codec(part).decode(made[part], values)
        ahead[parts[part]] = before.weights[parts[part]] - values
        replica.hear_of_result(Step(0), part, made[part])
    for part in parts.moments:
        replica.hear_of_result(Step(0), part, made[part])
    assert not np.allclose(ahead, own, atol=1e-4)
    work_through(replica, 1, 1, seed=4)
    moved = window_weights(replica, 1) - ahead
    assert replica.sum_of(Step(1)).follows == 0
    second = np.abs(moved - way).max()
    assert second < 0.1, "it is there, and where its own two steps have brought it from there"


@pytest.mark.parametrize("device", ["cpu", *OTHERS])
def test_once_the_version_is_there_the_window_is_on_it_and_says_its_own_way_alone(device: str, tmp_path: Path) -> None:
    replica = replica_in(tmp_path, device)
    work_through(replica, 0, LOCAL_STEPS, seed=2)
    said = said_by(replica, 0)
    own = own_weights(replica, said)
    work_through(replica, 1, 1, seed=3)
    way = window_weights(replica, 1) - own
    replica.swap(replica.next_version(None, b"one"))
    assert replica.version == 1
    accumulation = replica.close(Step(1))
    assert accumulation.follows == 1
    assert len(accumulation.work) == BATCH
    assert isinstance(accumulation.window, LocalWindow if device == "cpu" else WindowThere)
    contributed = accumulation.window.values(slice(0, replica.layout.num_values))
    np.testing.assert_allclose(contributed, -way, atol=1e-5)
    np.testing.assert_allclose(window_weights(replica, 1), replica.state.weights + way, atol=1e-5)


def test_who_has_nothing_to_say_of_a_window_goes_on_from_the_version_before_like_the_others(tmp_path: Path) -> None:
    replica = replica_in(tmp_path)
    accumulation = replica.close(Step(0))
    assert not replica.can_compute(Step(1))
    accumulation.said = ()
    assert replica.can_compute(Step(1))
    replica.weights_for(Step(1))
    np.testing.assert_array_equal(window_weights(replica, 1), replica.state.weights)
    replica.hear_of_result(Step(0), 0, result_of(replica, said_of_ones(replica))[0])
    before = replica.state.weights.copy()
    work_through(replica, 1, 1, seed=3)
    np.testing.assert_array_equal(replica.state.weights, before)


def said_of_ones(replica: StageReplica) -> list[memoryview]:
    parts = replica.parts()
    return [
        parts.contribution_codec(part).encode(np.ones(parts.size(part), np.float32), seed=SEED)
        for part in range(len(parts))
    ]


def test_a_window_whose_beginning_fails_is_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = replica_in(tmp_path)
    work_through(replica, 0, LOCAL_STEPS, seed=2)
    said = said_by(replica, 0)
    window = replica.sum_of(Step(0)).window
    assert window is not None
    with monkeypatch.context() as broken:

        def begin(*_: object) -> None:
            raise LocalError("no memory")

        broken.setattr(window, "begin", begin)
        with pytest.raises(LocalError, match="no memory"):
            replica.weights_for(Step(1))
    replica.weights_for(Step(1))
    np.testing.assert_array_equal(window_weights(replica, 1), own_weights(replica, said))
    assert window.steps_taken == 0
