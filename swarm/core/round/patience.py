"""How long a member of a round waits: for votes if it leads, else for its leader.

Deadlines are multiples of `phase_s`: a reducer waits 1 for parts; a leader 2 before it asks once more, 3 before it
goes on without a member, 2 before it relieves a reducer; others wait 4 before they turn to the next leader, and longer
each time, so that views do not run away from a stage that is cut in two.
"""

from dataclasses import dataclass

LONGEST_PATIENCE = 8
"""A leader that follows so many that were given up is waited for so many times as long as the first."""


@dataclass
class Patience:
    phase_s: float
    due: float | None = None
    """When this peer acts as leader, or gives up on its leader; None while nothing is waited for."""
    num_turns: int = 0
    """Leaders given up since anything was heard."""

    def heard(self) -> None:
        """Of a leader that does its work."""
        self.num_turns = 0

    def given_up(self) -> None:
        self.num_turns += 1

    def wait(self, phases: float, *, now: float) -> None:
        self.due = now + phases * self.phase_s

    def wait_for_leader(self, *, leads: bool, calm: int, now: float) -> None:
        """`leads`: this peer is the leader, and waits for the others; else it waits `calm` times as long as a voter."""
        patience = min(1 + self.num_turns // 2, LONGEST_PATIENCE)
        self.wait(2 if leads else 4 * calm * patience, now=now)
