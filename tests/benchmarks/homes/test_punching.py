"""Six peers, each behind a router of some kind that lets nobody in, train past the host's relay."""

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.homes.emulated import Paths, Router, routing
from benchmarks.homes.namespaces import PUBLIC_SUBNET, Namespaces, why_not
from benchmarks.homes.punching import KINDS
from tests.benchmarks.homes.test_nat import status
from tests.process_swarm import ProcessSwarm, Zygote

pytestmark = [pytest.mark.processes, pytest.mark.soak]

HOMES = {
    "p0a": "full cone",
    "p0b": "restricted",
    "p0c": "port-restricted",
    "p1a": "symmetric",
    "p1b": "double",
    "p1c": "port-restricted",
}
TWO = {"p0a": "port-restricted", "p1a": "double"}
CUT_S = 35.0
"""After 30 s without an answer p2pd gives a connection up, and a punched one ends."""
MOST_RELAYED = 0.01
"""Of all that the homes send, joining included: in a run this short links are punched while its first bytes move."""
STEPS = 5
WAIT_S = 170.0


@contextmanager
def training(
    zygote: Zygote, root: Path, homes: Mapping[str, str], **settings: Any
) -> Iterator[tuple[ProcessSwarm, Router, Namespaces]]:
    """A run of these homes, behind routers of these kinds, all of them founders."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    behind = {home: KINDS[kind] for home, kind in homes.items()}
    with (
        Namespaces(["host", *homes], bridged=False, subnet=PUBLIC_SUBNET, routed=tuple(homes)) as network,
        routing(network, ["host", *homes], behind) as router,
        ProcessSwarm(
            zygote, root, founders=len(homes) // 2, steps=5000, every=5000, network=network, **settings
        ) as swarm,
    ):
        router.limit(Paths(40.0, 0.0), up_mbit=1000.0, down_mbit=1000.0)
        swarm.start_host("--relay-gb", "5")
        swarm.start_founders()
        yield swarm, router, network
    assert zygote.leftovers() == []


def wait_for_links(zygote: Zygote, folder: Path, number: int) -> dict[str, int]:
    """Of a peer, once so many are punched."""
    give_up_at = time.monotonic() + WAIT_S
    while True:
        told = status(zygote, folder)
        ways = Counter(link["way"] for link in told.get("links", ()))
        if ways["punched"] >= number:
            return dict(ways)
        assert time.monotonic() < give_up_at, told
        time.sleep(1.0)


def test_six_peers_behind_routers_train_with_next_to_nothing_relayed(zygote: Zygote, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"target_tokens": 4096, "hidden_size": 512, "slow_s": 0.2}
    with training(zygote, tmp_path, HOMES, **settings) as (swarm, router, network):
        began = time.monotonic()
        swarm.wait_for_more("version", after=0, count=STEPS, timeout_s=WAIT_S)
        print(f"{STEPS} steps after {time.monotonic() - began:.1f} s")
        for home, kind in HOMES.items():
            print(home, kind, wait_for_links(zygote, tmp_path / home, len(HOMES) - 1))
        seen = router.seen[-1]["up_bytes"]
        sent_bytes = sum(int(seen[network.outside(home)]) for home in HOMES)
        os.kill(swarm.host, signal.SIGTERM)
        assert zygote.exit_code(swarm.host, timeout_s=30) == 0
        relayed_bytes = json.loads((tmp_path / "report.json").read_text())["relay"]["carried_bytes"]
        share = relayed_bytes / sent_bytes
        print(f"{sent_bytes / 1e6:.1f} MB sent, {relayed_bytes / 1e6:.2f} MB relayed: {share:.4f}")
        assert share <= MOST_RELAYED


def test_a_line_that_was_cut_is_punched_again(zygote: Zygote, tmp_path: Path) -> None:
    with training(zygote, tmp_path, TWO, min_replicas=1, hidden_size=256) as (swarm, router, network):
        for home in TWO:
            wait_for_links(zygote, tmp_path / home, 1)
        router.cut(network.outside("p1a"))
        time.sleep(CUT_S)
        router.cut()
        healed, before = time.monotonic(), len(swarm.events())
        swarm.wait_for_more("version", after=before, count=3, timeout_s=WAIT_S)
        wait_for_links(zygote, tmp_path / "p1a", 1)
        print(f"three steps, and punched again, {time.monotonic() - healed:.1f} s after the line was mended")
