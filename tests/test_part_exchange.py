"""This is where messages of several parts are taken apart: whatever is wrong with one, the others are heard."""

import asyncio
import hashlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from peer.compute import WorkThread
from peer.part_exchange import PartExchange
from swarm.averaging.codecs import vector_codec
from swarm.averaging.result_decoder import ResultDecoder
from swarm.core.canonical import Value
from swarm.core.contribution import ReducedPart
from swarm.core.errors import RemoteError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId, Step

SENDER = PeerId("sender")
SIZE = 300
CODEC = vector_codec("int8")
PARTS = [slice(start, start + SIZE) for start in range(0, 4 * SIZE, SIZE)]
GOOD = [CODEC.encode(np.full(SIZE, part + 1, dtype=np.float32), seed=bytes(32)) for part in range(4)]


class Machine:
    """Takes what it is told, and refuses the part of the number 3."""

    def __init__(self, digests: list[bytes]) -> None:
        self.roster = SimpleNamespace(view=0)
        self.result = None
        self.facts = SimpleNamespace(check_member=lambda peer: None)
        self.heard: list[tuple[str, int]] = []
        self._digests = digests

    def expected_digest(self, part: int, sender: PeerId) -> bytes:
        if part >= len(self._digests):
            raise RemoteError("protocol", f"part {part} is not on the roster", sender)
        return self._digests[part]

    def _take(self, what: str, part: int) -> list[Any]:
        self.heard.append((what, part))
        if part == 3:
            raise RemoteError("protocol", "part 3 is not wanted", SENDER)
        return [f"{what} {part}"]

    def on_part(self, sender: PeerId, part: int, *, now: float) -> list[Any]:
        return self._take("part", part)

    def on_bad_part(self, sender: PeerId, part: int, reason: str, *, now: float) -> list[Any]:
        return self._take("bad", part)

    def on_reduced(self, sender: PeerId, reduced: ReducedPart, *, now: float) -> list[Any]:
        return self._take("reduced", reduced.part)


class Scene:
    def __init__(self) -> None:
        self.out: list[Any] = []
        self.state: Any = SimpleNamespace(
            step=Step(0), received={}, reduced={}, decoder=None, changed=None, own_parts=GOOD
        )
        self.exact = WorkThread("exact")
        replica = SimpleNamespace(
            parts=lambda: PARTS,
            num_parts=len(PARTS),
            contribution_codec=CODEC,
            codec=CODEC,
            result_decoder=lambda: ResultDecoder(CODEC, PARTS, np.zeros(4 * SIZE, dtype=np.float32)),
        )
        stage: Any = SimpleNamespace(
            replica=replica,
            exact=self.exact,
            spawn=lambda work: work.close(),
            settings=SimpleNamespace(deadlines=SimpleNamespace(call_s=1.0)),
            chain=SimpleNamespace(stage=0),
            open_step=lambda step: self.state,
        )
        self.machine = Machine([hashlib.sha256(body).digest() for body in GOOD])
        self.exchange = PartExchange(stage, self)

    def carry_out(self, state: Any, instructions: Any) -> None:
        self.out += instructions

    async def send(self, state: Any, peer: PeerId, meta: dict[str, Value], bodies: tuple[Any, ...] = ()) -> None:
        raise AssertionError("nothing is sent here")

    def receive(self, **meta: Any) -> None:
        body = b"".join(meta.pop("bodies"))
        machine: Any = self.machine
        asyncio.run(
            self.exchange.receive(self.state, machine, SENDER, Fields("message", meta), memoryview(bytearray(body)))
        )


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.exact.close(timeout_s=5)


def contributed(parts: list[int], bodies: list[Any]) -> dict[str, Any]:
    heads = [{"part": part, "view": 0} for part in parts]
    return {"of": "contributed", "heads": heads, "sizes": [len(body) for body in bodies], "bodies": bodies}


