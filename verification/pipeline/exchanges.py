"""One call between two stages, kept: the activation that went, and the gradient that came back.

Either end holds the same, signed by both. So what a peer sent on is with the stage after it, what it answered with the
stage before, and an audit of it needs nothing that the peer could hide.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swarm.core.canonical import Value
from swarm.core.errors import RemoteError
from swarm.core.fields import Fields, integer_item, value_or_none
from swarm.core.round.contribution import Work
from verification.pipeline.headers import BirthRecord, HopHeader
from verification.round.papers import NO_HEADER, Bytes, Exhibit, Papers

MAX_EXCHANGES = 16
"""Of one microbatch with one peer: each attempt makes one."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A forward call and what came of it."""

    birth: BirthRecord
    forward: HopHeader
    gradient: HopHeader | None
    """Of the answer; None while there is none."""
    activation: Bytes
    targets: Bytes
    """Little-endian int32; then the input ids, where activations need them."""
    answer: Bytes
    """The encoded gradient; empty while there is none."""

    @property
    def bodies(self) -> tuple[Bytes, ...]:
        return (self.activation, self.targets, self.answer)

    def to_value(self) -> Value:
        """Without the bodies."""
        return {
            "birth": self.birth.to_value(),
            "forward": self.forward.to_value(),
            "gradient": value_or_none(self.gradient),
            "sizes": [len(body) for body in self.bodies],
        }


def exhibit_of(
    work: Work, before: Iterable[Exchange], after: Iterable[Exchange], *, ids: Bytes = b""
) -> Exhibit | None:
    """What the maker of a contribution shows of one entry, put together from its exchanges with its neighbours: both
    hold the same.

    `ids` are the input ids, at stage 0, where nobody is before. None if they do not hold all of it, as where there is
    no neighbour; nothing is checked.
    """
    came = next((one for one in before if one.forward.digest() == work.input_header and _is_answered(one, work)), None)
    went = next(
        (one for one in after if one.gradient is not None and one.gradient.digest() == work.output_header), None
    )
    is_first, is_last = bool(ids), work.output_header == NO_HEADER
    if (came is None) != is_first or (went is None) != is_last:
        return None
    one = came or went
    if one is None:
        return None
    papers = Papers(
        birth=one.birth,
        input_header=came.forward if came is not None else None,
        forward_header=went.forward if went is not None else None,
        gradient_in=went.gradient if went is not None else None,
        gradient_out=came.gradient if came is not None else None,
    )
    return Exhibit(
        papers=papers,
        version=work.version,
        x=came.activation if came is not None else ids,
        targets=one.targets,
        y=went.activation if went is not None else b"",
        grad_y=went.answer if went is not None else b"",
        grad_x=came.answer if came is not None else b"",
    )


def _is_answered(came: Exchange, work: Work) -> bool:
    """With the entry's own gradient: a microbatch that comes again may be done again, on another version or with
    another's gradient."""
    gradient = came.gradient
    if gradient is None or gradient.version != work.version:
        return False
    return work.output_header in (NO_HEADER, *gradient.parents)


def read_exchanges(value: Value, body: Bytes) -> tuple[Exchange, ...]:
    """Those in an answer, whose bodies lie end to end. Nothing is checked but their form: RemoteError("malformed")."""
    fields = Fields("exchanges", value)
    listed = fields.items("exchanges", lambda one: Fields("exchange", one), max_items=MAX_EXCHANGES)
    fields.done()
    left, made = memoryview(body), []
    for one in listed:
        sizes = one.items("sizes", integer_item, max_items=3)
        if len(sizes) != 3 or sum(sizes) > len(left):
            raise RemoteError("malformed", f"an exchange with bodies of {list(sizes)} bytes, {len(left)} left")
        bodies, left = _cut(left, sizes)
        made.append(
            Exchange(
                birth=BirthRecord.from_value(one.message("birth")),
                forward=HopHeader.from_value(one.message("forward")),
                gradient=one.maybe("gradient", HopHeader.from_value),
                activation=bodies[0],
                targets=bodies[1],
                answer=bodies[2],
            )
        )
        one.done()
    if len(left):
        raise RemoteError("malformed", f"{len(left)} bytes after the last exchange")
    return tuple(made)


def _cut(view: memoryview, sizes: Sequence[int]) -> tuple[list[memoryview], memoryview]:
    found = []
    for size in sizes:
        found.append(view[:size])
        view = view[size:]
    return found, view
