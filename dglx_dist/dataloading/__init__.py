"""Drop-in for ``dgl.dataloading`` with this package's loaders. A script only changes its import.

Samplers, including negative samplers, are DGL's own.
"""

import sys
from typing import Any

import dgl
from dgl.dataloading import BlockSampler as BlockSampler
from dgl.dataloading import LaborSampler as LaborSampler
from dgl.dataloading import MultiLayerFullNeighborSampler as MultiLayerFullNeighborSampler
from dgl.dataloading import MultiLayerNeighborSampler as MultiLayerNeighborSampler
from dgl.dataloading import NeighborSampler as NeighborSampler
from dgl.dataloading import ShaDowKHopSampler as ShaDowKHopSampler
from dgl.dataloading import as_edge_prediction_sampler as as_edge_prediction_sampler
from dgl.dataloading import negative_sampler as negative_sampler


def __getattr__(name: str) -> Any:
    """Resolve this package's loaders by name.

    Raises ImportError if DGL has ``name``, but only for graphs in one process. Raises AttributeError if DGL
    does not have ``name`` either.
    """
    if name in ("ClusterGCNSampler", "DataLoader", "DistEdgeDataLoader", "DistNodeDataLoader"):
        # The public loaders live in the top-level package, which is always imported before this one.
        return getattr(sys.modules["dglx_dist"], name)
    if name.startswith("__") or not hasattr(dgl.dataloading, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise ImportError(
        f"{name} of dgl.dataloading does not work on distributed graphs: load nodes and edges "
        "with DataLoader and NeighborSampler, MultiLayerFullNeighborSampler, LaborSampler, or "
        "a subclass of BlockSampler that calls g.sample_neighbors; for other graphs, import "
        "it from dgl.dataloading"
    )
