"""The host's gRPC service: what it answers, what it refuses by which status; nothing of the refused is kept."""

import asyncio
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

from bootstrap.admission import AdmissionPolicy, create_voucher, revoke_voucher
from swarm.admission_request import AdmissionRequest
from swarm.core.canonical import pack, unpack
from swarm.core.errors import RemoteError, TransientError
from swarm.core.ids import PeerId, StageIndex, Version
from swarm.identity import Identity
from swarm.invite import Invite
from swarm.network.coordinator_client import CoordinatorClient, coordinator_client
from swarm.network.coordinator_service import MAX_REQUEST_BYTES, SERVICE, ServiceLimits, address_of
from swarm.proto import coordinator_pb2 as pb
from tests.hosted import Hosted, hosted
from tests.swarm_in_process import identity_of
from verification.ticket import Ticket
from verification.verdicts import Ban

Use = Callable[[CoordinatorClient], Any]


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


def asking(
    host: Hosted, peer: Identity, *, at_s: float = 0.0, voucher: str = "", stage: int | None = None, chain: bytes = b"c"
) -> AdmissionRequest:
    asked_at_ms = int((time.time() + at_s) * 1000)
    return AdmissionRequest(host.run.run_id, peer.peer_id, stage, chain * 32, voucher, asked_at_ms).signed_by(peer)


def admitting(request: AdmissionRequest) -> Use:
    return lambda client: client.admit(pack(request.to_value()))


def test_run_status_peers_and_credit_are_answered(tmp_path: Path) -> None:
    async def look() -> None:
        async with hosted(tmp_path) as host:
            signed, answer = await called(host, lambda client: client.run())
            assert signed == host.run.signed
            assert (answer.protocol, answer.admission) == (1, "open")
            peer = identity_of(0)
            answered = await called(host, admitting(asking(host, peer, stage=1)))
            ticket = Ticket.from_value(unpack(answered.ticket, max_bytes=4096))
            ticket.check(run_id=host.run.run_id, run_key=host.run.run_key.peer_id)
            assert (ticket.peer_id, ticket.stage) == (peer.peer_id, 1)
            peers = await called(host, lambda client: client.peers(1))
            assert [(known.peer_id, known.present) for known in peers.peers] == [(peer.peer_id, True)]
            status = await called(host, lambda client: client.status())
            assert [(stage.num_present, stage.num_missing) for stage in status.stages] == [(0, 1), (1, 1)]
            assert status.books == host.coordinator.books.digest()
            assert not status.HasField("loss")
            assert not (await called(host, lambda client: client.credit())).credits
            assert not (await called(host, lambda client: client.checkpoints()))

    asyncio.run(look())


def test_admission_is_refused_with_a_status_and_nothing_is_stored(tmp_path: Path) -> None:
    async def knock() -> None:
        async with hosted(tmp_path, policy=AdmissionPolicy("ticket")) as host:
            books, peer, other = host.coordinator.books, identity_of(0), identity_of(1)
            secret = create_voucher(host.ledger, books, note="a friend", uses=1, days=1)
            withdrawn = create_voucher(host.ledger, books, note="nobody", uses=1, days=1)
            revoke_voucher(host.ledger, books, withdrawn)
            assert "knows no voucher like that" in await refused(
                host, admitting(asking(host, peer, voucher="00" * 15)), "unauthenticated"
            )
            assert "is revoked" in await refused(
                host, admitting(asking(host, peer, voucher=withdrawn)), "unauthenticated"
            )
            request = asking(host, peer, voucher=secret)
            forged = replace(request, peer_id=other.peer_id)
            assert "not signed by" in await refused(host, admitting(forged), "unauthenticated")
            elsewhere = replace(request, run_id="00" * 32).signed_by(peer)
            await refused(host, admitting(elsewhere), "invalid_argument")
            assert "old by this clock" in await refused(
                host, admitting(asking(host, peer, voucher=secret, at_s=-400)), "already_exists"
            )
            await refused(host, admitting(asking(host, peer, voucher=secret, stage=7)), "invalid_argument")
            await called(host, admitting(request))
            assert "or a later one, before" in await refused(host, admitting(request), "already_exists")
            assert "has admitted 1 already" in await refused(
                host, admitting(asking(host, other, voucher=secret)), "unauthenticated"
            )
            assert "another hash chain" in await refused(
                host, admitting(asking(host, peer, at_s=1, chain=b"d")), "permission_denied"
            )
            await called(host, admitting(asking(host, peer, at_s=2)))  # who is in needs no voucher any more
            ban = Ban(host.run.run_id, peer.peer_id, StageIndex(0), Version(1), "replay_mismatch", bytes(32))
            host.ledger.append("ban", ban.signed_by(host.run.run_key).to_value())
            assert "is shut out" in await refused_after_ban(host, admitting(asking(host, peer, at_s=3)))

    async def refused_after_ban(host: Hosted, use: Use) -> str:
        return await refused(host, use, "permission_denied")

    asyncio.run(knock())


