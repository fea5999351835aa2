"""Blocks from other ranks: encoding and copies."""

from __future__ import annotations

from typing import Any

import dgl
import numpy as np
import pytest
import torch

from dglx_dist.records import EDGE_TYPE
from dglx_dist.strategies.push_pull.loader import (
    OwnerBlock,
    _check_block,
    pack_block,
    unpack_block,
)

# 0 <- 2, 1 <- 0, 1 <- 3; listed out of order, so that edge ids are not those of the columns.
SOURCES, DESTINATIONS, NODES = [3, 2, 0], [1, 0, 1], torch.tensor([70, 10, 40, 20])


def block_of(idtype: torch.dtype) -> OwnerBlock:
    ends = torch.tensor(SOURCES, dtype=idtype), torch.tensor(DESTINATIONS, dtype=idtype)
    return OwnerBlock(block=dgl.create_block(ends, num_src_nodes=4, num_dst_nodes=2), nodes=NODES)


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("wide", [False, True])
def test_round_trip(idtype: torch.dtype, wide: bool) -> None:
    arrays = pack_block(block_of(idtype), wide=wide)
    assert [array.dtype.name for array in arrays] == ["int64" if wide else "int32", "int32", "int32"]
    # 4 [(D1 + 1) + E1 + L0] bytes
    assert sum(array.nbytes for array in arrays) == 4 * (3 + 3 + (8 if wide else 4))
    found = unpack_block(arrays, EDGE_TYPE, idtype)
    assert found.nodes.tolist() == NODES.tolist()
    assert found.nodes.dtype == torch.int64
    assert found.block.idtype == idtype
    assert (found.block.num_src_nodes(), found.block.num_dst_nodes()) == (4, 2)
    indptr, indices, edge_ids = found.block.adj_tensors("csc")
    assert indptr.tolist() == [0, 1, 3]
    assert indices.tolist()[0] == 2
    assert sorted(indices.tolist()[1:]) == [0, 3]
    assert edge_ids.tolist() == [0, 1, 2]
    assert not dict(found.block.srcdata)
    assert not dict(found.block.edata)


def test_an_unpacked_block_shares_nothing_with_what_came() -> None:
    arrays = [array.copy() for array in pack_block(block_of(torch.int32), wide=False)]
    found = unpack_block(arrays, EDGE_TYPE, torch.int32)
    arrays[2][:] = 1
    assert found.block.adj_tensors("csc")[1].tolist()[0] == 2


@pytest.mark.parametrize(
    ("nodes", "indptr", "indices"),
    [
        ([7, 8], [0, 1], [2]),
        ([7, 8], [0, 1], [-1]),
        ([7, 8], [0, 2, 1], [0]),
        ([7, 8], [-1, 1], [0]),
        ([7, 8], [0, 2], [0]),
        ([7, 8], [], []),
        ([7], [0, 0, 1], [0]),
        ([], [0, 1], [0]),
        ([7, 8], [0, 1], [0.0]),
        ([7, 8], [0, 1], [[0]]),
    ],
)
def test_arrays_that_are_no_block_are_refused(
    nodes: list[Any], indptr: list[Any], indices: list[Any]
) -> None:
    arrays = [np.array(one, None if one else np.int32) for one in (nodes, indptr, indices)]
    with pytest.raises(ValueError, match="are no block"):
        _check_block(arrays)
    _check_block(pack_block(block_of(torch.int32), wide=False))
