"""A stage computed in another process, as another machine would: instruction set and threads its own.

    with machines((Kind("native", 1), Kind("avx2", 2))) as started:
        model = started[1].model(settings.model, stage=0)

A process answers one request after another on its standard input and output: a line of JSON, then the arrays' bytes.
It ends when its input does. The same requests get the same bits: arrays begin where they began before, for MKL's
products depend on it.
"""

import contextlib
import json
import math
import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from swarm.core.errors import LocalError
from swarm.core.pipeline.compute_mode import ComputeMode
from swarm.core.settings import ModelSettings
from swarm.local.compute_pools import bound_pools
from swarm.model.documents import Bounds
from swarm.model.stage import Saved, SavedLoss, StageModel, Weights
from verification.replay.calibration import INSTRUCTION_SETS, has_answered

Array = NDArray[Any]

ALIGNMENT_BYTES = 64
HELD_WEIGHTS = 8
"""Versions of each stage that a process holds."""
ANSWER_S = 120.0
STOP_S = 10.0


@dataclass(frozen=True)
class Kind:
    """How a machine computes."""

    instructions: str
    """A name of `verification.replay.calibration`."""
    threads: int
    weights_at: int = 0
    """So many bytes past a multiple of 64 its weights begin."""
    by_sample: bool = False
    """A microbatch is computed sample by sample."""


@dataclass(frozen=True, eq=False)
class _Elsewhere:
    """Weights that every machine may be asked to compute with; in the place of `Weights`."""

    flat: NDArray[np.float32]


@dataclass(frozen=True)
class _Kept:
    """What backward needs lies in the process; in the place of `Saved` and `SavedLoss`."""

    number: int
    weights: Weights
    grad_y_BLD: torch.Tensor | None = None
    is_finite: bool = True


class Machine:
    """One process."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self._process = _start(kind)
        self._models: dict[int, ModelSettings] = {}
        self._sent: dict[int, OrderedDict[_Elsewhere, int]] = {}
        self._count = 0

    def model(self, settings: ModelSettings, stage: int) -> StageModel:
        """The stage, computed there."""
        self._models[stage] = settings
        self._announce(stage)
        return _ModelElsewhere(settings, stage, self)

    def start_again(self) -> None:
        """Another process takes the place of this one, which is killed: whatever it held is gone."""
        self._process.kill()
        self.close()
        self._process = _start(self.kind)
        self._sent.clear()
        for stage in self._models:
            self._announce(stage)

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process:
            self._process.stdin.close()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()

    def _announce(self, stage: int) -> None:
        self.ask({"do": "model", "stage": stage, "settings": _settings_value(self._models[stage])}, [])

    def weights(self, stage: int, held: _Elsewhere) -> int:
        """The number by which the process knows them; they are sent if it does not."""
        sent = self._sent.setdefault(stage, OrderedDict())
        if held not in sent:
            self._count += 1
            sent[held] = self._count
            dropped = [sent.popitem(last=False)[1]] if len(sent) > HELD_WEIGHTS else []
            self.ask({"do": "weights", "stage": stage, "number": self._count, "dropped": dropped}, [held.flat])
        sent.move_to_end(held)
        return sent[held]

    def ask(self, request: Mapping[str, Any], arrays: Sequence[Array]) -> tuple[dict[str, Any], list[Array]]:
        """The process's answer. Raises LocalError if it has failed or is silent."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with contextlib.suppress(BrokenPipeError):
            _write(stdin, request, arrays)
        ready = has_answered(stdout, within_s=ANSWER_S)
        answer = _read(stdout) if ready else None
        if answer is None:
            what = "ended" if ready else f"was silent for {ANSWER_S:g} s"
            raise LocalError(f"the process of {self.kind} {what}")
        return answer


