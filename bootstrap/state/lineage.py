"""Where a checkpoint's weights come from, as the host's books have it: for the model card."""

from typing import Any

from bootstrap.program.books import Books, Credit
from bootstrap.state.run_folder import PreparedRun
from swarm.checkpoint.model_card import MOST_PEERS
from swarm.checkpoint.parent import read_parent


def lineage_of(run: PreparedRun, books: Books) -> dict[str, Any]:
    """JSON values."""
    done = sorted(books.credit.items(), key=lambda item: (-item[1].num_microbatches, item[0]))
    kinds = [kind for verdicts in books.verdicts.values() for kind in verdicts]
    found: dict[str, Any] = {
        "run_id": run.run_id,
        "run_key": run.run_key.peer_id,
        "parent": None if run.parent is None else read_parent(run.parent),
        "num_peers": len(done),
        "peers": [_row(peer, credit) for peer, credit in done[:MOST_PEERS]],
        "audits": (
            f"trust {run.settings.trust}, work {'' if run.settings.replays else 'not '}replayed, "
            f"{kinds.count('ban')} banned, {kinds.count('quarantine')} in quarantine"
        ),
    }
    if books.held_out:
        found["held_out_version"] = max(books.held_out)
        found["held_out_loss"] = books.held_out[max(books.held_out)]
    return found


def _row(peer: str, credit: Credit) -> list[Any]:
    return [peer, credit.num_microbatches, credit.num_steps]
