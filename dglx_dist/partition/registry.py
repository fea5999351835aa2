"""Names of partitioners."""

from __future__ import annotations

from dglx_dist.partition.base import Partitioner
from dglx_dist.partition.options import PartitionOptions
from dglx_dist.registry import Registry

PARTITIONERS: Registry[Partitioner] = Registry(
    "partitioner",
    Partitioner,  # type: ignore[type-abstract]  # the registry only asks issubclass of it
    builtin={
        "random": "dglx_dist.partition.random:Random",
        "hash": "dglx_dist.partition.hash:Hash",
        "contiguous": "dglx_dist.partition.contiguous:Contiguous",
        "metis": "dglx_dist.partition.metis:Metis",
        "kaminpar": "dglx_dist.partition.kaminpar:Kaminpar",
        "ldg": "dglx_dist.partition.ldg:Ldg",
        "fennel": "dglx_dist.partition.fennel:Fennel",
        "hierarchical": "dglx_dist.partition.hierarchical:Hierarchical",
        "feature": "dglx_dist.partition.feature:Feature",
        "file": "dglx_dist.partition.file:File",
    },
    group="dglx_dist.partitioners",
)

partitioner = PARTITIONERS.register
"""Decorator that makes one's own partitioner known by a name: ``@partitioner("mine")``."""


def default_partitioner(options: PartitionOptions) -> str:
    """Return ``kaminpar`` where one balance weight is enough, ``metis`` where more is asked.

    KaMinPar needs a quarter of the memory for the same cut and runs on several threads; only METIS
    balances several weights at once and minimises communication volume.
    """
    one_weight = len(options.constraints) == 1 and not {"ntype", "etype"} & set(options.constraints)
    return "kaminpar" if one_weight and options.objective == "cut" else "metis"
