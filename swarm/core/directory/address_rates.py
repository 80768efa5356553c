"""The rate of calls from one network address: a bucket of calls that fills up again."""

from collections import OrderedDict

from swarm.core.kept import keep_newest


class AddressRates:
    """Buckets for the addresses heard of last; an address that was forgotten begins with a full one."""

    def __init__(self, *, calls_per_s: float, burst: float, max_addresses: int = 4096) -> None:
        assert min(calls_per_s, burst, max_addresses) > 0, f"{calls_per_s} calls/s, {burst}, {max_addresses}"
        self._calls_per_s = calls_per_s
        self._burst = burst
        self._max_addresses = max_addresses
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """(calls left, at) of each address, the one heard of last at the end."""

    def take(self, address: str, *, now: float) -> float:
        """Take a call from the address' bucket: 0, or how many seconds to wait until there is one."""
        left, at = self._buckets.pop(address, (self._burst, now))
        left = min(self._burst, left + max(0.0, now - at) * self._calls_per_s)
        wait_s = 0.0 if left >= 1.0 else (1.0 - left) / self._calls_per_s
        self._buckets[address] = (left if wait_s else left - 1.0, now)
        keep_newest(self._buckets, self._max_addresses)
        return wait_s
