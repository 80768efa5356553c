"""What is kept: a property that is computed at its first use, and of what comes the newest."""

from collections.abc import Callable, MutableMapping
from typing import Any, Generic, Self, TypeVar, overload

T_co = TypeVar("T_co", covariant=True)


class once(Generic[T_co]):
    """As `functools.cached_property`, which in Python 3.11 holds one lock for a property of all instances while it is
    computed of one: two threads that pack records which hold others wait for each other for ever.

    Here two threads may both compute it; what comes out is equal, and the first is kept.
    """

    def __init__(self, compute: Callable[[Any], T_co]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type) -> T_co: ...

    def __get__(self, instance: object | None, owner: type) -> Self | T_co:
        if instance is None:
            return self
        kept: dict[str, T_co] = vars(instance)
        return kept.setdefault(self._name, self._compute(instance))


def keep_newest(held: MutableMapping[Any, Any], most: int) -> None:
    """What came first goes, while there are more than so many."""
    while len(held) > most:
        del held[next(iter(held))]
