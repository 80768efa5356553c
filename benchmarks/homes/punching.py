"""Which routers can be punched through: every pair of kinds, try after try.

    python -m benchmarks.homes.punching [--tries 20] [--json]      # root and iproute2; about six minutes

Two homes of each kind, behind routers (`benchmarks.homes.translation`) on lines of 20 Mbit/s up and 100 down, 40 ms
apart; a host that can be dialled, and its relay. In each try two homes that know each other through the relay alone
forget their streams and punch; the time is to the first stream on which a call was answered. After the last try one
sends the other bulk.
"""

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import click

from benchmarks.homes.emulated import UPLINK_MBIT, Paths, routing
from benchmarks.homes.namespaces import INSIDE, PUBLIC_SUBNET, Namespaces, begin_with_namespaces
from benchmarks.homes.translation import Kind
from benchmarks.programs import Talking, talking

KINDS: dict[str, tuple[Kind, ...]] = {
    "full cone": (Kind.FULL_CONE,),
    "restricted": (Kind.RESTRICTED,),
    "port-restricted": (Kind.PORT_RESTRICTED,),
    "symmetric": (Kind.SYMMETRIC,),
    "random symmetric": (Kind.RANDOM,),
    "double": (Kind.PORT_RESTRICTED, Kind.PORT_RESTRICTED),
}
HOST = "host"
LEARN_BYTES, SEND_BYTES = 2_000_000, 6_000_000
GOAL_S = 10.0


class Peer:
    """A `benchmarks.homes.punching_peer` in a home."""

    def __init__(self, program: Talking) -> None:
        self._program = program
        self.said = program.hear()
        self.addresses: list[str] = self.said["addresses"]

    @property
    def peer_id(self) -> str:
        return str(self.said["peer_id"])

    def do(self, what: str, **order: Any) -> dict[str, Any]:
        self._program.tell({"do": what, **order})
        return self._program.hear()


@contextmanager
def peer(network: Namespaces, name: str, *options: str) -> Iterator[Peer]:
    command = [*network.inside(name), sys.executable, "-m", "benchmarks.homes.punching_peer"]
    with talking([*command, *options], "a peer") as program:
        yield Peer(program)


def can_be_punched(one: str, other: str) -> bool:
    """Ports that nobody can foresee are met only by routers that let in any port of an address that was sent to."""
    kinds = {one, other}
    return "random symmetric" not in kinds or bool(kinds & {"full cone", "restricted"})


