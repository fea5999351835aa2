"""The structure of a graph that lies on several ranks: whole along in-edges, never along out-edges."""

from __future__ import annotations

from typing import Any, NoReturn, final

import torch
from dgl.heterograph_index import HeteroGraphIndex

from dglx_dist.errors import ConfigError


@final
class OneWay:
    """The attribute ``_graph`` of a DGL graph, whose value refuses to be reversed in forward.

    DGL reverses a graph to sum over the out-edges of a source, which are not all here: a softmax over the
    edges of each source would be one over those of them that this rank has. In backward DGL does the same to
    bring gradients to this rank's copies of the sources, which is what the exchange adds up.
    """

    def __get__(self, graph: Any, owner: Any = None) -> Any:
        if graph is None:
            return self
        try:
            return graph.__dict__["_graph"]
        except KeyError:
            raise AttributeError("_graph") from None

    def __set__(self, graph: Any, index: HeteroGraphIndex) -> None:
        # DGL makes a new index where a graph changes its device, its formats or its integers.
        index.__class__ = _OneWayIndex
        graph.__dict__["_graph"] = index


class _OneWayIndex(HeteroGraphIndex):
    """The index, whose in-edges alone are complete."""

    def reverse(self) -> Any:
        """Return the reversed index, in backward.

        Raises:
            ConfigError: in forward.
        """
        # -1: no backward is running, see torch.autograd.graph.
        if torch._C._current_graph_task_id() == -1:
            refuse_reversed("this")
        return super().reverse()


def refuse_reversed(what: str) -> NoReturn:
    """Raise ConfigError: ``what`` reads the out-edges of a source."""
    raise ConfigError(
        f"{what} sums over the out-edges of each source, which lie on several ranks (dgl.reverse, "
        "edge_softmax(norm_by='src'), and EdgeWeightNorm('both'), which SGConv, TAGConv, APPNPConv and "
        "GCN2Conv call for edge weights); normalise the weights of the whole graph beforehand, load them as "
        "an edge feature and give them to GraphConv(norm='none'), or use EdgeWeightNorm('right')"
    )
