"""The network of a real run is cut in the middle of training: no two halves both finish a round; healed, all agree."""

import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from benchmarks.homes.namespaces import Namespaces, why_not
from tests.process_swarm import ProcessSwarm, Zygote
from tests.verification.histories import (
    IN_FLIGHT_NAMES,
    end_with_one_history,
    names_begun,
    names_certified,
    states_on_disk,
)

pytestmark = pytest.mark.processes

PEERS = ("p0a", "p0b", "p1a", "p1b")
LEASE_S = 4.0
"""As in the manifest: after this long the host names new voters for a stage that is silent."""
ENDLESS = 100_000
GOES_ON = 3
"""Versions that show that a side goes on."""

SPLITS: Mapping[str, tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]] = {
    # name: (groups, who goes on)
    "equal": ((("host", "p0a", "p1a"), ("p0b", "p1b")), ("p0a", "p1a")),  # by the run key's word
    "host alone": ((("host",), PEERS), PEERS),
    "one peer": ((("p0a",), ("host", "p0b", "p1a", "p1b")), ("p0b", "p1a", "p1b")),
    "nobody": ((("host",), ("p0a", "p1a"), ("p0b", "p1b")), ()),
    "stages apart": ((("host", "p0a", "p0b"), ("p1a", "p1b")), ()),
    "host and one": ((("host", "p0a"), ("p0b", "p1a", "p1b")), ()),
}


@pytest.fixture
def network() -> Iterator[Namespaces]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with Namespaces(("host", *PEERS)) as made:
        yield made


def check_one_history(swarm: ProcessSwarm, *, steps: int) -> None:
    """Every version has one name over all peers, and all peers ended with the same bytes."""
    names = names_certified(swarm.root)
    assert set(names) == {(stage, version) for stage in (0, 1) for version in range(steps + 1)}
    certified = set(names.values())
    for who in ("host", *PEERS):
        begun = names_begun(swarm.root, who)
        assert begun or who == "host", f"{who} voted in no round"
        strange = [name for name in begun if name not in certified]
        assert not strange, f"{who} went on from versions that were never certified: {strange}"
    held = states_on_disk(swarm.root, PEERS)
    for stage in (0, 1):
        states = held.get((stage, steps), {})
        assert sorted(states) == [f"p{stage}a", f"p{stage}b"], f"the final state is missing: {sorted(states)}"
        assert len(set(states.values())) == 1, f"replicas of stage {stage} differ"
    for name in ("host", *PEERS):
        assert "equivocation" not in (swarm.root / f"{name}.log").read_text(), f"{name} blames somebody"


def wait_until_begun(root: Path, who: str, *, more_than: int, timeout_s: float) -> None:
    give_up_at = time.monotonic() + timeout_s
    pause = threading.Event()
    while len(names_begun(root, who)) <= more_than:
        assert time.monotonic() < give_up_at, f"{who} did not go on within {timeout_s:.0f} s"
        pause.wait(0.05)


def wait_for_members(swarm: ProcessSwarm, peers: Sequence[str], *, timeout_s: float) -> None:
    """Until each of the peers votes in its stage's rounds again."""
    counts = {name: len(names_begun(swarm.root, name)) for name in peers}
    for name in peers:
        wait_until_begun(swarm.root, name, more_than=counts[name] + IN_FLIGHT_NAMES, timeout_s=timeout_s)


