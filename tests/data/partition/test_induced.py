import numpy as np

from dglx_dist.data.partition.graph_views import induced_graph
from dglx_dist.records import RawGraph, SparseRows
from tests.data.partition.graphs import AUTHORS_AND_PAPERS, homogeneous


def test_edges_among_the_chosen_nodes_remain() -> None:
    # Keep author 0, papers 0 and 2: writes 0 -> 0, cites 2 -> 0 (now 1 -> 0).
    piece = induced_graph(AUTHORS_AND_PAPERS, np.array([0, 2, 4]), ("nodes",))
    assert piece.num_nodes == {"author": 1, "paper": 2, "venue": 0}
    ends = {t[1]: (src.tolist(), dst.tolist()) for t, (src, dst) in piece.edges.items()}
    assert ends == {"writes": ([0], [0]), "cites": ([1], [0])}


def test_only_the_columns_that_are_weighed_are_copied() -> None:
    features = SparseRows(
        indptr=np.zeros(4, int), indices=np.zeros(0, int), values=np.zeros(0), num_columns=2
    )
    graph = homogeneous(3, [], train_mask=np.array([True, False, True]), feat=features, cost=np.arange(3))
    piece = induced_graph(graph, np.array([1, 2]), ("train",))
    assert list(piece.node_data["_N"]) == ["train_mask"]
    assert piece.node_data["_N"]["train_mask"].tolist() == [False, True]


def test_ids_narrower_than_the_row_of_all_types_do_not_overflow() -> None:
    # 200 + 3 does not fit into int8, as 2**31 + 3 does not fit into int32.
    ends = np.array([0, 3], dtype=np.int8), np.array([1, 2], dtype=np.int8)
    graph = RawGraph(name="g", num_nodes={"a": 200, "b": 4}, edges={("b", "r", "b"): ends})
    piece = induced_graph(graph, np.array([202, 203]), ())
    assert [ids.tolist() for ids in piece.edges[("b", "r", "b")]] == [[1], [0]]
