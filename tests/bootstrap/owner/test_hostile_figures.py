"""Figures that no peer can mean: the host takes none that it could not write down, add up or show."""

import asyncio
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bootstrap.directory.answers import CoordinatorAnswers
from bootstrap.owner.honest_spread import spread_by_pair
from bootstrap.owner.progress import FAR_VERSIONS, PeerFigures, RunProgress
from bootstrap.program.dashboard import Dashboard
from bootstrap.state.evaluation import Evaluation
from swarm.core.audit.honest_audits import MAX_CLASSES, Agreed, AuditsMade, HonestAudits
from swarm.core.errors import RemoteError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId, StageIndex
from swarm.host_protocol import REPORT, StepReport
from swarm.network.memory import MemoryNetwork
from swarm.network.transport import Message
from swarm.proto import coordinator_pb2 as pb
from tests.bootstrap.state.test_handing_over import LIAR, MEMBER, OTHER_LIAR, STAGE, admitted, begun, told
from tests.swarm_in_process import identity_of, manifest_of, prepare

COUNTS = (
    *("num_targets", "stale", "counted", "round_bytes", "microbatches", "evaluated", "reassigned", "stragglers"),
    *("refused", "sent_bytes", "received_bytes", "num_direct", "num_punched", "num_relayed"),
)
SECONDS = ("loss_sum", "round_s", "overlap", "gradient_norm", "busy_s", "exact_s", "answered_s", "waited_s")
FIGURES: dict[str, Any] = {**dict.fromkeys(COUNTS, 3), **dict.fromkeys(SECONDS, 0.5)}


def agreed(num_audits: int, share: float) -> HonestAudits:
    return HonestAudits(numeric_class="", gradient=Agreed(num_audits, share))


def made_by(number: int, run_id: str = "", *honest: HonestAudits, version: int = 1) -> AuditsMade:
    """What a peer of the stage signs."""
    identity = identity_of(number)
    made = AuditsMade(
        run_id=run_id,
        auditor=identity.peer_id,
        stage=StageIndex(STAGE),
        version=version,
        numeric_class="",
        honest=honest or (agreed(1, 0.5),),
    )
    return made.signed_by(identity)


HONEST = StepReport(
    stage=STAGE,
    version=1,
    screens=(),
    state_digest=b"",
    not_finite=(),
    audits=made_by(MEMBER),
    **FIGURES,
)
ENORMOUS: list[dict[str, Any]] = [
    *(
        {name: (1 << 63) - 1}
        for name in ("num_targets", "stale", "counted", "round_bytes", "num_direct", "num_relayed")
    ),
    *({name: sign * 1e308} for name in ("loss_sum", "overlap", "busy_s") for sign in (1, -1)),
    {"screens": (("gradient_norm", (1 << 63) - 1),)},
    {"screens": (("of_its_own", 1),)},
]
FALSE_WORDS = {
    "more audits than there can be": lambda run: made_by(MEMBER, run, agreed(1 << 40, 0.5)),
    "beyond what is honest": lambda run: made_by(MEMBER, run, agreed(1, 1.5)),
    "less than nothing": lambda run: made_by(MEMBER, run, agreed(1, -0.5)),
    "no number": lambda run: made_by(MEMBER, run, agreed(1, math.nan)),
    "a share of no audit": lambda run: made_by(MEMBER, run, agreed(0, 0.5)),
    "a class twice": lambda run: made_by(MEMBER, run, agreed(1, 0.5), agreed(1, 0.5)),
    "more classes than a report holds": lambda run: made_by(
        *(MEMBER, run), *(replace(agreed(1, 0.5), numeric_class=str(number)) for number in range(MAX_CLASSES + 1))
    ),
    "another's word": lambda run: made_by(0, run),
    "of another run": lambda run: made_by(MEMBER, "another run"),
    "of another version": lambda run: made_by(MEMBER, run, version=2),
    "signed by another": lambda run: replace(made_by(MEMBER, run), signature=made_by(0, run).signature),
}


