"""What goes to one peer in one step's round, whole or in fragments."""

from dataclasses import dataclass, replace

from peer.round.mail.fragments import MOST_FRAGMENTS, Fragment
from peer.round.step_state import StepState
from swarm.core.canonical import Value
from swarm.core.round.contribution import ReducedPart
from verification.round.papers import Bytes


@dataclass(frozen=True)
class Parcel:
    """Something for one peer, in one step's round."""

    state: StepState
    kind: str
    head: dict[str, Value]
    body: Bytes
    part: int = 0
    """The part's number."""
    reduced: ReducedPart | None = None
    """Which part it is, if it is none of a contribution."""
    fragment: Fragment | None = None
    """Which fragment of it the body is; None: it is whole."""
    may_be_there: bool = False
    """It was sent, or could not be for long: its peer is asked whether it has it."""

    def goes_with(self, other: "Parcel") -> bool:
        is_whole = self.fragment is None and other.fragment is None
        return is_whole and self.state is other.state and self.kind == other.kind

    def cut(self, at_most_bytes: int) -> list["Parcel"]:
        """Fragments of equal length. Those of a very long body may be longer."""
        body = memoryview(self.body)
        size = -(-len(body) // min(MOST_FRAGMENTS, -(-len(body) // at_most_bytes)))
        bodies = [body[start : start + size] for start in range(0, len(body), size)]
        return [replace(self, body=one, fragment=Fragment(at, len(bodies))) for at, one in enumerate(bodies)]
