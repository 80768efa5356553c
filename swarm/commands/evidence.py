"""`swarm evidence`: lists, shows and verifies evidence files, with no network, by anyone; and fetches them."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from swarm.cli import ExitCode

if TYPE_CHECKING:
    from rich.text import Text

    from swarm.core.ids import PeerId
    from swarm.data.piece_store import WholeFile
    from verification.audit.evidence import Evidence

AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
EVIDENCE_FILE = click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))


@click.group()
def command() -> None:
    """List, show, verify and fetch evidence of misbehaviour."""


@command.command("list")
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False), default=Path("."))
@AS_JSON
def list_files(folder: Path, as_json: bool) -> None:
    """List the evidence files in FOLDER (by default the present one) and below."""
    from swarm.core.errors import LocalError, RemoteError
    from swarm.log_format import printable
    from verification.audit.evidence import SUFFIX

    found: list[dict[str, Any]] = []
    for path in sorted(folder.rglob(f"*{SUFFIX}")):
        try:
            found.append({"file": str(path), **_summary(_read(path))})
        except (RemoteError, LocalError) as error:
            found.append({"file": str(path), "broken": str(error)})
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    if not found:
        click.echo(f"no evidence (*{SUFFIX}) in {folder}")
    for one in found:
        what = (
            one.get("broken") or f"{one['kind']} by {one['accused']} at stage {one['stage']}, version {one['version']}"
        )
        click.echo(printable(f"{one['file']}: {what}"))


@command.command("show")
@EVIDENCE_FILE
@AS_JSON
def show(file: Path, as_json: bool) -> None:
    """Print what is inside FILE, without judging it."""
    from swarm.core.canonical import pack

    evidence = _read(file)
    summary = _summary(evidence) | {
        "facts": _plain(evidence.facts),
        "blobs": [
            {"bytes": len(blob), "blake3": digest.hex()}
            for blob, digest in zip(evidence.blobs, evidence.blob_digests, strict=True)
        ],
    }
    if as_json:
        click.echo(json.dumps(summary, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("what", "", title=_cell(str(file)), title_justify="left")
    for name, value in _summary(evidence).items():
        table.add_row(_cell(name.replace("_", " ")), _cell(str(value)))
    facts = evidence.facts if isinstance(evidence.facts, dict) else {}
    for name, fact in facts.items():
        table.add_row(_cell(name.replace("_", " ")), _cell(_brief(fact, len(pack(fact)))))
    Console(width=120).print(table)


@command.command("verify")
@click.argument(
    "files", metavar="FILE...", type=click.Path(path_type=Path, exists=True, dir_okay=False), nargs=-1, required=True
)
@click.option("--data", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="The run's training tokens.")
@click.option(
    "--base", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="The frozen base of a run of adapters."
)
@click.option("--run-key", help="Peer id of the key that the run must be signed by; by default any.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text, an object a line.")
def verify_files(
    files: tuple[Path, ...], data: Path | None, base: Path | None, run_key: str | None, as_json: bool
) -> int:
    """Judge each FILE again from nothing but what is in it; exits with 0 if all prove their accused guilty, else 3.

    A verdict holds for the run whose key is printed: compare it with the one you know, or give it as --run-key.
    """
    import torch

    from swarm.core.ids import PeerId
    from swarm.data.piece_store import WholeFile
    from swarm.data.pieces import list_pieces

    torch.set_num_threads(1)  # the same bits on every run
    frozen = None if base is None else WholeFile(base, list_pieces(base))
    all_proven = True
    for file in files:
        outcome = _judged(file, data, frozen, None if run_key is None else PeerId(run_key))
        all_proven = all_proven and outcome["proven"]
        click.echo(json.dumps(outcome) if as_json else _told(outcome))
    return ExitCode.OK if all_proven else ExitCode.NOT_PROVEN


def _judged(file: Path, data: Path | None, base: "WholeFile | None", run_key: "PeerId | None") -> dict[str, Any]:
    """What comes of a file. Raises LocalError where it cannot be judged here."""
    from swarm.core.errors import RemoteError
    from verification.replay.judge import judge

    outcome: dict[str, Any] = {"file": str(file), "proven": False}
    try:
        evidence = _read(file)
        outcome |= _summary(evidence)
        verdict = judge(evidence, data=data, base=base, run_key=run_key)
        outcome |= {"proven": verdict.guilty, "reason": verdict.reason, "figures": dict(verdict.figures)}
    except RemoteError as error:
        outcome["reason"] = str(error)
    return outcome


def _told(outcome: dict[str, Any]) -> str:
    from swarm.log_format import printable

    if not outcome["proven"]:
        return printable(f"{outcome['file']}: not proven: {outcome['reason']}")
    told = f"{outcome['file']}: proven: {outcome['kind']} by {outcome['accused']}", outcome["reason"]
    return "\n".join(map(printable, (*told, f"in run {outcome['run_id']}", f"under key {outcome['run_key']}")))


@command.command("fetch")
@click.argument("page")
@click.argument("peer")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--run-key", required=True, help="Peer id of the key that must have signed: the one in your invite.")
def fetch_file(page: str, peer: str, file: Path, run_key: str) -> None:
    """Fetch what PEER was banned for from PAGE, a host's web page, to FILE.

    The page is plain HTTP: what comes is taken only if the run key has signed its SHA-256, and no more of it than
    evidence of that run can hold.
    """
    import asyncio

    from swarm.core.ids import PeerId

    if file.exists():
        from swarm.core.errors import SettingsError

        raise SettingsError(f"{file} is there already; give a new name, so that nothing is overwritten")
    size = asyncio.run(fetched(page, PeerId(peer), file, run_key=PeerId(run_key)))
    click.echo(f"{file}: {size} bytes, as {run_key} signed; now: swarm evidence verify {file} --run-key {run_key}")


async def fetched(page: str, peer: "PeerId", file: Path, *, run_key: "PeerId") -> int:
    """Bytes of the evidence, now in `file`. Raises RemoteError for another than was signed, TransientError where it
    does not come."""
    from swarm.network.services.web_client import WebClient
    from verification.replay.evidence_file import MAX_WORD_BYTES, SignedVerdict, write_evidence

    async with WebClient(page) as client:
        said = await client.read(f"/verdict/{peer}", max_bytes=MAX_WORD_BYTES)
        word = SignedVerdict.from_bytes(said, peer=peer, run_key=run_key)
        digest, largest = word.verdict.evidence_digest, word.largest_bytes
        pieces = client.pieces(f"/evidence/{digest.hex()}", max_bytes=largest)
        return await write_evidence(pieces, file, digest=digest, max_bytes=largest)


def _read(path: Path) -> "Evidence":
    """Raises LocalError where there is no such file, RemoteError where it is no evidence."""
    from swarm.core.errors import LocalError
    from verification.replay.evidence_file import evidence_in

    try:
        return evidence_in(path)
    except OSError as error:
        raise LocalError(f"{path} cannot be read: {error.strerror}") from error


def _cell(text: str) -> "Text":
    """Of a table: whoever made the evidence has written some of it."""
    from rich.text import Text

    from swarm.log_format import printable

    return Text(printable(text))


def _summary(evidence: "Evidence") -> dict[str, Any]:
    return {
        "kind": evidence.kind,
        "accused": evidence.accused,
        "stage": int(evidence.stage),
        "version": int(evidence.version),
        "run_id": evidence.run_id,
        "run_key": evidence.run.run_key,
        "blobs_bytes": sum(map(len, evidence.blobs)),
        "num_blobs": len(evidence.blobs),
        "digest": evidence.digest().hex(),
    }


def _plain(value: Any) -> Any:
    """A value as JSON has it: bytes in hex."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _brief(fact: Any, size_bytes: int) -> str:
    """A fact on a line or two."""
    text = json.dumps(_plain(fact))
    return text if len(text) <= 400 else f"{text[:200]} ... ({size_bytes} bytes; all of it with --json)"
