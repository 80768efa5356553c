"""A run whose host and peers have IPv6 alone."""

from pathlib import Path

import pytest

from swarm.invite import parse_invite
from tests.process_swarm import ProcessSwarm, Zygote
from tests.swarm.network.p2pd.test_ipv6 import has_loopback

pytestmark = [pytest.mark.processes, pytest.mark.soak]


def test_peers_join_and_train_by_ipv6_alone(zygote: Zygote, tmp_path: Path) -> None:
    if not has_loopback():
        pytest.skip("this machine has no IPv6")
    with ProcessSwarm(zygote, tmp_path, founders=1, steps=4, every=4, loopback="[::1]") as swarm:
        swarm.start_host()
        swarm.start_founders()
        told = swarm.wait_for("listening")
        invite = parse_invite(told["invite"])
        assert invite.host == "[::1]"
        assert all(address.startswith("/ip6/::1/tcp/") for address in invite.addresses)
        swarm.wait_for("version", version=4)
        for name in swarm.peers:
            assert zygote.exit_code(swarm.peers[name], timeout_s=60) == 0
        log = (tmp_path / "p0a.log").read_text()
        assert "the host dialled it back at ::1" in log
    assert zygote.leftovers() == []
