"""Figures of home links: lines of 20 Mbit/s, lossy ones, and routers that let nobody in."""

import re
from collections.abc import Sequence

from benchmarks.results.entry import SWARM, Command, Entry, Figures, NotAsStatedError, Row, object_of

LINES = ("benchmarks.homes.links", "benchmarks.homes.router", *SWARM)


def _links(answers: Sequence[str]) -> Figures:
    found = {codec: figures for codec, figures in object_of(answers[0]).items() if codec != "goals"}
    shares = {f"{codec}_uplink_percent": 100 * figures["uplink_share"] for codec, figures in found.items()}
    return {**shares, **{f"{codec}_of_plan": figures["of_plan"] for codec, figures in found.items()}}


def _bulk(answers: Sequence[str]) -> Figures:
    return {way.replace(", ", "_"): found["uplink_share"] for way, found in object_of(answers[0]).items()}


def _nat(answers: Sequence[str]) -> Figures:
    counted = re.findall(r"counted and relayed after ([\d.]+) s", answers[0])
    if len(counted) != 2:
        raise NotAsStatedError(f"{len(counted)} of 2 tests said when work was counted")
    return {"one_hidden_s": float(counted[0]), "two_hidden_s": float(counted[1])}


HOMES = (
    Entry(
        name="home links",
        commands=(Command("python -m benchmarks.homes.links --codec int8 --codec topk"),),
        read=_links,
        measures=LINES,
        minutes=5,
        rows=(
            Row(
                "emulated home links, 20 Mbit/s up; int8, topk",
                "{int8_uplink_percent:.0f} and {topk_uplink_percent:.0f} % of the uplink used while a round moves "
                "bytes; {int8_of_plan:.2f} and {topk_of_plan:.2f} of the plan's tokens/s ([more](docs/home_links.md))",
            ),
        ),
    ),
    Entry(
        name="lossy home links",
        commands=(Command("python -m benchmarks.homes.links --codec int8 --loss 0.01 --round-trip-ms 80"),),
        read=_links,
        measures=LINES,
        minutes=3,
        rows=(
            Row(
                "the same with 80 ms and 1 % of packets lost, int8",
                "{int8_uplink_percent:.0f} % of the uplink, {int8_of_plan:.2f} of the plan",
            ),
        ),
    ),
    Entry(
        name="lossy bulk",
        commands=(
            Command(
                "python -m benchmarks.homes.bulk --loss 0.01 --round-trip-ms 80 --transfers 3 --way 'direct, bbr' "
                "--way 'direct, cubic' --way 'p2pd, reno'"
            ),
        ),
        read=_bulk,
        measures=("benchmarks.homes.bulk", "benchmarks.round.bulk_sender", "benchmarks.homes.router"),
        minutes=3,
        rows=(
            Row(
                "bulk alone on such a line",
                "{direct_bbr:.2f} of it by direct streams under bbr, {direct_cubic:.2f} under cubic, {p2pd_reno:.2f} "
                "by libp2p's one connection under reno",
            ),
        ),
    ),
    Entry(
        name="hidden peers",
        commands=(Command('make soak TESTS="-rP tests/benchmarks/homes/test_nat.py"', ""),),
        read=_nat,
        measures=("tests.benchmarks.homes.test_nat", *SWARM),
        minutes=4,
        rows=(
            Row(
                "a peer behind a router that lets nobody in",
                "its first work counted {one_hidden_s:.1f} s after the host's start; of two such peers, through the "
                "host's relay, {two_hidden_s:.1f} s",
            ),
        ),
    ),
)
