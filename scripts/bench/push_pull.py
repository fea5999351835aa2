"""What the experiments with push-pull share: one graph, its cuts, who is compared, bytes foretold by phase.

The setting is the worked example of P3 (docs/strategies/push_pull.md) made small: fan-out 10 at the input
and 25 at the seeds, so that a batch has about 7 input rows (L0) for each row of layer 1 (D1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dglx_dist.data.synthetic import SyntheticConfig
from dglx_dist.planner.cost_model import break_even_width, column_bytes, row_bytes
from dglx_dist.planner.records import Rate
from dglx_dist.planner.workload import Survey
from dglx_dist.prepare import PartitionPlan
from scripts.bench import data
from scripts.bench.phase_table import PREDICTED_BYTES
from scripts.bench.predict import survey
from scripts.bench.records import BenchPlan, ExperimentPlan, Job, MatchedPhi, Ratio, Shape, Variant

PHI = 0.8
"""Of hashed data parallelism: the share of its time that P3's baseline spent on the network."""
SERVERS = 4
GIGABIT = Rate.parse("1gbit")

HOW = (
    "4 servers of one rank, each with a quarter of this machine's cores. One clustered graph of mean "
    "in-degree 25, cut by hash and by METIS, its structure on every server; GraphSAGE of 2 layers, fan-out "
    "10 at the input and 25 at the seeds, so that a batch has about 7 input rows for each row of layer 1. "
    "All variants have the same weights at the start; on the same cut they train on the same seeds and the "
    "same sampled blocks. The rate is chosen so that data parallelism on the hash cut spends the share 0.8 "
    "of its time waiting for the network."
)
NOTE = (
    "Data parallelism pulls its rows ahead, beside computing, so that at phi 0.8 its bytes alone take most "
    "of its time; the closed form adds the two. Servers have a fraction of a core each, and what push-pull "
    "adds to computing, a small block for each server in place of one large one, is paid at that pace."
)


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large, by suite."""

    nodes: int = 40_000
    degree: float = 25.0
    batch_size: int = 64
    steps: int = 8
    """Of an epoch."""
    epochs: int = 1


SIZES: Mapping[str, Size] = {"quick": Size(steps=4), "papers": Size()}


def size_of(plan: BenchPlan) -> Size:
    """Return the size that the suite asks for."""
    return SIZES.get(plan.suite, SIZES["papers"])


@dataclass(frozen=True, kw_only=True)
class Case:
    """One of those that are compared: what is trained on which cut, by which strategy, at which rate."""

    name: str
    rate: Rate | MatchedPhi
    cut: str = "hash"
    """How the graph is partitioned."""
    features: int = 100
    hidden: int = 16
    model: str = "sage"
    heads: int = 4
    fanouts: tuple[int, ...] = (10, 25)
    """Input-most first; -1: all."""
    batch_size: int = 0
    """Seeds per rank and step; 0: as the size says."""
    servers: int = SERVERS
    structure: str = "replicated"
    """Where the graph's structure is: with every server, or "partitioned"."""
    strategy: str = "data_parallel"
    options: Mapping[str, Any] = field(default_factory=dict)
    """The strategy's own."""
    moves: Literal["rows", "columns"] = "rows"
    """Which formula foretells its bytes: rows of features that are pulled, or sums of columns."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A quotient of two cases, with the bounds of the claim; what is predicted follows from bytes."""

    over: str
    under: str
    quantity: Any = "seconds"
    low: float | None = None
    high: float | None = None
    name: str = ""
    """Empty: "over / under"."""


def push_pull(depth: int = 1, *, structure: str = "push", **more: Any) -> dict[str, Any]:
    """Return what makes a case one of push-pull: strategy and options, the structure's way stated."""
    options = {"depth": depth, "structure": structure, **more}
    return {"strategy": "push_pull", "options": options, "moves": "columns"}


def matched(name: str) -> MatchedPhi:
    """Return the rate at which the case ``name`` has phi 0.8."""
    return MatchedPhi(phi=PHI, baseline=name)


def trio(
    hashed: str, name: str, *, low: float | None = None, **shared: Any
) -> tuple[list[Case], list[Compared]]:
    """Return data parallelism and push-pull at depths 1 and 3, at the rate that suits the first.

    Args:
        hashed: Name of data parallelism.
        name: What the names of the others say after "push_pull".
        low: Least ratio with which depth 1 reproduces the claim.
        shared: Fields of all three cases.
    """
    ours, deep, rate = f"push_pull, {name}", f"push_pull, depth 3, {name}", matched(hashed)
    cases = [
        Case(name=hashed, rate=rate, **shared),
        Case(name=ours, rate=rate, **push_pull(), **shared),
        Case(name=deep, rate=rate, **push_pull(3), **shared),
    ]
    compared = [
        Compared(over=hashed, under=ours, low=low),
        Compared(over=hashed, under=deep),
        Compared(over=ours, under=hashed, quantity="bytes_outside", name=f"bytes, {ours} / {hashed}"),
    ]
    return cases, compared


