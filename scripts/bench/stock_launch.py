"""Stock DistDGL on the graph and the cut of another variant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dglx_dist.data.synthetic import SyntheticConfig
from dglx_dist.prepare import PartitionPlan
from scripts.bench import data
from scripts.bench.peers.data import dgl_copy
from scripts.bench.peers.launch import Launch
from scripts.bench.peers.workload import Workload


def stock_launch(
    graph: SyntheticConfig,
    cut: PartitionPlan,
    named: str,
    *,
    work: Path,
    epochs: int,
    **training: Any,
) -> Launch:
    """Return how stock DistDGL trains on ``graph``, whose datasets are written where they are not there.

    Args:
        graph: The built-in graph.
        cut: How it is cut.
        named: What the cut is called while datasets are made.
        work: Where datasets lie.
        epochs: Of a repetition.
        training: More of :class:`Workload`: hidden, fanouts, batch_size, lr.

    Raises:
        StorageError: the datasets cannot be written.
    """
    ours = data.prepare(graph, {named: cut}, work)[named]
    workload = Workload(
        nodes=graph.nodes,
        degree=int(graph.degree),
        features=graph.features,
        classes=graph.classes,
        train_rate=graph.train_rate,
        seed=graph.seed,
        **training,
    )
    copy = dgl_copy(graph, cut, ours, work)
    return Launch(system="stock", workload=workload, data=str(copy), epochs=epochs)
