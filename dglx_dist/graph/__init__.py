"""The partitioned graph as a program sees it: structure, tensors, ownership and splits."""

from dglx_dist.graph import optim
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.dist_tensor import DistTensor
from dglx_dist.graph.embedding import DistEmbedding
from dglx_dist.graph.partition_book import PartitionBook
from dglx_dist.graph.split import edge_split, node_split

__all__ = ["DistEmbedding", "DistGraph", "DistTensor", "PartitionBook", "edge_split", "node_split", "optim"]
