"""The commands of a run's owner call the host that runs on this machine."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc

from swarm.network.services.owner_socket import owners_call, owners_channel
from swarm.proto import host_pb2 as pb
from swarm.proto import host_pb2_grpc as rpc

Answer = TypeVar("Answer")

CALL_S = 10.0
AMEND_S = 60.0
"""The host asks its peers where they are, and reckons what the run would be worth."""


class HostClient:
    """The host's calls. Each raises as `owners_call` does, and LocalError when the host could not do it."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._stub: Any = rpc.HostStub(channel)

    def notices(self, last: int) -> list[str]:
        answer: pb.Notices = self._called(self._stub.ListNotices, pb.NoticesRequest(last=last))
        return list(answer.lines)

    def roll_back(self, to: str, skip: str, *, timeout_s: float) -> str:
        """What came of it."""
        answer: pb.Rollback = self._called(self._stub.RollBack, pb.RollbackRequest(to=to, skip=skip), timeout_s)
        return answer.text

    def amend(self, changes: Sequence[str], at: str, *, only_show: bool) -> list[str]:
        """What would change, or what was arranged, a line each."""
        request = pb.AmendRequest(changes=changes, at=at, only_show=only_show)
        answer: pb.Amended = self._called(self._stub.Amend, request, AMEND_S)
        return list(answer.lines)

    def create_voucher(self, *, uses: int, days: float, note: str) -> str:
        """Its secret."""
        request = pb.CreateVoucherRequest(uses=uses, days=days, note=note)
        answer: pb.NewVoucher = self._called(self._stub.CreateVoucher, request)
        return answer.secret

    def list_vouchers(self) -> list[pb.Voucher]:
        answer: pb.Vouchers = self._called(self._stub.ListVouchers, pb.VouchersRequest())
        return list(answer.vouchers)

    def revoke_voucher(self, name: str) -> str:
        """Its whole name."""
        answer: pb.RevokedVoucher = self._called(self._stub.RevokeVoucher, pb.RevokeVoucherRequest(name=name))
        return answer.name

    def _called(self, method: Callable[..., Answer], request: object, timeout_s: float = CALL_S) -> Answer:
        with owners_call("host", "what it prints", timeout_s=timeout_s):
            return method(request, timeout=timeout_s)


@contextlib.contextmanager
def host_client(socket: Path) -> Iterator[HostClient]:
    """A client of the host that listens at `socket`."""
    with owners_channel(socket) as channel:
        yield HostClient(channel)
