"""The GPU's kernels write the bytes of the CPU's: in Triton's interpreter, and on a GPU where there is one."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import ROOT
from tests.kernels.gpu_outputs import CPU, on_gpu, outputs
from tests.kernels.outputs import plain

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason='triton, 1 GB when unpacked, is not installed: pip install -e ".[gpu]"',
)
POINTERS = {
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
}
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize(("device", "interpret"), [("cpu", "1"), pytest.param("cuda", "0", marks=on_a_gpu)])
def test_bytes_equal_those_of_the_cpu(device: str, interpret: str) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "tests.kernels.gpu_outputs", device],
        env={**os.environ, "TRITON_INTERPRET": interpret},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr[-2000:]
    found, expected = json.loads(answer.stdout), outputs(CPU)
    assert found["outputs"] == expected
    golden = json.loads((ROOT / "tests" / "kernels" / "golden.json").read_text())
    assert found["golden"] == {name: golden[name] for name in found["golden"]}
    assert len(found["golden"]) == 2


def test_products_and_sums_are_rounded_apart_when_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Triton compiles without a GPU; its compiler refuses more than its interpreter."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kernels.gpu import encoded_there as gpu

    num_fused: dict[tuple[str, bool], int] = {}

    def compile_only(
        kernel: Any, arguments: tuple[torch.Tensor, ...], valid: torch.Tensor, num_values: int, **sizes: int
    ) -> None:
        types = iter([*(POINTERS[argument.dtype] for argument in arguments), "*i8", "i32"])
        signature = {name: "constexpr" if name in sizes else next(types) for name in kernel.arg_names}
        source = ASTSource(kernel, signature, {(kernel.arg_names.index(name),): size for name, size in sizes.items()})
        for fuses in (False, True) if kernel.__name__ == "encode_int4_blocks" else (False,):
            made = triton.compile(source, target=GPUTarget("cuda", 80, 32), options={"enable_fp_fusion": fuses})
            num_fused[kernel.__name__, fuses] = made.asm["ptx"].count("fma")
        valid.fill_(1)

    monkeypatch.setattr(gpu, "_launch", compile_only)
    for name, codec in on_gpu("cpu").items():
        values = plain(1, 2 * 65).reshape(2, 65) if "tokens" in name else plain(1, 130)
        encoded = codec.encode(values)
        assert encoded is not None
        assert codec.decode(encoded, values.shape) is not None
    assert num_fused.pop(("encode_int4_blocks", True)) > 0
    assert len(num_fused) == 8
    assert not any(num_fused.values()), num_fused
