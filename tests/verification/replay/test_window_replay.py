"""A member's window replayed from the public start and its list of samples: to the bit, and every lie stands out."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import pytest
from numpy.typing import NDArray
from torch.nn.attention import SDPBackend, sdpa_kernel

from swarm.averaging.seeds import part_seeds
from swarm.core.errors import RemoteError
from swarm.core.ids import StageIndex, Step, Version
from swarm.core.settings import AveragingSettings, CodecSettings, ComputeDtype, RunSettings
from swarm.optim.gradient_sum import GradientSum
from tests.verification.exhibits import RUN_ID, Done, SmallRun, small_settings
from verification.audit.tolerance import LOCAL, Comparison, Grade, bounds_for
from verification.replay.compared import compared_contribution
from verification.replay.stage_replay import StageReplay
from verification.round.papers import Exhibit

LOCAL_STEPS, BATCH = 5, 4
INT2 = CodecSettings(averaging="int2")


def settings(compute_dtype: ComputeDtype = "fp32") -> RunSettings:
    run = small_settings(1, codecs=INT2, averaging=AveragingSettings(local_steps=LOCAL_STEPS), trust="public")
    return replace(run, model=replace(run.model, compute_dtype=compute_dtype))


class Window:
    """The second window of a run's only member, and a replay that stands where it began."""

    def __init__(self, compute_dtype: ComputeDtype = "fp32") -> None:
        run = SmallRun(settings(compute_dtype))
        for number in range(LOCAL_STEPS * BATCH):
            run.microbatch(number)
        run.step(0)
        self.replay = StageReplay(run.settings, 0)
        self.replay.begin(*run.snapshot(0))
        self.exhibits: list[Exhibit] = [run.microbatch(100 + number)[0] for number in range(LOCAL_STEPS * BATCH)]
        self.done: Done = run.step(0)
        ((self.maker, self.parts),) = self.done.parts.items()

    @cached_property
    def replayed(self) -> list[memoryview]:
        """The contribution, as it is encoded."""
        return self.replay.encoded_contribution(self.exhibits, Step(1))

    @cached_property
    def values(self) -> NDArray[np.float32]:
        """Of the contribution and its moments, before they are encoded."""
        ended = self.replay._window(self.exhibits, Step(1), GradientSum(self.replay.layout.num_values))
        return np.concatenate([ended.values(where) for where in self.replay.parts])

    def beside(self, exhibits: Sequence[Exhibit]) -> Comparison:
        """The contribution as it was made, beside a window of these microbatches."""
        replayed = self.replay.encoded_contribution(exhibits, Step(1))
        return compared_contribution(self.replay, exhibits, self.parts, replayed, second=None).found


@pytest.fixture(scope="module")
def window() -> Window:
    return Window()


def test_an_honest_window_comes_out_to_the_bit(window: Window) -> None:
    assert [bytes(part) for part in window.replayed] == [bytes(part) for part in window.parts]
    assert window.beside(window.exhibits).grade is Grade.HONEST


@pytest.mark.soak
def test_in_bf16_other_attention_is_honest_by_own_error_and_a_step_left_out_is_fraud() -> None:
    window = Window("bf16")
    with sdpa_kernel(SDPBackend.MATH):
        found, one_less = (window.beside(exhibits) for exhibits in (window.exhibits, window.exhibits[:-BATCH]))
    assert found.own_error is not None
    assert found.measured > bounds_for("bf16", "int2", "contribution").fraud
    assert found.grade is Grade.HONEST, found
    assert found.share <= 0.5, found
    assert one_less.grade is Grade.FRAUD, one_less


def test_steps_that_were_left_out_or_done_on_other_data_are_fraud(window: Window) -> None:
    """The contribution stands for what was done, the exhibits for what was said."""
    honest = window.exhibits
    one_less = window.beside(honest[:-BATCH])
    assert one_less.grade is Grade.FRAUD
    assert one_less.measured > 2 * one_less.fraud
    other_order = window.beside([*honest[BATCH:], *honest[:BATCH]])
    assert other_order.grade is Grade.FRAUD