def test_a_member_admitted_time_and_again_counts_once_and_nothing_it_says_ends_the_host(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with begun(tmp_path) as host:
            honest = replace(HONEST, audits=made_by(MEMBER, host.run.run_id))
            for lie in ({}, *ENORMOUS, *({"audits": word(host.run.run_id)} for word in FALSE_WORDS.values()), {}):
                for _ in range(3):
                    await admitted(host, MEMBER, stage=STAGE)
                    report: Any = replace(honest, **lie).to_value()
                    if lie:
                        with pytest.raises(RemoteError):
                            await told(host, MEMBER, REPORT, {"report": report})
                    else:
                        await told(host, MEMBER, REPORT, {"report": report})
            figures = host.itself.progress.steps[0]
            assert (figures.num_targets, figures.loss_sum, len(figures.reported)) == (3, 0.5, 1)
            host.itself._write_figures(0)
            json.dumps(Dashboard(host.itself).state(), allow_nan=False)
            assert len((await CoordinatorAnswers(host.itself).peers(pb.PeersRequest(stage=STAGE))).peers) == 3

    asyncio.run(scenario())


def test_a_held_out_loss_that_cannot_be_is_asked_of_another(tmp_path: Path) -> None:
    async def scenario() -> float:
        settings = prepare(manifest_of(), tmp_path).settings
        network, progress = MemoryNetwork(random.Random(0)), RunProgress(2, 0)
        answers = {identity_of(0).peer_id: (1e308, 1), identity_of(1).peer_id: (2.0, 2)}
        transports = [network.transport(identity_of(number)) for number in range(3)]
        for transport in transports[:2]:
            progress.peers[transport.peer_id] = PeerFigures(0, 0.0, 0.0)

            async def evaluate(sender: PeerId, request: Message, of: PeerId = transport.peer_id) -> Message:
                Fields("question", request.meta).integer("index")
                loss_sum, num_targets = answers[of]
                return Message({"loss_sum": loss_sum, "num_targets": num_targets})

            transport.serve("evaluate", evaluate, max_body_bytes=0)
        evaluation = Evaluation(settings, transports[2], progress, 2048, lambda peer: True)
        loss = await evaluation.loss(0)
        await asyncio.gather(*(transport.close() for transport in transports))
        return loss

    assert asyncio.run(scenario()) == 1.0


def test_whoever_is_admitted_fills_no_table_of_audits() -> None:
    """Those on probation audit nobody; and a page that counted the classes of a crowd of keys would take its time."""
    progress = RunProgress(num_stages=1, first_version=0)
    for number, is_member in enumerate((True, False)):
        peer = PeerId(f"peer {number}")
        progress.peers[peer] = PeerFigures(0, 0.0, 0.0)
        audits = replace(HONEST.audits, honest=(replace(agreed(1, 0.5), numeric_class=str(is_member)),))
        progress.take(peer, replace(HONEST, audits=audits), is_member=is_member)
    assert [pair.audited for pair in spread_by_pair(progress.audits_made())] == ["True"]


def test_of_who_is_no_member_nothing_long_is_kept(tmp_path: Path) -> None:
    """Each identity had the host hold 2 MB, and its page and metrics show as many rows of its own words as it liked."""

    async def scenario() -> None:
        async with begun(tmp_path, run={"trust": "public"}) as host:
            long = replace(
                HONEST,
                not_finite=tuple(range(1 << 12)),
                screens=(("gradient_norm", 3),),
            )
            run_id = host.run.run_id
            said = {number: replace(long, audits=made_by(number, run_id)) for number in (LIAR, MEMBER)}
            for number, report in said.items():
                await told(host, number, REPORT, {"report": report.to_value()})
            progress = host.itself.progress
            kept = {number: progress.peers[identity_of(number).peer_id].last for number in (LIAR, MEMBER)}
            assert kept[LIAR] == replace(said[LIAR], not_finite=(), audits=replace(said[LIAR].audits, honest=()))
            assert kept[MEMBER] == replace(said[MEMBER], not_finite=())
            assert progress.screens() == {"gradient_norm": 3}

    asyncio.run(scenario())


def test_steps_that_somebody_names_are_not_there_for_it(tmp_path: Path) -> None:
    """A key that was admitted named one after the other, of up to a million, and each was kept and shown for ever."""

    async def scenario() -> None:
        tables: dict[str, Any] = {"run": {"trust": "public"}, "optimizer": {"total_steps": 10 * FAR_VERSIONS}}
        async with begun(tmp_path, **tables) as host:

            async def say(number: int, version: int) -> None:
                audits = made_by(number, host.run.run_id, version=version)
                report = replace(HONEST, version=version, audits=audits)
                await told(host, number, REPORT, {"report": report.to_value()})

            for number, version in ((LIAR, 1), (LIAR, 5), (LIAR, FAR_VERSIONS), (MEMBER, 2 * FAR_VERSIONS)):
                await say(number, version)
            assert not host.itself.progress.steps
            assert not host.itself.progress.digests
            await say(OTHER_LIAR, 1)
            await say(MEMBER, 2 * FAR_VERSIONS + 1)
            assert not host.itself.progress.steps

    asyncio.run(scenario())
