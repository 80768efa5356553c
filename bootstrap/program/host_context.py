"""What the parts of a host are made with, and nobody changes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bootstrap.audit.justice import Justice
from bootstrap.owner.progress import RunProgress
from bootstrap.program.books import Books
from bootstrap.program.ledger import Ledger
from bootstrap.round.following import Following
from bootstrap.state.beginning import Beginning
from bootstrap.state.run_folder import PreparedRun
from swarm.network.transport import Transport


@dataclass(frozen=True, kw_only=True)
class HostContext:
    """Of one run, for as long as its host lives."""

    run: PreparedRun
    transport: Transport
    """To the peers, without those who are shut out."""
    ledger: Ledger
    books: Callable[[], Books]
    """What the ledger adds up to, as of now."""
    progress: RunProgress
    """What peers have reported, and who is present."""
    followed: Following
    """The stages' certified chains."""
    justice: Justice
    """Who may train, and which states are anchored."""
    beginning: Beginning
    """The geneses that count, and who waits for others."""
    emit: Callable[[dict[str, Any]], None]
    """Tells whoever looks at the run."""
