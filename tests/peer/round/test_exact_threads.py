"""A round's exact work has the same bits on any number of threads, and two of them do not get in each other's way."""

import asyncio
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from kernels.threads import Threads
from peer.round.work import ContributionEncoder
from swarm.averaging.aggregate import Rule
from swarm.averaging.certified_gradient import CertifiedGradient, squares_of
from swarm.averaging.codecs import result_codec, vector_codec
from swarm.averaging.encoded import Encoded
from swarm.averaging.parts import Parts
from swarm.averaging.reduce import reduce_part
from swarm.bulk_digest import bulk_digest
from swarm.checkpoint.snapshots import SnapshotStore
from swarm.checkpoint.state import StageState, state_digest
from swarm.core.errors import RemoteError
from swarm.core.ids import PeerId, Step
from swarm.core.round.contribution import ReducedPart
from swarm.core.settings import PART_VALUES, AveragingCodecName, OptimizerSettings
from swarm.model.layout import ParameterLayout
from swarm.optim.certified_steps import check_bodies
from swarm.optim.exact import extrapolated
from swarm.optim.stage_step import FlatGradient, StageStep
from tests.kernels.test_golden import exact_floats
from tests.peer.round.test_work import NUM_VALUES, PARTS, SEEDS, Replica, accumulated

COUNTS = (1, 2, 3, 5)
SEED = bytes(range(32))
WIDE = Parts(NUM_VALUES, 1 << 20)
"""One part, longer than what one thread takes at once."""
LAYOUT = ParameterLayout.of({"norm.weight": (1001,), "mlp.weight": (3, PART_VALUES)})


def same_on_all(made: list[Any]) -> Any:
    """What each number of threads made, all of which is to be one."""
    assert len(made) == len(COUNTS)
    assert all(one == made[0] for one in made)
    return made[0]


@pytest.mark.parametrize("name", get_args(AveragingCodecName))
def test_contribution_and_residual_are_the_same_on_any_number_of_threads(name: AveragingCodecName) -> None:
    made = []
    for count in COUNTS:
        replica: Any = Replica(name, count)
        steps = [ContributionEncoder(replica).encode(Step(step), accumulated(), SEEDS) for step in (0, 1)]
        left = replica.residual.values.tobytes() if replica.residual is not None else b""
        made.append(([(list(map(bytes, parts)), digests) for parts, digests in steps], left))
    (first, second), left = same_on_all(made)
    assert len(first[0]) == len(PARTS)
    assert (first[0] != second[0]) == bool(left), "what is owed is said with the second one"


@pytest.mark.parametrize(
    ("name", "rule"),
    [*((name, "mean") for name in get_args(AveragingCodecName)), *(("int8", rule) for rule in get_args(Rule)[1:])],
)
def test_reduction_is_the_same_on_any_number_of_threads(name: AveragingCodecName, rule: Rule) -> None:
    values = [exact_floats(f"contribution {peer}", NUM_VALUES) for peer in range(4)]
    codec = vector_codec(name)
    bodies: list[tuple[int, Encoded]] = [(5 + peer, codec.encode(one, seed=SEED)) for peer, one in enumerate(values)]
    bodies.insert(2, (3, b"nonsense"))
    found = []
    for count in COUNTS:
        how = {"rule": rule, "norm_cap": 2.0, "seed": SEED, "threads": Threads(count)}
        made = reduce_part("all", name, NUM_VALUES, bodies, **how)  # type: ignore[arg-type]
        shares = [reduce_part("cohort", name, NUM_VALUES, some, **how) for some in (bodies[:3], bodies[3:])]  # type: ignore[arg-type]
        whole = reduce_part("shares", name, NUM_VALUES, [(8, one.body) for one in shares], **how)  # type: ignore[arg-type]
        found.append([(bytes(one.body), one.digest, sorted(one.left_out)) for one in (made, *shares, whole)])
    (body, digest, left_out), *_ = same_on_all(found)
    assert left_out == [2]
    assert digest == bulk_digest(body)


@pytest.mark.parametrize("moments", ["fp32", "int8"])
@pytest.mark.parametrize("parts", [PARTS, WIDE])
def test_result_and_step_are_the_same_on_any_number_of_threads(moments: Any, parts: Parts) -> None:
    gradient, weights = exact_floats("gradient", NUM_VALUES), exact_floats("weights", NUM_VALUES)
    codec = result_codec("int8")
    bodies = [codec.encode(gradient[where], seed=SEED) for where in parts]
    reduced = [
        ReducedPart(part, bulk_digest(body), (PeerId("a"),), (), squares_of(codec, body, where.stop - where.start))
        for part, (body, where) in enumerate(zip(bodies, parts, strict=True))
    ]
    found = []
    for count in COUNTS:
        threads = Threads(count)
        result: Any = type("Result", (), {"parts": reduced, "roster": type("Roster", (), {"step": 3})})
        check_bodies(result, bodies, threads=threads)
        with pytest.raises(RemoteError, match="part 0 of step 3"):
            check_bodies(result, [b"other", *bodies[1:]], threads=threads)
        decoded = CertifiedGradient.of(parts, reduced, bodies)
        assert decoded is not None
        step = StageStep(OptimizerSettings(total_steps=8, moments=moments), LAYOUT, clip_norm=1.0, threads=threads)
        state = StageState(0, LAYOUT, weights)
        for _ in range(2):
            state = step.next(state, decoded, SEED).state
        ahead = np.empty_like(weights)
        extrapolated(state.weights, weights, ahead, threads=threads)
        values = np.concatenate([decoded.values(piece) for piece in range(len(parts))])
        other = StageStep(OptimizerSettings(total_steps=8, moments=moments), LAYOUT, clip_norm=1.0, threads=threads)
        whole = StageState(0, LAYOUT, weights)
        for _ in range(2):
            whole = other.next(whole, FlatGradient(values, decoded.norm), SEED).state
        assert state_digest(whole) == state_digest(state), "however the gradient is cut"
        found.append((values.tobytes(), decoded.norm, state_digest(state), ahead.tobytes()))
    same_on_all(found)


def test_snapshot_has_the_same_digest_on_any_number_of_threads(tmp_path: Path) -> None:
    chain: Any = type("Chain", (), {"stage": 0, "lineage": SEED, "version": 1, "name": SEED, "to_value": dict})
    state = StageState(1, LAYOUT, exact_floats("weights", NUM_VALUES), name=SEED)
    for count in COUNTS:
        store = SnapshotStore(tmp_path / str(count), threads=Threads(count))
        asyncio.run(store.save(state, chain))
        held = store.latest()
        assert held is not None
        assert held.digest == state_digest(state)
        assert held.weights().tobytes() == state.weights.tobytes()
