"""What is large goes back to the system when it is freed, whatever was freed before it."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, json, resource
from swarm.memory.allocator import return_large_blocks

def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

told = return_large_blocks()
before = resident()
for _ in range(3):  # blocks as large as those of which glibc would keep some after the first
    held = [bytearray(b"x" * (6 << 20)) for _ in range(16)]
    kept = held[1::4]
    del held
print(json.dumps([told, before, resident()]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc is told")
def test_large_blocks_go_back() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=200)
    told, before, after = json.loads(done.stdout)
    assert told
    assert after - before < (4 * 6 + 8) << 20