def rounds(homes: Sequence[str]) -> Iterator[list[tuple[str, str]]]:
    """Each home with each other, all of a round at once."""
    still, turning = homes[0], list(homes[1:])
    for _ in turning:
        line = [still, *turning]
        yield [(line[at], line[-1 - at]) for at in range(len(line) // 2)]
        turning = [turning[-1], *turning[:-1]]


def try_pair(one: Peer, other: Peer, tries: int, *, bulk: bool) -> dict[str, Any]:
    """How long each try took, None if nobody came through; and what bulk had of the uplink."""
    found: dict[str, Any] = {"took_s": [], "uplink_share": []}
    for number in range(tries):
        asker, callee = (one, other) if number % 2 else (other, one)
        for side, opposite in ((asker, callee), (callee, asker)):
            side.do("forget", peer_id=opposite.peer_id)
        asker.do("connect", peer_id=callee.peer_id, addresses=callee.addresses)
        told = asker.do("punch", peer_id=callee.peer_id)
        found["took_s"].append(told["s"] if told.get("won") else None)
    if bulk and found["took_s"] and found["took_s"][-1] is not None:
        asker.do("send", peer_id=callee.peer_id, num_bytes=LEARN_BYTES)
        sent = asker.do("send", peer_id=callee.peer_id, num_bytes=SEND_BYTES)
        found["uplink_share"].append(SEND_BYTES * 8 / (UPLINK_MBIT * 1e6 * (sent["stop"] - sent["start"])))
    return found


def measure(kinds: Sequence[str], tries: int, paths: Paths) -> dict[str, dict[str, Any]]:
    homes = [f"{kind.replace(' ', '-')}-{number}" for number in range(2) for kind in kinds]
    kind_of = dict(zip(homes, [*kinds, *kinds], strict=True))
    found: dict[str, dict[str, list[Any]]] = defaultdict(lambda: {"took_s": [], "uplink_share": []})
    with ExitStack() as stack:
        network = stack.enter_context(Namespaces([HOST, *homes], bridged=False, subnet=PUBLIC_SUBNET))
        behind = {home: KINDS[kind_of[home]] for home in homes}
        router = stack.enter_context(routing(network, [HOST, *homes], behind))
        host = stack.enter_context(peer(network, HOST, network.outside(HOST), "--relay"))
        with ThreadPoolExecutor(len(homes)) as threads:
            started = threads.map(lambda home: stack.enter_context(peer(network, home, INSIDE)), homes)
            peers = dict(zip(homes, started, strict=True))
            router.limit(paths)
            router.limit(paths, up_mbit=1000, down_mbit=1000, only=[network.outside(HOST)])
            at = {"host": host.peer_id, "host_addresses": host.addresses}
            at |= {name: host.said[name] for name in ("relay", "relay_addresses")}
            for made in peers.values():
                made.addresses = made.do("join", **at)["addresses"]

            def of_pair(pair: tuple[str, str]) -> tuple[str, dict[str, Any]]:
                one, other = sorted((kind_of[home] for home in pair), key=list(KINDS).index)
                each = tries if one == other else -(-tries // 4)
                if not can_be_punched(one, other):
                    each = 1
                return f"{one}, {other}", try_pair(*(peers[home] for home in pair), each, bulk=True)

            for together in rounds(homes):
                for name, told in threads.map(of_pair, together):
                    for figure, values in told.items():
                        found[name][figure] += values
        carried = host.do("carried")["bytes"]
    table = {name: summary(name, told) for name, told in sorted(found.items())}
    return {"pairs": table, "relayed_bytes": carried}


def summary(name: str, told: dict[str, list[Any]]) -> dict[str, Any]:
    took_s = [took for took in told["took_s"] if took is not None]
    shares = told["uplink_share"]
    return {
        "can_be": can_be_punched(*name.split(", ")),
        "tries": len(told["took_s"]),
        "within_10_s": sum(took <= GOAL_S for took in took_s),
        "median_s": statistics.median(took_s) if took_s else None,
        "longest_s": max(took_s, default=None),
        "uplink_share": statistics.mean(shares) if shares else None,
    }


@click.command()
@click.option("--kind", "kinds", multiple=True, type=click.Choice([*KINDS]), help="By default all; repeat.")
@click.option("--tries", type=click.IntRange(min=1), default=20, show_default=True, help="Of each pair.")
@click.option("--round-trip-ms", type=click.FloatRange(min=0), default=40.0, show_default=True)
@click.option("--loss", type=click.FloatRange(0, 0.5), default=0.0, show_default=True, help="Probability of a packet.")
@click.option("--smoke", is_flag=True, help="One pair, one try: does it run?")
@click.option("--json", "as_json", is_flag=True)
def main(kinds: tuple[str, ...], tries: int, round_trip_ms: float, loss: float, *, smoke: bool, as_json: bool) -> None:
    """Which pairs of routers can be punched through, how soon, and what bulk has of the line then."""
    begin_with_namespaces()
    if smoke:
        kinds, tries = ("port-restricted",), 1
    found = measure(kinds or [*KINDS], tries, Paths(round_trip_ms, loss))
    if as_json:
        click.echo(json.dumps(found))
        return
    for name, told in found["pairs"].items():
        times = f", {told['median_s']:.2f} s (longest {told['longest_s']:.2f})" if told["median_s"] else ""
        bulk = f", bulk {told['uplink_share']:.2f} of the uplink" if told["uplink_share"] else ""
        cannot = "" if told["can_be"] else " (cannot be)"
        click.echo(f"{name}{cannot}: {told['within_10_s']} of {told['tries']}{times}{bulk}")
    click.echo(f"the relay carried {found['relayed_bytes'] / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
