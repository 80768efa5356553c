"""The picture of a run's loss."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

SURFACE, INK, MUTED = "#fcfcfb", "#1f1f1e", "#6f6e69"
TRAINING, HELD_OUT, KILL = "#2a78d6", "#e0602b", "#a3281f"
SMOOTHED_SHARE = 40
"""The bold line is a moving average over a twentieth of the run: steps of a small run are noisy."""


def smoothed(values: Sequence[float], half_width: int) -> list[float]:
    """Mean of each value and as many before it as after it: `half_width`, fewer at the ends."""
    means = []
    for at in range(len(values)):
        reach = min(half_width, at, len(values) - 1 - at)
        means.append(fmean(values[at - reach : at + reach + 1]))
    return means


def write_loss_plot(
    path: Path,
    losses: Sequence[tuple[int, float]],
    *,
    held_out: Mapping[int, float],
    bigram: float | None,
    kills: Sequence[int],
    title: str,
) -> None:
    """Training loss by step, the held-out loss where it was measured, the bigram's, and when peers were killed."""
    from matplotlib.figure import Figure  # no pyplot: no window, no global state

    figure = Figure(figsize=(9, 5), dpi=150, facecolor=SURFACE, layout="constrained")
    axes = figure.add_subplot(facecolor=SURFACE)
    steps, values = [step for step, _ in losses], [value for _, value in losses]
    half_width = len(values) // SMOOTHED_SHARE
    axes.plot(steps, values, color=TRAINING, linewidth=0.8, alpha=0.35 if half_width else 1.0)
    axes.plot(steps, smoothed(values, half_width), color=TRAINING, linewidth=2.2, label="training loss")
    if held_out:
        axes.plot(
            *zip(*sorted(held_out.items()), strict=True),
            color=HELD_OUT,
            marker="o",
            markersize=8,
            markeredgecolor=SURFACE,
            markeredgewidth=1.5,
            linestyle="none",
            label="held-out loss",
            zorder=3,
            clip_on=False,
        )
        for step, value in sorted(held_out.items()):
            axes.annotate(
                f"{value:.2f}",
                (step, value),
                xytext=(9, 0),
                textcoords="offset points",
                va="center",
                annotation_clip=False,
                color=HELD_OUT,
                fontsize=10,
                fontweight="bold",
            )
    right = max([step for step, _ in losses] + list(held_out))
    if bigram is not None:
        axes.axhline(bigram, color=MUTED, linewidth=1.2, linestyle=(0, (5, 4)))
        axes.annotate(
            f"byte bigram {bigram:.2f}",
            (0, bigram),
            xytext=(4, -5),
            textcoords="offset points",
            ha="left",
            va="top",
            color=MUTED,
            fontsize=10,
        )
    for index, step in enumerate(kills):
        axes.axvline(step, color=KILL, linewidth=1.2, linestyle=(0, (1, 2)))
        if not index:
            axes.annotate(
                f"{len(kills)} peer{'s' if len(kills) > 1 else ''} killed",
                (step, 0.97),
                xycoords=("data", "axes fraction"),
                xytext=(6, 0),
                textcoords="offset points",
                va="top",
                color=KILL,
                fontsize=10,
            )
    axes.set_title(title, loc="left", color=INK, fontsize=12, fontweight="bold", pad=12)
    axes.set_xlabel("step", color=MUTED)
    axes.set_ylabel("loss, nats a token", color=MUTED)
    axes.set_xlim(0, right * 1.06)  # room for the last point's number
    axes.grid(axis="y", color="#e6e5e0", linewidth=0.8)
    axes.tick_params(colors=MUTED, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#c9c8c2")
    axes.legend(loc="upper right", frameon=False, labelcolor=INK)
    figure.savefig(path, facecolor=SURFACE)
