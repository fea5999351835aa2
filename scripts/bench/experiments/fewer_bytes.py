"""B1 and B2: what caches of remote rows, covers, narrower rows and late halos leave to send."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dglx_dist.data.partition.base import PartitionPlan
from dglx_dist.data.synthetic import SyntheticConfig
from dglx_dist.planner.records import Rate
from scripts.bench import data
from scripts.bench.experiments.common import (
    GIGABIT,
    builds,
    bytes_quotient,
    clustered_graph,
    quotient,
    training_variant,
)
from scripts.bench.records import BenchPlan, ExperimentPlan, Line, MatchedPhi, Shape, Variant

NONE, AHEAD = "no cache", "lookahead"
POLICIES = ("degree", "vip", AHEAD)
ALPHAS = (0.05, 0.1, 0.2)
MAIN_ALPHA = 0.1
"""At which rates and cuts are compared."""
RATES = (Rate.parse("300mbit"), GIGABIT, Rate.parse("10gbit"))
PHI = 0.8
WAYS: Mapping[str, Mapping[str, Any]] = {
    "sources": {},
    "cover": {"aggregate": "cover"},
    "bfloat16": {"wire_dtype": "bfloat16"},
    "int8": {"wire_dtype": "int8"},
    "int4": {"wire_dtype": "int4"},
    "cover, int8": {"aggregate": "cover", "wire_dtype": "int8"},
    "stale": {"staleness": 1},
}
"""Option of full_graph by the name of its variant."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large, by suite."""

    nodes: int
    """Number of nodes of the graph for mini-batches."""
    full_graph_nodes: int
    """Number of nodes of the graph for full-graph training."""
    batch_size: int = 1000
    epochs: int = 1
    curve_epochs: int = 30


SIZES: Mapping[str, Size] = {
    "quick": Size(nodes=50_000, full_graph_nodes=5_000, batch_size=250, curve_epochs=5),
    "papers": Size(nodes=1_000_000, full_graph_nodes=20_000),
}


def caches(plan: BenchPlan, size: Size) -> ExperimentPlan:
    """Return B1: policies by memory on two servers, by rate, and on four servers cut at random."""
    graph = SyntheticConfig(nodes=size.nodes, seed=plan.seed + 1)
    cuts = {
        name: PartitionPlan(num_parts=parts, method=name) for name, parts in (("metis", 2), ("random", 4))
    }
    folders = data.prepare(graph, cuts, plan.work)
    shapes = {name: Shape(servers=cut.num_parts) for name, cut in cuts.items()}
    variants: dict[str, Variant] = {}

    def add(cut: str, policy: str, alpha: float = MAIN_ALPHA, rate: Rate = GIGABIT) -> str:
        words = [policy if policy == NONE else f"{policy} {alpha}"]
        words += [str(rate)] if rate != GIGABIT else []
        words += ["4 servers at random"] if cut == "random" else []
        params = {
            **{"hidden": 16, "fanouts": [25, 10], "batch_size": size.batch_size, "epochs": size.epochs},
            **{"structure": "replicated", "seed": plan.seed},
            **({} if policy == NONE else {"cache": policy, "alpha": alpha}),
        }
        name = ", ".join(words)
        variants[name] = training_variant(name, folders[cut], params, shape=shapes[cut], rate=rate)
        return name

    lines = [Line(what="alpha", name=NONE, points=tuple((alpha, add("metis", NONE)) for alpha in ALPHAS))]
    for policy in POLICIES:
        points = tuple((alpha, add("metis", policy, alpha)) for alpha in ALPHAS)
        lines.append(Line(what="alpha", name=policy, points=points))
    for policy in (NONE, *POLICIES[1:]):
        points = tuple((rate.bits_per_s / 1e6, add("metis", policy, rate=rate)) for rate in RATES)
        lines.append(Line(what="rate", name=policy, points=points))
    ahead, none = add("metis", AHEAD), add("metis", NONE)
    scattered = [add("random", policy) for policy in (NONE, *POLICIES[1:])]
    return ExperimentPlan(
        variants=tuple(variants.values()),
        ratios=(
            bytes_quotient(ahead, none, predicted=0.5, high=0.5),
            *(
                bytes_quotient(add("metis", AHEAD, alpha), add("metis", baseline_policy, alpha), high=1.0)
                for alpha in ALPHAS[:2]
                for baseline_policy in POLICIES[:-1]
            ),
            quotient(over=ahead, under=none, predicted=0.6, high=0.6),
            bytes_quotient(scattered[-1], scattered[0]),
            quotient(over=scattered[-1], under=scattered[0]),
        ),
        lines=tuple(lines),
        facts={"datasets": {name: data.facts(folder) for name, folder in folders.items()}},
    )


def whole_graphs(plan: BenchPlan, size: Size) -> ExperimentPlan:
    """Return B2: ways to send fewer border rows, or to send them later, at a matched rate."""
    # A power law with hubs, as of the web: there covers are much smaller than borders.
    graph = clustered_graph(plan, nodes=size.full_graph_nodes, features=64, exponent=2.1, train_rate=0.5)
    cuts = {name: PartitionPlan(num_parts=4, method=name) for name in ("random", "metis")}
    folders = data.prepare(graph, cuts, plan.work)
    rate, shape = MatchedPhi(phi=PHI, baseline="sources, random"), Shape(servers=4)
    params = {"strategy": "full_graph", "hidden": 64, "fanouts": [-1] * 3, "epochs": size.epochs + 1}
    params |= {"structure": "replicated", "dropout": 0.0, "seed": plan.seed}
    curve = {"epochs": size.curve_epochs, "accuracy_every": 5}
    variants = [
        training_variant(
            f"{name}, {cut}",
            folders[cut],
            {**params, "options": options},
            shape=shape,
            rate=rate,
            curve=curve if cut == "random" else None,
        )
        for cut, ways in (("random", WAYS), ("metis", {name: WAYS[name] for name in ("sources", "cover")}))
        for name, options in ways.items()
    ]
    base = variants[0].name
    return ExperimentPlan(
        variants=tuple(variants),
        ratios=(
            bytes_quotient("cover, random", base, high=0.6),
            bytes_quotient("cover, metis", "sources, metis"),
            quotient(over="cover, random", under=base),
            quotient(over="int8, random", under=base),
            # The longer of computing and exchange, and 15 %.
            quotient(over="stale, random", under=base, predicted=PHI, high=1.15 * PHI),
        ),
        facts={"datasets": {name: data.facts(folder) for name, folder in folders.items()}},
    )


def _plan_of(name: str, plan: BenchPlan, size: Size) -> ExperimentPlan:
    return {"B1": caches, "B2": whole_graphs}[name](plan, size)


BUILDS = builds(("B1", "B2"), _plan_of, SIZES)
