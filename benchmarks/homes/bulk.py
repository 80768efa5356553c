"""Ways to move a round's bytes over home links, held beside each other without a swarm.

    python -m benchmarks.homes.bulk [--round-trip-ms 80] [--loss 0.01] [--json]      # root and iproute2
    python -m benchmarks.homes.bulk --uplink-mbit 1 --megabytes 1 --way "direct, bbr"

Two homes send each other parts at once, as the two members of a round do (`peer.round.mail.outbox`), over p2pd or over
direct streams, under a loss-based congestion control and under bbr. The share of the uplink is that of the parts' own
bytes: headers and what is sent again are not counted. Small calls go beside them, as votes would.
"""

import json
import os
import statistics
import sys
from bisect import bisect_left
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import click

from benchmarks.homes.emulated import UPLINK_MBIT, Paths, Router, routing
from benchmarks.homes.namespaces import Namespaces, begin_with_namespaces
from benchmarks.programs import Talking, talking
from benchmarks.round.bulk_sender import PART_BYTES

HOMES = ("one", "other")
DOWN_TIMES = 5.0
WAYS = {
    "p2pd, reno": ("p2pd", "reno", "reno"),
    "p2pd, bbr": ("p2pd", "bbr", "bbr"),
    "direct, cubic": ("direct", "reno", "cubic"),
    "direct, bbr": ("direct", "reno", "bbr"),
}
"""Way, the namespace's congestion control, that of direct streams. A namespace may not have cubic as its default."""


def sending(
    network: Namespaces, home: str, way: str, congestion: str, answer_ms: float
) -> AbstractContextManager[Talking]:
    """A `benchmarks.round.bulk_sender` in a home."""
    command = [*network.inside(home), sys.executable, "-m", "benchmarks.round.bulk_sender"]
    options = ["--way", way, "--congestion", congestion, "--answer-ms", str(answer_ms)]
    return talking([*command, network.address(home), *options], "a sender")


def measure(
    name: str, paths: Paths, *, answer_ms: float, uplink_mbit: float, megabytes: float, transfers: int
) -> dict[str, float]:
    way, default, congestion = WAYS[name]
    with ExitStack() as stack:
        network = stack.enter_context(Namespaces(HOMES, bridged=False))
        network.control_congestion(default)
        router = stack.enter_context(routing(network, HOMES))
        senders = [stack.enter_context(sending(network, home, way, congestion, answer_ms)) for home in HOMES]
        said = [sender.hear() for sender in senders]
        for sender, other, dials in zip(senders, reversed(said), (True, False), strict=True):
            sender.tell({**other, "dials": dials})
        router.limit(paths, up_mbit=uplink_mbit, down_mbit=DOWN_TIMES * uplink_mbit)
        num_bytes = int(megabytes * 1e6) // PART_BYTES * PART_BYTES
        shares, small_ms, slowest_ms, dropped = [], [], [], []
        for _ in range(transfers):
            for sender in senders:
                sender.tell({"num_bytes": num_bytes})
            for told in [sender.hear() for sender in senders]:
                shares.append(num_bytes * 8 / (uplink_mbit * 1e6 * (told["stop"] - told["start"])))
                small_ms.append(told["small_s"] * 1000)
                slowest_ms.append(told["slowest_small_s"] * 1000)
                dropped.append(_dropped(router, told["start"], told["stop"]))
        # The first transfer finds the way, and sixteen connections that have still to learn the line.
        return {
            "uplink_share": statistics.mean(shares[2:]),
            "least_uplink_share": min(shares[2:]),
            "first_uplink_share": statistics.mean(shares[:2]),
            "small_call_ms": statistics.median(small_ms[2:]),
            "slowest_small_call_ms": max(slowest_ms[2:]),
            "dropped_packets": statistics.mean(dropped[2:]),
        }


def _dropped(router: Router, start: float, stop: float) -> int:
    """By the queues of both homes."""
    lines = list(router.seen)
    first, last = (min(bisect_left([line["at"] for line in lines], at), len(lines) - 1) for at in (start, stop))
    before, after = (sum(map(int, lines[at]["dropped"].values())) for at in (first, last))
    return after - before


@click.command()
@click.option("--way", "ways", multiple=True, type=click.Choice([*WAYS]), help="By default all; repeat.")
@click.option("--round-trip-ms", type=click.FloatRange(min=0), default=40.0, show_default=True)
@click.option(
    "--answer-ms", type=click.FloatRange(min=0), default=10.0, show_default=True, help="Until a message is answered."
)
@click.option("--loss", type=click.FloatRange(0, 0.5), default=0.0, show_default=True, help="Probability of a packet.")
@click.option("--uplink-mbit", type=click.FloatRange(min=0, min_open=True), default=UPLINK_MBIT, show_default=True)
@click.option("--megabytes", type=click.FloatRange(min=1), default=12.0, show_default=True, help="Each way.")
@click.option("--transfers", type=click.IntRange(min=2), default=5, show_default=True)
@click.option("--smoke", is_flag=True, help="Two megabytes by one way: does it run?")
@click.option("--json", "as_json", is_flag=True)
def main(
    ways: tuple[str, ...],
    round_trip_ms: float,
    answer_ms: float,
    loss: float,
    uplink_mbit: float,
    megabytes: float,
    transfers: int,
    smoke: bool,
    as_json: bool,
) -> None:
    """Share of a home's uplink that each way of moving bulk uses."""
    begin_with_namespaces()
    if smoke:
        ways, megabytes, transfers = ("direct, bbr",), 2.0, 2
    result: dict[str, Any] = {}
    for name in ways or WAYS:
        paths = Paths(round_trip_ms, loss)
        found = measure(
            name, paths, answer_ms=answer_ms, uplink_mbit=uplink_mbit, megabytes=megabytes, transfers=transfers
        )
        result[name] = {**found, "load_average": os.getloadavg()[0]}
        if not as_json:
            click.echo(
                f"{name}: {found['uplink_share']:.2f} of the uplink (least {found['least_uplink_share']:.2f}, first "
                f"transfer {found['first_uplink_share']:.2f}), small calls {found['small_call_ms']:.0f} ms "
                f"(slowest {found['slowest_small_call_ms']:.0f}), "
                f"{found['dropped_packets']:.0f} packets dropped a transfer"
            )
    if as_json:
        click.echo(json.dumps(result))


if __name__ == "__main__":
    main()
