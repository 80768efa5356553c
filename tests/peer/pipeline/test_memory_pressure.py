"""Where memory gives out in forward, backward, a round or a step, sums and states are those of a run where it does
not."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from peer.pipeline.compute import Urgency, WorkThread
from peer.pipeline.memory_pressure import MemoryPressure
from peer.round.work import ContributionEncoder
from peer.sim.pipeline import carry
from peer.state.replica import StageReplica
from swarm.averaging.certified_gradient import CertifiedGradient
from swarm.checkpoint.state import arrays_of, state_digest
from swarm.core.errors import LocalError, MemoryFullError
from swarm.core.ids import MicrobatchId
from swarm.core.pipeline.compute_mode import ComputeMode, modes
from swarm.memory import out_of_memory
from swarm.memory.kept_buffers import UNIT_BYTES, KeptBuffers
from swarm.model.stage import StageModel
from tests.peer.pipeline.hop_line import STEP, HopLine, LinePeer, hop_line
from tests.peer.pipeline.test_stage_pass import brought_home, simulated
from tests.swarm_in_process import manifest_of, prepare, swarm_in_process
from tests.verification.exhibits import SmallRun, small_settings, tokens_and_targets

OF_DEVICE = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 7.79 GiB"
OF_HOST = (
    "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
)
ERRORS: dict[str, Callable[[], BaseException]] = {
    "python": MemoryError,
    "host": lambda: RuntimeError(OF_HOST),
    "device": lambda: torch.OutOfMemoryError(OF_DEVICE),
}
NUMBERS = [MicrobatchId(number) for number in range(4)]


@contextmanager
def giving_out(
    owner: type, name: str, error: Callable[[], BaseException], at: Callable[[int, Any], bool], *, most: int = 99
) -> Iterator[list[int]]:
    """Memory gives out where a method is called for the n-th time, from 1, on an object, if `at(n, object)`.

    `most` times; how often it has.
    """
    original, calls, hits = getattr(owner, name), [0], [0]

    def planted(self: Any, *arguments: Any, **named: Any) -> Any:
        calls[0] += 1
        if hits[0] < most and at(calls[0], self):
            hits[0] += 1
            raise error()
        return original(self, *arguments, **named)

    setattr(owner, name, planted)
    try:
        yield hits
    finally:
        setattr(owner, name, original)


@contextmanager
def giving_out_in_layer(model: StageModel, place: int, error: Callable[[], BaseException]) -> Iterator[None]:
    """In the model's next backward pass memory gives out when it comes to the parameter at `place`."""
    original, left = StageModel._gradient_of_x, [1]

    def raise_it(gradient: torch.Tensor) -> torch.Tensor:
        raise error()

    def planted(self: StageModel, saved: Any, *arguments: Any, **named: Any) -> Any:
        if self is not model or not left[0]:
            return original(self, saved, *arguments, **named)
        left[0] -= 1
        hook = list(saved.weights.parameters.values())[place].register_hook(raise_it)
        try:
            return original(self, saved, *arguments, **named)
        finally:
            hook.remove()

    StageModel._gradient_of_x = planted  # type: ignore[method-assign]
    try:
        yield
    finally:
        StageModel._gradient_of_x = original  # type: ignore[method-assign]


# -- what is told of it ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [*(make() for make in ERRORS.values()), OSError(12, "Cannot allocate memory")])
def test_memory_that_gave_out_is_told_from_what_is_broken(error: BaseException) -> None:
    assert out_of_memory.is_out_of_memory(error)
    assert out_of_memory.is_of_device(error) == isinstance(error, torch.OutOfMemoryError)
    for other in (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), OSError(28, "No space"), ValueError()):
        assert not out_of_memory.is_out_of_memory(other)


def test_what_is_free_goes_back_to_the_system() -> None:
    buffers = KeptBuffers()
    held, *free = [buffers.take(3 * UNIT_BYTES) for _ in range(4)]
    del free
    assert buffers.kept_bytes > 0
    held[:4] = b"here"
    buffers.give_back()
    assert buffers.kept_bytes == 0
    assert bytes(held[:4]) == b"here"
    assert len(buffers.take(3 * UNIT_BYTES)) == 3 * UNIT_BYTES


