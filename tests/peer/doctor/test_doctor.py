"""The doctor's judgements, each on what it would find, and its dial by another implementation of libp2p."""

import asyncio
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from peer.doctor import diagnosis, looks
from peer.doctor.diagnosis import Dialled, Finding, Level
from peer.doctor.looks import Examination
from peer.doctor.probes import DialCheck, unmet_requirements
from peer.program.state_folder import StateFolder
from swarm.core.owner.guest import GIB
from swarm.core.owner.limits import OwnerLimits
from swarm.identity.key import Identity
from swarm.network.p2pd.p2p import P2PSettings, P2PTransport
from tests.process_swarm import ProcessSwarm, Zygote

Examined = dict[str, tuple[str, str, str]]
SEED = "/ip4/203.0.113.5/tcp/4001/p2p/12D3KooW"


@pytest.mark.parametrize(
    ("p2pd", "libp2p", "level", "part"),
    [
        ("", "", Level.OK, "answers in 12 ms"),
        ("", "no answer", Level.WARNING, "none needed to train"),
        ("dial backoff", "", Level.PROBLEM, "p2pd waits before it dials a failed address again"),
        ("failed", "[Errno 111] Connection refused", Level.PROBLEM, "nothing listens at that port"),
        ("failed", "no answer within 6 s", Level.PROBLEM, "firewall"),
        ("failed", "failed to upgrade security for peer", Level.PROBLEM, "another identity"),
        (None, None, Level.WARNING, "try again"),
    ],
)
def test_a_seed_that_does_not_answer_has_its_cause(
    p2pd: str | None, libp2p: str | None, level: Level, part: str
) -> None:
    finding = diagnosis.seed(Dialled(SEED, p2pd, libp2p, ping_ms=12.0))
    assert finding.level is level
    assert part in f"{finding.says} {finding.remedy}"
    assert SEED in finding.says


@pytest.mark.parametrize(
    ("addresses", "errors", "sees", "level", "part"),
    [
        (["/ip4/127.0.0.1/tcp/1"], {}, ["198.51.100.7"], Level.PROBLEM, "--listen :PORT"),
        (["/ip4/127.0.0.1/tcp/1"], {}, ["127.0.0.1"], Level.OK, "it runs here"),
        (["/ip4/192.168.1.4/tcp/1"], {}, ["198.51.100.7"], Level.WARNING, "forward a TCP port"),
        (["/ip4/172.17.0.1/tcp/1"], {}, [], Level.WARNING, "the bridge of containers"),
        (["/ip4/8.8.4.4/tcp/1"], {}, ["8.8.4.4"], Level.OK, "can be dialled at 8.8.4.4"),
        (["/ip4/8.8.4.4/tcp/1"], {"/ip4/8.8.4.4/tcp/1": "timed out"}, [], Level.PROBLEM, "this machine's firewall"),
    ],
)
def test_where_this_peer_listens_is_judged(
    addresses: list[str], errors: dict[str, str], sees: list[str], level: Level, part: str
) -> None:
    found = diagnosis.announced(addresses, errors, sees)
    assert found[0].level is level
    assert part in f"{found[0].says} {found[0].remedy}"


@pytest.mark.parametrize(
    ("offset_s", "error_s", "level"),
    [
        (0.5, 0.1, Level.OK),
        (-4.0, 0.1, Level.PROBLEM),
        (4.0, 2.0, Level.OK),
        (8.0, 2.0, Level.PROBLEM),
        (None, 0.0, Level.WARNING),
    ],
)
def test_a_clock_is_wrong_only_beyond_what_the_way_explains(
    offset_s: float | None, error_s: float, level: Level
) -> None:
    assert diagnosis.clock(offset_s, error_s).level is level


def test_an_identity_that_answers_elsewhere_is_a_problem_unless_it_is_ours() -> None:
    for runs_here, elsewhere, level in [
        (False, True, Level.PROBLEM),
        (True, True, Level.OK),
        (False, False, Level.OK),
        (False, None, Level.OK),
    ]:
        assert diagnosis.identity("12D3", runs_here=runs_here, answers_elsewhere=elsewhere).level is level


