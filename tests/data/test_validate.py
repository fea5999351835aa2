"""Every kind of bad input is refused with the file, the column and the first offending row."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dglx_dist.data.validate import check_raw_graph
from dglx_dist.errors import DatasetError
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Array, EdgeType, NodeColumn, RawGraph, SparseRows

WHERE = "shop/graph.npz"


def array(*values: object) -> Array:
    return np.array(values)


def graph_with(**columns: NodeColumn) -> RawGraph:
    """0 -> 1 -> 2 -> 3 with three classes and, unless told otherwise, sound columns."""
    sound: dict[str, NodeColumn] = {
        "feat": np.arange(8, dtype=np.float32).reshape(4, 2),
        "label": array(0, 1, 2, -1),
        "train_mask": array(True, False, False, False),
        "val_mask": array(False, True, False, False),
        "test_mask": array(False, False, True, False),
    }
    return RawGraph(
        name="path",
        num_nodes={NODE_TYPE: 4},
        edges={EDGE_TYPE: (array(0, 1, 2), array(1, 2, 3))},
        node_data={NODE_TYPE: sound | columns},
        num_classes={NODE_TYPE: 3},
    )


def with_edges(source_ids: Array, destination_ids: Array) -> RawGraph:
    return dataclasses.replace(graph_with(), edges={EDGE_TYPE: (source_ids, destination_ids)})


def sparse(**wrong: object) -> SparseRows:
    """Row n has the one value n + 1 in column n of four."""
    sound = {
        "indptr": array(0, 1, 2, 3, 4),
        "indices": array(0, 1, 2, 3),
        "values": array(1.0, 2.0, 3.0, 4.0),
        "num_columns": 4,
    }
    return SparseRows(**(sound | wrong))  # type: ignore[arg-type]


def test_a_sound_graph_passes() -> None:
    check_raw_graph(graph_with(), WHERE)
    check_raw_graph(graph_with(feat=sparse()), WHERE)


BAD_COLUMNS = {
    "NaN feature": (
        {"feat": array([0.0, 0], [0, 0], [1, np.nan], [np.nan, 0])},
        r"column 'feat', row 2: nan at position \[1\]",
    ),
    "infinite feature": ({"feat": array(0.0, -np.inf, 0, 0)}, "column 'feat', row 1: -inf"),
    "label too large": ({"label": array(0, 1, 3, 4)}, r"column 'label', row 2: label 3 is outside 0\.\.2"),
    "label too small": ({"label": array(0, 1, 2, -2)}, "column 'label', row 3: label -2"),
    "label with a fraction": ({"label": array(0.5, 1, 2, 2)}, "column 'label' must hold whole numbers"),
    "training node without label": (
        {"label": array(-1, 1, 2, 0)},
        "column 'label', row 0: no label, but 'train_mask' selects the row",
    ),
    "overlap": (
        {"test_mask": array(False, True, True, False)},
        "'val_mask' and 'test_mask' overlap: row 1 is in both",
    ),
    "empty split": ({"val_mask": np.zeros(4, dtype=bool)}, "column 'val_mask' selects no row"),
    "mask of numbers": ({"val_mask": array(0, 1, 0, 0)}, "column 'val_mask' must hold one boolean"),
    "short column": ({"feat": np.zeros((3, 2))}, r"column 'feat' has shape \(3, 2\); it needs 4 rows"),
    "sparse column": (
        {"feat": sparse(indices=array(0, 1, 4, 3))},
        "column 'feat', row 2: value 3.0 at position 4",
    ),
    "sparse NaN": ({"feat": sparse(values=array(1.0, np.nan, 3, 4))}, "column 'feat', row 1: value nan"),
    "sparse pointers": ({"feat": sparse(indptr=array(0, 2, 1, 3, 4))}, "do not rise from 0 to 4"),
    "sparse values": ({"feat": sparse(values=array(1.0, 2.0))}, "4 column indices but 2 values"),
}


@pytest.mark.parametrize(("columns", "message"), BAD_COLUMNS.values(), ids=BAD_COLUMNS)
def test_bad_columns_are_named_with_their_first_row(columns: dict[str, NodeColumn], message: str) -> None:
    with pytest.raises(DatasetError, match=f"^{WHERE}: .*{message}"):
        check_raw_graph(graph_with(**columns), WHERE)


BAD_EDGES = {
    "too large": (array(0, 1), array(1, 4), r"column 'dst', row 1: node id 4 is outside 0\.\.3"),
    "negative": (array(0, 1, -1), array(1, 2, 3), "column 'src', row 2: node id -1"),
    "lengths": (array(0, 1), array(1, 2, 3), "2 sources but 3 destinations"),
    "fractions": (array(0.0, 1.0), array(1, 2), "column 'src' must hold one whole number a row"),
    "none": (array(), array(), "the graph has 4 nodes and 0 edges"),
}


@pytest.mark.parametrize(("source_ids", "destination_ids", "message"), BAD_EDGES.values(), ids=BAD_EDGES)
def test_bad_edges_are_named_with_their_first_row(
    source_ids: Array, destination_ids: Array, message: str
) -> None:
    with pytest.raises(DatasetError, match=f"^{WHERE}: .*{message}"):
        check_raw_graph(with_edges(source_ids, destination_ids), WHERE)


@pytest.mark.parametrize(
    ("ntype", "ids", "named"),
    [
        (NODE_TYPE, array("d", "b", "a", "b"), "column 'id', row 3: node id 'b' occurs already in row 1"),
        ("user", array(1, 2), "user ids of a node type that the graph lacks"),
    ],
)
def test_wrong_user_ids_are_named(ntype: str, ids: Array, named: str) -> None:
    with pytest.raises(DatasetError, match=named):
        check_raw_graph(dataclasses.replace(graph_with(), user_ids={ntype: ids}), WHERE)


def test_a_label_of_too_many_classes_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    graph = dataclasses.replace(graph_with(label=array(0, 1, 2, 10**12)), num_classes={NODE_TYPE: 10**12 + 1})
    check_raw_graph(graph, WHERE)
    assert "has the label 1000000000000, which takes over 16777216 classes; is it an id" in caplog.text


def test_the_edge_type_and_its_missing_node_type_are_named() -> None:
    buys: EdgeType = ("user", "buys", "item")
    graph = RawGraph(name="shop", num_nodes={"user": 2}, edges={buys: (array(0), array(0))})
    with pytest.raises(DatasetError, match="node type 'item', which the graph lacks"):
        check_raw_graph(graph, WHERE)


def test_columns_of_edges_are_checked_and_the_relation_is_named() -> None:
    graph = RawGraph(
        name="shop",
        num_nodes={"user": 2, "item": 1},
        edges={("user", "buys", "item"): (array(0, 1), array(0, 0))},
        edge_data={("user", "buys", "item"): {"weight": array(1.0, np.nan)}},
    )
    with pytest.raises(DatasetError, match="edges 'buys': column 'weight', row 1"):
        check_raw_graph(graph, WHERE)


def test_a_bad_value_beyond_the_first_piece_has_its_own_row() -> None:
    features = np.zeros((70_000, 1), dtype=np.float32)
    features[66_000] = np.inf
    graph = RawGraph(
        name="long",
        num_nodes={NODE_TYPE: 70_000},
        edges={EDGE_TYPE: (array(0), array(1))},
        node_data={NODE_TYPE: {"feat": features}},
    )
    with pytest.raises(DatasetError, match="row 66000: inf"):
        check_raw_graph(graph, WHERE)


def test_a_sparse_row_may_be_out_of_order_but_not_repeat_a_position() -> None:
    # Rows 0, 1 and 3 have one value each, row 2 has two.
    pointers = {"indptr": array(0, 1, 2, 4, 5), "values": array(1.0, 2, 3, 4, 5)}
    check_raw_graph(graph_with(feat=sparse(**pointers, indices=array(0, 1, 3, 2, 0))), WHERE)
    with pytest.raises(DatasetError, match="column 'feat', row 2: position 3 is stored twice; add"):
        check_raw_graph(graph_with(feat=sparse(**pointers, indices=array(0, 1, 3, 3, 0))), WHERE)
