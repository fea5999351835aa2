"""Values per edge of the layer-1 blocks of all owners, on every part."""

from __future__ import annotations

from collections.abc import Sequence

from dgl.heterograph import DGLBlock
from torch import Tensor

from dglx_dist.cluster.session import Session
from dglx_dist.strategies.push_pull.exchange import send_to_parts
from dglx_dist.strategies.push_pull.structure import STRUCTURE as STRUCTURE


def share_edges(values: Tensor, blocks: Sequence[DGLBlock], session: Session) -> tuple[Tensor, ...]:
    """Return every owner's values per edge, like ``values`` of this rank's own block; all must call it."""
    like = [values.new_empty((block.num_edges(), *values.shape[1:])) for block in blocks]
    own = blocks[session.topology.rank]
    *_, edge_ids = own.adj_tensors("csc")
    # Parts number the edges as the columns of the matrix have them.
    ordered = values[edge_ids.long()] if len(edge_ids) else values
    received = list(send_to_parts(ordered, like, session, STRUCTURE))
    received[session.topology.rank] = values
    return tuple(received)
