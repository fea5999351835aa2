"""Figures that no measured experiment has: where something is missing, lies on a bound or was not reached.

Those of all measured ones are compared with docs/results by test_pages.py: medians, ratios, most verdicts.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.driver import find_distinct
from scripts.bench.experiments import choice
from scripts.bench.figures import (
    Spread,
    accuracy_in_words,
    figures_of,
    judge,
    judge_experiment,
    phase_rows,
    ratio_figures,
    time_to_accuracy,
    variant_rows,
)
from scripts.bench.jobs.params import TrainParams, read_params
from scripts.bench.records import (
    COUNTED_BYTES,
    PREDICTED_BYTES,
    BenchPlan,
    Cell,
    ExperimentPlan,
    Measurement,
    Outcome,
    Ratio,
    check_plan,
)
from tests.bench.helpers import EXPERIMENT, epoch_of, measurements, outcome, variant, with_curves


def test_what_was_not_measured_has_no_figures() -> None:
    inputs = outcome()
    for fields in ({"wire": None}, {"outside": 0, "wire": 0}):
        bare = replace(inputs, measurements=measurements("random", [1.0], **fields))
        assert [variant_row["wire_by_ledger"] for variant_row in variant_rows(bare)] == [None]
    for nothing in (replace(inputs, plan=None), replace(inputs, measurements=())):
        assert variant_rows(nothing) == []
    assert ratio_figures(replace(inputs, plan=None)) == ()
    # A curve without epochs is no measurement of time.
    curve = replace(inputs.measurements[0], repetition=5, epochs=(), accuracy=((1.0, 0.5),))
    assert variant_rows(replace(inputs, measurements=(*inputs.measurements, curve))) == variant_rows(inputs)
    half = replace(inputs, measurements=measurements("random", [1.0, 2.0]))
    assert [ratio_figure.value for ratio_figure in ratio_figures(half)] == [None]
    assert "measurement is missing" in judge_experiment(EXPERIMENT, half).why
    silent = replace(
        outcome(ratio=Ratio(name="r", over="random", under="metis", quantity="bytes_outside")),
        measurements=(*measurements("random", [1.0]), *measurements("metis", [1.0], outside=0)),
    )
    assert [ratio_figure.value for ratio_figure in ratio_figures(silent)] == [None]


def test_a_target_that_one_repetition_did_not_reach_leaves_no_ratio() -> None:
    def ratios_at_target(*epochs: int | None) -> list[Spread | None]:
        inputs = outcome(ratio=Ratio(name="R", over="random", under="metis", quantity="epochs_to_target"))
        message = iter((*epochs, *(10,) * 5))
        measured = tuple(
            replace(measurement, extra={"epochs_to_target": next(message)})
            for measurement in inputs.measurements
        )
        return [ratio_figure.value for ratio_figure in ratio_figures(replace(inputs, measurements=measured))]

    assert ratios_at_target(10, 11, 12, 13, 14) == [Spread(median=1.2, low=1.1, high=1.3)]
    # Of those that came there the median would be 1.15, though two of five took longer than was looked at.
    assert ratios_at_target(10, 11, 12, None, None) == [None]


def test_time_to_the_best_accuracy_that_all_reach() -> None:
    inputs = outcome()
    assert (time_to_accuracy(inputs), accuracy_in_words(inputs)) == (None, "")
    slow, fast = (next(m for m in inputs.measurements if m.variant == name) for name in ("random", "metis"))
    curves = (
        replace(slow, accuracy=((2.0, 0.5), (4.0, 0.75), (6.0, 0.8))),
        replace(fast, accuracy=((1.0, float("nan")), (2.0, 0.7), (3.0, 0.75))),
    )
    assert time_to_accuracy(replace(inputs, measurements=curves)) == (0.75, {"random": 4.0, "metis": 3.0})
    assert accuracy_in_words(with_curves(outcome(simulated="slept"))) == (
        "Time to a validation accuracy of 87.5 %, which all reach: random 3 s simulated, metis 3 s simulated."
    )


def ratio(low: float | None, high: float | None = None) -> Ratio:
    return Ratio(name="speed-up", over="random", under="metis", low=low, high=high)


TWICE = (2.0,) * 5


@pytest.mark.parametrize(
    ("slow", "low", "high", "word"),
    [
        (TWICE, 2.0, 2.0, "reproduced"),
        (TWICE, 2.01, None, "not reproduced"),
        (TWICE, 1.5, 1.99, "not reproduced"),
        (TWICE, None, None, "no bound"),
        # Medians 1.2 and 1.0; the quartiles of the pairs are 0.9 and 1.3: they hold 1.
        ((0.8, 0.9, 1.2, 1.3, 1.4), 1.1, None, "not reproduced"),
        # Bounds on both sides of one claim no difference, and the range may hold it.
        ((0.9, 0.95, 1.0, 1.05, 1.1), 0.9, 1.1, "reproduced"),
        ((1.0,) * 5, 1.0, 1.15, "reproduced"),
        ((1.0,) * 5, 1.0, None, "not reproduced"),
        # A loss is claimed by bounds below one.
        ((0.7, 0.8, 0.9, 1.1, 1.2), None, 0.95, "not reproduced"),
        ((0.7, 0.8, 0.9, 0.9, 0.9), None, 0.95, "reproduced"),
    ],
)
def test_judges_ratios(slow: tuple[float, ...], low: float | None, high: float | None, word: str) -> None:
    (figures,) = ratio_figures(outcome(slow=slow, fast=(1.0,) * 5, ratio=ratio(low, high)))
    assert judge(figures).word == word


def test_nothing_is_judged_without_limited_links_or_at_a_phi_that_was_not_reached() -> None:
    inputs = outcome(ratio=ratio(1.5))
    for loopback in (outcome(kind="loopback", ratio=ratio(1.5)), replace(inputs, network={})):
        assert judge_experiment(EXPERIMENT, loopback).word == "links not limited"
    # One server has no link to limit.
    alone = tuple(replace(item, shape=replace(item.shape, servers=1)) for item in inputs.plan.variants)
    on_one = replace(inputs, plan=replace(inputs.plan, variants=alone), network={})
    assert judge_experiment(EXPERIMENT, on_one).word == "reproduced"
    for phi, ratios_at_target in ((0.8, False), (0.64, True)):
        note = {"phi": phi, "calibration": {"wanted": 0.65, "within_tolerance": ratios_at_target}}
        network = {name: {**value, **note} for name, value in inputs.network.items()}
        result = judge_experiment(EXPERIMENT, replace(inputs, network=network))
        assert result.word == ("reproduced" if ratios_at_target else "phi not matched")
        assert ("phi is 0.80, not 0.65" in result.why) is not ratios_at_target


def with_phases(name: str, phases: dict[str, int], **drawn: int) -> Measurement:
    extra: dict[str, Any] = {"bytes_outside_by_phase": phases, **drawn}
    return Measurement(variant=name, repetition=0, epochs=(epoch_of(1.0), epoch_of(1.0)), extra=extra)


def test_bytes_of_an_epoch_stand_beside_the_formula() -> None:
    facts = {PREDICTED_BYTES: {"random": {"features": 4_000_000}, "columns": {"activations": 1_000_000}}}
    inputs = Outcome(
        experiment="D1",
        status="measured",
        plan=ExperimentPlan(variants=(variant("random"), variant("columns")), facts=facts),
        measurements=(
            # Rows are those of a repetition in which no task was launched again.
            with_phases("random", {"features": 9_000_000}, relaunched=1),
            with_phases("random", {"features": 8_000_000, "control": 70}),
            with_phases("columns", {"activations": 2_000_002}),
        ),
    )
    heads = ["MB per epoch", "activations", "features", "total", "by the formula", "difference, bytes"]
    cells = [
        ["random", "0.000", "4.000", "4.000", "4.000", "0"],
        ["columns", "1.000", "0.000", *["1.000"] * 2, "+1"],
    ]
    assert phase_rows(inputs) == [dict(zip(heads, row, strict=True)) for row in cells]
    # They are in a table of their own.
    assert figures_of(EXPERIMENT, inputs)["facts"] == []


CELLS = tuple(
    Cell(name=name, chosen=f"{name}: a", ways=(f"{name}: a", f"{name}: b")) for name in ("1", "2", "3")
)
SECONDS = {"1: a": 1.0, "1: b": 2.0, "2: a": 1.2, "2: b": 1.0, "3: a": 1.6, "3: b": 1.0}


def judge_cells(of: str, high: float, *, counted: int = 2) -> Outcome:
    """The chosen ways take 1, 1.2 and 1.6 of the fastest, 50 MB an epoch each."""
    inputs = outcome()
    chosen = ("1: a", "1: a")
    regret = Ratio(name="regret", over=chosen[0], under=chosen[1], high=high, cells=CELLS, of_cells=of)  # type: ignore[arg-type]
    counts = {"1: a": 50_000_000, "2: a": 49_999_999}
    plan = replace(
        inputs.plan,
        variants=tuple(replace(variant(name), rate=None) for name in SECONDS),
        ratios=(regret,),
        facts={COUNTED_BYTES: dict(list(counts.items())[:counted])},
    )
    result = tuple(
        measurement for name, value in SECONDS.items() for measurement in measurements(name, [value, value])
    )
    network = {name: {"kind": "namespaces", "external": "1gbit"} for name in SECONDS}
    return replace(inputs, plan=plan, measurements=result, network=network)


def test_regret_is_of_all_cells_and_predictions_are_judged_beside_it() -> None:
    """One of two variants with counted bytes moved other bytes, then none did."""
    full = judge_cells("median", 1.15)
    without = replace(
        full,
        measurements=tuple(measurement for measurement in full.measurements if measurement.variant != "2: b"),
    )
    assert judge(ratio_figures(full)[0]).word == "not reproduced"
    assert judge(ratio_figures(without)[0]).why.startswith("a cell could not")
    assert judge_experiment(EXPERIMENT, judge_cells("median", 1.25)).word == "partly reproduced"
    assert judge_experiment(EXPERIMENT, judge_cells("median", 1.25, counted=1)).word == "reproduced"


@pytest.mark.wide
def test_a_grid_is_planned_by_real_dry_runs(tmp_path: Path) -> None:
    size = choice.Size(nodes=800, batch_size=40, full_graph_nodes=600, deep_nodes=600, hidden=(8,))
    families, rates = choice.families_of(size)[:2], ("100mbit", "10gbit")
    request = BenchPlan(suite="papers", out=tmp_path, work=tmp_path / "work")
    plan = choice.plan_of(request, families, ("random",), rates)
    check_plan("A1", plan)
    cells = plan.ratios[0].cells
    assert [cell.name for cell in cells] == [
        f"{family.name}, random, 8, {rate}" for family in families for rate in rates
    ]
    assert all(cell.chosen in cell.ways for cell in cells)
    assert {item.job.params["strategy"] for item in plan.variants} == {
        "auto", "data_parallel", "push_pull", "full_graph", "shared_preload", "cooperative",
    }  # fmt: skip
    for item in plan.variants:
        params = read_params(TrainParams, {**item.job.params, **item.job.warm})
        if params.strategy == "auto":
            continue
        assert (params.strategy in ("data_parallel", "push_pull")) == (list(params.fanouts) == [10, 25])
        assert plan.facts[COUNTED_BYTES][item.name] > 0
    # At another bandwidth the same is done.
    assert len(find_distinct(plan.variants)) == len(plan.variants) / 2
