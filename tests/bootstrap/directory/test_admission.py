"""Who is admitted, and that `swarm ticket` gives and takes away while the host runs."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from bootstrap.directory import admission
from bootstrap.directory.admission import AdmissionPolicy, listed_peers
from bootstrap.program.books import Books, Credit
from bootstrap.program.held_run import HeldRun
from bootstrap.program.ledger import Ledger
from swarm.cli import ExitCode, run
from swarm.core.directory.address_rates import AddressRates
from swarm.core.errors import RemoteError, SettingsError, TransientError
from swarm.core.ids import PeerId, StageIndex, Version
from swarm.host_protocol import ADMIT
from swarm.invite import Invite, parse_invite
from swarm.network.transport import Message
from tests.bootstrap.state.hosted import Hosted, hosted
from tests.swarm_in_process import identity_of
from verification.audit.verdicts import Ban, Promotion


async def ask(
    host: Hosted, number: int, voucher: str = "", *, stage: int | None = None, chain_end: bytes = bytes(32)
) -> int:
    """The stage that a peer is admitted to."""
    transport = host.network.transport(identity_of(number))
    try:
        meta = {"stage": stage, "chain_end": chain_end, "voucher": voucher}
        reply = await transport.call(host.run.host_key.peer_id, ADMIT, Message(meta), timeout_s=10.0, max_body_bytes=0)
        stage = reply.meta["stage"]
        assert isinstance(stage, int)
        return stage
    finally:
        await transport.close()


async def ticket(verb: str, folder: Path, *more: str) -> None:
    """In a thread: it asks the host, which answers on this event loop."""
    assert await asyncio.to_thread(run, ["ticket", verb, str(folder), *more]) is ExitCode.OK


async def given(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> Invite:
    await ticket("create", folder, *more)
    return parse_invite(capsys.readouterr().out)


def test_vouchers_admit_until_they_are_used_up_or_revoked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def admit() -> None:
        async with hosted(tmp_path, policy=AdmissionPolicy("ticket")) as host:
            folder = host.run.folder.root
            for_two = await given(folder, capsys, "--uses", "2", "--note", "the lab")
            for_nobody = await given(folder, capsys)
            await ticket("revoke", folder, for_nobody.voucher)
            assert {await ask(host, 0, for_two.voucher), await ask(host, 1, for_two.voucher)} == {0, 1}
            before = host.ledger_size()
            for number, voucher, said in (
                (2, for_two.voucher, "has admitted 2 already"),
                (2, for_nobody.voucher, "is revoked"),
                (2, "", "ask its host for an invite that holds one"),
                (2, "0" * 30, "knows no voucher like that"),
            ):
                with pytest.raises(RemoteError, match=said):
                    await ask(host, number, voucher)
            assert await ask(host, 0, "") in (0, 1)  # who was admitted once comes in again
            assert host.ledger_size() == before
            assert identity_of(2).peer_id not in host.itself.progress.peers
            capsys.readouterr()
            await ticket("list", folder, "--json")
            listed = {one["note"]: one for one in json.loads(capsys.readouterr().out)}
            assert len(listed["the lab"]["used_by"]) == 2
            assert listed[""]["state"] == "is revoked"

    asyncio.run(admit())
    assert "the lab" not in (tmp_path / "host" / "invite").read_text()


def test_who_is_shut_out_or_comes_with_another_chain_or_a_stage_that_is_not_is_refused(tmp_path: Path) -> None:
    async def knock() -> None:
        async with hosted(tmp_path) as host:
            with pytest.raises(RemoteError, match="stage"):
                await ask(host, 0, stage=7)
            assert await ask(host, 0, stage=1) == 1
            before = host.ledger_size()
            with pytest.raises(RemoteError, match="another hash chain"):
                await ask(host, 0, stage=1, chain_end=b"d" * 32)
            assert host.ledger_size() == before
            peer = identity_of(0).peer_id
            ban = Ban(host.run.run_id, peer, StageIndex(0), Version(1), "replay_mismatch", bytes(32))
            host.ledger.append("ban", ban.signed_by(host.run.run_key).to_value())
            with pytest.raises(RemoteError, match="is shut out of this run"):
                await ask(host, 0)

    asyncio.run(knock())


def test_a_member_among_strangers_goes_to_no_stage_that_it_wishes_for(tmp_path: Path) -> None:
    """Else liars with places in any stages would wait for the one that they want to be empty."""
    member, newcomer, public = 0, 1, {"trust": "public"}

    async def let_in() -> None:
        async with hosted(tmp_path, run=public) as host:
            assert [await ask(host, number, stage=1) for number in (member, newcomer)] == [1, 1]
            promotion = Promotion(host.run.run_id, identity_of(member).peer_id, StageIndex(1), Version(3))
            host.ledger.append("promotion", promotion.signed_by(host.run.run_key).to_value())

    async def come_again() -> None:
        async with hosted(tmp_path, run=public) as host:
            assert await ask(host, member, stage=0) == 1
            assert await ask(host, newcomer, stage=0) == 0

    asyncio.run(let_in())
    asyncio.run(come_again())


def test_list_admits_whom_it_names(tmp_path: Path) -> None:
    async def knock() -> None:
        listed = AdmissionPolicy("list", frozenset({identity_of(0).peer_id}))
        async with hosted(tmp_path, policy=listed) as host:
            assert await ask(host, 0) == 0
            with pytest.raises(RemoteError, match="is not on this run's list"):
                await ask(host, 1)

    asyncio.run(knock())


def test_secret_of_a_voucher_is_written_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def create() -> Invite:
        async with hosted(tmp_path, policy=AdmissionPolicy("ticket")) as host:
            return await given(host.run.folder.root, capsys)

    secret = asyncio.run(create()).voucher
    assert len(secret) == 30
    written = [path for path in tmp_path.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    assert written == []
    ledger, books = Ledger(tmp_path / "host" / "ledger.sqlite"), Books()
    books.catch_up(ledger)
    ledger.close()
    assert len(books.vouchers) == 1


def test_vouchers_are_given_away_and_taken_back_while_no_host_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def host_and_end() -> Path:
        async with hosted(tmp_path, policy=AdmissionPolicy("ticket")) as host:
            return host.run.folder.root

    async def by_a_host() -> None:
        async with hosted(tmp_path, policy=AdmissionPolicy("ticket")) as host:
            with pytest.raises(RemoteError, match="is revoked"):
                await ask(host, 0, revoked.voucher)
            assert await ask(host, 0, good.voucher) in (0, 1)

    folder = asyncio.run(host_and_end())
    good, revoked = (asyncio.run(given(folder, capsys, "--note", note)) for note in ("good", "revoked"))
    asyncio.run(ticket("revoke", folder, revoked.voucher))
    asyncio.run(by_a_host())


def test_a_host_that_cannot_be_asked_is_said_to_be_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Ledger(tmp_path / "ledger.sqlite").close()
    with HeldRun(tmp_path) as held:
        assert run(["ticket", "list", str(tmp_path)]) is ExitCode.NOT_RUNNING
        assert "is only just starting" in capsys.readouterr().err
        held.listens_at(tmp_path / "gone.sock")
        assert run(["ticket", "list", str(tmp_path)]) is ExitCode.NOT_RUNNING
        assert "the host has ended" in capsys.readouterr().err


def test_ticket_of_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in (["create"], ["list"]):
        assert run(["ticket", *verb, str(tmp_path)]) is ExitCode.BAD_INPUT
        assert "holds no run" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_list_of_peers_is_read_by_line(tmp_path: Path) -> None:
    one, other = (identity_of(number).peer_id for number in range(2))
    path = tmp_path / "peers"
    path.write_text(f"# the lab\n{one}\n\n  {other}  # her laptop\n")
    assert listed_peers(path) == frozenset({one, other})
    path.write_text(f"{one}\n{PeerId(one[:-1])}\n")
    with pytest.raises(SettingsError, match="line 2"):
        listed_peers(path)


def test_address_that_hurries_waits_and_the_others_do_not() -> None:
    rates = AddressRates(calls_per_s=2.0, burst=3.0, max_addresses=2)
    assert [rates.take("a", now=0.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    assert rates.take("b", now=0.0) == 0.0
    assert rates.take("a", now=0.4) == pytest.approx(0.1)
    assert rates.take("a", now=0.5) == 0.0
    assert rates.take("a", now=100.0) == 0.0
    assert [rates.take("a", now=100.0) for _ in range(3)] == [0.0, 0.0, 0.5], "no more than the burst is saved up"
    rates.take("c", now=100.0)
    assert [rates.take("b", now=100.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5], "b was forgotten for c"


def test_a_crowd_of_keys_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more than the books hold, those are forgotten who have done nothing and were not heard of for longest."""
    monkeypatch.setattr(admission, "MAX_IDENTITIES", 4)
    monkeypatch.setattr(admission, "FORGOTTEN_AT_ONCE", 2)

    async def admit() -> None:
        async with hosted(tmp_path, policy=AdmissionPolicy("open")) as host:
            books, progress = host.itself.books, host.itself.progress
            for number in range(4):
                await ask(host, number, "")
            first, second, third = (identity_of(number).peer_id for number in range(3))
            books.credit[first] = Credit(64, 1, 1)
            progress.peers[second].last_heard += 1000.0
            await ask(host, 4, "")
            assert set(host.itself.books.peers) == {first, second, identity_of(4).peer_id}
            assert third not in progress.peers
            await ask(host, 2, "")  # who was forgotten may come again
            assert third in host.itself.books.peers
            again = Books()
            again.catch_up(Ledger(host.run.folder.ledger))
            assert set(again.peers) == set(host.itself.books.peers)

    asyncio.run(admit())