class _ModelElsewhere(StageModel):
    """A stage whose forward and backward are another process's."""

    def __init__(self, settings: ModelSettings, stage: int, machine: Machine) -> None:
        super().__init__(settings, stage)
        self._machine = machine

    def weights(self, flat: NDArray[np.float32]) -> Weights:
        return cast(Weights, _Elsewhere(flat))

    def forward(
        self, weights: Weights, x: torch.Tensor, *, keep: bool, bounds: Bounds = ()
    ) -> tuple[torch.Tensor, Saved | None]:
        answer, (y,) = self._ask("forward", weights, [x], keep=keep, bounds=bounds)
        return torch.from_numpy(y), cast(Saved, _Kept(answer["kept"], weights)) if keep else None

    def backward(self, saved: Saved, grad_y_BLD: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor | None:
        return self._back("backward", cast(_Kept, saved), [grad_y_BLD.numpy()], into)

    def loss(
        self, weights: Weights, x: torch.Tensor, targets_BL: torch.Tensor, *, keep: bool, bounds: Bounds = ()
    ) -> tuple[float, int, SavedLoss | None]:
        answer, arrays = self._ask("loss", weights, [x, targets_BL], keep=keep, bounds=bounds)
        kept = (
            _Kept(answer["kept"], weights, torch.from_numpy(arrays[0]), math.isfinite(answer["loss_sum"]))
            if keep
            else None
        )
        return answer["loss_sum"], answer["num_targets"], cast(SavedLoss | None, kept)

    def loss_backward(self, saved: SavedLoss, into: torch.Tensor | None) -> torch.Tensor | None:
        return self._back("loss_backward", cast(_Kept, saved), [], into)

    def _ask(
        self, what: str, weights: Weights, tensors: Sequence[torch.Tensor], *, keep: bool, bounds: Bounds
    ) -> tuple[dict[str, Any], list[Array]]:
        number = self._machine.weights(self.stage, cast(_Elsewhere, weights))
        request = {"do": what, "stage": self.stage, "weights": number, "keep": keep, "bounds": list(bounds)}
        return self._machine.ask(request, [tensor.numpy() for tensor in tensors])

    def _back(self, what: str, kept: _Kept, arrays: Sequence[Array], into: torch.Tensor | None) -> torch.Tensor | None:
        request = {"do": what, "stage": self.stage, "kept": kept.number}
        _, (gradient, *grad_x) = self._machine.ask(request, arrays)
        if into is not None:
            into += torch.from_numpy(gradient)
        return torch.from_numpy(grad_x[0]) if grad_x else None


@contextlib.contextmanager
def machines(kinds: Sequence[Kind]) -> Iterator[list[Machine]]:
    """One of each."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(Machine(kind))) for kind in kinds]


def _start(kind: Kind) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, **INSTRUCTION_SETS[kind.instructions]}
    environment |= dict.fromkeys(("OMP_DYNAMIC", "MKL_DYNAMIC"), "FALSE")
    bound_pools(kind.threads, environment)
    return subprocess.Popen(
        [sys.executable, "-m", __name__, str(kind.weights_at), *(["by-sample"] if kind.by_sample else [])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )


# -- in the process ---------------------------------------------------------------------------------------


class _Answering:
    """Computes what is asked for."""

    def __init__(self, weights_at: int, mode: ComputeMode | None) -> None:
        self._weights_at, self._mode = weights_at, mode
        self._models: dict[int, StageModel] = {}
        self._weights: dict[int, Weights] = {}
        self._kept: dict[int, Saved | SavedLoss] = {}
        self._count = 0

    def answer(self, request: Mapping[str, Any], arrays: Sequence[Array]) -> tuple[dict[str, Any], list[Array]]:
        what, stage = request["do"], request["stage"]
        if what == "model":
            self._models.setdefault(stage, StageModel(_settings_of(request["settings"]), stage).computing(self._mode))
            return {}, []
        model, tensors = self._models[stage], [torch.from_numpy(_aligned(array)) for array in arrays]
        if what == "weights":
            self._weights[request["number"]] = model.weights(_aligned(arrays[0], self._weights_at))
            for dropped in request["dropped"]:
                del self._weights[dropped]
            return {}, []
        if what == "forward":
            weights, keep, bounds = self._weights[request["weights"]], request["keep"], request["bounds"]
            y_BLD, saved = model.forward(weights, tensors[0], keep=keep, bounds=bounds)
            return {"kept": self._keep(saved)}, [y_BLD.numpy()]
        if what == "loss":
            weights, keep, bounds = self._weights[request["weights"]], request["keep"], request["bounds"]
            loss_sum, num_targets, saved_loss = model.loss(weights, *tensors, keep=keep, bounds=bounds)
            found = {"loss_sum": loss_sum, "num_targets": num_targets, "kept": self._keep(saved_loss)}
            return found, [saved_loss.grad_y_BLD.numpy()] if saved_loss is not None else []
        kept, into = self._kept.pop(request["kept"]), torch.zeros(model.layout.num_values)
        if isinstance(kept, SavedLoss):
            grad_x = model.loss_backward(kept, into)
        else:
            grad_x = model.backward(kept, tensors[0], into)
        return {}, [into.numpy(), *([grad_x.numpy()] if grad_x is not None else [])]

    def _keep(self, saved: Saved | SavedLoss | None) -> int | None:
        if saved is None:
            return None
        self._count += 1
        self._kept[self._count] = saved
        return self._count


def _aligned(array: Array, past_bytes: int = 0) -> Array:
    """A copy that begins so many bytes past a multiple of 64."""
    room = np.empty(array.nbytes + 2 * ALIGNMENT_BYTES, dtype=np.uint8)
    begin = -room.ctypes.data % ALIGNMENT_BYTES + past_bytes
    made = room[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    made[...] = array
    return made


def _write(stream: IO[bytes], meta: Mapping[str, Any], arrays: Sequence[Array]) -> None:
    shapes = [[array.dtype.str, list(array.shape)] for array in arrays]
    stream.write(json.dumps([meta, shapes]).encode() + b"\n")
    for array in arrays:
        stream.write(np.ascontiguousarray(array).tobytes())
    stream.flush()


def _read(stream: IO[bytes]) -> tuple[dict[str, Any], list[Array]] | None:
    """None at the end."""
    line = stream.readline()
    if not line:
        return None
    meta, shapes = json.loads(line)
    arrays = []
    for dtype, shape in shapes:
        data = stream.read(int(np.dtype(dtype).itemsize * np.prod(shape, dtype=np.int64)))
        arrays.append(np.frombuffer(bytearray(data), dtype=dtype).reshape(shape))
    return meta, arrays


def _settings_value(settings: ModelSettings) -> dict[str, Any]:
    return {
        "config_json": settings.config_json,
        "stage_layers": settings.stage_layers,
        "compute_dtype": settings.compute_dtype,
    }


def _settings_of(value: Mapping[str, Any]) -> ModelSettings:
    return ModelSettings(**{**value, "stage_layers": tuple((first, last) for first, last in value["stage_layers"])})


def _serve() -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    mode = ComputeMode(1, recompute=True) if "by-sample" in sys.argv[2:] else None
    answering = _Answering(int(sys.argv[1]), mode)
    while (request := _read(sys.stdin.buffer)) is not None:
        _write(sys.stdout.buffer, *answering.answer(*request))


if __name__ == "__main__":
    _serve()
