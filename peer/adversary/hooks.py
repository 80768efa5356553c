"""What a misbehaving peer's work passes on its way out.

Hooks of `Adversary` itself, and of `HONEST`, hand on the very objects they are given. Evaluations pass no hook.
Tensors: B samples, L tokens, D hidden values.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from peer.adversary.strengths import SOMETIMES_SHARE
from swarm.attacks import Attack
from swarm.averaging.encoded import Encoded, VectorCodec
from swarm.core.audit.chance import Chance
from swarm.core.canonical import Value, digest
from swarm.core.ids import MicrobatchId, PeerId, Step, Version
from swarm.core.round.averaging_round import AveragingRound, Instruction, RoundFacts
from swarm.core.round.contribution import Charge, Work
from swarm.core.state.stage_chain import StageChain
from swarm.identity.key import Identity
from swarm.model.stage import StageModel, Weights
from swarm.model.subspace import StageInput
from swarm.network.transport import Directory
from verification.pipeline.headers import BirthRecord

Floats = NDArray[np.float32]


class At(NamedTuple):
    """A microbatch that counts in a step."""

    step: Step
    microbatch_id: MicrobatchId


class Place(NamedTuple):
    """Where a liar stands."""

    directory: Directory
    me: Identity
    topics: Sequence[str]
    """Of its own stage and of those beside it."""
    addresses: Sequence[str]
    ttl_s: float
    joining: set[PeerId]
    """Whom it tells the leader of."""


class Adversary:
    """Hooks that do nothing. An attack overrides those it needs.

    Hooks of a microbatch run on the compute thread, those of a round on the exact thread and its helpers. No hook
    writes to what it is given, but `added` to the sum. Chance follows seed, hook and microbatch or step, not the order
    of calls.
    """

    def __init__(self, attack: Attack | None = None, *, seed: str = "") -> None:
        """`attack` is None for an honest peer."""
        self.attack = attack
        self._seed = seed

    # -- a microbatch -------------------------------------------------------------------------------------

    def targets(self, at: At, targets_BL: torch.Tensor, *, vocab_size: int) -> torch.Tensor:
        """The targets a source signs, or the last stage computes with."""
        return targets_BL

    def weights(self, at: At, model: StageModel, version: Version, weights: Weights) -> Weights:
        """The weights to compute with, as those of `version`."""
        return weights

    def activation(self, at: At, weights: Weights, x: StageInput, y_BLD: torch.Tensor) -> torch.Tensor:
        """What goes to the next stage."""
        return y_BLD

    def parents(self, birth: BirthRecord, parents: tuple[bytes, ...], me: Identity) -> tuple[bytes, ...]:
        """What the header of an activation names as what it was made from."""
        return parents

    def output_gradient(self, at: At, grad_y_BLD: torch.Tensor) -> torch.Tensor:
        """The gradient that backward begins with: what came back, at the last stage the loss's."""
        return grad_y_BLD

    def adding(self, at: At, gradient_sum: torch.Tensor) -> None:
        """The microbatch's gradient is about to be added to the flat sum."""

    def added(self, at: At, gradient_sum: torch.Tensor, *, num_tokens: int) -> None:
        """It has been added."""

    def activation_gradient(self, at: At, grad_x_BLD: torch.Tensor, grad_y_BLD: torch.Tensor) -> torch.Tensor:
        """What goes to the stage before; `grad_y_BLD` as `output_gradient` was given it."""
        return grad_x_BLD

    def lists(self, at: At) -> bool:
        """Whether the microbatch goes into this peer's contribution."""
        return self.attack is None or not (self.attack.is_unlisted and self.acts(at))

    # -- a round ------------------------------------------------------------------------------------------

    def mean(self, step: Step, where: slice, mean: Floats) -> Floats:
        """That part of this peer's mean gradient."""
        return mean

    def moments(self, step: Step, said: Floats, *, is_second: bool) -> Floats:
        """Of this peer's window, a part of its first moments or of its second moments' means."""
        return said

    def listed(self, step: Step, work: tuple[Work, ...], *, most: int) -> tuple[tuple[Work, MicrobatchId | None], ...]:
        """What it says is in its contribution, of which `most` are allowed, each with the microbatch whose papers it
        shows for it, if any."""
        return tuple((item, item.microbatch_id) for item in work)

    def reduced(
        self, step: Step, encoded: tuple[memoryview, bytes], codec: VectorCodec, *, num_values: int, seed: bytes
    ) -> tuple[memoryview, bytes]:
        """A part this peer reduced, as it is sent, and its BLAKE3."""
        return encoded

    def instructed(self, facts: RoundFacts, instruction: Instruction, me: Identity) -> tuple[Instruction, ...]:
        """What it does where the round's rules say this."""
        return (instruction,)

    def writes(self, machine: AveragingRound) -> None:
        """Its own machine of a round has heard something: what it makes the machine believe."""

    def charged(self, chain: StageChain, charges: tuple[Charge, ...], me: PeerId) -> tuple[Charge, ...]:
        """What it says it brings before juries, in its contribution to the round that starts from the version."""
        return charges

    def revealed(self, step: Step, chance: Chance) -> Chance:
        """What its contribution reveals."""
        return chance

    def ignores(self, step: Step, members: tuple[PeerId, ...], sender: PeerId, *, me: PeerId) -> bool:
        """Whether a member's commitment is as if it had not come, where this peer leads."""
        return False

    def hears_nobody(self, step: Step) -> bool:
        """Whether, where it leads, voters outside name members in vain that have committed."""
        return False

    def reduced_for(self, step: Step, place: int, body: Encoded, codec: VectorCodec, *, num_values: int) -> Encoded:
        """A part this peer reduced, as the member at this place among those it goes to gets it."""
        return body

    def stated(self, step: Step, hashes: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """The hashes of a snapshot's chunks, as this peer signs for them; the step is the next one's."""
        return hashes

    # -- audits -------------------------------------------------------------------------------------------

    @property
    def withholds(self) -> bool:
        """Whether what audits ask for is not served."""
        return False

    @property
    def stands_by_its_work(self) -> bool:
        """Whether it says, asked to do its work again, that it comes to the same: who lies and does not plead."""
        return self.attack is not None and not self.attack.pleads

    def accuses_falsely(self, step: Step) -> bool:
        """Whether it accuses a peer whose work in this step it found honest."""
        return False

    def charges_in(self, step: Step) -> bool:
        """Whether it charges somebody in this step with what there is no evidence of."""
        return False

    def finds(self, guilty: bool) -> bool:
        """What it votes as a juror that found this."""
        return guilty

    def is_lazy(self, step: Step) -> bool:
        """Whether it says of another's work in this step, without a replay, that all is well."""
        return False

    # -- the directory ------------------------------------------------------------------------------------

    def says(self, step: Step, fields: Mapping[str, Value]) -> dict[str, Value]:
        """What it says of itself in the directory."""
        return dict(fields)

    def says_waits_s(self, step: Step, waits_s: float) -> float:
        """How long it says a microbatch would wait here."""
        return waits_s

    async def meddle(self, place: Place) -> None:
        """What else it does in the directory, a few times in a lease, while it acts."""

    # -- for attacks --------------------------------------------------------------------------------------

    def acts(self, at: At) -> bool:
        """Whether this microbatch is one to attack."""
        return self._has_begun(at.step) and self._is_drawn("microbatch", *at)

    def acts_in(self, step: Step) -> bool:
        """Whether this step's round is one to attack."""
        return self._has_begun(step) and self._is_drawn("step", step)

    def chance(self, what: str, *facts: int) -> np.random.Generator:
        """Chance for this purpose and these facts, the same whenever it is asked for."""
        found = digest("adversary", [self._seed, what, *[int(fact) for fact in facts]])
        return np.random.Generator(np.random.PCG64(int.from_bytes(found, "big")))

    def _has_begun(self, step: Step) -> bool:
        return self.attack is not None and int(step) >= self.attack.from_step

    def _is_drawn(self, what: str, *facts: int) -> bool:
        assert self.attack is not None
        return not self.attack.is_partial or self.chance(what, *facts).random() < SOMETIMES_SHARE


HONEST = Adversary()


class Liar(Protocol):
    """A peer that misbehaves, as what it says and hears sees it."""

    @property
    def adversary(self) -> Adversary: ...

    @property
    def step(self) -> Step:
        """That its stage is at."""

    @property
    def members(self) -> tuple[PeerId, ...]:
        """Of its stage."""