def test_one_key_or_many_of_one_network_fill_no_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that wished for another stage at each call had the host write two events, for ever, as fast as it asked."""
    monkeypatch.setattr(admission, "AT_ONCE", 4.0)

    async def scenario() -> None:
        async with hosted(tmp_path) as host:
            for stage in (0, 1, 0):
                assert await ask(host, 0, stage=stage) == stage
            before = host.ledger_size()
            assert await ask(host, 1) in (0, 1)
            for number, stage in ((0, 1), (1, None), (2, None), (0, 0)):
                held = host.itself.books.peers.get(identity_of(number).peer_id)
                if held is not None and stage in (None, held.stage):
                    await ask(host, number, stage=stage)  # nothing is to be written down of it
                else:
                    with pytest.raises(TransientError, match="from your network have been admitted"):
                        await ask(host, number, stage=stage)
            assert host.ledger_size() == before + 2

    asyncio.run(scenario())


def test_where_the_stages_were_cut_anew_whoever_was_there_comes_back_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of those that only a relay reaches are one network: they would have waited for five seconds each."""
    monkeypatch.setattr(admission, "AT_ONCE", 2.0)

    async def scenario() -> None:
        async with hosted(tmp_path) as host:
            peers = host.itself.books.peers
            for number in range(2):
                await ask(host, number, stage=0)
            for peer, one in list(peers.items()):
                peers[peer] = replace(one, stage=None)  # as an amendment of the stages leaves them
            for number in range(2):
                assert await ask(host, number, stage=1) == 1
            with pytest.raises(TransientError, match="from your network"):
                await ask(host, 0, stage=0)

    asyncio.run(scenario())
