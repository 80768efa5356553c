"""A host answers the owner of its run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from swarm.network.services.owner_socket import OwnerSocket, refusing
from swarm.proto import host_pb2 as pb
from swarm.proto import host_pb2_grpc as rpc


class Desk(Protocol):
    """What a host does for its owner, on the event loop.

    Each raises SettingsError for what cannot be granted, and LocalError, RemoteError or TransientError for what failed.
    """

    def notices(self, last: int) -> list[str]:
        """A line each."""

    async def roll_back(self, to: str, skip: str) -> str:
        """What came of it. It goes on where its owner waits no longer."""

    async def amend(self, changes: Sequence[str], at: str, *, only_show: bool) -> list[str]:
        """What would change, or what was arranged, a line each."""

    def create_voucher(self, *, uses: int, days: float, note: str) -> str:
        """Its secret."""

    def list_vouchers(self) -> list[pb.Voucher]: ...

    def revoke_voucher(self, name: str) -> str:
        """Its whole name."""


async def serve_owner_of_host(desk: Desk, folder: Path) -> OwnerSocket:
    """Listen in `folder`, which is this user's alone. Raises LocalError."""
    return await OwnerSocket.listen(folder, lambda server: rpc.add_HostServicer_to_server(_Servicer(desk), server))


class _Servicer(rpc.HostServicer):
    """Each call of the protocol, carried to the desk."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def ListNotices(self, request: pb.NoticesRequest, context: Any) -> pb.Notices:
        return pb.Notices(lines=self._desk.notices(request.last))

    async def RollBack(self, request: pb.RollbackRequest, context: Any) -> pb.Rollback:
        async with refusing(context):
            return pb.Rollback(text=await self._desk.roll_back(request.to, request.skip))
        raise AssertionError("unreachable")

    async def Amend(self, request: pb.AmendRequest, context: Any) -> pb.Amended:
        async with refusing(context):
            lines = await self._desk.amend(list(request.changes), request.at, only_show=request.only_show)
            return pb.Amended(lines=lines)
        raise AssertionError("unreachable")

    async def CreateVoucher(self, request: pb.CreateVoucherRequest, context: Any) -> pb.NewVoucher:
        async with refusing(context):
            secret = self._desk.create_voucher(uses=request.uses, days=request.days, note=request.note)
            return pb.NewVoucher(secret=secret)
        raise AssertionError("unreachable")

    async def ListVouchers(self, request: pb.VouchersRequest, context: Any) -> pb.Vouchers:
        return pb.Vouchers(vouchers=self._desk.list_vouchers())

    async def RevokeVoucher(self, request: pb.RevokeVoucherRequest, context: Any) -> pb.RevokedVoucher:
        async with refusing(context):
            return pb.RevokedVoucher(name=self._desk.revoke_voucher(request.name))
        raise AssertionError("unreachable")
