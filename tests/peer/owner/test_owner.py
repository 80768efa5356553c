"""The owner's side of a daemon: its service over a Unix socket, its folder, its counters and its log."""

import asyncio
import itertools
import json
import logging
import math
import os
import random
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import grpc
import pytest

from peer.machine.core_share import DaemonThreads
from peer.machine.cores import claim_cores
from peer.machine.load import folder_bytes, parse_pmon
from peer.owner.desk import OwnerDesk
from peer.owner.limits import VolunteerSettings
from peer.owner.log_lines import QUEUED_LINES, LogLines
from peer.owner.own_peer import OwnPeer
from peer.owner.usage import Usage
from peer.owner.view import show_top
from peer.program.state_folder import HeldFolder, StateFolder
from swarm.cli import ExitCode, run
from swarm.core.errors import NotRunningError, SettingsError
from swarm.core.owner.guest import Conduct
from swarm.core.owner.limits import OwnerLimits
from swarm.identity.key import Identity
from swarm.network.services.daemon_client import DaemonClient, daemon_client
from swarm.network.services.daemon_service import serve_owner_of_daemon
from swarm.proto import daemon_pb2 as pb


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path is short enough for a socket's."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def _served(
    short: Path,
    tmp_path: Path,
    use: Callable[[DaemonClient, OwnerDesk], Awaitable[None]],
    limits: OwnerLimits = OwnerLimits(),  # noqa: B008 - frozen
    end_now: Callable[[], object] = lambda: None,
) -> None:
    """A desk without a peer, served as a daemon does."""

    async def main() -> None:
        state = StateFolder(tmp_path / "state")
        with HeldFolder(state) as held:
            lines = LogLines()
            lines.setFormatter(logging.Formatter("%(message)s"))
            logger = logging.getLogger("peer")
            logger.addHandler(lines)
            logger.setLevel(logging.INFO)
            identity = Identity.from_seed(bytes(32))
            volunteer = VolunteerSettings(folder=state.path, threads=1)
            stop = asyncio.Event()
            threads = DaemonThreads(1)
            peers = [OwnPeer("", identity, volunteer, state.path, threads.of[0])]
            desk = OwnerDesk(peers, threads, state, limits, identity.peer_id, lines, stop, end_now)
            server = await serve_owner_of_daemon(desk, short)
            held.listens_at(server.path)
            assert stat.S_IMODE(server.path.stat().st_mode) == 0o600
            watching = asyncio.ensure_future(desk.watch())
            try:
                with daemon_client(state.running_at()) as client:
                    await use(client, desk)
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
                await server.close()
                logger.removeHandler(lines)
                logger.setLevel(logging.NOTSET)
            assert not server.path.exists()

    asyncio.run(main())


def test_pause_resume_and_leave_reach_the_desk(short: Path, tmp_path: Path) -> None:
    async def use(client: DaemonClient, desk: OwnerDesk) -> None:
        assert (await asyncio.to_thread(client.status)).state == "starting"
        told = await asyncio.to_thread(client.pause)
        assert desk.shared.permit.withheld
        await desk.look()
        told = await asyncio.to_thread(client.status)
        assert (told.state, told.reason) == ("paused", "you asked it to pause: `swarm resume` ends it")
        await asyncio.to_thread(client.resume)
        await desk.look()
        assert not desk.shared.permit.withheld
        assert (await asyncio.to_thread(lambda: client.leave(now=False))).state == "leaving"
        assert not ended_now.is_set()
        await asyncio.to_thread(lambda: client.leave(now=True))
        assert ended_now.is_set()

    ended_now = threading.Event()
    _served(short, tmp_path, use, end_now=ended_now.set)


def test_a_limit_holds_at_once_and_is_kept(short: Path, tmp_path: Path) -> None:
    async def use(client: DaemonClient, desk: OwnerDesk) -> None:
        await asyncio.to_thread(client.set_limit, "month-gb", "0.001")
        desk._usage.add(traffic_bytes=2_000_000, written_bytes=0, today=date.today())
        assert (await desk.look()).conduct is Conduct.AWAY
        told = await asyncio.to_thread(client.status)
        assert told.state == "away"
        assert told.reason.startswith("0.0 GB moved this month of 0.001")
        with pytest.raises(SettingsError, match="upload-mbit fast: give a number"):
            await asyncio.to_thread(client.set_limit, "upload-mbit", "fast")
        await asyncio.to_thread(client.set_limit, "threads", "1")
        await asyncio.to_thread(client.set_limit, "disk-gib", "40")
        assert desk.shared.room.disk_bytes == 40 << 30, "for whoever joins from now on"

    _served(short, tmp_path, use)
    state = StateFolder(tmp_path / "state")
    assert state.load_limits() == OwnerLimits(month_gb=0.001, threads=1, disk_gib=40.0)
    assert Usage.load(state.usage).month_bytes == 2_000_000


