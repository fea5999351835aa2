"""The dataset sources by name."""

from __future__ import annotations

from dglx_dist.datasets.base import DatasetSource
from dglx_dist.registry import Registry

DATASETS: Registry[DatasetSource] = Registry(
    "dataset source",
    DatasetSource,  # type: ignore[type-abstract]  # the base is only compared with
    builtin={
        "synthetic": "dglx_dist.datasets.synthetic:SyntheticSource",
        "npz": "dglx_dist.datasets.npz:NpzSource",
        "dgl": "dglx_dist.datasets.dgl_source:DglDataSource",
        "dgl_binary": "dglx_dist.datasets.dgl_source:DglBinarySource",
        "ogb": "dglx_dist.datasets.ogb_source:OgbSource",
        "tables": "dglx_dist.datasets.tables:TablesSource",
    },
    group="dglx_dist.datasets",
)
