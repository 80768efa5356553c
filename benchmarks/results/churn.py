"""Figures of peers that come and go, of networks that break, and of a host under load."""

import re
from collections.abc import Sequence

from benchmarks.results.entry import DAEMON, SWARM, Command, Entry, Figures, NotAsStatedError, Row, must, object_of
from benchmarks.results.entry import passed as tests_passed

MISSED = re.compile(r"missed (\d+) versions\nreceived (\d+) bytes of results' parts and (\d+) of (\d+) bytes of state")


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
    outcome = object_of(answers[0])
    must(not outcome["problem"], "one history, nobody blamed, nothing left behind")
    must(not outcome["left_out"], "all kinds of faults are drawn")
    return {"faults": len(outcome["faults"]), "recovered_s": outcome["recovered_s"]}


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


CHURN = (
    Entry(
        name="coordinator load",
        commands=(Command("python -m benchmarks.churn.coordinator_load"),),
        read=_coordinator,
        measures=("benchmarks.churn.coordinator_load",),
        minutes=1,
        rows=(
            Row(
                "200 volunteers polling one coordinator over TLS",
                "{median_ms:.1f} ms in the median, no errors in {calls:.0f} calls",
            ),
        ),
    ),
    Entry(
        name="kills",
        commands=(Command("python -m benchmarks.churn.kills --minutes 2.5 --calm-s 40"),),
        read=_kills,
        measures=("benchmarks.churn.kills", "benchmarks.homes.paced_peer", *SWARM),
        minutes=4.5,
        rows=(
            Row(
                "2 stages x 3 peers of fixed speed, one killed and one started every 20 s for 2.5 minutes",
                "{of_undisturbed:.2f} of the undisturbed throughput for each live peer; {kills:.0f} kills, back at the "
                "living's rate after {back_median_s:.1f} s in the median, {back_worst_s:.1f} at worst; no round lost, "
                "replicas equal",
            ),
        ),
    ),
    Entry(
        name="split network",
        commands=(Command("make soak TESTS=\"-k 'minute and equal' tests/peer/directory/test_split.py\"", ""),),
        read=tests_passed,
        measures=("tests.peer.directory.test_split", *SWARM),
        minutes=2,
        rows=(
            Row(
                "a network cut into two equal halves for a minute in mid-training",
                "no two halves both finish a round; healed, all are of one history",
            ),
        ),
    ),
    Entry(
        name="hardship",
        commands=(Command("make soak TESTS=tests/test_hardship.py", ""),),
        read=tests_passed,
        measures=("tests.test_hardship", *SWARM),
        minutes=5,
        rows=(
            Row(
                "a wrong clock, a full disk (a peer's, the host's), half a minute's standstill",
                "told, waited for, and over without a person's help; one history",
            ),
        ),
    ),
    Entry(
        name="chaos",
        commands=(Command("python -m tests.chaos --seed 1 --minutes 1.25"),),
        read=_chaos,
        measures=("tests.chaos", *SWARM),
        minutes=3,
        rows=(
            Row(
                "{faults:.0f} faults of one seed, drawn: kills, cuts, thin lines, full disks, clocks a minute off, "
                "standstill; a host and 6 peers",
                "all take part again {recovered_s:.1f} s after the last; one history, nobody blamed, nothing left "
                "behind",
            ),
        ),
    ),
    Entry(
        name="way back",
        commands=(Command("python -m pytest -rP tests/peer/state/test_way_back.py", ""),),
        read=_way_back,
        measures=("tests.peer.state.test_way_back", *DAEMON),
        minutes=1,
        rows=(
            Row(
                "a peer that missed {missed:.0f} versions",
                "back by results of {of_a_state:.2f} of a state's bytes ({of_a_state_restarted:.2f} for "
                "{missed_restarted:.0f} if it was started again), and nothing of a state; after 16 versions by a state",
            ),
        ),
    ),
    Entry(
        name="killed peer",
        commands=(Command('make soak TESTS="-k any_kill tests/peer/program/test_kill.py"', ""),),
        read=tests_passed,
        measures=("tests.peer.program.test_kill", *SWARM),
        minutes=4,
        rows=(Row("a peer killed at a drawn moment, {passed:.0f} runs", "each ends normally, nothing is left behind"),),
    ),
)