def test_too_little_room_names_the_limit_or_the_machine() -> None:
    assert diagnosis.room("memory", 8 * GIB, None, 7 * GIB, "memory-gib").level is Level.OK
    limited = diagnosis.room("memory", 8 * GIB, 4 * GIB, 7 * GIB, "memory-gib")
    assert limited.level is Level.PROBLEM
    assert "swarm config memory-gib 7.1" in limited.remedy
    assert "free some disk" in diagnosis.room("disk", GIB, None, None, "disk-gib").remedy


def test_a_clobbered_import_name_and_a_wrong_version_are_told() -> None:
    assert [found.level for found in diagnosis.dependencies([], ["homeswarm"])] == [Level.OK]
    versions, name = diagnosis.dependencies(["numpy 3.0 is installed, <2.4 is needed"], ["homeswarm", "kernels"])
    assert versions.level is name.level is Level.PROBLEM
    assert "numpy 3.0" in versions.says
    assert "pip uninstall kernels" in name.remedy
    assert unmet_requirements("no-such-distribution") == [
        "no-such-distribution is not installed, only found on the path"
    ]


@pytest.mark.parametrize(
    ("wanted", "seen", "cuda", "level"),
    [
        ("auto", None, None, Level.OK),
        ("cpu", ["one"], None, Level.OK),
        ("0", None, None, Level.PROBLEM),
        ("1", ["one"], "12.8", Level.PROBLEM),
        ("auto", ["one"], None, Level.PROBLEM),
        ("auto", ["one"], "12.8", Level.OK),
        ("all", ["one", "two"], "12.8", Level.OK),
        ("all", [], "12.8", Level.PROBLEM),
        ("0,1", ["one", "two"], "12.8", Level.OK),
        ("0,2", ["one", "two"], "12.8", Level.PROBLEM),
    ],
)
def test_a_gpu_needs_a_driver_and_torch_for_it(
    wanted: str, seen: list[str] | None, cuda: str | None, level: Level
) -> None:
    assert diagnosis.gpu(wanted, seen, cuda, "").level is level
    slower = diagnosis.gpu(wanted, seen, cuda, "a C compiler")
    uses_one = level is Level.OK and bool(seen) and wanted != "cpu"
    assert slower.level is (Level.WARNING if uses_one else level)
    assert not uses_one or "gcc" in slower.remedy


def test_a_loss_based_congestion_control_is_told_what_would_be_better() -> None:
    for control, advised in (("bbr", False), (None, False), ("cubic", True), ("reno", True)):
        finding = diagnosis.congestion(control)
        assert finding.level is Level.OK
        assert ("tcp_congestion_control=bbr" in finding.says) is advised


@pytest.mark.processes
def test_another_implementation_dials_p2pd() -> None:
    async def main() -> dict[str, dict[str, object]]:
        transport = await P2PTransport.create(Identity.generate(), P2PSettings(listen=("/ip4/127.0.0.1/tcp/0",)))
        try:
            (address,) = transport.addresses()
            other = f"{address.rpartition('/')[0]}/{Identity.generate().peer_id}"
            nobody = f"/ip4/127.0.0.1/tcp/1/p2p/{transport.peer_id}"
            async with DialCheck() as check, asyncio.timeout(60):
                told = await check.dial([address, other, nobody])
            return {"right": told[address], "other": told[other], "nobody": told[nobody]}
        finally:
            await transport.close()

    told = asyncio.run(main())
    assert told["right"]["error"] == ""
    assert "/ipfs/ping/1.0.0" in str(told["right"]["protocols"])
    assert told["right"]["sees_us_at"] == "127.0.0.1"
    assert told["other"]["error"]
    assert "refused" in str(told["nobody"]["error"])


