"""LoRA from end to end: a checkpoint's model frozen, adapters trained by a swarm on it, and what is taken home."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm.checkpoint.archive import latest_checkpoint
from swarm.checkpoint.huggingface import export_huggingface
from swarm.cli import ExitCode
from swarm.cli import run as run_command
from swarm.core.errors import LocalError, SettingsError
from swarm.core.ids import PeerId
from swarm.data.piece_store import WholeFile
from swarm.data.pieces import list_pieces
from swarm.host_protocol import FILE
from swarm.network.transport import Message, Transport
from tests.swarm_in_process import TINY_MODEL, InProcessSwarm, identity_of, manifest_of, swarm_in_process
from verification.replay.evidence_file import evidence_in
from verification.replay.judge import judge


def checkpoint_in(folder: Path) -> Path:
    import transformers

    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY_MODEL)).save_pretrained(folder)
    return folder


def adapted(model: dict[str, Any], adapters: dict[str, Any], **tables: Any) -> str:
    return manifest_of(
        model={"config": None, "checkpoint": "checkpoint", **model},
        adapters={"rank": 4, **adapters},
        optimizer={"learning_rate": 0.02, **tables.pop("optimizer", {})},
        **tables,
    )


class Watched:
    """A transport whose owner's requests for pieces are written down."""

    def __init__(self, inner: Transport, asked: list[tuple[PeerId, bytes]]) -> None:
        self._inner = inner
        self._asked = asked

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def call(self, peer_id: PeerId, method: str, request: Message, **limits: Any) -> Message:
        if method == FILE:
            digest = request.meta["digest"]
            assert isinstance(digest, bytes)
            self._asked.append((peer_id, digest))
        return await self._inner.call(peer_id, method, request, **limits)


async def trained(folder: Path, asked: dict[int, list[tuple[PeerId, bytes]]]) -> InProcessSwarm:
    """Two stages of two founders; one of the second dies and comes back, one more joins the first."""

    def wrap(stage: int, index: int, transport: Transport) -> Any:
        return Watched(transport, asked.setdefault(10 * stage + index, []))

    manifest = adapted({"stages": 2}, {}, limits={"founders_per_stage": 2})
    async with swarm_in_process(manifest, folder, peers=(2, 2), wrap=wrap) as swarm:
        await swarm.until_version(2)
        await swarm.until(lambda: any(event["event"] == "evaluation" for event in swarm.events))
        dead = swarm.of_stage(1)[1]
        await swarm.kill(dead)
        asked[11].clear()
        await swarm.restart(dead)
        await swarm.add_peer(0)
        report = await swarm.finished(timeout_s=120.0)  # a host steps in where a stage stands still
        assert report["held_out_loss"]["end"] < report["held_out_loss"]["start"] - 0.1
        assert all(len(set(digests.values())) == 1 for digests in report["state_digests"].values())
        return swarm


def test_adapters_are_trained_on_a_base_that_peers_hand_on_and_nobody_changes(tmp_path: Path) -> None:
    given = checkpoint_in(tmp_path / "checkpoint")
    asked: dict[int, list[tuple[PeerId, bytes]]] = {}
    swarm = asyncio.run(trained(tmp_path, asked))
    run = swarm.run
    assert run.base is not None
    assert run.settings.base_digest == run.base.pieces.digest
    assert list_pieces(run.folder.base) == run.base.pieces, "no byte of it has changed"
    of_base = {
        who: [peer for peer, digest in calls if digest == run.base.pieces.digest] for who, calls in asked.items()
    }
    assert run.host_key.peer_id in {*of_base[0], *of_base[1]}, "the first of a stage has it from the host"
    assert of_base[11] == [], "who comes back has it on its disk"
    assert len(of_base[2]) == 1, "who joins asks for it once"
    assert set(of_base[2]) <= {identity_of(0).peer_id, identity_of(1).peer_id}, "who joins has it from a peer"

    found = latest_checkpoint(run.folder.checkpoints)
    assert found is not None
    checkpoints = str(run.folder.checkpoints)
    assert run_command(["export", checkpoints, str(tmp_path / "adapters")]) is ExitCode.OK
    for base in (given, run.folder.base):
        merged = tmp_path / f"merged with {base.name}"
        assert run_command(["export", checkpoints, str(merged), "--base", str(base)]) is ExitCode.OK
        check_loss_is_pefts(given, tmp_path / "adapters", merged)
    (tmp_path / "other").write_bytes(run.folder.base.read_bytes()[:-1] + b"!")
    with pytest.raises(SettingsError, match="give that one"):
        export_huggingface(found.path, tmp_path / "none", base=tmp_path / "other")


