"""The host's owner is answered over a socket that is its user's alone, in the errors that the desk raised."""

import asyncio
import random
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from bootstrap.owner.desk import HostDesk
from bootstrap.owner.progress import PeerFigures
from bootstrap.owner.trouble import Notice
from swarm.core.errors import DiskFullError, LocalError, NotRunningError, RemoteError, SettingsError
from swarm.network.services.host_client import host_client
from swarm.network.services.host_service import serve_owner_of_host
from swarm.network.services.owner_socket import MAX_REQUEST_BYTES
from swarm.proto import host_pb2 as pb
from tests.bootstrap.state.hosted import hosted
from tests.swarm_in_process import identity_of

SERVICE = pb.DESCRIPTOR.services_by_name["Host"]


class Failing:
    """A desk that can do nothing, for one reason."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def roll_back(self, to: str, skip: str) -> str:
        raise self._error


def served(desk: Any, use: Callable[[Path], Any]) -> Any:
    """What `use` makes of the socket, in a thread."""

    async def main() -> Any:
        with tempfile.TemporaryDirectory(dir="/tmp") as short:
            socket = await serve_owner_of_host(desk, Path(short))
            assert stat.S_IMODE(socket.path.stat().st_mode) == 0o600
            try:
                return await asyncio.to_thread(use, socket.path)
            finally:
                await socket.close()
                assert not socket.path.exists()

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("raised", "heard"),
    [
        (SettingsError("--to 5: no such version"), SettingsError),
        (DiskFullError("no room"), LocalError),
        (RemoteError("digest", "another state"), LocalError),
        (LocalError("broken"), LocalError),
    ],
)
def test_what_the_desk_raises_is_heard_in_its_words(raised: Exception, heard: type[Exception]) -> None:
    def use(socket: Path) -> None:
        with host_client(socket) as host, pytest.raises(heard, match=str(raised)) as error:
            host.roll_back("5", "none", timeout_s=10.0)
        assert type(error.value) is heard

    served(Failing(raised), use)


def test_where_nobody_listens_the_host_is_said_to_have_ended(tmp_path: Path) -> None:
    with host_client(tmp_path / "owner.sock") as host, pytest.raises(NotRunningError, match="the host has ended"):
        host.list_vouchers()


def test_the_last_notices_are_told_oldest_first(tmp_path: Path) -> None:
    async def look() -> list[str]:
        async with hosted(tmp_path) as host:
            peer = identity_of(0).peer_id
            host.itself.progress.peers[peer] = PeerFigures(0, 0.0, 0.0)
            for step in range(4):
                host.itself._notice(Notice("loss_spike", step, None, (peer,), (4 * step,), "it rose"))
            return HostDesk(host.itself).notices(2)

    first, second = asyncio.run(look())
    assert first.startswith("loss spike: step 2: it rose; microbatches 8 to 8 (tokens ")
    assert second.startswith("loss spike: step 3: ")


def test_every_call_survives_garbage(tmp_path: Path) -> None:
    """Random bytes and fields to every method: a status each time, and the host goes on."""
    rng = random.Random(4)
    kinds = {name: getattr(pb, method.input_type.name) for name, method in SERVICE.methods_by_name.items()}

    def request_to(method: str) -> bytes:
        message = kinds[method]()
        for field in message.DESCRIPTOR.fields:
            if field.type == field.TYPE_STRING:
                texts = ["", "newest", "none", "1:2", "9" * 5000, "\0", "optimizer.total_steps=x", "=", "soonest"]
                if field.is_repeated:
                    getattr(message, field.name).extend(rng.choices(texts, k=rng.randrange(4)))
                else:
                    setattr(message, field.name, rng.choice(texts))
            elif field.type == field.TYPE_DOUBLE:
                setattr(message, field.name, rng.choice([float("nan"), float("inf"), -1.0, 0.0, 1e300]))
            else:
                setattr(message, field.name, rng.choice([0, 1, 2**32 - 1]))
        return bytes(message.SerializeToString())

    def send(channel: grpc.Channel, method: str, data: bytes) -> grpc.StatusCode:
        try:
            channel.unary_unary(f"/{SERVICE.full_name}/{method}")(data, timeout=10)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
        return grpc.StatusCode.OK

    def use(socket: Path) -> None:
        with grpc.insecure_channel(f"unix:{socket}") as channel:
            for method in [*kinds] * 12:
                assert send(channel, method, request_to(method)) in (
                    grpc.StatusCode.OK,
                    grpc.StatusCode.INVALID_ARGUMENT,
                ), method
            much = pb.RevokeVoucherRequest(name="x" * (MAX_REQUEST_BYTES + 1)).SerializeToString()
            assert send(channel, "RevokeVoucher", much) is grpc.StatusCode.RESOURCE_EXHAUSTED
        with host_client(socket) as host:
            assert host.notices(5) == []

    async def main() -> None:
        async with hosted(tmp_path) as host:
            with tempfile.TemporaryDirectory(dir="/tmp") as short:
                socket = await serve_owner_of_host(HostDesk(host.itself), Path(short))
                before = host.ledger_size()
                await asyncio.to_thread(use, socket.path)
                assert host.ledger_size() == before
                await socket.close()

    asyncio.run(main())
