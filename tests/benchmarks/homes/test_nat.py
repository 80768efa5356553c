"""Peers behind routers that let nobody in train in a real run: by calling out, and through the host's relay."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.homes.namespaces import PUBLIC_SUBNET, Namespaces, why_not
from tests.process_swarm import ProcessSwarm, Zygote

pytestmark = [pytest.mark.processes, pytest.mark.soak]

PROTOCOLS = ["nat-pmp", "pcp", "upnp"]
COUNTED_S = 180.0
OUTAGE_S = 45.0
"""After 30 s without an answer p2pd gives a connection up."""


@pytest.fixture
def network(request: pytest.FixtureRequest) -> Iterator[Namespaces]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    members, hidden, *forwarding = request.param
    with Namespaces(members, subnet=PUBLIC_SUBNET, hidden=hidden, forwarding=dict(forwarding)) as made:
        yield made


def status(zygote: Zygote, folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "swarm", "status", "--json", "--dir", str(folder)],
        env={**os.environ, "XDG_RUNTIME_DIR": str(zygote.runtime)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if done.returncode != 0:
        return {}
    (peer,) = json.loads(done.stdout)["peers"]
    told: dict[str, Any] = peer
    return told


def wait_until(zygote: Zygote, folder: Path, *, reach: str, microbatches: int = 0, timeout_s: float) -> dict[str, Any]:
    """The peer's status once it is so reached, and so much of its work is certified."""
    give_up_at = time.monotonic() + timeout_s
    while True:
        told = status(zygote, folder)
        counted = told.get("work", {}).get("certified_microbatches", 0)
        if told.get("reach", {}).get("kind") == reach and counted >= microbatches:
            return told
        assert time.monotonic() < give_up_at, f"after {timeout_s:g} s: {told}"
        time.sleep(0.5)


