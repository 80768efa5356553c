"""How a stage came to a version, as a peer shows it: from a state the run key signed for, by what it holds."""

from dataclasses import dataclass

from peer.round.stage_steps import StageSteps
from swarm.checkpoint.snapshots import Snapshot
from swarm.core.errors import LocalError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId
from swarm.host_protocol import ANCHOR
from swarm.network.transport import Message
from verification.round.papers import Bytes
from verification.state.anchor import Anchor
from verification.state.past import Past


@dataclass(frozen=True)
class ProvablePast:
    """A past, the state it begins at, and the bodies of its results."""

    past: Past
    snapshot: Snapshot
    bodies: tuple[tuple[Bytes, ...], ...]


async def provable_past(steps: StageSteps, host: PeerId, *, oldest: int, version: int) -> ProvablePast:
    """From the last anchored version up to `oldest` on to `version`.

    Raises LocalError if that is not held here, or differs from what the run key signed; TransientError or RemoteError
    if the host does not say.
    """
    reply = await steps.context.transport.call(
        host,
        ANCHOR,
        Message({"stage": int(steps.chain.stage), "version": oldest}),
        timeout_s=steps.context.settings.deadlines.call_s,
        max_body_bytes=0,
    )
    anchor = Anchor.from_value(Fields("anchor answer", reply.meta).message("anchor"))
    anchor.check(run_id=steps.context.run_id, run_key=steps.chain.run_key)
    snapshot = steps.context.snapshots.get(int(anchor.version))
    held = [steps.context.results.get(number) for number in range(int(anchor.version), version)]
    if snapshot is None or snapshot.digest != anchor.state_digest or any(one is None for one in held):
        raise LocalError(f"version {version} cannot be shown from the anchored version {anchor.version} on")
    results = [one for one in held if one is not None]
    return ProvablePast(
        Past(beginning=anchor, results=tuple(result for result, _ in results)),
        snapshot,
        tuple(tuple(bodies) for _, bodies in results),
    )
