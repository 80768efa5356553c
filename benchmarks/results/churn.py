"""Figures of peers that come and go, of networks that break, and of a host under load."""

import re
from collections.abc import Sequence

from benchmarks.results.entry import DAEMON, SWARM, Command, Entry, Figures, NotAsStatedError, Row, must, object_of
from benchmarks.results.entry import passed as tests_passed

CHAOS = "python -m tests.chaos --seed {} --minutes 1.25"
MISSED = re.compile(r"missed (\d+) versions\nreceived (\d+) bytes of results and (\d+) of (\d+) bytes of state")


def _coordinator(answers: Sequence[str]) -> Figures:
    found = object_of(answers[0])
    must(found["errors"] == 0, "no errors")
    return {name: found[name] for name in ("median_ms", "p99_ms", "calls")}


def _kills(answers: Sequence[str]) -> Figures:
    found = object_of(answers[0])
    must(found["replicas_equal"] and found["lost_rounds"] == 0, "no round lost, replicas equal")
    must(found["not_back"] == 0, "back after each kill")
    return {
        "of_undisturbed": found["of_undisturbed_per_live_peer"],
        "kills": found["kills"],
        "back_median_s": found["back_after_s"]["median"],
        "back_worst_s": found["back_after_s"]["worst"],
    }


def _chaos(answers: Sequence[str]) -> Figures:
    outcomes = [object_of(answer) for answer in answers]
    must(not any(outcome["problem"] for outcome in outcomes), "one history, nobody blamed, nothing left behind")
    must(not any(outcome["left_out"] for outcome in outcomes), "all kinds of faults are drawn")
    recovered = [outcome["recovered_s"] for outcome in outcomes]
    faults = sum(len(outcome["faults"]) for outcome in outcomes)
    return {"faults": faults, "least_s": min(recovered), "most_s": max(recovered)}


def _way_back(answers: Sequence[str]) -> Figures:
    found = [tuple(map(int, sizes)) for sizes in MISSED.findall(answers[0])]
    if len(found) != 4:
        raise NotAsStatedError(f"{len(found)} of 4 tests said what was received")
    (missed, cut, cut_state, size), (missed_too, restarted, restarted_state, _), *loaded = found
    must(cut_state == restarted_state == 0, "nothing of a state")
    must(all(missed >= 16 and state >= size for missed, _, state, size in loaded), "a state, after 16 versions")
    return {
        **{"missed": missed, "of_a_state": cut / size},
        **{"missed_restarted": missed_too, "of_a_state_restarted": restarted / size},
    }


def _rebalancing(answers: Sequence[str]) -> Figures:
    found = object_of(answers[0])
    first, last = found["sizes"][0], found["sizes"][-1]
    return {"first_ms": 1e3 * first["seconds"], "last_ms": 1e3 * last["seconds"], "growth": found["growth"]}


CHURN = (
    Entry(
        name="coordinator load",
        commands=(Command("python -m benchmarks.churn.coordinator_load"),),
        read=_coordinator,
        measures=("benchmarks.churn.coordinator_load",),
        minutes=1,
        row=Row(
            "200 volunteers polling one coordinator over TLS",
            "{median_ms:.1f} ms in the median, no errors in {calls:.0f} calls",
        ),
    ),
    Entry(
        name="kills",
        commands=(Command("python -m benchmarks.churn.kills"),),
        read=_kills,
        measures=("benchmarks.churn.kills", "benchmarks.homes.paced_peer", *SWARM),
        minutes=8,
        row=Row(
            "2 stages x 3 peers of fixed speed, one killed and one started every 20 s for 5 minutes",
            "{of_undisturbed:.2f} of the undisturbed throughput for each live peer; {kills:.0f} kills, back at the "
            "living's rate after {back_median_s:.1f} s in the median, {back_worst_s:.1f} at worst; no round lost, "
            "replicas equal",
        ),
    ),
    Entry(
        name="split network",
        commands=(Command("make soak TESTS=tests/peer/directory/test_split.py", ""),),
        read=tests_passed,
        measures=("tests.peer.directory.test_split", *SWARM),
        minutes=10,
        row=Row(
            "a network cut in two in mid-training, also into equal halves for a minute",
            "no two halves both finish a round; healed, all end alike",
        ),
    ),
    Entry(
        name="hardship",
        commands=(Command("make soak TESTS=tests/test_hardship.py", ""),),
        read=tests_passed,
        measures=("tests.test_hardship", *SWARM),
        minutes=5,
        row=Row(
            "a wrong clock, a full disk (a peer's, the host's), half a minute's standstill",
            "told, waited for, and over without a person's help; one history",
        ),
    ),
    Entry(
        name="chaos",
        commands=tuple(Command(CHAOS.format(seed)) for seed in (1, 2, 3)),
        read=_chaos,
        measures=("tests.chaos", *SWARM),
        minutes=8,
        row=Row(
            "{faults:.0f} faults of three seeds, drawn: kills, cuts, thin lines, full disks, clocks a minute off, "
            "standstill; a host and 6 peers",
            "all take part again {least_s:.1f} to {most_s:.1f} s after the last; one history, nobody blamed, nothing "
            "left behind",
            f"`{CHAOS.format(1)}`, with seeds 2 and 3 too",
        ),
    ),
    Entry(
        name="way back",
        commands=(Command("python -m pytest -rP tests/peer/state/test_way_back.py", ""),),
        read=_way_back,
        measures=("tests.peer.state.test_way_back", *DAEMON),
        minutes=1,
        row=Row(
            "a peer that missed {missed:.0f} versions",
            "back by results of {of_a_state:.2f} of a state's bytes ({of_a_state_restarted:.2f} for "
            "{missed_restarted:.0f} if it was started again), and nothing of a state; after 16 versions by a state",
        ),
    ),
    Entry(
        name="killed peer",
        commands=(Command("make soak TESTS=tests/peer/program/test_kill.py", ""),),
        read=tests_passed,
        measures=("tests.peer.program.test_kill", *SWARM),
        minutes=12,
        row=Row("a peer killed at a named moment", "the run ends normally, nothing is left behind"),
    ),
    Entry(
        name="rebalancing",
        commands=(Command("python -m benchmarks.churn.rebalancing_cost"),),
        read=_rebalancing,
        measures=("benchmarks.churn.rebalancing_cost",),
        minutes=0.2,
    ),
)