def reduced(parts: list[int], bodies: list[Any], digests: list[bytes] | None = None) -> dict[str, Any]:
    digests = digests or [hashlib.sha256(body).digest() for body in bodies]
    heads = [ReducedPart(part, found, (SENDER,)).to_value() for part, found in zip(parts, digests, strict=True)]
    sizes = [len(body) for body in bodies]
    return {"of": "reduced", "heads": [{"reduced": head} for head in heads], "sizes": sizes, "bodies": bodies}


def test_parts_of_a_message_are_heard_in_order_and_carried_out_together(scene: Scene) -> None:
    scene.receive(**contributed([2, 0], [GOOD[2], GOOD[0]]))
    assert scene.out == ["part 2", "part 0"]
    assert {key: bytes(body) for key, body in scene.state.received.items()} == {
        (2, SENDER): bytes(GOOD[2]),
        (0, SENDER): bytes(GOOD[0]),
    }
    scene.receive(**reduced([1, 2], GOOD[1:3]))
    assert scene.out[2:] == ["reduced 1", "reduced 2"]
    assert sorted(part for part, _ in scene.state.reduced) == [1, 2]


@pytest.mark.parametrize(
    ("bad", "kind"),
    [(GOOD[1], "digest"), (b"", "digest"), (bytes(len(GOOD[0])), "digest")],
)
def test_bad_part_is_refused_and_the_others_of_its_message_count(scene: Scene, bad: Any, kind: str) -> None:
    with pytest.raises(RemoteError) as info:
        scene.receive(**contributed([1, 0, 2], [GOOD[1], bad, GOOD[2]]))
    assert info.value.kind == kind
    assert sorted(scene.out) == ["bad 0", "part 1", "part 2"]
    assert sorted(part for part, _ in scene.state.received) == [1, 2]


def test_committed_nonsense_is_refused_by_its_form(scene: Scene) -> None:
    nonsense = bytes([0x80]) * len(GOOD[0])
    scene.machine._digests[0] = hashlib.sha256(nonsense).digest()
    with pytest.raises(RemoteError, match="part 0") as info:
        scene.receive(**contributed([0, 1], [nonsense, GOOD[1]]))
    assert info.value.kind == "malformed"
    assert sorted(scene.out) == ["bad 0", "part 1"]


def test_what_the_round_refuses_costs_nothing_but_itself(scene: Scene) -> None:
    for message in (contributed([3, 0], [GOOD[3], GOOD[0]]), reduced([3, 0], [GOOD[3], GOOD[0]])):
        with pytest.raises(RemoteError, match="not wanted"):
            scene.receive(**message)
    assert scene.out == ["part 0", "reduced 0"]


def test_reduced_part_that_is_not_its_digest_is_not_kept(scene: Scene) -> None:
    digests = [hashlib.sha256(GOOD[0]).digest(), hashlib.sha256(b"other").digest()]
    with pytest.raises(RemoteError, match="differs from its digest"):
        scene.receive(**reduced([0, 1], GOOD[:2], digests))
    assert [part for part, _ in scene.state.reduced] == [0]


@pytest.mark.parametrize(
    "change",
    [
        {"sizes": [1]},
        {"sizes": [len(GOOD[0]), 1]},
        {"sizes": [-1, len(GOOD[0]) + 1]},
        {"heads": []},
        {"heads": [{"part": 0}]},
        {"heads": [7]},
        {"heads": [{"part": 99, "view": 0}]},
        {"of": "other"},
    ],
)
def test_message_that_contradicts_itself_is_refused_whole(scene: Scene, change: dict[str, Any]) -> None:
    with pytest.raises(RemoteError):
        scene.receive(**{**contributed([0], [GOOD[0]]), **change})
    assert scene.out == []
    assert scene.state.received == {}


def test_reduced_part_past_the_last_is_left_to_the_round_to_refuse(scene: Scene) -> None:
    scene.receive(**reduced([4000], [b"whatever"]))
    assert scene.machine.heard == [("reduced", 4000)]
