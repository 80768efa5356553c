"""What a peer does under an attack's name."""

from functools import partial
from typing import Protocol

from peer.adversary import contributions, directory, microbatches, others, rounds, strengths
from peer.adversary.hooks import Adversary
from peer.adversary.microbatches import Change, ChangedTensor
from swarm.attacks import Attack, parse_attack


class Make(Protocol):
    """Makes the adversary of an attack."""

    def __call__(self, attack: Attack, *, seed: str) -> Adversary: ...


def _on_activations(change: Change) -> Make:
    return partial(ChangedTensor, change, activations=True, gradients=False)


def _on_gradients(change: Change) -> Make:
    return partial(ChangedTensor, change, activations=False, gradients=True)


ADVERSARIES: dict[str, Make] = {
    "sign_flip": contributions.SignFlip,
    "sign_flip_1000": contributions.SignFlip,
    "alie": contributions.LittleIsEnough,
    "ipm": contributions.InnerProduct,
    "zeros": contributions.Zeros,
    "copied_gradient": contributions.CopiedGradient,
    "partial_work": contributions.PartialWork,
    "negated_moments": contributions.NegatedMoments,
    "small_moments": contributions.SmallMoments,
    **dict.fromkeys(strengths.LAZY_SHARES, contributions.LazyWindow),
    "other_data": microbatches.OtherData,
    "bent_layer": contributions.BentStretch,
    "bent_row": contributions.BentStretch,
    "row_bias": contributions.RowBias,
    "slow_bias": contributions.SlowBias,
    "claimed_ids": contributions.ClaimedIds,
    "copied_papers": contributions.CopiedPapers,
    "label_flip": microbatches.LabelFlip,
    "stale_weights": microbatches.StaleWeights,
    "dropped_batch": microbatches.DroppedBatch,
    "skipped_layers": microbatches.SkippedLayers,
    "activation_noise": _on_activations(microbatches.noisy),
    "activation_swap": _on_activations(microbatches.swapped),
    "activation_negate": _on_activations(microbatches.negated),
    "activation_zeros": _on_activations(microbatches.zeroed),
    "gradient_noise": _on_gradients(microbatches.noisy),
    "gradient_swap": _on_gradients(microbatches.swapped),
    "gradient_negate": _on_gradients(microbatches.negated),
    "gradient_zeros": _on_gradients(microbatches.zeroed),
    "in_tolerance_noise": partial(ChangedTensor, microbatches.leaning, activations=True, gradients=True),
    "framing": microbatches.Framing,
    "bit_flips": others.BitFlips,
    "nan_weights": others.NanWeights,
    "nan_gradient": others.NanGradient,
    "long_gradient": others.LongGradient,
    "wrong_reducer": others.WrongReducer,
    "equivocating_reducer": rounds.EquivocatingReducer,
    "omitting_reducer": rounds.OmittingReducer,
    "omitting_leader": rounds.OmittingLeader,
    "equivocating_leader": rounds.EquivocatingLeader,
    "two_votes": rounds.TwoVotes,
    "written_result": rounds.WrittenResult,
    "grinding": rounds.Grinding,
    "wrong_state": others.WrongState,
    "withholding": others.Withholding,
    "false_accuser": others.FalseAccuser,
    "lying_juror": others.LyingJuror,
    "lazy_auditor": others.LazyAuditor,
    "charges": others.Charges,
    "forged_records": directory.ForgedRecords,
    "replayed_records": directory.ReplayedRecords,
    "inflated_records": directory.InflatedRecords,
    "sybil_flood": directory.SybilFlood,
}


def adversary_of(attack: Attack, *, seed: str) -> Adversary:
    """A peer's misbehaviour; peers of different seeds differ in their chance alone."""
    return ADVERSARIES[attack.plain_kind](attack, seed=seed)


def parse(text: str, *, seed: str = "") -> Adversary:
    """`KIND` or `KIND@STEP`. Raises SettingsError, with the kinds there are."""
    return adversary_of(parse_attack(text), seed=seed)
