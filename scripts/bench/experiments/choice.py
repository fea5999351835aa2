"""A1: the regret of the automatic choice, over a grid in each cell of which every exact way to train runs.

In each cell one more run, under strategy ``auto``, chooses for itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from dglx_dist.data.partition.base import PartitionPlan
from dglx_dist.data.synthetic import SyntheticConfig
from dglx_dist.errors import ConfigError
from dglx_dist.planner.records import Rate
from dglx_dist.registry import AUTO
from scripts.bench import data
from scripts.bench.experiments.common import builds, training_variant
from scripts.bench.pool import do_alone
from scripts.bench.records import COUNTED_BYTES, BenchPlan, Cell, ExperimentPlan, Job, Ratio, Shape, Variant

SHAPE = Shape(servers=2, ranks_per_server=1)
MEDIAN, WORST = 1.03, 1.25
"""The aim: regret in the median and at worst."""
CUTS, RATES = ("random", "metis"), ("100mbit", "1gbit", "10gbit")
"""Partitioners and link rates of every family of cells."""
_PLANNED_S = 1800.0
_EPOCHS = range(2, 21)
"""Measured ones of a job; the first is the one whose bytes are predicted."""
_MEASURED_S = 0.6
"""Minimum seconds of all epochs of a job. Two epochs of 20 ms differed by a factor of 1.6 between runs."""
_MAX_SEEDS = 1000


@dataclass(frozen=True, kw_only=True)
class Family:
    """Cells that share graph and model."""

    name: str
    graph: SyntheticConfig
    unit: Literal["mini_batch", "full_graph"]
    model: str = "sage"
    layers: int = 2
    hidden: tuple[int, ...]
    fanouts: tuple[int, ...] | None = None
    """Fan-outs of mini-batches, starting at the input layer."""
    batch_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large a grid is."""

    nodes: int
    """Number of nodes of the graph for mini-batches."""
    batch_size: int
    full_graph_nodes: int
    """Number of nodes of the graph for full-graph training with 2 layers."""
    deep_nodes: int
    """The same with 14."""
    hidden: tuple[int, ...]
    deep_hidden: tuple[int, ...] = (16, 64)


SIZES: Mapping[str, Size] = {
    "quick": Size(
        nodes=15_000, batch_size=250, full_graph_nodes=5_000, deep_nodes=1_500, hidden=(8,), deep_hidden=(16,)
    ),
    "papers": Size(nodes=24_000, batch_size=300, full_graph_nodes=10_000, deep_nodes=4_000, hidden=(8, 256)),
    "large": Size(
        nodes=60_000, batch_size=500, full_graph_nodes=20_000, deep_nodes=6_000, hidden=(8, 64, 256)
    ),
}


def families_of(size: Size) -> tuple[Family, ...]:
    """Return mini-batches and whole graphs of 2 layers and of 14."""
    wide = SyntheticConfig(
        nodes=size.nodes, degree=15, features=256, homophily=0.95, locality=0.98, train_rate=0.15, seed=1
    )
    deep = SyntheticConfig(
        nodes=size.deep_nodes, degree=12, features=128, homophily=0.95, locality=0.98, train_rate=0.5, seed=2
    )
    sampled: dict[str, Any] = {"fanouts": (10, 25), "batch_size": size.batch_size}
    full = replace(wide, nodes=size.full_graph_nodes, train_rate=0.5)
    shape: dict[str, Any] = {"model": "resgcn", "layers": 14, "hidden": size.deep_hidden}
    flat: dict[str, Any] = {"hidden": size.hidden}
    return (
        Family(name="mini-batches, 2 layers", graph=wide, unit="mini_batch", **flat, **sampled),
        Family(name="whole graph, 2 layers", graph=full, unit="full_graph", **flat),
        Family(name="whole graph, 14 layers", graph=deep, unit="full_graph", **shape),
    )


