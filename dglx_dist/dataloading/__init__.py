"""``dgl.dataloading`` with this package's loaders: a script changes the name it imports from, and no more.

Samplers, also those of negative edges, are DGL's own.
"""

from __future__ import annotations

import sys
from typing import Any

import dgl
from dgl.dataloading import BlockSampler as BlockSampler
from dgl.dataloading import MultiLayerFullNeighborSampler as MultiLayerFullNeighborSampler
from dgl.dataloading import MultiLayerNeighborSampler as MultiLayerNeighborSampler
from dgl.dataloading import NeighborSampler as NeighborSampler
from dgl.dataloading import as_edge_prediction_sampler as as_edge_prediction_sampler
from dgl.dataloading import negative_sampler as negative_sampler


def __getattr__(name: str) -> Any:
    """Refuse what is not here.

    Raises:
        ImportError: DGL has it, for graphs of one process.
        AttributeError: nor has DGL.
    """
    if name in ("DataLoader", "DistEdgeDataLoader", "DistNodeDataLoader"):
        # The public loaders stand above this room, in the package that was imported first.
        return getattr(sys.modules["dglx_dist"], name)
    if name.startswith("__") or not hasattr(dgl.dataloading, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise ImportError(
        f"{name} of dgl.dataloading does not work on distributed graphs: nodes and edges are loaded by "
        "DataLoader, with NeighborSampler, MultiLayerFullNeighborSampler, or a subclass of BlockSampler that "
        "calls g.sample_neighbors; for other graphs of the script import it from dgl.dataloading"
    )
