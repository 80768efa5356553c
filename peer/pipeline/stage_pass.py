"""One peer's passes of microbatches through its stage: what it computes, adds to a step's sum, encodes and signs.

The daemon and the virtual swarm call the same methods in the same order; only what lies between two peers differs.
Methods marked (compute) run on the compute thread.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from peer.state.replica import StageReplica
from swarm.bulk_digest import bulk_digest
from swarm.core.errors import LocalError, RemoteError, TransientError
from swarm.core.ids import MicrobatchId, PeerId, StageIndex, Step, Version
from swarm.core.round.contribution import Work
from swarm.core.settings import RunSettings
from swarm.core.transfers import longest_way_s
from swarm.identity.key import Identity
from swarm.model.stage import Saved, SavedLoss, Weights
from swarm.model.subspace import StageInput
from swarm.model.tensor_pass import TensorPass
from verification.kinds.protocol_violation import ProtocolViolation, ViolationError
from verification.pipeline.exchanges import Exchange
from verification.pipeline.headers import (
    BirthRecord,
    Direction,
    HopHeader,
    Kind,
    Parents,
    check_hop,
    forward_parents,
    gradient_parents,
    ids_bytes,
)
from verification.round.papers import Bytes, Papers

log = logging.getLogger(__name__)

Ids = NDArray[np.int64]

LARGEST_NORM = 2.0**60
"""Of what others send: products of two such are finite still, one that is not makes a step's whole sum so."""


class Born(NamedTuple):
    """A microbatch as its source sends it on its way."""

    birth: BirthRecord
    tokens_BL: Ids
    targets_BL: Ids
    sends_ids: bool

    @property
    def targets(self) -> bytes:
        """As they are sent; with the ids, where activations need them."""
        return beside(self.tokens_BL, self.targets_BL, sends_ids=self.sends_ids)


def beside(tokens_BL: Ids, targets_BL: Ids, *, sends_ids: bool) -> bytes:
    """What goes with a microbatch's activations."""
    return ids_bytes(targets_BL) + (ids_bytes(tokens_BL) if sends_ids else b"")


@dataclass(frozen=True)
class Activation:
    """An activation on its way, kept until the gradient is back."""

    birth: BirthRecord
    version: Version
    parents: tuple[bytes, ...]
    input_header: HopHeader | None
    """Of x; None at stage 0."""
    body: memoryview
    """Encoded activation, then the targets, then the input ids where it means nothing without them."""
    num_activation_bytes: int
    body_digest: bytes

    @property
    def y(self) -> memoryview:
        """Encoded."""
        return self.body[: self.num_activation_bytes]

    @property
    def targets(self) -> memoryview:
        return self.body[self.num_activation_bytes :]

    def call(self, header: HopHeader) -> Exchange:
        """That takes it to a peer of the next stage, not answered yet."""
        return Exchange(
            birth=self.birth, forward=header, gradient=None, activation=self.y, targets=self.targets, answer=b""
        )


class LossPass(NamedTuple):
    """What the last stage makes of a microbatch: it turns back there."""

    loss_sum: float
    gradient: memoryview | None
    """Of x, encoded; None where the last stage is the first."""
    version: Version
    """Computed on."""


