"""Fixes taken out again: the rules as they were when an attacker got through.

Each is a context manager under which every peer and the host keep to the old rule.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from unittest import mock

from peer.round.part_exchange import PartExchange
from swarm.core.round.ballots import Proposal
from swarm.core.round.contribution import MAX_WORK
from swarm.core.round.parts import RoundParts
from swarm.core.state import stage_chain
from swarm.drawn_papers import DrawnPapers
from verification.pipeline import headers, hop_claim
from verification.pipeline.headers import HopHeader, Parents
from verification.round import papers, receipts


async def _finds_nothing(*_: object, **__: object) -> None:
    """Not a mock, which keeps all that it is called with: open files of run after run."""


CHECK_PARENTS: tuple[ModuleType, ...] = (headers, hop_claim, papers, receipts)


def _names(header: HopHeader, parents: Parents) -> bool:
    """Membership, where it must be equality."""
    return {wanted for wanted in parents if wanted is not None} <= set(header.parents)


@contextlib.contextmanager
def framing() -> Iterator[None]:
    """A header may name two birth records."""
    with contextlib.ExitStack() as stack:
        for module in CHECK_PARENTS:
            stack.enter_context(mock.patch.object(module, "is_made_from", _names))
        yield


@contextlib.contextmanager
def written_result() -> Iterator[None]:
    """A member looks at (part, digest) alone, and at no reducer's word."""
    with (
        mock.patch.object(RoundParts, "unproved", RoundParts.lacking),
        mock.patch.object(PartExchange, "compare", _finds_nothing),
    ):
        yield


@contextlib.contextmanager
def unsworn_result() -> Iterator[None]:
    """Voters who get no parts vote for a result whatever is said of them."""
    with mock.patch.object(Proposal, "is_new_result", False):
        yield


@contextlib.contextmanager
def claimed_ids() -> Iterator[None]:
    """Nobody looks at the papers of what a contribution lists."""
    with (
        mock.patch.object(DrawnPapers, "check", _finds_nothing),
        mock.patch.object(DrawnPapers, "lack", _finds_nothing),
    ):
        yield


@contextlib.contextmanager
def long_contributions() -> Iterator[None]:
    """Each contribution may be as long as its form allows; nobody adds them up. Nor does anybody look at papers: where
    somebody does, no such contribution is in a roster."""
    with claimed_ids(), mock.patch.object(stage_chain, "most_work", return_value=MAX_WORK):
        yield


REVERSALS: Mapping[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "framing": framing,
    "claimed_ids": claimed_ids,
    "written_result": written_result,
    "long_contributions": long_contributions,
}