def test_what_is_relayed_counts_both_ways_and_ends_where_the_rate_is_limited(short: Path, tmp_path: Path) -> None:
    async def use(client: DaemonClient, desk: OwnerDesk) -> None:
        assert desk.relay_left_bytes() == 1_000_000
        desk.relayed(400_000)
        assert desk.relay_left_bytes() == 600_000
        assert desk._usage.month_bytes == 2 * 1.05 * 400_000
        await asyncio.to_thread(client.set_limit, "upload-mbit", "10")
        assert desk.shared.line.up.takes_s(10**7) == 8.0
        assert desk.relay_left_bytes() == 0
        told = {limit.name: limit.used for limit in (await asyncio.to_thread(client.limits)).limits}
        assert told["relay-gb"] == "0.00, no more while a rate is limited"

    _served(short, tmp_path, use, OwnerLimits(relay_gb=0.001))


def test_the_live_view_shows_one_status_after_another(
    short: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def use(client: DaemonClient, desk: OwnerDesk) -> None:
        await asyncio.to_thread(lambda: show_top(itertools.islice(client.watch(0.2), 2)))

    _served(short, tmp_path, use, OwnerLimits(upload_mbit=7.5))
    said = capsys.readouterr().out
    assert "STARTING" in said
    assert "7.5" in said
    assert "Ctrl-C ends this view, not the daemon" in said


def test_the_log_is_told_and_followed(short: Path, tmp_path: Path) -> None:
    async def use(client: DaemonClient, desk: OwnerDesk) -> None:
        for number in range(5):
            logging.getLogger("peer.test").info("line %d", number)
        await asyncio.sleep(0)
        assert [line.text for line in await asyncio.to_thread(lambda: list(client.logs(2, follow=False)))] == [
            "line 3",
            "line 4",
        ]

    _served(short, tmp_path, use)


def test_a_slow_follower_is_told_what_it_missed() -> None:
    async def main() -> None:
        lines = LogLines()
        followed = lines.lines(0, follow=True)
        first = asyncio.ensure_future(anext(followed))
        await asyncio.sleep(0)
        for number in range(QUEUED_LINES + 3):
            lines._take(f"line {number}")
        assert await first == ("line 3", 3)
        assert await anext(followed) == ("line 4", 0)

    asyncio.run(main())


def test_every_command_survives_garbage(short: Path, tmp_path: Path) -> None:
    """Random bytes, random fields and oversized ones, to every method: a status each time, and the daemon goes on."""
    service, rng = pb.DESCRIPTOR.services_by_name["Daemon"], random.Random(3)

    def request_to(kind: Any) -> bytes:
        message = getattr(pb, kind.name)()
        for field in kind.fields:
            if field.type == field.TYPE_STRING:
                setattr(message, field.name, rng.choice(["", "hours", "upload-mbit", "nan", "99:99-00:00", "x" * 9999]))
            elif field.type == field.TYPE_DOUBLE:
                setattr(message, field.name, rng.choice([math.nan, math.inf, -1.0, 0.2, 1e300]))
            elif field.type == field.TYPE_BOOL:
                setattr(message, field.name, rng.random() < 0.5)
            else:
                setattr(message, field.name, rng.choice([0, 7, 2**32 - 1]))
        return bytes(message.SerializeToString())

    def send(channel: grpc.Channel, method: str, data: bytes) -> grpc.StatusCode:
        call = channel.unary_stream(f"/{service.full_name}/{method}")(data, timeout=10)
        try:
            next(call, None)  # some streams never end
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
        finally:
            call.cancel()
        return grpc.StatusCode.OK

    def fuzz() -> None:
        with grpc.insecure_channel(f"unix:{short / 'owner.sock'}") as channel:
            for method in [method for method in service.methods if method.name != "Logs"] * 12:
                found = send(channel, method.name, request_to(method.input_type))
                assert found in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT), method.name
                found = send(channel, method.name, rng.randbytes(rng.randrange(1, 99)))
                # gRPC's own, to what is no message; by chance it is one.
                no_message = grpc.StatusCode.UNKNOWN
                assert found in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, no_message), method.name
            all_lines = pb.LogsRequest(last_lines=2**32 - 1).SerializeToString()
            assert send(channel, "Logs", all_lines) is grpc.StatusCode.OK
            many = pb.SetLimitRequest(name="x" * 100_000).SerializeToString()
            assert send(channel, "SetLimit", many) is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert send(channel, "Explode", b"") is grpc.StatusCode.UNIMPLEMENTED

    async def use(client: DaemonClient, desk: OwnerDesk) -> None:
        await asyncio.to_thread(fuzz)
        assert (await asyncio.to_thread(client.status)).state == "leaving"  # one of them asked it to

    _served(short, tmp_path, use)


