"""A member's window replayed from the public start and its list of samples: to the bit, and every lie stands out."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from swarm.core.errors import RemoteError
from swarm.core.ids import Step
from swarm.core.settings import AveragingSettings, CodecSettings, RunSettings
from tests.verification.exhibits import Done, SmallRun, small_settings
from verification.audit.tolerance import Comparison, Grade
from verification.replay.compared import compared_contribution
from verification.replay.stage_replay import StageReplay
from verification.round.papers import Exhibit

LOCAL_STEPS, BATCH = 5, 4
INT8 = CodecSettings(averaging="int8")


def settings() -> RunSettings:
    return small_settings(1, codecs=INT8, averaging=AveragingSettings(local_steps=LOCAL_STEPS), trust="public")


class Window:
    """The second window of a run's only member, and a replay that stands where it began."""

    def __init__(self) -> None:
        run = SmallRun(settings())
        for number in range(LOCAL_STEPS * BATCH):
            run.microbatch(number)
        run.step(0)
        self.replay = StageReplay(run.settings, 0)
        self.replay.begin(*run.snapshot(0))
        self.exhibits: list[Exhibit] = [run.microbatch(100 + number)[0] for number in range(LOCAL_STEPS * BATCH)]
        self.done: Done = run.step(0)
        (self.parts,) = self.done.parts.values()

    def beside(self, exhibits: Sequence[Exhibit]) -> Comparison:
        """The contribution as it was made, beside a window of these microbatches."""
        replayed = self.replay.encoded_contribution(exhibits, Step(1))
        return compared_contribution(self.replay, exhibits, self.parts, replayed, second=None).found


@pytest.fixture(scope="module")
def window() -> Window:
    return Window()


def test_an_honest_window_comes_out_to_the_bit(window: Window) -> None:
    replayed = window.replay.encoded_contribution(window.exhibits, Step(1))
    assert [bytes(part) for part in replayed] == [bytes(part) for part in window.parts]
    assert window.beside(window.exhibits).grade is Grade.HONEST


def test_steps_that_were_left_out_or_done_on_other_data_are_fraud(window: Window) -> None:
    """The contribution stands for what was done, the exhibits for what was said."""
    honest = window.exhibits
    one_less = window.beside(honest[:-BATCH])
    assert one_less.grade is Grade.FRAUD
    assert one_less.measured > 5 * one_less.fraud
    other_order = window.beside([*honest[BATCH:], *honest[:BATCH]])
    assert other_order.grade is Grade.FRAUD


def test_one_row_of_the_embedding_that_is_bent_is_fraud(window: Window) -> None:
    replay, exhibits = window.replay, window.exhibits
    replayed = replay.encoded_contribution(exhibits, Step(1))
    bent = replay.decoded_contribution(replayed)
    view = replay.layout.views(bent)["model.embed_tokens.weight"]
    row = int(np.argmax(np.abs(view).sum(axis=1)))
    view[row] += np.float32(0.3) * np.linalg.norm(view[row]) / np.sqrt(view.shape[1])
    codec = replay._contribution_codec
    parts = [codec.encode(np.ascontiguousarray(bent[where]), seed=bytes(32)) for where in replay._parts]
    found = compared_contribution(replay, exhibits, parts, replayed, second=None).found
    assert found.grade is Grade.FRAUD, found


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