def plan_of(
    plan: BenchPlan, size: Size, cases: Sequence[Case], compared: Sequence[Compared], **facts: Any
) -> ExperimentPlan:
    """Return the experiment that compares ``cases``; makes datasets and counts bytes, which takes seconds.

    Raises:
        ConfigError: a case contradicts itself.
        JobError: the process that counts failed.
    """
    folders = _folders(plan, size, cases)
    params = {case.name: _params(case, size, plan.seed, folders) for case in cases}
    # Counted from the draws of data parallelism: push-pull trains on the same blocks.
    found = survey(params, {case.name: case.servers for case in cases})
    phases = {case.name: _phases(case, found[case.name]) for case in cases}
    by_name = {case.name: case for case in cases}
    return ExperimentPlan(
        variants=tuple(_variant(case, params[case.name]) for case in cases),
        ratios=tuple(_ratio(one, by_name, phases) for one in compared),
        facts={
            "datasets": {
                f"{cut}, {width} columns": data.facts(one) for (cut, width, _), one in folders.items()
            },
            "input rows for each row of layer 1": _by_blocks(
                cases, found, lambda one: one.input_rows / max(one.first_targets, 1)
            ),
            "remote share of input rows": _by_blocks(
                cases, found, lambda one: one.remote_rows / max(one.input_rows, 1)
            ),
            "break-even width, by the formula": _widths(cases, found),
            PREDICTED_BYTES: phases,
            **facts,
        },
    )


def graph_of(size: Size, features: int, seed: int) -> SyntheticConfig:
    """Return the graph of all experiments with push-pull, with this many columns of features."""
    return SyntheticConfig(
        nodes=size.nodes,
        degree=size.degree,
        features=features,
        homophily=0.95,
        locality=0.98,
        train_rate=SERVERS * size.steps * size.batch_size / size.nodes,
        seed=seed + 1,
    )


def cut_of(method: str, servers: int) -> PartitionPlan:
    """Return how it is partitioned."""
    return PartitionPlan(num_parts=servers, method=method)


def _folders(plan: BenchPlan, size: Size, cases: Sequence[Case]) -> dict[tuple[str, int, int], Path]:
    """Return the dataset by (cut, columns, servers)."""
    found: dict[tuple[str, int, int], Path] = {}
    for features in dict.fromkeys(case.features for case in cases):
        wanted = {(case.cut, case.servers) for case in cases if case.features == features}
        cuts = {f"{cut} {servers}": cut_of(cut, servers) for cut, servers in sorted(wanted)}
        made = data.prepare(graph_of(size, features, plan.seed), cuts, plan.work)
        found |= {(cut, features, servers): made[f"{cut} {servers}"] for cut, servers in sorted(wanted)}
    return found


def _params(
    case: Case, size: Size, seed: int, folders: Mapping[tuple[str, int, int], Path]
) -> dict[str, Any]:
    return {
        "data": str(folders[case.cut, case.features, case.servers]),
        "strategy": case.strategy,
        "options": dict(case.options),
        "model": case.model,
        "hidden": case.hidden,
        "heads": case.heads,
        "norm": "block",
        "fanouts": list(case.fanouts),
        "batch_size": case.batch_size or size.batch_size,
        "epochs": size.epochs,
        "max_steps": size.steps,
        "seed": seed,
        "structure": case.structure,
    }


def _phases(case: Case, found: Survey) -> dict[str, int]:
    if case.moves == "rows":
        return row_bytes(found)
    # Only here: models need DGL, which takes seconds to import, also where experiments are only listed.
    from dglx_dist.planner.model_shape import first_layer
    from dglx_dist.training.models import build_model

    classes = SyntheticConfig().classes
    model = build_model(case.model, case.features, case.hidden, classes, len(case.fanouts), 0.0, case.heads)
    return column_bytes(
        found,
        first_layer(model, model.layers[0], case.heads),
        group_size=int(case.options.get("group_size", 0)),
        pushed=case.options.get("structure") == "push",
    )


def _variant(case: Case, params: Mapping[str, Any]) -> Variant:
    job = Job(kind="train", params=params, warm={"warmup": 0, "epochs": 1})
    return Variant(name=case.name, shape=Shape(servers=case.servers), job=job, rate=case.rate)


def _ratio(one: Compared, cases: Mapping[str, Case], phases: Mapping[str, Mapping[str, int]]) -> Ratio:
    over, under = cases[one.over], cases[one.under]
    predicted: float | None
    if one.quantity == "bytes_outside":
        predicted = sum(phases[one.over].values()) / sum(phases[one.under].values())
    else:
        times = [_predicted_time(case, phases) for case in (over, under)]
        predicted = times[0] / times[1] if all(times) else None
    return Ratio(
        name=one.name or f"{one.over} / {one.under}",
        over=one.over,
        under=one.under,
        quantity=one.quantity,
        predicted=predicted,
        low=one.low,
        high=one.high,
    )


def _predicted_time(case: Case, phases: Mapping[str, Mapping[str, int]]) -> float:
    """Return its time by that of the baseline of its rate, for equal computing; 0 where nothing is foretold.

    (1 - phi) + phi beta with beta its bytes by the baseline's, and the larger of the two terms where
    several batches are in flight.
    """
    if not isinstance(case.rate, MatchedPhi):
        return 0.0
    network = PHI * sum(phases[case.name].values()) / sum(phases[case.rate.baseline].values())
    return max(1.0 - PHI, network) if int(case.options.get("depth", 1)) > 1 else 1.0 - PHI + network


def _widths(cases: Sequence[Case], found: Mapping[str, Survey]) -> dict[str, dict[str, float]]:
    """Return H* for each cut of GraphSAGE, once, with and without structure."""
    first = {(case.cut, case.servers): found[case.name] for case in reversed(cases) if case.model == "sage"}
    return {
        f"{cut}, {servers} servers": {
            "structure pushed": round(break_even_width(one), 1),
            "no structure": round(break_even_width(one, pushed=False), 1),
        }
        for (cut, servers), one in first.items()
    }


def _by_blocks(
    cases: Sequence[Case], found: Mapping[str, Survey], value: Callable[[Survey], float]
) -> dict[str, float]:
    """Return ``value`` for each kind of blocks that is drawn."""
    return {
        f"{case.cut}, fan-out {','.join(map(str, case.fanouts))}, {case.servers} servers": round(
            value(found[case.name]), 3
        )
        for case in cases
    }
