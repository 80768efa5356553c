"""Who signs two contributions to one round is refused, and brought before the host by whoever saw both."""

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peer.audit.accuser import Accuser
from peer.round.mail.mail import ROUND
from swarm.core.canonical import pack, unpack
from swarm.core.errors import RemoteError, TransientError
from swarm.core.ids import PeerId
from swarm.core.round.averaging_round import Accuse
from swarm.core.round.ballots import Proposal
from swarm.core.round.contribution import Contribution, Rate
from swarm.core.round.facts import EquivocationError
from swarm.core.round.voting import Proof
from swarm.network.transport import Message, Transport
from tests.swarm.core.round.round_members import facts_and_rounds, roster_of
from tests.swarm.core.round.round_world import contribution
from tests.swarm_in_process import identity_of, manifest_of, swarm_in_process
from verification.kinds.equivocation import Equivocation
from verification.replay.evidence_file import evidence_in
from verification.replay.judge import judge

LIAR = identity_of(5)
"""The third of stage 1."""


def both(peer: PeerId) -> tuple[Contribution, Contribution]:
    return contribution(peer), contribution(peer, num_work=2)


def test_refusal_of_a_second_contribution_holds_both() -> None:
    _, (leader, second, _) = facts_and_rounds(3)
    one, other = both(second.me)
    leader.close(reason="full", joins=[], view=0, now=0.0)
    leader.on_commit(second.me, 0, one, None, None, None, now=0.1)
    with pytest.raises(EquivocationError) as caught:
        leader.on_commit(second.me, 0, other, None, None, None, now=0.2)
    assert (caught.value.kind, caught.value.peer_id) == ("equivocation", second.me)
    case = Equivocation(one=caught.value.one, other=caught.value.other)
    case.check_signatures(one.run_id)
    assert case.contradiction is not None
    assert case.accused == second.me


def test_member_that_finds_another_contribution_on_a_certified_roster_follows_it_and_accuses() -> None:
    facts, (leader, second, third) = facts_and_rounds(3)
    one, other = both(second.me)
    commits = {peer: contribution(peer) for peer in facts.members}
    asked = replace(roster_of(facts, commits=commits), certificate=None)
    out = third.on_ballot(leader.me, Proposal.of_roster(asked, Proof()), now=0.0)
    assert not any(isinstance(instruction, Accuse) for instruction in out)
    roster = roster_of(facts, commits={**commits, second.me: other})
    assert [i for i in third.on_roster(leader.me, roster, now=0.1) if isinstance(i, Accuse)] == [Accuse(one, other)]
    assert third.roster == roster


def test_same_contribution_in_every_message_and_view_accuses_nobody() -> None:
    facts, (leader, second, third) = facts_and_rounds(3)
    roster = roster_of(facts)
    out = third.on_ballot(leader.me, Proposal.of_roster(replace(roster, certificate=None), Proof()), now=0.0)
    out += third.on_roster(leader.me, roster, now=0.1)
    out += third.on_roster(second.me, roster_of(facts, view=1), now=0.2)
    assert not any(isinstance(instruction, Accuse) for instruction in out)


def test_statement_that_is_signed_twice_is_no_contradiction() -> None:
    accuser = Accuser(cast(Transport, SimpleNamespace()), PeerId("host"), cast(Any, None))
    made = contribution(facts_and_rounds(3)[0].members[0])
    asyncio.run(accuser.accuse_of_both(Equivocation(one=made, other=replace(made, signature=bytes(64)))))
    assert not accuser.has_accused(made.peer_id)


class TwoFaced:
    """Sends a leader its contribution and then another, as if it had not."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    async def call(self, peer_id: PeerId, method: str, request: Message, **limits: Any) -> Message:
        answer = await self._transport.call(peer_id, method, request, **limits)
        if method == ROUND and request.meta["kind"] == "commit" and int(cast(int, request.meta["step"])) >= 1:
            made = Contribution.from_value(unpack(pack(request.meta["contribution"]), max_bytes=1 << 20))
            rates = () if made.rates else (Rate(peer_id, 20),)
            unsigned = replace(made, rates=rates)
            other = replace(unsigned, signature=LIAR.sign(unsigned.signed_bytes()))
            meta = {**request.meta, "contribution": other.to_value()}
            with contextlib.suppress(RemoteError, TransientError):
                await self._transport.call(peer_id, method, Message(meta), **limits)
        return answer


def test_equivocating_peer_is_banned_in_a_running_swarm(tmp_path: Path) -> None:
    manifest = manifest_of(
        run={"trust": "friends"},
        optimizer={"total_steps": 40},
        batch={"target_tokens": 12 * 32},
        limits={"founders_per_stage": 3},
    )

    def wrap(stage: int, index: int, transport: Transport) -> Transport:
        return cast(Transport, TwoFaced(transport)) if (stage, index) == (1, 2) else transport

    async def train() -> tuple[dict[str, Any], PeerId]:
        async with swarm_in_process(manifest, tmp_path, peers=(3, 3), wrap=wrap) as swarm:

            def banned() -> list[dict[str, Any]]:
                return [event for event in swarm.events if event["event"] == "banned"]

            await swarm.until(lambda: bool(banned()), timeout_s=90.0)
            return banned()[0], swarm.run.run_key.peer_id

    found, run_key = asyncio.run(train())
    assert (found["peer_id"], found["kind"]) == (LIAR.peer_id, "equivocation")
    evidence = evidence_in(Path(found["evidence"]))
    assert judge(evidence, run_key=run_key).guilty
