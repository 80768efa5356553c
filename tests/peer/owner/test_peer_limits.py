"""The owner's limits hold: memory is refused with numbers before the start, megabits a second are kept to."""

import asyncio
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.owner import memory
from peer.directory.limited_transport import LimitedTransport
from peer.directory.line import Line, Meter, Taker
from peer.machine.load import folder_bytes
from peer.machine.memory import most_bytes
from peer.owner.limits import GIB, VolunteerSettings, own_bytes, used_bytes
from peer.owner.room import SETTLE_S, Room
from peer.sim import TinyRun
from swarm.core.errors import NotFreeError, SettingsError
from swarm.core.ids import PeerId
from swarm.core.pipeline.compute_mode import ComputeMode, modes
from swarm.core.plan import HEADERS, p2pd_bytes
from swarm.core.settings import BatchSettings
from swarm.identity.key import Identity
from swarm.network.memory import MemoryNetwork
from swarm.network.transport import Message
from tests.process_swarm import ProcessSwarm, Zygote

pytestmark = pytest.mark.processes


def volunteer(folder: Path) -> VolunteerSettings:
    return VolunteerSettings(folder=folder, threads=1)


ONE, OTHER = (Identity.from_seed(bytes([number]) * 32).peer_id for number in (1, 2))


P2PD_BYTES = p2pd_bytes(1)


def room(folder: Path, memory_bytes: int | None = None, disk_bytes: int | None = None, num_p2pd: int = 1) -> Room:
    return Room(folder, memory_bytes=memory_bytes, disk_bytes=disk_bytes, num_p2pd=num_p2pd)


