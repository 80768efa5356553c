"""What is kept."""

import threading
from dataclasses import dataclass

from swarm.core.kept import keep_newest, once

LONG_S = 20.0


@dataclass(frozen=True)
class Sheet:
    """Two properties, each of which needs the other one of another sheet."""

    met: threading.Barrier
    inner: "Sheet | None" = None

    @once
    def one(self) -> int:
        """Text."""
        self.met.wait(LONG_S)
        return 1 + (self.inner.other if self.inner is not None else 0)

    @once
    def other(self) -> int:
        self.met.wait(LONG_S)
        return 1 + (self.inner.one if self.inner is not None else 0)


def test_threads_that_need_each_others_property_of_other_objects_do_not_wait_for_one_another() -> None:
    met = threading.Barrier(2)
    first, second = Sheet(met, Sheet(met)), Sheet(met, Sheet(met))
    found: dict[str, int] = {}
    threads = [
        threading.Thread(target=lambda: found.update(one=first.one), daemon=True),
        threading.Thread(target=lambda: found.update(other=second.other), daemon=True),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert found == {"one": 2, "other": 2}


def test_it_is_computed_once_and_kept() -> None:
    met = threading.Barrier(1)
    sheet = Sheet(met)
    assert sheet.one == sheet.one == 1
    assert vars(sheet)["one"] == 1
    assert Sheet.one.__doc__ == "Text."
    assert sheet == Sheet(met), "what is kept is no field"


def test_the_newest_are_kept() -> None:
    held = dict.fromkeys("abcd", 1)
    held["a"] = 2  # it came first all the same
    keep_newest(held, 3)
    assert held == {"b": 1, "c": 1, "d": 1}
    keep_newest(held, 3)
    assert len(held) == 3
    keep_newest(held, 0)
    assert not held
