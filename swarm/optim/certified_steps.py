"""Versions of a stage made again from a state and the certified results that follow it."""

from collections.abc import Sequence

from kernels.threads import ONE_THREAD, Threads
from swarm.averaging.certified_gradient import CertifiedGradient
from swarm.averaging.parts import Parts
from swarm.bulk_digest import bulk_digest
from swarm.checkpoint.state import Bytes, StageState
from swarm.core.errors import LocalError, RemoteError
from swarm.core.round.contribution import ReducedPart, Result
from swarm.core.settings import RunSettings
from swarm.core.state.stage_chain import StageChain
from swarm.identity.key import verify
from swarm.optim.stage_step import StageStep, stage_clip_norm


class CertifiedSteps:
    """A stage at one version after another: `state` and `chain` are where it stands."""

    def __init__(
        self, settings: RunSettings, state: StageState, chain: StageChain, *, threads: Threads = ONE_THREAD
    ) -> None:
        """Stand at a state, whose moments are copied. Raises RemoteError if they are of another kind."""
        self._threads = threads
        self.chain = chain
        self._settings = settings
        self._parts = Parts.of(settings, state.layout)
        clip_norm = stage_clip_norm(settings, chain.stage)
        self._step = StageStep.of_run(settings, state.layout, clip_norm=clip_norm, threads=threads)
        try:
            self.state = self._step.restore(state)
            """Its moments are changed by the next `advance`, its weights never."""
        except LocalError as error:
            raise RemoteError("state", str(error)) from error

    def advance(self, result: Result, bodies: Sequence[Bytes]) -> None:
        """Take the step of a certified result with its parts' bodies (empty for an empty part).

        Raises RemoteError, and stays where it is, unless the result follows and the bodies are those it names.
        """
        facts = self.chain.facts(
            self._settings,
            num_parts=len(self._parts),
            phase_s=self._settings.deadlines.call_s,
        )
        facts.check_result(result, verify, certified=True)
        check_bodies(result, bodies, threads=self._threads)
        chain = self.chain.advance(result, self._settings)
        gradient = CertifiedGradient.of(self._parts, result.parts, bodies)
        self.state = self._step.next(self.state, gradient, chain.name).state
        self.chain = chain


def check_bodies(result: Result, bodies: Sequence[Bytes], *, threads: Threads = ONE_THREAD) -> None:
    """Raises RemoteError unless these are the bytes of the result's parts, none for an empty one."""
    if len(bodies) != len(result.parts):
        raise RemoteError("malformed", f"{len(bodies)} bodies for a result of {len(result.parts)} parts")

    def check(one: tuple[ReducedPart, Bytes]) -> None:
        reduced, body = one
        if reduced.is_empty and len(body):
            raise RemoteError("malformed", f"part {reduced.part} is empty, but comes with {len(body)} bytes")
        if not reduced.is_empty and bulk_digest(body) != reduced.digest:
            raise RemoteError("digest", f"part {reduced.part} of step {result.roster.step} differs from its digest")

    threads.map(check, list(zip(result.parts, bodies, strict=True)))