def test_less_is_computed_at_once_each_time_until_nothing_smaller_is_left() -> None:
    settings = small_settings(3)
    memory = MemoryPressure(settings, StageModel(settings.model, 0))
    assert memory.words() == ""
    for mode in list(modes(settings))[1:]:
        memory.gave_out(Urgency.FORWARD, "host", "no")
        assert memory._model.mode == mode
        assert not memory.rests
    assert memory._model.mode == ComputeMode(1, recompute=True)
    assert f"1 of a microbatch's {settings.batch.microbatch_size} samples are computed at once" in memory.words()
    memory.gave_out(Urgency.BACKWARD, "device", "no")
    assert memory.rests
    assert "1 times on the device" in memory.words()
    assert "in backward work" in memory.words()


def test_a_round_that_finds_no_memory_does_not_change_how_microbatches_are_computed() -> None:
    settings = small_settings(3)
    memory = MemoryPressure(settings, StageModel(settings.model, 0))
    memory.gave_out(Urgency.ROUND, "host", "no")
    assert memory._model.mode is None
    assert "last 0 s ago in round work" in memory.words()


def test_a_rounds_job_is_tried_again_and_a_microbatchs_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peer.pipeline.compute.RETRY_S", 0.0)
    told: list[tuple[Urgency, str]] = []

    class Told:
        def gave_out(self, urgency: Urgency, place: str, said: str) -> None:
            told.append((urgency, place))

    def failing(times: int) -> Callable[[], str]:
        left = [times]

        def job() -> str:
            left[0] -= 1
            if left[0] >= 0:
                raise MemoryError("none left")
            return "done"

        return job

    async def main() -> None:
        thread = WorkThread("test", memory=Told())
        try:
            assert await thread.run(Urgency.ROUND, failing(3)) == "done"
            with pytest.raises(MemoryFullError, match="none left"):
                await thread.run(Urgency.ROUND, failing(99))
            with pytest.raises(MemoryFullError):
                await thread.run(Urgency.FORWARD, failing(1))
            assert await thread.owed(failing(7), within_s=60.0, still=lambda: True) == "done"
            for within_s, is_wanted in ((0.0, True), (60.0, False)):
                with pytest.raises(MemoryFullError, match="none left"):
                    await thread.owed(failing(99), within_s=within_s, still=lambda wanted=is_wanted: wanted)
        finally:
            thread.close(timeout_s=5.0)

    asyncio.run(main())
    of_round = (Urgency.ROUND, "host")
    assert told == [of_round] * (3 + 5) + [(Urgency.FORWARD, "host")] + [of_round] * (7 + 5 + 5)


# -- a microbatch ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("kind", sorted(ERRORS))
def test_a_backward_that_ends_half_way_has_added_nothing(stage: int, kind: str) -> None:
    settings = small_settings(3)
    model = StageModel(settings.model, stage)
    weights = model.weights(SmallRun(settings, num_peers=1).states[stage].weights)
    tokens, targets = tokens_and_targets(settings, 0)
    size = (*tokens.shape, model.hidden_size)
    x = torch.from_numpy(tokens) if stage == 0 else torch.randn(size, generator=torch.Generator().manual_seed(1))
    grad_y = torch.randn(size, generator=torch.Generator().manual_seed(2))
    before = torch.randn(model.layout.num_values, generator=torch.Generator().manual_seed(3))

    def back(into: torch.Tensor | None, *, again: bool = False) -> torch.Tensor | None:
        if model.is_last:
            _, _, saved_loss = model.loss(weights, x, torch.from_numpy(targets), keep=True)
            assert saved_loss is not None
            return model.loss_backward(saved_loss, into)
        _, saved = model.forward(weights, x, keep=True)
        assert saved is not None
        try:
            return model.backward(saved, grad_y, into)
        except (MemoryError, RuntimeError):
            if not again:
                raise
            model.compute_less(ComputeMode(len(x), recompute=True))
            assert saved.y_BLD is None, "its graph is half gone"
            return model.backward(saved, grad_y, into)

    wanted = before.clone()
    grad_x = back(wanted)
    only_x = back(None)
    assert (grad_x is None and only_x is None) or (
        grad_x is not None and only_x is not None and torch.equal(grad_x, only_x)
    )
    in_graph = [name != model._head_name for name in weights.parameters]
    for place in [place for place, is_in in enumerate(in_graph) if is_in]:
        into = before.clone()
        with giving_out_in_layer(model, place, ERRORS[kind]), pytest.raises((MemoryError, RuntimeError)):
            back(into)
        assert torch.equal(into, before), f"{list(weights.parameters)[place]} left something"
        assert all(parameter.grad is None for parameter in weights.parameters.values())
        if not model.is_last:
            with giving_out_in_layer(model, place, ERRORS[kind]):
                back(into, again=True)
            assert torch.equal(into, wanted)
            model.mode = None


