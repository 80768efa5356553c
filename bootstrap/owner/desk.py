"""What the owner of a run asks of its host, carried out."""

import itertools
from collections.abc import Sequence

from bootstrap.owner.trouble import line_of
from bootstrap.program.host import Host
from bootstrap.state.rolling_back import Wish
from swarm.core.pipeline.data_order import DataOrder
from swarm.proto import host_pb2 as pb


class HostDesk:
    """`swarm.network.services.host_service.Desk` of a run's host."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def notices(self, last: int) -> list[str]:
        order = DataOrder.of_run(self._host.run.settings)
        newest = list(itertools.islice(reversed(self._host.notices), last))
        return [line_of(notice.told(order)) for notice in reversed(newest)]

    async def roll_back(self, to: str, skip: str) -> str:
        return await self._host.rolling_back.ask(Wish.from_texts(to, skip))

    async def amend(self, changes: Sequence[str], at: str, *, only_show: bool) -> list[str]:
        amending = self._host.amending
        return await amending.offer(changes, at) if only_show else [await amending.ask(changes, at)]

    def create_voucher(self, *, uses: int, days: float, note: str) -> str:
        return self._host.vouchers.create_voucher(uses=uses, days=days, note=note)

    def list_vouchers(self) -> list[pb.Voucher]:
        return self._host.vouchers.list_vouchers()

    def revoke_voucher(self, name: str) -> str:
        return self._host.vouchers.revoke_voucher(name)
