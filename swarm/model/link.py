"""What passes between the host's memory and the device that a stage is computed on.

Everything that crosses goes through a link, so that it can be counted, and be copied while the device computes.
"""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

PUT_VALUES = 1 << 22
"""Weights go to a GPU in pieces of so many values: pinned memory is scarce."""


class Link:
    """Copies as PyTorch makes them: none where the device is the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def put(self, host: torch.Tensor) -> torch.Tensor:
        """On the device; what this thread has it compute from now on finds it there. What is there already stays."""
        return host.to(self.device)

    def put_into(self, there: torch.Tensor, host: torch.Tensor) -> None:
        """As `put`, into a tensor of the device; values are rounded to its type before they cross."""
        there.copy_(host.to(there.dtype))

    def mark(self) -> Any:
        """A moment for `fetch`: what this thread has had computed until now."""
        return None

    def wait(self, mark: Any) -> None:
        """Until that moment has come."""

    def fetch(self, there: torch.Tensor, *, after: Any = None) -> torch.Tensor:
        """On the host, once it is computed: waits for what this thread has had computed, or for a `mark`, no longer."""
        return self.fetching(there, after=after)()

    def fetching(self, there: torch.Tensor, *, after: Any = None) -> Callable[[], torch.Tensor]:
        """`fetch` in two halves: what is returned waits, in whatever thread calls it."""
        host = there.detach().to("cpu")
        return lambda: host

    def go_aside(self) -> None:
        """What this thread has computed from now on neither waits for what others have, nor makes them wait."""


class PinnedLink(Link):
    """Of a CUDA GPU: through pinned memory, on one stream each way; nothing is waited for but those streams' events."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        stream: Any = torch.cuda.Stream
        self._up, self._down, self._aside = stream(device), stream(device), stream(device)
        self._event: Any = torch.cuda.Event

    def put(self, host: torch.Tensor) -> torch.Tensor:
        if host.device.type == self.device.type:
            return host
        pinned = _pinned(host, host.dtype)
        with torch.cuda.device(self.device):
            with torch.cuda.stream(self._up):
                there = pinned.to(self.device, non_blocking=True)
            now = torch.cuda.current_stream()
            there.record_stream(now)
            now.wait_stream(self._up)
        return there

    def put_into(self, there: torch.Tensor, host: torch.Tensor) -> None:
        flat_there, flat_host = there.view(-1), host.reshape(-1)
        for start in range(0, flat_host.numel(), PUT_VALUES):
            self._copied(flat_there[start : start + PUT_VALUES], flat_host[start : start + PUT_VALUES])

    def _copied(self, there: torch.Tensor, host: torch.Tensor) -> None:
        pinned = _pinned(host, there.dtype)
        with torch.cuda.device(self.device):
            now = torch.cuda.current_stream()
            self._up.wait_stream(now)  # the memory may have been another's until now
            with torch.cuda.stream(self._up):
                there.copy_(pinned, non_blocking=True)
            there.record_stream(self._up)
            now.wait_stream(self._up)

    def mark(self) -> Any:
        event = self._event(blocking=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self, mark: Any) -> None:
        mark.synchronize()

    def fetching(self, there: torch.Tensor, *, after: Any = None) -> Callable[[], torch.Tensor]:
        there = there.detach()
        pinned = torch.empty(there.shape, dtype=there.dtype, pin_memory=True)
        with torch.cuda.device(self.device):
            self._down.wait_event(after or self.mark())
            with torch.cuda.stream(self._down):
                pinned.copy_(there, non_blocking=True)
                here = self._event(blocking=True)
                here.record()
            there.record_stream(self._down)

        def fetched() -> torch.Tensor:
            here.synchronize()
            return pinned

        return fetched

    def go_aside(self) -> None:
        torch.cuda.set_stream(self._aside)


def _pinned(host: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy, rounded to `dtype`."""
    return torch.empty(host.shape, dtype=dtype, pin_memory=True).copy_(host)


def link_to(device: torch.device) -> Link:
    """The quickest there is."""
    return PinnedLink(device) if device.type == "cuda" else Link(device)


def put_bytes(link: Link, body: bytes | bytearray | memoryview) -> torch.Tensor:
    """As uint8, on the device."""
    return link.put(lent(np.frombuffer(body, dtype=np.uint8)))


def lent(values: NDArray[Any]) -> torch.Tensor:
    """The same memory as a tensor of the host, which is only read."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(values)
