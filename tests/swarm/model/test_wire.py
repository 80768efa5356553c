"""What crosses between the host and a device: the bytes of the CPU, counted, and no more than is needed."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from peer.sim.tiny_run import TinyRun
from swarm.core.errors import LocalError, RemoteError
from swarm.core.settings import ActivationCodecName, CodecSettings, RunSettings
from swarm.model import wire
from swarm.model.link import link_to
from swarm.model.stage import StageModel
from swarm.model.tensor_pass import TensorPass
from swarm.model.wire import Wire
from tests.pretend_device import OTHERS, PRETEND, counted

HOST = link_to(torch.device("cpu"))
on_other_devices = pytest.mark.parametrize("device", OTHERS)
on_cuda = pytest.mark.skipif("cuda:0" not in OTHERS, reason="make gpu runs it")
CODECS: tuple[ActivationCodecName, ...] = ("fp32", "bf16", "int8", "int4", "int4h")


def stage_of(settings: RunSettings, stage: int, device: str) -> tuple[TensorPass, np.ndarray]:
    model = StageModel(settings.model, stage, device=device)
    flat = np.random.default_rng(stage).standard_normal(model.layout.num_values, dtype=np.float32)
    return TensorPass(settings, model), flat * np.float32(0.1)


def settings_of(codec: ActivationCodecName, dtype: str) -> RunSettings:
    settings = TinyRun(num_stages=3, codecs=CodecSettings(activations=codec, activation_gradients=codec)).settings()
    return replace(settings, model=replace(settings.model, compute_dtype=dtype))  # type: ignore[arg-type]


@on_other_devices
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shape", [(2, 3, 131), (1, 7, 1024)])
def test_a_device_encodes_and_decodes_the_bytes_of_the_host(
    codec: ActivationCodecName, shape: tuple[int, int, int], device: str
) -> None:
    link = link_to(torch.device(device))
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)).exp()
    here, there = Wire(codec, HOST), Wire(codec, link)
    body = here.encoded(values)
    assert bytes(there.encoded(link.put(values))) == bytes(body)
    decoded = there.decoded(body, shape)
    assert decoded.device.type == link.device.type
    assert torch.equal(link.fetch(decoded), here.decoded(body, shape))


@pytest.fixture
def nothing_asked(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Where a tensor was made to look for kernels there."""
    looked: list[torch.device] = []

    def zeros(*shape: int, device: torch.device) -> torch.Tensor:
        looked.append(device)
        return torch.ones(shape)

    monkeypatch.setattr("swarm.model.wire.torch.zeros", zeros)
    monkeypatch.setattr("swarm.model.wire._KERNELS_ON", {})
    return looked


