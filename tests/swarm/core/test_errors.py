"""The kinds of remote errors are those that the code raises, and no peer's words."""

import re

from swarm.core.errors import KINDS
from swarm.network.service import decode_error
from tests import ROOT

RAISED = re.compile(r'\bRemoteError\(\s*"([^"]*)"')


def test_each_kind_that_is_raised_is_known() -> None:
    rooms = ("swarm", "peer", "bootstrap", "verification")
    sources = [path.read_text() for room in rooms for path in (ROOT / room).rglob("*.py")]
    assert {kind for source in sources for kind in RAISED.findall(source)} <= KINDS


def test_a_kind_of_a_peers_own_is_none() -> None:
    """Else each of its answers would add one to what is counted, and to what is reported."""
    assert decode_error({"kind": "of_its_own", "message": "no"}) == ("malformed", "no")
    assert decode_error({"kind": "banned", "message": "no"}) == ("banned", "no")
