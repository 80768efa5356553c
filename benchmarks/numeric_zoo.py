"""Honest audits between numeric classes, and lies before them: is anybody accused, is every lie?

    python -m benchmarks.numeric_zoo --json [--keep zoo.jsonl] [--microbatches 4] [--depths 1 2 4 12 24] [--plot FILE]

Each microbatch of each compute type, depth and scene is one unit: with --keep it is a line of that file, and what is
there is not done again. --minutes ends in between. A microbatch among n classes gives 14 n (n - 1) audits.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from swarm.local.compute_pools import bound_pools

Unit = tuple[str, int, str, int]


def units(chosen: argparse.Namespace) -> Iterator[Unit]:
    """Compute type, depth, scene, number."""
    for number, depth, scene, dtype in itertools.product(
        range(chosen.microbatches), chosen.depths, chosen.scenes, chosen.dtypes
    ):
        yield dtype, depth, scene, number


def main(arguments: Sequence[str] | None = None) -> None:
    bound_pools(1)  # before torch is first imported
    from benchmarks.verification import zoo
    from benchmarks.verification.numeric_classes import CLASSES
    from benchmarks.verification.zoo_plot import plot

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, default=4, help="of each compute type, depth and scene")
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--scenes", nargs="+", choices=zoo.SCENES, default=list(zoo.SCENES))
    parser.add_argument("--dtypes", nargs="+", choices=zoo.DTYPES, default=list(zoo.DTYPES))
    parser.add_argument(
        "--classes",
        nargs="+",
        default=list(CLASSES),
        help="and devices, as PyTorch names them: cuda:0 (default: %(default)s)",
    )
    parser.add_argument("--keep", type=Path, help="a line for each microbatch that is done; they are not done again")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no microbatch after so many")
    parser.add_argument("--plot", type=Path, help="draw the smallest lies that are banned")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args(arguments)
    begun, done = time.monotonic(), _kept(chosen.keep)
    for unit in units(chosen):
        if unit in done:
            continue
        if time.monotonic() - begun > 60 * chosen.minutes:
            break
        dtype, depth, scene, number = unit
        found = asdict(zoo.audited(dtype, depth, scene, number, chosen.classes))  # type: ignore[arg-type]
        done[unit] = found
        if chosen.keep is not None:
            with chosen.keep.open("a") as file:
                file.write(json.dumps({"unit": unit, "found": found}) + "\n")
    said = zoo.summed([scene for _, _, scene, _ in done], list(done.values()))
    if chosen.plot is not None:
        plot(chosen.plot, said["smallest_banned"])
    sys.stdout.write(json.dumps(said, indent=None if chosen.json else 2) + "\n")


def _kept(keep: Path | None) -> dict[Unit, dict[str, Any]]:
    if keep is None or not keep.exists():
        return {}
    lines = [json.loads(line) for line in keep.read_text().splitlines()]
    return {tuple(line["unit"]): line["found"] for line in lines}


if __name__ == "__main__":
    main()
