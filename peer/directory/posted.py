"""How a peer hears that the run key has posted it to another stage."""

import logging
from collections.abc import Callable

from swarm.core.directory.posting import Posting
from swarm.core.errors import RemoteError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId, StageIndex
from swarm.core.state.stage_chain import StageChain
from swarm.host_protocol import POST
from swarm.identity.key import verify
from swarm.network.transport import Message, Transport

log = logging.getLogger(__name__)


class Posted:
    """One peer's, for as long as it serves a stage."""

    def __init__(self, me: PeerId, chain: Callable[[], StageChain]) -> None:
        """`chain`: what is certified of the stage by now."""
        self._me = me
        self._chain = chain
        self._came_at = chain().version
        self.target: StageIndex | None = None
        """Where this peer is to go; None: it stays."""

    def serve(self, transport: Transport) -> None:
        transport.serve(POST, self._on_post, max_body_bytes=0)

    async def _on_post(self, sender: PeerId, request: Message) -> Message:
        """Whoever brings the run key's word does not matter; an old one changes nothing."""
        fields, chain = Fields("post call", request.meta), self._chain()
        posting = Posting.from_value(fields.message("posting"))
        fields.done()
        if not verify(chain.run_key, posting.signed_bytes(), posting.signature) or posting.run_id != chain.run_id:
            raise RemoteError("signature", "the posting is not signed by the run key", sender)
        is_for_here = (posting.peer_id, posting.source, posting.era) == (self._me, chain.stage, chain.era)
        if is_for_here and posting.version >= self._came_at and self.target is None:
            log.warning("this peer is posted from stage %d to stage %d", chain.stage, posting.target)
            self.target = posting.target
        return Message()
