from pathlib import Path

import numpy as np
import pytest

from dglx_dist.data.partition.graph_views import symmetrise
from dglx_dist.data.partition.kaminpar import write_parhip
from tests.data.partition.graphs import homogeneous

kaminpar = pytest.importorskip("kaminpar")


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("node_weights", [None, np.array([5, 0, 7, 1])])
def test_the_reader_sees_what_was_written(
    tmp_path: Path, dtype: type, weighted: bool, node_weights: np.ndarray | None
) -> None:
    graph = homogeneous(4, [(0, 1), (1, 0), (1, 0), (1, 2)])
    path = tmp_path / "graph.parhip"
    write_parhip(path, symmetrise(graph, dtype=dtype, weighted=weighted), node_weights)
    read = kaminpar.load_graph(str(path), kaminpar.GraphFileFormat.PARHIP)
    heavy = 3 if weighted else 1
    rows = [sorted(read.neighbors(u)) for u in range(read.n())]
    assert rows == [[(1, heavy)], [(0, heavy), (2, 1)], [(1, 1)], []]
    assert read.is_node_weighted() == (node_weights is not None)
    if node_weights is not None:
        assert [read.node_weight(u) for u in range(4)] == node_weights.tolist()
