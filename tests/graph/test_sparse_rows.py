"""What an owner does with the parcels of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dglx_dist.comm.session import start_session
from dglx_dist.comm.topology import Topology
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.embedding import DistEmbedding
from dglx_dist.graph.sparse_gradient import Parcel
from dglx_dist.graph.sparse_update import OwnedRows, SgdRule
from tests.graph.small import NUM_NODES


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def parcel(ids: list[int], values: list[float], weight: float = 1.0, dtype: Any = np.float32) -> Parcel:
    """Rows of one column, kept in the opposite order."""
    rows = np.array(values[::-1], dtype=dtype)[:, None]
    return Parcel(ids=np.array(ids, np.int64), rows=rows, places=np.arange(len(ids))[::-1], weight=weight)


@pytest.fixture
def graph(small_dataset: Path) -> Any:
    with start_session(topology=Topology(0, 1, (0,))):
        yield DistGraph(small_dataset)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_several_parcels_are_summed_and_updated_once(graph: DistGraph, dtype: torch.dtype) -> None:
    embedding = DistEmbedding(NUM_NODES, 1, "e", init_func=zeros, dtype=dtype)
    table = OwnedRows(embedding, [], SgdRule(1.0))
    for _ in range(2):
        table.apply([parcel([3, 5], [1.0, 2.0], 0.5), parcel([], []), parcel([5, 7, 3], [4.0, 8.0, 16.0])])
    assert embedding.weight[[3, 5, 7, 4]].tolist() == [[-33.0], [-10.0], [-16.0], [0.0]]
    table.apply([parcel([7], [1.0], 2.0)])
    table.apply([])
    assert embedding.weight[[7]].tolist() == [[-18.0]]
    assert table.steps == 4


def test_a_parcel_that_does_not_fit_is_refused(graph: DistGraph) -> None:
    table = OwnedRows(DistEmbedding(NUM_NODES, 1, "e"), [], SgdRule(1.0))
    with pytest.raises(ConfigError, match=r"int64 ids and float32 rows, not int64, float64"):
        table.check(parcel([3], [1.0], dtype=np.float64))
    with pytest.raises(ConfigError, match=r"gradients of 2 ids cannot have shape \(1, 1\)"):
        table.check(parcel([3, 4], [1.0]))
    with pytest.raises(ConfigError, match="owns the rows 0 to 39 of 'e', not -1 to 40"):
        table.check(parcel([40, -1], [1.0, 1.0]))
    table.check(parcel([39], [1.0]))


def test_all_who_change_rows_by_what_they_were_take_turns(graph: DistGraph) -> None:
    embedding = DistEmbedding(NUM_NODES, 1, "e")
    tables = [OwnedRows(embedding, [], SgdRule(1.0)) for _ in range(2)]
    assert tables[0].lock is tables[1].lock is graph.kvstore.owner_lock(embedding.weight.kvstore_key)
