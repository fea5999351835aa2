"""``dgl.dataloading`` with this package's loader: a script changes the name it imports from, and no more.

The samplers are DGL's own.
"""

from dgl.dataloading import BlockSampler as BlockSampler
from dgl.dataloading import MultiLayerFullNeighborSampler as MultiLayerFullNeighborSampler
from dgl.dataloading import MultiLayerNeighborSampler as MultiLayerNeighborSampler
from dgl.dataloading import NeighborSampler as NeighborSampler
from dgl.dataloading import as_edge_prediction_sampler as as_edge_prediction_sampler

from dglx_dist.run.session import DataLoader as DataLoader
