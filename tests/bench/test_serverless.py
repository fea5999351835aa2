"""Experiments with training in intervals: jobs that can be read, bytes that are those of a real run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dglx_dist.data.synthetic import SyntheticConfig, generate
from dglx_dist.records import NODE_TYPE
from dglx_dist.strategies.serverless.options import read_lambda_options
from scripts.bench.experiments.serverless import BUILDS, Case, Size, plan_at, plan_of, project_features
from scripts.bench.jobs import bounded as job
from scripts.bench.jobs.params import IntervalParams, read_params
from scripts.bench.records import PREDICTED_BYTES, BenchPlan, check_plan
from tests.bench.helpers import context, epoch
from tests.helpers.ranks import run_ranks

TINY = Size(nodes=600, degree=8, features=12, hidden=8, intervals=2, workers=2, epochs=2, latency_s=0.0)


@pytest.mark.parametrize("name", BUILDS)
def test_every_experiment_builds_its_jobs(name: str, bench: BenchPlan) -> None:
    plan = plan_at(name, bench, TINY)
    check_plan(name, plan)
    for variant in plan.variants:
        for turn in range(2):
            params = read_params(IntervalParams, variant.job.turn(turn).params)
            assert Path(params.data).is_dir()
            read_lambda_options(params.options)
        read_params(IntervalParams, {**variant.job.params, **variant.job.warm})
    assert plan.ratios


def test_repetitions_of_y1_differ_by_their_seed_alone(bench: BenchPlan) -> None:
    jobs = [variant.job for variant in plan_at("Y1", bench, TINY).variants]
    assert [jobs[0].turn(number).params["seed"] for number in range(6)] == [0, 1, 2, 3, 4, 0]
    assert {**jobs[0].turn(1).params, "seed": 0} == jobs[0].params
    modes = [item.params["options"].get("mode") for item in jobs]
    assert modes == ["pipe", "async", "async"]


def run_all(jobs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """On every rank: what each job reports."""
    return {name: job.run(params, context()) for name, params in jobs.items()}


@pytest.mark.wide
def test_what_a_run_moves_is_predicted_to_the_byte(bench: BenchPlan) -> None:
    cases = [
        Case(name=name, options={"executor": "local", "workers": 1, **options})
        for name, options in {
            "on": {},
            "fusion": {"fusion": False},
            "rematerialise": {"rematerialise": False},
            "streaming": {"streaming": False},
            "off": {"fusion": False, "rematerialise": False, "mode": "async", "staleness": 1},
        }.items()
    ]
    plan = plan_of(bench, TINY, cases, ())
    jobs = {
        variant.name: {**variant.job.params, "target": 0.01, "accuracy": True} for variant in plan.variants
    }
    reports = run_ranks(run_all, 2, args=(jobs,), ranks_per_server=1)[0]
    for name, predicted in plan.facts[PREDICTED_BYTES].items():
        extra = reports[name]["extra"]
        phases = {
            phase: count for phase, count in extra["bytes_outside_by_phase"].items() if phase != "control"
        }
        assert phases == {phase: TINY.epochs * count for phase, count in predicted.items()}, name
        assert extra["epochs_to_target"] == 1
        assert 0 < extra["test_accuracy"] <= 1
        assert "simulated" in extra["dollars_are"]
    exact = [name for name in reports if name != "off"]
    assert len({tuple(reports[name]["extra"]["losses"]) for name in exact}) == 1
    # 2 ranks x 2 intervals x 3 tasks, and 4 where the last one is not fused.
    assert reports["on"]["extra"]["invocations"] == 12
    assert reports["fusion"]["extra"]["invocations"] == 16


def test_epochs_are_counted_to_the_first_that_is_good_enough() -> None:
    records = [epoch(train_accuracy=accuracy) for accuracy in (0.5, 0.7, 0.6, 0.9)]
    assert [job.epochs_to(records, target) for target in (0.5, 0.7, 0.8, 0.95, None)] == [1, 2, 4, None, None]


def test_projections_keep_directions_and_splits_cover_all_nodes() -> None:
    graph = generate(SyntheticConfig(nodes=600, degree=8, features=40, communities=10))
    record = project_features(graph, 32).node_data[NODE_TYPE]
    assert record["feat"].shape == (600, 32)
    masks = [np.asarray(record[name]) for name in ("train_mask", "val_mask", "test_mask")]
    assert [int(mask.sum()) for mask in masks] == [396, 60, 144]
    assert (sum(mask.astype(int) for mask in masks) == 1).all()
    # Rows have unit length before, and nearly so after.
    assert np.linalg.norm(np.asarray(record["feat"]), axis=1).mean() == pytest.approx(1.0, abs=0.05)
