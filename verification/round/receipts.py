"""What a contribution's entry was given for: papers that its maker's neighbours signed, held against what it says.

An entry names its papers by digest, so the contribution commits to all of them before anybody draws. What lies under
these digests either bears the entry out or contradicts it, whoever shows it; a signature does not lie under them, and
so nothing follows from a missing one but that nothing was shown.
"""

from collections.abc import Callable, Iterator

from swarm.core.errors import RemoteError
from swarm.core.ids import PeerId
from swarm.core.round.contribution import Contribution, Work
from swarm.core.settings import RunSettings
from verification.pipeline.headers import HopHeader, forward_parents, gradient_parents, is_made_from
from verification.round.papers import Papers

IsOfStage = Callable[[PeerId, int], bool]
"""Whether a peer is one of a stage, as far as is known here."""


class FalseEntryError(RemoteError):
    """An entry's own papers say otherwise."""


def are_of(papers: Papers, work: Work, made: Contribution, settings: RunSettings) -> bool:
    """Whether these are the papers that the entry names: all of them, each under a digest that leads from it."""
    is_first, is_last = made.stage == 0, made.stage == settings.model.num_stages - 1
    came, sent, back = papers.input_header, papers.forward_header, papers.gradient_in
    if (came is None) != is_first or (sent is None) != is_last or (back is None) != is_last or papers.gradient_out:
        return False
    if came is not None and came.parents[:1] != (papers.birth.digest(),):
        return False
    if sent is not None and back is not None and back.parents[:1] != (sent.digest(),):
        return False
    return (papers.input_digest, papers.output_digest) == (work.input_header, work.output_header)


def why_false(papers: Papers, work: Work, made: Contribution, settings: RunSettings) -> str | None:
    """What the papers that `are_of` the entry say otherwise than it does; None if they bear it out."""
    for name, found, wanted in _said(papers, work, made, settings):
        if found != wanted:
            return f"{name} is {found}, not {wanted}"
    return None


def check_receipts(
    papers: Papers, work: Work, made: Contribution, settings: RunSettings, *, is_of_stage: IsOfStage
) -> bool:
    """Whether what is shown was signed by peers that are known here to be of the stages beside.

    Raises RemoteError("papers") unless it bears the entry out and is signed.
    """
    what = f"microbatch {work.microbatch_id} of {made.peer_id} at step {made.step}"
    if not are_of(papers, work, made, settings):
        raise RemoteError("papers", f"{what}: other papers are shown than it names", made.peer_id)
    wrong = why_false(papers, work, made, settings)
    if wrong is not None:
        raise FalseEntryError("papers", f"{what}: {wrong}", made.peer_id)
    for header in (papers.input_header, papers.gradient_in):
        if header is not None and not header.is_signed_by(header.producer):
            raise RemoteError("papers", f"{what}: a header is not signed by {header.producer}", made.peer_id)
    signed = [header for header in (papers.input_header, papers.gradient_in) if header is not None]
    return all(is_of_stage(header.producer, header.stage) for header in signed)


def _said(
    papers: Papers, work: Work, made: Contribution, settings: RunSettings
) -> Iterator[tuple[str, object, object]]:
    birth, stage, peer = papers.birth, made.stage, made.peer_id
    came, sent, back = papers.input_header, papers.forward_header, papers.gradient_in
    yield "birth record's kind", birth.kind, "train"
    yield "birth record's run", birth.run_id, made.run_id
    yield "birth record's microbatch", birth.microbatch_id, work.microbatch_id
    yield "birth record's attempt", birth.attempt, work.attempt
    yield "birth record's step", birth.step, made.step
    yield "number of targets", birth.num_targets, work.num_tokens
    if stage == 0:
        yield "source", birth.source, peer
    born = came.parents[0] if came is not None else work.input_header  # as `are_of` has found
    if came is not None:
        yield from _of_hop(came, work, made, settings, stage=stage - 1, direction="forward")
        yield "consumer of x", came.consumer, peer
        yield "x made by its consumer", came.producer == peer, False
        yield "parents of x fit", is_made_from(came, forward_parents(born, stage - 1)), True
    if sent is not None and back is not None:
        yield from _of_hop(sent, work, made, settings, stage=stage, direction="forward")
        yield "producer of y", sent.producer, peer
        yield "version", sent.version, work.version
        yield "parents of y fit", is_made_from(sent, forward_parents(born, stage, work.input_header)), True
        yield from _of_hop(back, work, made, settings, stage=stage + 1, direction="gradient")
        yield "consumer of y's gradient", back.consumer, peer
        yield "y's gradient made by its consumer", back.producer == peer, False
        yield "producer of y's gradient", back.producer, sent.consumer
        fits = is_made_from(back, gradient_parents(back.parents[0], stage + 1, settings.model.num_stages))
        yield "parents of y's gradient fit", fits, True


def _of_hop(
    header: HopHeader, work: Work, made: Contribution, settings: RunSettings, *, stage: int, direction: str
) -> Iterator[tuple[str, object, object]]:
    yield "header's run", header.run_id, made.run_id
    yield "header's stage", header.stage, stage
    yield "header's direction", header.direction, direction
    yield "header's microbatch", header.microbatch_id, work.microbatch_id
    yield "header's attempt", header.attempt, work.attempt
    oldest = int(made.step) - settings.delay_at(made.step)
    yield f"version {header.version} fits step {made.step}", oldest <= header.version <= made.step, True
