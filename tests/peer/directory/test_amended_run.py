"""While the host is away a peer hears of amendments from whoever trains, under the run key's signature."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest

from peer.directory.host import Host
from peer.directory.kept_answers import KeptAnswers
from swarm.core.errors import RemoteError, TransientError
from swarm.host_protocol import RUN
from swarm.manifest.signed_run import SignedRun
from swarm.network.memory import MemoryNetwork
from swarm.network.transport import Message
from tests.swarm.manifest.test_amendment import KEY, OTHER, chain, run_with
from tests.swarm_in_process import identity_of

ME, TRAINS, AWAY = (identity_of(number) for number in range(3))


async def told(run: SignedRun, kept: KeptAnswers) -> Host:
    """The host as a peer has it that was told of the run by one that trains."""
    network = MemoryNetwork(random.Random(0))
    mine, other = network.transport(ME), network.transport(TRAINS)

    async def on_run(sender: str, request: Message) -> Message:
        return Message(run.to_value())

    other.serve(RUN, on_run, max_body_bytes=0)
    host = Host(mine, AWAY.peer_id, kept=kept, call_s=0.5)
    await host.hear_run_of(TRAINS.peer_id)
    return host


def test_what_a_peer_knows_beyond_what_is_known_here_holds_while_the_host_is_away(tmp_path: Path) -> None:
    async def scenario() -> None:
        kept = KeptAnswers(tmp_path / "host.answers")
        kept.keep("run", run_with().to_value())
        host = await told(run_with(*chain()), kept)
        run, settings, run_id = await host.run()
        assert (len(run.amendments), run_id) == (2, run_with().run_id)
        assert settings.optimizer.total_steps == run_with().first.optimizer.total_steps + 2
        with pytest.raises(TransientError, match="knows no more"):
            await told(run_with(chain()[0]), kept)

    asyncio.run(scenario())


def test_what_the_run_key_did_not_sign_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        kept = KeptAnswers(tmp_path / "host.answers")
        kept.keep("run", run_with().to_value())
        first, _ = chain()
        with pytest.raises(RemoteError, match="not signed by the run key"):
            await told(replace(run_with(), amendments=(first.signed_by(OTHER),)), kept)
        other = SignedRun(run_with().settings, OTHER.peer_id).signed_by(OTHER)
        with pytest.raises((RemoteError, TransientError)):
            await told(other, kept)
        known = kept.get("run")
        assert known is not None
        assert SignedRun.from_value(known).run_key == KEY.peer_id

    asyncio.run(scenario())
