"""Train a DGL model on many processes, with the strategy that suits your graph and your network.

Public names are imported when they are first used, so that ``import dglx_dist`` and ``dglx --help`` are fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dglx_dist.api import DataLoader as DataLoader
    from dglx_dist.api import DistEdgeDataLoader as DistEdgeDataLoader
    from dglx_dist.api import DistNodeDataLoader as DistNodeDataLoader
    from dglx_dist.api import choose_strategy as choose_strategy
    from dglx_dist.api import distribute as distribute
    from dglx_dist.api import distribute_dataset as distribute_dataset
    from dglx_dist.api import fit as fit
    from dglx_dist.api import init as init
    from dglx_dist.api import local_device as local_device
    from dglx_dist.api import original_ids as original_ids
    from dglx_dist.api import partition_graph as partition_graph
    from dglx_dist.api import reduce_mean as reduce_mean
    from dglx_dist.api import register_partitioner as register_partitioner
    from dglx_dist.api import register_strategy as register_strategy
    from dglx_dist.api import shutdown as shutdown
    from dglx_dist.api import strategy_names as strategy_names
    from dglx_dist.api import wrap as wrap
    from dglx_dist.dataloading import negative as negative
    from dglx_dist.errors import CheckpointError as CheckpointError
    from dglx_dist.errors import ConfigError as ConfigError
    from dglx_dist.errors import DatasetError as DatasetError
    from dglx_dist.errors import DglxError as DglxError
    from dglx_dist.errors import PeerError as PeerError
    from dglx_dist.errors import RemoteError as RemoteError
    from dglx_dist.errors import StorageError as StorageError
    from dglx_dist.errors import UnknownNameError as UnknownNameError
    from dglx_dist.graph import optim as optim
    from dglx_dist.graph.analysis import reverse_edge_ids as reverse_edge_ids
    from dglx_dist.graph.dist_graph import DistGraph as DistGraph
    from dglx_dist.graph.dist_tensor import DistTensor as DistTensor
    from dglx_dist.graph.embedding import DistEmbedding as DistEmbedding
    from dglx_dist.graph.partition_book import PartitionBook as PartitionBook
    from dglx_dist.graph.split import edge_split as edge_split
    from dglx_dist.graph.split import node_split as node_split
    from dglx_dist.strategies.full_graph.local_graphs import local_graph as local_graph
    from dglx_dist.training.checkpoint import load as load
    from dglx_dist.training.checkpoint import save as save
    from dglx_dist.training.export import write_embeddings as write_embeddings
    from dglx_dist.training.fit import FitConfig as FitConfig
    from dglx_dist.training.fit import FitResult as FitResult
    from dglx_dist.training.inference import evaluate as evaluate
    from dglx_dist.training.inference import layerwise_inference as layerwise_inference

__version__ = "0.1.0"

_WHERE = {
    "CheckpointError": "dglx_dist.errors",
    "ConfigError": "dglx_dist.errors",
    "DataLoader": "dglx_dist.api",
    "DatasetError": "dglx_dist.errors",
    "DglxError": "dglx_dist.errors",
    "DistEmbedding": "dglx_dist.graph.embedding",
    "DistGraph": "dglx_dist.graph.dist_graph",
    "DistEdgeDataLoader": "dglx_dist.api",
    "DistNodeDataLoader": "dglx_dist.api",
    "DistTensor": "dglx_dist.graph.dist_tensor",
    "FitConfig": "dglx_dist.training.fit",
    "FitResult": "dglx_dist.training.fit",
    "PartitionBook": "dglx_dist.graph.partition_book",
    "PeerError": "dglx_dist.errors",
    "RemoteError": "dglx_dist.errors",
    "StorageError": "dglx_dist.errors",
    "UnknownNameError": "dglx_dist.errors",
    "distribute": "dglx_dist.api",
    "distribute_dataset": "dglx_dist.api",
    "edge_split": "dglx_dist.graph.split",
    "choose_strategy": "dglx_dist.api",
    "evaluate": "dglx_dist.training.inference",
    "fit": "dglx_dist.api",
    "init": "dglx_dist.api",
    "layerwise_inference": "dglx_dist.training.inference",
    "load": "dglx_dist.training.checkpoint",
    "local_device": "dglx_dist.api",
    "local_graph": "dglx_dist.strategies.full_graph.local_graphs",
    "negative": "dglx_dist.dataloading",
    "node_split": "dglx_dist.graph.split",
    "optim": "dglx_dist.graph",
    "original_ids": "dglx_dist.api",
    "partition_graph": "dglx_dist.api",
    "reduce_mean": "dglx_dist.api",
    "register_partitioner": "dglx_dist.api",
    "register_strategy": "dglx_dist.api",
    "reverse_edge_ids": "dglx_dist.graph.analysis",
    "save": "dglx_dist.training.checkpoint",
    "shutdown": "dglx_dist.api",
    "strategy_names": "dglx_dist.api",
    "wrap": "dglx_dist.api",
    "write_embeddings": "dglx_dist.training.export",
}

__all__ = list(_WHERE)


def __getattr__(name: str) -> object:
    """Import the public name ``name`` from its room.

    Raises:
        AttributeError: there is no such public name.
    """
    if name not in _WHERE:
        raise AttributeError(
            f"module 'dglx_dist' has no attribute {name!r}; public names: {', '.join(__all__)}"
        )
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
