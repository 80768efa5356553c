"""The host's gRPC service: what it answers, what it refuses by which status; nothing of the refused is kept."""

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from rich.console import Console

from bootstrap.directory import answers
from swarm.checkpoint.archive import checkpoint_path
from swarm.cli import ExitCode, run
from swarm.commands.peers import fitting
from swarm.core.errors import RemoteError, TransientError
from swarm.core.ids import PeerId, StageIndex, Version
from swarm.invite import Invite
from swarm.network.services.calls_of_strangers import ServiceLimits
from swarm.network.services.coordinator_client import CoordinatorClient, coordinator_client
from swarm.network.services.coordinator_service import MAX_REQUEST_BYTES, SERVICE
from swarm.proto import coordinator_pb2 as pb
from tests.bootstrap.state.hosted import Hosted, hosted
from tests.swarm_in_process import identity_of
from verification.audit.verdicts import Ban

Use = Callable[[CoordinatorClient], Any]
PEER = identity_of(0).peer_id


async def called(host: Hosted, use: Use, invite: Invite | None = None) -> Any:
    """What `use` makes of a client, in a thread: the client blocks."""

    def work() -> Any:
        with coordinator_client(invite or host.doors.invite) as client:
            return use(client)

    return await asyncio.to_thread(work)


async def refused(host: Hosted, use: Use, kind: str) -> str:
    """The message of a call that is refused with this status; nothing is written down."""
    before = host.ledger_size()
    with pytest.raises(RemoteError) as error:
        await called(host, use)
    assert error.value.kind == kind, error.value
    assert host.ledger_size() == before
    return str(error.value)


def test_run_status_and_peers_are_answered(tmp_path: Path) -> None:
    async def look() -> None:
        async with hosted(tmp_path) as host:
            signed, answer = await called(host, lambda client: client.run())
            assert signed == host.run.signed
            assert (answer.protocol, answer.admission) == (1, "open")
            peer = identity_of(0).peer_id
            host.itself.admission.admit(peer, 1, bytes(32), "", network="")
            peers = await called(host, lambda client: client.peers(1))
            assert [(known.peer_id, known.present, known.rank) for known in peers.peers] == [(peer, True, 0)]
            status = await called(host, lambda client: client.status())
            assert [(stage.num_present, stage.num_missing) for stage in status.stages] == [(0, 1), (1, 1)]
            assert status.books == host.itself.books.history
            assert not status.HasField("loss")
            assert not (await called(host, lambda client: client.checkpoints()))
            assert "has stages 0 to 1" in await refused(host, lambda client: client.peers(7), "invalid_argument")

    asyncio.run(look())


def test_other_certificate_or_run_key_or_run_is_refused_by_the_client(tmp_path: Path) -> None:
    async def call() -> None:
        async with hosted(tmp_path) as host:
            invite = host.doors.invite
            for wrong, kind in (
                (replace(invite, certificate=bytes(32)), "certificate"),
                (replace(invite, run_key=identity_of(3).peer_id), "run_key"),
                (replace(invite, run_id=type(invite.run_id)("00" * 32)), "run_id"),
            ):
                with pytest.raises(RemoteError) as error:
                    await called(host, lambda client: client.run(), wrong)
                assert error.value.kind == kind
            with pytest.raises(TransientError, match="cannot be reached"):
                await called(host, lambda client: client.run(), replace(invite, port=1))

    asyncio.run(call())


def test_certificate_is_the_same_after_a_restart(tmp_path: Path) -> None:
    async def twice() -> None:
        found = []
        for _ in range(2):
            async with hosted(tmp_path) as host:
                found.append(host.doors.invite.certificate)
        assert found[0] == found[1]
        assert (tmp_path / "host" / "service.pem").stat().st_mode & 0o777 == 0o600

    asyncio.run(twice())


def test_one_address_that_asks_too_often_is_told_to_wait(tmp_path: Path) -> None:
    async def hurry() -> None:
        async with hosted(tmp_path, service_limits=ServiceLimits(calls_per_s=0.01, burst=3)) as host:

            def ask(client: CoordinatorClient) -> None:
                for _ in range(3):
                    client.status()
                with pytest.raises(TransientError, match=r"more than 0\.01 calls a second from your address; wait"):
                    client.status()

            await called(host, ask)

    asyncio.run(hurry())