def test_a_stage_that_does_not_fit_is_refused_with_the_sum(tmp_path: Path) -> None:
    with pytest.raises(
        SettingsError, match=r"needs .* GiB of memory and --memory is .* GiB .*weights 1\.00 GiB.*--stage"
    ):
        room(tmp_path, used_bytes() + GIB // 2).take(ONE, 0, {"host.weights": GIB}, volunteer(tmp_path))


def test_what_others_hold_is_told_from_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peer.owner.room.free_bytes", lambda: 0)
    most = most_bytes()
    with pytest.raises(NotFreeError, match=r"free memory is .*end what else takes it"):
        room(tmp_path).take(ONE, 0, {"host.weights": most // 2}, volunteer(tmp_path))
    for allowed, needed in ((None, most), (used_bytes() + most // 4, most // 2)):
        with pytest.raises(SettingsError, match=r"allow more") as refused:
            room(tmp_path, allowed).take(ONE, 0, {"host.weights": needed}, volunteer(tmp_path))
        assert not isinstance(refused.value, NotFreeError), "no waiting mends it"


def test_a_stage_that_fits_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peer.owner.room.started_bytes", lambda: 0)
    items = {"host.libraries": 1 << 40, "host.p2pd": P2PD_BYTES, "host.weights": 1 << 20}
    allowed = own_bytes() + P2PD_BYTES + (8 << 20)
    room(tmp_path, allowed).take(ONE, 0, items, volunteer(tmp_path))
    with pytest.raises(SettingsError, match=r"p2pd 0\.13 GiB"):
        room(tmp_path, allowed, num_p2pd=2).take(ONE, 0, items, volunteer(tmp_path))


def test_a_peer_computes_as_many_samples_at_once_as_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peer.owner.room.own_bytes", lambda: 1 << 28)
    monkeypatch.setattr("peer.owner.room.started_bytes", lambda: 0)
    wanted = modes(replace(TinyRun().settings(), batch=BatchSettings(microbatch_size=6, target_tokens=6)))
    sizes = {mode: (mode.samples_at_once * (1 if mode.recompute else 4)) << 26 for mode in wanted}
    assert [(mode.samples_at_once, mode.recompute) for mode in sizes] == [
        (6, False),
        (6, True),
        (3, True),
        (2, True),
        (1, True),
    ]

    def chosen(left: int) -> ComputeMode:
        for_one = room(tmp_path, (1 << 28) + (left << 26))
        items = {mode: {"host.activations": size} for mode, size in sizes.items()}
        return for_one.first_that_fits(ONE, 0, sizes, items.__getitem__, volunteer(tmp_path))

    assert chosen(24) == ComputeMode(6, recompute=False)
    assert chosen(6) == ComputeMode(6, recompute=True)
    assert chosen(2) == ComputeMode(2, recompute=True)
    with pytest.raises(SettingsError, match=r"activations 0\.06 GiB"):
        chosen(0)


def test_tokens_that_the_disk_may_not_hold_are_refused_before_they_are_fetched(tmp_path: Path) -> None:
    of_one = room(tmp_path, disk_bytes=GIB)
    of_one.take(ONE, 0, {"disk.the run's tokens": GIB // 2, "disk.states": GIB // 4}, volunteer(tmp_path))
    with pytest.raises(SettingsError, match=r"--disk-gib is 1\.00 GiB \(the run's tokens 2\.00 GiB"):
        of_one.take(ONE, 0, {"disk.the run's tokens": 2 * GIB}, volunteer(tmp_path))


def test_other_runs_in_the_folder_count_for_its_limit(tmp_path: Path) -> None:
    """They do for the guest that keeps to it: a peer that joins beside them would go away at once."""
    own, other = tmp_path / "runs" / "own", tmp_path / "runs" / "other"
    for folder, num_bytes in ((own, 3 << 20), (other, 6 << 20)):
        folder.mkdir(parents=True)
        (folder / "tokens").write_bytes(bytes(num_bytes))
    held, needs = folder_bytes(own), {"disk.states": 5 << 20}
    with pytest.raises(SettingsError, match=rf"what else is in {tmp_path}, where you may delete other runs, 0\.01 GiB"):
        room(tmp_path, disk_bytes=10 << 20).take(ONE, 0, needs, volunteer(tmp_path), held_bytes=held)
    room(tmp_path, disk_bytes=12 << 20).take(ONE, 0, needs, volunteer(tmp_path), held_bytes=held)


def test_peers_of_a_daemon_are_fitted_in_beside_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever of it they hold already; and what one stage has once counts once."""
    held = [1 << 28]
    monkeypatch.setattr("peer.owner.room.own_bytes", lambda: held[0])
    monkeypatch.setattr("peer.owner.room.started_bytes", lambda: 0)
    of_two = room(tmp_path, (1 << 28) + 2 * P2PD_BYTES + GIB, GIB, num_p2pd=2)
    needs = {
        "host.libraries": 1 << 40,
        "host.p2pd": P2PD_BYTES,
        "host.weights": GIB // 2,
        "host.frozen base": GIB // 8,
        "disk.the run's tokens": GIB // 2,
    }
    of_two.take(ONE, 0, needs, volunteer(tmp_path))
    held[0] += GIB // 4
    with pytest.raises(SettingsError, match=r"libraries 0\.25 GiB; .*weights 0\.50 GiB; .*the other peers 0\.62 GiB"):
        of_two.take(OTHER, 1, needs, volunteer(tmp_path))
    with pytest.raises(SettingsError, match=r"--disk-gib is 1\.00 GiB .*the other peers 0\.50 GiB"):
        of_two.take(OTHER, 1, {"disk.the run's tokens": GIB // 2 + 1}, volunteer(tmp_path))
    fits = needs | {"host.weights": GIB // 4 + GIB // 8}
    of_two.take(OTHER, 0, fits, volunteer(tmp_path))
    of_two.leave(ONE)
    of_two.take(OTHER, 1, needs, volunteer(tmp_path))


def test_what_a_peer_holds_of_its_last_stage_is_not_taken_for_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would count twice for whoever comes beside it: as libraries, and as the peer's."""
    held = [GIB // 4]
    monkeypatch.setattr("peer.owner.room.own_bytes", lambda: held[0])
    monkeypatch.setattr("peer.owner.room.started_bytes", lambda: 0)
    of_two = room(tmp_path, GIB // 4 + 2 * GIB)
    of_two.take(ONE, 0, {"host.weights": GIB}, volunteer(tmp_path))
    held[0] += GIB
    of_two.take(ONE, 1, {"host.weights": GIB}, volunteer(tmp_path))
    of_two.take(OTHER, 0, {"host.weights": GIB}, volunteer(tmp_path))


def test_of_peers_that_hold_too_much_the_last_that_came_goes_and_then_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, used = [1000.0], [0]
    monkeypatch.setattr("peer.owner.room.used_bytes", lambda: used[0])
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    of_two = room(tmp_path, 4 * GIB)
    for peer in (ONE, OTHER):
        of_two.take(peer, 0, {}, volunteer(tmp_path))
    assert not of_two.asks_to_leave(OTHER)
    used[0] = 5 * GIB
    assert not of_two.asks_to_leave(ONE)
    assert "holds 5.00 GiB, more than --memory 4.00" in of_two.asks_to_leave(OTHER)
    of_two.leave(OTHER)
    assert not of_two.asks_to_leave(ONE)
    now[0] += SETTLE_S
    assert of_two.asks_to_leave(ONE)


def _seconds(upload_mbit: float | None, download_mbit: float | None, num_peers: int = 1) -> float:
    """How long 400 KB there and 400 KB back take one limited peer, or several of one daemon together."""

    async def main() -> float:
        network = MemoryNetwork(random.Random(0))
        other, line = Identity.generate(), Line(upload_mbit=upload_mbit, download_mbit=download_mbit)
        limited = [LimitedTransport(network.transport(Identity.generate()), line) for _ in range(num_peers)]
        far = network.transport(other)

        async def echo(sender: PeerId, request: Message) -> Message:
            return Message({}, bytes(request.body))

        far.serve("echo", echo, max_body_bytes=1 << 20)
        started = time.monotonic()
        for number in range(4):
            request, sender = Message({}, bytes(100_000)), limited[number % num_peers]
            await sender.call(other.peer_id, "echo", request, timeout_s=30, max_body_bytes=1 << 20)
        return time.monotonic() - started

    return asyncio.run(main())


@pytest.mark.parametrize(("up", "down", "num_peers"), [(2.0, None, 1), (None, 2.0, 2)])
def test_megabits_a_second_are_kept_to(up: float | None, down: float | None, num_peers: int) -> None:
    # 400 KB are 3.2 Mbit: 1.6 s at 2 Mbit/s, of which up to a second's worth may go at once.
    assert _seconds(up, down, num_peers) >= 0.55
    assert min(_seconds(None, None, num_peers) for _ in range(3)) < 0.55


def test_small_calls_overtake_bulk_in_the_owners_rate_limiter() -> None:
    async def main() -> tuple[float, float]:
        network = MemoryNetwork(random.Random(0))
        one, other = Identity.generate(), Identity.generate()
        limited = LimitedTransport(network.transport(one), Line(upload_mbit=0.8))  # 100 kB/s
        far = network.transport(other)

        async def echo(sender: PeerId, request: Message) -> Message:
            return Message()

        far.serve("echo", echo, max_body_bytes=1 << 20)

        async def call(num_bytes: int) -> float:
            started = time.monotonic()
            request = Message({}, bytes(num_bytes))
            await limited.call(other.peer_id, "echo", request, timeout_s=30, max_body_bytes=0)
            return time.monotonic() - started

        bulk = [asyncio.ensure_future(call(50_000)) for _ in range(4)]
        await asyncio.sleep(0)
        small_s = [await call(num_bytes) for num_bytes in (0, 100, 4096)]
        return max(small_s), max(await asyncio.gather(*bulk))

    for _ in range(3):  # where others have the processor the while, small calls take long too
        small_s, bulk_s = asyncio.run(main())
        if small_s < 0.4:
            break
    assert small_s < 0.4
    assert bulk_s > 0.8


def test_a_meter_makes_up_for_what_moved_unasked() -> None:
    """100 bodies of 10 kB with 5 kB more on the line each take what 1.5 MB take, but for the first second's burst."""
    now, moved = 0.0, 0
    taker = Taker(Meter(0.8, clock=lambda: now), lambda: moved)  # 100 kB/s
    for _ in range(100):
        now += max(0.0, taker.book(10_000))
        moved += 15_000
    assert now == pytest.approx(1_500_000 * HEADERS / 100_000, rel=0.02)


def test_bytes_that_do_not_move_are_given_back() -> None:
    async def main() -> float:
        taker = Taker(Meter(0.8), lambda: 0)
        taker.book(100_000)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await taker.take(10_000_000)
        return taker.book(0)

    assert asyncio.run(main()) < 2.0


def test_a_peer_refuses_a_run_that_does_not_fit_its_memory(zygote: Zygote, tmp_path: Path) -> None:
    with ProcessSwarm(zygote, tmp_path, founders=1) as swarm:
        swarm.start_host()
        address = swarm.wait_for("listening")["addresses"][0]
        argv = ["join", address, "--yes", "--dir", str(tmp_path / "p"), "--memory", "0.1", "--listen", "127.0.0.1:0"]
        pid = zygote.start(argv, tmp_path / "p.log")
        assert zygote.exit_code(pid, timeout_s=60) == 2
        said = (tmp_path / "p.log").read_text()
        assert "--memory is 0.10 GiB" in said
        assert "Traceback" not in said
    assert zygote.leftovers() == []


@pytest.mark.soak
@pytest.mark.parametrize("row", sorted(memory.ROWS))
def test_peers_under_load_hold_no_more_than_they_reckoned(tmp_path: Path, row: str) -> None:
    for peer in memory.measure(memory.options_of([]), tmp_path, memory.ROWS[row]).peers:
        reckoned, items = peer.reckoned()
        assert peer.all_bytes <= memory.BAR * reckoned, f"{peer.all_bytes / GIB:.3f} GiB: {items}"
        assert peer.p2pd_bytes <= p2pd_bytes(memory.PEERS)
