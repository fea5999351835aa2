"""Sparse features of real graphs are stored, and come back, as their dense rows."""

from pathlib import Path

import numpy as np
import pytest

from dglx_dist.data.sources import load_dataset
from dglx_dist.records import EDGE_TYPE, FEATURE, NODE_TYPE, SparseRows
from tests.data.storage.graphs import random_owners, store

CORA = Path(__file__).parents[3].parent / "shared" / "data" / "cora.npz"


@pytest.mark.real_data
@pytest.mark.skipif(not CORA.exists(), reason="the real graphs are not on this machine")
def test_cora_comes_back(tmp_path: Path) -> None:
    graph = load_dataset(CORA)
    dataset = store(graph, random_owners(graph, 3, 0), tmp_path / "cora")
    features = graph.node_data[NODE_TYPE][FEATURE]
    assert isinstance(features, SparseRows)
    num_edges = 0
    for number in range(3):
        part = dataset.part(number)
        rows = part.original_node_ids(NODE_TYPE)
        np.testing.assert_array_equal(part.node_data(NODE_TYPE, FEATURE), features.dense(rows))
        num_edges += len(part.indices(EDGE_TYPE))
    assert num_edges == graph.total_edges
