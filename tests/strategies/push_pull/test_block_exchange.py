"""Blocks from other ranks: encoding, arrival, cancellation, or an error that names the silent ranks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dgl
import numpy as np
import pytest
import torch

from dglx_dist.comm.session import start_session
from dglx_dist.dataloading.minibatch import BlockBuilder
from dglx_dist.errors import PeerError
from dglx_dist.strategies.push_pull.block_exchange import (
    BatchPosition,
    IterationLeft,
    OwnerBlock,
    StructureInbox,
    pack_block,
    unpack_block,
)
from dglx_dist.strategies.push_pull.options import Group

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
    found = unpack_block(arrays, BlockBuilder(), idtype)
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
    found = unpack_block(arrays, BlockBuilder(), torch.int32)
    arrays[2][:] = 1
    assert found.block.adj_tensors("csc")[1].tolist()[0] == 2


def test_no_destination() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    own = OwnerBlock(block=dgl.create_block((empty, empty), num_src_nodes=0, num_dst_nodes=0), nodes=empty)
    found = unpack_block(pack_block(own, wide=False), BlockBuilder(), torch.int64)
    assert found.block.num_dst_nodes() == found.block.num_edges() == len(found.nodes) == 0


def test_kernels_that_read_edge_data_take_it() -> None:
    found = unpack_block(pack_block(block_of(torch.int64), wide=False), BlockBuilder(), torch.int64)
    x = torch.tensor([[1.0], [2.0], [4.0], [8.0]])
    weighed = dgl.ops.u_mul_e_sum(found.block, x, torch.tensor([[1.0], [1.0], [1.0]]))
    assert weighed.tolist() == [[4.0], [9.0]]


BLOCK = [np.zeros(1, np.int32)] * 3


class Quiet:
    """A session in which the other ranks live and say nothing."""

    timeout_s = 0.1
    store = None
    hosts = ("here", "there", "yonder")

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def raise_for_dead(self, missing: list[int], what: str) -> None:
        self.asked.append(missing)

    def describe_failure(self, doing: str) -> str:
        return "all answer"


def inbox_of(session: Any) -> StructureInbox:
    return StructureInbox(session, Group(rank=0, members=(0, 1, 2), replicas=(0,)))


def at(iteration: int, step: int) -> BatchPosition:
    return BatchPosition(iteration=iteration, epoch=4, step=step)


@pytest.fixture
def inbox() -> Any:
    with start_session() as session:
        yield inbox_of(session)


def test_it_waits_for_all_others(inbox: StructureInbox) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(inbox.take, at(0, 1))
        inbox.put(0, 0, 2, BLOCK)
        inbox.put(0, 1, 2, BLOCK)
        assert not waiting.done()
        inbox.put(0, 1, 1, BLOCK)
        assert sorted(waiting.result(10)) == [1, 2]
    assert len(inbox._arrived) == 1


def test_leaving_ends_who_waits_and_drops_what_came(inbox: StructureInbox) -> None:
    inbox.put(0, 3, 1, BLOCK)
    inbox.put(1, 0, 1, BLOCK)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(inbox.take, at(0, 3))
        inbox.cancel(0)
        with pytest.raises(IterationLeft):
            waiting.result(10)
    inbox.put(0, 4, 2, BLOCK)
    assert len(inbox._arrived) == 1


def test_an_error_of_another_thread_is_the_reason(inbox: StructureInbox) -> None:
    inbox.cancel(0, ValueError("first"))
    inbox.cancel(0)
    with pytest.raises(ValueError, match="first"):
        inbox.take(at(0, 0))


def test_a_new_iteration_drops_what_is_old(inbox: StructureInbox) -> None:
    inbox.put(0, 0, 1, BLOCK)
    inbox.put(1, 0, 1, BLOCK)
    inbox.begin(1)
    assert len(inbox._arrived) == 1
    inbox.put(1, 0, 2, BLOCK)
    assert sorted(inbox.take(at(1, 0))) == [1, 2]
    assert len(inbox._arrived) == 0


def test_who_is_missing_is_named() -> None:
    session = Quiet()
    inbox = inbox_of(session)
    inbox.put(0, 5, 1, BLOCK)
    with pytest.raises(PeerError, match=r"rank 2 on yonder did not send the structure of step 5 of epoch 4"):
        inbox.take(at(0, 5))
    assert session.asked == [[2]]


def test_alone_there_is_nothing_to_wait_for() -> None:
    inbox = StructureInbox(Quiet(), Group(rank=0, members=(0,), replicas=(0,)))  # type: ignore[arg-type]
    assert inbox.take(at(0, 0)) == {}
