"""What share of its arithmetic a device spends on a stage's microbatches, beside the same stage in plain PyTorch.

"Ours" is all that a peer does of a microbatch: activations decoded from the wire's bytes and encoded to them, gradients
summed in fp32. "With rounds" has a thread beside it that takes the gradient's mean to the host and brings weights back
without a pause. "Plain" is the same layers in the compute type throughout, on tensors that lie on the device already,
with gradients summed by autograd; "autocast" the same on fp32 weights. They take turns, and each figure is the median.
"""

import copy
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from peer.pipeline.stage_work import AHEAD
from peer.sim.tiny_run import TinyRun
from swarm.averaging.parts import Parts
from swarm.core.settings import CodecSettings, ModelSettings, RunSettings
from swarm.model.families import canonical_config_json
from swarm.model.stack import build_stack
from swarm.model.stage import StageModel
from swarm.model.tensor_pass import TensorPass
from swarm.optim.gradient_sum import GradientSum

PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "RTX 4090": 165e12, "RTX 3090": 71e12}
"""bf16 products with fp32 sums, dense, as the makers state them; of other devices what a large product comes to."""
VOCAB = 32_000


@dataclass(frozen=True)
class Case:
    """What is computed."""

    name: str
    hidden_size: int
    layers: int
    mlp_size: int
    heads: int
    is_whole: bool
    """Embedding, layers and head; else a stage between two others."""
    samples: int
    tokens: int
    vocab_size: int = VOCAB

    def model(self, compute_dtype: str) -> ModelSettings:
        """The stage is the second of three."""
        around = 0 if self.is_whole else 1
        config = {
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.mlp_size,
            "num_hidden_layers": self.layers + 2 * around,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "head_dim": self.hidden_size // self.heads,
            "max_position_embeddings": self.tokens,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }
        cuts = (
            ((0, self.layers),) if self.is_whole else ((0, 1), (1, self.layers + 1), (self.layers + 1, self.layers + 2))
        )
        return ModelSettings(
            config_json=canonical_config_json(config),
            stage_layers=cuts,
            compute_dtype=compute_dtype,  # type: ignore[arg-type]
            recompute=False,
        )

    @property
    def flops(self) -> float:
        """Of a microbatch, forward and backward; causal attention counts half."""
        products = self.layers * (4 * self.hidden_size**2 + 3 * self.hidden_size * self.mlp_size)
        products += self.vocab_size * self.hidden_size if self.is_whole else 0
        attention = self.layers * self.hidden_size * self.tokens
        return 6.0 * (products + attention) * self.samples * self.tokens


CASES = (
    Case("stage of 273 M", 2048, 5, 6144, 16, False, 4, 2048),
    Case("whole of 365 M", 1024, 22, 3072, 8, True, 8, 1024),
    Case("whole of 1.1 G", 2048, 18, 6144, 16, True, 4, 2048),
)
SMOKE = (
    Case("stage, tiny", 64, 2, 128, 4, False, 2, 32, 97),
    Case("whole, tiny", 64, 2, 128, 4, True, 2, 32, 97),
)


class AtOnce(Executor):
    """No thread: on a CPU the one that computes opens and takes."""

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(call(*arguments, **named))
        return done


@dataclass
class Bench:
    """One case on one device."""

    case: Case
    device: torch.device
    compute_dtype: str
    wire: str

    def __post_init__(self) -> None:
        case, rng = self.case, np.random.default_rng(0)
        model = case.model(self.compute_dtype)
        self.stage = 0 if case.is_whole else 1
        self.model = StageModel(model, self.stage, device=str(self.device))
        self.flat = rng.standard_normal(self.model.layout.num_values, dtype=np.float32) * np.float32(0.02)
        for name, view in self.model.layout.views(self.flat).items():
            if "norm" in name:
                view[:] = 1.0
        settings = settings_of(model, case, self.wire)
        self.tensors = TensorPass(settings, self.model)
        self.parts = Parts.of(settings, self.model.layout)
        self.weights = self.model.weights(self.flat)
        self.sum = GradientSum(self.model.layout.num_values, self.model.link)
        self.ids = torch.from_numpy(rng.integers(0, case.vocab_size, (case.samples, case.tokens)))
        hidden = rng.standard_normal((case.samples, case.tokens, case.hidden_size), dtype=np.float32)
        self.hidden = torch.from_numpy(hidden)
        self._copies = ThreadPoolExecutor(1) if self.device.type != "cpu" else AtOnce()
        self._opened: deque[tuple[Future[torch.Tensor], Future[torch.Tensor]]] = deque()
        self._taken: deque[Future[memoryview]] = deque()
        self.x, self.grad_y = self.tensors.codec.encode(self.hidden), self.tensors.gradient_codec.encode(self.hidden)
        if not case.is_whole:
            self._open()

    def ours(self) -> None:
        """A microbatch as a peer has it; the thread that computes is not more than two ahead of the device."""
        tensors = self.tensors
        if self.case.is_whole:
            _, _, loss = tensors.loss(self.weights, self.ids, self.ids, ())
            tensors.loss_backward(loss, self.sum.flat)
        else:
            x, grad_y = self._opened.popleft()
            self._open()
            y, saved = tensors.forward(self.weights, x.result(), ())
            self._taken.append(self._copies.submit(tensors.sending(y)))
            grad_x = tensors.backward(saved, grad_y.result(), self.sum.flat)
            assert grad_x is not None
            self._taken.append(self._copies.submit(tensors.answering(grad_x)))
            while len(self._taken) > 2 * AHEAD:
                self._taken.popleft().result()
        self.sum.add_tokens(self.ids.numel())

    def _open(self) -> None:
        """What comes is decoded by a thread of its own, one microbatch ahead; where there is a GPU."""
        tensors, gradient = self.tensors, self.tensors.gradient
        self._opened.append((self._copies.submit(tensors.x, self.x, b""), self._copies.submit(gradient, self.grad_y)))

    def round(self) -> None:
        """What the end of a step moves between device and host."""
        self.sum.close()
        for where in self.parts:
            self.sum.mean_of(where, np.empty(where.stop - where.start, dtype=np.float32))
        self.model.weights(self.flat)

    def plain(self, *, autocast: bool) -> Callable[[], None]:
        """A microbatch in plain PyTorch."""
        case, dtype = self.case, torch.bfloat16 if self.compute_dtype == "bf16" else torch.float32
        kept = torch.float32 if autocast else dtype
        shared = build_stack(case.model(self.compute_dtype), self.stage, device=self.device)
        stack = _filled(copy.deepcopy(shared), kept, self.device)
        head = torch.nn.Linear(case.hidden_size, case.vocab_size, bias=False, device=self.device, dtype=kept)
        ids, hidden = self.ids.to(self.device), self.hidden.to(self.device, kept).requires_grad_()
        grad_y = self.hidden.to(self.device, kept)

        def run() -> None:
            with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=autocast):
                y = stack(ids if case.is_whole else hidden)
                if case.is_whole:
                    logits = head(y).float().flatten(0, 1)
            if case.is_whole:
                torch.autograd.backward((functional.cross_entropy(logits, ids.flatten(), reduction="sum"),))
            else:
                torch.autograd.backward((y,), (grad_y.to(y.dtype),))

        return partial(_as_it_comes, run)


