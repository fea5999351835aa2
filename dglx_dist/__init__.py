"""Distributed training of DGL models, with the strategy that suits the graph and the network.

Public names are imported on first use, so that ``import dglx_dist`` and ``dglx --help`` are fast.
"""

from typing import TYPE_CHECKING

from dglx_dist.internals import dgl_import

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
    from dglx_dist.api import register_partitioner as register_partitioner
    from dglx_dist.api import register_strategy as register_strategy
    from dglx_dist.api import shutdown as shutdown
    from dglx_dist.api import strategy_names as strategy_names
    from dglx_dist.api import wrap as wrap
    from dglx_dist.dataloading import negative as negative
    from dglx_dist.dataloading.clusters import ClusterGCNSampler as ClusterGCNSampler
    from dglx_dist.dataloading.edge_loader import gather_pair_rows as gather_pair_rows
    from dglx_dist.dataloading.temporal import TemporalNeighborSampler as TemporalNeighborSampler
    from dglx_dist.errors import CheckpointError as CheckpointError
    from dglx_dist.errors import ConfigError as ConfigError
    from dglx_dist.errors import DatasetError as DatasetError
    from dglx_dist.errors import DglxError as DglxError
    from dglx_dist.errors import PeerError as PeerError
    from dglx_dist.errors import RemoteError as RemoteError
    from dglx_dist.errors import Stopped as Stopped
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
    from dglx_dist.layers import nn as nn
    from dglx_dist.strategies.full_graph.halo import Halo as Halo
    from dglx_dist.strategies.full_graph.local_graphs import local_graph as local_graph
    from dglx_dist.training.checkpoint import checkpoints as checkpoints
    from dglx_dist.training.checkpoint import load as load
    from dglx_dist.training.checkpoint import save as save
    from dglx_dist.training.exact_mean import global_mean as global_mean
    from dglx_dist.training.exact_mean import reduce_mean as reduce_mean
    from dglx_dist.training.export import write_embeddings as write_embeddings
    from dglx_dist.training.fit_config import FitConfig as FitConfig
    from dglx_dist.training.fit_config import FitResult as FitResult
    from dglx_dist.training.inference import evaluate as evaluate
    from dglx_dist.training.inference import layerwise_inference as layerwise_inference
    from dglx_dist.training.predictor import Predictor as Predictor

__version__ = "0.1.0"

# Before anything imports DGL.
dgl_import.install()

_EXPORTS = {
    "api": "DataLoader DistEdgeDataLoader DistNodeDataLoader choose_strategy distribute distribute_dataset "
    "fit init local_device original_ids partition_graph register_partitioner "
    "register_strategy shutdown strategy_names wrap",
    "dataloading": "negative",
    "dataloading.clusters": "ClusterGCNSampler",
    "dataloading.edge_loader": "gather_pair_rows",
    "dataloading.temporal": "TemporalNeighborSampler",
    "errors": "CheckpointError ConfigError DatasetError DglxError PeerError RemoteError Stopped StorageError "
    "UnknownNameError",
    "graph": "optim",
    "graph.analysis": "reverse_edge_ids",
    "graph.dist_graph": "DistGraph",
    "graph.dist_tensor": "DistTensor",
    "graph.embedding": "DistEmbedding",
    "graph.partition_book": "PartitionBook",
    "graph.split": "edge_split node_split",
    "layers": "nn",
    "strategies.full_graph.halo": "Halo",
    "strategies.full_graph.local_graphs": "local_graph",
    "training.checkpoint": "checkpoints load save",
    "training.exact_mean": "global_mean reduce_mean",
    "training.export": "write_embeddings",
    "training.fit": "FitConfig FitResult",
    "training.inference": "evaluate layerwise_inference",
    "training.predictor": "Predictor",
}
"""Module to its public names."""
_MODULE_OF = {name: f"dglx_dist.{module}" for module, names in _EXPORTS.items() for name in names.split()}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        known = ", ".join(__all__)
        raise AttributeError(f"module 'dglx_dist' has no attribute {name!r}; public names: {known}")
    # With a fromlist, as a name may be a module of its own that nobody has imported yet.
    return getattr(__import__(_MODULE_OF[name], fromlist=[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
