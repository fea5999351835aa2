"""What edges weigh, against the adjacency matrix of a drawn graph."""

from pathlib import Path

import numpy as np
import pytest

import dglx_dist as dx
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.errors import ConfigError
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Assignment, RawGraph
from dglx_dist.strategies.serverless.layer_kinds import FACTOR_OF_NORM, EdgeFactor, edge_values

# 0 -> 1, 0 -> 2, 1 -> 2, 2 -> 2: in-degrees 0, 1, 3; out-degrees 2, 1, 1.
SOURCES, TARGETS = np.array([0, 0, 1, 2]), np.array([1, 2, 2, 2])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    raw = RawGraph(
        name="small",
        num_nodes={NODE_TYPE: 3},
        edges={EDGE_TYPE: (SOURCES, TARGETS)},
        edge_data={EDGE_TYPE: {"w": np.array([1.0, 2.0, 3.0, 4.0]), "two": np.ones((4, 2))}},
    )
    whole = Assignment(num_parts=1, part_of={NODE_TYPE: np.zeros(3, np.int32)}, method="test", seed=0)
    write_dataset(raw, whole, tmp_path / "data")
    return tmp_path / "data"


def test_values(folder: Path) -> None:
    root = np.sqrt
    expected = {
        "sum": [1, 1, 1, 1],
        "mean": [1, 1 / 3, 1 / 3, 1 / 3],
        "left": [1 / 2, 1 / 2, 1, 1],
        "both": [1 / root(2), 1 / root(6), 1 / root(3), 1 / root(3)],
    }
    with dx.init():
        g = dx.DistGraph(folder)
        everyone, float64 = np.arange(3), np.dtype(np.float64)
        for name, values in expected.items():
            np.testing.assert_allclose(edge_values(FACTOR_OF_NORM[name], g, everyone, float64), values)
        weighed = edge_values(EdgeFactor(target="whole", column="w"), g, np.array([2]), np.dtype(np.float32))
        assert weighed.dtype == np.float32
        np.testing.assert_allclose(weighed, [2 / 3, 1, 4 / 3], rtol=1e-6)
        with pytest.raises(ConfigError, match=r"'two' has \(2,\) numbers per edge"):
            edge_values(EdgeFactor(column="two"), g, everyone, float64)


def test_sums_need_no_values() -> None:
    assert FACTOR_OF_NORM["none"].is_one
    assert not FACTOR_OF_NORM["right"].is_one
