"""The layer-1 blocks of all owners, on every part (P3: the structure is pushed, features are not)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import dgl
import torch
from dgl.heterograph import DGLBlock
from torch import Tensor

from dglx_dist.cluster.collectives import gather_int64
from dglx_dist.cluster.session import Session
from dglx_dist.strategies.push_pull.exchange import send_to_parts

STRUCTURE = "structure"
"""The ledger's name of these bytes: (N - 1) [4 (D1 + 1) + 4 E1 + 4 L0] per owner (algorithms 2.4, int32)."""


@dataclass(frozen=True, kw_only=True)
class OwnersBlock:
    """The layer-1 block of one owner."""

    block: DGLBlock
    nodes: Tensor
    """(L0,) int64 global ids of its sources."""


def share_blocks(block: DGLBlock, nodes: Tensor, session: Session) -> tuple[OwnersBlock, ...]:
    """Return the blocks of all owners, this rank's among them, by owner; every rank must call it.

    Args:
        block: This rank's layer-1 block.
        nodes: (L0,) int64 global ids of its sources.
        session: The run.

    Raises:
        PeerError: a rank is dead or did not take part within the time-out.
    """
    rank = session.topology.rank
    mine = OwnersBlock(block=block, nodes=nodes)
    if session.topology.world_size == 1:
        return (mine,)
    indptr, indices, _ = block.adj_tensors("csc")
    sizes = gather_int64([len(nodes), block.num_dst_nodes(), block.num_edges()], session)
    packed = torch.cat([part.to(torch.int32) for part in (nodes, indptr, indices)])
    like = [
        torch.empty(sources + targets + 1 + edges, dtype=torch.int32) for sources, targets, edges in sizes
    ]
    received = send_to_parts(packed, like, session, STRUCTURE)
    return tuple(
        mine if owner == rank else _unpacked(one, *counts)
        for owner, (one, counts) in enumerate(zip(received, sizes.tolist(), strict=True))
    )


def share_edges(values: Tensor, blocks: Sequence[OwnersBlock], session: Session) -> tuple[Tensor, ...]:
    """Return every owner's values per edge, like ``values`` of this rank's own block; all must call it."""
    like = [values.new_empty((one.block.num_edges(), *values.shape[1:])) for one in blocks]
    own = blocks[session.topology.rank].block
    *_, edge_ids = own.adj_tensors("csc")
    # Parts number the edges as the columns of the matrix have them.
    ordered = values[edge_ids.long()] if len(edge_ids) else values
    received = list(send_to_parts(ordered, like, session, STRUCTURE))
    received[session.topology.rank] = values
    return tuple(received)


def _unpacked(packed: Tensor, sources: int, targets: int, edges: int) -> OwnersBlock:
    nodes, indptr, indices = torch.split(packed.to(torch.int64), [sources, targets + 1, edges])
    block = dgl.create_block(
        ("csc", (indptr, indices, torch.empty(0, dtype=torch.int64))),
        num_src_nodes=sources,
        num_dst_nodes=targets,
    )
    return OwnersBlock(block=block, nodes=nodes)
