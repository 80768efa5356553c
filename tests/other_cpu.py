"""Digests as they come out on a processor without AVX or FMA (x86).

There LLVM vectorises differently, and numpy and torch take other paths: the bits must stay.
"""

import json
import os
import subprocess
import sys

from tests import ROOT


def digests_on_another_cpu(module: str) -> dict[str, str]:
    """What the module's `digests` gives in a process that holds its processor for a plain one."""
    answer = subprocess.run(
        [sys.executable, "-c", f"import json; from {module} import digests; print(json.dumps(digests()))"],
        env={
            **os.environ,
            "NUMBA_CPU_NAME": "generic",
            "NUMBA_CPU_FEATURES": "",
            "NPY_DISABLE_CPU_FEATURES": "AVX512F,AVX2,FMA3",
            "ATEN_CPU_CAPABILITY": "default",
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr[-2000:]
    digests: dict[str, str] = json.loads(answer.stdout.splitlines()[-1])
    return digests
