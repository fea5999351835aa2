"""Partition: a raw graph in, the owner of every node out, and figures that say how good that is."""

from dglx_dist.partition.base import Partitioner
from dglx_dist.partition.options import PartitionOptions
from dglx_dist.partition.quality import PartitionQuality, measure
from dglx_dist.partition.registry import PARTITIONERS, default_partitioner, partitioner

__all__ = [
    "PARTITIONERS",
    "PartitionOptions",
    "PartitionQuality",
    "Partitioner",
    "default_partitioner",
    "measure",
    "partitioner",
]
