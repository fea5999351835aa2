"""Experiments with full-graph training: each builds its jobs, and predicts the bytes of a real run."""

from dataclasses import replace
from typing import Any

import pytest

from scripts.bench.experiments import full_graph
from scripts.bench.experiments.full_graph import (
    BASE,
    BASE_PP,
    COOPERATIVE,
    EAS,
    PRELOAD,
    RANKS_PER_SERVER,
    SERVERS,
    STOCK,
    Size,
)
from scripts.bench.jobs import train
from scripts.bench.records import PREDICTED_BYTES, PREDICTED_ONCE, BenchPlan, MatchedPhi
from tests.bench.helpers import context, jobs_of
from tests.helpers.ranks import run_ranks

TINY = Size(nodes=2400, epochs=1, curve_epochs=1, deep_layers=4)


@pytest.mark.parametrize("name", full_graph.BUILDS)
def test_every_experiment_builds_its_jobs(name: str, bench: BenchPlan) -> None:
    plan = full_graph.plan_at(name, bench, TINY)
    predicted = plan.facts[PREDICTED_BYTES]
    for variant, _ in jobs_of(name, plan):
        assert variant.shape.servers * variant.shape.ranks_per_server == 4
        if isinstance(variant.rate, MatchedPhi):
            assert sum(predicted[variant.name].values()) > 0
    unpredicted = [ratio.name for ratio in plan.ratios if ratio.predicted is None]
    assert all("gbit" in name or name.startswith(STOCK) for name in unpredicted)


def train_all(jobs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """On every rank: what each job tells besides times."""
    return {name: train.run({**params, "warmup": 1}, context())["extra"] for name, params in jobs.items()}


@pytest.mark.wide
def test_bytes_and_work_are_those_that_are_predicted(bench: BenchPlan) -> None:
    flat = full_graph.Setting(phi=0.8, features=20, layers=2, hidden=8, raw=())
    deep = full_graph.Setting(phi=0.8, features=20, layers=3, hidden=8, model="resgcn", label="deep", raw=())
    size = replace(TINY, nodes=1200)
    plans = [full_graph.plan_of(bench, size, [flat], [])]
    # Others of deep models are as the flat ones.
    plans.append(full_graph.plan_of(bench, size, [deep], [], (BASE, BASE_PP, PRELOAD)))
    jobs = {variant.name: dict(variant.job.params) for plan in plans for variant in plan.variants}
    result = run_ranks(
        train_all,
        SERVERS * RANKS_PER_SERVER,
        args=(jobs,),
        ranks_per_server=RANKS_PER_SERVER,
        timeout_s=240.0,
    )[0]
    sent = {name: dict(extra["bytes_outside_by_phase"]) for name, extra in result.items()}
    for phases in sent.values():
        # How the ranks agree is nobody's payload.
        phases.pop("control", None)
    assert sent == {name: fact for plan in plans for name, fact in plan.facts[PREDICTED_BYTES].items()}
    once = {name: fact for plan in plans for name, fact in plan.facts[PREDICTED_ONCE].items()}
    assert set(once) == set(jobs) - {COOPERATIVE}
    assert once[PRELOAD] >= once[EAS] > 0
    assert once == {name: result[name]["bytes_outside_before"].get("preload", 0) for name in once}
    counted = full_graph.count_setting(bench, size, flat)
    assert result[COOPERATIVE]["bytes_outside_before"]["preload"] == counted.once[COOPERATIVE] > 0
    assert {name: result[name]["edges"] for name in counted.edges} == {
        name: sum(of_servers) for name, of_servers in counted.edges.items()
    }