class StagePass:
    """What a peer makes of microbatches at its stage."""

    def __init__(self, settings: RunSettings, run_id: str, identity: Identity, replica: StageReplica) -> None:
        self.settings = settings
        self.run_id = run_id
        self.identity = identity
        self.replica = replica
        self.tensors = TensorPass(settings, replica.model)
        self.shape = self.tensors.shape
        wires = (self.tensors.codec, self.tensors.gradient_codec)
        self.longest_s = longest_way_s(
            sum(codec.encoded_bytes(self.shape) for codec in wires),
            settings.model.num_stages - 1 - replica.stage,
            floor_s=settings.deadlines.hop_s,
            least_mbit=settings.deadlines.least_mbit,
        )
        """A microbatch that goes on from here has come back by then, in seconds, or never does."""
        self._numeric_class = numeric_class(replica.model.device, settings.model.compute_dtype)

    # -- birth --------------------------------------------------------------------------------------------

    def born(
        self,
        kind: Kind,
        microbatch_id: MicrobatchId,
        *,
        attempt: int,
        step: Step,
        era: int,
        tokens_BL: Ids,
        targets_BL: Ids,
    ) -> Born:
        """At a source: the microbatch that was read, with its signed birth record."""
        unsigned = BirthRecord.of_batch(
            self.run_id,
            self.identity.peer_id,
            kind,
            microbatch_id,
            attempt=attempt,
            step=step,
            era=era,
            tokens_BL=tokens_BL,
            targets_BL=targets_BL,
        )
        return Born(unsigned.signed_by(self.identity), tokens_BL, targets_BL, self.settings.model.sends_ids)

    # -- what comes ---------------------------------------------------------------------------------------

    def opened(self, came: Exchange, sender: PeerId) -> tuple[StageInput, torch.Tensor]:
        """x and the targets (B, L) of a call from the stage before, once all about them is as it must be.

        Raises RemoteError for anything else; it is a ViolationError where the sender signed what does not decode.
        """
        birth, before = came.birth, StageIndex(self.replica.stage - 1)
        codec = self.tensors.codec.name
        self._check(
            came.forward, came.activation, birth, sender, before, codec, forward_parents(birth.digest(), before)
        )
        unlike = birth.unlike(came.targets)
        if unlike is not None:
            raise RemoteError("digest", unlike, sender)
        targets_BL = self.tensors.targets(came.targets)
        birth.check_documents(targets_BL.numpy())
        if self.replica.stage == 1 and birth.kind == "train" and birth.source != sender:
            # Stage 0's auditors look at their members' work, and see none of a key that is nobody's.
            raise RemoteError("protocol", f"microbatch {birth.microbatch_id} was born at {birth.source}", sender)
        with _proven(came.forward, came.activation):
            x = self.tensors.x(came.activation, came.targets)
        self._check_size(x, "an activation", sender)
        return x, targets_BL

    def gradient_came(self, answered: Exchange, sender: PeerId) -> torch.Tensor:
        """The gradient of y that a call to the next stage was answered with. Raises as `opened` does."""
        header, after = answered.gradient, StageIndex(self.replica.stage + 1)
        assert header is not None
        codec, num_stages = self.tensors.gradient_codec.name, self.settings.model.num_stages
        parents = gradient_parents(answered.forward.digest(), after, num_stages)
        self._check(header, answered.answer, answered.birth, sender, after, codec, parents)
        with _proven(header, answered.answer):
            grad_y = self.tensors.gradient(answered.answer)
        self._check_size(grad_y, "a gradient", sender)
        return grad_y

    def _check_size(self, came: StageInput, what: str, sender: PeerId) -> None:
        """Raises RemoteError for what would spoil all that this peer does in the step, and no honest run comes to."""
        norm = self.tensors.norm(came)
        if not norm <= LARGEST_NORM:
            raise RemoteError("protocol", f"{what} of norm {norm:g}", sender)

    # -- there --------------------------------------------------------------------------------------------

    def forward(
        self, birth: BirthRecord, x: StageInput, targets: Bytes, input_header: HopHeader | None
    ) -> tuple[Activation, Saved]:
        """(compute) The activation that goes to the next stage, and what its gradient is taken back through.

        Raises TransientError if it is not finite.
        """
        return self.forward_begun(birth, x, targets, input_header)()

    def forward_begun(
        self, birth: BirthRecord, x: StageInput, targets: Bytes, input_header: HopHeader | None
    ) -> Callable[[], tuple[Activation, Saved]]:
        """(compute) `forward` in two halves: what is returned waits for the device, and may be called elsewhere."""
        version, y_BLD, saved = self.output(birth, x)
        encoding = self.tensors.sending(y_BLD)
        return lambda: (self._packed(birth, version, encoding, targets, input_header), saved)

    def forward_only(
        self, birth: BirthRecord, weights: Weights, x: StageInput, targets: Bytes, input_header: HopHeader | None
    ) -> Activation:
        """(compute) As `forward`, to evaluate the version that the record names."""
        y_BLD, _ = self.tensors.model.forward(weights, x, keep=False, bounds=birth.document_bounds)
        return self._packed(birth, Version(int(birth.step)), self.tensors.sending(y_BLD), targets, input_header)

    def loss(
        self, birth: BirthRecord, x: StageInput, targets_BL: torch.Tensor, input_header: HopHeader | None
    ) -> LossPass:
        """(compute) `loss_begun`, and its end."""
        return self.loss_begun(birth, x, targets_BL, input_header)()

    def loss_begun(
        self, birth: BirthRecord, x: StageInput, targets_BL: torch.Tensor, input_header: HopHeader | None
    ) -> Callable[[], LossPass]:
        """(compute) At the last stage: the loss and the gradient of x; the parameters' is added to the step's sum.

        `input_header` is of x; None where x are the ids that were read, in a run of one stage. What is returned waits
        for the device, and may be called elsewhere. Raises RemoteError for targets that the birth record does not
        count; in the end TransientError if the gradient is not finite.
        """
        replica, step = self.replica, birth.step
        version, loss_sum, saved = self.outcome(birth, x, targets_BL)
        counted, grad_x = self.counts(birth), self.loss_gradient(birth, saved)
        if counted:
            self._record(version, Papers.received(birth, input_header))
        if not saved.is_finite:
            log.warning("step %d: the loss of microbatch %d is not finite", step, birth.microbatch_id)
            replica.sum_of(step).not_finite.add(birth.microbatch_id)
        answering = self.answering(grad_x) if grad_x is not None else lambda: None
        return lambda: LossPass(loss_sum, answering(), version)

    # -- back ---------------------------------------------------------------------------------------------

    def backward(
        self, activation: Activation, saved: Saved, grad_y_BLD: torch.Tensor, answer: HopHeader
    ) -> torch.Tensor | None:
        """(compute) The gradient of x, from the one that came back under `answer`; the parameters' is added to the
        step's sum, unless the microbatch is in it."""
        birth = activation.birth
        counted, grad_x = self.counts(birth), self.gradient(birth, saved, grad_y_BLD)
        if counted:
            sent = self.forward_header(activation, answer.producer)
            self._record(activation.version, Papers.received(birth, activation.input_header, sent, answer))
        return grad_x

    def answered(self, grad_x_BLD: torch.Tensor) -> memoryview:
        """(compute) The gradient of x as it goes to whoever sent x. Raises TransientError if it is not finite."""
        return self.answering(grad_x_BLD)()

    def answering(self, grad_x_BLD: torch.Tensor) -> Callable[[], memoryview]:
        """(compute) `answered` in two halves: what is returned waits for the device, and may be called elsewhere."""
        encoding = self.tensors.answering(grad_x_BLD)

        def encoded() -> memoryview:
            with _must_be_finite():
                return encoding()

        return encoded

    # -- step by step -------------------------------------------------------------------------------------

    def weights_for(self, birth: BirthRecord) -> tuple[Version, Weights]:
        """What a microbatch is computed on now: the newest version that its step allows."""
        return self.replica.weights_for(birth.step)

    def output(self, birth: BirthRecord, x: StageInput) -> tuple[Version, torch.Tensor, Saved]:
        """(compute) The version, y computed on it, and what its gradient is taken back through."""
        version, weights = self.weights_for(birth)
        return version, *self.tensors.forward(weights, x, birth.document_bounds)

    def outcome(self, birth: BirthRecord, x: StageInput, targets_BL: torch.Tensor) -> tuple[Version, float, SavedLoss]:
        """(compute) The version, the loss on it, and what its gradient is taken back through."""
        version, weights = self.weights_for(birth)
        loss_sum, num_targets, saved = self.tensors.loss(weights, x, targets_BL, birth.document_bounds)
        birth.check_num_targets(num_targets)
        return version, loss_sum, saved

    def gradient(self, birth: BirthRecord, saved: Saved, grad_y_BLD: torch.Tensor) -> torch.Tensor | None:
        """(compute) Of x; None at stage 0."""
        return self.tensors.backward(saved, grad_y_BLD, self.sum_for(birth))

    def loss_gradient(self, birth: BirthRecord, saved: SavedLoss) -> torch.Tensor | None:
        """(compute) Of x, at the last stage; None if that is stage 0."""
        return self.tensors.loss_backward(saved, self.sum_for(birth))

    def sum_for(self, birth: BirthRecord) -> torch.Tensor | None:
        """(compute) Where the microbatch's gradient of the parameters is added: the step's sum; None if it does not
        count."""
        return self.replica.sum_of(birth.step).gradient.flat if self.counts(birth) else None

    def counts(self, birth: BirthRecord) -> bool:
        """(compute) Whether a microbatch goes into this peer's contribution: what is in it already is only answered."""
        return not self.replica.has_done(birth.step, birth.microbatch_id)

    # -- papers -------------------------------------------------------------------------------------------

    def forward_header(self, activation: Activation, consumer: PeerId) -> HopHeader:
        """Of an activation, to the peer of the next stage that it goes to."""
        birth, version, codec = activation.birth, activation.version, self.tensors.codec.name
        return self._signed(birth, version, "forward", consumer, activation.parents, codec, activation.body_digest)

    def gradient_header(
        self,
        birth: BirthRecord,
        version: Version,
        gradient: memoryview,
        input_header: HopHeader,
        answer: HopHeader | None = None,
    ) -> HopHeader:
        """Of the encoded gradient of x, to whoever sent x; `answer` is that of the gradient of y, if it was made from
        one."""
        parents = (input_header.digest(), *(() if answer is None else (answer.digest(),)))
        codec, digest = self.tensors.gradient_codec.name, bulk_digest(gradient)
        return self._signed(birth, version, "gradient", input_header.producer, parents, codec, digest)

    def gradient_header_to(self, input_header: HopHeader, made: HopHeader) -> HopHeader:
        """Of the same gradient, to another peer that sent the same x under this header."""
        parents = (input_header.digest(), *made.parents[1:])
        return replace(made, consumer=input_header.producer, parents=parents).signed_by(self.identity)

    def _signed(
        self,
        birth: BirthRecord,
        version: Version,
        direction: Direction,
        consumer: PeerId,
        parents: tuple[bytes, ...],
        codec: str,
        body_digest: bytes,
    ) -> HopHeader:
        header = HopHeader(
            run_id=self.run_id,
            stage=self.replica.stage,
            version=version,
            microbatch_id=birth.microbatch_id,
            attempt=birth.attempt,
            direction=direction,
            producer=self.identity.peer_id,
            consumer=consumer,
            parents=parents,
            shape=self.shape,
            dtype="fp32",
            codec=codec,
            numeric_class=self._numeric_class,
            body_digest=body_digest,
        )
        return header.signed_by(self.identity)

    # -- within -------------------------------------------------------------------------------------------

    def _check(
        self,
        header: HopHeader,
        body: Bytes,
        birth: BirthRecord,
        sender: PeerId,
        stage: StageIndex,
        codec: str,
        parents: Parents,
    ) -> None:
        """`check_hop` of what came to this peer from `sender` of `stage`."""
        check_hop(
            header,
            birth,
            body,
            sender=sender,
            consumer=self.identity.peer_id,
            stage=stage,
            direction="forward" if stage < self.replica.stage else "gradient",
            shape=self.shape,
            codec=codec,
            parents=parents,
            delay=self.settings.delay_at(birth.step),
        )

    def _record(self, version: Version, papers: Papers) -> None:
        """(compute) A microbatch's gradient is in its step's sum, for these papers."""
        birth, replica = papers.birth, self.replica
        entry = (papers.input_digest, papers.output_digest)
        replica.record(birth.step, Work(birth.microbatch_id, birth.attempt, version, birth.num_targets, *entry))
        replica.sum_of(birth.step).papers[birth.microbatch_id] = papers

    def _packed(
        self,
        birth: BirthRecord,
        version: Version,
        encoding: Callable[[], memoryview],
        targets: Bytes,
        input_header: HopHeader | None,
    ) -> Activation:
        with _must_be_finite():
            encoded = encoding()
        parents = (birth.digest(), *(() if input_header is None else (input_header.digest(),)))
        body = memoryview(b"".join((encoded, targets)))
        return Activation(birth, version, parents, input_header, body, len(encoded), bulk_digest(encoded))


@contextmanager
def _proven(header: HopHeader, body: Bytes) -> Iterator[None]:
    """What does not decode is proof against who signed for it."""
    try:
        yield
    except RemoteError as error:
        raise ViolationError(ProtocolViolation(message=header, part=0, body=body), error) from error


@contextmanager
def _must_be_finite() -> Iterator[None]:
    """Raises TransientError for a tensor that is not: no codec carries it, and no other peer need be asked."""
    try:
        yield
    except LocalError as error:
        log.warning("a microbatch ends here: %s", error)
        raise TransientError(f"what this peer computed is not finite: {error}") from error


def numeric_class(device: torch.device, compute_dtype: str) -> str:
    """What a computation's bits depend on besides its inputs: PyTorch's version, the kind and generation of the device,
    the type. Replays are compared within a class."""
    kind = device.type
    if kind == "cuda":
        kind += "-sm{}{}".format(*torch.cuda.get_device_capability(device))
    elif kind == "cpu":
        kind += f"-{torch.backends.cpu.get_cpu_capability().lower()}"
    return f"torch-{torch.__version__.partition('+')[0]}/{kind}/{compute_dtype}"