def run_and_split(
    zygote: Zygote, root: Path, network: Namespaces, split: str, *, steps: int | None, silence_s: float, all_see: bool
) -> None:
    """Cut, wait, heal. `all_see`: the cut lasts until whoever has a quorum has gone on.

    Without `steps` the run is not waited for: it ends when all take part again.
    """
    groups, goers = SPLITS[split]
    pausers = [name for name in PEERS if name not in goers]
    with ProcessSwarm(zygote, root, steps=steps or ENDLESS, every=20 if steps else ENDLESS, network=network) as swarm:
        swarm.start_host()
        swarm.start_founders()
        swarm.wait_for("version", version=3)
        network.cut(*groups)
        at_cut = {name: len(names_begun(root, name)) for name in PEERS}
        cut_at = time.monotonic()
        for name in goers if all_see else ():
            wait_until_begun(root, name, more_than=at_cut[name] + IN_FLIGHT_NAMES + GOES_ON, timeout_s=60)
        pause = threading.Event()
        while time.monotonic() < cut_at + silence_s:  # nobody goes on who must not: there is nothing to poll for
            pause.wait(0.1)
        for name in pausers:
            gone_on = len(names_begun(root, name)) - at_cut[name]
            assert gone_on <= IN_FLIGHT_NAMES, f"{name} went on by {gone_on} versions without a quorum"
        network.heal()
        wait_for_members(swarm, pausers, timeout_s=60)
        if steps is None:
            end_with_one_history(swarm)
        else:
            report = swarm.finish(timeout_s=480)
            for name, pid in swarm.peers.items():
                assert zygote.exit_code(pid, timeout_s=30) == 0, f"{name} did not end well"
            assert report["steps"] == steps
            check_one_history(swarm, steps=steps)
    assert zygote.leftovers() == []


@pytest.mark.soak
def test_no_half_without_the_hosts_word_goes_on_when_the_network_splits(
    zygote: Zygote, tmp_path: Path, network: Namespaces
) -> None:
    run_and_split(zygote, tmp_path, network, "equal", steps=40, silence_s=1.5 * LEASE_S, all_see=False)


@pytest.mark.soak
@pytest.mark.drawn(5)
@pytest.mark.parametrize("silence_s", [2.0, 2 * LEASE_S, 30.0])
@pytest.mark.parametrize("split", sorted(SPLITS))
def test_two_halves_never_both_finish_a_round(
    zygote: Zygote, tmp_path: Path, network: Namespaces, split: str, silence_s: float
) -> None:
    steps = 60 + round(12 * silence_s)  # so many that the side that goes on alone does not end the run before it heals
    run_and_split(zygote, tmp_path, network, split, steps=steps, silence_s=silence_s, all_see=True)


@pytest.mark.soak
@pytest.mark.parametrize("split", ["equal", "nobody", "one peer"])
def test_after_a_minute_apart_all_are_of_one_history(
    zygote: Zygote, tmp_path: Path, network: Namespaces, split: str
) -> None:
    run_and_split(zygote, tmp_path, network, split, steps=None, silence_s=60.0, all_see=True)


def run_and_restart(zygote: Zygote, root: Path, *, victim: str, moment: str, count: int) -> None:
    """Killed at the moment and started again at once with the same identity, in a run that is not over until then."""
    steps = 64
    with ProcessSwarm(zygote, root, steps=steps, every=64) as swarm:
        swarm.start_host()
        swarm.start_founders(**{victim: {"moment": moment, "count": count}})
        assert zygote.exit_code(swarm.peers[victim], timeout_s=60) == -signal.SIGKILL
        swarm.start_peer(victim, int(victim[1]))
        report = swarm.finish(timeout_s=120)
        for name, pid in swarm.peers.items():
            assert zygote.exit_code(pid, timeout_s=30) == 0, f"{name} did not end well"
        assert report["steps"] == steps
        check_one_history(swarm, steps=steps)
    assert zygote.leftovers() == []


@pytest.mark.soak
def test_a_peer_restarted_in_mid_round_is_never_taken_for_an_equivocator(zygote: Zygote, tmp_path: Path) -> None:
    run_and_restart(zygote, tmp_path, victim="p0a", moment="ballot", count=3)


@pytest.mark.soak
@pytest.mark.drawn(6)
@pytest.mark.parametrize("victim", ["p0a", "p1b"])
@pytest.mark.parametrize(
    "moment", ["closing", "closed", "committed", "ballot", "vote", "roster", "part", "aggregated", "result", "step"]
)
def test_a_peer_restarted_anywhere_in_a_round_is_never_taken_for_an_equivocator(
    zygote: Zygote, tmp_path: Path, victim: str, moment: str
) -> None:
    run_and_restart(zygote, tmp_path, victim=victim, moment=moment, count=3)
