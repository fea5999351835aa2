"""Which arrays travel: bytes are those of the paper's formulas."""

import math

import numpy as np
import pytest

from dglx_dist.errors import ConfigError
from dglx_dist.serverless.tasks import (
    Direction,
    Item,
    Role,
    check_payload,
    given_items,
    half_rows,
    join_halves,
    pulled_items,
    take_half,
)

from .programs import gat, gcn, sage

F, B, FB = Direction.FORWARD, Direction.BACKWARD, Direction.FUSED


def row_bytes(items: tuple[Item, ...]) -> int:
    """Bytes per node."""
    return sum(
        np.dtype(item.dtype).itemsize * max(1, item.width) for item in items if item.per.value == "node"
    )


def test_bytes_of_a_graph_convolution_are_the_papers() -> None:
    """5-4-3 columns of 8 bytes: docs/strategies/lambda.md, "Bytes", rows of the interval left out."""
    program = gcn()
    for rematerialise, twice in ((True, 1), (False, 2)):
        assert row_bytes(pulled_items(program, 1, F, rematerialise)) == 5 * 8
        assert row_bytes(given_items(program, 1, F, rematerialise)) == twice * 4 * 8
        assert row_bytes(pulled_items(program, 1, B, rematerialise)) == (5 + twice * 4) * 8
        assert given_items(program, 1, B, rematerialise) == ()
        assert row_bytes(given_items(program, 4, F, rematerialise)) == twice * 3 * 8
        assert row_bytes(pulled_items(program, 4, B, rematerialise)) == (4 + twice * 3) * 8
        assert row_bytes(given_items(program, 4, B, rematerialise)) == 4 * 8
        assert row_bytes(pulled_items(program, 4, FB, rematerialise)) == 4 * 8 + 4
        assert row_bytes(given_items(program, 4, FB, rematerialise)) == 4 * 8
    one_layer = gcn((5, 3))
    assert [item.role for item in given_items(one_layer, 1, FB, True)] == [Role.STATISTICS]


def test_own_rows_of_features_get_no_gradient() -> None:
    program = sage()
    assert [item.slot for item in pulled_items(program, 1, F, True)] == ["a1", "x"]
    assert given_items(program, 1, B, True) == ()
    assert [item.slot for item in given_items(program, 4, B, True)] == ["a2", "h1"]


def test_attention_pulls_rows_of_edges() -> None:
    forward, backward = (pulled_items(gat(), 2, direction, True) for direction in (F, B))
    assert [(item.role.value, item.slot) for item in backward] == [
        *(("sources", "el1"), ("input", "er1"), ("indptr", "")),
        *(("output", "att1"), ("gradient", "att1")),
    ]
    assert forward == backward[:3]
    assert [item.per.value for item in given_items(gat(), 2, B, True)] == ["edge"]


@pytest.mark.parametrize("rows", [0, 1, 2, 5])
def test_halves_are_cut_at_rows_and_their_edges(rows: int) -> None:
    items = pulled_items(gat(), 2, B, True)
    indptr = np.array([0, 2, 2, 5, 6, 9])[: rows + 1]
    edges = int(indptr[-1])
    arrays = [np.arange(3.0 * n).reshape(n, 3) for n in (edges, rows)]
    arrays += [indptr, *(np.arange(3.0 * edges).reshape(edges, 3) for _ in range(2))]
    halves = [take_half(items, arrays, rows, half) for half in (0, 1)]
    for half, cut in enumerate(halves):
        span = half_rows(rows, half)
        check_payload(items, cut, span.stop - span.start, "a half")
    assert [len(cut[1]) for cut in halves] == [math.ceil(rows / 2), rows // 2]
    for place in (0, 1, 3, 4):
        assert np.array_equal(np.concatenate([cut[place] for cut in halves]), arrays[place])
    assert np.array_equal(np.diff(halves[1][2]), np.diff(indptr)[math.ceil(rows / 2) :])


def test_joining_adds_statistics_and_stacks_rows() -> None:
    items = given_items(gcn(), 4, FB, True)
    parts = [[np.full((2, 4), 1.0), np.array([1.5, 1.0])], [np.full((1, 4), 2.0), np.array([2.0, 0.0])]]
    rows, statistics = join_halves(items, *parts)
    assert rows[:, 0].tolist() == [1, 1, 2]
    assert statistics.tolist() == [3.5, 1]


def test_edges_given_are_checked_against_what_was_pulled() -> None:
    items = given_items(gat(), 2, F, True)
    check_payload(items, [np.zeros((7, 3))], 2, "a gift", num_edges=7)
    with pytest.raises(ConfigError, match="a gift has output att1 of shape"):
        check_payload(items, [np.zeros((6, 3))], 2, "a gift", num_edges=7)


@pytest.mark.parametrize(
    "bounds",
    [[0, 3, 2, 2], [1, 1, 1, 2], [0, 2], [[0, 1, 1, 2]], [0, 2**63 - 1, -2, 2], [0, 1, 1, 2**62]],
    ids=["falls", "begins late", "short", "2d", "falls by more than an int64", "ends beyond the edges"],
)
def test_bounds_of_edges_are_checked(bounds: list[int]) -> None:
    items = pulled_items(gat(), 2, F, True)
    good = [np.zeros((2, 3)), np.zeros((3, 3)), np.array([0, 1, 1, 2])]
    check_payload(items, good, 3, "a half")
    with pytest.raises(ConfigError, match="a half has"):
        check_payload(items, [*good[:2], np.array(bounds)], 3, "a half")
