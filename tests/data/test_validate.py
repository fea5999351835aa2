"""Every kind of bad input is refused with the file, the column and the first offending row."""

from dataclasses import replace

import numpy as np
import pytest

from dglx_dist.data.validate import check_raw_graph
from dglx_dist.errors import DatasetError
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Array, NodeColumn, RawGraph, SparseRows

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
    return replace(graph_with(), edges={EDGE_TYPE: (source_ids, destination_ids)})


def with_user_ids(ntype: str, *ids: object) -> RawGraph:
    return replace(graph_with(), user_ids={ntype: array(*ids)})


def shop(**num_nodes: int) -> RawGraph:
    buys = ("user", "buys", "item")
    return RawGraph(
        name="shop",
        num_nodes=num_nodes,
        edges={buys: (array(0, 1), array(0, 0))},
        edge_data={buys: {"weight": array(1.0, np.nan)}},
    )


def sparse(**wrong: object) -> SparseRows:
    """Row n has the one value n + 1 in column n of four."""
    sound = {
        "indptr": array(0, 1, 2, 3, 4),
        "indices": array(0, 1, 2, 3),
        "values": array(1.0, 2.0, 3.0, 4.0),
        "num_columns": 4,
    }
    return SparseRows(**(sound | wrong))  # type: ignore[arg-type]


def row_of_two(*columns: int) -> SparseRows:
    """Rows 0, 1 and 3 have one value each, row 2 has two."""
    return sparse(
        indptr=array(0, 1, 2, 4, 5), values=array(1.0, 2, 3, 4, 5), indices=array(0, 1, *columns, 0)
    )


def test_a_sound_graph_passes() -> None:
    check_raw_graph(graph_with(), WHERE)
    check_raw_graph(graph_with(feat=sparse()), WHERE)
    check_raw_graph(with_edges(np.empty(0, np.int64), np.empty(0, np.int64)), WHERE)
    check_raw_graph(graph_with(feat=row_of_two(3, 2)), WHERE)  # a row may be out of order


LATE = np.zeros((70_000, 1), np.float32)
LATE[66_000] = np.inf  # beyond the first piece that is looked at


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (graph_with(feat=array([0.0, 0], [0, 0], [1, np.nan], [np.nan, 0])),
         r"column 'feat', row 2: nan at position \[1\]"),
        (graph_with(feat=array(0.0, -np.inf, 0, 0)), "column 'feat', row 1: -inf"),
        (replace(graph_with(), num_nodes={NODE_TYPE: 70_000}, node_data={NODE_TYPE: {"feat": LATE}}),
         "row 66000: inf"),
        (graph_with(feat=np.zeros((3, 2))), r"column 'feat' has shape \(3, 2\); it needs 4 rows"),
        (graph_with(label=array(0, 1, 3, 4)), r"column 'label', row 2: label 3 is outside 0\.\.2"),
        (graph_with(label=array(0, 1, 2, -2)), "column 'label', row 3: label -2"),
        (graph_with(label=array(0.5, 1, 2, 2)), "column 'label' must hold whole numbers"),
        (graph_with(label=array(-1, 1, 2, 0)), "'label', row 0: no label .*its split is train"),
        (graph_with(test_mask=array(False, True, True, False)),
         "'val_mask' and 'test_mask' overlap: row 1 is in both"),
        (graph_with(val_mask=np.zeros(4, dtype=bool)), "column 'val_mask' selects no row"),
        (graph_with(val_mask=array(0, 1, 0, 0)), "column 'val_mask' must hold one boolean"),
        (graph_with(feat=sparse(indices=array(0, 1, 4, 3))), "column 'feat', row 2: value 3.0 at position 4"),
        (graph_with(feat=sparse(values=array(1.0, np.nan, 3, 4))), "column 'feat', row 1: value nan"),
        (graph_with(feat=sparse(indptr=array(0, 2, 1, 3, 4))), "do not rise from 0 to 4"),
        (graph_with(feat=sparse(values=array(1.0, 2.0))), "4 column indices but 2 values"),
        (graph_with(feat=row_of_two(3, 3)), "column 'feat', row 2: position 3 is stored twice; add"),
        (with_edges(array(0, 1), array(1, 4)), r"column 'dst', row 1: node id 4 is outside 0\.\.3"),
        (with_edges(array(0, 1, -1), array(1, 2, 3)), "column 'src', row 2: node id -1"),
        (with_edges(array(0, 1), array(1, 2, 3)), "2 sources but 3 destinations"),
        (with_edges(array(0.0, 1.0), array(1, 2)), "column 'src' must hold one whole number a row"),
        (RawGraph(name="a", num_nodes={NODE_TYPE: 0}, edges={}), "the graph has no nodes; there must be"),
        (with_user_ids(NODE_TYPE, "d", "b", "a", "b"), "'id', row 3: node id 'b' already occurs in row 1"),
        (with_user_ids(NODE_TYPE, 1, 2), r"column 'id' has shape \(2,\); it needs 4 rows"),
        (with_user_ids("user", 1, 2), "user ids of a node type that the graph lacks"),
        (replace(graph_with(), node_data={"user": {}}), "columns or user ids of a node type that the"),
        (shop(user=2), "node type 'item', which the graph lacks"),
        (shop(user=2, item=1), "edges 'buys': column 'weight', row 1"),
    ],
)  # fmt: skip
def test_bad_graphs_are_named_with_column_and_first_row(graph: RawGraph, message: str) -> None:
    with pytest.raises(DatasetError, match=f"^{WHERE}[:,] .*{message}"):
        check_raw_graph(graph, WHERE)


def test_a_mask_may_select_no_edge_of_one_type_but_not_of_all() -> None:
    etypes = [("_N", name, "_N") for name in ("often", "rare")]
    ends, masks = array(0, 1), [np.array([True, False]), np.zeros(2, bool)]
    graph = RawGraph(
        name="kg",
        num_nodes={NODE_TYPE: 2},
        edges=dict.fromkeys(etypes, (ends, ends)),
        edge_data={etype: {"val_mask": mask} for etype, mask in zip(etypes, masks, strict=True)},
    )
    check_raw_graph(graph, WHERE)
    with pytest.raises(DatasetError, match="edges 'often': column 'val_mask' selects no row"):
        check_raw_graph(replace(graph, edge_data={etypes[0]: {"val_mask": masks[1]}}), WHERE)