def raw_channel(host: Hosted) -> grpc.Channel:
    """What a generic client has, that knows the certificate."""
    pem = (host.run.folder.root / "service.pem").read_bytes()
    credentials = grpc.ssl_channel_credentials(pem[pem.index(b"-----BEGIN CERT") :])
    return grpc.secure_channel(host.doors.invite.target, credentials, [("grpc.ssl_target_name_override", "homeswarm")])


def test_generic_client_finds_and_calls_the_service_by_reflection(tmp_path: Path) -> None:
    def look(host: Hosted) -> None:
        with raw_channel(host) as channel:
            health = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=SERVICE), timeout=30
            )
            assert health.status == health_pb2.HealthCheckResponse.SERVING
            reflected = ProtoReflectionDescriptorDatabase(channel)
            assert SERVICE in reflected.get_services()
            described = reflected.FindFileContainingSymbol(SERVICE)
            methods = {method.name for service in described.service for method in service.method}
            assert methods >= {"GetRun", "ListPeers", "ListCheckpoints", "Download", "GetStatus"}
            answer = channel.unary_unary(f"/{SERVICE}/GetStatus")(b"", timeout=30)
            assert pb.Status.FromString(answer).run_id == host.run.run_id

    async def serve() -> None:
        async with hosted(tmp_path) as host:
            await asyncio.to_thread(look, host)

    asyncio.run(serve())


def test_every_call_survives_nonsense_and_stores_nothing(tmp_path: Path) -> None:
    """Random bytes, random fields and oversized ones, to every method: a status each time, and the host goes on."""
    rng = random.Random(5)
    methods = [method.name for method in pb.DESCRIPTOR.services_by_name["Coordinator"].methods]
    allowed = {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.OK,
    }

    def request_to(method: str) -> bytes:
        if rng.random() < 0.3:
            return rng.randbytes(rng.randrange(200))
        kind = pb.DESCRIPTOR.services_by_name["Coordinator"].methods_by_name[method].input_type
        message = getattr(pb, kind.name)()
        for field in kind.fields:
            if field.type == field.TYPE_STRING:
                setattr(message, field.name, rng.choice(["", "../run.key", "x" * 999, "checkpoint.json"]))
            else:
                top = 2**32 if field.type == field.TYPE_UINT32 else 2**64
                setattr(message, field.name, rng.choice([0, 3, 5, rng.randrange(top), top - 1]))
        return bytes(message.SerializeToString())

    def fuzz(host: Hosted) -> set[grpc.StatusCode]:
        found = set()
        with raw_channel(host) as channel:
            for number in range(350):
                method = methods[number % len(methods)]
                call = channel.unary_stream(f"/{SERVICE}/{method}")
                try:
                    for _ in call(request_to(method), timeout=30):
                        pass
                    found.add(grpc.StatusCode.OK)
                except grpc.RpcError as error:
                    found.add(error.code())
            oversized = pb.DownloadRequest(name="x" * MAX_REQUEST_BYTES).SerializeToString()
            with pytest.raises(grpc.RpcError) as refusal:
                channel.unary_stream(f"/{SERVICE}/Download")(oversized, timeout=30).next()
            assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert found <= allowed
        return found

    async def serve() -> None:
        async with hosted(tmp_path) as host:
            host.archive(5)
            before = host.ledger_size(), dict(host.itself.progress.peers)
            found = await asyncio.to_thread(fuzz, host)
            assert {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND} <= found
            assert (host.ledger_size(), dict(host.itself.progress.peers)) == before
            assert (await called(host, lambda client: client.status())).run_id == host.run.run_id

    asyncio.run(serve())