def own_models(line: HopLine) -> None:
    """Each peer computes in a mode of its own, and hears where memory gives out."""
    for peers in line.peers:
        for peer in peers:
            model = peer.replica.model = peer.stage_pass.tensors.model = StageModel(line.settings.model, peer.stage)
            memory = MemoryPressure(line.settings, model)
            peer.work._memory = peer.thread._memory = memory


async def home(line: HopLine, source: LinePeer, number: MicrobatchId) -> None:
    """As a source brings a microbatch home, which tries again."""
    for _ in range(8):
        try:
            await brought_home(line, source, number)
        except MemoryFullError:
            continue
        return
    raise AssertionError(f"microbatch {number} does not come home")


@pytest.mark.parametrize("kind", sorted(ERRORS))
@pytest.mark.parametrize(
    ("stage", "moment"), [(0, "forward"), (0, "back"), (1, "forward"), (1, "back"), (3, "loss"), (3, "back")]
)
def test_sums_are_those_of_a_run_in_which_others_did_those_microbatches(stage: int, moment: str, kind: str) -> None:
    async def main() -> None:
        async with hop_line() as line:
            own_models(line)
            virtual = simulated(line, None)
            models = {id(peer.replica.model) for peer in line.peers[stage]}
            name = {"forward": "forward", "back": "_backward_into", "loss": "loss"}[moment]

            def at(call: int, model: Any) -> bool:
                """In the second microbatch that comes to the stage."""
                mine[0] += id(model) in models
                return id(model) in models and mine[0] == 2

            mine = [0]
            with giving_out(StageModel, name, ERRORS[kind], at) as hits:
                for number in NUMBERS:
                    await home(line, line.peers[0][0], number)
            assert hits[0] == 1
            for number in NUMBERS:
                places = [
                    [place for place, peer in enumerate(peers) if number in peer.replica.sum_of(STEP).work]
                    for peers in line.peers
                ]
                assert [len(found) for found in places] == [1] * len(line.peers), "each is in one sum of each stage"
                way = [peers[found[0]] for peers, found in zip(virtual, places, strict=True)]
                assert carry(way, number, STEP, *tokens_and_targets(line.settings, number)) is not None
            for peers, others in zip(line.peers, virtual, strict=True):
                for one, other in zip(peers, others, strict=True):
                    summed, same = one.replica.sum_of(STEP), other.replica.sum_of(STEP)
                    assert sorted(summed.work) == sorted(same.work)
                    assert summed.gradient.num_tokens == same.gradient.num_tokens
                    assert torch.equal(summed.gradient.flat, same.gradient.flat)
            told = [memory.words() for peer in line.peers[stage] if (memory := peer.work._memory) is not None]
            assert any("computed at once, and forward twice" in words for words in told)

    asyncio.run(main())


# -- a step ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InPieces:
    """A gradient, of which memory gives out for one piece, so often."""

    flat: NDArray[np.float32]
    bad: int = 0
    left: list[int] = field(default_factory=lambda: [0])
    norm: float = 1.0

    @property
    def pieces(self) -> list[slice]:
        return [slice(start, min(start + 4096, self.flat.size)) for start in range(0, self.flat.size, 4096)]

    def values(self, piece: int) -> NDArray[np.float32]:
        if piece == self.bad and self.left[0]:
            self.left[0] -= 1
            raise MemoryError
        return self.flat[self.pieces[piece]]