def plan_of(
    plan: BenchPlan, families: Sequence[Family], cuts: Sequence[str] = CUTS, rates: Sequence[str] = RATES
) -> ExperimentPlan:
    """Return the experiment; makes datasets and counts every cell, which takes a minute or more."""
    settings = {
        f"{family.name}, {cut}, {hidden}": (family, _plan_params(plan, family, hidden, folder))
        for family in families
        for cut, folder in _folders(plan, family, cuts).items()
        for hidden in family.hidden
    }
    params = {name: {"plan": setting, "rates": list(rates)} for name, (_, setting) in settings.items()}
    ways_of = do_alone(Job(kind="plan", params=params), timeout_s=_PLANNED_S)
    variants: list[Variant] = []
    cells: list[Cell] = []
    counted: dict[str, int] = {}
    for (name, (family, setting)), rate in product(settings.items(), rates):
        ways = ways_of[name][rate]
        if not ways:
            raise ConfigError(f"{name}: no way to train fits the memory of this machine; take a smaller grid")
        fastest = min(way["seconds"] for way in ways.values())
        ways = {**ways, AUTO: _automatic(family, fastest)}
        named = {way: f"{name}, {rate}: {way}" for way in ways}
        for way, params in ways.items():
            job, folder, limit = _params(family, setting, params), Path(setting["data"]), Rate.parse(rate)
            variants.append(training_variant(named[way], folder, job, shape=SHAPE, rate=limit))
            if params["bytes"] is not None:
                counted[named[way]] = params["bytes"]
        cells.append(Cell(name=f"{name}, {rate}", chosen=named[AUTO], ways=tuple(named.values())))
    regret: dict[str, Any] = {"over": cells[0].chosen, "under": cells[0].chosen, "cells": tuple(cells)}
    return ExperimentPlan(
        variants=tuple(variants),
        ratios=(
            Ratio(name="regret, median of all cells", **regret, predicted=1.0, high=MEDIAN),
            Ratio(name="regret, worst of all cells", **regret, predicted=1.0, high=WORST, of_cells="worst"),
        ),
        facts={COUNTED_BYTES: counted},
    )


def _automatic(family: Family, seconds: float) -> dict[str, Any]:
    is_full_graph = family.unit == "full_graph"
    options = {"unit": family.unit, "caches": False}
    return {"strategy": AUTO, "options": options, "whole": is_full_graph, "seconds": seconds, "bytes": None}


def _folders(plan: BenchPlan, family: Family, cuts: Sequence[str]) -> dict[str, Path]:
    parts = {cut: PartitionPlan(num_parts=SHAPE.servers, method=cut) for cut in cuts}
    return data.prepare(family.graph, parts, plan.work)


def _plan_params(plan: BenchPlan, family: Family, hidden: int, folder: Path) -> dict[str, Any]:
    # Fields of the planner's PlanConfig.
    names = ("model", "layers", "fanouts", "batch_size", "unit")
    return {name: getattr(family, name) for name in names} | {
        "data": str(folder),
        "hidden": hidden,
        "servers": SHAPE.servers,
        "ranks_per_server": SHAPE.ranks_per_server,
        "here": True,
        "dry_batches": 0,
        "structure": "replicated",
        "seed": plan.seed,
    }


def _params(family: Family, asked: Mapping[str, Any], way: Mapping[str, Any]) -> dict[str, Any]:
    is_full_graph = way["whole"]
    epochs = min(max(round(_MEASURED_S / way["seconds"]), _EPOCHS[0]), _EPOCHS[-1])
    return {name: asked[name] for name in ("model", "hidden", "structure", "seed")} | {
        "strategy": way["strategy"],
        "options": way["options"],
        "dropout": 0.5,
        "fanouts": [-1] * family.layers if is_full_graph else list(family.fanouts or ()),
        "batch_size": _MAX_SEEDS if is_full_graph else family.batch_size,
        "warmup": 1,
        "epochs": epochs,
    }


BUILDS = builds(["A1"], lambda _, plan, size: plan_of(plan, families_of(size)), SIZES)
