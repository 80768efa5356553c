"""The run key's word on how a checkpoint does at tasks that its host has tried it at."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from swarm.core.forms import Text
from swarm.core.layout import AtMost
from swarm.core.record import Row
from swarm.identity.signed_record import SignedRecord

MAX_SCORES = 1024
MAX_NAME = 128


@dataclass(frozen=True)
class Score(Row):
    """One number."""

    task: Annotated[str, Text(MAX_NAME)]
    metric: Annotated[str, Text(MAX_NAME)]
    """As lm-eval calls it: `acc`, `acc_stderr`, `word_perplexity`."""
    value: float


@dataclass(frozen=True)
class CheckpointScores(SignedRecord):
    """All of one checkpoint. Nobody else has tried it: they are the host's word."""

    DOMAIN: ClassVar[str] = "checkpoint-scores"
    run_id: str
    version: int
    scores: Annotated[tuple[Score, ...], AtMost(MAX_SCORES)]
    """Sorted by task and metric."""
