"""The graph coauthor_physics as experiments with training in intervals take it: fewer columns, own splits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from dglx_dist.data.sources import load_dataset
from dglx_dist.data.storage.columns import MANIFEST
from dglx_dist.prepare import PartitionPlan, partition_to_disk
from dglx_dist.records import FEATURE, LABEL, NODE_TYPE, Array, NodeColumn, RawGraph, SparseRows

FILE = "coauthor_physics.npz"
"""In the work folder; nothing is fetched."""
_SHARES = (0.66, 0.10)
"""Of training and validation nodes, as in Dorylus; the others are test nodes."""
_ROWS_AT_ONCE = 1024


def cut_coauthors(work: Path, cut: PartitionPlan, columns: int) -> Path:
    """Return the folder of the graph cut so, with ``columns`` random projections of its 8415 features.

    Raises:
        DatasetError: the file is damaged.
    """
    folder = work / f"coauthor_physics-{columns}-{cut.partitioner}-{cut.num_parts}"
    if not (folder / MANIFEST).is_file():
        partition_to_disk(projected(load_dataset(work / FILE), columns), folder, cut)
    return folder


def projected(graph: RawGraph, columns: int, seed: int = 0) -> RawGraph:
    """Return ``graph`` with Gaussian projections of its features, (N, columns) float32, and random splits."""
    draw = np.random.default_rng(seed)
    data: dict[str, NodeColumn] = dict(graph.node_data[NODE_TYPE])
    features, labels = data[FEATURE], data[LABEL]
    assert not isinstance(labels, SparseRows)
    matrix = draw.standard_normal((features.shape[1], columns)).astype(np.float32) / np.sqrt(columns)
    number = features.shape[0]
    pieces = [
        _rows(features, np.arange(first, min(first + _ROWS_AT_ONCE, number))) @ matrix
        for first in range(0, number, _ROWS_AT_ONCE)
    ]
    place = draw.permutation(number) / number
    train, validation = place < _SHARES[0], (place >= _SHARES[0]) & (place < sum(_SHARES))
    data |= {
        FEATURE: np.concatenate(pieces).astype(np.float32),
        "train_mask": train & (labels >= 0),
        "val_mask": validation,
        "test_mask": ~train & ~validation,
    }
    return replace(graph, node_data={**graph.node_data, NODE_TYPE: data})


def _rows(features: NodeColumn, rows: Array) -> Array:
    found: Array = features.dense(rows) if isinstance(features, SparseRows) else features[rows]
    # Rows of unit length: papers of busy authors would drown the others.
    norms = np.linalg.norm(found, axis=1, keepdims=True)
    return found.astype(np.float32) / np.maximum(norms, 1e-12)
