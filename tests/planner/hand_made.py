"""Records by hand: a graph of 1000 nodes, 2 servers of 1 rank, a GraphSAGE of 2 layers."""

from dataclasses import replace
from typing import Any

from dglx_dist.planner.costs.base import BatchWork, EpochCounts, Survey, TrainedRows
from dglx_dist.planner.costs.full_graph import FullGraphScheme, FullWork, StepSizes
from dglx_dist.planner.costs.serverless import HaloCounts, HaloPairs
from dglx_dist.planner.model_shape import infer_shape
from dglx_dist.planner.records import Cluster, GraphStats, ModelShape
from dglx_dist.strategies.candidate import CandidateContext
from dglx_dist.training.models import build_model

GRAPH = GraphStats(
    name="by hand", nodes=1000, edges=10_000, features=100, feature_bytes=400, classes=10, train_nodes=100,
    edge_cut=0.5, method="random", all_feature_bytes=400_000,
)  # fmt: skip
CLUSTER = Cluster(
    servers=2, ranks_per_server=1, external_bytes_per_s=1e6, internal_bytes_per_s=1e9,
    cores=1.0, memory_bytes=10**9,
)  # fmt: skip
SURVEY = Survey(
    steps=5, input_rows=4000, remote_rows=2000, edges=9000, seeds_per_rank=[50, 50], feature_bytes=2000 * 408,
    sampling_bytes=0, label_bytes=0, gradient_bytes=0, first_targets=500, first_edges=5000,
)  # fmt: skip
BATCHES = BatchWork(
    survey=SURVEY,
    largest=((400, 50), (50, 10), (500, 400)),
)
WHOLE = FullWork(
    largest=StepSizes(rows=(500, 500, 50), sources=(700, 600), edges=(5000, 500), sent=(0, 0)),
    outside=(400, 200),
    inside=(0, 0),
    external_rows=0,
    trained_rows=TrainedRows(),
)


def shape_of_kind(kind: str, features: int, hidden: int, classes: int, layers: int) -> ModelShape:
    model = build_model(kind, features, hidden, classes, layers, 0.0)
    return infer_shape(model, features, classes, layers, kind=kind, hidden=hidden)


SHAPE = shape_of_kind("sage", 100, 16, 10, 2)


def make_counts(**changed: Any) -> EpochCounts:
    fields: dict[str, Any] = {
        "graph": GRAPH,
        "shape": SHAPE,
        "cluster": CLUSTER,
        "context": CandidateContext(ranks=2, servers=2, num_layers=2, steps=5),
        "program_bytes": 10**8,
        "batches": BATCHES,
        "works": {
            FullGraphScheme(0): WHOLE,
            FullGraphScheme(2): replace(WHOLE, outside=(0, 0)),
            HaloPairs(): HaloCounts(outside=400, inside=0),
        },
        "structure_partitioned": False,
        "epoch": 1,
    }
    return EpochCounts(**{**fields, **changed})
