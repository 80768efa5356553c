"""One peer of the baseline in a trusted cluster: it averages by torch.distributed's all-reduce over gloo.

python -m benchmarks.round.averaging_gloo NUMBER PEERS FOLDER
"""

import datetime
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed

from benchmarks.round.averaging_vectors import check, vector_of
from benchmarks.round.orders import Fields, obey

DEADLINE = datetime.timedelta(seconds=60)


def main() -> None:
    number, peers, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    own = torch.from_numpy(vector_of(folder, number).copy())
    averaged = torch.empty_like(own)

    def do(order: Fields) -> Fields:
        match order["order"]:
            case "join":
                torch.distributed.init_process_group(
                    "gloo",
                    init_method=f"file://{folder}/gloo.rendezvous",
                    rank=number,
                    world_size=peers,
                    timeout=DEADLINE,
                )
            case "ready":
                averaged.copy_(own)
                torch.distributed.barrier()
            case "round":
                began = time.monotonic()
                torch.distributed.all_reduce(averaged)
                averaged.div_(peers)
                return {"began": began, "ended": time.monotonic()}
            case "check":
                return check(folder, averaged.numpy())
        return {}

    obey(do)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
