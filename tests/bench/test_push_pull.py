"""Experiments with push-pull: each builds its jobs, and the bytes it predicts are those of a real run."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dglx_dist.planner.costs.base import Survey
from dglx_dist.planner.records import Rate
from dglx_dist.strategies.base import STRATEGIES
from scripts.bench.experiments import push_pull
from scripts.bench.experiments.push_pull import STOCK, Case, Size
from scripts.bench.jobs import train
from scripts.bench.jobs.params import TrainParams, read_params
from scripts.bench.peers.workload import Launch
from scripts.bench.records import PREDICTED_BYTES, BenchPlan
from scripts.json_records import read_record
from tests.bench.helpers import context, jobs_of, survey
from tests.helpers.ranks import run_ranks

TINY = Size(nodes=1200, degree=8, batch_size=8, steps=2)
RATE = Rate.parse("1gbit")


@pytest.fixture
def count_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Surveys take seconds; where only the jobs matter, one by hand stands for all."""

    def by_hand(params: Mapping[str, Any], servers: Mapping[str, int]) -> dict[str, Survey]:
        count_bytes = {"remote_rows": 300, "edges": 900, "feature_bytes": 122_400, "gradient_bytes": 50_000}
        count_bytes |= {"first_targets": 60, "first_edges": 600}
        return {
            name: survey(seeds_per_rank=[16] * servers[name], **count_bytes)
            for name in params
            if servers[name]
        }

    monkeypatch.setattr(push_pull, "survey", by_hand)


@pytest.mark.usefixtures("count_bytes")
@pytest.mark.parametrize("name", push_pull.BUILDS)
def test_every_experiment_builds_its_jobs(name: str, bench: BenchPlan) -> None:
    plan = push_pull.plan_at(name, bench, TINY)
    predicted = plan.facts[PREDICTED_BYTES]
    for variant, message in jobs_of(name, plan):
        assert (message.strategy == "push_pull") is ("features" not in predicted[variant.name])
        assert sum(predicted[variant.name].values()) > 0
    assert any(ratio.predicted is not None for ratio in plan.ratios)


@pytest.mark.usefixtures("count_bytes")
def test_stock_distdgl_trains_on_the_same_cut(bench: BenchPlan) -> None:
    plan = push_pull.plan_at("P1", bench, TINY)
    by_name = {variant.name: variant for variant in plan.variants}
    stock: Launch = read_record(Launch, by_name[STOCK].job.params)
    ours = read_params(TrainParams, by_name["hash, 16"].job.params)
    assert (stock.workload.hidden, list(stock.workload.fanouts)) == (ours.hidden, list(ours.fanouts))
    assert stock.workload.batch_size == ours.batch_size
    assert Path(stock.data).parent.name.removeprefix("dgl-") == Path(ours.data).name.removeprefix(
        "synthetic-"
    )


def train_all(jobs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """On every rank: what each job moved by phase, and which blocks it drew."""
    results = {}
    for name, params in jobs.items():
        extra = train.run(params, context())["extra"]
        # How the ranks agree (barriers, counts) is nobody's payload.
        extra["bytes_outside_by_phase"].pop("control", None)
        drawn = {key: extra[key] for key in ("input_rows", "edges", "input_ids", "seeds_per_server")}
        results[name] = {"phases": extra["bytes_outside_by_phase"], "drawn": drawn}
    return results


def cases() -> list[Case]:
    """On two servers: rows, and columns by every model and way that the formulas know."""
    two: dict[str, Any] = {"rate": RATE, "servers": 2}
    rows = [
        Case(name="sage", **two),
        Case(name="wide", hidden=400, **two),
        Case(name="apart", structure="partitioned", **two),
        Case(name="gat", model="gat", heads=4, **two),
    ]
    if "push_pull" not in STRATEGIES.names():
        return rows
    ours = push_pull.push_pull
    return [
        *rows,
        Case(name="columns of sage", **two, **ours()),
        Case(name="columns of wide", hidden=400, **two, **ours()),
        Case(name="columns, 3 in flight", **two, **ours(3)),
        Case(name="columns, split", **two, **ours(3, weights="split")),
        Case(name="columns, drawn by all", **two, **ours(structure="resample")),
        Case(name="columns, apart", structure="partitioned", **two, **ours()),
        Case(name="columns of gat", model="gat", heads=4, **two, **ours()),
        Case(name="columns of gcn", model="gcn", **two, **ours()),
        Case(name="columns of sgc", model="sgc", **two, **ours(3)),
        Case(name="columns of 3 layers", fanouts=(3, 2, 2), **two, **ours()),
        Case(name="columns of all neighbours", fanouts=(-1, -1), batch_size=2, **two, **ours()),
        Case(name="columns, groups of 1", **two, **ours(group_size=1)),
    ]


@pytest.mark.wide
def test_bytes_are_those_that_the_formulas_predict(bench: BenchPlan) -> None:
    plan = push_pull.plan_of(bench, TINY, cases(), [])
    jobs = {variant.name: dict(variant.job.params) for variant in plan.variants}
    record = run_ranks(train_all, 2, args=(jobs,), ranks_per_server=1)[0]
    predicted = plan.facts[PREDICTED_BYTES]
    assert {name: value["phases"] for name, value in record.items()} == predicted
    assert predicted["sage"].keys() == {"features", "gradients", "labels"}
    # The same seeds and blocks, by whatever strategy.
    for name in record:
        if not {"apart", "3 layers", "all neighbours"} & set(re.split(", | of ", name)):
            assert record[name]["drawn"] == record["sage"]["drawn"]


@pytest.mark.wide
def test_push_pull_moves_less_below_the_break_even_width_and_more_above(bench: BenchPlan) -> None:
    plan = push_pull.plan_of(
        bench,
        TINY,
        [
            Case(name="hash", rate=RATE),
            *(
                Case(name=f"columns, {width}", rate=RATE, hidden=width, **push_pull.push_pull())
                for width in (16, 200)
            ),
        ],
        [],
    )
    (width,) = {fact["structure pushed"] for fact in plan.facts["break-even width, by the formula"].values()}
    assert 16 < width < 200
    moved = {
        name: sum(count for phase, count in phases.items() if phase not in ("gradients", "labels"))
        for name, phases in plan.facts[PREDICTED_BYTES].items()
    }
    assert moved["columns, 16"] < moved["hash"] < moved["columns, 200"]
    # Between the two it is a line, and the break-even width is where it crosses.
    at = 16 + (200 - 16) * (moved["hash"] - moved["columns, 16"]) / (
        moved["columns, 200"] - moved["columns, 16"]
    )
    assert at == pytest.approx(width, abs=0.1)
