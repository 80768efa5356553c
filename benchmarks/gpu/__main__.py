"""A stage on a device beside plain PyTorch, beside its plan, and a window's steps there beside those on the host.

    python -m benchmarks.gpu --json

`--smoke` takes tiny models, for machines without a GPU.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.gpu.inner_steps import inner_steps
from benchmarks.gpu.memory import held
from benchmarks.gpu.stage import CASES, SMOKE, Bench, measured


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="write one JSON object")
    parser.add_argument("--smoke", action="store_true", help="tiny models")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--wire", default="int8", choices=("fp32", "bf16", "int8", "int4", "int4h"))
    parser.add_argument("--compute", default="bf16", choices=("fp32", "bf16"))
    chosen = parser.parse_args(arguments)
    found: dict[str, list[dict[str, Any]]] = {"stages": [], "memory": [], "inner_steps": []}
    for part, row in _rows(chosen):
        found[part].append(row)
        if not chosen.json:
            sys.stdout.write(json.dumps({part: row}) + "\n")
            sys.stdout.flush()
    if chosen.json:
        sys.stdout.write(json.dumps({"device": chosen.device, "torch": torch.__version__, **found}, indent=2) + "\n")


def _rows(chosen: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    device, cases = torch.device(chosen.device), SMOKE if chosen.smoke else CASES
    for case in cases:
        bench = Bench(case, device, chosen.compute, chosen.wire)
        yield "stages", measured(bench, times=2 if chosen.smoke else 8, turns=1 if chosen.smoke else 5)
        del bench
    if device.type == "cuda":  # of what else is the peak not known
        for case in cases[:2]:
            yield from (("memory", row) for row in held(case, device, chosen.compute, chosen.wire))
    for case in cases[1:2]:
        yield "inner_steps", inner_steps(case, device, chosen.compute, times=3)


if __name__ == "__main__":
    main()
