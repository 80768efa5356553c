"""The smallest lies that are always a ban, drawn: by compute type, codec and scene, as the zoo found them."""

import math
from collections.abc import Mapping
from pathlib import Path

from benchmarks.verification.palette import COLORS, GRID, INK, MUTED, SURFACE

KINDS = ("activation", "gradient", "contribution")
TICKS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
MARKS = {"fresh": "o", "trained": "s", "by heart": "D"}


def plot(path: Path, smallest: Mapping[str, float]) -> None:
    """`smallest`: by "compute, codec, kind, scene", noise over the tensor's norm; infinite ones stand at the edge."""
    from matplotlib.figure import Figure  # no pyplot: no window, no global state

    figure = Figure(figsize=(11, 4.6), dpi=150, facecolor=SURFACE, layout="constrained")
    found = {tuple(row.split(", ")): value for row, value in smallest.items()}
    edge = 2 * max((value for value in found.values() if math.isfinite(value)), default=1.0)
    for axes, kind in zip(figure.subplots(1, len(KINDS), sharey=True), KINDS, strict=True):
        axes.set_facecolor(SURFACE)
        rows = list(dict.fromkeys((dtype, codec) for dtype, codec, each, _ in found if each == kind))
        for beside, color, (scene, mark) in zip((-0.22, 0.0, 0.22), COLORS, MARKS.items(), strict=False):
            held = [(at, found[*row, kind, scene]) for at, row in enumerate(rows) if (*row, kind, scene) in found]
            axes.plot(
                [at + beside for at, _ in held],
                [min(value, edge) for _, value in held],
                mark,
                color=color,
                markersize=6,
                markerfacecolor="none",
                markeredgewidth=1.6,
                label=scene,
            )
        axes.set_xticks(range(len(rows)), [f"{dtype}\n{codec}" for dtype, codec in rows], fontsize=8, color=INK)
        axes.set_yscale("log")
        axes.set_yticks(TICKS, [f"{tick:g}" for tick in TICKS])
        axes.minorticks_off()
        axes.set_ylim(1e-3, 1.3 * edge)
        axes.grid(visible=True, axis="y", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=MUTED, length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
        axes.set_title(kind, loc="left", color=INK, fontsize=11, fontweight="bold")
    figure.supylabel("noise, over the tensor's norm", color=MUTED, fontsize=10)
    figure.supxlabel("compute type, and codec of the wire or the contribution", color=MUTED, fontsize=10)
    figure.suptitle(
        "The smallest lie that is always a ban", x=0.01, ha="left", color=INK, fontsize=13, fontweight="bold"
    )
    axes.legend(frameon=False, labelcolor=INK, fontsize=9, title="weights and batch", title_fontsize=9)
    figure.savefig(path)