def test_list_admits_whom_it_names(tmp_path: Path) -> None:
    async def knock() -> None:
        listed = AdmissionPolicy("list", frozenset({identity_of(0).peer_id}))
        async with hosted(tmp_path, policy=listed) as host:
            await called(host, admitting(asking(host, identity_of(0))))
            assert "is not on this run's list" in await refused(
                host, admitting(asking(host, identity_of(1))), "unauthenticated"
            )

    asyncio.run(knock())


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
        async with hosted(tmp_path, limits=ServiceLimits(calls_per_s=0.01, burst=3)) as host:

            def ask(client: CoordinatorClient) -> None:
                for _ in range(3):
                    client.status()
                with pytest.raises(TransientError, match=r"more than 0\.01 calls a second from your address; wait"):
                    client.status()

            await called(host, ask)

    asyncio.run(hurry())


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:203.0.113.7:1234", "203.0.113.7"),
        ("ipv6:%5B2001:db8:1:2:3::4%5D:1234", "2001:db8:1:2::/64"),
        ("ipv6:[::ffff:203.0.113.7]:1234", "203.0.113.7"),
        ("unix:", "unix"),
    ],
)
def test_calls_are_counted_by_address_and_home_network(peer: str, address: str) -> None:
    assert address_of(peer) == address


def raw_channel(host: Hosted) -> grpc.Channel:
    """What a generic client has, that knows the certificate."""
    pem = (host.run.folder.root / "service.pem").read_bytes()
    credentials = grpc.ssl_channel_credentials(pem[pem.index(b"-----BEGIN CERT") :])
    return grpc.secure_channel(host.doors.invite.target, credentials, [("grpc.ssl_target_name_override", "homeswarm")])


def test_generic_client_finds_and_calls_the_service_by_reflection(tmp_path: Path) -> None:
    def look(host: Hosted) -> None:
        with raw_channel(host) as channel:
            health = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=SERVICE), timeout=5
            )
            assert health.status == health_pb2.HealthCheckResponse.SERVING
            reflected = ProtoReflectionDescriptorDatabase(channel)
            assert SERVICE in reflected.get_services()
            described = reflected.FindFileContainingSymbol(SERVICE)
            methods = {method.name for service in described.service for method in service.method}
            assert methods >= {"GetRun", "Admit", "ListPeers", "ListCheckpoints", "Download", "GetStatus", "GetCredit"}
            answer = channel.unary_unary(f"/{SERVICE}/GetStatus")(b"", timeout=5)
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
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.ALREADY_EXISTS,
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
            elif field.type == field.TYPE_BYTES:
                values = [None, [], {"value": {}, "signature": bytes(64)}, {"value": None}, [[]] * 9, 2**63 - 1]
                setattr(message, field.name, rng.choice([rng.randbytes(60), pack(rng.choice(values))]))
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
                    for _ in call(request_to(method), timeout=5):
                        pass
                    found.add(grpc.StatusCode.OK)
                except grpc.RpcError as error:
                    found.add(error.code())
            oversized = pb.AdmitRequest(request=bytes(MAX_REQUEST_BYTES)).SerializeToString()
            with pytest.raises(grpc.RpcError) as refusal:
                channel.unary_unary(f"/{SERVICE}/Admit")(oversized, timeout=5)
            assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert found <= allowed
        return found

    async def serve() -> None:
        async with hosted(tmp_path) as host:
            host.archive(5)
            before = host.ledger_size(), dict(host.coordinator.progress.peers)
            found = await asyncio.to_thread(fuzz, host)
            assert {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND} <= found
            assert (host.ledger_size(), dict(host.coordinator.progress.peers)) == before
            assert (await called(host, lambda client: client.status())).run_id == host.run.run_id

    asyncio.run(serve())


def test_credit_is_ranked_and_the_banned_have_none(tmp_path: Path) -> None:
    async def look() -> None:
        async with hosted(tmp_path) as host:
            peers = [identity_of(number).peer_id for number in range(3)]
            host.ledger.append("genesis", genesis_value(host))
            facts: Any = {"stage": 0, "step": 0, "name": bytes(32), "ids": [1, 2], "joins": [], "leaves": []}
            host.ledger.append(
                "result", {**facts, "credit": [[peers[0], 1, 32], [peers[1], 2, 64], [peers[2], 9, 288]]}
            )
            ban = Ban(host.run.run_id, peers[2], StageIndex(0), Version(1), "replay_mismatch", bytes(32))
            host.ledger.append("ban", ban.signed_by(host.run.run_key).to_value())
            ranked = await called(host, lambda client: client.credit())
            assert [(one.peer_id, one.rank) for one in ranked.credits] == [(peers[1], 1), (peers[0], 2)]
            (own,) = (await called(host, lambda client: client.credit(peers[0]))).credits
            assert (own.num_tokens, own.num_microbatches, own.rank) == (32, 1, 2)
            await refused(host, lambda client: client.credit(peers[2]), "not_found")
            await refused(host, lambda client: client.credit("nobody"), "not_found")

    asyncio.run(look())


def genesis_value(host: Hosted, stage: int = 0) -> Any:
    from swarm.core.leases import LeaseTable
    from swarm.core.stage_chain import Genesis

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
        signature=bytes(64),
    ).to_value()
