"""A run goes on from an earlier state, without the data that spoilt it, while its peers live on."""

import asyncio
import os
import random
import shutil
import signal
import string
import tempfile
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bootstrap.owner.trouble import Notice
from bootstrap.program.books import Books
from bootstrap.program.held_run import HeldRun
from bootstrap.program.ledger import Ledger
from bootstrap.state.beginning import StageSource, stage_start
from bootstrap.state.rolling_back import NEWEST, Plan, RollingBack, Wish, plan
from bootstrap.state.run_folder import prepare_run
from swarm.cli import ExitCode, run
from swarm.core.errors import SettingsError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import MicrobatchId, PeerId
from swarm.core.pipeline.data_order import DataOrder
from swarm.core.pipeline.leases import LeaseTable
from swarm.core.state.coming_back import AHEAD
from swarm.core.state.stage_chain import Genesis
from swarm.host_protocol import ROLLBACK, STANDING
from swarm.manifest.file import parse_manifest
from swarm.network.memory import MemoryNetwork
from swarm.network.services.host_service import serve_owner_of_host
from swarm.network.transport import Message
from tests.bootstrap.state.hosted import commanded, hosted
from tests.process_swarm import ProcessSwarm, Zygote
from tests.swarm_in_process import (
    Event,
    InProcessSwarm,
    identity_of,
    manifest_of,
    prepare,
    sample_text,
    swarm_in_process,
)
from tests.verification.exhibits import small_settings

PEER = PeerId("peer")


def spike(step: int) -> Notice:
    return Notice("loss_spike", step, None, (PEER,), (), "high")


def ids_of(step: int) -> range:
    return range(4 * step, 4 * step + 4)


# -- what a wish comes to --------------------------------------------------------------------------------------


def test_auto_goes_back_before_the_trouble_and_skips_its_steps_and_the_one_before() -> None:
    skipped = Notice("skipped", 3, 1, (PEER,), (), "long")
    made = plan(Wish(None, None), versions=[4, 8, 12, 16], notices=[skipped, spike(13), spike(14)], ids_of=ids_of)
    assert made == Plan(12, ((48, 60),))
    assert plan(Wish(4, None), versions=[4, 8], notices=[spike(2), spike(9)], ids_of=ids_of) == Plan(4, ((32, 40),))
    assert plan(Wish(None, None), versions=[0, 4], notices=[skipped], ids_of=ids_of) == Plan(0, ((8, 16),))


def test_no_single_peer_says_how_far_back_or_which_data() -> None:
    """Who has nothing to add, says so or keeps its parts back at any step it likes, and has spoilt nothing."""
    told = [Notice("not_finite", 5, 0, (PEER,), (), "it says so"), Notice("left_out", 6, 0, (PEER,), (), "no parts")]
    skipped = Notice("skipped", 14, 1, (PEER,), (), "long")
    made = plan(Wish(None, None), versions=[4, 8, 12, 16], notices=[*told, skipped], ids_of=ids_of)
    assert made == Plan(12, ((52, 60),))


def test_what_is_named_is_taken_as_it_is() -> None:
    assert plan(Wish(None, ()), versions=[4, 8], notices=[spike(5)], ids_of=ids_of) == Plan(8, ())
    assert plan(Wish(4, ((1, 3),)), versions=[4, 8], notices=[], ids_of=ids_of) == Plan(4, ((1, 3),))


