"""PEER1 to PEER4: stock DistDGL, a dense embedding under DDP and PyG beside data parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from dglx_dist.data.partition.base import PartitionOptions, PartitionPlan
from dglx_dist.data.synthetic import SyntheticConfig
from scripts.bench import data
from scripts.bench.experiments.common import GIGABIT, bytes_quotient
from scripts.bench.peers.data import copy_of, launch_of, launch_variant
from scripts.bench.peers.launch import versions
from scripts.bench.records import BenchPlan, ExperimentPlan, Ratio, Shape

TWO_SERVERS = Shape(servers=2, cpus=1.0)
ONE_SERVER = Shape(servers=1, ranks_per_server=2, cpus=2.0)
_LARGE = {"hidden": 256, "fanouts": (15, 10, 5)}


_SLOW = {"rate": GIGABIT}
_TUNED = {"allocator": "tuned"}
_Variants = tuple[tuple[str, str, Mapping[str, Any]], ...]
_BOTH: _Variants = (("stock", "stock", {}), ("ours", "ours", {}))
_BOTH_SLOW: _Variants = (("stock, 1 Gbit/s", "stock", _SLOW), ("ours, 1 Gbit/s", "ours", _SLOW))


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Programs and options that one experiment launches."""

    nodes: int
    features: int = 100
    training: Mapping[str, Any]
    """More of ``peers.workload.Workload``."""
    variants: _Variants
    """Name, system and settings of its launch, and ``rate`` where the link is limited."""
    ratios: tuple[Ratio, ...]
    shape: Shape = TWO_SERVERS


def _cache(alpha: float) -> dict[str, Any]:
    return {"options": {"cache": alpha}}


def _time(name: str, over: str, under: str, predicted: float) -> Ratio:
    return Ratio(name=name, over=over, under=under, predicted=predicted, high=1.0)


_OURS_OVER_STOCK = "time, ours over stock"
_AT_GIGABIT = _time("time at 1 Gbit/s, ours over stock", "ours, 1 Gbit/s", "stock, 1 Gbit/s", 0.55)
_CACHED_AT_GIGABIT = "time at 1 Gbit/s with a halo cache over stock"
_CACHED = "ours, halo cache, 1 Gbit/s"
COMPARISONS: Mapping[str, Comparison] = {
    "PEER1": Comparison(
        nodes=1_000_000,
        training={},
        variants=(
            *_BOTH,
            ("ours, halo cache", "ours", _cache(1.0)),
            *_BOTH_SLOW,
            (_CACHED, "ours", {**_cache(1.0), **_SLOW}),
        ),
        ratios=(
            _time(_OURS_OVER_STOCK, "ours", "stock", 0.53),
            bytes_quotient("ours", "stock", "bytes, ours over stock", predicted=0.94, high=1.05),
            _time("time with a halo cache over stock", "ours, halo cache", "stock", 0.47),
            _AT_GIGABIT,
            _time(_CACHED_AT_GIGABIT, _CACHED, "stock, 1 Gbit/s", 0.32),
        ),
    ),
    "PEER2": Comparison(
        nodes=200_000,
        training=_LARGE,
        variants=(
            *_BOTH,
            ("stock, tuned", "stock", _TUNED),
            ("ours, tuned", "ours", _TUNED),
            *_BOTH_SLOW,
            (_CACHED, "ours", {**_cache(0.5), **_SLOW}),
        ),
        ratios=(
            _time(_OURS_OVER_STOCK, "ours", "stock", 0.64),
            bytes_quotient("ours", "stock", "bytes, ours over stock", predicted=0.89, high=1.05),
            _time("time, both with a tuned allocator", "ours, tuned", "stock, tuned", 0.85),
            _AT_GIGABIT,
            _time(_CACHED_AT_GIGABIT, _CACHED, "stock, 1 Gbit/s", 0.5),
        ),
    ),
    "PEER3": Comparison(
        nodes=200_000,
        features=4,
        training={"embedding": 64, "hidden": 64, "fanouts": (10, 5)},
        variants=(*_BOTH, ("dense under DDP", "dense", {}), *_BOTH_SLOW),
        ratios=(
            _time(_OURS_OVER_STOCK, "ours", "stock", 0.41),
            _time("time, ours over dense", "ours", "dense under DDP", 0.31),
            bytes_quotient("ours", "dense under DDP", "bytes, ours over dense", predicted=0.1, high=0.2),
            _AT_GIGABIT,
        ),
    ),
    "PEER4": Comparison(
        nodes=200_000,
        training=_LARGE,
        variants=(
            ("PyG", "pyg", {}),
            ("PyG, 1 worker", "pyg", {"options": {"workers": 1}}),
            ("PyG, tuned", "pyg", _TUNED),
            ("ours", "ours", {}),
            ("ours, tuned", "ours", _TUNED),
        ),
        ratios=(
            _time("time, ours over PyG", "ours", "PyG", 0.7),
            _time("time, ours over PyG with a worker", "ours", "PyG, 1 worker", 0.7),
            _time("time, both with a tuned allocator", "ours, tuned", "PyG, tuned", 0.8),
        ),
        shape=ONE_SERVER,
    ),
}


def plan_of(comparison: Comparison, plan: BenchPlan) -> ExperimentPlan:
    """Partition the graph for each system. Each repetition launches a new program."""
    graph = SyntheticConfig(
        nodes=comparison.nodes, degree=25, features=comparison.features, classes=47, train_rate=0.1, seed=0
    )
    options = PartitionOptions(balance=("train",))
    cut = PartitionPlan(num_parts=comparison.shape.servers, seed=0, options=options)
    variants = []
    for name, system, settings in comparison.variants:
        launch_options = dict(settings)
        rate = launch_options.pop("rate", None)
        launch = launch_of(system, graph, cut, plan.work, comparison.training, **launch_options)
        variants.append(launch_variant(name, launch, shape=comparison.shape, rate=rate))
    facts = {**data.facts(copy_of("ours", graph, cut, plan.work)), "versions": versions()}
    return ExperimentPlan(variants=tuple(variants), ratios=comparison.ratios, facts=facts)


BUILDS = {name: partial(plan_of, comparison) for name, comparison in COMPARISONS.items()}
