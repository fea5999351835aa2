"""Anything -> raw graph: generator, npz, DGLGraph, OGB, Parquet and CSV tables."""

from dglx_dist.datasets.base import DatasetSource
from dglx_dist.datasets.check import check_raw_graph
from dglx_dist.datasets.load import load_dataset
from dglx_dist.datasets.registry import DATASETS
from dglx_dist.datasets.synthetic import SyntheticConfig, generate

__all__ = [
    "DATASETS",
    "DatasetSource",
    "SyntheticConfig",
    "check_raw_graph",
    "generate",
    "load_dataset",
]
