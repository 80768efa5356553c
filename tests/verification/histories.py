"""What a run left on disk, read by tests: whether it has one history, or two.

What a peer really went through is in its vote log: the name of every round that it began of its own stage, and that it
signed in as a witness of its neighbours'. A round's name is a hash of the version that it starts from, and a version's
of the one before and of the result, so a fork would leave a name there that does not follow from the host's ledger.
"""

import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bootstrap.program.ledger import Ledger
from swarm.core.ids import StageIndex, Step
from swarm.core.round.basis import round_name
from swarm.core.state.stage_chain import Genesis
from tests.process_swarm import ProcessSwarm

IN_FLIGHT_NAMES = 2
"""A round of the peer's own stage and one of its neighbours' may be certified when its line breaks."""


def names_begun(root: Path, who: str) -> list[str]:
    """Names of the rounds that the process began or witnessed, oldest first."""
    folder = root / who
    found = [*folder.glob("voted.log"), *folder.glob("runs/*/voted-*.log")]
    return [line for log in found for line in log.read_text().splitlines() if len(line) == 64]


def names_certified(root: Path) -> dict[tuple[int, int], str]:
    """Of the rounds that start from what the host's ledger has, by stage and version."""
    ledger = Ledger(root / "host" / "ledger.sqlite")
    try:
        names: dict[tuple[int, int], str] = {}
        for event in ledger.events("genesis", "result"):
            if event.kind == "genesis":
                genesis = Genesis.from_value(event.facts)
                key, name = (int(genesis.stage), int(genesis.version)), genesis.basis.name
            else:
                assert isinstance(event.facts, dict)
                stage, step, made = (event.facts[field] for field in ("stage", "step", "name"))
                assert isinstance(stage, int)
                assert isinstance(step, int)
                assert isinstance(made, bytes)
                key, name = (stage, step + 1), made
            assert key not in names, f"the host knows two outcomes of stage {key[0]} version {key[1]}"
            names[key] = round_name(StageIndex(key[0]), Step(key[1]), name).hex()
        return names
    finally:
        ledger.close()


def strange_names(root: Path, who: str, certified: Iterable[str]) -> list[str]:
    """Names that the process went on from and that were never certified, but for what it had in flight at its end."""
    known, begun = set(certified), names_begun(root, who)
    settled = max((at for at, name in enumerate(begun) if name in known), default=-1) + 1
    in_flight = begun[settled:][:IN_FLIGHT_NAMES]
    return [name for name in begun if name not in known and name not in in_flight]


def states_on_disk(root: Path, peers: Iterable[str]) -> dict[tuple[int, int], dict[str, bytes]]:
    """By stage and version: by peer, the bytes of the state it has kept."""
    found: dict[tuple[int, int], dict[str, bytes]] = defaultdict(dict)
    for name in peers:
        for path in (root / name).glob("runs/*/snapshots-*/stage-*.state"):
            _, stage, _, version = path.stem.split("-")
            found[int(stage), int(version)][name] = path.read_bytes()
    return dict(found)


def ids_by_step(root: Path) -> dict[int, list[int]]:
    """Microbatches of stage 0's rosters, as the host's ledger has them."""
    ledger = Ledger(root / "host" / "ledger.sqlite")
    found: dict[int, list[int]] = {}
    for event in ledger.events("result"):
        facts: Any = event.facts
        if facts["stage"] == 0:
            found[facts["step"]] = list(facts["ids"])  # a step done again after a resume replaces the lost one
    ledger.close()
    return found


def wait_until_it_votes(swarm: ProcessSwarm, name: str, *, timeout_s: float) -> None:
    """Until the peer takes part in the rounds of its stage, again perhaps."""
    give_up_at = time.monotonic() + timeout_s
    pause = threading.Event()
    known = set(names_begun(swarm.root, name))
    while len(set(names_begun(swarm.root, name)) - known) <= IN_FLIGHT_NAMES:
        assert time.monotonic() < give_up_at, f"{name} has not voted for {timeout_s:.0f} s"
        pause.wait(0.1)


def unrecorded(root: Path, peers: Iterable[str], certified: Iterable[str]) -> dict[str, set[str]]:
    """By process: names that it has begun from and that the host's ledger does not hold, or not yet."""
    known = set(certified)
    found = {who: set(names_begun(root, who)) - known for who in ("host", *peers)}
    return {who: names for who, names in found.items() if names}


def wait_until_recorded(swarm: ProcessSwarm, *, timeout_s: float) -> None:
    """Until the host, which may have been cut off, has caught up with what has been begun from by now.

    Where the swarm has forked it never does.
    """
    give_up_at = time.monotonic() + timeout_s
    pause = threading.Event()
    missing = unrecorded(swarm.root, swarm.peers, names_certified(swarm.root).values())
    while missing:
        assert time.monotonic() < give_up_at, f"not in the host's ledger after {timeout_s:.0f} s: {missing}"
        pause.wait(0.5)
        known = set(names_certified(swarm.root).values())
        missing = {who: left for who, names in missing.items() if (left := names - known)}


def end_with_one_history(swarm: ProcessSwarm) -> None:
    """The peers leave, the host last; what they have left on disk is of one history."""
    zygote, root = swarm.zygote, swarm.root
    for pid in swarm.peers.values():
        os.kill(pid, signal.SIGTERM)
    for name, pid in swarm.peers.items():
        assert zygote.exit_code(pid, timeout_s=40) == 0, f"{name} did not end well"
    os.kill(swarm.host, signal.SIGTERM)
    assert zygote.exit_code(swarm.host, timeout_s=40) == 0
    certified = set(names_certified(root).values())
    for who in ("host", *swarm.peers):
        assert not strange_names(root, who, certified), f"{who} went on from what was never certified"
    for key, states in states_on_disk(root, swarm.peers).items():
        assert len(set(states.values())) == 1, f"replicas differ at {key}: {sorted(states)}"
    used = [number for numbers in ids_by_step(root).values() for number in numbers]
    assert len(used) == len(set(used)), "a sample was used twice"
    said = [event["event"] for event in swarm.events()]
    assert not {"banned", "quarantined"} & set(said)
    for log in root.glob("*.log"):
        assert "equivocation" not in log.read_text(), f"{log.stem} blames somebody"
