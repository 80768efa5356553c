"""Who is admitted: `swarm ticket` gives and takes away while the host runs; a peer shows its voucher over p2p too."""

import asyncio
import json
from pathlib import Path

import pytest

from bootstrap.admission import AdmissionPolicy, listed_peers
from bootstrap.books import Books
from bootstrap.ledger import Ledger
from swarm.cli import ExitCode, run
from swarm.core.address_rates import AddressRates
from swarm.core.errors import RemoteError, SettingsError
from swarm.core.ids import PeerId
from swarm.host_protocol import ADMIT
from swarm.invite import Invite, parse_invite
from swarm.network.transport import Message
from tests.hosted import Hosted, hosted
from tests.swarm_in_process import identity_of


async def ask(host: Hosted, number: int, voucher: str) -> int:
    """The stage that a peer is admitted to over p2p."""
    transport = host.network.transport(identity_of(number))
    try:
        meta = {"stage": None, "chain_end": bytes(32), "voucher": voucher}
        reply = await transport.call(host.run.host_key.peer_id, ADMIT, Message(meta), timeout_s=10.0, max_body_bytes=0)
        stage = reply.meta["stage"]
        assert isinstance(stage, int)
        return stage
    finally:
        await transport.close()


def given(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> Invite:
    assert run(["ticket", "create", str(folder), *more]) is ExitCode.OK
    return parse_invite(capsys.readouterr().out)


def test_vouchers_admit_until_they_are_used_up_or_revoked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def admit() -> None:
        async with hosted(tmp_path, policy=AdmissionPolicy("ticket")) as host:
            folder = host.run.folder.root
            for_two = given(folder, capsys, "--uses", "2", "--note", "the lab")
            for_nobody = given(folder, capsys)
            assert run(["ticket", "revoke", str(folder), for_nobody.voucher]) is ExitCode.OK
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
            assert identity_of(2).peer_id not in host.coordinator.progress.peers
            capsys.readouterr()
            assert run(["ticket", "list", str(folder), "--json"]) is ExitCode.OK
            listed = {one["note"]: one for one in json.loads(capsys.readouterr().out)}
            assert len(listed["the lab"]["used_by"]) == 2
            assert listed[""]["state"] == "is revoked"

    asyncio.run(admit())
    assert "the lab" not in (tmp_path / "host" / "invite").read_text()


def test_secret_of_a_voucher_is_written_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def create() -> Invite:
        async with hosted(tmp_path, policy=AdmissionPolicy("ticket")) as host:
            return given(host.run.folder.root, capsys)

    secret = asyncio.run(create()).voucher
    assert len(secret) == 30
    written = [path for path in tmp_path.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    assert written == []
    ledger, books = Ledger(tmp_path / "host" / "ledger.sqlite"), Books()
    books.catch_up(ledger)
    ledger.close()
    assert len(books.vouchers) == 1


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