def check_loss_is_pefts(base: Path, adapters: Path, merged: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    on_base = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapters).eval()
    alone = AutoModelForCausalLM.from_pretrained(merged).eval()
    ids = torch.arange(1, 65).unsqueeze(0)
    with torch.no_grad():
        ours, theirs = alone(ids).logits, on_base(ids).logits
    assert float((ours - theirs).abs().max()) < 1e-5
    with on_base.disable_adapter(), torch.no_grad():
        assert float((on_base(ids).logits - theirs).abs().max()) > 1e-3


@pytest.mark.soak
def test_who_lies_about_adapters_is_put_out_and_its_evidence_needs_the_base(tmp_path: Path) -> None:
    checkpoint_in(tmp_path / "checkpoint")
    manifest = adapted(
        {"stages": 1},
        {"base": "nf4"},
        run={"trust": "public"},
        audits={"hop_budget": 0.0, "contribution_budget": 8.0},
        optimizer={"total_steps": 12},
        batch={"target_tokens": 8 * 32},
        limits={"founders_per_stage": 3},
    )
    banned: list[dict[str, Any]] = []

    def heard(event: dict[str, Any]) -> None:
        if event["event"] == "banned":
            banned.append(event)

    async def attacked() -> InProcessSwarm:
        attacks = {(0, 2): "sign_flip@3"}
        async with swarm_in_process(manifest, tmp_path, peers=(3,), attacks=attacks, on_event=heard) as swarm:
            await swarm.until(lambda: bool(banned))
            return swarm

    run = asyncio.run(attacked()).run
    assert [event["peer_id"] for event in banned] == [identity_of(2).peer_id]
    evidence = evidence_in(Path(banned[0]["evidence"]))
    verify = ["evidence", "verify", banned[0]["evidence"]]
    assert run_command([*verify, "--base", str(run.folder.base)]) is ExitCode.OK
    assert run_command(verify) is ExitCode.FAILED
    assert run.settings.base_digest is not None
    with pytest.raises(LocalError, match=f"frozen base, {run.settings.base_digest.hex()}: give the host's"):
        judge(evidence)
    text = tmp_path / "text.txt"
    with pytest.raises(LocalError, match="the run's frozen base"):
        judge(evidence, base=WholeFile(text, list_pieces(text)))


def test_whole_models_in_4_bits_train_adapters_in_windows(tmp_path: Path) -> None:
    checkpoint_in(tmp_path / "checkpoint")
    manifest = adapted(
        {"stages": 1},
        {"base": "nf4", "modules": ["q_proj", "v_proj"]},
        averaging={"local_steps": 2},
        optimizer={"total_steps": 3, "warmup_steps": 1},
        checkpoint={"every_steps": 3, "snapshot_every": 3},
    )

    async def train() -> dict[str, Any]:
        async with swarm_in_process(manifest, tmp_path, peers=(2,)) as swarm:
            return await swarm.finished()

    report = asyncio.run(train())
    assert report["steps"] == 3
    assert report["held_out_loss"]["end"] < report["held_out_loss"]["start"]
    assert len(set(report["state_digests"]["0"].values())) == 1