@pytest.mark.parametrize(
    ("wish", "notices", "said"),
    [
        (Wish(None, None), [], "nothing was noticed lately"),
        (Wish(None, None), [Notice("stalled", 9, 0, (), (), "silent")], "nothing was noticed lately"),
        (Wish(None, None), [Notice("not_finite", 6, 0, (PEER,), (), "it says so")], "nothing was noticed lately"),
        (Wish(None, None), [Notice("left_out", 6, 0, (PEER,), (), "no parts")], "nothing was noticed lately"),
        (Wish(5, ()), [], "--to 5: no such version is kept; choose one of 4, 8"),
        (Wish(None, None), [spike(3)], "up to 2: no such version is kept"),
        (Wish(None, ((0, 1 << 30),)), [], "skip less"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_remedy(wish: Wish, notices: list[Notice], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        plan(wish, versions=[4, 8], notices=notices, ids_of=ids_of)


def test_the_commands_words_are_read_or_refused() -> None:
    assert Wish.from_texts("last-anchor", "auto") == Wish(None, None)
    assert Wish.from_texts("96", "none") == Wish(96, ())
    assert Wish.from_texts("newest", "480:512,1:2") == Wish(NEWEST, ((1, 2), (480, 512)))
    for text in ("5:5", "5", "-1:4", "a:b", "", "1:2,", "1:\u00b2"):
        with pytest.raises(SettingsError, match="FIRST:STOP"):
            Wish.from_texts("96", text)
    with pytest.raises(SettingsError, match="last-anchor"):
        Wish.from_texts("-3", "none")


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["rollback", str(tmp_path), "--yes"]) is ExitCode.BAD_INPUT
    assert "holds no run" in capsys.readouterr().err


def test_without_a_host_the_command_says_so_at_once_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = prepare(MANIFEST, tmp_path).folder
    Ledger(folder.ledger).close()
    with HeldRun(folder.root):
        pass  # a host was there
    assert run(["rollback", str(folder.root), "--yes"]) is ExitCode.NOT_RUNNING
    assert "no host serves the run" in capsys.readouterr().err
    assert list(Ledger(folder.ledger).events()) == []


def test_before_the_run_has_begun_the_command_is_told_so_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def ask() -> None:
        async with hosted(tmp_path) as host:
            for more in (["--to", "4", "--skip", "none"], ["--to", "newest"]):
                arguments = ["rollback", str(host.run.folder.root), "--yes", *more]
                assert await asyncio.to_thread(run, arguments) is ExitCode.BAD_INPUT
                assert "not rolled back: the run has not begun" in capsys.readouterr().err

    asyncio.run(ask())


def test_a_mistake_is_said_before_a_host_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Ledger(tmp_path / "ledger.sqlite").close()
    assert run(["rollback", str(tmp_path), "--yes", "--to", "then"]) is ExitCode.BAD_INPUT
    assert "--to then: give a version" in capsys.readouterr().err


def test_a_host_that_ends_meanwhile_is_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Ending:
        def notices(self, last: int) -> list[str]:
            return []

        async def roll_back(self, to: str, skip: str) -> str:
            ended.set()
            return await asyncio.get_running_loop().create_future()

    async def ask() -> None:
        with HeldRun(tmp_path) as held, tempfile.TemporaryDirectory(dir="/tmp") as short:
            desk: Any = Ending()
            socket = await serve_owner_of_host(desk, Path(short))
            held.listens_at(socket.path)
            asked = asyncio.ensure_future(asyncio.to_thread(run, ["rollback", str(tmp_path), "--yes"]))
            await ended.wait()
            await socket.close()
            assert await asked is ExitCode.NOT_RUNNING

    Ledger(tmp_path / "ledger.sqlite").close()
    ended = asyncio.Event()
    asyncio.run(ask())
    assert "has ended without an answer" in capsys.readouterr().err


class Unused(SimpleNamespace):
    """What a rollback needs besides what a test is about."""


@pytest.mark.parametrize("boast", [99, 80, 1 << 62])
def test_no_single_peer_says_how_far_the_run_has_come(boast: int) -> None:
    """Who says that its stage is at the run's end would keep the owner from going back, or have the run go on from
    there: the steps between are never taken."""

    async def scenario() -> int:
        network = MemoryNetwork(random.Random(0))
        host, liar = network.transport(identity_of(0)), network.transport(identity_of(1))

        async def on_standing(sender: PeerId, request: Message) -> Message:
            return Message({"version": boast})

        liar.serve(STANDING, on_standing, max_body_bytes=0)
        settings = replace(small_settings(1), optimizer=replace(small_settings(1).optimizer, total_steps=100))
        known: dict[str, Any] = dict.fromkeys((one.name for one in fields(RollingBack) if one.init), Unused())
        known |= {
            "run": Unused(settings=settings),
            "transport": host,
            "progress": Unused(present=lambda: [liar.peer_id]),
            "justice": Unused(may_train=lambda peer: True),
            "followed": {0: Unused(version=20)},
        }
        return await RollingBack(**known)._unreached()

    assert 20 + AHEAD <= asyncio.run(scenario()) <= 20 + 2 * AHEAD + 1


def test_a_host_that_is_killed_as_soon_as_a_rollback_counts_goes_on_from_its_state(tmp_path: Path) -> None:
    """Its ledger named states that the next process of the host removed as leftovers: nobody had them any more."""

    async def scenario() -> None:
        async with hosted(tmp_path) as host:
            beginning, members = host.itself._beginning, [(PEER,), (PEER,)]
            states = [replace(state, version=24) for state in host.run.states]
            starts = [stage_start(stage, state) for stage, state in enumerate(states)]

            def begin() -> None:
                sources = [StageSource.of_start(start) for start in starts]
                for genesis in beginning.signed(sources, members, LeaseTable(), known={}, era=1):
                    host.ledger.append("genesis", genesis.to_value())
                shutil.copytree(host.run.folder.root, tmp_path / "killed" / "host")

            await host.itself._archivist.archive_beginning(24, starts, LeaseTable(), anchored=True, begin=begin)

    asyncio.run(scenario())
    assert prepare(manifest_of(), tmp_path / "killed").version == 24


def test_a_host_that_is_started_again_tells_once_more_that_the_stages_began_again(tmp_path: Path) -> None:
    """Peers whose steps are quick do not ask, and trained on in the era before."""

    async def scenario() -> None:
        network, heard = MemoryNetwork(random.Random(0)), asyncio.Queue[tuple[int, Any]]()
        host, peer = network.transport(identity_of(0)), network.transport(identity_of(1))

        async def on_rollback(sender: PeerId, request: Message) -> Message:
            fields = Fields("rollback call", request.meta)
            heard.put_nowait((fields.integer("to_version"), Genesis.from_value(fields.message("genesis"))))
            return Message()

        peer.serve(ROLLBACK, on_rollback, max_body_bytes=0)
        async with hosted(tmp_path) as made:
            sources = [StageSource.of_start(start) for start in made.itself._beginning.stages]
            members = [(peer.peer_id,)] * len(sources)
            geneses = made.itself._beginning.signed(sources, members, LeaseTable(), known={}, era=1)
        chain = Unused(members=())
        known: dict[str, Any] = dict.fromkeys((one.name for one in fields(RollingBack) if one.init), Unused())
        known |= {
            "transport": host,
            "followed": {stage: Unused(chain=chain) for stage in range(len(geneses))},
            "beginning": Unused(geneses=geneses, to_version=4),
        }
        serving = asyncio.ensure_future(RollingBack(**known).serve())
        told = [await asyncio.wait_for(heard.get(), 10.0) for _ in geneses]
        assert sorted(told, key=lambda one: int(one[1].stage)) == [(4, genesis) for genesis in geneses]
        serving.cancel()

    asyncio.run(scenario())


# -- a live swarm ----------------------------------------------------------------------------------------------

MANIFEST = manifest_of(
    data={"chunk_tokens": 272},  # eight microbatches, two steps
    optimizer={"total_steps": 34},
    checkpoint={"every_steps": 16, "snapshot_every": 4},
    limits={"founders_per_stage": 1},
)
BAD_CHUNK = 7
BAD_STEPS = (14, 15)
BAD_IDS = set(range(56, 64))


def spoil(folder: Path) -> None:
    """Text of the manifest's run, whose eighth chunk in the order of training is noise."""
    text = sample_text(40_000, seed=0)
    (folder / "text.txt").write_text(text)
    probe = prepare(MANIFEST, folder / "probe")
    order = DataOrder.of_run(probe.settings)
    assert {order.chunk_of(MicrobatchId(number)) for number in BAD_IDS} == {BAD_CHUNK}
    (span,) = order.spans(MicrobatchId(number) for number in BAD_IDS)
    assert text.isascii(), "a token is a character"
    spoilt, rng = list(text), random.Random(5)
    for start, stop in span.tokens:
        spoilt[start:stop] = rng.choices(string.ascii_uppercase + string.digits, k=stop - start)
    (folder / "text.txt").write_text("".join(spoilt))


def hold_at(swarm: InProcessSwarm, **facts: Any) -> None:
    """The source's owner pauses it at the event with these facts: a tiny run is over before anyone could look."""

    def look(event: Event) -> None:
        if facts.items() <= event.items():
            for peer in swarm.of_stage(0):
                peer.daemon.shared.permit.withhold("the test looks")

    swarm.on_event.append(look)


def test_a_planted_loss_spike_is_rolled_back_by_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoil(tmp_path)

    async def scenario() -> dict[str, Any]:
        async with swarm_in_process(MANIFEST, tmp_path, peers=(1, 2)) as swarm:
            hold_at(swarm, event="notice", kind="loss_spike", step=BAD_STEPS[-1])
            folder = swarm.run.folder.root
            await swarm.until(lambda: any(e["event"] == "notice" and e["step"] == BAD_STEPS[-1] for e in swarm.events))
            told = [event for event in swarm.events if event["event"] == "notice"][: len(BAD_STEPS)]
            assert [(one["kind"], one["step"]) for one in told] == [("loss_spike", step) for step in BAD_STEPS]
            assert [one["ids"] for one in told] == [[[56, 60]], [[60, 64]]]
            everybody = {peer.peer_id for peer in swarm.peers}
            assert all(swarm.peers[0].peer_id in one["peers"] and set(one["peers"]) <= everybody for one in told)

            async with commanded(swarm.host):
                assert await asyncio.to_thread(run, ["rollback", str(folder), "--yes", "--wait", "60"]) is ExitCode.OK
            (done,) = [event for event in swarm.events if event["event"] == "rolled_back"]
            assert done["to"] == 12
            # A step that was under way when the source paused may end and be noticed as well: its weights are spoilt.
            last = max(event["step"] for event in swarm.events if event["event"] == "notice")
            assert last in (BAD_STEPS[-1], BAD_STEPS[-1] + 1)
            stop = ids_of(last).stop
            assert done["skip"] == [[52, stop]]
            for peer in swarm.of_stage(0):
                peer.daemon.shared.permit.give()
            report = await swarm.finished()
            assert report["steps"] == 34
            assert not [n for n in report["notices"] if n["step"] > last]
            assert all(len(set(digests.values())) == 1 for digests in report["state_digests"].values())
            first = done["version"]
            used = [number for step in range(first, 34) for number in report["microbatches"][str(step)]]
            assert all(peer.steps.era == 1 for peer in swarm.peers)
            assert used == [*range(48, 52), *range(stop, stop + len(used) - 4)]
            return done

    done = asyncio.run(scenario())
    shown = capsys.readouterr().out
    assert "loss spike: step 14" in shown
    assert "microbatches 56 to 59 (tokens " in shown
    assert f"the run goes on as version {done['version']}" in shown

    # A host that is started again knows it all from its ledger and its folder.
    ledger, books = Ledger(tmp_path / "host" / "ledger.sqlite"), Books()
    books.catch_up(ledger)
    ledger.close()
    assert books.rollbacks == [(12, done["version"])]
    assert books.is_abandoned(16)
    assert not books.is_abandoned(12)
    assert {genesis.era for genesis in books.geneses.values()} == {1}
    assert {int(genesis.version) for genesis in books.geneses.values()} == {done["version"]}
    again = prepare_run(parse_manifest(MANIFEST, tmp_path / "run.toml"), tmp_path / "host", lambda what: None)
    assert again.version == 34
    assert books.versions[0][0] == 34


@pytest.mark.soak
def test_a_peer_that_did_not_hear_finds_itself_behind(tmp_path: Path) -> None:
    manifest = manifest_of(
        optimizer={"total_steps": 60},
        checkpoint={"every_steps": 20, "snapshot_every": 4},
        limits={"founders_per_stage": 2},
    )

    async def deaf(sender: PeerId, request: Message) -> Message:
        raise TransientError("asleep")

    async def scenario() -> None:
        async with swarm_in_process(manifest, tmp_path, peers=(2, 2)) as swarm:
            hold_at(swarm, event="version", version=6)
            await swarm.until_version(6)
            sleeper = swarm.of_stage(1)[1]
            sleeper.transport.serve(ROLLBACK, deaf, max_body_bytes=0)
            arguments = ["rollback", str(swarm.run.folder.root), "--yes", "--skip", "none", "--to", "4"]
            async with commanded(swarm.host):
                assert await asyncio.to_thread(run, arguments) is ExitCode.OK
            for peer in swarm.of_stage(0):
                peer.daemon.shared.permit.give()
            await swarm.until(lambda: sleeper.steps.era == 1 and sleeper.steps.is_member)
            assert len(sleeper.steps.chain.members) == 2
            report = await swarm.finished()
            assert report["steps"] == 60
            assert len(report["state_digests"]["1"]) == 2
            assert all(len(set(digests.values())) == 1 for digests in report["state_digests"].values())

    asyncio.run(scenario())


# -- with processes --------------------------------------------------------------------------------------------

SKIPPED = set(range(200, 220))


@pytest.mark.processes
@pytest.mark.soak
def test_a_live_run_is_rolled_back_and_its_host_killed_and_started_again(zygote: Zygote, tmp_path: Path) -> None:
    with ProcessSwarm(zygote, tmp_path, steps=80, every=8) as swarm:
        swarm.start_host()
        swarm.start_founders()
        swarm.wait_for("version", version=14)
        swarm.kill("p1a")
        command = ["rollback", str(tmp_path / "host"), "--yes", "--skip", "200:220", "--wait", "60"]
        asked = zygote.start(command, tmp_path / "rollback.log")
        assert zygote.exit_code(asked, timeout_s=90) == 0, (tmp_path / "rollback.log").read_text()
        done = swarm.wait_for("rolled_back")
        assert f"goes on as version {done['version']}" in (tmp_path / "rollback.log").read_text()
        swarm.wait_for("version", version=done["version"] + 2)

        os.kill(swarm.host, signal.SIGKILL)
        assert zygote.exit_code(swarm.host, timeout_s=30) == -9
        swarm.start_host()
        assert swarm.wait_for("recovered", timeout_s=90)["version"] >= done["version"] + 2
        report = swarm.finish(timeout_s=180)
        assert report["steps"] == 80
        assert not [event for event in swarm.events() if event["event"] == "rolled_back"][1:], "it was done twice"
        for digests in report["state_digests"].values():
            assert len(set(digests.values())) == 1

        ledger = Ledger(tmp_path / "host" / "ledger.sqlite")
        results: list[Any] = [event.facts for event in ledger.events("result")]
        ledger.close()
        branch = {facts["step"]: facts["ids"] for facts in results if facts["stage"] == 0}
        kept = [number for step, ids in branch.items() if step < done["to"] for number in ids]
        new = [number for step, ids in branch.items() if step >= done["version"] for number in ids]
        assert len(kept + new) == len(set(kept + new)), "a sample was taken twice in one branch"
        assert SKIPPED.isdisjoint(new)
        assert set(range(max(new) - 300)) <= {*kept, *new, *SKIPPED}, "a sample was lost"
        assert sorted(branch)[-1] == 79
    assert zygote.leftovers() == []
