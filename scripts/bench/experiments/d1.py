"""D1: what a partition that keeps neighbours together is worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dglx_dist.data.synthetic import SyntheticConfig
from dglx_dist.planner.records import Rate
from dglx_dist.prepare import PartitionPlan
from scripts.bench import data
from scripts.bench.jobs.train_params import graphsage
from scripts.bench.predict import survey
from scripts.bench.records import (
    BenchPlan,
    Claim,
    Experiment,
    ExperimentPlan,
    Job,
    MatchedPhi,
    Ratio,
    Shape,
    Variant,
)
from scripts.bench.speedup_model import speedup_added, speedup_hidden

_SERVERS = 4
_PHI = 0.65
_RAW = Rate.parse("1gbit")


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large, by suite."""

    nodes: int
    degree: float = 25.0
    train_rate: float = 0.02
    hidden: int = 64
    batch_size: int = 64
    epochs: int = 1
    curve_epochs: int = 5


SIZES: Mapping[str, Size] = {
    "quick": Size(nodes=100_000, train_rate=0.01536),
    "papers": Size(nodes=400_000, hidden=256, batch_size=250, train_rate=0.02, epochs=2, curve_epochs=10),
}


def build(plan: BenchPlan) -> ExperimentPlan:
    """Cut one graph in two ways; train the same model on both, at a matched rate and at 1 Gbit/s."""
    return plan_of(plan, SIZES.get(plan.suite, SIZES["quick"]))


def plan_of(plan: BenchPlan, size: Size) -> ExperimentPlan:
    """Return the experiment at ``size``; makes datasets and counts bytes, which takes seconds."""
    graph = SyntheticConfig(
        nodes=size.nodes,
        degree=size.degree,
        homophily=0.95,
        locality=0.98,
        train_rate=size.train_rate,
        seed=plan.seed + 1,
    )
    cuts = {name: PartitionPlan(num_parts=_SERVERS, method=name) for name in ("random", "metis")}
    folders = data.prepare(graph, cuts, plan.work)
    jobs = {name: _params(str(folder), size, plan.seed) for name, folder in folders.items()}
    found = survey(jobs, _SERVERS)
    bytes_ratio = found["metis"].payload_bytes / found["random"].payload_bytes
    variants = []
    for name, params in jobs.items():
        curve = params | {"warmup": 0, "epochs": size.curve_epochs, "accuracy": True}
        variants.append(_variant(name, params, MatchedPhi(phi=_PHI, baseline="random"), curve))
    for name, params in jobs.items():
        variants.append(_variant(f"{name}, {_RAW}", params, _RAW, None))
    return ExperimentPlan(
        variants=tuple(variants),
        ratios=(
            Ratio(
                name=f"random / metis at phi {_PHI}",
                over="random",
                under="metis",
                predicted=speedup_added(_PHI, bytes_ratio),
                low=1.5,
            ),
            Ratio(name=f"random / metis at {_RAW}", over=f"random, {_RAW}", under=f"metis, {_RAW}"),
            Ratio(
                name="bytes, random / metis",
                over="random",
                under="metis",
                quantity="bytes_outside",
                predicted=1.0 / bytes_ratio,
            ),
        ),
        facts={
            "datasets": {name: data.facts(folder) for name, folder in folders.items()},
            "remote share of input rows": {
                name: round(one.remote_rows / one.input_rows, 3) for name, one in found.items()
            },
            "payload bytes of an epoch": {name: one.payload_bytes for name, one in found.items()},
            "bytes ratio metis / random": round(bytes_ratio, 3),
            "predicted at phi 0.65, nothing overlapped": round(speedup_added(_PHI, bytes_ratio), 2),
            "predicted at phi 0.65, all overlapped": round(speedup_hidden(_PHI, bytes_ratio), 2),
        },
    )


def _variant(
    name: str, params: Mapping[str, Any], rate: Rate | MatchedPhi, curve: Mapping[str, Any] | None
) -> Variant:
    return Variant(
        name=name,
        shape=Shape(servers=_SERVERS),
        job=Job(kind="train", params=params, warm={"warmup": 0, "epochs": 1}),
        rate=rate,
        curve=None if curve is None else Job(kind="train", params=curve),
    )


def _params(folder: str, size: Size, seed: int) -> dict[str, Any]:
    return graphsage(
        folder,
        hidden=size.hidden,
        batch_size=size.batch_size,
        epochs=size.epochs,
        seed=seed,
    )


EXPERIMENT = Experiment(
    id="D1",
    title="METIS beside a random partition, data parallel",
    suites=("quick", "papers"),
    claim=Claim(
        paper="DistDGL (2020)",
        says="METIS is 2.14x faster than a random partition",
        setting="ogbn-products, 4 machines of 96 vCPUs, 100 Gbit/s, GraphSAGE 3 x 256, fan-out 15,10,5",
    ),
    prediction=(
        "With beta the bytes of METIS by those of random, counted beforehand from the same draws (in the "
        "report): 1 / ((1 - phi) + phi beta) when nothing is overlapped, 1 / max(1 - phi, beta) when "
        "all is; 1.5 to 2.5x at phi 0.65. At 1 Gbit/s less, as far as compute hides the network."
    ),
    how=(
        "4 servers of one rank, each with a quarter of this machine's cores. One clustered graph of mean "
        "in-degree 25 and 100 float32 features, cut at random and by METIS; the structure stays where the "
        "nodes are. GraphSAGE of 3 layers, fan-out 15,10,5. The rate is chosen so that random spends the "
        "share 0.65 of its time waiting for the network, and is the same for both; both again at 1 Gbit/s."
    ),
    build=build,
    note=(
        "It depends on the graph, and on how much of it a batch reaches. Here 93 % of the links stay in a "
        "community. A batch that reaches most of the graph pulls most of the other parts, however they are "
        "cut. Compute is that of half a core per server on two cores: the rate at which phi is 0.65 is "
        "then far below what a cluster has, and the ratio at a raw rate is less than at the matched one."
    ),
)