def examined(zygote: Zygote, swarm: ProcessSwarm, folder: Path, *, listen: str, clock: Path | None = None) -> Examined:
    """(level, what is said, remedy) of each look that the doctor takes, by name; it keeps to its time."""
    invite, log = swarm.wait_for("listening")["invite"], folder.with_suffix(".log")
    began = time.monotonic()
    argv = ["doctor", invite, "--json", "--dir", str(folder), "--listen", listen]
    code = zygote.exit_code(zygote.start(argv, log, clock=clock), timeout_s=30)
    print(f"{folder.name}: {time.monotonic() - began:.1f} s")
    assert time.monotonic() - began <= 15.0
    told = json.loads(log.read_text())
    assert code == (1 if told["problems"] else 0)
    return {found["name"]: (found["level"], found["says"], found["remedy"]) for found in told["findings"]}


@pytest.mark.processes
@pytest.mark.soak
def test_the_doctor_names_what_is_wrong_at_a_real_run(zygote: Zygote, tmp_path: Path) -> None:
    anywhere = "127.0.0.1:0"
    with ProcessSwarm(zygote, tmp_path, founders=1, steps=5000, every=5000) as swarm:
        swarm.start_host()
        swarm.start_founders()
        swarm.wait_for("version", version=1)
        found = examined(zygote, swarm, tmp_path / "healthy", listen=anywhere)
        assert {level for level, _, _ in found.values()} == {"ok"}, found
        assert {"seed", "reach", "clock", "memory", "disk", "dependencies", "GPU", "listening"} <= set(found)

        twin = StateFolder(tmp_path / "twin")
        twin.make()
        shutil.copy(StateFolder(tmp_path / "p0a").identity, twin.identity)
        twin.save_limits(OwnerLimits(memory_gib=0.1, gpu=0))
        swarm.set_clock("twin", ahead_s=10.0)
        found = examined(zygote, swarm, twin.path, listen=anywhere, clock=tmp_path / "twin.clock")
        for name, remedy in (
            ("identity", "identity"),
            ("clock", "timedatectl"),
            ("memory", "swarm config memory-gib"),
            ("GPU", "gpu"),
        ):
            assert found[name][0] == "problem", (name, found)
            assert remedy in found[name][2], (name, found)

        os.kill(swarm.host, signal.SIGKILL)
        zygote.exit_code(swarm.host, timeout_s=30)
        with socket.create_server(("127.0.0.1", 0)) as taken:
            found = examined(zygote, swarm, tmp_path / "alone", listen=f"127.0.0.1:{taken.getsockname()[1]}")
        assert found["seed"][0] == found["listening"][0] == "problem", found
        assert "nothing listens at that port" in found["seed"][2]
        assert "choose another port" in found["listening"][2]
    assert zygote.leftovers() == []


@pytest.mark.parametrize(("pauses_s", "told"), [((0.3,) * 8, 8), ((0.1, 8.0, 0.1), 1)])
def test_the_doctor_waits_for_the_next_finding_and_says_what_it_did_not_wait_for(
    pauses_s: tuple[float, ...], told: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that computed for others the reach of a peer behind a silent router was never told."""

    async def one_after_the_other(_: Examination) -> AsyncIterator[Finding]:
        for pause_s in pauses_s:
            await asyncio.sleep(pause_s)
            yield Finding("look", Level.OK, f"after {pause_s} s")

    async def nothing(_: Examination) -> AsyncIterator[Finding]:
        for finding in ():
            yield finding

    async def names() -> list[str]:
        examination = Examination(StateFolder(tmp_path), (), "127.0.0.1:0")
        return [found.name async for found in examination.findings()]

    monkeypatch.setattr(looks, "NEXT_S", 2.0)
    monkeypatch.setattr(Examination, "_machine", nothing)
    monkeypatch.setattr(Examination, "_network", one_after_the_other)
    assert asyncio.run(names()) == ["look"] * told + ["doctor"] * (told < len(pauses_s))
