"""How evidence is judged: every signature, digest and certificate in it is checked, and the work done again.

Nothing is believed because the accuser says so. What decides which run it is, and which states are genuine, is the run
key that signed the settings: whoever acts on a verdict must know that key to be its run's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from swarm.averaging.activations import activation_codec
from swarm.averaging.certified_gradient import squares_of
from swarm.averaging.encoded_mean import check_encoded
from swarm.averaging.parts import Parts
from swarm.averaging.reduce import read_and_written
from swarm.checkpoint.state import chunk_hash, root_by_path
from swarm.core.errors import LocalError, RemoteError
from swarm.core.ids import PeerId
from swarm.core.round.words import Reduction
from swarm.data.batches import BatchReader
from swarm.data.piece_store import WholeFile
from swarm.data.token_file import CheckedTokens
from swarm.identity.key import verify
from swarm.model.families import hop_width
from swarm.model.stack import stage_layout
from swarm.model.stage import StageModel
from verification.audit.evidence import Evidence, Kind
from verification.audit.tolerance import LOCAL, Comparison, Grade
from verification.kinds.bias import Bias
from verification.kinds.data_fraud import DataFraud, differences
from verification.kinds.equivocation import Equivocation
from verification.kinds.false_work import FalseWork
from verification.kinds.hop_mismatch import HopMismatch
from verification.kinds.protocol_violation import ProtocolViolation
from verification.kinds.reducer_fraud import ReducerFraud
from verification.kinds.replay_mismatch import ReplayMismatch
from verification.kinds.step_fraud import StepFraud
from verification.pipeline.headers import HopHeader, check_birth
from verification.replay.compared import compared_activations, compared_claim, compared_contribution, compared_hop
from verification.replay.rebuilt import check_commitments, model_of_run, rebuilt_for, replay_of
from verification.replay.reduced_again import digest_again
from verification.replay.stage_replay import StageReplay
from verification.replay.stepped_again import chunk_again
from verification.replay.verdict import Verdict
from verification.round.papers import Bytes
from verification.round.receipts import are_of, why_false


def judge(
    evidence: Evidence,
    *,
    data: Path | None = None,
    base: WholeFile | None = None,
    run_key: PeerId | None = None,
    bias_seed: bytes | None = None,
) -> Verdict:
    """Whether the accused did it. `data` is the run's training token file, which data fraud needs; `base` the frozen
    base, which replays of a run with adapters need; `bias_seed` is for the sketch of a contribution that may be biased,
    where the judge keeps count.

    Raises RemoteError if the evidence proves nothing, or is of a run with another key than `run_key` (None: whatever
    key signed its settings; then the verdict holds for that key's run only). Raises LocalError if `data` or `base` is
    missing, or of another run.
    """
    run = evidence.run
    if run_key is not None and run.run_key != run_key:
        raise RemoteError("evidence", f"evidence of a run under key {run.run_key}, not {run_key}")
    run.check()
    if not evidence.stage < evidence.settings.model.num_stages:
        raise RemoteError("evidence", f"stage {evidence.stage} of {evidence.settings.model.num_stages}")
    if evidence.kind == DataFraud.KIND:
        return _judge_data(evidence, data)
    if evidence.kind in (Bias.KIND, ReplayMismatch.KIND, HopMismatch.KIND):
        model = model_of_run(evidence.settings, evidence.stage, base)
        if evidence.kind == Bias.KIND:
            return _judge_bias(evidence, model, bias_seed)
        return _judge_mismatch(evidence, model) if evidence.kind == ReplayMismatch.KIND else _judge_hop(evidence, model)
    return _JUDGES[evidence.kind](evidence)


def _judge_equivocation(evidence: Evidence) -> Verdict:
    case = Equivocation.from_evidence(evidence)
    case.check_signatures(evidence.run_id)
    found = case.contradiction
    if found is None:
        return Verdict.of(evidence, False, "the two statements do not contradict each other")
    if isinstance(case.one, HopHeader):
        return _judge_two_activations(evidence, case, found)
    return Verdict.of(evidence, True, f"signed {found}")


def _judge_two_activations(evidence: Evidence, case: Equivocation, what: str) -> Verdict:
    """They differ by more than rounding, each seen from the other."""
    settings = evidence.settings
    if settings.optimizer.correction == "extrapolate":  # after a restart a version's weights are not extrapolated
        return Verdict.of(evidence, False, "in an extrapolating run a version may be computed on in two ways")
    one, other = case.bodies
    return _graded(evidence, {what: compared_activations(settings, one, other, _hop_shape(evidence))})


def _judge_violation(evidence: Evidence) -> Verdict:
    case = ProtocolViolation.from_evidence(evidence)
    message = case.message
    if message.run_id != evidence.run_id:
        raise RemoteError("evidence", f"message of run {message.run_id[:12]}, not {evidence.run_id[:12]}")
    if not verify(case.accused, case.signed_bytes, message.signature):
        raise RemoteError("signature", f"the message is not signed by {case.accused}")
    wrong = _wrong_bytes(case, evidence)
    if wrong is not None:
        return Verdict.of(evidence, True, f"signed for bytes that no honest program writes: {wrong}")
    return Verdict.of(evidence, False, "the bytes are as they should be")


def _left_out_wrongly(body: Bytes, parts: Parts, part: int) -> str | None:
    """Of a contribution to a part that its reducer left out as malformed; None if it is."""
    try:
        check_encoded(parts.contribution_codec(part), body, num_values=parts.size(part))
    except RemoteError:
        return None
    return f"part {part} leaves out as malformed what decodes"


def _wrong_bytes(case: ProtocolViolation, evidence: Evidence) -> str | None:
    """What is wrong with the bytes, seen from themselves; None if nothing is."""
    message, codecs = case.message, evidence.settings.codecs
    try:
        if isinstance(message, HopHeader):
            forward = message.direction == "forward"
            codec = activation_codec(codecs.activations if forward else codecs.activation_gradients)
            codec.decode(case.body, _hop_shape(evidence))
        elif isinstance(message, Reduction):
            parts = _parts_with(evidence, message.part)
            if case.part > 0:
                return _left_out_wrongly(case.body, parts, message.part)
            _, written = read_and_written(message.level, parts.codec_name(message.part))
            squares = squares_of(written, case.body, parts.size(message.part))
            if message.level != "cohort" and squares != message.squares:
                return f"squares sum to {squares}, not {message.squares}"
        else:
            parts = _parts_with(evidence, case.part)
            check_encoded(parts.contribution_codec(case.part), case.body, num_values=parts.size(case.part))
    except RemoteError as error:
        return str(error)
    return None


def _judge_work(evidence: Evidence) -> Verdict:
    case = FalseWork.from_evidence(evidence)
    made, settings = case.contribution, evidence.settings
    if made.run_id != evidence.run_id:
        raise RemoteError("evidence", f"contribution of run {made.run_id[:12]}, not {evidence.run_id[:12]}")
    if not verify(case.accused, made.signed_bytes(), made.signature):
        raise RemoteError("signature", f"the contribution is not signed by {case.accused}")
    if not are_of(case.papers, case.work, made, settings):
        raise RemoteError("evidence", "the papers are not those that the entry names")
    wrong, what = why_false(case.papers, case.work, made, settings), f"microbatch {case.work.microbatch_id}"
    if wrong is None:
        return Verdict.of(evidence, False, f"the papers bear out that it did {what}")
    return Verdict.of(evidence, True, f"claimed {what}, whose papers say otherwise: {wrong}")


def _judge_reducer(evidence: Evidence) -> Verdict:
    case = ReducerFraud.from_evidence(evidence)
    made, settings = case.reduction, evidence.settings
    if made.run_id != evidence.run_id:
        raise RemoteError("evidence", f"reduction of run {made.run_id[:12]}, not {evidence.run_id[:12]}")
    made.check(verify)
    again = digest_again(made, case.bodies, settings, _parts_with(evidence, made.part))
    what = f"part {made.part} of step {made.step} from {len(made.inputs)} inputs"
    if again == made.digest:
        return Verdict.of(evidence, False, f"{what} is reduced as it should be")
    reason = f"{what} has BLAKE3 {again.hex()[:16]}, the reducer signed {made.digest.hex()[:16]}"
    return Verdict.of(evidence, True, reason)


def _judge_step(evidence: Evidence) -> Verdict:
    case = StepFraud.from_evidence(evidence)
    said = case.statement
    said.check(run_id=evidence.run_id)
    again = chunk_again(case, evidence.run)
    if said.total_bytes != again.total_bytes:
        reason = f"stated a state of {said.total_bytes} bytes where the stage's has {again.total_bytes}"
        return Verdict.of(evidence, True, reason)
    if root_by_path(case.leaf, case.chunk, case.path, said.total_bytes) != said.state_digest:
        raise RemoteError("digest", f"chunk {case.chunk} is not under the root that was stated")
    leaf, what = chunk_hash(again.body), f"chunk {case.chunk} of version {said.version}"
    if leaf == case.leaf:
        return Verdict.of(evidence, False, f"{what} is as it was stated")
    reason = f"{what} has SHA-256 {leaf.hex()[:16]}, {case.leaf.hex()[:16]} was stated"
    return Verdict.of(evidence, True, reason)


def _judge_mismatch(evidence: Evidence, model: StageModel) -> Verdict:
    return _judge_replay(evidence, ReplayMismatch.from_evidence(evidence), model, None)


def _judge_bias(evidence: Evidence, model: StageModel, seed: bytes | None) -> Verdict:
    """By itself such a contribution proves nothing: it is one more for who keeps count."""
    case = Bias.from_evidence(evidence)
    if not case.parts:
        raise RemoteError("evidence", "a bias is of a whole contribution")
    verdict = _judge_replay(evidence, case, model, seed)
    if verdict.guilty:  # then its maker may have had a fault, and is to be asked
        raise RemoteError("evidence", f"wrong by itself, a case of {ReplayMismatch.KIND}: {verdict.reason}")
    return verdict


def _judge_replay(evidence: Evidence, case: ReplayMismatch, model: StageModel, seed: bytes | None) -> Verdict:
    check_commitments(case, evidence)
    try:
        replay = replay_of(case, evidence, model)
        if case.parts:
            return _contribution_verdict(case, evidence, replay, seed)
        return _hop_verdict(case, evidence, replay)
    except LocalError as error:  # what is missing here is missing in the file
        raise RemoteError("evidence", f"the file does not hold what a replay needs: {error}") from error


def judge_plea(evidence: Evidence, bodies: Sequence[Bytes], *, base: WholeFile | None = None) -> Verdict:
    """Whether what the accused of a mismatch comes to now is wrong too: then it lies, else it had a fault.

    `bodies` stand in place of the contribution's parts; of y and the gradient of x; of the hop's. Raises as `judge`.
    """
    model = model_of_run(evidence.settings, evidence.stage, base)
    if evidence.kind == HopMismatch.KIND:
        hop = HopMismatch.from_evidence(evidence)
        if len(bodies) != 1:
            raise RemoteError("malformed", f"a plea of {len(bodies)} bodies about one hop", evidence.accused)
        return _claimed_verdict(hop, evidence, rebuilt_for(hop, evidence, model), bodies[0])
    case = ReplayMismatch.from_evidence(evidence)
    check_commitments(case, evidence)
    replay = replay_of(case, evidence, model)
    if case.parts:
        if not all(len(body) for body in bodies):  # in evidence an empty part is one that nobody had any more
            raise RemoteError("malformed", "a plea without all parts", evidence.accused)
        return _contribution_verdict(replace(case, parts=tuple(bodies)), evidence, replay)
    if len(bodies) != 2:
        raise RemoteError("malformed", f"a plea of {len(bodies)} bodies about one microbatch", evidence.accused)
    again = replace(case.exhibits[0], y=bodies[0], grad_x=bodies[1])
    return _hop_verdict(replace(case, exhibits=(again,)), evidence, replay)


def judge_as_replica(evidence: Evidence, replay: StageReplay) -> Verdict:
    """Whether the accused of a mismatch did it, on a replica's weights at the case's `versions`.

    For a juror: the file need not hold a past. Raises RemoteError if it proves nothing, or is of another chain.
    """
    if evidence.kind == HopMismatch.KIND:
        return _claim_verdict(HopMismatch.from_evidence(evidence), evidence, replay)
    case = ReplayMismatch.from_evidence(evidence)
    check_commitments(case, evidence)
    made = case.contribution
    if (replay.chain.stage, int(replay.version), replay.chain.name) != (made.stage, int(made.step), made.previous_name):
        raise RemoteError("fork", f"the contribution to step {made.step} starts from another version than is here")
    return _contribution_verdict(case, evidence, replay) if case.parts else _hop_verdict(case, evidence, replay)


def _contribution_verdict(
    case: ReplayMismatch, evidence: Evidence, replay: StageReplay, seed: bytes | None = None
) -> Verdict:
    step = case.contribution.step
    replayed = replay.encoded_contribution(case.exhibits, step)
    compared = compared_contribution(
        replay, case.exhibits, case.parts, replayed, second=replay.second_moments, seed=seed
    )
    verdict = _graded(evidence, {f"contribution to step {step}": compared.found})
    return replace(verdict, amplified=compared.amplified)


def _hop_verdict(case: ReplayMismatch, evidence: Evidence, replay: StageReplay) -> Verdict:
    (exhibit,) = case.exhibits
    compared = compared_hop(replay, exhibit, case.contribution.step)
    number = exhibit.papers.birth.microbatch_id
    return _graded(evidence, {f"{name} of microbatch {number}": found for name, found in compared.items()})


def _judge_hop(evidence: Evidence, model: StageModel) -> Verdict:
    case = HopMismatch.from_evidence(evidence)
    try:
        return _claim_verdict(case, evidence, rebuilt_for(case, evidence, model))
    except LocalError as error:  # what is missing here is missing in the file
        raise RemoteError("evidence", f"the file does not hold what a replay needs: {error}") from error


def _claim_verdict(case: HopMismatch, evidence: Evidence, replay: StageReplay) -> Verdict:
    return _claimed_verdict(case, evidence, replay, case.claim.claimed)


def _claimed_verdict(case: HopMismatch, evidence: Evidence, replay: StageReplay, claimed: Bytes) -> Verdict:
    """On `claimed` in the place of what the hop's peer sent."""
    case.claim.check(evidence.settings, run_id=evidence.run_id)
    claim = replace(case.claim, claimed=claimed)
    header, chain = claim.header, replay.chain
    if (chain.stage, replay.version, chain.era) != (header.stage, header.version, claim.birth.era):
        raise RemoteError("fork", f"version {replay.version} is not {header.version}, or of another era")
    found = compared_claim(replay, claim)
    return _graded(evidence, {f"{claim.kind} of microbatch {claim.birth.microbatch_id}": found})


def _graded(evidence: Evidence, compared: Mapping[str, Comparison]) -> Verdict:
    guilty = any(found.grade is Grade.FRAUD for found in compared.values())
    figures: dict[str, float] = {}
    for name, found in compared.items():
        figures |= {
            f"{name}: error": found.error,
            f"{name}: worst chunk": found.worst_chunk_error,
            f"{name}: fraud past": found.fraud,
            f"{name}: extent": found.extent,
            f"{name}: moved": found.moved,
        }
    reason = "; ".join(f"{name}: {found.reason}" for name, found in compared.items())
    is_local = all(found.extent <= LOCAL for found in compared.values())
    return Verdict(evidence.kind, evidence.accused, guilty, reason, figures, is_local)


def _judge_data(evidence: Evidence, data: Path | None) -> Verdict:
    birth, settings = DataFraud.from_evidence(evidence).birth, evidence.settings
    check_birth(birth, run_id=evidence.run_id)
    if data is None:
        raise LocalError("this evidence needs the run's training tokens: give them with --data FILE")
    tokens = CheckedTokens(
        data,
        settings.data.token_bytes,
        num_tokens=settings.data.num_train_tokens,
        digest=settings.data.train_digest,
    )
    tokens_BL, targets_BL = BatchReader(settings, tokens).batch(birth.microbatch_id)
    wrong = differences(birth, tokens_BL, targets_BL)
    what = f"microbatch {birth.microbatch_id}"
    if not wrong:
        return Verdict.of(evidence, False, f"{what} was born as the data order says")
    return Verdict.of(evidence, True, f"{what} was born with other {' and '.join(wrong)} than the data order says")


def _parts_with(evidence: Evidence, part: int) -> Parts:
    """The stage's. Raises RemoteError if it has no such part."""
    parts = Parts.of(evidence.settings, stage_layout(evidence.settings.model, evidence.stage))
    if part >= len(parts):
        raise RemoteError("evidence", f"part {part} of {len(parts)}")
    return parts


def _hop_shape(evidence: Evidence) -> tuple[int, int, int]:
    settings = evidence.settings
    return (settings.batch.microbatch_size, settings.data.sequence_length, hop_width(settings.model))


_JUDGES: dict[Kind, Callable[[Evidence], Verdict]] = {
    Equivocation.KIND: _judge_equivocation,
    ProtocolViolation.KIND: _judge_violation,
    FalseWork.KIND: _judge_work,
    ReducerFraud.KIND: _judge_reducer,
    StepFraud.KIND: _judge_step,
}
