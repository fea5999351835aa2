"""D3: weak scaling of data-parallel training, with compute that is slept."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dglx_dist.data.synthetic import SyntheticConfig
from dglx_dist.planner.records import Rate
from dglx_dist.prepare import PartitionPlan
from scripts.bench import data
from scripts.bench.jobs.train_params import graphsage
from scripts.bench.predict import calibrated, survey, weak_scaling
from scripts.bench.records import BenchPlan, Claim, Experiment, ExperimentPlan, Job, Ratio, Shape, Variant

_SERVERS = (1, 2, 4)
_RATE = Rate.parse("1gbit")
_SIMULATED = (
    "forward and backward are slept for as long as the server's share of a core would take; the rest is real"
)


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large, by suite."""

    nodes: int
    degree: float = 25.0
    train_rate: float = 0.06144
    hidden: int = 256
    batch_size: int = 128
    steps: int = 12
    """Of an epoch, on any number of servers; 4 have seeds for at least as many."""
    epochs: int = 1


SIZES: Mapping[str, Size] = {
    "quick": Size(nodes=100_000, train_rate=0.06144),
    "papers": Size(nodes=400_000, batch_size=250, steps=24, epochs=2),
}


def build(plan: BenchPlan) -> ExperimentPlan:
    """Cut one graph into 4 parts for 1, 2 and 4 servers and measure what a batch costs on one core."""
    return plan_of(plan, SIZES.get(plan.suite, SIZES["quick"]))


def plan_of(plan: BenchPlan, size: Size) -> ExperimentPlan:
    """Return the experiment at ``size``; makes datasets, counts bytes and calibrates, which takes seconds."""
    graph = SyntheticConfig(
        nodes=size.nodes,
        degree=size.degree,
        homophily=0.95,
        locality=0.98,
        train_rate=size.train_rate,
        seed=plan.seed + 1,
    )
    # One cut for all: a rank's share then begins with the training nodes of one part of 4. From all over the
    # graph as many seeds reach more nodes and edges, and one server would have more to do.
    cut = {"metis": PartitionPlan(num_parts=max(_SERVERS), method="metis")}
    folder = data.prepare(graph, cut, plan.work)["metis"]
    jobs = {_name(count): _params(str(folder), size, plan.seed) for count in _SERVERS}
    found = survey(jobs, {_name(count): count for count in _SERVERS})
    # The same for each, so that what is real is not slower on more servers because they share the cores.
    cpus = len(os.sched_getaffinity(0)) / max(_SERVERS)
    on_a_core = calibrated(jobs[_name(1)])
    cost = on_a_core.scaled(1.0 / min(cpus, 1.0))
    edges = {name: one.edges // (one.steps * one.ranks) for name, one in found.items()}
    step_s = {
        name: cost.forward.seconds(count) + cost.backward.seconds(count) for name, count in edges.items()
    }
    expected = {name: weak_scaling(step_s[name], one, _RATE) for name, one in found.items()}
    return ExperimentPlan(
        variants=tuple(
            Variant(
                name=_name(count),
                shape=Shape(servers=count, cpus=cpus),
                job=Job(
                    kind="train",
                    params=jobs[_name(count)] | {"simulated": cost.to_json()},
                    warm={"warmup": 0, "epochs": 1},
                ),
                rate=_RATE,
                simulated=_SIMULATED,
            )
            for count in _SERVERS
        ),
        ratios=tuple(
            Ratio(
                name=f"samples per second, {_name(count)} / {_name(1)}",
                over=_name(count),
                under=_name(1),
                quantity="samples_per_second",
                predicted=expected[_name(count)] / expected[_name(1)],
                low=0.75 * count,
            )
            for count in _SERVERS[1:]
        ),
        facts={
            "dataset": data.facts(folder),
            "simulated": _SIMULATED,
            "cores of a server": cpus,
            "calibrated on one core, seconds by edges of a batch": on_a_core.to_json(),
            "edges of a batch": edges,
            "compute slept for a step, s": {name: round(seconds, 4) for name, seconds in step_s.items()},
            "payload bytes of a step and server": {
                name: one.payload_bytes // (one.steps * one.ranks) for name, one in found.items()
            },
            "steps of an epoch": {name: one.steps for name, one in found.items()},
        },
    )


def _name(servers: int) -> str:
    return f"{servers} server" + ("s" if servers > 1 else "")


def _params(folder: str, size: Size, seed: int) -> dict[str, Any]:
    return graphsage(
        folder,
        hidden=size.hidden,
        batch_size=size.batch_size,
        epochs=size.epochs,
        seed=seed,
        max_steps=size.steps,
    )


EXPERIMENT = Experiment(
    id="D3",
    title="weak scaling of data parallel over 1, 2 and 4 servers (simulated compute)",
    suites=("quick", "papers"),
    claim=Claim(
        paper="DistDGL (2020)",
        says="scales linearly to 8 and 16 machines; 13 s per epoch of ogbn-papers100M on 16",
        setting="machines of 96 vCPUs, 100 Gbit/s, GraphSAGE 3 x 256, batch of 2000 per trainer",
    ),
    prediction=(
        "A step takes its compute, or its pulls where they take longer, and then the gradients, which "
        "wait for backward to end: W c / (max(c, pulls / rate) + gradients / rate) times one server's "
        "samples per second, with bytes counted beforehand (in the report); at least 0.75 W."
    ),
    how=(
        "1, 2 and 4 servers of one rank with the same batch and as many steps per rank, links of 1 "
        "Gbit/s, and for each server a quarter of this machine's cores, also where there is one server. "
        "One METIS cut into 4 parts for all: a server has 4, 2 or 1 of them, and each rank trains on nodes "
        "of one, so that its batches are as large on any number of servers. Sampling, pulls, gradients and "
        "optimiser are real. "
        "Forward and backward of GraphSAGE 3 x 256 are simulated: a rank sleeps for as long as its "
        "server's share of a core (one core, where it has more) would take for as many edges, calibrated "
        "on one core just before."
    ),
    build=build,
    note=(
        "Simulated compute: while it is slept, the cores are free for what is real, as if each server "
        "had one for either. What is measured is how far sampling, pulls and gradients of more servers "
        "lengthen a step; accuracy is not, for nothing is learned. Slept gradients are there all at once "
        "when backward ends, so that their exchange overlaps with none of it, which real ones partly do. "
        "It also says nothing beyond 4 servers."
    ),
)
