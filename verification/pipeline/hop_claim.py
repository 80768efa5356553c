"""A peer's word on one tensor, laid beside what it was made from, whoever shows it.

A hop header names by digest what its tensor was made from, and a header names its bytes. So the neighbours of a peer,
who hold both sides, can show that its word is untrue without it, and whatever its contribution lists or leaves out. An
honest peer signs for nothing that it did not compute: a microbatch that came late, was dropped or sent twice, or died
with its peer, leaves headers that are true.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from swarm.bulk_digest import bulk_digest
from swarm.core.canonical import Value
from swarm.core.errors import RemoteError
from swarm.core.fields import Fields, value_or_none
from swarm.core.ids import PeerId, StageIndex
from swarm.core.settings import RunSettings
from verification.pipeline.exchanges import Exchange
from verification.pipeline.headers import (
    BirthRecord,
    HopHeader,
    check_birth,
    forward_parents,
    gradient_parents,
    is_made_from,
)
from verification.round.papers import Bytes

NO_SIGNATURE = bytes(64)
"""Of what a claim names as its parents: one claim has one form."""


@dataclass(frozen=True, kw_only=True)
class HopClaim:
    """A header of one peer, its bytes, and what it says they were made from."""

    birth: BirthRecord
    header: HopHeader
    """Of the peer the claim is made by: an activation, or the gradient of what came in."""
    x_header: HopHeader | None
    """Of what came in; None at stage 0. Nobody's signature on it is asked for: the claim's own header names it."""
    grad_header: HopHeader | None
    """Of the gradient that came in; None for an activation, and at the last stage."""
    claimed: Bytes
    x: Bytes
    """At stage 0 the input ids as little-endian int32."""
    targets: Bytes
    """For a gradient of the last stage, and wherever x means nothing without the input ids, which then come after the
    targets; else empty."""
    grad_y: Bytes
    """Empty where there is no `grad_header`."""

    @property
    def peer_id(self) -> PeerId:
        return self.header.producer

    @property
    def kind(self) -> Literal["activation", "gradient"]:
        """Of its tensor."""
        return "activation" if self.header.direction == "forward" else "gradient"

    @property
    def bodies(self) -> tuple[Bytes, ...]:
        return (self.claimed, self.x, self.targets, self.grad_y)

    def to_value(self) -> Value:
        """Without the bodies."""
        return {
            "birth": self.birth.to_value(),
            "header": self.header.to_value(),
            "x_header": value_or_none(self.x_header),
            "grad_header": value_or_none(self.grad_header),
        }

    @classmethod
    def of_value(cls, value: Value, bodies: Sequence[Bytes]) -> "HopClaim":
        """Raises RemoteError("malformed")."""
        fields = Fields("hop claim", value)
        if len(bodies) != 4:
            raise RemoteError("malformed", f"a hop claim has four bodies, not {len(bodies)}")
        claimed, x, targets, grad_y = bodies
        made = cls(
            birth=BirthRecord.from_value(fields.message("birth")),
            header=HopHeader.from_value(fields.message("header")),
            x_header=fields.maybe("x_header", HopHeader.from_value),
            grad_header=fields.maybe("grad_header", HopHeader.from_value),
            claimed=claimed,
            x=x,
            targets=targets,
            grad_y=grad_y,
        )
        fields.done()
        return made

    def check(self, settings: RunSettings, *, run_id: str) -> None:
        """Raises RemoteError unless its maker signed it and all that it names is here."""
        birth, header, stage = self.birth, self.header, self.header.stage
        peer, last = header.producer, settings.model.num_stages - 1
        check_birth(birth, run_id=run_id)
        is_forward = header.direction == "forward"
        if birth.kind != "train" or not (0 <= stage < last if is_forward else 0 < stage <= last):
            raise RemoteError("papers", f"no {header.direction} of kind {birth.kind} is of stage {stage}", peer)
        if not birth.step - settings.delay_at(birth.step) <= header.version <= birth.step:
            raise RemoteError("papers", f"computed on version {header.version} for step {birth.step}", peer)
        codecs = settings.codecs
        if header.codec != (codecs.activations if is_forward else codecs.activation_gradients):
            raise RemoteError("papers", f"a hop in {header.codec}", peer)
        _check_one(header, birth, self.claimed, stage=stage, direction=header.direction)
        if not header.is_signed_by(peer):
            raise RemoteError("papers", f"header is not signed by {peer}", peer)
        if stage == 0:
            if self.x_header is not None or birth.source != peer:
                raise RemoteError("papers", f"stage 0 takes nothing in, and nothing of {birth.source}", peer)
            if hashlib.sha256(self.x).digest() != birth.tokens_digest:
                raise RemoteError("papers", "input ids differ from their digest")
        elif self.x_header is None:
            raise RemoteError("papers", "what came in is missing", peer)
        else:
            _check_one(self.x_header, birth, self.x, stage=stage - 1, direction="forward", consumer=peer)
            if not is_made_from(self.x_header, forward_parents(birth.digest(), stage - 1)):
                raise RemoteError("papers", "what came in is of another birth record, or of more than one", peer)
        if (self.grad_header is not None) != (not is_forward and stage < last):
            raise RemoteError("papers", "the gradient that came in is missing, or none came in", peer)
        if self.grad_header is not None:
            _check_one(self.grad_header, birth, self.grad_y, stage=stage + 1, direction="gradient", consumer=peer)
        if any(one is not None and one.signature != NO_SIGNATURE for one in (self.x_header, self.grad_header)):
            raise RemoteError("papers", "a signature that nobody asks for", peer)
        came, answer = (one.digest() if one is not None else None for one in (self.x_header, self.grad_header))
        wanted = forward_parents(birth.digest(), stage, came)
        if not is_forward:
            assert came is not None, "stage 0 has no gradient to send back"
            wanted = gradient_parents(came, stage, last + 1, answer)
        if not is_made_from(header, wanted):
            raise RemoteError("papers", "header does not name what it is shown to be made from", peer)
        if (not is_forward and stage == last) or (settings.model.sends_ids and stage > 0):
            unlike = birth.unlike(self.targets)
            if unlike is not None:
                raise RemoteError("papers", unlike, peer)


def claims_of(
    peer: PeerId, before: Iterable[Exchange], after: Iterable[Exchange], *, ids: Bytes | None = None
) -> list[HopClaim]:
    """What a peer's neighbours can lay on the table of one microbatch: their exchanges with it, of the stage before and
    of the stage after. `ids` are the input ids, at stage 0, where nobody is before.

    What does not fit together is left out; what is returned has still to be checked.
    """
    arrived = [one for one in before if one.forward.consumer == peer]  # one header perhaps twice, with two answers
    came = {one.forward.digest(): one for one in arrived}
    went = [one for one in after if one.forward.producer == peer]
    answers = {one.gradient.digest(): one for one in went if one.gradient is not None}
    claims = []
    for one in went:
        made_from = next((came[parent] for parent in one.forward.parents[1:] if parent in came), None)
        if made_from is None and ids is None:
            continue
        claims.append(
            HopClaim(
                birth=one.birth,
                header=one.forward,
                x_header=_unsigned(made_from.forward) if made_from is not None else None,
                grad_header=None,
                claimed=one.activation,
                x=made_from.activation if made_from is not None else ids or b"",
                targets=one.targets if made_from is not None and _has_ids(one) else b"",
                grad_y=b"",
            )
        )
    for one in arrived:
        if one.gradient is None or one.gradient.producer != peer:
            continue
        is_last = len(one.gradient.parents) == 1
        answer = next((answers[parent] for parent in one.gradient.parents[1:] if parent in answers), None)
        if answer is None and not is_last:
            continue
        claims.append(
            HopClaim(
                birth=one.birth,
                header=one.gradient,
                x_header=_unsigned(one.forward),
                grad_header=_unsigned(answer.gradient) if answer is not None and answer.gradient is not None else None,
                claimed=one.answer,
                x=one.activation,
                targets=one.targets if is_last or _has_ids(one) else b"",
                grad_y=answer.answer if answer is not None else b"",
            )
        )
    return claims


def _has_ids(one: Exchange) -> bool:
    return len(one.targets) > one.birth.targets_bytes


def _unsigned(header: HopHeader) -> HopHeader:
    return replace(header, signature=NO_SIGNATURE)


def _check_one(
    header: HopHeader, birth: BirthRecord, body: Bytes, *, stage: int, direction: str, consumer: PeerId | None = None
) -> None:
    for name, found, wanted in (
        ("run_id", header.run_id, birth.run_id),
        ("stage", header.stage, StageIndex(stage)),
        ("direction", header.direction, direction),
        ("microbatch_id", header.microbatch_id, birth.microbatch_id),
        ("attempt", header.attempt, birth.attempt),
        ("consumer", header.consumer, consumer or header.consumer),
    ):
        if found != wanted:
            raise RemoteError("papers", f"header's {name} is {found}, not {wanted}", header.producer)
    if bulk_digest(body) != header.body_digest:
        raise RemoteError("papers", f"bytes of a {direction} differ from their digest", header.producer)
