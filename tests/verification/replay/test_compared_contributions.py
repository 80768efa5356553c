"""A contribution beside its replay: zero where no token was, and no further off than AdamW makes little of."""

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from swarm.averaging.codecs import vector_codec
from swarm.averaging.parts import Parts
from swarm.averaging.seeds import part_seeds
from swarm.core.ids import StageIndex, Step, Version
from swarm.core.settings import AveragingCodecName, CodecSettings
from swarm.model.families import family_of
from tests.verification.exhibits import RUN_ID, SmallRun, small_settings
from verification.audit.tolerance import LOCAL, Grade, bounds_for, compare
from verification.replay import StageReplay
from verification.replay.compared import ComparedContribution, compared_contribution
from verification.round.papers import Exhibit

Floats = NDArray[np.float32]

WIRES: tuple[AveragingCodecName, ...] = ("fp32", "bf16", "int8")
"""Those whose contributions are replayed."""
LITTLE = 1e-6
"""Of the root mean square of the contribution."""


class Work:
    """What one peer did in a step of stage 0, replayed; at version 1, where the optimizer has moments."""

    def __init__(self, wire: AveragingCodecName) -> None:
        self.run = SmallRun(small_settings(2, codecs=CodecSettings(averaging=wire)))
        self.replay = StageReplay(self.run.settings, 0)
        self.run.microbatch(0)
        self.run.step(0)
        self.run.step(1)
        self.replay.begin(*self.run.snapshot(0))
        self.exhibits: Sequence[Exhibit] = [self.run.microbatch(number)[0] for number in (1, 2)]
        self.replayed = self.replay.encoded_contribution(self.exhibits, Step(1))
        self.mean = self.replay.decoded_contribution(self.replayed)

    def encoded(self, mean: Floats) -> list[memoryview]:
        codec = vector_codec(self.run.settings.codecs.averaging)
        parts = Parts.of(self.run.settings, self.replay.layout)
        peer, count = self.run.peers[0][0].peer_id, self.replay.num_parts
        seeds = part_seeds(RUN_ID, StageIndex(0), Version(1), peer, num_parts=count)
        return [codec.encode(mean[where], seed=seed) for where, seed in zip(parts, seeds, strict=True)]

    def compared(self, claimed: Sequence[memoryview], seed: bytes | None = None) -> ComparedContribution:
        second = self.replay.second_moments
        return compared_contribution(self.replay, self.exhibits, claimed, self.replayed, second=second, seed=seed)

    def plain(self, claimed: Sequence[memoryview]) -> Grade:
        bounds = bounds_for("fp32", self.run.settings.codecs.averaging, "contribution")
        return compare(self.replay.decoded_contribution(claimed), self.mean, bounds).grade

    def rows(self, flat: Floats) -> Floats:
        return self.replay.layout.views(flat)[family_of(self.run.settings.model.config_json).embedding_name]

    @property
    def is_int8(self) -> bool:
        return self.run.settings.codecs.averaging == "int8"

    @property
    def untouched(self) -> NDArray[np.bool_]:
        ids = [np.frombuffer(exhibit.x, dtype="<i4") for exhibit in self.exhibits]
        return ~np.isin(np.arange(len(self.rows(self.mean))), np.concatenate(ids))

    @property
    def size(self) -> np.float32:
        return np.float32(np.sqrt(np.mean(np.square(self.mean))))


@pytest.fixture(scope="module", params=WIRES)
def work(request: pytest.FixtureRequest) -> Work:
    return Work(request.param)


def test_rows_that_no_token_touches_are_zero_in_honest_work_on_every_wire(work: Work) -> None:
    assert 10 < work.untouched.sum() < len(work.untouched)
    assert not np.count_nonzero(work.rows(work.mean)[work.untouched])
    assert np.count_nonzero(work.rows(work.mean)[~work.untouched])
    found = work.compared(work.replayed)
    assert (found.found.grade, found.found.share, found.amplified.measured) == (Grade.HONEST, 0.0, 0.0)


def test_a_bias_in_untouched_rows_passes_the_tolerance_and_is_fraud_by_structure(work: Work) -> None:
    biased = work.mean.copy()
    work.rows(biased)[work.untouched] = LITTLE * work.size
    claimed = work.encoded(biased)
    decoded = work.rows(work.replay.decoded_contribution(claimed))[work.untouched]
    assert np.count_nonzero(decoded)
    # In a block of int8 with touched rows little is rounded up to a whole code, now and then: that looks suspicious.
    assert work.plain(claimed) is (Grade.SUSPICIOUS if work.is_int8 else Grade.HONEST)
    found = work.compared(claimed).found
    assert found.grade is Grade.FRAUD
    assert "no token of the work touches" in found.reason
    assert found.extent == pytest.approx(np.count_nonzero(decoded) / decoded.size)


def test_one_flipped_value_in_an_untouched_row_is_fraud_and_local(work: Work) -> None:
    flipped = work.mean.copy()
    row = int(np.flatnonzero(work.untouched)[0])
    work.rows(flipped)[row, 0] = 8 * np.abs(work.mean).max()
    found = work.compared(work.encoded(flipped)).found
    assert found.grade is Grade.FRAUD
    assert 0 < found.extent <= LOCAL


def test_a_bias_that_moves_what_hardly_moves_is_fraud_though_the_tolerance_has_no_name_for_it() -> None:
    """Where the gradient is and was small: 5e-4 of the whole, half of what the tolerance calls fraud."""
    work = Work("fp32")
    mean, second = work.mean.copy(), work.replay.second_moments
    assert second is not None
    there = mean != 0
    quiet = there & (np.abs(mean) < np.quantile(np.abs(mean[there]), 0.2)) & (second < np.quantile(second[there], 0.2))
    assert quiet.sum() > 500
    mean[quiet] += np.float32(5e-4) * work.size * np.float32(np.sqrt(mean.size / quiet.sum()))
    claimed = work.encoded(mean)
    assert work.plain(claimed) is Grade.SUSPICIOUS
    found = work.compared(claimed)
    assert found.found.measured == pytest.approx(5e-4, rel=0.1)
    assert found.found.grade is Grade.FRAUD
    assert "of a learning rate a step" in found.found.reason
    assert found.found.share == found.amplified.measured / found.found.moved_fraud > 1


def test_a_part_that_nobody_shows_is_taken_to_be_right() -> None:
    work = Work("fp32")
    assert work.compared([memoryview(b"")] * work.replay.num_parts).found.grade is Grade.HONEST
