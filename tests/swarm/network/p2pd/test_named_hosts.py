"""What is kept of where peers are to be dialled, and what of it is dialled past p2pd."""

import asyncio

from swarm.core.ids import PeerId
from swarm.network.p2pd.named_hosts import MOST_OF_A_PEER, MOST_PEERS, NamedHosts

ONE = PeerId("one")


def test_hosts_named_last_come_first_and_private_ones_are_not_dialled_on_a_word() -> None:
    async def scenario() -> None:
        named = NamedHosts(public_only=True)
        named.name(ONE, ["/ip4/192.168.1.5/tcp/4001", "/ip4/5.0.0.1/tcp/4001"])
        named.name(
            ONE, ["/ip6/2a05:77::1/tcp/4001", "/ip4/5.0.0.1/tcp/4002", "/ip4/9.0.0.1/tcp/1/p2p/relay/p2p-circuit"]
        )
        assert await named.of(ONE) == ["2a05:77::1", "5.0.0.1", "192.168.1.5"]
        assert await named.elsewhere(ONE) == ["2a05:77::1", "5.0.0.1"]
        assert await NamedHosts(public_only=False).of(ONE) == []

    asyncio.run(scenario())


def test_names_are_looked_up_for_both_versions() -> None:
    async def scenario() -> None:
        named = NamedHosts(public_only=True)
        named.name(ONE, ["/dns/localhost/tcp/4001", "/dns/no-such-name.invalid/tcp/4001"])
        assert set(await named.of(ONE)) <= {"127.0.0.1", "::1"}
        assert await named.of(ONE)
        assert await named.elsewhere(ONE) == []

    asyncio.run(scenario())


def test_of_too_many_peers_and_hosts_those_named_last_are_kept() -> None:
    async def scenario() -> None:
        named = NamedHosts(public_only=True)
        named.name(ONE, [f"/ip4/5.0.0.{number}/tcp/1" for number in range(2 * MOST_OF_A_PEER)])
        assert len(await named.of(ONE)) == MOST_OF_A_PEER
        for number in range(MOST_PEERS):
            named.name(PeerId(f"{number}"), ["/ip4/5.0.0.1/tcp/1"])
        assert await named.of(ONE) == []
        assert await named.of(PeerId("0")) == ["5.0.0.1"]

    asyncio.run(scenario())
