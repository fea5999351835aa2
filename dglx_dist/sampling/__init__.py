"""Mini-batches: compiled neighbour sampling with keyed draws, blocks, and the loader that runs ahead."""

from dglx_dist.sampling import negative
from dglx_dist.sampling.edge_loader import DistEdgeDataLoader
from dglx_dist.sampling.loader import DataLoader, LoaderTimes
from dglx_dist.sampling.neighbor import SamplePlan, read_sampler
from dglx_dist.sampling.options import LoaderOptions

__all__ = [
    "DataLoader",
    "DistEdgeDataLoader",
    "LoaderOptions",
    "LoaderTimes",
    "SamplePlan",
    "negative",
    "read_sampler",
]
