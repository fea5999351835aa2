"""Records by hand: a graph of 1000 nodes, 2 servers of 1 rank, a GraphSAGE of 2 layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dglx_dist.planner.model_shape import shape_of_module
from dglx_dist.strategies.cost import (
    BatchWork,
    Cluster,
    GraphStats,
    Measured,
    ModelShape,
    Rates,
    Survey,
    trace_of_widths,
)
from dglx_dist.strategies.full_graph.cost import FullGraphScheme, FullWork
from dglx_dist.strategies.full_graph.memory_estimate import StepSizes
from dglx_dist.strategies.serverless.strategy import GhostPairs, Ghosts
from dglx_dist.training.models import build_model

GRAPH = GraphStats(
    name="by hand", nodes=1000, edges=10_000, features=100, feature_bytes=400, classes=10, train_nodes=100,
    edge_cut=0.5, method="random",
)  # fmt: skip
CLUSTER = Cluster(
    servers=2, ranks_per_server=1, external_bytes_per_s=1e6, internal_bytes_per_s=1e9, latency_s=0.0,
    cores=1.0, memory_bytes=10**9,
)  # fmt: skip
SURVEY = Survey(
    steps=5, input_rows=4000, remote_rows=2000, edges=9000, seeds_per_rank=[50, 50], feature_bytes=2000 * 408,
    sampling_bytes=0, label_bytes=0, gradient_bytes=0, first_targets=500, first_edges=5000,
)  # fmt: skip
BATCHES = BatchWork(
    survey=SURVEY,
    worked=((2000, 250), (250, 50), (2500, 2000)),
    largest=((400, 50), (50, 10), (500, 400)),
    card_share=0.5,
)
WHOLE = FullWork(
    largest=StepSizes(rows=(500, 500, 50), sources=(700, 600), edges=(5000, 500), sent=(0, 0)),
    worked=((700, 600), (500, 50), (5000, 500)),
    outside=(400, 200),
    inside=(0, 0),
    card_rows=(200, 100),
    inside_rows=(0, 0),
    external_rows=0,
)
RATES = Rates(step_s=0.0, edge_column_s=1e-8, multiply_add_s=0.0, sample_edge_s=0.0, gather_byte_s=0.0)


def shape_of_kind(kind: str, features: int, hidden: int, classes: int, layers: int) -> ModelShape:
    model = build_model(kind, features, hidden, classes, layers, 0.0)
    return shape_of_module(model, features, classes, layers, kind=kind, hidden=hidden)


SHAPE = shape_of_kind("sage", 100, 16, 10, 2)


def known(**changed: Any) -> Measured:
    trace = trace_of_widths(SHAPE)
    fields: dict[str, Any] = {
        "graph": GRAPH,
        "shape": SHAPE,
        "cluster": CLUSTER,
        "rates": RATES,
        "program_bytes": 10**8,
        "of_batches": trace,
        "of_graphs": trace,
        "batches": BATCHES,
        "works": {
            FullGraphScheme(0): WHOLE,
            FullGraphScheme(2): replace(WHOLE, card_rows=(0, 0), outside=(0, 0)),
            GhostPairs(): Ghosts(outside=400, inside=0),
        },
        "structure_partitioned": False,
        "epoch": 1,
    }
    return Measured(**{**fields, **changed})
