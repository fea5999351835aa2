import numpy as np

from dglx_dist.strategies.full_graph.halo_plan import HaloLayer
from dglx_dist.strategies.full_graph.plan_builder import (
    RankRows,
    decode_requested_rows,
    encode_requested_rows,
)


def reading(halo: list[int], receive: tuple[tuple[int, int], ...]) -> HaloLayer:
    nothing = np.empty(0, np.int64)
    return HaloLayer(
        own_rows=0,
        targets=0,
        indptr=np.zeros(1, np.int64),
        indices=nothing,
        edge_ids=nothing,
        halo_nodes=np.array(halo, dtype=np.int64),
        receive=receive,
        send=(),
    )


def test_a_layer_like_the_one_before_costs_one_number() -> None:
    first, last = reading([4, 9, 2], ((1, 2), (3, 1))), reading([4], ((1, 1),))
    layers = [first, first, last]
    counts, ids = encode_requested_rows(layers, 1)
    assert (counts.tolist(), ids.tolist()) == ([2, -1, 1], [4, 9, 4])
    counts, ids = encode_requested_rows(layers, 3)
    assert (counts.tolist(), ids.tolist()) == ([1, -1, 0], [2])
    assert encode_requested_rows(layers, 2)[1].tolist() == []


def test_wanted_rows_are_places_among_the_own_ones() -> None:
    nothing = np.empty(0, np.int64)
    own = RankRows(
        nodes=np.array([9, 4, 2]),
        counts=np.array([3, 3, 2, 0]),
        indptr=np.zeros(4, np.int64),
        edge_ids=nothing,
        sources=nothing,
        source_of=nothing,
    )
    first, second, third = decode_requested_rows(own, [np.array([2, -1, 1]), np.array([4, 9, 4])])
    assert (first.tolist(), third.tolist()) == ([1, 0], [1])
    assert second is first
    assert [rows.tolist() for rows in decode_requested_rows(own, [np.array([0, -1, 0]), nothing])] == [
        [],
        [],
        [],
    ]
