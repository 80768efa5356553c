"""What a command line becomes before a daemon runs."""

import pytest

from peer.program.command import places


@pytest.mark.parametrize(
    ("listen", "num_peers", "expected"),
    [
        (":4001", 1, [":4001"]),
        (":4001", 3, [":4001", ":4003", ":4004"]),
        ("[::]:0", 2, ["[::]:0", "[::]:0"]),
    ],
)
def test_each_peer_listens_at_a_port_of_its_own_beside_the_relays(
    listen: str, num_peers: int, expected: list[str]
) -> None:
    assert places(listen, num_peers) == expected
