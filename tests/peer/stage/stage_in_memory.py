"""A peer's part of two steps of a stage, by itself: what it says is the most memory that it held, and its plan's.

    python -m tests.peer.stage.stage_in_memory FOLDER

Among friends with either kind of moments, and among strangers. Microbatches, a contribution, its reduction, the step
and, among strangers, an audit of it; with the functions that a daemon calls, in its order, each one alone.
"""

import json
import multiprocessing
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from kernels.threads import ONE_THREAD
from peer.owner.limits import held_bytes
from peer.round.work import ContributionEncoder, PartReducer
from peer.state.replica import StageReplica
from swarm.averaging.certified_gradient import squares_of
from swarm.averaging.seeds import part_seeds
from swarm.core.ids import PeerId, StageIndex, Step, Version
from swarm.core.plan import stage_memory_bytes
from swarm.core.round.contribution import ReducedPart
from swarm.core.settings import RunSettings
from swarm.local.rehearsal import rehearse
from swarm.manifest.file import assumed_data, freeze, parse_manifest
from swarm.memory.allocator import return_large_blocks
from swarm.model.initial import initial_weights
from swarm.model.stage import StageModel
from swarm.model.tensor_pass import TensorPass
from swarm.optim.gradient_sum import GradientSum
from swarm.optim.second_moments import second_moments
from swarm.optim.stage_step import first_state, stage_clip_norm
from verification.audit.amplified import amplified

MANIFEST = """\
[run]
name = "memory"
trust = "{trust}"
[model]
stages = 1
[model.config]
model_type = "llama"
vocab_size = 256
hidden_size = 640
intermediate_size = 1920
num_hidden_layers = 2
num_attention_heads = 8
num_key_value_heads = 8
head_dim = 80
max_position_embeddings = 256
[batch]
microbatch_size = 1
[optimizer]
moments = "{moments}"
[limits]
max_peers_per_stage = 1
"""
CASES = (("friends", "fp32"), ("friends", "int8"), ("public", "fp32"))
"""Whom a peer is among, and its moments."""
HIDDEN_SIZE = 640
LOOK_EVERY_S = 0.001
ME, SEED = PeerId("me"), bytes(32)


class Watch(threading.Thread):
    """Looks at what this process holds, without mapped files, beside what it held at first."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._process = psutil.Process()
        self._first = self._most = held_bytes(self._process)

    def run(self) -> None:
        while True:
            self._most = max(self._most, held_bytes(self._process))
            time.sleep(LOOK_EVERY_S)

    @property
    def bytes(self) -> int:
        return self._most - self._first


def microbatch(tensors: TensorPass, replica: StageReplica, into: torch.Tensor) -> None:
    ids_BL = torch.arange(tensors.shape[0] * tensors.shape[1]).reshape(tensors.shape[:2]) % 256
    _, _, saved = tensors.loss(replica.weights, ids_BL, ids_BL, ())
    tensors.loss_backward(saved, into)


def step(replica: StageReplica, tensors: TensorPass) -> list[memoryview]:
    """One of a member alone; what it contributed."""
    number, parts = Step(replica.version), replica.parts()
    held = replica.sum_of(number)
    microbatch(tensors, replica, held.gradient.flat)
    held.gradient.add_tokens(tensors.shape[0] * tensors.shape[1])
    work: Any = {0: None}
    held.work = work
    replica.close(number)
    seeds = part_seeds("run", StageIndex(0), Version(int(number)), ME, num_parts=len(parts))
    contribution, _ = ContributionEncoder(replica).encode(number, held, seeds)
    reduced, bodies = [], []
    for part, body in enumerate(contribution):
        made, digest = PartReducer(replica).reduce(part, [(128, body)], norm_cap=None, seed=SEED)
        bodies.append(replica.outputs.put(made))
        squares = squares_of(parts.result_codec(part), made, parts.size(part))
        reduced.append(ReducedPart(part, digest, (ME,), (), squares))
    replica.swap(replica.next_version(replica.certified_gradient(reduced, bodies), SEED))
    replica.past.write()
    return contribution


def audit(replica: StageReplica, tensors: TensorPass, claimed: list[memoryview]) -> None:
    """As `StageReplay.encoded_contribution` and `compared_contribution` hold what they need."""
    parts, codec = replica.parts(), replica.parts().contribution_codec(0)
    again = GradientSum(replica.layout.num_values)
    microbatch(tensors, replica, again.flat)
    del again
    decoded = []
    for _ in range(2):
        values = torch.empty(replica.layout.num_values).numpy()
        for part, where in enumerate(parts):
            codec.decode(claimed[part], values[where])
        decoded.append(values)
    second = second_moments(replica.settings.optimizer, replica.state.moments, steps_since=1)
    amplified(decoded[0], decoded[1], second, epsilon=replica.settings.optimizer.epsilon, seed=SEED)


def settings_of(trust: str, moments: str) -> RunSettings:
    manifest = parse_manifest(MANIFEST.format(trust=trust, moments=moments), Path("run.toml"))
    return freeze(manifest, assumed_data(manifest), ())


def measured(case: tuple[str, str]) -> dict[str, Any]:
    """Of one case, in a process of its own."""
    settings, watch = settings_of(*case), Watch()
    model = StageModel(settings.model, 0)
    watch.start()
    state = first_state(settings, model.layout, next(initial_weights(settings.model, 0, None)))
    folder, clip_norm = Path(sys.argv[1]) / "-".join(case), stage_clip_norm(settings, 0)
    replica = StageReplica(settings, model, state, clip_norm=clip_norm, threads=ONE_THREAD, folder=folder)
    del state
    tensors = TensorPass(settings, model)
    for _ in range(2):
        claimed = step(replica, tensors)
        if settings.replays:
            audit(replica, tensors, claimed)
    items = stage_memory_bytes(settings, model.layout.num_values, HIDDEN_SIZE, "cpu", stage=0)
    return {"held": watch.bytes, "items": items, "parameters": model.layout.num_values}


def main() -> None:
    return_large_blocks()
    torch.set_num_threads(1)
    rehearse(settings_of(*CASES[0]))  # what is loaded by it is the program's own
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        found = pool.map(measured, CASES, chunksize=1)
    print(json.dumps({" ".join(case): one for case, one in zip(CASES, found, strict=True)}))


if __name__ == "__main__":
    main()