def worked(host: Hosted) -> list[PeerId]:
    """Three peers of stage 0 that a certified result credits; the last, who has done most, is banned."""
    peers = [identity_of(number).peer_id for number in range(3)]
    for peer in peers:
        host.itself.admission.admit(peer, 0, bytes(32), "", network="")
    host.ledger.append("genesis", genesis_value(host))
    facts: Any = {"stage": 0, "step": 0, "name": bytes(32), "ids": [1, 2], "joins": [], "leaves": []}
    host.ledger.append("result", {**facts, "credit": [[peers[0], 1, 32], [peers[1], 2, 64], [peers[2], 9, 288]]})
    ban = Ban(host.run.run_id, peers[2], StageIndex(0), Version(1), "replay_mismatch", bytes(32))
    host.ledger.append("ban", ban.signed_by(host.run.run_key).to_value())
    return peers


def test_credit_is_ranked_and_the_banned_have_none(tmp_path: Path) -> None:
    async def look() -> None:
        async with hosted(tmp_path) as host:
            peers = worked(host)
            found = {peer.peer_id: peer for peer in (await called(host, lambda client: client.peers(0))).peers}
            assert [found[peer].rank for peer in peers] == [2, 1, 0]
            own, banned = found[peers[0]], found[peers[2]]
            assert (own.num_tokens, own.num_microbatches, own.num_steps) == (32, 1, 1)
            assert (banned.num_tokens, banned.num_microbatches) == (0, 0)

    asyncio.run(look())


def test_peers_command_shows_the_run_and_who_has_done_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def look() -> list[PeerId]:
        async with hosted(tmp_path) as host:
            peers, line = worked(host), host.doors.invite.line()
            host.itself.progress.peers[peers[0]].left = True
            for more in ([], ["--all", "--json"], ["--stage", "1", "--json"]):
                assert await asyncio.to_thread(run, ["peers", line, *more]) is ExitCode.OK
            assert await asyncio.to_thread(run, ["peers", line, "--stage", "9"]) is ExitCode.FAILED
            return peers

    gone, present, _ = asyncio.run(look())
    printed = capsys.readouterr()
    text, _, told = printed.out.partition("{")
    assert "tiny: version 0 of 10, 0 tokens" in text
    assert "stage 1: version 0, 0 present, 1 more wanted" in text
    assert present in text
    assert gone not in text
    decoder, told = json.JSONDecoder(), "{" + told
    every, end = decoder.raw_decode(told)
    assert {one["peer_id"]: one["rank"] for one in every["peers"] if one["rank"]} == {present: 1, gone: 2}
    assert decoder.raw_decode(told[end:].lstrip())[0]["peers"] == []
    assert "this run has stages 0 to 1" in printed.err


@pytest.mark.parametrize(("width", "named"), [(150, PEER), (80, f"..{PEER[-8:]}")])
def test_peers_are_shown_as_wide_as_the_terminal(width: int, named: str) -> None:
    told = pb.Peer(
        stage=1, peer_id=PEER, version=12, num_tokens=59_779, num_microbatches=36, num_steps=18, num_direct=2
    )
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(fitting([told], console))
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= width
    (row,) = (line for line in lines if "59,779" in line)
    assert row.split() == ["1", named, "12", "59,779", "36", "18", "2"]
    assert "relayed" not in capture.get(), "nobody is"


def genesis_value(host: Hosted, stage: int = 0) -> Any:
    from swarm.core.pipeline.leases import LeaseTable
    from swarm.core.state.stage_chain import Genesis

    return Genesis(
        host.run.run_id,
        StageIndex(stage),
        Version(0),
        bytes(32),
        (PeerId(identity_of(0).peer_id),),
        LeaseTable(),
        host.run.host_key.peer_id,
        host.run.run_key.peer_id,
        (),
        bytes(32),
        signature=bytes(64),
    ).to_value()


def watch(channel: grpc.Channel) -> Any:
    """A call of the health service, which that never ends."""
    return health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))


def status_of(call: Any) -> grpc.StatusCode:
    """What a call that is read to its end came to."""
    with pytest.raises(grpc.RpcError) as error:
        for _ in call:
            pass
    code = error.value.code()
    assert isinstance(code, grpc.StatusCode)
    return code


