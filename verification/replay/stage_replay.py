"""A stage's work done again: versions from a snapshot and certified results, then microbatches.

All of it runs on the caller's thread, with as many threads of PyTorch as the caller has set: exact verdicts on a CPU
want one (`torch.set_num_threads(1)`).
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from swarm.averaging.parts import Parts
from swarm.averaging.seeds import part_seeds
from swarm.checkpoint.state import StageState
from swarm.core.errors import LocalError, RemoteError
from swarm.core.ids import PeerId, StageIndex, Step, Version
from swarm.core.pipeline.compute_mode import ComputeMode
from swarm.core.round.contribution import Result
from swarm.core.settings import RunSettings
from swarm.core.state.stage_chain import StageChain
from swarm.model.families import family_of, is_tied
from swarm.model.stage import StageModel, Weights
from swarm.model.tensor_pass import TensorPass
from swarm.optim.carried_moments import Carried
from swarm.optim.certified_steps import CertifiedSteps
from swarm.optim.gradient_sum import GradientSum
from swarm.optim.local_window import Window, window_of
from swarm.optim.second_moments import second_moments
from swarm.optim.stage_step import extrapolates, weights_ahead
from verification.pipeline.hop_claim import HopClaim
from verification.round.papers import Bytes, Exhibit

Floats = NDArray[np.float32]

HELD_VERSIONS = 2
"""A contribution's microbatches were computed on its round's version or, in an asynchronous run, the one before."""


@dataclass(frozen=True)
class Sent:
    """A tensor as a replay came to it."""

    body: memoryview
    """As it is sent."""
    exact: Floats
    """fp32 (B, L, values of a token between stages), before it was encoded."""


@dataclass(frozen=True)
class Replayed:
    """What an honest peer must have sent."""

    y: Sent | None
    """None at the last stage."""
    grad_x: Sent | None
    """None at stage 0."""
    loss_sum: float | None
    """In nats, at the last stage only."""


@dataclass(frozen=True)
class _Held:
    """The weights of a version."""

    flat: Floats
    plain: Weights
    ahead: Weights | None
    """What the step after the version's is computed on, if that is not `plain`."""
    ahead_is_known: bool
    """Not where an extrapolating run is entered: `ahead` also needs the version before."""
    carried: Carried | None
    """What windows begin with besides."""


