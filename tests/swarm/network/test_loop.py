"""A program is signalled and its end watched."""

import asyncio
import resource
import select
import signal
import subprocess
import sys
import threading

import pytest

from swarm.network.loop import OPEN_FILES, in_thread_to_its_end, run

PROGRAM = """
import asyncio
from swarm.network.loop import in_thread_to_its_end, run

async def main(stop):
    try:
        print("ready", flush=True)
        await stop.wait()
        print("draining", flush=True)
        if {patient}:
            await asyncio.Event().wait()
        return 7
    finally:
        print("cleaned up", flush=True)

print("returned", run(main, terminated_s={terminated_s}), flush=True)
"""


def expect(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], 120)[0], f"no {line!r} came"
    assert process.stdout.readline() == line + "\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_is_a_request(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(patient=False, terminated_s=60)], stdout=subprocess.PIPE, text=True
    ) as process:
        expect(process, "ready")
        process.send_signal(number)
        for line in ("draining", "cleaned up", "returned 7"):
            expect(process, line)
        assert process.wait(120) == 0


def test_second_signal_cancels() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(patient=True, terminated_s=None)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        expect(process, "ready")
        process.send_signal(signal.SIGTERM)
        expect(process, "draining")
        process.send_signal(signal.SIGTERM)
        expect(process, "cleaned up")
        _, errors = process.communicate(timeout=120)
        assert process.returncode != 0
        assert "KeyboardInterrupt" in errors


def test_who_is_terminated_and_goes_on_draining_is_cancelled() -> None:
    program = PROGRAM.format(patient=True, terminated_s=0.2)
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        expect(process, "ready")
        process.send_signal(signal.SIGTERM)
        for line in ("draining", "cleaned up"):
            expect(process, line)
        _, errors = process.communicate(timeout=120)
        assert "KeyboardInterrupt" in errors


def test_result_and_errors_of_main_come_through() -> None:
    async def answer(_: asyncio.Event) -> int:
        return 42

    async def fail(_: asyncio.Event) -> None:
        raise LookupError("here")

    assert run(answer) == 42
    with pytest.raises(LookupError, match="here"):
        run(fail)


def test_who_is_cancelled_waits_for_the_end_of_its_thread() -> None:
    """A peer that left while it was fitted in took its place in the room after it had given it back."""
    begun, may_end = threading.Event(), threading.Event()
    came = list[str]()

    def takes() -> None:
        begun.set()
        may_end.wait(10.0)
        came.append("taken")

    async def joins() -> None:
        try:
            await in_thread_to_its_end(takes)
        finally:
            came.append("left")

    async def main() -> None:
        joining = asyncio.ensure_future(joins())
        await asyncio.to_thread(begun.wait, 10.0)
        joining.cancel()
        asyncio.get_running_loop().call_later(0.05, may_end.set)
        await asyncio.gather(joining, return_exceptions=True)
        assert joining.cancelled()

    asyncio.run(main())
    assert came == ["taken", "left"]


def test_a_program_may_have_as_many_files_open_as_a_crowd_of_streams_takes() -> None:
    async def limit(_: asyncio.Event) -> int:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
        assert run(limit) == wanted
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        assert run(limit) == hard, "what is more stays"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
