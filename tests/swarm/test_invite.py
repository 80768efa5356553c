"""The invite: one run, one line; a line that was damaged, or is of something else, is refused by the field's name."""

import base64
import hashlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.cli import ExitCode, run
from swarm.core.canonical import Value, pack
from swarm.core.errors import SettingsError
from swarm.core.ids import RunId
from swarm.identity.key import Identity
from swarm.invite import MAX_LINE, Invite, is_invite, parse_invite

RUN_KEY, HOST_KEY = (Identity.from_seed(bytes([number]) * 32) for number in (1, 2))
SEED = f"/p2p/{HOST_KEY.peer_id}"
INVITE = Invite(
    host="203.0.113.7",
    port=4002,
    name="my-run",
    protocol=1,
    run_id=RunId("ab" * 32),
    run_key=RUN_KEY.peer_id,
    certificate=bytes(range(32)),
    host_key=HOST_KEY.peer_id,
    addresses=(f"/ip4/203.0.113.7/tcp/4001{SEED}", f"/ip6/2001:db8::7/tcp/4001{SEED}"),
)
LINE = (
    "swarm://203.0.113.7:4002/my-run#mAEBxCCrq6urq6urq6urq6urq6urq6urq6urq6urq6urq6urq8Qgiojj3XQJ8ZX9Utst"
    "PLpdcspnCb8dlBIb83SIAbQPb1zEIIE5dw6ofRdfVqNUZsNMfszLjYqRtO43ol32D1uPybOUxCAAAQIDBAUGBwgJCgsMDQ4PEBES"
    "ExQVFhcYGRobHB0eH5K5L2lwNC8yMDMuMC4xMTMuNy90Y3AvNDAwMbkvaXA2LzIwMDE6ZGI4Ojo3L3RjcC80MDAxoEvP3fc"
)
WITH_VOUCHER = (
    "swarm://203.0.113.7:4002/my-run#mAEBxCCrq6urq6urq6urq6urq6urq6urq6urq6urq6urq6urq8Qgiojj3XQJ8ZX9Utst"
    "PLpdcspnCb8dlBIb83SIAbQPb1zEIIE5dw6ofRdfVqNUZsNMfszLjYqRtO43ol32D1uPybOUxCAAAQIDBAUGBwgJCgsMDQ4PEBES"
    "ExQVFhcYGRobHB0eH5K5L2lwNC8yMDMuMC4xMTMuNy90Y3AvNDAwMbkvaXA2LzIwMDE6ZGI4Ojo3L3RjcC80MDAxsDAxMjM0NTY3"
    "ODlhYmNkZWZQZR3K"
)


def line_of(payload: Value, head: str = "swarm://203.0.113.7:4002/my-run") -> str:
    """A line with a right checksum over whatever it says."""
    data = pack(payload)
    check = hashlib.sha256(b"homeswarm/invite\0" + head.encode() + b"\0" + data).digest()[:4]
    return f"{head}#{base64.urlsafe_b64encode(data + check).rstrip(b'=').decode()}"


def payload(**changed: Any) -> list[Value]:
    fields: dict[str, Value] = {
        "format": 1,
        "protocol": 1,
        "run_id": b"\xab" * 32,
        "run_key": bytes(32),
        "host_key": bytes(32),
        "certificate": bytes(32),
        "addresses": ["/ip4/203.0.113.7/tcp/4001"],
        "voucher": "",
    }
    return list({**fields, **changed}.values())


def test_line_is_what_it_always_was() -> None:
    assert INVITE.line() == LINE
    assert replace(INVITE, voucher="0123456789abcdef").line() == WITH_VOUCHER


def test_line_gives_back_the_invite() -> None:
    for invite in (INVITE, replace(INVITE, host="[2001:db8::7]"), replace(INVITE, host="swarm.example.org", port=1)):
        assert parse_invite(f"  {invite.line()}\n") == invite
    assert is_invite(INVITE.line())
    assert not is_invite(INVITE.addresses[0])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("http://203.0.113.7:4002/my-run#AAAA", "does not begin with swarm://"),
        ("swarm://203.0.113.7:4002/my-run", "no '#' follows"),
        ("swarm://203.0.113.7/my-run#AAAA", "is no HOST:PORT"),
        ("swarm://203.0.113.7:4002/my-run#A!", "is not base64url"),
        ("swarm://203.0.113.7:4002/my-run#AAAB", "cut short or not canonical"),
        ("swarm://203.0.113.7:4002/my-run#" + "A" * MAX_LINE, "the longest has 2048"),
        (line_of([2]), "not of format 1"),
        (line_of({"format": 1}), "not of format 1"),
        (line_of(payload()[:-1]), "invite is not a list of 8"),
        (line_of(payload(protocol=0)), "invite.protocol is 0"),
        (line_of(payload(run_id=bytes(31))), "invite.run_id is bytes of 31"),
        (line_of(payload(run_key="me")), "invite.run_key is str of 2"),
        (line_of(payload(certificate=bytes(33))), "invite.certificate is bytes of 33"),
        (line_of(payload(addresses=[])), "0 addresses of the seed"),
        (line_of(payload(addresses=["/ip4/1.2.3.4/tcp/1"] * 9)), "invite.addresses is list of 9"),
        (line_of(payload(addresses=["/ip4/1.2.3.4/udp/1/quic"])), "address '/ip4/1.2.3.4/udp/1/quic/p2p/"),
        (line_of(payload(voucher="two words")), "voucher of 9 characters"),
        (line_of(payload(), "swarm://203.0.113.7:70000/my-run"), "port 70000"),
        (line_of(payload(), "swarm://-:1/my-run"), "host '-'"),
        (line_of(payload(), "swarm://[::zz]:1/my-run"), "host [::zz] is no IPv6 address"),
        (line_of(payload(), "swarm://[0:0::1]:1/my-run"), "host '[0:0::1]'"),
        (line_of(payload(), "swarm://a.b:1/my run"), "run name 'my run'"),
    ],
)
def test_line_that_is_wrong_is_refused_by_field(line: str, said: str) -> None:
    with pytest.raises(SettingsError) as error:
        parse_invite(line)
    assert said in str(error.value)


@given(st.integers(min_value=8, max_value=len(INVITE.line()) - 1), st.characters(codec="ascii"))
@settings(max_examples=80, deadline=None)
def test_line_with_another_letter_is_another_line_and_is_refused(at: int, letter: str) -> None:
    line = INVITE.line()
    if line[at] != letter:
        with pytest.raises(SettingsError):
            parse_invite(line[:at] + letter + line[at + 1 :])
        with pytest.raises(SettingsError):
            parse_invite(line[:at] + line[at + 1 :])


@given(st.text(max_size=300))
@settings(max_examples=100, deadline=None)
def test_any_text_is_an_invite_or_refused(text: str) -> None:
    for line in (text, f"swarm://{text}", f"swarm://a:1/b#{text}"):
        with pytest.raises(SettingsError):
            parse_invite(line)


def test_invite_show_names_what_is_inside(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["invite", "show", replace(INVITE, voucher="0123456789abcdef").line()]) is ExitCode.OK
    shown = capsys.readouterr().out
    for part in ("my-run", "ab" * 32, RUN_KEY.peer_id, HOST_KEY.peer_id, "203.0.113.7:4002", "2001:db8::7"):
        assert part in shown
    assert "0123456789abcdef" not in shown, "a secret is not shown over the shoulder"
    assert run(["invite", "show", LINE[:-2]]) is ExitCode.BAD_INPUT
