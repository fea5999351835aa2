"""Experiments with full-graph training: each builds its jobs, and predicts the bytes of a real run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dglx_dist.planner.model_shape import topology_of
from dglx_dist.strategies.full_graph.cost import exchanged_bytes
from scripts.bench.experiments import full_graph
from scripts.bench.experiments.full_graph import (
    BASE,
    BASE_PP,
    COOPERATIVE,
    EAS,
    PRELOAD,
    PRELOAD_PP,
    RANKS_PER_SERVER,
    SERVERS,
    STOCK,
    Size,
    gradient_bytes,
)
from scripts.bench.jobs import train
from scripts.bench.records import PREDICTED_BYTES, PREDICTED_ONCE, BenchPlan, MatchedPhi
from tests.bench.helpers import context, jobs_of
from tests.helpers.ranks import run_ranks
from tests.planner.hand_made import shape_of_kind

TINY = Size(nodes=2400, epochs=1, curve_epochs=1, deep_layers=4)
SHAPE = replace(shape_of_kind("sage", 10, 3, 5, 3), parameters=8, tensors=2)


@pytest.mark.parametrize("name", full_graph.BUILDS)
def test_every_experiment_builds_its_jobs(name: str, bench: BenchPlan) -> None:
    plan = full_graph.plan_at(name, bench, TINY)
    predicted = plan.facts[PREDICTED_BYTES]
    for variant, _ in jobs_of(name, plan):
        assert variant.shape.servers * variant.shape.ranks_per_server == 4
        if isinstance(variant.rate, MatchedPhi):
            assert sum(predicted[variant.name].values()) > 0
    unpredicted = [one.name for one in plan.ratios if one.predicted is None]
    assert all("gbit" in name or name.startswith(STOCK) for name in unpredicted)


def test_bytes_by_hand() -> None:
    """Layers take 10, 3 and 3 columns; 5, 4 and 2 pairs; 4 bytes a number."""
    assert exchanged_bytes([5, 4, 2], SHAPE, use_pp=False) == {"halo": 4 * (50 + 18), "halo_gradients": 72}
    assert exchanged_bytes([5, 4, 2], SHAPE, use_pp=True) == {"halo": 72, "halo_gradients": 72}
    learns = replace(shape_of_kind("sage", 3, 3, 5, 3), first_learns=True)
    assert exchanged_bytes([5, 4, 2], learns, use_pp=False) == {"halo": 132, "halo_gradients": 132}
    assert exchanged_bytes([7], replace(SHAPE, layers=SHAPE.layers[:1]), use_pp=True) == {}
    # 4 ranks send 60 bytes each; those of ranks 1 and 3 leave their server.
    assert gradient_bytes(SHAPE, topology_of(2, 2)) == 120
    assert gradient_bytes(SHAPE, topology_of(1, 4)) == 0


def train_all(jobs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """On every rank: what each job tells besides times."""
    return {name: train.run({**params, "warmup": 1}, context())["extra"] for name, params in jobs.items()}


def test_bytes_and_work_are_those_that_are_predicted(bench: BenchPlan) -> None:
    flat = full_graph.Setting(phi=0.8, features=20, layers=2, hidden=8, raw=())
    deep = full_graph.Setting(phi=0.8, features=20, layers=3, hidden=8, model="resgcn", label="deep", raw=())
    size = replace(TINY, nodes=1200)
    plans = [full_graph.plan_of(bench, size, [flat], [])]
    # Others of deep models are as the flat ones.
    plans.append(full_graph.plan_of(bench, size, [deep], [], (BASE, BASE_PP, PRELOAD)))
    jobs = {variant.name: dict(variant.job.params) for plan in plans for variant in plan.variants}
    found = run_ranks(
        train_all,
        SERVERS * RANKS_PER_SERVER,
        args=(jobs,),
        ranks_per_server=RANKS_PER_SERVER,
        timeout_s=240.0,
    )[0]
    sent = {name: dict(extra["bytes_outside_by_phase"]) for name, extra in found.items()}
    for phases in sent.values():
        # How the ranks agree is nobody's payload.
        phases.pop("control", None)
    assert sent == {name: one for plan in plans for name, one in plan.facts[PREDICTED_BYTES].items()}
    once = {name: one for plan in plans for name, one in plan.facts[PREDICTED_ONCE].items()}
    assert set(once) == set(jobs) - {EAS, COOPERATIVE}
    assert once == {name: found[name]["bytes_outside_before"].get("preload", 0) for name in once}
    counted = full_graph.count_setting(bench, size, flat)
    # In the first epoch; there is nothing of co-batches among the bytes of the later ones.
    assert found[COOPERATIVE]["bytes_outside_before"]["preload"] == counted.co_batch_features > 0
    edges = {name: found[name]["edges"] for name in (BASE, BASE_PP, PRELOAD, PRELOAD_PP, EAS, COOPERATIVE)}
    assert edges[BASE] == edges[BASE_PP] == sum(counted.edges[BASE])
    assert edges[PRELOAD] == edges[PRELOAD_PP] == sum(counted.edges[PRELOAD])
    assert edges[COOPERATIVE] == sum(counted.edges[COOPERATIVE])
    # Few nodes have more than 15 foreign in-neighbours here.
    assert 0.99 * sum(counted.edges[EAS]) <= edges[EAS] <= sum(counted.edges[EAS])
