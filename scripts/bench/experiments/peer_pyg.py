"""PyG's NeighborLoader under DistributedDataParallel beside data_parallel, on one server."""

from __future__ import annotations

from scripts.bench.peers.data import prepare
from scripts.bench.peers.variants import facts, launch_of, variant
from scripts.bench.peers.workload import Workload
from scripts.bench.records import BenchPlan, Claim, Experiment, ExperimentPlan, Ratio, Shape

WORKLOAD = Workload(nodes=200_000, hidden=256, fanouts=(15, 10, 5))
ONE_SERVER = Shape(servers=1, ranks_per_server=2, cpus=2.0)


def build(plan: BenchPlan) -> ExperimentPlan:
    """Write the graph whole for both; compare on 2 ranks of one server."""
    written = prepare(WORKLOAD, 1, plan.work, arrays=True)
    variants = {
        "PyG": launch_of("pyg", WORKLOAD, written),
        "PyG, 1 worker": launch_of("pyg", WORKLOAD, written, options={"workers": 1}),
        "PyG, tuned": launch_of("pyg", WORKLOAD, written, allocator="tuned"),
        "ours": launch_of("ours", WORKLOAD, written),
        "ours, tuned": launch_of("ours", WORKLOAD, written, allocator="tuned"),
    }
    return ExperimentPlan(
        variants=tuple(variant(name, launch, shape=ONE_SERVER) for name, launch in variants.items()),
        ratios=(
            Ratio(name="time, ours over PyG", over="ours", under="PyG", predicted=0.7, high=1.0),
            Ratio(name="time, ours over PyG with a worker", over="ours", under="PyG, 1 worker",
                  predicted=0.7, high=1.0),
            Ratio(name="time, both with a tuned allocator", over="ours, tuned", under="PyG, tuned",
                  predicted=0.8, high=1.0),
        ),
        facts=facts(written, ("pyg", "ours")),
    )  # fmt: skip


EXPERIMENT = Experiment(
    id="PEER4",
    title="PyG's NeighborLoader and DistributedDataParallel beside data_parallel",
    suites=("peers",),
    claim=Claim(
        paper="our own, beside PyG's examples of several ranks; its package for servers is deprecated",
        says="the same training takes less time an epoch than PyG's loader under DDP, and less memory",
        setting="GraphSAGE 3 x 256, fan-out 15,10,5, on 200,000 nodes and 5 M edges; 2 ranks of one server",
    ),
    prediction=(
        "Estimated, not measured before: 0.7 of PyG's time as its users find it, 0.8 with the allocator of "
        "both told to keep memory, for the loader runs ahead of training and the arithmetic is the same. "
        "Memory: PyG's ranks each hold graph, features and the sampler's columns; ours map one copy for all "
        "ranks."
    ),
    how=(
        "Both systems are launched anew for every repetition, on one server with a core for each of its 2 "
        "ranks. PyG reads the same graph whole from NumPy arrays and cuts its training nodes itself; same "
        "widths, fan-outs, batch size and optimiser, but PyG's own layers and first weights. It draws a "
        "node's neighbours once for a batch and uses them in every layer, where DGL draws for each layer, so "
        "that its batches have fewer edges (counted in the result), and it cuts layers to the nodes that "
        "they still need where its sampler tells them (trim_to_layer, with pyg-lib). It is shown without and "
        "with a worker process that samples ahead. One epoch warms up and two are measured, between "
        "barriers. Memory is that of the server's processes together, shared pages once, divided by its "
        "ranks."
    ),
    needs=("torch_geometric", "pyg_lib|torch_sparse"),
    build=build,
)  # fmt: skip