def test_where_triton_compiles_nothing_the_host_encodes(
    nothing_asked: list[torch.device], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a machine without a C compiler, where its first launch fails."""

    def fails(rows_TD: torch.Tensor, codec: str) -> torch.Tensor:
        raise RuntimeError("Failed to find C compiler")

    stub = SimpleNamespace(encoded=fails, decoded=fails)
    monkeypatch.setitem(sys.modules, "kernels.gpu.activations", stub)
    monkeypatch.setattr("kernels.gpu.activations", stub, raising=False)
    assert not wire._has_kernels(torch.device("cuda:0"))
    assert "encoded on the CPU, for Triton does not work here (Failed to find C compiler)" in caplog.text


def test_a_peer_looks_for_kernels_on_its_own_gpu_and_they_are_given_once(
    nothing_asked: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first GPU may be full, or not be its owner's to give; and of two peers each has one of its own."""
    stub = SimpleNamespace(encoded=lambda rows_TD, codec: torch.ones(129), decoded=lambda *asked: None)
    given: list[str] = []
    monkeypatch.setitem(sys.modules, "kernels.gpu.activations", stub)
    monkeypatch.setattr("kernels.gpu.activations", stub, raising=False)
    monkeypatch.setattr("swarm.model.wire._OPERATORS", SimpleNamespace(impl=lambda name, *_: given.append(name)))
    numbers = [torch.device(f"cuda:{number}") for number in (2, 1, 2)]
    assert all(map(wire._has_kernels, numbers))
    assert nothing_asked == numbers[:2]
    assert given == ["encoded", "decoded"]


@on_other_devices
@pytest.mark.parametrize("codec", CODECS)
def test_a_device_refuses_what_the_host_refuses(codec: ActivationCodecName, device: str) -> None:
    link, shape = link_to(torch.device(device)), (1, 2, 64)
    wire = Wire(codec, link)
    values = torch.ones(shape)
    values[0, 1, 63] = torch.nan
    with pytest.raises(LocalError):
        wire.encoded(link.put(values))
    with pytest.raises(RemoteError, match=codec):
        wire.decoded(b"\xff" * wire.codec.encoded_bytes(shape), shape)
    with pytest.raises(RemoteError):
        wire.decoded(b"", shape)


def test_tensors_of_the_host_and_of_a_device_are_not_mixed() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        link_to(torch.device(PRETEND)).put(torch.ones(2)) + torch.ones(2)
    tensors, flat = stage_of(settings_of("int8", "fp32"), 1, PRETEND)
    on_the_host, _ = stage_of(settings_of("int8", "fp32"), 1, "cpu")
    with pytest.raises(RuntimeError, match="same device"):
        tensors.forward(on_the_host.model.weights(flat), torch.ones(tensors.shape), ())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
def test_a_microbatch_crosses_encoded_twice_each_way(codec: ActivationCodecName, dtype: str) -> None:
    tensors, flat = stage_of(settings_of(codec, dtype), 1, PRETEND)
    weights, into = tensors.model.weights(flat), torch.zeros(flat.size, device=PRETEND)
    body = tensors.codec.encode(torch.randn(tensors.shape))
    with counted() as copies:
        y, saved = tensors.forward(weights, tensors.x(body, b""), ())
        tensors.sent(y)
        grad_x = tensors.backward(saved, tensors.gradient(body), into)
        assert grad_x is not None
        tensors.answered(grad_x)
    assert copies.to_device == {torch.uint8: 2 * len(body)}
    assert copies.to_host.keys() == {torch.uint8}, "nothing in fp32"
    flags = copies.to_host[torch.uint8] - 2 * len(body)
    assert 0 <= flags <= 4 * tensors.shape[0] * tensors.shape[1], "whether each was valid, in a byte or so a token"
    assert (copies.num_to_device, copies.num_to_host) == (2, 4)
    assert not copies.waits, "the host waits for what it fetches, and for nothing else"


@on_cuda
@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4"])
def test_on_cuda_nothing_is_waited_for_but_events(codec: ActivationCodecName) -> None:
    tensors, flat = stage_of(settings_of(codec, "bf16"), 1, "cuda:0")
    weights, into = tensors.model.weights(flat), torch.zeros(flat.size, device="cuda:0")
    body = tensors.codec.encode(torch.randn(tensors.shape))

    def microbatch() -> None:
        y, saved = tensors.forward(weights, tensors.x(body, b""), ())
        tensors.sent(y)
        grad_x = tensors.backward(saved, tensors.gradient(body), into)
        assert grad_x is not None
        tensors.answered(grad_x)

    microbatch()
    torch.cuda.set_sync_debug_mode("error")  # events are no error to it
    try:
        microbatch()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_cuda
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_on_cuda_the_same_microbatch_has_the_same_bits(dtype: str) -> None:
    tiny = TinyRun(num_stages=1, hidden_size=512, vocab_size=1000, sequence_length=1024)
    plain = tiny.settings()
    settings = replace(plain, model=replace(plain.model, compute_dtype=dtype))  # type: ignore[arg-type]
    tensors, flat = stage_of(settings, 0, "cuda:0")
    weights, ids = tensors.model.weights(flat), torch.randint(0, 1000, tensors.shape[:2])
    found = set()
    for _ in range(8):
        into = torch.zeros(flat.size, device="cuda:0")
        _, _, loss = tensors.loss(weights, ids, ids, ())
        tensors.loss_backward(loss, into)
        found.add(tensors.model.link.fetch(into).numpy().tobytes())
    assert len(found) == 1


def test_at_the_ends_ids_cross_and_losses_do() -> None:
    settings = settings_of("int8", "bf16")
    first, flat = stage_of(settings, 0, PRETEND)
    ids = torch.ones(first.shape[:2], dtype=torch.int64)
    weights, into = first.model.weights(flat), torch.zeros(flat.size, device=PRETEND)
    with counted() as copies:
        y, saved = first.forward(weights, ids, ())
        body = first.sent(y)
        first.backward(saved, first.gradient(body), into)
    assert copies.to_device == {torch.int64: 8 * ids.numel(), torch.uint8: len(body)}
    assert copies.to_host.keys() == {torch.uint8}
    assert not copies.waits
    last, flat = stage_of(settings, 2, PRETEND)
    weights, into = last.model.weights(flat), torch.zeros(flat.size, device=PRETEND)
    with counted() as copies:
        _, _, loss = last.loss(weights, last.x(body, b""), ids, ())
        grad_x = last.loss_backward(loss, into)
        assert grad_x is not None
        last.answered(grad_x)
    assert copies.to_device == {torch.int64: 8 * ids.numel(), torch.uint8: len(body)}
    assert copies.to_host[torch.float32] == 4, "one loss"
    assert not copies.waits


@pytest.mark.parametrize(("dtype", "rounding"), [("fp32", 1e-6), ("bf16", 1e-2)])
@pytest.mark.parametrize("stage", [0, 1, 2])
@on_other_devices
def test_a_device_computes_what_the_host_computes_up_to_rounding(
    stage: int, dtype: str, rounding: float, device: str
) -> None:
    made = []
    for place in ("cpu", device):
        tensors, flat = stage_of(settings_of("int8", dtype), stage, place)
        weights, into = tensors.model.weights(flat), torch.zeros(flat.size, device=place)
        chance = torch.Generator().manual_seed(2)
        ids = torch.randint(0, 64, tensors.shape[:2], generator=chance)
        hidden = torch.randn(tensors.shape, generator=chance)
        if stage == 2:
            _, _, loss = tensors.loss(weights, hidden, ids, ())
            grad_x = tensors.loss_backward(loss, into)
        else:
            _, saved = tensors.forward(weights, hidden if stage else ids, ())
            grad_x = tensors.backward(saved, hidden, into)
        made.append([tensor.cpu() for tensor in (into, grad_x) if tensor is not None])
    for here, there in zip(*made, strict=True):
        assert 0 < (here - there).norm() <= rounding * here.norm()


def test_matrices_of_products_are_kept_rounded_and_cross_rounded() -> None:
    tensors, flat = stage_of(settings_of("int8", "bf16"), 1, PRETEND)
    with counted() as copies:
        weights = tensors.model.weights(flat)
    rounded = {name for name, value in weights.parameters.items() if value.dtype == torch.bfloat16}
    assert rounded == {name for name, value in weights.parameters.items() if value.ndim == 2}
    num_rounded = sum(weights.parameters[name].numel() for name in rounded)
    assert copies.to_device == {torch.bfloat16: 2 * num_rounded, torch.float32: 4 * (flat.size - num_rounded)}
