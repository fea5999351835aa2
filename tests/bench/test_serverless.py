"""Experiments with training in intervals: jobs that can be read, bytes that are those of a real run."""

import math
from dataclasses import replace
from pathlib import Path
from statistics import median, stdev
from typing import Any

import numpy as np
import pytest

from dglx_dist.data.synthetic import SyntheticConfig, generate
from dglx_dist.records import NODE_TYPE
from dglx_dist.strategies.serverless.options import read_lambda_options
from dglx_dist.strategies.serverless.tasks import Address, Direction, Secrets, Task, TaskKey
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
            "no_pipe": {"mode": "no_pipe"},
            "async": {"mode": "async", "staleness": 1},
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
    exact = [name for name in reports if name != "async"]
    assert len({tuple(reports[name]["extra"]["losses"]) for name in exact}) == 1
    # 2 ranks x 2 intervals x 3 tasks.
    assert reports["on"]["extra"]["invocations"] == 12


KEYS = [TaskKey(epoch=n, step=1, interval=3, direction=Direction.FORWARD) for n in range(2000)]
ADDRESS = Address(rank=0, host="here", endpoint="tcp://127.0.0.1:1")


def draw(attempt: int = 0, **latency: float) -> list[float]:
    params = IntervalParams(data="unused", **latency)
    task = Task(
        key=KEYS[0], rows=1, first_row=0, seed=0, program="0" * 64, graph_server=ADDRESS,
        parameter_server=ADDRESS, secrets=Secrets(secret="s"), timeout_s=1.0, attempt=attempt,
    )  # fmt: skip
    return [pause.seconds for key in KEYS if (pause := job.draw_pause(params, replace(task, key=key)))]


def test_the_logarithm_of_pauses_is_normal_around_the_median() -> None:
    drawn = draw(latency_s=0.02)
    assert median(drawn) == pytest.approx(0.02, rel=0.05)
    assert stdev(map(math.log, drawn)) == pytest.approx(0.5, rel=0.05)
    assert drawn == draw(latency_s=0.02) != draw(latency_s=0.02, attempt=1)
    assert set(draw(latency_s=0.02, latency_sigma=0.0)) == {0.02}
    assert draw() == []


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
