"""The owner's limits hold: memory is refused with numbers before the start, megabits a second are kept to."""

import asyncio
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.owner import memory
from peer.directory.limited_transport import LimitedTransport, Meter
from peer.owner.limits import GIB, VolunteerSettings, check_fit, check_memory, first_that_fits, used_bytes
from peer.sim import TinyRun
from swarm.core.errors import SettingsError
from swarm.core.ids import PeerId
from swarm.core.pipeline.compute_mode import ComputeMode, modes
from swarm.core.plan import HEADERS, p2pd_bytes
from swarm.core.settings import BatchSettings
from swarm.identity.key import Identity
from swarm.network.memory import MemoryNetwork
from swarm.network.transport import Message
from tests.process_swarm import ProcessSwarm, Zygote

pytestmark = pytest.mark.processes


def test_a_stage_that_does_not_fit_is_refused_with_the_sum() -> None:
    with pytest.raises(SettingsError, match=r"needs .* GiB and --memory is .* GiB .*weights 1\.00 GiB.*--stage"):
        check_memory({"weights": GIB}, used_bytes() + GIB // 2)


def test_a_stage_that_fits_is_taken() -> None:
    p2pd = p2pd_bytes(1)
    check_memory({"libraries": 1 << 40, "p2pd": p2pd, "weights": 1 << 20}, used_bytes() + p2pd + (8 << 20))
    with pytest.raises(SettingsError, match=r"p2pd 0\.10 GiB"):
        check_memory({"p2pd": p2pd, "weights": 1 << 20}, used_bytes() + p2pd + (8 << 20), num_p2pd=2)


def test_a_peer_computes_as_many_samples_at_once_as_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peer.owner.limits._own_bytes", lambda: 1 << 28)
    monkeypatch.setattr("peer.owner.limits._started_bytes", lambda: 0)
    wanted = modes(replace(TinyRun().settings(), batch=BatchSettings(microbatch_size=6, target_tokens=6)))
    sizes = {mode: (mode.samples_at_once * (1 if mode.recompute else 4)) << 26 for mode in wanted}
    assert [(mode.samples_at_once, mode.recompute) for mode in sizes] == [
        (6, False),
        (6, True),
        (3, True),
        (2, True),
        (1, True),
    ]

    def chosen(room: int) -> ComputeMode:
        volunteer = VolunteerSettings(folder=tmp_path, threads=1, memory_bytes=(1 << 28) + (room << 26))
        return first_that_fits(sizes, lambda mode: {"host.activations": sizes[mode]}, volunteer)

    assert chosen(24) == ComputeMode(6, recompute=False)
    assert chosen(6) == ComputeMode(6, recompute=True)
    assert chosen(2) == ComputeMode(2, recompute=True)
    with pytest.raises(SettingsError, match=r"activations 0\.06 GiB"):
        chosen(0)


def test_tokens_that_the_disk_may_not_hold_are_refused_before_they_are_fetched(tmp_path: Path) -> None:
    volunteer = VolunteerSettings(folder=tmp_path, threads=1, disk_bytes=GIB)
    check_fit({"disk.the run's tokens": GIB // 2, "disk.states": GIB // 4}, volunteer)
    with pytest.raises(SettingsError, match=r"--disk-gib is 1\.00 GiB \(the run's tokens 2\.00 GiB"):
        check_fit({"disk.the run's tokens": 2 * GIB}, volunteer)


def _seconds(upload_mbit: float | None, download_mbit: float | None) -> float:
    """How long 400 KB there and 400 KB back take one limited peer."""

    async def main() -> float:
        network = MemoryNetwork(random.Random(0))
        one, other = Identity.generate(), Identity.generate()
        limited = LimitedTransport(network.transport(one), upload_mbit=upload_mbit, download_mbit=download_mbit)
        far = network.transport(other)

        async def echo(sender: PeerId, request: Message) -> Message:
            return Message({}, bytes(request.body))

        far.serve("echo", echo, max_body_bytes=1 << 20)
        started = time.monotonic()
        for _ in range(4):
            request = Message({}, bytes(100_000))
            await limited.call(other.peer_id, "echo", request, timeout_s=30, max_body_bytes=1 << 20)
        return time.monotonic() - started

    return asyncio.run(main())


@pytest.mark.parametrize(("up", "down"), [(2.0, None), (None, 2.0)])
def test_megabits_a_second_are_kept_to(up: float | None, down: float | None) -> None:
    # 400 KB are 3.2 Mbit: 1.6 s at 2 Mbit/s, of which up to a second's worth may go at once.
    assert _seconds(up, down) >= 0.55
    assert _seconds(None, None) < 0.55


def test_small_calls_overtake_bulk_in_the_owners_rate_limiter() -> None:
    async def main() -> tuple[float, float]:
        network = MemoryNetwork(random.Random(0))
        one, other = Identity.generate(), Identity.generate()
        limited = LimitedTransport(network.transport(one), upload_mbit=0.8, download_mbit=None)  # 100 kB/s
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

    small_s, bulk_s = asyncio.run(main())
    assert bulk_s > 0.8
    assert small_s < 0.4


def test_a_meter_makes_up_for_what_moved_unasked() -> None:
    """100 bodies of 10 kB with 5 kB more on the line each take what 1.5 MB take, but for the first second's burst."""
    now, moved = 0.0, 0
    meter = Meter(0.8, lambda: moved, clock=lambda: now)  # 100 kB/s
    for _ in range(100):
        now += max(0.0, meter.book(10_000))
        moved += 15_000
    assert now == pytest.approx(1_500_000 * HEADERS / 100_000, rel=0.02)


def test_bytes_that_do_not_move_are_given_back() -> None:
    async def main() -> float:
        meter = Meter(0.8, lambda: 0)
        meter.book(100_000)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await meter.take(10_000_000)
        return meter.book(0)

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