def test_a_folder_is_held_by_one_daemon_at_a_time(tmp_path: Path) -> None:
    state = StateFolder(tmp_path)
    with HeldFolder(state), pytest.raises(SettingsError, match=rf"another daemon \(process {os.getpid()}\) runs there"):
        HeldFolder(state)
    with HeldFolder(state):
        pass


def test_a_folder_whose_lock_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    state = StateFolder(tmp_path)
    state.lock.mkdir()
    with pytest.raises(SettingsError, match=r"daemon\.lock cannot be opened .*name a folder of your own"):
        HeldFolder(state)


def test_what_a_dead_daemon_left_is_no_daemon(tmp_path: Path) -> None:
    state = StateFolder(tmp_path)
    state.lock.write_text(json.dumps({"pid": 1, "socket": "/nowhere"}))
    with pytest.raises(NotRunningError, match="no daemon is running in"):
        state.running_at()


@pytest.mark.parametrize("verb", ["status", "pause", "resume", "leave", "top", "logs"])
def test_a_command_without_a_daemon_has_an_exit_code_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    assert run([verb, "--dir", str(tmp_path)]) is ExitCode.NOT_RUNNING
    assert "no daemon is running in" in capsys.readouterr().err


def test_limits_are_set_without_a_daemon_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "upload-mbit", "7.5", "--dir", str(tmp_path)]) is ExitCode.OK
    assert run(["config", "upload-mbit", "--dir", str(tmp_path)]) is ExitCode.OK
    assert capsys.readouterr().out.endswith("7.5\n")
    assert run(["config", "--json", "--dir", str(tmp_path)]) is ExitCode.OK
    told = {limit["name"]: limit["value"] for limit in json.loads(capsys.readouterr().out)["limits"]}
    assert told["upload-mbit"] == "7.5"
    assert run(["config", "speed", "1", "--dir", str(tmp_path)]) is ExitCode.BAD_INPUT
    (tmp_path / "limits.json").write_text('{"upload-mbit": "much"}')
    assert run(["config", "--dir", str(tmp_path)]) is ExitCode.BAD_INPUT
    assert "limits.json" in capsys.readouterr().err


def test_usage_begins_anew_with_the_month_and_the_day(tmp_path: Path) -> None:
    usage = Usage()
    usage.add(traffic_bytes=5, written_bytes=7, today=date(2026, 11, 29))
    usage.add(traffic_bytes=5, written_bytes=7, today=date(2026, 11, 30))
    assert (usage.month_bytes, usage.written_today_bytes) == (10, 7)
    usage.save(tmp_path / "usage.json")
    again = Usage.load(tmp_path / "usage.json")
    assert again == usage
    again.add(traffic_bytes=1, written_bytes=1, today=date(2026, 12, 1))
    assert (again.month_bytes, again.written_today_bytes) == (1, 1)
    (tmp_path / "usage.json").write_text("{}")
    with pytest.raises(SettingsError, match="delete it to count from nothing"):
        Usage.load(tmp_path / "usage.json")


def test_the_folders_bytes_are_those_on_disk(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "file").write_bytes(bytes(100_000))
    assert 100_000 <= folder_bytes(tmp_path) <= 120_000


def test_other_programs_use_of_the_gpu_is_read() -> None:
    said = """# gpu         pid   type     sm    mem    enc    dec    command
# Idx           #    C/G      %      %      %      %    name
    0       1234     C     37      5      -      -    python
    0       4321     G      8      1      -      -    Xorg
    0       99       C      -      -      -      -    idle
"""
    assert parse_pmon(said, own_pid=1234) == 8.0
    assert parse_pmon(said, own_pid=1) == 45.0
    assert parse_pmon(said + "    1        77     C     44      1      -      -    game\n", own_pid=1234) == 44.0
    assert parse_pmon("", own_pid=1) is None


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity") or (os.cpu_count() or 1) < 2, reason="needs two cores")
def test_two_processes_take_different_cores(tmp_path: Path) -> None:
    for core in os.sched_getaffinity(0):
        (tmp_path / f"cpu{core}" / "topology").mkdir(parents=True)
    program = (
        "import os, pathlib, sys\nfrom peer.machine import cores\n"
        f"cores.CPUS = pathlib.Path({str(tmp_path)!r})\ncores.claim_cores(1)\n"
        "print(*sorted(os.sched_getaffinity(0)), flush=True)\nsys.stdin.read()"
    )
    with (
        subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1, text=True) as one,
        subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1, text=True) as other,
    ):
        assert one.stdout is not None
        assert other.stdout is not None
        taken = [one.stdout.readline().split(), other.stdout.readline().split()]
        one.communicate("")
        other.communicate("")
    assert [len(cores) for cores in taken] == [1, 1]
    assert taken[0] != taken[1] or len(os.sched_getaffinity(0)) < 2


def test_all_cores_are_claimed_by_nobody() -> None:
    assert claim_cores(10_000) == tuple(sorted(os.sched_getaffinity(0)))
