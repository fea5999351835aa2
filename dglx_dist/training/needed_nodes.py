"""Mark the nodes that inference needs: its targets, and at each layer below the in-neighbours as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from dglx_dist.comm.collectives import barrier, sum_over_ranks
from dglx_dist.graph.dist_tensor import DistTensor
from dglx_dist.training.node_batches import BatchLimits, ServerNodes

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph

Marks: TypeAlias = Mapping[str, DistTensor]
"""(N,) bool by node type. Nodes of missing types are not needed."""

_MAX_EDGES_PER_NODE = 2
"""Limit for edges into needed nodes, divided by all nodes. Above it, nearly all nodes count as needed."""

_NODES_AT_ONCE = 1 << 16


def list_needed(
    g: DistGraph, targets: Marks | None, num_passes: int, stack: ExitStack
) -> Sequence[Marks | None]:
    """Mark the nodes that each pass must compute. None: all nodes. Every rank must call this.

    The last entry is ``targets``. The ``stack`` deletes the tensors in all entries before it.
    """
    needed = [targets]
    while len(needed) < num_passes:
        marks = needed[0]
        needed.insert(0, None if marks is None else _add_in_neighbours(g, marks, stack))
    return needed


def make_marks(g: DistGraph, ntype: str, stack: ExitStack) -> DistTensor:
    """Create marks for the nodes of type ``ntype``, with none set. Every rank must call this.

    The ``stack`` deletes them.
    """
    policy = g.get_node_partition_policy(ntype)
    marks = DistTensor((g.num_nodes(ntype),), torch.bool, part_policy=policy, is_gdata=False, graph=g)
    return stack.enter_context(marks)


def _add_in_neighbours(g: DistGraph, marks: Marks, stack: ExitStack) -> Marks | None:
    """Mark the same nodes and their in-neighbours in new tensors. Return None if these are nearly all."""
    nodes_of = {ntype: ServerNodes(g, ntype, rows) for ntype, rows in marks.items()}
    num_edges = sum(nodes.count_edges(nodes.get_share()) for nodes in nodes_of.values())
    total = int(sum_over_ranks(torch.tensor([num_edges]), g.session, phase="control"))
    if total > _MAX_EDGES_PER_NODE * sum(map(g.num_nodes, g.ntypes)):
        return None

    expanded = {ntype: make_marks(g, ntype, stack) for ntype in g.ntypes}
    is_needed = torch.tensor([True])
    for ntype, nodes in nodes_of.items():
        etypes = [etype for etype in g.canonical_etypes if etype[2] == ntype]
        for ids in nodes.split(nodes.get_share(), BatchLimits.from_batch_size(_NODES_AT_ONCE)):
            expanded[ntype].push(ids, is_needed)
            for etype in etypes:
                sources = g.structure(etype).ask("in_edges", ids).sources
                expanded[etype[0]].push(np.unique(sources), is_needed)
    barrier(g.session, "marks of the in-neighbours")
    return expanded