class StageReplay:
    """One stage of a run as its honest peers have it, at one version after another.

    `begin`, then `advance` by each certified result; `state`, `chain` and `version` are where it stands. Or `hold`
    weights of versions that this machine had itself: then there is nothing to build.
    """

    def __init__(
        self,
        settings: RunSettings,
        stage: int,
        *,
        device: str = "cpu",
        model: StageModel | None = None,
        mode: ComputeMode | None = None,
    ) -> None:
        """Raises SettingsError as `StageModel` does. Settings may differ from the run's own in `compute_dtype`.

        `model` computes, if the stage's own on `device` shall not, in that `mode`.
        """
        self.settings = settings
        self.stage = StageIndex(stage)
        self.model = model or StageModel(settings.model, stage, device=device).computing(mode)
        self.layout = self.model.layout
        self.parts = Parts.of(settings, self.layout)
        self.num_parts = len(self.parts)
        self._tensors = TensorPass(settings, self.model)
        self._steps: CertifiedSteps | None = None
        self._held: dict[int, _Held] = {}

    # -- versions -----------------------------------------------------------------------------------------

    @property
    def state(self) -> StageState:
        """Of the present version. Its moments are changed by the next `advance`, its weights never."""
        return self._standing().state

    @property
    def chain(self) -> StageChain:
        return self._standing().chain

    @property
    def version(self) -> Version:
        return self.chain.version

    def begin(self, state: StageState, chain: StageChain) -> None:
        """Stand at a snapshot whose digest is certified, with the chain of its version; its moments are copied.

        Raises RemoteError if they are not of one version, or not of this stage.
        """
        if chain.stage != self.stage or state.layout != self.layout:
            raise RemoteError("state", f"snapshot of another stage or model, chain of stage {chain.stage}")
        if (chain.version, chain.name) != (state.version, state.name):
            raise RemoteError("state", f"state of version {state.version} is not the one named at {chain.version}")
        if not state.moments and self.settings.state_moment_bytes:
            raise RemoteError("state", f"state of version {state.version} has no moments")
        steps = CertifiedSteps(self.settings, state, chain)
        # Where a stage begins (again), all of its peers do, and none of them has the version before.
        known = chain.name == chain.lineage or not extrapolates(self.settings, state.version)
        plain = self.model.weights(state.weights)
        self._held = {state.version: _Held(state.weights, plain, None, known, Carried.of(state))}
        self._steps = steps

    def advance(self, result: Result, bodies: Sequence[Bytes]) -> None:
        """Take the step of a certified result with its parts' bodies (empty for an empty part).

        Raises RemoteError, and stays where it is, unless the result follows and the bodies are those it names.
        """
        steps = self._standing()
        state = steps.state
        steps.advance(result, bodies)
        new = steps.state
        ahead = weights_ahead(self.settings, state, new)
        weights_ahead_of_it = self.model.weights(ahead) if ahead is not None else None
        held = _Held(new.weights, self.model.weights(new.weights), weights_ahead_of_it, True, Carried.of(new))
        self._held = {**self._held, new.version: held}
        for old in sorted(self._held)[:-HELD_VERSIONS]:
            del self._held[old]

    def hold(
        self,
        version: Version,
        plain: Floats,
        ahead: Floats | None,
        *,
        ahead_is_known: bool,
        carried: Carried | None = None,
    ) -> None:
        """Compute on these weights, which do not change, where work says that it was computed on `version`.

        `ahead` is what the step after the version's is computed on, if that is not `plain`; `carried` what windows
        from it begin with.
        """
        weights_ahead = self.model.weights(ahead) if ahead is not None else None
        self._held[version] = _Held(plain, self.model.weights(plain), weights_ahead, ahead_is_known, carried)

    def holds(self, version: Version) -> bool:
        return version in self._held

    def release(self) -> None:
        """Hold no weights."""
        self._held.clear()

    def weights_for(self, step: Step) -> tuple[Version, Weights]:
        """The present version, and what a microbatch of `step` is computed on at it. Raises LocalError as
        `microbatch` does."""
        return self.version, self._weights(self.version, step)

    # -- microbatches -------------------------------------------------------------------------------------

    def microbatch(self, exhibit: Exhibit, step: Step, into: torch.Tensor | None) -> Replayed:
        """Compute what the exhibit's peer must have computed from x and the gradient of y, on the version it signed.

        Parameter gradients are added to `into` (flat fp32 on the replay's device; None: they are not wanted). The
        exhibit has passed `check` with its peer. Raises RemoteError for bytes that an honest peer would have refused,
        and "not-finite" where the honest outcome has no encoding; LocalError if the version is neither the present nor
        the one before, or cannot be known here.
        """
        return self._computed(exhibit, step, into, self._weights(exhibit.version, step))

    def _computed(self, exhibit: Exhibit, step: Step, into: torch.Tensor | None, weights: Weights) -> Replayed:
        """`microbatch`, on these weights."""
        birth = exhibit.papers.birth
        tensors = self._tensors
        if birth.step != step or birth.shape != tensors.shape[:2]:
            raise RemoteError("papers", f"microbatch of step {birth.step} and shape {birth.shape}, not of step {step}")
        x = tensors.x(exhibit.x, exhibit.targets)
        if not self.model.is_last:
            grad_y = tensors.gradient(exhibit.grad_y)
            y, saved = tensors.forward(weights, x, birth.document_bounds)
            sent = self._sent(y, tensors.sent)
            return Replayed(sent, self._sent_gradient(tensors.backward(saved, grad_y, into)), None)
        loss_sum, num_targets, saved_loss = tensors.loss(
            weights, x, tensors.targets(exhibit.targets), birth.document_bounds
        )
        birth.check_num_targets(num_targets)
        return Replayed(None, self._sent_gradient(tensors.loss_backward(saved_loss, into)), loss_sum)

    def hop(self, claim: HopClaim) -> Sent:
        """What an honest peer must have signed in the claim's place.

        The claim has passed `check`; raises as `microbatch`.
        """
        birth, header, tensors = claim.birth, claim.header, self._tensors
        if birth.shape != tensors.shape[:2]:
            raise RemoteError("papers", f"microbatch of shape {birth.shape}, not {tensors.shape[:2]}")
        weights = self._weights(header.version, birth.step)
        x = tensors.x(claim.x, claim.targets)
        if header.direction == "forward":
            y, _ = self.model.forward(weights, x, keep=False, bounds=birth.document_bounds)
            return self._sent(y, tensors.sent)
        if self.model.is_last:
            _, _, saved_loss = tensors.loss(weights, x, tensors.targets(claim.targets), birth.document_bounds)
            grad_x = tensors.loss_backward(saved_loss, None)
        else:
            grad_y = tensors.gradient(claim.grad_y)
            _, saved = tensors.forward(weights, x, birth.document_bounds)
            grad_x = tensors.backward(saved, grad_y, None)
        found = self._sent_gradient(grad_x)
        assert found is not None
        return found

    # -- contributions ------------------------------------------------------------------------------------

    def contribution(self, exhibits: Sequence[Exhibit], step: Step) -> Floats:
        """What the exhibits' peer must have contributed to `step`: its mean gradient, or all that its window says,
        encoded and decoded, flat.

        Raises as `encoded_contribution`.
        """
        return self.decoded_contribution(self.encoded_contribution(exhibits, step))

    def encoded_contribution(
        self, exhibits: Sequence[Exhibit], step: Step, *, keep: Callable[[memoryview], memoryview] | None = None
    ) -> list[memoryview]:
        """The parts of what the exhibits' peer must have contributed to `step`, as they come out here: to the bit the
        peer's own only if it computes as this machine does. Each goes where `keep` puts it; None: it stays in memory.

        `exhibits` are of every entry of the contribution, and have passed `check` and `check_work`. Raises as
        `microbatch`, and LocalError for codecs whose contributions also hold what their maker owed from before.
        """
        if self.settings.leaves_residual:
            name = self.settings.codecs.averaging
            raise LocalError(f"a contribution in {name} cannot be replayed without the residual of its maker")
        makers = sorted({_maker(exhibit) for exhibit in exhibits})
        if len(makers) != 1:
            raise LocalError(f"{len(exhibits)} exhibits of {len(makers)} peers: a contribution is of one")
        gradient = GradientSum(self.layout.num_values, self.model.link)
        window = self._window(exhibits, step, gradient) if self.settings.has_windows else None
        if window is None:
            for exhibit in exhibits:
                self.microbatch(exhibit, step, gradient.flat)
                gradient.add_tokens(exhibit.papers.birth.num_targets)
        run_id = exhibits[0].papers.birth.run_id
        seeds = part_seeds(run_id, self.stage, Version(int(step)), makers[0], num_parts=self.num_parts)
        parts = []
        for part, (where, seed) in enumerate(zip(self.parts, seeds, strict=True)):
            codec = self.parts.contribution_codec(part)
            try:
                if window is not None:
                    made = codec.encode(window.values(where), seed=seed)
                else:
                    made = codec.encode_quotients(*gradient.quotient_of(where), seed=seed)
                parts.append(made if keep is None else keep(made))
            except LocalError as error:
                raise RemoteError("not-finite", f"no honest contribution comes of this: {error}") from error
        return parts

    def _window(self, exhibits: Sequence[Exhibit], step: Step, gradient: GradientSum) -> Window:
        """The window of inner steps that the exhibits' peer must have taken: batches of them in order, each on the
        weights that the one before has left."""
        window, each = window_of(self.settings, self.model), self.settings.microbatches_per_step
        if len(exhibits) % each or len(exhibits) > self.settings.microbatches_of_one:
            raise RemoteError("papers", f"a window of {len(exhibits)} microbatches, {each} an inner step")
        held = self._held_at(Version(int(step)))
        if held.carried is None:
            raise LocalError(f"version {step} is held without the moments that windows begin with")
        window.begin(held.flat, int(step), held.carried)
        for start in range(0, len(exhibits), each):
            weights = self.model.weights(window.weights) if window.steps_taken else held.plain
            for exhibit in exhibits[start : start + each]:
                self._computed(exhibit, step, gradient.flat, weights)
                gradient.add_tokens(exhibit.papers.birth.num_targets)
            gradient.close()
            with suppress(LocalError):  # of what is not finite its maker takes no step either
                window.take(gradient)
            gradient.zero()
        window.end()
        return window

    def untouched_values(self, exhibits: Sequence[Exhibit], contribution: Floats) -> tuple[int, int]:
        """(those that are not zero, all) of a contribution's values that are zero by structure: the embedding's rows of
        tokens that are in none of its maker's microbatches, unless it is the head too. Their gradient is never
        computed, and every codec that leaves no residual writes zero as zero. None in a window, which decays them, and
        none of adapters."""
        model = self.settings.model
        if self.settings.has_windows or not self.model.is_first or model.has_base or is_tied(model, self.stage):
            return 0, 0
        rows_VD = self.layout.views(contribution)[family_of(model.config_json).embedding_name]
        touched_V = np.zeros(len(rows_VD), dtype=np.bool_)
        for exhibit in exhibits:
            touched_V[self._tensors.ids(exhibit.x).numpy()] = True
        untouched = rows_VD[~touched_V]
        return int(np.count_nonzero(untouched)), untouched.size

    @property
    def second_moments(self) -> Floats | None:
        """Of the present version."""
        return second_moments(self.settings.optimizer, self.state.moments)

    def decoded_contribution(self, bodies: Sequence[Bytes]) -> Floats:
        """What a contribution's encoded parts say, flat as `parts` has it. Raises RemoteError("malformed")."""
        if len(bodies) != self.num_parts:
            raise RemoteError("malformed", f"contribution of {len(bodies)} parts, not {self.num_parts}")
        values = np.empty(self.parts[-1].stop, dtype=np.float32)
        for part, (where, body) in enumerate(zip(self.parts, bodies, strict=True)):
            self.parts.contribution_codec(part).decode(body, values[where])
        return values

    # -- within -------------------------------------------------------------------------------------------

    def _standing(self) -> CertifiedSteps:
        if self._steps is None:
            raise LocalError(f"the replay of stage {self.stage} has not begun: give it a snapshot")
        return self._steps

    def _weights(self, version: Version, step: Step) -> Weights:
        held = self._held_at(version)
        if int(step) <= version:
            return held.plain
        if not held.ahead_is_known:
            raise LocalError(f"what step {step} has at version {version} needs the one before: begin at it")
        return held.ahead or held.plain

    def _held_at(self, version: Version) -> _Held:
        held = self._held.get(version)
        if held is None:
            raise LocalError(f"version {version} is not held, {sorted(self._held)} are: begin at an earlier snapshot")
        return held

    def _sent(self, values: torch.Tensor, encode: Callable[[torch.Tensor], memoryview]) -> Sent:
        try:
            return Sent(encode(values), self.model.link.fetch(values.detach()).float().numpy())
        except LocalError as error:
            raise RemoteError("not-finite", f"no honest message comes of this: {error}") from error

    def _sent_gradient(self, grad_x: torch.Tensor | None) -> Sent | None:
        return None if grad_x is None else self._sent(grad_x, self._tensors.answered)


def _maker(exhibit: Exhibit) -> PeerId:
    """Whose exhibit it is: in a run of one stage nobody's but its source's."""
    papers = exhibit.papers
    own = papers.forward_header or papers.gradient_out
    return own.producer if own is not None else papers.birth.source
