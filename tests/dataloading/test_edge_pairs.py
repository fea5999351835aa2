import dgl
import numpy as np
import torch

from dglx_dist.dataloading.edge_loader import build_pairs

BUYS, KNOWS = ("user", "buys", "item"), ("user", "knows", "user")
NONE = np.empty(0, np.int64)


def array(*ids: int) -> np.ndarray:
    return np.array(ids, np.int64)


def test_pairs_over_the_nodes_they_touch() -> None:
    """7 buys 4 and 2; negatives: 7 with 9; 2 knows 7: users 2, 7 and items 2, 4, 9."""
    graphs = build_pairs(
        ["item", "user"],
        {BUYS: array(11, 10), KNOWS: array(5)},
        {BUYS: (array(7, 7), array(4, 2)), KNOWS: (array(2), array(7))},
        {BUYS: (array(7), array(9)), KNOWS: (NONE, NONE)},
    )
    assert {ntype: ids.tolist() for ntype, ids in graphs.nodes.items()} == {"item": [2, 4, 9], "user": [2, 7]}
    assert [ends.tolist() for ends in graphs.positive.edges(etype="buys")] == [[1, 1], [1, 0]]
    assert graphs.positive.edges["buys"].data[dgl.EID].tolist() == [11, 10]
    assert [ends.tolist() for ends in graphs.positive.edges(etype="knows")] == [[0], [1]]
    assert graphs.negative is not None
    assert [ends.tolist() for ends in graphs.negative.edges(etype="buys")] == [[1], [2]]
    assert graphs.negative.num_edges("knows") == 0
    for graph in (graphs.positive, graphs.negative):
        assert graph.nodes["item"].data[dgl.NID].tolist() == [2, 4, 9]
        assert graph.nodes["user"].data[dgl.NID].tolist() == [2, 7]


def test_no_pairs_are_graphs_of_all_types_without_nodes() -> None:
    nothing = {BUYS: (NONE, NONE), KNOWS: (NONE, NONE)}
    graphs = build_pairs(["item", "user"], {BUYS: NONE, KNOWS: NONE}, nothing, nothing, torch.int32)
    assert set(graphs.positive.canonical_etypes) == {BUYS, KNOWS}
    assert graphs.positive.num_nodes() == graphs.positive.num_edges() == 0
    assert graphs.positive.idtype == torch.int32
    assert graphs.positive.edges["buys"].data[dgl.EID].shape == (0,)
    assert build_pairs(["item", "user"], {BUYS: NONE, KNOWS: NONE}, nothing, None).negative is None


def test_parallel_edges_stay_two() -> None:
    etype = ("_N", "_E", "_N")
    graphs = build_pairs(["_N"], {etype: array(1, 0)}, {etype: (array(5, 5), array(6, 6))}, None)
    assert graphs.positive.num_edges() == 2
    assert graphs.positive.edata[dgl.EID].tolist() == [1, 0]
