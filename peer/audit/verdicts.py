"""The run key's word on others, heard and acted on: a peer shuts them out, lets them in, or waits.

Whoever brings the word does not matter. A peer on probation is answered what it needs to end it, and nothing else.
"""

import logging
from collections.abc import Callable, Iterable
from typing import TypeAlias

from peer.audit.exams import EXAM, EXAM_ANSWER
from peer.directory.neighbours import WATCH
from peer.pipeline.screens import KnownStanding
from peer.state.catch_up import JOIN
from swarm.checkpoint.transfer import CHUNK, PART_BYTES, SNAPSHOT
from swarm.core.canonical import Value
from swarm.core.errors import RemoteError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId
from swarm.core.settings import RunSettings
from swarm.core.state.stage_chain import Genesis
from swarm.host_protocol import BAN, DEBT, FILE, FINISH, HELD, MAX_BANS, PARDON, PIECES, PROMOTE, QUARANTINE, RESULTS
from swarm.network.outcasts import GuardedTransport
from swarm.network.transport import Handler, Message
from verification.audit.standing import AuditDebt
from verification.audit.verdicts import Ban, Debt, Pardon, Promotion, Quarantine

log = logging.getLogger(__name__)

Word: TypeAlias = Ban | Quarantine | Pardon | Promotion | Debt

FOR_EVERYBODY = frozenset(
    {"ping", WATCH, RESULTS, PART_BYTES, SNAPSHOT, CHUNK, FILE, HELD, PIECES, JOIN, EXAM, EXAM_ANSWER}
    | {BAN, QUARANTINE, PARDON, PROMOTE, DEBT, FINISH}
)
"""What passes between a member and a peer on probation: enough to follow the stage, and to be examined."""
_WORDS: dict[str, tuple[str, Callable[[Value], Word]]] = {
    BAN: ("ban", Ban.from_value),
    QUARANTINE: ("quarantine", Quarantine.from_value),
    PARDON: ("pardon", Pardon.from_value),
    PROMOTE: ("promotion", Promotion.from_value),
    DEBT: ("debt", Debt.from_value),
}


def passes(standing: KnownStanding, host: PeerId) -> Callable[[PeerId, str], bool]:
    """Whether calls of a method pass between this peer and another, which is not shut out."""
    return lambda peer, method: method in FOR_EVERYBODY or peer == host or standing.may_train(peer)


class Verdicts:
    """What the run key has said, as far as it is known here."""

    def __init__(
        self,
        me: PeerId,
        standing: KnownStanding,
        transport: GuardedTransport,
        *,
        on_lost: Callable[[PeerId], None],
        counts: Callable[[Quarantine, PeerId], bool],
        on_self: Callable[[Word], None],
    ) -> None:
        """`on_lost` is told of a peer that may not train any more, `on_self` what is said of this peer itself.

        `counts`: whether what jurors found, as a sender brings it, counts here; it raises RemoteError, TransientError.
        """
        self.standing = standing
        self.own_promotion: Promotion | None = None
        self._on_lost = on_lost
        self._counts = counts
        self._on_self = on_self
        self._me = me
        self._transport = transport
        self._run: tuple[str, PeerId] | None = None

    def serve(self, run_id: str, run_key: PeerId) -> None:
        """Begin to hear."""
        self._run = run_id, run_key
        for method in _WORDS:
            self._transport.serve(method, self._listener(method), max_body_bytes=0)

    def begin(self, settings: RunSettings, geneses: Iterable[Genesis]) -> None:
        """Who is a member from the start, of the stages that matter here."""
        founders = {peer for genesis in geneses for peer in genesis.members}
        self.standing.begin(founders, has_probation=settings.has_probation)

    def take_all(self, fields: Fields) -> None:
        """What the host tells a peer that it admits."""
        for method in (BAN, QUARANTINE, PARDON, DEBT):
            name, read = _WORDS[method]
            for word in fields.items(f"{name}s", read, max_items=MAX_BANS):
                self.take(word)
        promotion = fields.maybe("promotion", Promotion.from_value)
        if promotion is not None:
            self.take(promotion)

    def take(self, word: Word, sender: PeerId | None = None) -> None:
        """Act on it. Raises RemoteError unless the run key signed it; or jurors, then `sender` brings their word."""
        assert self._run is not None, "the run is not known yet"
        if isinstance(word, Quarantine) and word.is_by_jurors and sender is not None:
            if not self._counts(word, sender):
                return
        else:
            word.check(*self._run)
        self.standing.take(AuditDebt(word.peer_id, word.version) if isinstance(word, Debt) else word)
        peer = word.peer_id
        if peer == self._me:
            if isinstance(word, Promotion):
                self.own_promotion = word
            self._on_self(word)
            return
        if self.standing.table.is_out(peer):
            log.warning("%s is shut out: %s at version %d", peer, word.DOMAIN, word.version)
            self._transport.shut_out(peer)
        else:
            self._transport.let_in(peer)
        if not self.may_train(peer):
            self._on_lost(peer)

    def may_train(self, peer: PeerId) -> bool:
        return self.standing.may_train(peer)

    def is_shown_to_train(self, peer: PeerId, said: dict[str, Value]) -> bool:
        """Whether the peer may train, by what is known here or by the promotion it shows."""
        if not self.may_train(peer) and said.get("promotion") is not None:
            try:
                promotion = Promotion.from_value(said["promotion"])
                if promotion.peer_id == peer:
                    self.take(promotion)
            except RemoteError as error:
                log.info("the promotion of %s: %s", peer, error)
        return self.may_train(peer)

    def said_of_self(self) -> dict[str, Value]:
        """What this peer shows in the directory."""
        return {} if self.own_promotion is None else {"promotion": self.own_promotion.to_value()}

    def _listener(self, method: str) -> Handler:
        name, read = _WORDS[method]

        async def listen(sender: PeerId, request: Message) -> Message:
            self.take(read(Fields(f"{name} call", request.meta).message(name)), sender)
            return Message()

        return listen
