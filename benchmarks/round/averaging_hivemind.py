"""One peer of the open baseline: it averages by hivemind's DecentralizedAverager, which forks.

    python -m benchmarks.round.averaging_hivemind NUMBER PEERS FOLDER

A round is timed from the moment a found group may begin its all-reduce: finding the group is not counted.
"""

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.round.averaging_vectors import check, vector_of
from benchmarks.round.orders import Fields, end_session, obey

GROUP_S = 20.0
ALLREDUCE_S = 20.0


class HivemindPeer:
    def __init__(self, number: int, peers: int, folder: Path) -> None:
        self._peers = peers
        self._folder = folder
        self._own = torch.from_numpy(vector_of(folder, number).copy())
        self._dht: Any = None
        self._averager: Any = None
        self._control: Any = None

    def do(self, order: Fields) -> Fields:
        match order["order"]:
            case "listen":
                return self._listen(order["initial_peers"])
            case "open":
                self._open(order["codec"], order["name"])
            case "ready":
                self._find_group()
            case "round":
                began = time.monotonic()
                self._control.allow_allreduce()
                group = self._control.result(timeout=ALLREDUCE_S)
                ended = time.monotonic()
                if group is None or len(group) != self._peers:
                    raise RuntimeError(f"averaged with {0 if group is None else len(group)} of {self._peers} peers")
                return {"began": began, "ended": ended}
            case "check":
                with self._averager.get_tensors() as tensors:
                    return check(self._folder, tensors[0].numpy())
            case "close":
                if self._averager is not None:
                    self._averager.shutdown()
                self._averager = None
        return {}

    def _listen(self, initial_peers: list[str]) -> Fields:
        from hivemind import DHT

        self._dht = DHT(initial_peers=initial_peers, host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
        return {"addresses": [str(address) for address in self._dht.get_visible_maddrs()]}

    def _open(self, codec: str, name: str) -> None:
        from hivemind import DecentralizedAverager, compression

        kinds = {
            "NONE": compression.NoCompression,
            "FLOAT16": compression.Float16Compression,
            "UNIFORM_8BIT": compression.Uniform8BitQuantization,
            "QUANTILE_8BIT": compression.Quantile8BitQuantization,
            "BLOCKWISE_8BIT": compression.BlockwiseQuantization,
        }
        self._averager = DecentralizedAverager(
            [torch.zeros_like(self._own)],
            self._dht,
            prefix=name,
            target_group_size=self._peers,
            min_group_size=self._peers,
            min_matchmaking_time=1.5,
            request_timeout=0.7,
            allreduce_timeout=ALLREDUCE_S,
            next_chunk_timeout=ALLREDUCE_S,
            compression=kinds[codec](),
            start=True,
        )

    def _find_group(self) -> None:
        from hivemind.averaging.control import AveragingStage

        with self._averager.get_tensors() as tensors:
            tensors[0].copy_(self._own)
        self._control = self._averager.step(timeout=GROUP_S, require_trigger=True, wait=False)
        give_up_at = time.monotonic() + GROUP_S
        while self._control.stage is not AveragingStage.AWAITING_TRIGGER:
            if self._control.done() or time.monotonic() > give_up_at:
                raise RuntimeError(f"no group within {GROUP_S:.0f} s")
            time.sleep(0.01)

    def close(self) -> None:
        with contextlib.suppress(Exception):  # what does not end by itself is killed right after
            if self._averager is not None:
                self._averager.shutdown()
            if self._dht is not None:
                self._dht.shutdown()


def main() -> None:
    number, peers, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    peer = HivemindPeer(number, peers, folder)
    obey(peer.do)
    peer.close()
    end_session()


if __name__ == "__main__":
    main()
