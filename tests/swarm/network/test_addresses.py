"""Where a program listens, as its owner writes it, and as it was had."""

import pytest

from swarm.core.errors import SettingsError
from swarm.network import addresses
from swarm.network.addresses import as_had, has_ipv6, listen_multiaddresses, ports_of


@pytest.mark.parametrize(
    ("listen", "expected"),
    [
        ("0.0.0.0:4001", ("/ip4/0.0.0.0/tcp/4001",)),
        ("[::]:4001", ("/ip6/::/tcp/4001",)),
        ("[::1]:0", ("/ip6/::1/tcp/0",)),
        (":4001", ("/ip4/0.0.0.0/tcp/4001", "/ip6/::/tcp/4001")),
    ],
)
def test_an_address_of_either_version_is_listened_at_or_both_without_one(
    listen: str, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "has_ipv6", lambda: True)
    assert listen_multiaddresses(listen) == expected


def test_without_ipv6_all_addresses_are_those_of_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "has_ipv6", lambda: False)
    assert listen_multiaddresses(":0") == ("/ip4/0.0.0.0/tcp/0",)
    assert isinstance(has_ipv6(), bool)


@pytest.mark.parametrize(
    ("listen", "says"),
    [
        ("4001", "behind a colon"),
        (":x", "behind a colon"),
        (":70000", "at most 65535"),
        ("0.0.0.0:", "give a PORT"),
        ("::1:4001", "in brackets"),
        ("[::1]", "give a PORT"),
        ("[127.0.0.1]:4001", "in brackets"),
        ("[fe80::1%eth0]:4001", "without a zone"),
        ("example.org:4001", "is no address"),
    ],
)
def test_a_listen_option_that_is_none_is_named_with_what_to_write(listen: str, says: str) -> None:
    with pytest.raises(SettingsError, match=says) as refused:
        listen_multiaddresses(listen)
    assert f"--listen {listen}: " in str(refused.value)


def test_each_version_keeps_the_port_that_it_had() -> None:
    had = ["/ip6/::1/tcp/5/p2p/me", "/ip4/127.0.0.1/tcp/7/p2p/me", "/ip4/10.0.0.1/tcp/7/p2p/me"]
    assert as_had(("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0"), had) == ("/ip4/0.0.0.0/tcp/7", "/ip6/::/tcp/5")
    assert (ports_of(had, 4), ports_of(had, 6)) == ([7], [5])