def _as_it_comes(run: Callable[[], None]) -> None:
    """PyTorch without deterministic kernels, which ours has for its whole process."""
    had = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        run()
    finally:
        torch.use_deterministic_algorithms(had)


def _filled(stack: Any, dtype: torch.dtype, device: torch.device) -> Any:
    rotary, stack.rotary = stack.rotary, None
    made = stack.to_empty(device=device).to(dtype)
    made.rotary = rotary
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.fill_(1.0) if "norm" in name else parameter.normal_(std=0.02)
    return made


def settings_of(model: ModelSettings, case: Case, wire: str) -> RunSettings:
    plain = TinyRun().settings()
    codecs = CodecSettings(activations=wire, activation_gradients=wire)  # type: ignore[arg-type]
    return replace(
        plain,
        model=model,
        codecs=codecs,
        data=replace(plain.data, vocab_size=case.vocab_size, sequence_length=case.tokens),
        batch=replace(plain.batch, microbatch_size=case.samples),
    )


def seconds(run: Callable[[], None], device: torch.device, *, times: int) -> float:
    """Of one call among several."""
    wait_for(device)
    started = time.perf_counter()
    for _ in range(times):
        run()
    wait_for(device)
    return (time.perf_counter() - started) / times


def wait_for(device: torch.device) -> None:
    """Until it has computed all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def with_rounds(bench: Bench, *, times: int) -> tuple[float, int]:
    """Seconds of a microbatch while rounds move gradients and weights, and how many did."""
    stop, rounds = threading.Event(), 0

    def beside() -> None:
        nonlocal rounds
        while not stop.is_set():
            bench.round()
            rounds += 1

    thread = threading.Thread(target=beside)
    thread.start()
    try:
        return seconds(bench.ours, bench.device, times=times), rounds
    finally:
        stop.set()
        thread.join()


def peak_of(device: torch.device) -> tuple[float, str]:
    """Operations a second that the device could do, and by whose word."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for known, peak in PEAK.items():
            if known in name:
                return peak, f"{name}, by its maker"
    size = 8192 if device.type == "cuda" else 512
    one = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    product = torch.empty_like(one)

    def multiply() -> None:
        torch.matmul(one, one, out=product)

    seconds(multiply, device, times=2)
    return 2 * size**3 / seconds(multiply, device, times=5), "a large product here"


def measured(bench: Bench, *, times: int, turns: int) -> dict[str, Any]:
    """The case's figures."""
    ways = {"ours": bench.ours, "plain": bench.plain(autocast=False)}
    if bench.compute_dtype == "bf16":
        ways["autocast"] = bench.plain(autocast=True)
    for run in ways.values():
        seconds(run, bench.device, times=2)
    taken: dict[str, list[float]] = {name: [] for name in (*ways, "with rounds")}
    num_rounds = 0
    for _ in range(turns):
        for name, run in ways.items():
            taken[name].append(seconds(run, bench.device, times=times))
        took, rounds = with_rounds(bench, times=times)
        taken["with rounds"].append(took)
        num_rounds += rounds
    peak, by = peak_of(bench.device)
    medians = {name: statistics.median(all_s) for name, all_s in taken.items()}
    return {
        "case": bench.case.name,
        "wire": bench.wire,
        "compute_dtype": bench.compute_dtype,
        "parameters": bench.model.layout.num_values,
        "peak": by,
        "mfu": {name: round(bench.case.flops / (median * peak), 4) for name, median in medians.items()},
        "ms": {name: round(1e3 * median, 2) for name, median in medians.items()},
        "spread": {name: round(max(all_s) / min(all_s) - 1, 3) for name, all_s in taken.items()},
        "of_plain": round(medians["plain"] / medians["ours"], 3),
        "of_plain_with_rounds": round(medians["plain"] / medians["with rounds"], 3),
        "rounds_beside": num_rounds,
    }
