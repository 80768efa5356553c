"""Credit in the host's books: certified work counts until it is refuted."""

from typing import Any

import pytest

from bootstrap.program.books import KEPT_CREDIT, Books, Credit
from bootstrap.program.ledger import Event
from swarm.core.ids import PeerId
from verification.audit.standing import FAULT

BROKEN, HONEST = PeerId("broken"), PeerId("honest")


def books(*events: tuple[str, Any]) -> Books:
    made = Books()
    made.versions[1] = (0, b"")
    for number, (kind, facts) in enumerate(events, start=1):
        made.apply(Event(number, 0.0, kind, facts))
    return made


def result(step: int) -> tuple[str, Any]:
    return "result", {"stage": 1, "step": step, "name": bytes(32), "credit": [[BROKEN, 2, 64], [HONEST, 3, 96]]}


def verdict(kind: str, why: str, version: int) -> tuple[str, Any]:
    return kind, {"value": {"peer_id": BROKEN, "stage": 1, "version": version, "kind": why}}


def test_a_fault_takes_back_what_its_step_brought_and_no_more() -> None:
    made = books(result(5), result(6), result(7), verdict("quarantine", FAULT, 6), verdict("quarantine", FAULT, 6))
    assert made.credit == {BROKEN: Credit(128, 4, 2), HONEST: Credit(288, 9, 3)}


@pytest.mark.parametrize("why", ["replay_mismatch", "withholding"])
def test_what_the_host_has_not_judged_refutes_nothing(why: str) -> None:
    assert books(result(5), verdict("quarantine", why, 5)).credit[BROKEN] == Credit(64, 2, 1)


def test_nothing_of_a_banned_peer_counts() -> None:
    made = books(result(5), result(6), verdict("ban", "replay_mismatch", 6))
    assert made.credit == {HONEST: Credit(192, 6, 2)}


def test_what_is_kept_of_single_steps_is_bounded() -> None:
    made = books(*(result(step) for step in range(100)))
    assert len(made.recent_credit) == KEPT_CREDIT
    assert made == books(*(result(step) for step in range(100)))
