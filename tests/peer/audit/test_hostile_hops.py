"""Who signs for an activation or a gradient that does not decode is banned by whoever gets it."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from swarm.bulk_digest import bulk_digest
from swarm.core.canonical import Value, pack, unpack
from swarm.core.errors import RemoteError
from swarm.core.ids import PeerId
from swarm.identity.key import Identity
from swarm.network.transport import Handler, Message, Transport
from tests.swarm_in_process import identity_of, manifest_of, swarm_in_process
from verification.pipeline.headers import BirthRecord, HopHeader
from verification.replay.evidence_file import evidence_in
from verification.replay.judge import judge

FROM_STEP = 2
TARGETS_BYTES = 4 * 2 * 16
"""After the activation: of a microbatch of 2 x 16 tokens."""
NO_SCALE = b"\xc0\x7f"
"""A scale that is no number."""


def resigned(header: Value, body: bytes, owner: Identity) -> Value:
    made = HopHeader.from_value(unpack(pack(header), max_bytes=1 << 16))
    return replace(made, body_digest=bulk_digest(body)).signed_by(owner).to_value()


def attacks(birth: Value) -> bool:
    made = BirthRecord.from_value(unpack(pack(birth), max_bytes=1 << 16))
    return made.kind == "train" and made.step >= FROM_STEP


class Garbler:
    """A transport whose owner sends activations, or answers gradients, that do not decode, and signs for them."""

    def __init__(self, inner: Transport, owner: Identity) -> None:
        self._inner = inner
        self._owner = owner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def call(self, peer_id: PeerId, method: str, request: Message, **limits: Any) -> Message:
        if method == "forward" and attacks(request.meta["birth"]):
            data = b"".join([request.body, *request.more])
            activation = NO_SCALE + data[2:-TARGETS_BYTES]
            header = resigned(request.meta["header"], activation, self._owner)
            request = Message({**request.meta, "header": header}, activation + data[-TARGETS_BYTES:])
        return await self._inner.call(peer_id, method, request, **limits)

    def serve(self, method: str, handler: Handler, *, max_body_bytes: int) -> None:
        async def garbling(sender: PeerId, request: Message) -> Message:
            reply = await handler(sender, request)
            if "header" not in reply.meta or not attacks(request.meta["birth"]):
                return reply
            gradient = NO_SCALE + b"".join([reply.body, *reply.more])[2:]
            return Message({**reply.meta, "header": resigned(reply.meta["header"], gradient, self._owner)}, gradient)

        self._inner.serve(method, garbling if method == "forward" else handler, max_body_bytes=max_body_bytes)


@pytest.mark.soak
@pytest.mark.parametrize("stage", [0, 1])
def test_who_signs_for_what_does_not_decode_is_banned(tmp_path: Path, stage: int) -> None:
    """At stage 0 the activation, at the last stage the gradient."""
    manifest = manifest_of(
        run={"trust": "friends"},
        audits={"reducer_share": 0.0},
        optimizer={"total_steps": 100},
        batch={"target_tokens": 12 * 32},
        limits={"founders_per_stage": 3},
    )
    liar = identity_of(3 * stage + 2)

    def wrap(of_stage: int, index: int, transport: Transport) -> Transport:
        return cast(Transport, Garbler(transport, liar)) if (of_stage, index) == (stage, 2) else transport

    async def train() -> tuple[list[dict[str, Any]], PeerId]:
        async with swarm_in_process(manifest, tmp_path, peers=(3, 3), wrap=wrap) as swarm:

            def banned() -> list[dict[str, Any]]:
                return [event for event in swarm.events if event["event"] == "banned"]

            await swarm.until(lambda: bool(banned()), timeout_s=90.0)
            await swarm.until_version(swarm.host.progress.done_versions() + 2, timeout_s=60.0)
            return banned(), swarm.run.run_key.peer_id

    (found,), run_key = asyncio.run(train())
    assert (found["peer_id"], found["kind"]) == (liar.peer_id, "protocol_violation")
    evidence = evidence_in(Path(found["evidence"]))
    assert judge(evidence, run_key=run_key).guilty
    with pytest.raises(RemoteError):
        judge(replace(evidence, accused=run_key), run_key=run_key)
