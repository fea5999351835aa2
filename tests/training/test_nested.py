from __future__ import annotations

import pytest

from dglx_dist.errors import ConfigError
from dglx_dist.training.inference import flatten, nest


@pytest.mark.parametrize(
    ("value", "paths"),
    [
        (1, [()]),
        ({"a": 1, "b": 2}, [("a",), ("b",)]),
        ((1, {"a": 2}), [(0,), (1, "a")]),
        ({"a": (1, 2), "b": {"c": 3}}, [("a", 0), ("a", 1), ("b", "c")]),
    ],
)
def test_what_is_nested_comes_back(value: object, paths: list[object]) -> None:
    flat = flatten(value)
    assert list(flat) == paths
    assert nest(flat) == value


def test_lists_come_back_as_tuples() -> None:
    assert nest(flatten([1, [2]])) == (1, (2,))


def test_places_are_counted_in_their_order() -> None:
    assert nest({(1, "a"): "second", (0, "a"): "first"}) == ({"a": "first"}, {"a": "second"})


def test_keys_are_text() -> None:
    with pytest.raises(ConfigError, match="the key 3"):
        flatten({3: 1})


def test_a_tuple_that_lacks_a_place_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"only the positions \[1\] belong"):
        nest({(1, "author"): 1})