def test_calls_that_one_address_holds_open_keep_nobody_out(tmp_path: Path) -> None:
    """A watch of the service's health lasts as long as its caller likes, and the host had places for 256 calls."""

    def hold(host: Hosted) -> list[grpc.StatusCode]:
        with raw_channel(host) as channel:
            watching = []
            for _ in range(6):
                watching.append(watch(channel))
                assert watching[-1].next().status == health_pb2.HealthCheckResponse.SERVING
            with coordinator_client(host.doors.invite) as client:
                assert client.status().run_id == host.run.run_id
            return [status_of(call) for call in watching[:3]]

    async def serve() -> list[grpc.StatusCode]:
        limits = ServiceLimits(calls_per_s=1000, burst=1000, max_calls=4, call_s=60.0)
        async with hosted(tmp_path, service_limits=limits) as host:
            return await asyncio.to_thread(hold, host)

    assert asyncio.run(serve()) == 3 * [grpc.StatusCode.RESOURCE_EXHAUSTED], "of too many the first"


def test_the_librarys_methods_are_held_to_the_rate_too(tmp_path: Path) -> None:
    async def hurry() -> list[grpc.StatusCode]:
        async with hosted(tmp_path, service_limits=ServiceLimits(calls_per_s=0.01, burst=3, call_s=0.3)) as host:

            def ask() -> list[grpc.StatusCode]:
                with raw_channel(host) as channel:
                    return [status_of(watch(channel)) for _ in range(4)]

            return await asyncio.to_thread(ask)

    late, exhausted = grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED
    assert asyncio.run(hurry()) == [*3 * [late], exhausted]


def test_a_download_that_nobody_takes_is_given_up(tmp_path: Path) -> None:
    """Two of each network, sixteen in all: held for ever, nobody pulled a model any more."""

    async def serve() -> tuple[grpc.StatusCode, str]:
        limits = ServiceLimits(calls_per_s=1000, burst=1000, max_downloads_each=1, write_s=2.0)
        async with hosted(tmp_path, service_limits=limits) as host:
            record = host.archive(5)
            large = replace(record.files[0], size_bytes=64 << 20)
            host.itself.books.checkpoints[5] = replace(record, files=(large, *record.files[1:])).to_value()
            (checkpoint_path(host.run.folder.checkpoints, 5) / large.name).write_bytes(bytes(large.size_bytes))
            request = pb.DownloadRequest(version=5, name=large.name)

            def hold() -> tuple[grpc.StatusCode, str]:
                with raw_channel(host) as channel:
                    held = channel.unary_stream(f"/{SERVICE}/Download")(request.SerializeToString())
                    held.next()
                    with coordinator_client(host.doors.invite) as client:
                        with pytest.raises(TransientError, match="1 of them yours"):
                            next(client.download(5, large.name))
                        for _ in range(600):
                            time.sleep(0.1)
                            with contextlib.suppress(TransientError):
                                next(client.download(5, large.name))
                                return status_of(held), held.details()
                raise AssertionError("the place is held")

            return await asyncio.to_thread(hold)

    said = "a piece was not taken within 2 s; go on from where it broke off"
    assert asyncio.run(serve()) == (grpc.StatusCode.DEADLINE_EXCEEDED, said)


def test_a_crowd_that_is_admitted_makes_no_answer_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 65,536 identities a list took the host a third of a second and 4 MB, 20 times a second for one address."""
    monkeypatch.setattr(answers, "MAX_LISTED", 3)

    async def look() -> None:
        async with hosted(tmp_path) as host:
            peers = worked(host)
            for number in range(3, 9):
                host.itself.admission.admit(identity_of(number).peer_id, 0, bytes(32), "", network="")
            seen = host.itself.progress.peers
            seen[identity_of(3).peer_id].left = True
            seen[identity_of(4).peer_id].last_heard += 1000.0
            asked = answers.CoordinatorAnswers(host.itself)
            listed = await asked.peers(pb.PeersRequest(stage=0))
            assert {peer.peer_id for peer in listed.peers} == {*peers[:2], identity_of(4).peer_id}
            seen[peers[0]].left = True
            assert await asked.peers(pb.PeersRequest(stage=0)) is listed, "it is made once for all who ask"

    asyncio.run(look())
