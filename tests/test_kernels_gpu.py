"""The GPU's kernels write the bytes of the CPU's: in Triton's interpreter, and on a GPU where there is one."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu_outputs import NUM_REFUSED, REFUSED, by_cpu

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason='triton, 1 GB when unpacked, is not installed: pip install -e ".[gpu]"',
)
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize(("device", "interpret"), [("cpu", "1"), pytest.param("cuda", "0", marks=on_a_gpu)])
def test_bytes_equal_those_of_the_cpu(device: str, interpret: str) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "tests.gpu_outputs", device],
        env={**os.environ, "TRITON_INTERPRET": interpret},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr[-2000:]
    expected = by_cpu()
    assert json.loads(answer.stdout) == expected
    assert sum(digest == REFUSED for digest in expected.values()) == NUM_REFUSED
