"""This is where a peer keeps its calls with the stages beside it, until nobody can draw them any more.

It keeps each from the moment that somebody may hold a header over it: what counted, what came late, what was sent
twice. So an honest peer can always show what it signed for, and a neighbour what a liar sent it.
"""

from swarm.core.ids import MicrobatchId, PeerId, Step
from swarm.core.settings import RunSettings
from verification.exchanges import MAX_EXCHANGES, Exchange
from verification.headers import HopHeader

MAX_CALLS = 2 * MAX_EXCHANGES
"""Of one microbatch, that came and that went."""


class ExchangeStore:
    """The exchanges of the last steps."""

    def __init__(self, me: PeerId, *, retained_versions: int, max_microbatches: int) -> None:
        self._me = me
        self._retained = retained_versions
        self._max_microbatches = max_microbatches
        self._held: dict[Step, dict[MicrobatchId, dict[bytes, Exchange]]] = {}
        """Of a microbatch, by the digest of the header that went."""

    @classmethod
    def of_run(cls, settings: RunSettings, me: PeerId) -> "ExchangeStore":
        """Large enough for a peer that does all of its stage's work, twice; for nothing where nothing is replayed."""
        kept = settings.audits.retained_versions
        most = 2 * settings.microbatches_per_step * (kept + 2) if settings.replays else 0
        return cls(me, retained_versions=kept, max_microbatches=most)

    def has_room(self, step: Step, microbatch_id: MicrobatchId, *, coming: int = 0, calls: int = 0) -> bool:
        """Whether a call of the microbatch, which may be sent on and on, could be shown when others are kept that are
        under way: of so many microbatches, and so many of this one."""
        if not self._max_microbatches:
            return True  # nobody asks
        held = self._held.get(step, {}).get(microbatch_id)
        if held is not None:
            return len(held) + calls < MAX_CALLS
        return sum(map(len, self._held.values())) + coming < self._max_microbatches and calls < MAX_CALLS

    def keep(self, exchange: Exchange) -> bool:
        """A call that was made or came, or its answer. False if it cannot be shown: then nobody may get a header."""
        birth = exchange.birth
        held, key = self._held.get(birth.step, {}).get(birth.microbatch_id, {}), exchange.forward.digest()
        if key not in held and not self.has_room(birth.step, birth.microbatch_id):
            return False
        if self._max_microbatches:
            self._held.setdefault(birth.step, {}).setdefault(birth.microbatch_id, {})[key] = exchange
        return True

    def partners(self, step: Step, *, came: bool) -> list[tuple[PeerId, MicrobatchId]]:
        """Whose microbatches of a step came here, or (`came` False) to whom they went: sorted, each once."""
        return sorted(
            {
                (self._partner(exchange), number)
                for number, calls in self._held.get(step, {}).items()
                for exchange in calls.values()
                if self._has_come(exchange) == came
            }
        )

    def with_partner(self, step: Step, microbatch_id: MicrobatchId, partner: PeerId) -> list[Exchange]:
        """Of a microbatch, with a peer of another stage; the first ones."""
        calls = self._held.get(step, {}).get(microbatch_id, {}).values()
        return [exchange for exchange in calls if self._partner(exchange) == partner][:MAX_EXCHANGES]

    def own(self, microbatch_id: MicrobatchId, header: bytes) -> list[Exchange]:
        """What a header of this peer's is over, and what that was made from; whatever the step it was born for."""
        found = [exchange for held in self._held.values() for exchange in held.get(microbatch_id, {}).values()]
        signed = {one.digest(): one for exchange in found for one in _headers(exchange)}
        wanted = {header, *signed[header].parents} if header in signed else set()
        return [one for one in found if wanted & {header.digest() for header in _headers(one)}][:MAX_EXCHANGES]

    def forget(self, version: int) -> None:
        """The stage is at `version`: what is too old to be asked for goes."""
        for step in [step for step in self._held if int(step) < version - 1 - self._retained]:
            del self._held[step]

    def _has_come(self, exchange: Exchange) -> bool:
        return exchange.forward.consumer == self._me

    def _partner(self, exchange: Exchange) -> PeerId:
        return exchange.forward.producer if self._has_come(exchange) else exchange.forward.consumer


def _headers(exchange: Exchange) -> tuple[HopHeader, ...]:
    return (exchange.forward,) if exchange.gradient is None else (exchange.forward, exchange.gradient)
