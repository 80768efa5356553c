"""Every method that a live swarm serves is called with garbage, by a stranger and by a member: the run goes on."""

import asyncio
import contextlib
import gc
import logging
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from swarm.core.canonical import pack
from swarm.core.errors import RemoteError, TransientError
from swarm.core.ids import PeerId
from swarm.host_protocol import GOODBYE
from swarm.network.service import decode_meta
from swarm.network.transport import Message, Transport, TransportAround
from tests.swarm.core.mutations import spoilt, spoilt_bytes
from tests.swarm_in_process import InProcessSwarm, identity_of, manifest_of, swarm_in_process

STEPS = 4
KEPT_SAMPLES = 24
CALL_S = 0.3
STRANGER = identity_of(99).peer_id


@dataclass
class Overheard:
    """What was said in earnest, by method."""

    calls: dict[str, list[tuple[bytes, bytes]]] = field(default_factory=lambda: defaultdict(list))

    def keep(self, method: str, request: Message) -> None:
        held = self.calls[method]
        body = b"".join(bytes(piece) for piece in (request.body, *request.more))
        held.append((pack(request.meta), body))
        del held[:-KEPT_SAMPLES]


class Listening(TransportAround):
    """A transport whose calls are overheard."""

    def __init__(self, inner: Transport, overheard: Overheard) -> None:
        super().__init__(inner)
        self._overheard = overheard

    async def call(
        self, peer_id: PeerId, method: str, request: Message, *, timeout_s: float, max_body_bytes: int
    ) -> Message:
        self._overheard.keep(method, request)
        return await self._inner.call(peer_id, method, request, timeout_s=timeout_s, max_body_bytes=max_body_bytes)


@dataclass
class Pest:
    """Calls everyone, all the time."""

    swarm: InProcessSwarm
    overheard: Overheard
    rng: random.Random
    sender: PeerId
    answers: Counter[str] = field(default_factory=Counter)
    methods: Counter[str] = field(default_factory=Counter)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(0.002)
            callees = [one for peer, one in self.swarm.network._transports.items() if peer != self.sender]
            callee = self.rng.choice(callees)
            method = self.rng.choice(sorted(callee._services._services))
            if method == GOODBYE and self.sender != STRANGER:
                continue  # a member that says so in earnest is not told of the end
            self.methods[method] += 1
            try:
                async with asyncio.timeout(CALL_S), callee.answered(self.sender, method, self._request(method)):
                    pass
            except (RemoteError, TransientError, TimeoutError) as error:
                self.answers[getattr(error, "kind", type(error).__name__)] += 1
            else:
                self.answers["answered"] += 1

    def _request(self, method: str) -> Message:
        """Raises RemoteError if it is no message at all, as a transport does before a handler sees it."""
        meta, body = self.rng.choice(self.overheard.calls[method] or [(pack({}), b"")])
        meta = spoilt(meta, self.rng)
        if self.rng.random() < 0.3:
            body = spoilt_bytes(body, self.rng)
        return Message(decode_meta(meta), memoryview(bytearray(body)))


def pestered(
    folder: Path, *, seed: int, steps: int, pests: int, **tables: dict[str, Any]
) -> tuple[InProcessSwarm, dict[str, Any], list[Pest]]:
    """A swarm of two stages with three replicas each; every second pest calls in the name of the last of stage 1."""
    overheard = Overheard()
    named: dict[str, dict[str, Any]] = {
        "run": {"trust": "public"},
        "optimizer": {"total_steps": steps},
        "batch": {"target_tokens": 12 * 32},
        "limits": {"founders_per_stage": 3},
        "checkpoint": {"every_steps": 8, "snapshot_every": 4},
    }
    manifest = manifest_of(**named | tables)

    async def train() -> tuple[InProcessSwarm, dict[str, Any], list[Pest]]:
        async with swarm_in_process(
            manifest, folder, peers=(3, 3), wrap=lambda stage, index, inner: Listening(inner, overheard)
        ) as swarm:
            senders = (STRANGER, swarm.peers[-1].peer_id)
            made = [
                Pest(swarm, overheard, random.Random(f"{seed}/{number}"), senders[number % 2])
                for number in range(pests)
            ]
            tasks = [asyncio.ensure_future(pest.run()) for pest in made]
            try:
                report = await swarm.finished(timeout_s=100)
            finally:
                for task in tasks:
                    task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.gather(*tasks)
            return swarm, report, made

    return asyncio.run(train())


def test_a_run_ends_as_it_should_when_everyone_is_called_with_garbage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gc.collect()  # what tasks of other tests came to is said now
    caplog.clear()
    caplog.set_level(logging.ERROR)
    swarm, report, pests = pestered(tmp_path, seed=0, steps=STEPS, pests=6)
    assert [record.getMessage() for record in caplog.records] == []
    assert report["steps"] == STEPS
    spoken_for = swarm.peers[-1].peer_id  # of this one the host has heard what pests made up
    for replicas in report["state_digests"].values():
        assert len({digest for peer, digest in replicas.items() if peer != spoken_for}) == 1
    for stage in (0, 1):
        assert len({peer.steps.replica.state.weights.tobytes() for peer in swarm.of_stage(stage)}) == 1
    assert not [event for event in swarm.events if event["event"] == "banned"]
    stages = {peer.peer_id: peer.stage for peer in swarm.peers}
    joined = [event for event in swarm.events if event["event"] == "joined"]
    assert all(stages.get(event["peer_id"]) == event["stage"] for event in joined), "who joins has a ticket"
    methods, answers = (
        sum((pest.methods for pest in pests), Counter()),
        sum((pest.answers for pest in pests), Counter()),
    )
    assert methods.keys() >= {"forward", "round", "progress", "report", "admit", "accuse", "witness"}, methods
    assert answers["malformed"] > 100, answers
