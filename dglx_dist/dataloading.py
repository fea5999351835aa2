"""``dgl.dataloading`` with this package's loaders: a script changes the name it imports from, and no more.

Samplers, also those of negative edges, are DGL's own.
"""

from __future__ import annotations

from typing import NoReturn

import dgl
from dgl.dataloading import BlockSampler as BlockSampler
from dgl.dataloading import MultiLayerFullNeighborSampler as MultiLayerFullNeighborSampler
from dgl.dataloading import MultiLayerNeighborSampler as MultiLayerNeighborSampler
from dgl.dataloading import NeighborSampler as NeighborSampler
from dgl.dataloading import as_edge_prediction_sampler as as_edge_prediction_sampler
from dgl.dataloading import negative_sampler as negative_sampler

from dglx_dist.run.session import DataLoader as DataLoader
from dglx_dist.run.session import DistEdgeDataLoader as DistEdgeDataLoader
from dglx_dist.run.session import DistNodeDataLoader as DistNodeDataLoader


def __getattr__(name: str) -> NoReturn:
    """Refuse what is not here.

    Raises:
        ImportError: DGL has it, for graphs of one process.
        AttributeError: nor has DGL.
    """
    if name.startswith("__") or not hasattr(dgl.dataloading, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise ImportError(
        f"{name} of dgl.dataloading does not work on distributed graphs: nodes and edges are loaded by "
        "DataLoader, with NeighborSampler, MultiLayerFullNeighborSampler, or a subclass of BlockSampler that "
        "calls g.sample_neighbors; for other graphs of the script import it from dgl.dataloading"
    )
