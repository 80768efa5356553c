"""What an exported model says of itself: which run made it, from what, on what, and who checked it."""

import html
import json
import re
from typing import Any

from swarm.checkpoint.archive import CheckpointInfo
from swarm.log_format import printable

MOST_PEERS = 16
"""Named in a card."""
_MARKS = re.compile(r"[\\`|\[\]]")


def model_card(info: CheckpointInfo, notes: list[str]) -> str:
    """Markdown for the README.md of a model folder; `notes` are sentences on how it differs from what it came from."""
    run, lineage = info.meta.run, info.meta.lineage
    data = run.get("data", {})
    rows = [
        ("run", lineage.get("run_id")),
        ("run key", lineage.get("run_key")),
        ("step", info.version),
        ("states", ", ".join(stage.digest.hex() for stage in info.stages)),
        ("began from", _parent(lineage.get("parent"))),
        ("training tokens", _tokens(data.get("train_digest"), data.get("num_train_tokens"))),
        ("held-out tokens", _tokens(data.get("held_out_digest"), data.get("num_held_out_tokens"))),
        ("tokenizer", info.meta.tokenizer),
        ("sequence length", data.get("sequence_length")),
        (_measured_at(lineage), lineage.get("held_out_loss")),
        ("peers", lineage.get("num_peers")),
        ("audits", lineage.get("audits")),
        ("data licence", run.get("data_licence")),
    ]
    lines = ["---", "license: other", f"license_name: {json.dumps(run.get('model_licence', 'unknown'))}"]
    lines += [
        "library_name: transformers",
        "tags: [homeswarm]",
        "---",
        "",
        f"# {_text(run.get('name', 'A model'))}",
        "",
    ]
    lines += ["Trained by volunteers over the Internet, with homeswarm.", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {_text(value)} |" for name, value in rows if value not in (None, "")]
    if notes:
        lines += ["", *(f"- {note}" for note in notes)]
    peers = lineage.get("peers", [])
    if peers:
        lines += ["", "| peer | microbatches | steps |", "|---|---|---|"]
        lines += [f"| {_text(peer)} | {batches} | {steps} |" for peer, batches, steps in peers[:MOST_PEERS]]
    return "\n".join(lines) + "\n"


def _parent(parent: dict[str, Any] | None) -> str:
    return "weights drawn from a seed" if parent is None else f"{parent['name']} (SHA-256 {parent['digest']})"


def _measured_at(lineage: dict[str, Any]) -> str:
    """The last measured loss is an earlier version's: a checkpoint's own is measured once it is written."""
    version = lineage.get("held_out_version")
    return "held-out loss" if version is None else f"held-out loss at step {version}, the last measured before"


def _tokens(digest: str | None, count: int | None) -> str:
    return "" if digest is None else f"{count} (SHA-256 {digest})"


def _text(value: Any) -> str:
    """What others have written, on a line, as text: neither markup nor a link."""
    return _MARKS.sub(r"\\\g<0>", html.escape(printable(str(value)), quote=False))