def test_a_step_is_taken_once_though_memory_gives_out_after_the_moments_moved() -> None:
    run = SmallRun(small_settings(3), num_peers=2)
    one, other = run.replicas[0]
    gradient = InPieces(torch.randn(one.layout.num_values, generator=torch.Generator().manual_seed(0)).numpy())
    name, ready = bytes(range(32)), one.next_version(gradient, bytes(range(32)))
    for _ in range(2):
        with giving_out(StageModel, "weights", MemoryError, lambda call, it: True), pytest.raises(MemoryError):
            other.next_version(gradient, name)
    assert state_digest(other.next_version(gradient, name).state) == state_digest(ready.state)


def test_a_step_goes_on_where_memory_gave_out() -> None:
    run = SmallRun(small_settings(3), num_peers=2)
    one, other = run.replicas[0]
    values = torch.randn(one.layout.num_values, generator=torch.Generator().manual_seed(0)).numpy()
    ready, places = one.next_version(InPieces(values), bytes(32)), InPieces(values).pieces
    assert len(places) > 2
    for bad in (1, len(places) - 1):
        with pytest.raises(MemoryError):
            other.next_version(InPieces(values, bad, [1]), bytes(32))
    assert state_digest(other.next_version(InPieces(values), bytes(32)).state) == state_digest(ready.state)


def test_a_step_that_ended_half_way_is_never_taken_for_a_whole_one() -> None:
    (replica,) = SmallRun(small_settings(3), num_peers=1).replicas[0]
    values = torch.ones(replica.layout.num_values).numpy()
    with pytest.raises(MemoryError):
        replica.next_version(InPieces(values, 1, [1]), bytes(32))
    for gradient in (InPieces(values), None):
        with pytest.raises(LocalError, match="ended half way"):
            replica.next_version(gradient, bytes(range(32)))


# -- a run -------------------------------------------------------------------------------------------------------

RUN: dict[str, dict[str, Any]] = {
    "averaging": {"delay": 0},
    "batch": {"microbatch_size": 1, "target_tokens": 64},
    "optimizer": {"total_steps": 6},
    "limits": {"founders_per_stage": 1, "max_in_flight": 1},
    "checkpoint": {"every_steps": 6, "snapshot_every": 1},
}
PLANTED: list[tuple[type, str]] = [
    (StageModel, "forward"),
    (StageModel, "_backward_into"),
    (StageModel, "loss"),
    (ContributionEncoder, "encode"),
    (CertifiedGradient, "values"),
    (StageModel, "weights"),
    (StageReplica, "close"),
]


def states_of_run(folder: Path, on_step: Callable[..., None] = lambda steps, applied: None) -> list[bytes]:
    """Of the stages, at the end of a run of one peer in each; every part of it ends by itself."""

    async def train() -> list[bytes]:
        async with swarm_in_process(run, folder, peers=(1, 1), evaluate_tokens=32) as swarm:
            swarm.on_applied.append(on_step)
            await swarm.finished()
            states = [swarm.of_stage(stage)[0].steps.replica.state for stage in (0, 1)]
            return [array.tobytes() for state in states for _, array in arrays_of(state)]

    run = prepare(manifest_of(**RUN), folder)
    return asyncio.run(train())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    return states_of_run(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize("kind", ["python", "device"])
def test_a_run_ends_normally_and_comes_to_the_same_states(
    kind: str, undisturbed: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peer.pipeline.compute.RETRY_S", 0.01)
    monkeypatch.setattr("peer.pipeline.memory_pressure.REST_S", 0.01)

    has_begun = []

    def at(call: int, it: Any) -> bool:
        """Now and then, once both peers have joined."""
        return bool(has_begun) and call % 3 == 0 and threading.current_thread().name in ("compute", "exact")

    with contextlib.ExitStack() as stack:
        hits = {name: stack.enter_context(giving_out(owner, name, ERRORS[kind], at, most=3)) for owner, name in PLANTED}
        found = states_of_run(tmp_path, lambda steps, applied: has_begun.append(steps))
    assert found == undisturbed
    assert all(count[0] for count in hits.values()), hits