def doctors_word(zygote: Zygote, namespace: str, folder: Path, invite: str) -> str:
    """What `swarm doctor` says of the reach of a machine."""
    command = ["ip", "netns", "exec", namespace, sys.executable, "-m", "swarm", "doctor", invite, "--json"]
    done = subprocess.run(
        [*command, "--dir", str(folder)],
        env={**os.environ, "XDG_RUNTIME_DIR": str(zygote.runtime)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return next(found["says"] for found in json.loads(done.stdout)["findings"] if found["name"] == "reach")


def relayed(told: dict[str, Any]) -> Sequence[str]:
    return [address for address in told["addresses"] if "/p2p-circuit/" in address]


@pytest.mark.parametrize("network", [(("host", "p0a"), ("p0a",))], indirect=True)
def test_a_hidden_peer_trains_with_one_on_the_hosts_machine_and_comes_back_after_an_outage(
    zygote: Zygote, tmp_path: Path, network: Namespaces
) -> None:
    machines = {"p1a": "host"}
    with ProcessSwarm(
        zygote, tmp_path, founders=1, steps=5000, every=5000, network=network, machines=machines
    ) as swarm:
        began = time.monotonic()
        swarm.start_host("--relay-gb", "1")
        swarm.start_founders()
        told = wait_until(zygote, tmp_path / "p0a", reach="relayed", microbatches=1, timeout_s=COUNTED_S)
        print(f"counted and relayed after {time.monotonic() - began:.1f} s")
        assert relayed(told)
        assert status(zygote, tmp_path / "p1a")["reach"]["kind"] == "reachable"

        invite = swarm.wait_for("listening")["invite"]
        for machine, word in (("p0a", "relayed: through the host's relay"), ("host", "reachable: the host dialled")):
            assert word in doctors_word(zygote, network.namespace(machine), tmp_path / f"doctor-{machine}", invite)

        network.cut(("p0a",))
        time.sleep(OUTAGE_S)
        network.heal()
        healed = time.monotonic()
        before = status(zygote, tmp_path / "p0a")["work"]["certified_microbatches"]
        told = wait_until(zygote, tmp_path / "p0a", reach="relayed", microbatches=before + 1, timeout_s=COUNTED_S)
        print(f"counted again {time.monotonic() - healed:.1f} s after the line was mended")
        assert relayed(told)
    assert zygote.leftovers() == []


HIDDEN = (("host", "p0a", "p1a"), ("p0a", "p1a"))


@pytest.mark.parametrize("network", [HIDDEN], indirect=True)
def test_two_hidden_peers_serve_each_other_through_the_relay_also_after_an_outage(
    zygote: Zygote, tmp_path: Path, network: Namespaces
) -> None:
    with ProcessSwarm(zygote, tmp_path, founders=1, steps=5000, every=5000, network=network) as swarm:
        began = time.monotonic()
        swarm.start_host("--relay-gb", "1")
        swarm.start_founders()
        for name in ("p0a", "p1a"):
            wait_until(zygote, tmp_path / name, reach="relayed", microbatches=1, timeout_s=COUNTED_S)
        print(f"counted and relayed after {time.monotonic() - began:.1f} s")

        network.cut(("p0a",))
        time.sleep(OUTAGE_S)
        network.heal()
        healed = time.monotonic()
        before = status(zygote, tmp_path / "p1a")["work"]["certified_microbatches"]
        for name in ("p0a", "p1a"):
            wait_until(zygote, tmp_path / name, reach="relayed", microbatches=before + 5, timeout_s=COUNTED_S)
        print(f"counted again {time.monotonic() - healed:.1f} s after the line was mended")
        os.kill(swarm.host, signal.SIGTERM)
        assert zygote.exit_code(swarm.host, timeout_s=30) == 0
        relay = json.loads((tmp_path / "report.json").read_text())["relay"]
        print(f"the relay has carried {relay['carried_bytes']} bytes")
        assert 50_000 < relay["carried_bytes"] < relay["budget_bytes"] == 1_000_000_000
    assert zygote.leftovers() == []


@pytest.mark.parametrize("network", [HIDDEN], indirect=True)
def test_a_relay_carries_no_more_than_its_budget_and_says_so(
    zygote: Zygote, tmp_path: Path, network: Namespaces
) -> None:
    with ProcessSwarm(zygote, tmp_path, founders=1, steps=5000, every=5000, network=network) as swarm:
        swarm.start_host("--relay-gb", "0.002", "--relay-bulk-gb", "0.002")
        swarm.start_founders()
        wait_until(zygote, tmp_path / "p0a", reach="relayed", microbatches=1, timeout_s=COUNTED_S)
        told = wait_until(zygote, tmp_path / "p0a", reach="outbound only", timeout_s=COUNTED_S)
        assert "relay budget of 0.002 GB is used up" in told["reach"]["why"]
        assert not relayed(told)
        carried = [event["carried_bytes"] for event in swarm.events() if event["event"] == "relay"]
        print(f"the relay has carried {carried[-1]} bytes")
        assert 2_000_000 <= carried[-1] < 12_000_000
    assert zygote.leftovers() == []


@pytest.mark.parametrize("network", [(*HIDDEN, ("p0a", each)) for each in PROTOCOLS], ids=PROTOCOLS, indirect=True)
def test_a_peer_whose_router_forwards_what_it_asks_for_is_dialled_by_one_behind_another(
    zygote: Zygote, tmp_path: Path, network: Namespaces
) -> None:
    with ProcessSwarm(zygote, tmp_path, founders=1, steps=5000, every=5000, network=network) as swarm:
        began = time.monotonic()
        swarm.start_host()
        swarm.start_founders()
        told = wait_until(zygote, tmp_path / "p0a", reach="reachable", microbatches=1, timeout_s=COUNTED_S)
        print(f"counted and reachable after {time.monotonic() - began:.1f} s: {told['reach']['why']}")
        assert "at a port that its router forwards" in told["reach"]["why"]
        assert f"/ip4/{network.outside('p0a')}/tcp/" in told["addresses"][0]
        other = wait_until(zygote, tmp_path / "p1a", reach="outbound only", microbatches=1, timeout_s=COUNTED_S)
        assert "the router does not answer" in other["reach"]["why"]
        assert "no router forwards a port" in other["reach"]["why"]
    assert zygote.leftovers() == []