@pytest.mark.parametrize(
    ("share", "grade"), [(0.3, Grade.SUSPICIOUS), pytest.param(2.0, Grade.FRAUD, marks=pytest.mark.soak)]
)
def test_one_row_of_the_embedding_that_is_bent_shows(window: Window, share: float, grade: Grade) -> None:
    """A narrow one, of 32 values among the 4096 of a chunk."""
    replay, exhibits, replayed = window.replay, window.exhibits, window.replayed
    bent = replay.decoded_contribution(replayed)
    view = replay.layout.views(bent[: replay.layout.num_values])["model.embed_tokens.weight"]
    row = int(np.argmax(np.abs(view).sum(axis=1)))
    view[row] += np.float32(share) * np.linalg.norm(view[row]) / np.sqrt(view.shape[1])
    found = compared_contribution(replay, exhibits, encoded(window, bent), replayed, second=None).found
    assert found.grade is grade, found


def encoded(window: Window, said: NDArray[np.float32]) -> list[memoryview]:
    """As the second window's maker must: chance is not its own."""
    replay = window.replay
    seeds = part_seeds(RUN_ID, StageIndex(0), Version(1), window.maker, num_parts=replay.num_parts)
    return [
        replay.parts.contribution_codec(part).encode(np.ascontiguousarray(said[where]), seed=seed)
        for part, (where, seed) in enumerate(zip(replay.parts, seeds, strict=True))
    ]


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("second", 0.5),
        *(
            pytest.param(name, share, marks=pytest.mark.soak)
            for name, share in (("first", 0.5), ("first", -1.0), ("first", 0.0), ("second", 0.01), ("second", 4.0))
        ),
    ],
)
def test_a_lie_in_the_moments_alone_is_fraud(window: Window, name: str, share: float) -> None:
    replay, replayed, said = window.replay, window.replayed, window.values.copy()
    honest = compared_contribution(replay, window.exhibits, encoded(window, said), replayed, second=None).found
    assert honest.measured == 0.0
    for where in getattr(replay.parts, name):
        said[where] *= np.float32(share)
    found = compared_contribution(replay, window.exhibits, encoded(window, said), replayed, second=None).found
    assert found.grade is Grade.FRAUD, found
    assert name in found.reason


@pytest.mark.soak
def test_what_is_wrong_in_a_place_hides_not_how_much_is_wrong_elsewhere(window: Window) -> None:
    """A lie is no local fault for being the worst where few values are off."""
    replay, said = window.replay, window.values.copy()
    said[replay.parts.second[0].start] *= np.float32(1e12)
    for expected in (False, True):
        found = compared_contribution(
            replay, window.exhibits, encoded(window, said), window.replayed, second=None
        ).found
        assert "second moments" in found.reason
        assert found.grade is Grade.FRAUD
        assert (found.extent > LOCAL) == expected, found
        said[: replay.layout.num_values] *= np.float32(-1.0)


def test_a_window_that_is_cut_short_is_contributed_as_it_is(window: Window) -> None:
    run = SmallRun(settings())
    begun = StageReplay(run.settings, 0)
    begun.begin(*run.snapshot(0))
    exhibits = [run.microbatch(number)[0] for number in range(3 * BATCH + 2)]
    done = run.step(0)
    (made,) = done.contributions.values()
    assert [work.microbatch_id for work in made.work] == list(range(3 * BATCH)), "of inner steps that were taken whole"
    (parts,) = done.parts.values()
    replayed = begun.encoded_contribution(exhibits[: 3 * BATCH], Step(0))
    assert [bytes(part) for part in replayed] == [bytes(part) for part in parts]


def test_a_window_that_is_not_of_whole_steps_is_no_honest_one(window: Window) -> None:
    with pytest.raises(RemoteError, match="4 an inner step"):
        window.replay.encoded_contribution(window.exhibits[:-1], Step(1))
    moved = [replace(window.exhibits[0], version=window.exhibits[0].version)] * (LOCAL_STEPS * BATCH + BATCH)
    with pytest.raises(RemoteError, match="a window of 24 microbatches"):
        window.replay.encoded_contribution(moved, Step(1))
