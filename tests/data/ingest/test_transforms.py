"""What becomes of a column; whole tables are in test_build.py."""

from typing import Any

import pyarrow as pa
import pytest

from dglx_dist.data.ingest.config import FeatureSpec
from dglx_dist.data.ingest.features import join_settings, make_transforms
from dglx_dist.data.tables import Column
from dglx_dist.errors import ConfigError, DatasetError


def transformed(values: list[Any], name: str, **settings: Any) -> list[Any]:
    """What one column becomes after a transform has seen it in two pieces."""
    (one,) = make_transforms(FeatureSpec(columns=("x",), name="f", transform=name, settings=settings))
    array = pa.array(values)
    for first in (0, 2):
        one.scan(Column(array.slice(first, 2), "x", "t.csv", first))
    one.finalize("t.csv")
    return [list(row) for row in one.apply(Column(array, "x", "t.csv")).tolist()]


@pytest.mark.parametrize(
    ("values", "name", "settings", "expected"),
    [
        ([1, 3, 5, 2], "max_min_norm", {}, [[0.0], [0.5], [1.0], [0.25]]),
        ([1, 3, 9, 2], "max_min_norm", {"max_bound": 5, "min_bound": -7}, [[0.0], [0.5], [1.0], [0.25]]),
        ([0, 3, 9, 2], "max_min_norm", {"max_val": [5], "min_val": 1}, [[0.0], [0.5], [1.0], [0.25]]),
        ([[0, 1], [1, 5], [2, 3], [4, 1]], "max_min_norm", {}, [[0, 0], [0.25, 1], [0.5, 0.5], [1, 0]]),
        ([1.0, 2.0, 4.0, 1.0], "standard", {}, [[0.125], [0.25], [0.5], [0.125]]),
        ([1.0, 2.0, 4.0, 1.0], "standard", {"sum": 2}, [[0.5], [1.0], [2.0], [0.5]]),
        (["b", None, "a", ""], "to_categorical", {}, [[0, 1], [0, 0], [1, 0], [0, 0]]),
        (["b,a", "c", "a", None], "to_categorical", {"separator": ","},
         [[1, 1, 0], [0, 0, 1], [1, 0, 0], [0, 0, 0]]),
        (["b", "x", "a", "b"], "to_categorical", {"mapping": {"b": 0, "a": 1}},
         [[1, 0], [0, 0], [0, 1], [1, 0]]),
        ([7, 8, 9, 7], "to_categorical", {}, [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0]]),
        (["1;2;3", "4;5;6", "7;8;9", "0;0;0"], "no-op", {"separator": ";", "truncate_dim": 2},
         [[1, 2], [4, 5], [7, 8], [0, 0]]),
    ],
)  # fmt: skip
def test_a_column_becomes(
    values: list[Any], name: str, settings: dict[str, Any], expected: list[Any]
) -> None:
    assert transformed(values, name, **settings) == expected


@pytest.mark.parametrize(
    ("values", "name", "settings", "message"),
    [
        ([2, 2, 2, 2], "max_min_norm", {}, "t.csv: column 'x': its maximum 2.0 is not above its minimum 2.0"),
        (
            [[1, 2], [3, 4], [1], [2]],
            "max_min_norm",
            {},
            "t.csv: column 'x', row 2: 1 numbers, but there were 2",
        ),
        ([["a"], ["b"], [], []], "to_categorical", {}, "one value a row, or texts with a separator"),
        (["", None, "", None], "to_categorical", {}, "has no value to make a category of"),
        ([b"a", b"\xff", b"a", b"a"], "to_categorical", {}, "holds binary that is not text"),
        ([[1], [2], [3], [4]], "no-op", {"truncate_dim": 2}, "1 numbers, but truncate_dim asks for 2"),
        ([1, 2, None, 3], "standard", {}, "t.csv: column 'x', row 2: is empty"),
    ],
)
def test_what_cannot_be_transformed_is_named(
    values: list[Any], name: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(DatasetError, match=message):
        transformed(values, name, **settings)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("max_min_norm", {"max_bound": "5"}),
        ("max_min_norm", {"min_val": []}),
        ("to_categorical", {"mapping": {"a": 1}}),
        ("to_categorical", {"mapping": {"a": 0, "b": "1"}}),
        ("to_categorical", {"mapping": {"a": 0, "b": None}}),
        ("to_categorical", {"separator": ""}),
        ("no-op", {"truncate_dim": 0}),
        ("no-op", {"truncate_dim": True}),
    ],
)
def test_a_wrong_setting_is_refused(name: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        make_transforms(FeatureSpec(columns=("x",), name="f", transform=name, settings=settings))


def test_what_was_found_for_each_column_is_read_again() -> None:
    spec = FeatureSpec(columns=("x", "y"), name="f", transform="standard", settings={})
    made = make_transforms(spec)
    for one, values in zip(made, ([1.0, 3.0], [2.0, 6.0]), strict=True):
        one.scan(Column(pa.array(values), "x", "t.csv"))
    settled = join_settings([one.finalize("t.csv") for one in made])
    assert settled == {"sum": [[4.0], [8.0]]}
    again = make_transforms(FeatureSpec(columns=("x", "y"), name="f", transform="standard", settings=settled))
    assert [one.apply(Column(pa.array([2.0]), "x", "t.csv")).tolist() for one in again] == [[[0.5]], [[0.25]]]
