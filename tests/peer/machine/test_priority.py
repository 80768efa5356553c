"""A daemon gives way by its niceness, and by its session's where that holds nothing else."""

import os
import subprocess
import sys

PROGRAM = """
import os, subprocess, sys
from peer.machine.priority import giving_way, session_nice
if sys.argv[1] == "with others":
    left = subprocess.Popen(["sh", "-c", "cat <&0 >/dev/null 2>&1 &"], stdin=subprocess.PIPE)
    left.wait()  # cat waits on, nobody's child
before = session_nice()
with giving_way(17):
    print(os.getpriority(os.PRIO_PROCESS, 0), session_nice())
with giving_way(13):
    print(os.getpriority(os.PRIO_PROCESS, 0))
print(before, session_nice(), flush=True)
"""


def said(case: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, case],
        start_new_session=True,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert not done.stderr
    return done.stdout.split()


def test_a_daemon_and_its_own_session_give_way_until_it_ends() -> None:
    nice, session, lesser, before, after = said("alone")
    assert nice == lesser == str(max(17, os.getpriority(os.PRIO_PROCESS, 0))), "whoever is nicer stays so"
    assert session == ("None" if before == "None" else "17")
    assert after == before


def test_a_session_that_others_work_in_is_left_as_it_is() -> None:
    nice, session, lesser, before, after = said("with others")
    assert nice == lesser == str(max(17, os.getpriority(os.PRIO_PROCESS, 0))), "whoever is nicer stays so"
    assert session == after == before
