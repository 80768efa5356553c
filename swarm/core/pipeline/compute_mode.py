"""How much of a microbatch a peer computes at once, so that it fits into its memory."""

from collections.abc import Iterator
from dataclasses import dataclass

from swarm.core.settings import RunSettings


@dataclass(frozen=True)
class ComputeMode:
    """What a peer holds while it computes; what comes out is the same, up to the order of sums over samples."""

    samples_at_once: int
    """Of a microbatch. With fewer than all, `recompute` is on."""
    recompute: bool
    """Keep the input alone until backward, and compute forward again then."""

    @classmethod
    def of_run(cls, settings: RunSettings) -> "ComputeMode":
        """A microbatch at once, as the run's settings have it."""
        return cls(settings.batch.microbatch_size, settings.model.recompute)


def modes(settings: RunSettings) -> Iterator[ComputeMode]:
    """All that a peer of the run may choose from: the quickest first, each next one needs less memory."""
    wanted = ComputeMode.of_run(settings)
    if not wanted.recompute:
        yield wanted
    samples = wanted.samples_at_once
    yield ComputeMode(samples, recompute=True)
    while samples > 1:
        samples = (samples + 1) // 2
        yield ComputeMode(samples, recompute=True)
