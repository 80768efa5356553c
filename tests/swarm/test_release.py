"""Whoever is too old for a run is told how to upgrade, by an exit code of its own; an invite leads to one run only."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from peer.owner.limits import VolunteerSettings
from peer.program.daemon import PeerDaemon
from swarm.cli import ExitCode, run
from swarm.core.errors import RemoteError, SettingsError, UpgradeNeeded
from swarm.core.ids import RunId
from swarm.invite import Invite
from swarm.release import PROTOCOL, __version__, check_protocol, check_release, checked_release
from tests.swarm.test_invite import INVITE
from tests.swarm_in_process import InProcessSwarm, identity_of, manifest_of, swarm_in_process


def test_protocol_of_another_number_is_refused_with_what_to_do() -> None:
    check_protocol(PROTOCOL)
    with pytest.raises(UpgradeNeeded, match="upgrade with `pip install --upgrade homeswarm`"):
        check_protocol(PROTOCOL + 1)
    with pytest.raises(UpgradeNeeded, match="install the release that its host names"):
        check_protocol(PROTOCOL - 1)


def test_release_below_the_minimum_is_refused() -> None:
    for enough in ("0", "0.0.9", __version__, f"{__version__}.0", "not a release", ""):
        check_release(enough)
    for more in ("99", "0.1.0.1", "0.2"):
        with pytest.raises(UpgradeNeeded, match=f"homeswarm {more} and newer, this is {__version__}"):
            check_release(more)
    with pytest.raises(SettingsError, match="--minimum-release next"):
        checked_release("next")


def test_join_with_an_invite_of_another_protocol_has_its_own_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = replace(INVITE, protocol=PROTOCOL + 1).line()
    assert run(["join", line, "--yes", "--dir", str(tmp_path / "peer")]) is ExitCode.UPGRADE
    assert "pip install --upgrade homeswarm" in capsys.readouterr().err
    assert not (tmp_path / "peer").exists()


def invite_to(swarm: InProcessSwarm) -> Invite:
    return replace(
        INVITE,
        run_id=swarm.run.run_id,
        run_key=swarm.run.run_key.peer_id,
        host_key=swarm.run.host_key.peer_id,
        addresses=(f"/ip4/127.0.0.1/tcp/1/p2p/{swarm.run.host_key.peer_id}",),
    )


async def joined(swarm: InProcessSwarm, invite: Invite, folder: Path) -> None:
    """A peer that follows the invite, until it ends."""
    identity = identity_of(77)
    volunteer = VolunteerSettings(folder=folder, threads=1, stage=0, invite=invite)
    transport, directory = swarm.network.transport(identity), swarm.network.directory(identity)
    try:
        daemon = PeerDaemon(volunteer, identity, transport, directory, swarm.run.host_key.peer_id)
        async with asyncio.timeout(20):
            await daemon.run(asyncio.Event())
    finally:
        await directory.close()
        await transport.close()


def test_peer_leaves_a_run_or_a_run_key_that_its_invite_does_not_name(tmp_path: Path) -> None:
    async def follow() -> None:
        async with swarm_in_process(manifest_of(), tmp_path, peers=()) as swarm:
            invite = invite_to(swarm)
            wrong = {
                "run_id": replace(invite, run_id=RunId("00" * 32)),
                "run_key": replace(invite, run_key=invite.host_key),
            }
            for kind, other in wrong.items():
                with pytest.raises(RemoteError) as error:
                    await joined(swarm, other, tmp_path / "peer")
                assert error.value.kind == kind
            assert not swarm.host.books.peers

    asyncio.run(follow())


def test_peer_that_is_too_old_is_not_taken_in_and_one_that_has_become_so_drains_and_goes(tmp_path: Path) -> None:
    async def follow() -> None:
        async with swarm_in_process(manifest_of(optimizer={"total_steps": 500}), tmp_path, peers=(1, 1)) as swarm:
            await swarm.until_version(2)
            swarm.host.settings = replace(swarm.host.settings, minimum_release="99.0")
            with pytest.raises(UpgradeNeeded):
                await joined(swarm, invite_to(swarm), tmp_path / "peer")
            for peer in swarm.peers:
                with pytest.raises(UpgradeNeeded, match=r"homeswarm 99\.0 and newer"):
                    async with asyncio.timeout(30):
                        await asyncio.shield(peer.task)

    asyncio.run(follow())
