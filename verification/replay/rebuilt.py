"""What a replay stands on, checked and rebuilt: commitments first, then the weights."""

from dataclasses import replace

from swarm.bulk_digest import bulk_digest
from swarm.checkpoint.state import state_from_chunks
from swarm.core.errors import LocalError, RemoteError
from swarm.core.settings import RunSettings
from swarm.data.piece_store import WholeFile
from swarm.identity.key import verify
from swarm.model.adapters.base import Base, base_layout
from swarm.model.stage import StageModel
from verification.audit.evidence import Evidence
from verification.kinds.hop_mismatch import HopMismatch
from verification.kinds.replay_mismatch import ReplayMismatch
from verification.replay.stage_replay import StageReplay


def check_commitments(case: ReplayMismatch, evidence: Evidence) -> None:
    """Raises RemoteError unless parts and exhibits are those that the accused's signed contribution commits to.

    With parts, exhibits are of all its work, in order; without, of one entry.
    """
    made, accused = case.contribution, case.accused
    if (made.run_id, made.stage) != (evidence.run_id, evidence.stage):
        raise RemoteError("evidence", f"contribution of another run, or to stage {made.stage}")
    if not verify(accused, made.signed_bytes(), made.signature):
        raise RemoteError("signature", f"the contribution is not signed by {accused}")
    digests = made.part_digests
    found = tuple(bulk_digest(part) if len(part) else digest for part, digest in zip(case.parts, digests, strict=False))
    if case.parts and (len(case.parts) != len(digests) or found != digests):
        raise RemoteError("digest", f"{len(case.parts)} parts are not those that the contribution commits to")
    wanted = made.work
    if not case.parts:
        shown = {exhibit.papers.birth.microbatch_id for exhibit in case.exhibits}
        wanted = tuple(work for work in made.work if work.microbatch_id in shown)
    if not wanted or len(wanted) != len(case.exhibits) or (not case.parts and len(wanted) != 1):
        raise RemoteError("papers", f"{len(case.exhibits)} exhibits of {len(made.work)} microbatches")
    num_stages = evidence.settings.model.num_stages
    for exhibit, work in zip(case.exhibits, wanted, strict=True):
        exhibit.check(accused, run_id=evidence.run_id, stage=made.stage, num_stages=num_stages)
        exhibit.check_work(work, accused)


def model_of_run(settings: RunSettings, stage: int, base: WholeFile | None) -> StageModel:
    """What computes a stage's work again. Raises LocalError if it needs the run's frozen base and `base` is not that
    file."""
    model = StageModel(settings.model, stage)
    if not settings.model.has_base:
        return model
    wanted = settings.base_digest
    assert wanted is not None, "settings with a state have it"
    if base is None:
        raise LocalError(
            f"this evidence needs the run's frozen base, {wanted.hex()}: give the host's model.base with --base FILE"
        )
    if (found := base.pieces.digest) != wanted:
        raise LocalError(f"--base {base.path} is {found.hex()[:16]}, the run's frozen base {wanted.hex()[:16]}")
    return model.on(Base(base_layout(settings.model), base.data))


def replay_of(case: ReplayMismatch, evidence: Evidence, model: StageModel) -> StageReplay:
    """A replay that stands at the version the contribution's round starts from.

    Raises RemoteError unless the run key's word and certified results lead there, by its name.
    """
    made, replay = case.contribution, rebuilt_for(case, evidence, model)
    if replay.version != int(made.step) or replay.chain.name != made.previous_name:
        raise RemoteError("fork", f"the past leads to another version {replay.version} than step {made.step} began at")
    return replay


def rebuilt_for(case: ReplayMismatch | HopMismatch, evidence: Evidence, model: StageModel) -> StageReplay:
    """A replay of the evidence's stage that stands where the run key's word and certified results lead.

    Raises RemoteError if they lead nowhere.
    """
    past, settings = case.past, evidence.settings
    if past is None:
        raise RemoteError("evidence", "the file holds no past: only a replica that has the weights itself can judge it")
    chain = past.first_chain(evidence.run)
    if chain.stage != evidence.stage:
        raise RemoteError("evidence", f"a past of stage {chain.stage}, a work of stage {evidence.stage}")
    replay = StageReplay(settings, int(evidence.stage), model=model)
    state = state_from_chunks(replay.layout, case.state_chunks, past.beginning.state_digest)
    # The first state of a stage has no name of its own yet; the run key's signature binds it to the chain.
    replay.begin(replace(state, name=chain.name), chain)
    for result, bodies in zip(past.results, case.bodies, strict=True):
        replay.advance(result, bodies)
    return replay
