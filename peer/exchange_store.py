"""This is where a peer keeps its calls with the stages beside it, until nobody can draw them any more.

It keeps each from the moment that somebody may hold a header over it: what counted, what came late, what was sent
twice. So an honest peer can always show what it signed for, and a neighbour what a liar sent it.
"""

from swarm.core.ids import MicrobatchId, PeerId, Step
from swarm.core.settings import RunSettings
from verification.exchanges import MAX_EXCHANGES, Exchange


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

    @property
    def is_full(self) -> bool:
        """Whether no microbatch more can be taken on whose papers are to be shown."""
        return 0 < self._max_microbatches <= sum(map(len, self._held.values()))

    def keep(self, exchange: Exchange) -> None:
        """A call that was made or came, or its answer. Of a microbatch that is sent on and on the first ones stay."""
        birth = exchange.birth
        held = self._held.setdefault(birth.step, {})
        if birth.microbatch_id not in held and (not self._max_microbatches or self.is_full):
            return
        calls, key = held.setdefault(birth.microbatch_id, {}), exchange.forward.digest()
        if key in calls or len(calls) < 2 * MAX_EXCHANGES:
            calls[key] = exchange

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

    def own(self, microbatch_id: MicrobatchId) -> list[Exchange]:
        """All of a microbatch, whatever the step it was born for; the first ones that came and that went."""
        found = [exchange for held in self._held.values() for exchange in held.get(microbatch_id, {}).values()]
        came = [exchange for exchange in found if self._has_come(exchange)]
        went = [exchange for exchange in found if not self._has_come(exchange)]
        return [*came[: MAX_EXCHANGES // 2], *went[: MAX_EXCHANGES // 2]]

    def forget(self, version: int) -> None:
        """The stage is at `version`: what is too old to be asked for goes."""
        for step in [step for step in self._held if int(step) < version - 1 - self._retained]:
            del self._held[step]

    def _has_come(self, exchange: Exchange) -> bool:
        return exchange.forward.consumer == self._me

    def _partner(self, exchange: Exchange) -> PeerId:
        return exchange.forward.producer if self._has_come(exchange) else exchange.forward.consumer
