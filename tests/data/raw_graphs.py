"""Tables in files, and what was read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Array, EdgeType, RawGraph


def write(folder: Path, files: Mapping[str, str | Mapping[str, Any]]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            path.write_text(content)
        else:
            pyarrow.parquet.write_table(pa.table(content), path)
    return folder


def edges_of(graph: RawGraph, edge_type: EdgeType = EDGE_TYPE) -> list[list[int]]:
    return [ids.tolist() for ids in graph.edges[edge_type]]


def columns_of(graph: RawGraph, node_type: str = NODE_TYPE) -> dict[str, Array]:
    return {name: np.asarray(column) for name, column in graph.node_data[node_type].items()}
