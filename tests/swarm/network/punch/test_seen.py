"""On whose word a peer dials."""

from dataclasses import replace

import pytest

from swarm.core.errors import RemoteError
from swarm.identity.key import Identity
from swarm.network.punch.seen import FRESH_S, Endpoint, Judge, Seen

HOST, MEMBER, OTHER, STRANGER, OWNER = (Identity.from_seed(bytes([number]) * 32) for number in range(1, 6))
NOW = 1_700_000_000.0
JUDGE = Judge(HOST.peer_id, {MEMBER.peer_id, OTHER.peer_id, OWNER.peer_id}.__contains__)


def word(onlooker: Identity, host: str = "203.0.114.5", *, port: int = 4000, ago_s: float = 1.0) -> Seen:
    at_ms = round((NOW - ago_s) * 1000)
    return Seen(onlooker.peer_id, OWNER.peer_id, host, port, at_ms).signed_by(onlooker)


def test_the_host_is_believed_alone_and_members_by_twos() -> None:
    for words in ([word(HOST)], [word(MEMBER), word(OTHER)], [word(MEMBER), word(HOST, port=4001)]):
        assert JUDGE.endpoint(words, OWNER.peer_id, now=NOW) == Endpoint("203.0.114.5", 4000)


@pytest.mark.parametrize("trusted", [[HOST], [MEMBER, OTHER]])
def test_whose_word_does_not_count_names_no_port(trusted: list[Identity]) -> None:
    """Else a key of the owner's own has others dial any port at the address that it has, a carrier's for example."""
    words = [word(STRANGER, port=22), *(word(one) for one in trusted)]
    assert JUDGE.endpoint(words, OWNER.peer_id, now=NOW) == Endpoint("203.0.114.5", 4000)


@pytest.mark.parametrize(
    "words",
    [
        [],
        [word(MEMBER)],
        [word(MEMBER), word(MEMBER)],
        [word(MEMBER), word(STRANGER)],
        [word(OWNER), word(HOST)],
        [word(HOST, ago_s=FRESH_S + 1)],
        [word(HOST, ago_s=-FRESH_S - 1)],
        [replace(word(HOST), port=4001)],
        [replace(word(STRANGER), onlooker=HOST.peer_id)],
        [word(HOST), word(MEMBER, "203.0.114.6")],
        [word(HOST, "192.168.1.1")],
        [word(HOST, "127.0.0.1")],
        [word(HOST, "100.64.0.1")],
        [word(HOST, "169.254.169.254")],
        [word(HOST, "224.0.0.1")],
        [word(HOST, "example.org")],
        [word(HOST, "fe80::1")],
        [word(HOST, "fec0::1")],
        [word(HOST, "::192.168.1.1")],
        [word(HOST, "::ffff:192.168.1.1")],
        [word(HOST, "64:ff9b::c0a8:101")],
        [word(HOST, "2002:c0a8:101::1")],
    ],
)
def test_nobody_is_dialled_on_too_little_or_on_another_word(words: list[Seen]) -> None:
    with pytest.raises(RemoteError):
        JUDGE.endpoint(words, OWNER.peer_id, now=NOW)


def test_a_word_on_one_peer_is_no_word_on_another() -> None:
    with pytest.raises(RemoteError, match="not by another on"):
        JUDGE.endpoint([word(HOST)], STRANGER.peer_id, now=NOW)
