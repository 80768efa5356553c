"""The names of the attacks that a developer may ask of a peer: `KIND@STEP`, for tests and demonstrations.

What they do is with the peer (`peer.adversary`); the demo, which only hands them on, checks them here.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from swarm.core.errors import SettingsError

DEVELOPER_VARIABLE = "HOMESWARM_DEVELOPER"
"""Environment variable without which (at "1") no peer misbehaves, whatever its flags."""
SOMETIMES = "sometimes_"
"""Before a kind: partial cheating, in a small share of microbatches (of steps, for a contribution)."""

UNLISTED = "unlisted_"
"""Before a kind: what was attacked is left out of the contribution, and so out of what a contribution commits to."""

PLEADING = "pleading_"
"""Before a kind: asked to do its work again, the liar does, and pleads a fault."""

Stages = Literal["any", "not the last", "not the first", "the first", "the first or last", "the only"]

KINDS: Mapping[str, Stages] = MappingProxyType(
    {
        # The contribution to the averaging round.
        "sign_flip": "any",
        "sign_flip_1000": "any",
        "alie": "any",
        "ipm": "any",
        "zeros": "any",
        "copied_gradient": "any",
        "partial_work": "any",
        # Of windows of local steps alone.
        "negated_moments": "the only",
        "small_moments": "the only",
        "lazy_window_10": "the only",
        "lazy_window_20": "the only",
        "lazy_window_30": "the only",
        "lazy_window_50": "the only",
        "lazy_window_90": "the only",
        "other_data": "the only",
        "bent_layer": "the only",
        "bent_row": "the only",
        "row_bias": "the first",
        "slow_bias": "any",
        "claimed_ids": "any",
        "copied_papers": "any",
        # What a microbatch is computed with.
        "label_flip": "the first or last",
        "stale_weights": "any",
        "dropped_batch": "any",
        "skipped_layers": "any",
        # What is sent to the next stage, and to the one before.
        "activation_noise": "not the last",
        "activation_swap": "not the last",
        "activation_negate": "not the last",
        "activation_zeros": "not the last",
        "gradient_noise": "not the first",
        "gradient_swap": "not the first",
        "gradient_negate": "not the first",
        "gradient_zeros": "not the first",
        "in_tolerance_noise": "any",
        # What papers name.
        "framing": "not the last",
        # The rest: faults (three of them in the named step alone), a wrong reducer, silence.
        "bit_flips": "any",
        "nan_weights": "any",
        "nan_gradient": "any",
        "long_gradient": "any",
        "wrong_reducer": "any",
        "equivocating_reducer": "any",
        "omitting_reducer": "any",
        "omitting_leader": "any",
        "equivocating_leader": "any",
        "two_votes": "any",
        "written_result": "any",
        "grinding": "any",
        "wrong_state": "any",
        "withholding": "any",
        # Against the audits themselves.
        "false_accuser": "any",
        "lying_juror": "any",
        "lazy_auditor": "any",
        "charges": "any",
        # Joining and the directory.
        "forged_records": "any",
        "replayed_records": "any",
        "inflated_records": "any",
        "sybil_flood": "any",
    }
)
"""Every kind, and the stages of a run in which it does anything."""


@dataclass(frozen=True)
class Attack:
    """A kind of misbehaviour, and the step at which it begins."""

    kind: str
    """Of KINDS; PLEADING, SOMETIMES and UNLISTED may stand before it, in this order."""
    from_step: int = 0

    def __post_init__(self) -> None:
        """Raises SettingsError for a kind that does not exist."""
        if self.plain_kind not in KINDS:
            raise SettingsError(
                f"{self.kind}: is no kind of attack; choose {', '.join(KINDS)}, with {PLEADING}, {SOMETIMES} or "
                f"{UNLISTED} before it if need be, in this order"
            )

    def __str__(self) -> str:
        return f"{self.kind}@{self.from_step}"

    @property
    def plain_kind(self) -> str:
        return self._pleaded.removeprefix(SOMETIMES).removeprefix(UNLISTED)

    @property
    def is_partial(self) -> bool:
        return self._pleaded.startswith(SOMETIMES)

    @property
    def is_unlisted(self) -> bool:
        return self._pleaded.removeprefix(SOMETIMES).startswith(UNLISTED)

    @property
    def pleads(self) -> bool:
        return self.kind.startswith(PLEADING)

    @property
    def _pleaded(self) -> str:
        return self.kind.removeprefix(PLEADING)

    def works_in(self, stage: int, num_stages: int) -> bool:
        """Whether a peer of that stage has anything to attack so."""
        is_first, is_last = stage == 0, stage == num_stages - 1
        stages = KINDS[self.plain_kind]
        return (
            stages == "any"
            or (stages == "not the last" and not is_last)
            or (stages == "not the first" and not is_first)
            or (stages == "the first" and is_first)
            or (stages == "the first or last" and (is_first or is_last))
            or (stages == "the only" and is_first and is_last)
        )


def parse_attack(text: str) -> Attack:
    """`KIND` or `KIND@STEP`. Raises SettingsError."""
    match = re.fullmatch(r"([a-z0-9_]+)(?:@(\d{1,9}))?", text)
    if match is None:
        raise SettingsError(f"{text}: give KIND@STEP, such as sign_flip@10")
    return Attack(match[1], int(match[2] or 0))
