"""Steps on a few chunks of a state are the steps of the whole, to the bit, whatever the optimizer and the chunk."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from kernels.norms import norm_of_parts
from swarm.averaging.encoded import Encoded
from swarm.averaging.parts import Parts
from swarm.checkpoint.state import (
    CHUNK_BYTES,
    StageState,
    chunk_hash,
    merkle_path,
    merkle_root,
    root_by_path,
    state_chunks,
)
from swarm.core.errors import RemoteError
from swarm.core.settings import PART_VALUES, AveragingSettings, CodecSettings, OptimizerSettings
from swarm.core.state.step_rule import NUM_CERTIFIED_NORMS
from swarm.model.layout import ParameterLayout
from swarm.optim.carried_moments import CarriedMoments
from swarm.optim.stage_step import FlatGradient, StageStep, first_state
from tests.verification.exhibits import small_settings
from verification.replay.stepped_again import CertifiedStep, StepsAgain, needs_of

LAYOUT = ParameterLayout.of(
    {
        **{"a": (3, 100_001), "b": (77,), "c": (250_000,)},
        **{"layers.0.d": (9, 12_345), "layers.0.e": (111,), "layers.1.d": (20, 4445)},
    }
)
CUT = Parts(LAYOUT.num_values)
"""Values in three parts, whose arrays end in the middle of blocks and chunks."""
CLIP_NORM = 2.0
OPTIMIZERS = {
    "adamw": OptimizerSettings(),
    "nadamw": OptimizerSettings(correction="nadamw"),
    "int8 moments": OptimizerSettings(moments="int8"),
    "sgd": OptimizerSettings(name="sgd", momentum=0.9),
    "muon": OptimizerSettings(name="muon"),
}


def begun(optimizer: OptimizerSettings) -> tuple[StageState, list[CertifiedStep], StageState]:
    """A state after two steps, three steps more (one of them clipped, one without work), and the state after those."""
    rng = np.random.default_rng(5)
    step = StageStep(optimizer, LAYOUT, clip_norm=CLIP_NORM)
    weights = rng.standard_normal(LAYOUT.num_values, dtype=np.float32)
    state = StageState(4, LAYOUT, weights, name=bytes(32))
    first, steps = state, list[CertifiedStep]()
    for number in range(5):
        gradient = rng.standard_normal(LAYOUT.num_values, dtype=np.float32) * np.float32(1e-3 * (1 + 2 * number))
        norm = norm_of_parts(gradient, part_values=PART_VALUES)
        parts = {part: gradient[where] for part, where in enumerate(CUT)}
        taken = CertifiedStep(name=bytes([number]) * 32, norm=norm, gradient=None if number == 3 else parts)
        state = step.next(state, None if number == 3 else FlatGradient(gradient, norm), taken.name).state
        state = replace(state, moments={name: array.copy() for name, array in state.moments.items()})
        if number == 1:
            first = state
        if number > 1:
            steps.append(taken)
    assert steps[0].norm > CLIP_NORM
    return first, steps, state


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_chunk_of_the_state_follows_from_the_few_that_it_needs(name: str) -> None:
    optimizer = OPTIMIZERS[name]
    old, steps, new = begun(optimizer)
    old_chunks, new_chunks = state_chunks(old), state_chunks(new)
    assert len(new_chunks) >= 4
    for index, wanted in enumerate(new_chunks):
        needs = needs_of(old_chunks[0], index, layout=LAYOUT, cut=CUT)
        assert len(needs.old_chunks) <= 10
        chunks = {number: bytes(old_chunks[number]) for number in needs.old_chunks}
        few = [
            taken if taken.gradient is None else replace(taken, gradient={p: taken.gradient[p] for p in needs.parts})
            for taken in steps
        ]
        again = StepsAgain(optimizer, CLIP_NORM, old, chunks, few, CUT).chunk(index)
        assert again.body == bytes(wanted), index
        assert again.total_bytes == sum(map(len, new_chunks))
        for missing in needs.old_chunks:
            fewer: dict[int, Any] = {number: body for number, body in chunks.items() if number != missing}
            if missing == 0 and index:
                continue  # the header: it is read before
            with pytest.raises(RemoteError):
                StepsAgain(optimizer, CLIP_NORM, old, fewer, few, CUT).chunk(index)


@dataclass(frozen=True)
class WindowsSaid(FlatGradient):
    """A round of windows."""

    said: list[Encoded | None]

    def moments(self) -> list[Encoded | None]:
        return self.said


def test_every_chunk_of_a_state_with_carried_moments_follows_from_the_few_that_it_needs() -> None:
    """Of four rounds one has no work, one is skipped, and in each a part of moments is empty."""
    settings = small_settings(1, codecs=CodecSettings(averaging="int8"), averaging=AveragingSettings(local_steps=3))
    carried, rng = CarriedMoments(settings, LAYOUT), np.random.default_rng(6)
    cut, step = carried.parts, StageStep.of_run(settings, LAYOUT, clip_norm=1e9)
    old = first_state(settings, LAYOUT, rng.standard_normal(LAYOUT.num_values, dtype=np.float32))
    old = state = replace(old, certified_norms=[1.0] * NUM_CERTIFIED_NORMS, name=bytes(32))
    steps = list[CertifiedStep]()
    for number in range(4):
        gradient = rng.standard_normal(LAYOUT.num_values, dtype=np.float32)
        norm = 1e3 if number == 2 else 1.0
        bodies: dict[int, Encoded | None] = dict.fromkeys(cut.moments)
        for part in cut.moments:
            if part % 4 != number:
                values = np.square(rng.standard_normal(cut.size(part), dtype=np.float32))
                bodies[part] = cut.result_codec(part).encode(values, seed=bytes(32))
        parts = {part: gradient[where] for part, where in enumerate(cut.gradient)}
        taken = CertifiedStep(
            name=bytes([number]) * 32, norm=norm, gradient=None if number == 1 else parts, moments=bodies
        )
        whole = None if number == 1 else WindowsSaid(gradient, norm, list(bodies.values()))
        stepped = step.next(state, whole, taken.name)
        assert (stepped.skipped is None) == (number in (0, 3))
        state = stepped.state
        steps.append(taken)
    old_chunks, new_chunks = state_chunks(old), state_chunks(state)
    for index, wanted in enumerate(new_chunks):
        needs = needs_of(old_chunks[0], index, layout=LAYOUT, cut=cut)
        chunks = {number: bytes(old_chunks[number]) for number in needs.old_chunks}
        few = [
            replace(
                taken,
                gradient=None
                if taken.gradient is None
                else {p: taken.gradient[p] for p in needs.parts if p not in cut.moments},
                moments={p: taken.moments[p] for p in needs.parts if p in cut.moments},
            )
            for taken in steps
        ]
        again = StepsAgain(settings.outer, 1e9, old, chunks, few, cut, carried).chunk(index)
        assert again.body == bytes(wanted), index
        assert again.total_bytes == sum(map(len, new_chunks))


def test_a_step_that_replicas_skip_leaves_a_chunk_as_it_was_and_only_counts() -> None:
    optimizer = OPTIMIZERS["adamw"]
    usual = [1.0] * NUM_CERTIFIED_NORMS
    old, steps, _ = begun(optimizer)
    old = replace(old, certified_norms=usual)
    long = replace(steps[0], norm=2 * optimizer.skip_norm_factor)
    step = StageStep(optimizer, LAYOUT, clip_norm=CLIP_NORM)
    step.restore(old)
    gradient = np.full(LAYOUT.num_values, 0.5, dtype=np.float32)
    stepped = step.next(old, FlatGradient(gradient, long.norm), long.name)
    assert stepped.skipped is not None
    assert stepped.state.weights.tobytes() == old.weights.tobytes()
    assert (stepped.state.version, stepped.state.certified_norms) == (old.version + 1, [*usual[1:], long.norm])
    chunks = {number: bytes(chunk) for number, chunk in enumerate(state_chunks(old))}
    for index, wanted in enumerate(state_chunks(stepped.state)):
        assert StepsAgain(optimizer, CLIP_NORM, old, chunks, [long], CUT).chunk(index).body == bytes(wanted)
        assert index == 0 or bytes(wanted) == chunks[index]
    taken = step.next(old, FlatGradient(gradient, optimizer.skip_norm_factor), long.name)
    assert taken.skipped is None
    assert taken.state.weights.tobytes() != old.weights.tobytes()


def test_states_of_another_optimizer_are_refused() -> None:
    old, steps, _ = begun(OPTIMIZERS["adamw"])
    chunks = dict(enumerate(state_chunks(old)))
    with pytest.raises(RemoteError, match="needs"):
        StepsAgain(OPTIMIZERS["sgd"], CLIP_NORM, old, chunks, steps, CUT).chunk(0)


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 7, 8, 13])
def test_a_chunk_is_shown_to_be_under_the_root_at_its_own_place_alone(num_chunks: int) -> None:
    total = CHUNK_BYTES * num_chunks - 5
    hashes = [chunk_hash(bytes([number])) for number in range(num_chunks)]
    root = merkle_root(hashes, total)
    for index, leaf in enumerate(hashes):
        path = merkle_path(hashes, index)
        assert root_by_path(leaf, index, path, total) == root
        for wrong_path in (path[:-1], (*path, bytes(32))):
            if wrong_path != path:
                with pytest.raises(RemoteError):
                    root_by_path(leaf, index, wrong_path, total)
        assert root_by_path(bytes(32), index, path, total) != root
        assert all(
            root_by_path(leaf, index, (*path[:at], bytes(32), *path[at + 1 :]), total) != root
            for at in range(len(path))
        )
    with pytest.raises(RemoteError, match="chunk"):
        root_by_path(hashes[0], num_chunks, merkle_path(hashes, 0), total)
