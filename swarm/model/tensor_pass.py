"""A microbatch's pass through a stage: tensors from the bytes that come, and the bytes that go.

The peer that serves the stage, the simulated one and whoever replays them compute by this and nothing else.
Shapes: B samples, L tokens, D values of a token between stages.
"""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch

from swarm.core.errors import RemoteError
from swarm.core.settings import RunSettings
from swarm.model.documents import Bounds
from swarm.model.stage import Saved, SavedLoss, StageModel, Weights
from swarm.model.subspace import StageInput, WithinSubspace
from swarm.model.wire import Wire

Bytes: TypeAlias = bytes | bytearray | memoryview


class TensorPass:
    """There: x and weights give y or the loss. Back: the gradient of y gives that of x and is added to a sum.

    It holds no weights and no sums; equal arguments give equal bits on one machine.
    """

    def __init__(self, settings: RunSettings, model: StageModel) -> None:
        self.model = model
        self.shape = (settings.batch.microbatch_size, settings.data.sequence_length, model.hop_width)
        self.sends_ids = settings.model.sends_ids
        self._wire = Wire(settings.codecs.activations, model.link)
        self._gradient_wire = Wire(settings.codecs.activation_gradients, model.link)
        self.codec = self._wire.codec
        self.gradient_codec = self._gradient_wire.codec
        """On the host."""

    # -- what comes ---------------------------------------------------------------------------------------

    def ids(self, body: Bytes) -> torch.Tensor:
        """Little-endian int32 (B, L) as int64. Raises RemoteError("malformed") for another length."""
        num_samples, num_tokens = self.shape[:2]
        if len(body) != self._ids_bytes:
            raise RemoteError("malformed", f"{len(body)} bytes of ids for {num_samples} samples of {num_tokens} tokens")
        return torch.from_numpy(np.frombuffer(body, dtype="<i4").astype(np.int64).reshape(num_samples, num_tokens))

    @property
    def beside_bytes(self) -> int:
        """Of what goes with an activation: the targets, and behind them the ids where it means nothing without them."""
        return (2 if self.sends_ids else 1) * self._ids_bytes

    @property
    def _ids_bytes(self) -> int:
        """Of as many ids as there are tokens: little-endian int32."""
        return 4 * self.shape[0] * self.shape[1]

    def targets(self, body: Bytes) -> torch.Tensor:
        """(B, L) of what goes with an activation, as `ids` has them."""
        self._check_length(body)
        return self.ids(memoryview(body)[: self._ids_bytes])

    def x(self, body: Bytes, targets: Bytes) -> StageInput:
        """What the stage computes from: ids at the first, on the host; else an activation, on its device, and `targets`
        is what goes with it.

        Raises RemoteError("malformed").
        """
        if self.model.is_first:
            return self.ids(body)
        values = self._wire.decoded(body, self.shape)
        if not self.sends_ids:
            return values
        self._check_length(targets)
        return WithinSubspace(values, self.ids(memoryview(targets)[self._ids_bytes :]))

    def _check_length(self, targets: Bytes) -> None:
        if len(targets) != self.beside_bytes:
            raise RemoteError("malformed", f"{len(targets)} bytes beside an activation, not {self.beside_bytes}")

    def gradient(self, body: Bytes) -> torch.Tensor:
        """Of y as it came, or of x as it went. Raises RemoteError("malformed")."""
        return self._gradient_wire.decoded(body, self.shape)

    def norm(self, x: StageInput) -> float:
        """In L2, as PyTorch sums it: for screens, of which no two peers need the same."""
        values = x.values_BLK if isinstance(x, WithinSubspace) else x
        return float(self.model.link.fetch(torch.linalg.vector_norm(values)))

    # -- there and back -----------------------------------------------------------------------------------

    def forward(self, weights: Weights, x: StageInput, bounds: Bounds) -> tuple[torch.Tensor, Saved]:
        """y, and what `backward` needs. `bounds` are those of the birth record, which all stages have."""
        y_BLD, saved = self.model.forward(weights, x, keep=True, bounds=bounds)
        assert saved is not None
        return y_BLD, saved

    def loss(
        self, weights: Weights, x: StageInput, targets_BL: torch.Tensor, bounds: Bounds
    ) -> tuple[float, int, SavedLoss]:
        """The sum of token losses in nats, how many tokens it is of, and what `loss_backward` needs."""
        loss_sum, num_targets, saved = self.model.loss(weights, x, targets_BL, keep=True, bounds=bounds)
        assert saved is not None
        return loss_sum, num_targets, saved

    def backward(self, saved: Saved, grad_y_BLD: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor | None:
        """The gradient of x (None at the first stage); all parameters' gradients are added to `into`, if there is one,
        or none of them."""
        return self.model.backward(saved, grad_y_BLD, into)

    def loss_backward(self, saved: SavedLoss, into: torch.Tensor | None) -> torch.Tensor | None:
        """As `backward`, from the loss; zero if it is not finite."""
        return self.model.loss_backward(saved, into)

    # -- what goes ----------------------------------------------------------------------------------------

    def sent(self, y_BLD: torch.Tensor) -> memoryview:
        """Raises LocalError for what is not finite: no codec carries it."""
        return self.sending(y_BLD)()

    def sending(self, y_BLD: torch.Tensor) -> Callable[[], memoryview]:
        """`sent` in two halves: what is returned waits for the device, in whatever thread calls it."""
        return self._wire.encoding(y_BLD)

    def answered(self, grad_x_BLD: torch.Tensor) -> memoryview:
        """Raises LocalError for what is not finite."""
        return self.answering(grad_x_BLD)()

    def answering(self, grad_x_BLD: torch.Tensor) -> Callable[[], memoryview]:
        """`answered` in two halves, as `sending` is."""
        return self._gradient_wire.encoding(grad_x_BLD)
