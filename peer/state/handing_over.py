"""What the last peer of a stage does when it leaves in good order: its state goes to the host, or stays here.

Stages leave a step apart from each other, so it gives an earlier snapshot and the results since: of both versions the
host can then go on from the one that all stages have.
"""

import asyncio
import logging
import time

from peer.directory.host import Host
from peer.round.rounds import StageRounds
from peer.round.stage_steps import StageSteps
from swarm.checkpoint.transfer import states_s
from swarm.core.canonical import Value
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields
from swarm.host_protocol import HAND_OVER

log = logging.getLogger(__name__)

ASK_S, ANSWERED_WITHIN_S = 5.0, 5.0
ASK_AGAIN_S = 1.0
QUIET_S = 60.0
"""The host has given up, or is gone, if it does not say for so long that it is still at it."""
BACK = 2
"""Versions that another stage may be behind."""


async def hand_over(rounds: StageRounds, host: Host) -> str | None:
    """What became of the state, in words for the owner; None where others of the stage go on, or nobody is asked.

    It is on this disk too. Whatever fails, the leaving goes on.
    """
    steps = rounds.steps
    longest_s = states_s(steps.context.settings, [steps.replica.layout.num_values])
    stage = int(steps.chain.stage)
    try:
        reply = await host.call(HAND_OVER, _asked(steps, start=0, ready=False), timeout_s=ASK_S)
        if not Fields("hand-over answer", reply.meta).boolean("wanted"):
            return None
    except (TransientError, RemoteError) as error:
        log.info("handing over: %s", error)
        if len(rounds.presence.present()) > 1:
            return None
        return (
            f"the host does not answer; version {steps.version} of stage {stage} stays on this disk: if nobody else "
            "has it, the run goes on from it when this peer comes back with the same --dir"
        )
    await rounds.taking.stand_still(for_s=longest_s)
    try:
        asked = _asked(steps, start=await _start(rounds), ready=True)
        async with asyncio.timeout(longest_s):
            await _until_taken(host, asked)
    except (TransientError, RemoteError, TimeoutError) as error:
        log.info("handing over: %s", error)
        return (
            f"this was the last peer of stage {stage}, and the host could not take its state: version {steps.version} "
            "stays on this disk; come back with the same --dir to go on from it"
        )
    return f"this was the last peer of stage {stage}: the host holds version {steps.version}, and nothing is lost"


async def _until_taken(host: Host, asked: dict[str, Value]) -> None:
    """Have the host fetch what it is given, for as long as it is at it: it may lose the line, and be started again.

    Raises TransientError once it has not been for `QUIET_S`, RemoteError for what it does not take.
    """
    heard_at = time.monotonic()
    while True:
        try:
            reply = await host.call(HAND_OVER, asked, timeout_s=ASK_S + ANSWERED_WITHIN_S)
        except TransientError as error:
            if time.monotonic() >= heard_at + QUIET_S:
                raise
            log.info("handing over: %s", error)
            await asyncio.sleep(ASK_AGAIN_S)
            continue
        if not Fields("hand-over answer", reply.meta).boolean("wanted"):
            return
        heard_at = time.monotonic()


def _asked(steps: StageSteps, *, start: int, ready: bool) -> dict[str, Value]:
    return {"stage": int(steps.chain.stage), "start": start, "version": int(steps.version), "ready": ready}


async def _start(rounds: StageRounds) -> int:
    """The snapshot to give: the newest from which results lead over the last versions to this one, or the present."""
    steps = rounds.steps
    version = int(steps.version)
    for start in sorted(steps.context.snapshots.versions(), reverse=True):
        leads_on = all(step in steps.context.results for step in range(start, version))
        if leads_on and (start <= version - BACK or start == min(steps.context.snapshots.versions())):
            return start
    if steps.context.snapshots.get(version) is None:
        await rounds.taking.save()
    return version
