"""What the owner of a block gives the parts per edge: weights, relations, norms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dgl.heterograph import DGLBlock
from torch import Tensor

from dglx_dist.strategies.push_pull.group import Group
from dglx_dist.strategies.push_pull.structure import STRUCTURE
from dglx_dist.strategies.push_pull.transfer import Courier
from dglx_dist.strategies.push_pull.visit import OwnersInput


def share_edge_values(
    values: Mapping[str, Tensor], inputs: Sequence[OwnersInput], group: Group, courier: Courier
) -> list[dict[str, Tensor]]:
    """Return every owner's values by name, like ``values`` of the own block; every member must call it.

    Args:
        values: Name to (E1, ...) of the own block, in the order of its edges; carries no gradient.
        inputs: (N_f,) by owner.
        group: Who takes part.
        courier: Of the group.

    Raises:
        PeerError: a rank is dead or did not take part within the time-out.
    """
    by_owner: list[dict[str, Tensor]] = [{} for _ in inputs]
    for name, own in values.items():
        like = [own.new_empty((one.block.num_edges(), *own.shape[1:])) for one in inputs]
        received = courier.push(_by_column(own, inputs[group.part].block), like, STRUCTURE).result()
        for mine, other in zip(by_owner, received, strict=True):
            mine[name] = other
        by_owner[group.part][name] = own
    return by_owner


def _by_column(values: Tensor, block: DGLBlock) -> Tensor:
    """Return ``values`` as the parts number the edges: as the columns of the matrix have them."""
    *_, edge_ids = block.adj_tensors("csc")
    return values[edge_ids.long()] if len(edge_ids) else values
