"""Every kernel writes the golden bits, whatever the threads and the instruction set."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.threads import Threads
from tests import ROOT
from tests.kernels.outputs import digests

GOLDEN = json.loads((ROOT / "tests" / "kernels" / "golden.json").read_text(encoding="utf-8"))

NO_AVX512 = {
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": "+avx2,+fma,+bmi,+bmi2,+lzcnt,+popcnt,+f16c",
    "NPY_DISABLE_CPU_FEATURES": "AVX512F,AVX512CD,AVX512_SKX",
}
NO_AVX2 = {
    "NUMBA_CPU_NAME": "generic",
    "NUMBA_CPU_FEATURES": "",
    "NPY_DISABLE_CPU_FEATURES": "AVX512F,AVX512CD,AVX512_SKX,AVX2,FMA3",
}


@pytest.mark.parametrize("count", [1, 2, 4])
def test_kernels_write_the_golden_bits_when_threads_share_the_work(count: int) -> None:
    assert digests(Threads(count)) == GOLDEN


@pytest.mark.soak
@pytest.mark.parametrize(
    "masked",
    [pytest.param(NO_AVX512, id="without-avx512"), pytest.param(NO_AVX2, id="without-avx2")],
)
def test_kernels_write_the_golden_bits_when_the_instruction_set_is_another(
    masked: dict[str, str], pytestconfig: pytest.Config
) -> None:
    """LLVM vectorises differently without them, or with no fused multiply-add at hand. Compiled once, then kept."""
    if masked is NO_AVX512 and not _has_avx2():
        pytest.skip("this machine has no AVX2: the plain run above has no AVX-512 either")
    environment = {**os.environ, **masked, "NUMBA_CACHE_DIR": str(pytestconfig.cache.mkdir("numba"))}  # type: ignore[union-attr]
    command = [sys.executable, "-m", "tests.kernels.outputs", "1", "4"]
    answer = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert answer.returncode == 0, answer.stderr[-2000:]
    assert json.loads(answer.stdout) == GOLDEN


def _has_avx2() -> bool:
    facts = Path("/proc/cpuinfo")
    return platform.machine() == "x86_64" and facts.exists() and " avx2 " in facts.read_text(encoding="utf-8")
