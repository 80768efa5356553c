"""Tables: what fits its declaration is read as it is meant, and everything else is named with its remedy."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.core.errors import SettingsError
from swarm.core.tables import MAX_PROBLEMS, Bounds, Matching, Table, read_table

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
    max_leaves=6,
)


@dataclass(frozen=True, kw_only=True)
class Wheel(Table):
    spokes: Annotated[int, Bounds(least=3, most=36)]
    tyre: Annotated[str, Matching(r"[a-z]+"), "What it rolls on."] = "rubber"


@dataclass(frozen=True, kw_only=True)
class Cart(Table):
    wheels: tuple[Wheel, ...] = ()
    axle: Wheel = field(default_factory=lambda: Wheel(spokes=3))
    load: Annotated[float, Bounds(above=0, below=0.5)] = 0.1
    kind: Literal["hand", "ox"] = "hand"
    size: tuple[int, int] = (1, 2)
    mark: Annotated[bytes, Bounds(least=2, most=2)] = b"ab"
    pulled_by: str | dict[str, Any] | None = None

    def disagreement(self, given: Collection[str]) -> str | None:
        if self.kind == "ox" and not self.wheels:
            return f'kind = "ox" needs wheels; {"give more than none" if "wheels" in given else "give some"}'
        return None


def _refusal(value: object) -> str:
    with pytest.raises(SettingsError) as caught:
        read_table(Cart, value)
    return str(caught.value)


def test_plain_values_become_the_declared_ones() -> None:
    value = {
        "wheels": [{"spokes": 4}],
        "load": 0.25,
        "size": [3, 4],
        "pulled_by": {"name": "Bo"},
        "axle": {"spokes": 9},
    }
    assert read_table(Cart, value) == Cart(
        wheels=(Wheel(spokes=4),), load=0.25, size=(3, 4), pulled_by={"name": "Bo"}, axle=Wheel(spokes=9)
    )
    assert read_table(Cart, {}) == Cart()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([], "= [] is a list; give a table"),
        ({"wheels": [{"spokes": 4}, {}]}, "wheels[1].spokes is missing; give it"),
        ({"wheels": [{"spokes": True}]}, "wheels[0].spokes = true is a truth value; give a whole number"),
        ({"axle": {"spokes": 37}}, "axle.spokes = 37 cannot be used; give a number less than or equal to 36"),
        ({"axle": {"spokes": 3, "tire": "a"}}, 'axle.tire = "a" is unknown; did you mean "tyre"?'),
        ({"axle": {"spokes": 3, "tyre": "a\n"}}, "give text that matches [a-z]+"),
        ({7: 1}, "7 = 1 is unknown; remove it, or use one of wheels, axle"),
        ({"load": 0}, "load = 0 cannot be used; give a number greater than 0 (the default is 0.1)"),
        ({"load": 0.5}, "give a number less than 0.5"),
        ({"load": 10**400}, "give a finite number"),
        ({"kind": 3}, "kind = 3 cannot be used; give 'hand' or 'ox' (the default is \"hand\")"),
        ({"size": [1, 2, 3]}, "size = [1, 2, 3] cannot be used; give a list of 2"),
        ({"size": [1, "2"]}, 'size[1] = "2" is text; give a whole number'),
        ({"mark": b"abc"}, "give bytes of a length less than or equal to 2"),
        ({"pulled_by": 3}, "pulled_by = 3 is an integer; give text or a table"),
        ({"kind": "ox"}, 'kind = "ox" needs wheels; give some'),
        ({"kind": "ox", "wheels": []}, 'kind = "ox" needs wheels; give more than none'),
    ],
)
def test_what_does_not_fit_is_named_with_its_remedy(value: object, said: str) -> None:
    message = _refusal(value)
    assert said in message
    assert len(message.splitlines()) == 1


def test_problems_are_named_at_once_up_to_a_number() -> None:
    lines = _refusal({f"a{number}": 1 for number in range(MAX_PROBLEMS + 3)}).splitlines()
    assert len(lines) == MAX_PROBLEMS + 1
    assert lines[-1] == "and 3 more"


@given(
    values | st.dictionaries(st.sampled_from(["wheels", "axle", "load", "kind", "size", "mark", "pulled_by"]), values)
)
def test_any_value_is_read_or_refused(value: object) -> None:
    try:
        made = read_table(Cart, value)
    except SettingsError:
        return
    assert isinstance(value, dict)
    assert made == Cart(**vars(made))
