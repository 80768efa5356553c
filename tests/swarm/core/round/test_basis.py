"""What a round starts from, as strangers show it to voters and to the host."""

from dataclasses import replace

import pytest

from swarm.core.errors import RemoteError
from swarm.core.ids import PeerId
from swarm.core.round.basis import RoundBasis
from tests.swarm.core.audit.chances import UNSAID

MEMBERS = (PeerId("a"), PeerId("b"))
BASIS = RoundBasis(bytes(32), bytes(32), MEMBERS, (1, 2), MEMBERS, (1, 2), (), (None, None), UNSAID)
NOBODY = replace(BASIS, members=(), work=(), links=())


@pytest.mark.parametrize(
    "wrong",
    [
        NOBODY,
        replace(BASIS, previous_members=(), previous_work=()),
        replace(BASIS, members=MEMBERS[::-1]),
        replace(BASIS, previous_members=MEMBERS[:1] * 2),
        replace(BASIS, links=(None,)),
        replace(BASIS, work=(1,)),
    ],
)
def test_a_basis_of_nobody_or_out_of_order_is_refused(wrong: RoundBasis) -> None:
    """A member of two could show one to the host, which asks where its stage stands, and have it end."""
    assert RoundBasis.from_value(BASIS.to_value()) == BASIS
    with pytest.raises(RemoteError, match="basis"):
        RoundBasis.from_value(wrong.to_value())
