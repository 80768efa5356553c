"""Charges that a liar brings before the host, put together at random from what it has seen and signed."""

import contextlib
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.red_team.mutant import Mutation
from benchmarks.red_team.virtual_swarm import VirtualPeer, VirtualSwarm
from peer.audit.accuser import Accuser, Case
from peer.state.provable_past import provable_past
from swarm.core.errors import LocalError, RemoteError, TransientError
from swarm.core.ids import PeerId
from swarm.network.service import decode_meta
from swarm.network.transport import Message
from verification.kinds.data_fraud import DataFraud
from verification.kinds.equivocation import Equivocation
from verification.kinds.hop_mismatch import HopMismatch
from verification.pipeline.headers import BirthRecord, HopHeader
from verification.pipeline.hop_claim import NO_SIGNATURE, HopClaim

KEPT_CALLS = 12
MOST_CHARGES = 8


@dataclass(frozen=True)
class Call:
    """A microbatch that went from one peer to another and came back."""

    caller: PeerId
    callee: PeerId
    birth: BirthRecord
    forward: HopHeader
    gradient: HopHeader
    activation: bytes
    targets: bytes
    answer: bytes

    @classmethod
    def of(cls, caller: PeerId, callee: PeerId, request: Message, answer: tuple[bytes, memoryview]) -> "Call | None":
        """None if it was not answered, or is not well formed."""
        body = b"".join(bytes(piece) for piece in (request.body, *request.more))
        try:
            said = decode_meta(answer[0])
            birth = BirthRecord.from_value(request.meta["birth"])
            num_bytes = 4 * birth.shape[0] * birth.shape[1]
            return cls(
                caller,
                callee,
                birth,
                HopHeader.from_value(request.meta["header"]),
                HopHeader.from_value(said["header"]),
                body[:-num_bytes],
                body[-num_bytes:],
                bytes(answer[1]),
            )
        except (RemoteError, KeyError, TypeError):
            return None


class Charging:
    """What the liars of a run charge others with."""

    def __init__(self, mutation: Mutation) -> None:
        self._mutation = mutation
        self._calls: deque[Call] = deque(maxlen=KEPT_CALLS)
        self._odd: deque[Call] = deque(maxlen=KEPT_CALLS)
        """Those whose headers name a sibling of what they are made from."""
        self._brought = 0

    def overheard(
        self,
        caller: PeerId,
        callee: PeerId,
        request: Message,
        answer: tuple[bytes, memoryview],
        liars: Sequence[PeerId],
    ) -> None:
        if caller in liars or callee in liars:
            call = Call.of(caller, callee, request, answer)
            if call is not None:
                self._mutation.keep_body(call.activation)
                self._mutation.keep_body(call.targets)
                self._mutation.keep_body(call.answer)
                named = {one.digest() for one in self._mutation.siblings}
                (self._odd if named & set(call.forward.parents) else self._calls).append(call)

    @property
    def has_odd(self) -> bool:
        """Whether somebody answered what names two records about one thing: worth a charge in each step."""
        return bool(self._odd)

    async def bring(self, swarm: VirtualSwarm, liar: VirtualPeer, rng: random.Random) -> bool:
        """One charge, if there is anything to make it of; whether there was."""
        if self._brought >= MOST_CHARGES or liar.daemon.at is None:
            return False
        case = await self._case(swarm, rng)
        if case is None:
            return False
        self._brought += 1
        accuser = Accuser(liar.daemon.transport, swarm.host_id, swarm.run.signed)
        with contextlib.suppress(TransientError, RemoteError, LocalError):
            await accuser.accuse(case)
        return True

    async def _case(self, swarm: VirtualSwarm, rng: random.Random) -> Case | None:
        if self._odd and rng.random() < 0.7:
            return await self._hop(swarm, rng, rng.choice(list(self._odd)))
        kind = rng.choice(("hop", "hop", "equivocation", "data"))
        calls = [*self._odd, *self._calls]
        if kind == "hop" and calls:
            return await self._hop(swarm, rng, rng.choice(calls))
        if kind == "equivocation" and len(calls) > 1:
            one, other = rng.sample(calls, 2)
            headers = rng.choice(((one.gradient, other.gradient), (one.forward, other.forward)))
            bodies = (one.answer, other.answer) if headers[0] is one.gradient else (one.activation, other.activation)
            return Equivocation(one=headers[0], other=headers[1], bodies=bodies)
        births = [call.birth for call in calls]
        return DataFraud(birth=rng.choice(births)) if births else None

    async def _hop(self, swarm: VirtualSwarm, rng: random.Random, call: Call) -> Case | None:
        """Against whoever answered, beside one of the birth records that the question names, or any other."""
        bodies = self._mutation.bodies
        births: list[Any] = [one for one in self._mutation.siblings if isinstance(one, BirthRecord)]
        named = [one for one in births if one.digest() in call.forward.parents]
        birth = rng.choice(named or [call.birth, *births])
        targets = bodies.get(birth.targets_digest, call.targets)
        claim = HopClaim(
            birth=birth,
            header=call.gradient,
            x_header=replace(call.forward, signature=NO_SIGNATURE),
            grad_header=None,
            claimed=call.answer,
            x=call.activation,
            targets=targets,
            grad_y=b"",
        )
        stage, version = int(call.gradient.stage), int(call.gradient.version)
        witness = next((peer for peer in swarm.of_stage(stage) if peer.daemon.at is not None), None)
        if witness is None or witness.daemon.at is None:
            return None
        try:  # anybody of the stage can be asked for what the run key has signed, and for what followed
            held = await provable_past(witness.daemon.at.steps, swarm.host_id, oldest=version, version=version)
        except (LocalError, TransientError, RemoteError):
            return None
        return HopMismatch(claim=claim, past=held.past, state_chunks=tuple(held.snapshot.chunks()), bodies=held.bodies)
