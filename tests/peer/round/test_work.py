"""A round's heavy work held to plain steps over whole vectors, whatever the threads and the order."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels.norms import norm_of_parts
from kernels.threads import Threads
from peer.round.work import ContributionEncoder
from peer.state.replica import Accumulation, StageReplica
from swarm.averaging.certified_gradient import CertifiedGradient, squares_of
from swarm.averaging.codecs import vector_codec
from swarm.averaging.error_feedback import Residual
from swarm.averaging.parts import Parts
from swarm.averaging.seeds import part_seeds
from swarm.bulk_digest import bulk_digest
from swarm.core.errors import LocalError
from swarm.core.ids import PeerId, StageIndex, Step, Version
from swarm.core.round.contribution import ReducedPart
from swarm.core.settings import PART_VALUES, AveragingCodecName
from swarm.disk.cold_bytes import ColdBytes
from swarm.optim.gradient_sum import GradientSum
from tests.kernels.test_golden import exact_floats

NUM_VALUES = 3 * PART_VALUES + 1001
PARTS = Parts(NUM_VALUES)
PEERS = (PeerId("a"), PeerId("b"))
SIZES = [where.stop - where.start for where in PARTS]
SEEDS = part_seeds("run", StageIndex(0), Version(3), PEERS[0], num_parts=len(PARTS))


class Replica:
    """As much of a StageReplica as encoding needs."""

    def __init__(self, name: AveragingCodecName, threads: int) -> None:
        self.stage = 0
        self.settings = SimpleNamespace(codecs=SimpleNamespace(averaging=name))
        self._parts = Parts(NUM_VALUES, PART_VALUES, name)
        self.inputs = ColdBytes(None, "inputs")
        self.threads = Threads(threads)
        self.residual = Residual(NUM_VALUES) if name in ("int4", "topk") else None

    def parts(self) -> Parts:
        return self._parts

    mean_part = StageReplica.mean_part


def accumulated(*, bad: float | None = None) -> Accumulation:
    """The work of one microbatch, whose gradient may have one value that is not finite."""
    gradient = GradientSum(NUM_VALUES)
    gradient.flat.numpy()[:] = exact_floats("sum", NUM_VALUES) * np.float32(100)
    gradient.add_tokens(768)
    if bad is not None:
        gradient.flat[-1] = bad
    work: Any = {0: None}
    return Accumulation(gradient, work=work)


def encoded(replica: Any, accumulation: Any) -> tuple[list[bytearray], list[bytes]]:
    return ContributionEncoder(replica).encode(Step(0), accumulation, SEEDS)


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4", "topk"])
def test_contribution_is_each_part_of_the_mean_encoded_under_any_number_of_threads(name: AveragingCodecName) -> None:
    mean, codec = accumulated().gradient.take_mean(), vector_codec(name)
    wanted = [codec.encode(mean[where], seed=seed) for where, seed in zip(PARTS, SEEDS, strict=True)]
    for threads in (1, 2, 4):
        parts, digests = encoded(Replica(name, threads), accumulated())
        assert parts == wanted
        assert digests == [bulk_digest(part) for part in wanted]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_gradient_that_is_not_finite_is_left_out_whole(threads: int, bad: float) -> None:
    spoilt = accumulated(bad=bad)
    assert encoded(Replica("int8", threads), spoilt) == ([], [])
    assert spoilt.not_finite == set(spoilt.work)


def test_without_work_there_is_nothing_to_contribute() -> None:
    idle = accumulated()
    idle.work.clear()
    assert encoded(Replica("int8", 1), idle) == ([], [])


def test_mean_of_some_values_has_the_bits_of_the_whole_mean() -> None:
    made: Any = Replica("int8", 1)
    part = made.mean_part(accumulated(), slice(77, 1077))
    assert part.tobytes() == accumulated().gradient.take_mean()[77:1077].tobytes()
    with pytest.raises(LocalError, match="no microbatch"):
        made.mean_part(Accumulation(GradientSum(10)), slice(0, 10))


def result_of(bodies: list[bytes | bytearray]) -> list[ReducedPart]:
    return [
        ReducedPart(part, bulk_digest(body), PEERS, (), squares_of(vector_codec("int8"), body, size))
        if body
        else ReducedPart.empty(part)
        for part, (body, size) in enumerate(zip(bodies, SIZES, strict=True))
    ]


def decoded(reduced: list[ReducedPart], bodies: list[bytes | bytearray]) -> tuple[NDArray[np.float32], float]:
    """Values and norm."""
    found = CertifiedGradient.of(PARTS, reduced, bodies)
    assert found is not None
    return np.concatenate([found.values(piece) for piece in range(len(PARTS))]), found.norm


def bodies_of(label: str) -> list[bytes | bytearray]:
    values = exact_floats(label, NUM_VALUES)
    return [vector_codec("int8").encode(values[where], seed=bytes(32)) for where in PARTS]


def whole(bodies: list[bytes | bytearray]) -> NDArray[np.float32]:
    values = np.zeros(NUM_VALUES, dtype=np.float32)
    for where, body in zip(PARTS, bodies, strict=True):
        if body:
            vector_codec("int8").decode(body, values[where])
    return values


def test_a_result_is_what_its_parts_say_and_its_norm_that_of_the_whole() -> None:
    bodies = bodies_of("result")
    gradient, norm = decoded(result_of(bodies), bodies)
    assert gradient.tobytes() == whole(bodies).tobytes()
    assert norm == norm_of_parts(gradient, part_values=PART_VALUES)


def test_part_that_nobody_reached_is_zeros() -> None:
    bodies = bodies_of("result")
    bodies[1] = b""
    gradient, _ = decoded(result_of(bodies), bodies)
    assert gradient.tobytes() == whole(bodies).tobytes()
    assert not gradient[PARTS[1]].any()
    nothing = [b"", b"", b"", b""]
    assert CertifiedGradient.of(PARTS, result_of([*nothing]), nothing) is None


def test_a_part_that_was_certified_but_is_malformed_is_zeros_and_the_norm_is_what_was_certified() -> None:
    bodies = bodies_of("result")
    reduced = result_of(bodies)
    nonsense = bytearray(bodies[2])
    nonsense[-1] = 0x80  # no encoder writes this code: what is decoded before it must not stay
    bodies[2] = nonsense
    reduced[2] = ReducedPart(2, bulk_digest(nonsense), PEERS, (), reduced[2].squares)
    gradient, norm = decoded(reduced, bodies)
    assert not gradient[PARTS[2]].any()
    assert gradient.tobytes() == whole([*bodies[:2], b"", *bodies[3:]]).tobytes()
    assert norm == norm_of_parts(whole(bodies_of("result")), part_values=PART_VALUES)
