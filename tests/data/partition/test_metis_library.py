import sys
import types

import numpy as np
import pytest

from dglx_dist.data.partition.base import PartitionOptions
from dglx_dist.data.partition.graph_views import balance_weights, imbalance, symmetrise
from dglx_dist.data.partition.metis import MetisRequest, library_path, part_graph
from dglx_dist.errors import ConfigError
from tests.data.partition.graphs import communities


def test_pymetis_brings_the_library() -> None:
    path = library_path()
    assert path is not None
    assert "pymetis" in path


def test_tolerances_and_shares_reach_the_library() -> None:
    """METIS' own answer, before anything is repaired; 32-bit reals, or the shares would not sum to 1."""
    graph = communities()
    path = library_path()
    assert path is not None
    options = PartitionOptions(balance=("nodes", "degree"), target_weights=(3, 1))
    weights = balance_weights(graph, options, 2, None)
    parts = part_graph(path, symmetrise(graph, dtype=np.int64), weights, MetisRequest(num_parts=2, seed=0))
    assert parts.dtype == np.int32
    # METIS may end a hair above what it was allowed, which is why its answers are settled afterwards.
    assert [imbalance(loads, weights.shares) <= 1.06 for loads in weights.loads(parts)] == [True, True]
    assert np.bincount(parts)[0] == pytest.approx(1500, rel=0.05)


def test_bad_input_is_refused_by_name() -> None:
    graph = communities(num_nodes=400)
    path = library_path()
    assert path is not None
    weights = balance_weights(graph, PartitionOptions(), 2, None)
    with pytest.raises(ConfigError, match="METIS failed with bad input on 400 nodes"):
        part_graph(path, symmetrise(graph, dtype=np.int64), weights, MetisRequest(num_parts=0, seed=0))


def test_ids_of_another_width_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    other = types.SimpleNamespace(_idx_type_width=lambda: 32, __file__="x.so")
    monkeypatch.setitem(sys.modules, "pymetis._internal", other)
    with pytest.raises(ConfigError, match="32-bit ids"):
        library_path()


def test_without_pymetis_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymetis._internal", None)
    assert library_path() is None
