"""How the host has the swarm measure itself: held-out loss at a version, computed by the peers."""

import asyncio
import logging
from collections.abc import Callable

from bootstrap.owner.progress import RunProgress, VersionGone
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId
from swarm.core.plan import hop_bytes_per_token
from swarm.core.settings import RunSettings
from swarm.core.transfers import longest_way_s
from swarm.host_protocol import MOST_NATS
from swarm.manifest.model import hidden_size
from swarm.network.transport import Message, Transport

log = logging.getLogger(__name__)

AT_ONCE = 4
PAUSE_S = 0.2


class Evaluation:
    """Asks the sources for the loss of held-out microbatches, one after another, until each is answered."""

    def __init__(
        self,
        settings: RunSettings,
        transport: Transport,
        progress: RunProgress,
        num_tokens: int,
        may_train: Callable[[PeerId], bool],
    ) -> None:
        """`may_train`: whether anything is taken from a peer; the others are not asked."""
        self._may_train = may_train
        self._settings = settings
        self._transport = transport
        self._progress = progress
        per_batch = settings.microbatch_tokens
        self._answer_s = 2 * longest_way_s(
            per_batch * hop_bytes_per_token(settings, hidden_size(settings.model))[0],
            settings.model.num_stages - 1,
            floor_s=settings.deadlines.hop_s,
            least_mbit=settings.deadlines.least_mbit,
        )
        available = max(1, settings.data.num_held_out_samples // settings.batch.microbatch_size)
        self._num_batches = max(1, min(available, num_tokens // per_batch))
        self.asked_for: asyncio.Queue[int] = asyncio.Queue()
        """The version to evaluate next."""

    def ask_for(self, version: int) -> None:
        """Have this version evaluated, and not one that still waits: the newer says more."""
        while not self.asked_for.empty():
            self.asked_for.get_nowait()
            self.asked_for.task_done()
        self.asked_for.put_nowait(version)

    async def loss(self, version: int) -> float:
        """In nats a token. Raises VersionGone when nobody holds the version any more."""
        places = asyncio.Semaphore(AT_ONCE)

        async def one(index: int) -> tuple[float, int]:
            async with places:
                return await self._of_batch(version, index)

        answers = await asyncio.gather(*(one(index) for index in range(self._num_batches)))
        return sum(loss for loss, _ in answers) / sum(targets for _, targets in answers)

    async def _of_batch(self, version: int, index: int) -> tuple[float, int]:
        """Loss sum and number of targets."""
        turn = index
        while True:
            sources = [peer for peer in self._progress.present(stage=0) if self._may_train(peer)]
            if sources:
                source = sources[turn % len(sources)]
                try:
                    reply = await self._transport.call(
                        source,
                        "evaluate",
                        Message({"version": version, "index": index}),
                        timeout_s=self._answer_s,
                        max_body_bytes=0,
                    )
                    return _read(Fields("evaluation", reply.meta), self._settings.microbatch_tokens)
                except (TransientError, RemoteError) as error:
                    log.info("evaluation of %d by %s: %s", version, source[-6:], error)
            if self._progress.is_gone(0, version, self._settings):
                raise VersionGone(f"no peer of stage 0 holds version {version} any more")
            turn += 1
            await asyncio.sleep(PAUSE_S)


def _read(fields: Fields, most_targets: int) -> tuple[float, int]:
    """Loss sum and number of targets. Raises RemoteError for what no microbatch's can be."""
    loss_sum, num_targets = fields.number("loss_sum"), fields.integer("num_targets", low=1, high=most_targets)
    if not 0 <= loss_sum <= MOST_NATS * num_targets:
        raise RemoteError("malformed", f"a loss of {loss_sum} over {num_targets} targets")
    return loss_sum, num_targets
