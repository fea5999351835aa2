"""0-1-2 | 3-4-5: two triangles joined by the edge 2-3, both directions stored; and runs that are compared."""

from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pyarrow.dataset
import torch

from dglx_dist.records import EDGE_TYPE, NODE_TYPE, RawGraph
from dglx_dist.training.config import TrainConfig

PAIRS = ((0, 1), (1, 2), (0, 2), (3, 4), (4, 5), (3, 5), (2, 3))
SOURCE = np.array([u for u, v in PAIRS] + [v for u, v in PAIRS])
DESTINATION = np.array([v for u, v in PAIRS] + [u for u, v in PAIRS])


def two_triangles() -> RawGraph:
    features = np.arange(12, dtype=np.float32).reshape(6, 2)
    return RawGraph(
        name="triangles",
        num_nodes={NODE_TYPE: 6},
        edges={EDGE_TYPE: (SOURCE, DESTINATION)},
        node_data={NODE_TYPE: {"feat": features, "train_mask": np.array([1, 0, 0, 1, 0, 0], dtype=bool)}},
    )


def as_dgl() -> dgl.DGLGraph:
    g = dgl.graph((torch.from_numpy(SOURCE), torch.from_numpy(DESTINATION)), num_nodes=6)
    for name, values in two_triangles().node_data[NODE_TYPE].items():
        g.ndata[name] = torch.from_numpy(values)
    return g


def plan_of(dataset: str, out: Path, **changes: Any) -> TrainConfig:
    outputs = {"predictions": str(out / "classes"), "save_embeddings": str(out / "rows")}
    return TrainConfig(**{"data": dataset, "out": str(out), "hidden": 8, "dropout": 0.0} | outputs | changes)


def read_tables(out: Path) -> tuple[Any, Any]:
    classes = pyarrow.dataset.dataset(out / "classes").to_table().sort_by("id")
    rows = pyarrow.dataset.dataset(out / "rows").to_table().sort_by("id")
    return classes["prediction"].to_numpy(), np.array(rows["embedding"].to_pylist())
