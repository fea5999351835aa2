"""Figures of measurements: links, medians, ratios, bytes by phase, the closed form, regret."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dglx_dist.errors import ConfigError
from dglx_dist.planner.records import Rate
from scripts.bench import results
from scripts.bench.driver import check_plan, differing
from scripts.bench.experiments import choice
from scripts.bench.figures import (
    Spread,
    closed_form_table,
    crossing,
    different_blocks,
    link_of,
    nearness,
    once_table,
    phase_table,
    ratio_figures,
    regret_tables,
    spread,
    time_to_accuracy,
    variant_figures,
)
from scripts.bench.jobs.params import TrainParams, read_params
from scripts.bench.pages import judge, judge_experiment, section
from scripts.bench.records import (
    COUNTED_BYTES,
    KAPPA,
    PREDICTED_BYTES,
    PREDICTED_ONCE,
    PREDICTED_SECONDS,
    BenchPlan,
    Cell,
    ExperimentPlan,
    Job,
    Measurement,
    Outcome,
    Ratio,
)
from scripts.bench.speedup_model import predicted_time
from tests.bench.helpers import EXPERIMENT, epoch_of, measurements, outcome, plan_of, variant, with_curves


def test_the_rate_that_was_set_is_told_with_its_phi() -> None:
    link = link_of(outcome(), variant("random"))
    assert (link.rate, link.phi, link.limited) == ("96mbit", 0.65, True)
    assert link.words == "96mbit, phi 0.65"


@pytest.mark.parametrize(
    ("noted", "words"),
    [
        ({"kind": "namespaces", "external": None}, "no limit"),
        ({"kind": "namespaces"}, "1gbit"),
        ({"kind": "loopback", "external": None}, "not limited (plain loopback)"),
        ({}, "not noted"),
    ],
)
def test_a_fixed_rate_beside_what_was_noted(noted: dict[str, object], words: str) -> None:
    fixed = replace(variant("random"), rate=Rate.parse("1gbit"))
    assert link_of(replace(outcome(), network={"random": noted}), fixed).words == words


def test_a_spread_is_median_and_quartiles() -> None:
    assert spread([5.0, 1.0, 2.0, 4.0, 3.0]) == Spread(median=3.0, low=2.0, high=4.0)
    assert spread([7.0]) == Spread(median=7.0, low=7.0, high=7.0)


def test_a_variant_is_the_median_of_its_repetitions() -> None:
    random, metis = variant_figures(outcome(slow=(2.0, 2.2, 2.1, 2.4, 1.9)))
    assert (random.variant.name, metis.variant.name) == ("random", "metis")
    assert random.seconds == Spread(median=2.1, low=2.0, high=2.2)
    assert random.phases["wait_s"].median == pytest.approx(1.05)
    assert random.phases["fetch_s"].median == pytest.approx(1.05)
    assert (random.bytes_inside, random.bytes_outside) == (10_000_000, 40_000_000)
    assert random.repetitions == 5
    assert random.peak_bytes == 300_000_004


def test_the_cards_count_all_epochs_and_the_figure_is_of_one() -> None:
    random, metis = variant_figures(outcome())
    assert random.bytes_wire == 42_000_000
    assert random.wire_over_ledger == pytest.approx(1.05)
    assert metis.wire_over_ledger == pytest.approx(1.1)


def test_without_cards_or_bytes_there_is_no_wire_ratio() -> None:
    given = outcome()
    bare = replace(given, measurements=measurements("random", [1.0], wire=None))
    assert [one.wire_over_ledger for one in variant_figures(bare)] == [None]
    alone = replace(given, measurements=measurements("random", [1.0], outside=0, wire=0))
    assert [one.wire_over_ledger for one in variant_figures(alone)] == [None]


def test_a_ratio_is_the_quotient_of_medians_within_the_quartiles_of_pairs() -> None:
    # Pairs: 2, 3, 1, 2, 2; medians 4 and 2.
    (figures,) = ratio_figures(outcome(slow=(4.0, 6.0, 2.0, 4.0, 4.0), fast=(2.0, 2.0, 2.0, 2.0, 2.0)))
    assert figures.value == Spread(median=2.0, low=2.0, high=2.0)
    (wide,) = ratio_figures(outcome(slow=(1.0, 2.0, 3.0, 4.0, 5.0), fast=(1.0,) * 5))
    assert wide.value == Spread(median=3.0, low=2.0, high=4.0)


def test_a_drift_of_the_machine_cancels_in_pairs() -> None:
    drifting = (1.0, 2.0, 4.0, 8.0, 16.0)
    (figures,) = ratio_figures(outcome(slow=[2 * one for one in drifting], fast=drifting))
    assert figures.value == Spread(median=2.0, low=2.0, high=2.0)


@pytest.mark.parametrize(("quantity", "value"), [("bytes_outside", 4.0), ("samples_per_second", 0.5)])
def test_ratios_of_other_quantities(quantity: str, value: float) -> None:
    ratio = Ratio(name="r", over="random", under="metis", quantity=quantity)  # type: ignore[arg-type]
    (figures,) = ratio_figures(outcome(ratio=ratio))
    assert figures.value is not None
    assert figures.value.median == pytest.approx(value)


def test_a_ratio_without_a_measurement_or_over_nothing_has_no_value() -> None:
    given = outcome()
    half = replace(given, measurements=measurements("random", [1.0, 2.0]))
    assert [one.value for one in ratio_figures(half)] == [None]
    ratio = Ratio(name="r", over="random", under="metis", quantity="bytes_outside")
    silent = replace(
        outcome(ratio=ratio),
        measurements=(*measurements("random", [1.0]), *measurements("metis", [1.0], outside=0)),
    )
    assert [one.value for one in ratio_figures(silent)] == [None]


def test_a_target_that_one_repetition_did_not_reach_leaves_no_ratio() -> None:
    def reached(*epochs: int | None) -> list[Spread | None]:
        given = outcome(ratio=Ratio(name="R", over="random", under="metis", quantity="epochs_to_target"))
        told = iter((*epochs, *(10,) * 5))
        measured = tuple(replace(one, extra={"epochs_to_target": next(told)}) for one in given.measurements)
        return [one.value for one in ratio_figures(replace(given, measurements=measured))]

    assert reached(10, 11, 12, 13, 14) == [Spread(median=1.2, low=1.1, high=1.3)]
    # Of those that came there the median would be 1.15, though two of five took longer than was looked at.
    assert reached(10, 11, 12, None, None) == [None]


def test_a_ratio_of_an_unknown_variant_is_refused_by_name() -> None:
    wrong = Ratio(name="speed-up", over="random", under="mettis")
    with pytest.raises(ConfigError, match=r"mettis.*\['random', 'metis'\]"):
        ratio_figures(outcome(ratio=wrong))


def test_what_was_not_measured_has_no_figures() -> None:
    assert variant_figures(replace(outcome(), plan=None)) == ()
    assert ratio_figures(replace(outcome(), plan=None)) == ()
    assert variant_figures(replace(outcome(), measurements=())) == ()


def test_a_curve_without_epochs_is_no_measurement_of_time() -> None:
    given = outcome()
    curve = replace(given.measurements[0], repetition=5, epochs=(), accuracy=((1.0, 0.5),))
    with_curve = replace(given, measurements=(*given.measurements, curve))
    assert variant_figures(with_curve) == variant_figures(given)


def test_time_to_the_best_accuracy_that_all_reach() -> None:
    given = outcome()
    assert time_to_accuracy(given) is None
    slow, fast = (next(m for m in given.measurements if m.variant == name) for name in ("random", "metis"))
    curves = (
        replace(slow, accuracy=((2.0, 0.5), (4.0, 0.75), (6.0, 0.8))),
        replace(fast, accuracy=((1.0, float("nan")), (2.0, 0.7), (3.0, 0.75))),
    )
    times = time_to_accuracy(replace(given, measurements=curves))
    assert times is not None
    assert times.accuracy == 0.75
    assert times.seconds == {"random": 4.0, "metis": 3.0}
    assert time_to_accuracy(with_curves(given)) is not None


PARAMS = {"data": "d", "fanouts": [3, 2]}


def with_phases(name: str, phases: dict[str, int], **drawn: int) -> Measurement:
    """Two epochs."""
    extra: dict[str, Any] = {"bytes_outside_by_phase": phases, **drawn}
    return Measurement(variant=name, repetition=0, epochs=(epoch_of(1.0), epoch_of(1.0)), extra=extra)


def outcome_with(*measurements: Measurement, facts: dict[str, Any]) -> Outcome:
    variants = tuple(
        replace(variant(name), job=Job(kind="train", params=PARAMS)) for name in ("random", "columns")
    )
    return Outcome(
        experiment="D1",
        status="measured",
        plan=ExperimentPlan(variants=variants, facts=facts),
        measurements=measurements,
    )


TWO_PHASES = outcome_with(
    with_phases("random", {"features": 8_000_000, "control": 70}, input_rows=10, edges=20, input_ids=30),
    with_phases("columns", {"activations": 2_000_002}, input_rows=10, edges=20, input_ids=31),
    facts={PREDICTED_BYTES: {"random": {"features": 4_000_000}, "columns": {"activations": 1_000_000}}},
)


def lines_of(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()]


def test_bytes_of_an_epoch_stand_beside_the_formula() -> None:
    head, _, random, columns = lines_of(phase_table(TWO_PHASES))
    assert head == ["MB per epoch", "activations", "features", "total", "by the formula", "difference, bytes"]
    assert random == ["random", "0.000", "4.000", "4.000", "4.000", "0"]
    assert columns == ["columns", "1.000", "0.000", "1.000", "1.000", "+1"]


def test_bytes_are_of_a_repetition_in_which_no_task_was_launched_again() -> None:
    again = with_phases("random", {"features": 9_000_000}, relaunched=1)
    given = replace(TWO_PHASES, measurements=(again, *TWO_PHASES.measurements))
    assert phase_table(given) == phase_table(TWO_PHASES)


def test_without_a_prediction_there_is_no_table() -> None:
    assert phase_table(outcome_with(*TWO_PHASES.measurements, facts={})) == ""
    assert phase_table(outcome_with(facts={PREDICTED_BYTES: {"random": {"features": 1}}})) == ""


def test_a_report_has_the_table_and_not_the_fact() -> None:
    page = section(EXPERIMENT, TWO_PHASES)
    assert phase_table(TWO_PHASES) in page
    assert PREDICTED_BYTES not in page


def test_other_blocks_are_told() -> None:
    assert different_blocks(TWO_PHASES) == ["columns"]
    same = with_phases("columns", {}, input_rows=10, edges=20, input_ids=30)
    assert different_blocks(outcome_with(TWO_PHASES.measurements[0], same, facts={})) == []


def test_lines_cross_between_two_points() -> None:
    assert crossing([(16, 10.0, 2.0), (32, 10.0, 6.0), (64, 10.0, 14.0)]) == pytest.approx(48.0)
    assert crossing([(16, 10.0, 2.0), (32, 10.0, 6.0)]) is None
    assert crossing([]) is None


def measured(name: str, seconds: float, sent: int, preloaded: int) -> Measurement:
    extra = {
        "bytes_outside_by_phase": {"halo": sent},
        "bytes_outside_before": {"preload": preloaded, "halo": 5},
        "seconds_before": 1.5,
    }
    return Measurement(variant=name, repetition=0, epochs=(epoch_of(seconds),), extra=extra)


FOUND = Outcome(
    experiment="G1",
    status="measured",
    network={"fb": {"phi": 0.75}, "preload": {"phi": 0.75}},
    plan=replace(
        plan_of("fb", "preload"),
        facts={KAPPA: {"fb": 1.0, "preload": 1.2}, PREDICTED_ONCE: {"preload": 3_000_000}},
    ),
    measurements=(measured("fb", 4.0, 100, 0), measured("preload", 2.0, 10, 3_000_001)),
)


def rows(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()][2:]


def test_time_is_work_and_bytes() -> None:
    assert predicted_time(0.75, 1.0, 1.0) == 1.0
    assert predicted_time(0.75, 1.2, 0.1) == pytest.approx(0.3 + 0.075)


def test_the_gain_stands_beside_the_formula() -> None:
    base, preload = rows(closed_form_table(FOUND))
    assert base == ["fb", "0.75", "1.00", "1.000", "1.00", "1.00"]
    assert preload == ["preload", "0.75", "1.20", "0.100", "2.67", "2.00"]


def test_what_is_done_once_stands_beside_the_formula() -> None:
    base, preload = rows(once_table(FOUND))
    assert base == ["fb", "1.50", "0.000", "-", "-"]
    assert preload == ["preload", "1.50", "3.000", "3.000", "1"]


def test_without_facts_there_are_no_tables() -> None:
    bare = replace(FOUND, plan=plan_of("fb", "preload"))
    assert closed_form_table(bare) == once_table(bare) == ""
    nothing = replace(FOUND, measurements=())
    assert closed_form_table(nothing) == once_table(nothing) == ""


CELLS = (
    Cell(name="one", chosen="one: a", ways=("one: a", "one: b")),
    Cell(name="two", chosen="two: a", ways=("two: a", "two: b")),
    Cell(name="three", chosen="three: a", ways=("three: a", "three: b")),
)
SECONDS = {"one: a": 1.0, "one: b": 2.0, "two: a": 1.2, "two: b": 1.0, "three: a": 1.6, "three: b": 1.0}


def judged(of: str, high: float, **seconds: float) -> Outcome:
    """The chosen ways take 1, 1.2 and 1.6 of the fastest, 50 MB an epoch each."""
    given = outcome()
    assert given.plan is not None
    took = SECONDS | {name.replace("_", ": "): value for name, value in seconds.items()}
    ratio = Ratio(
        name="regret",
        over="one: a",
        under="one: a",
        high=high,
        cells=CELLS,
        of_cells=of,  # type: ignore[arg-type]
    )
    plan = replace(
        given.plan,
        variants=tuple(replace(variant(name), rate=None) for name in took),
        ratios=(ratio,),
        facts={
            PREDICTED_SECONDS: {name: 1.1 * value for name, value in took.items()},
            COUNTED_BYTES: {"one: a": 50_000_000, "two: a": 49_999_999},
        },
    )
    found = tuple(one for name, value in took.items() for one in measurements(name, [value, value]))
    return replace(given, plan=plan, measurements=found, network={name: {} for name in took})


def test_regret_is_of_medians_over_the_cells() -> None:
    (median,) = ratio_figures(judged("median", 1.15))
    assert median.value is not None
    assert median.value.median == pytest.approx(1.2)
    (worst,) = ratio_figures(judged("worst", 1.5))
    assert worst.value is not None
    assert worst.value.median == pytest.approx(1.6)
    assert judge(replace(median, limited=True)).word == "not reproduced"
    assert judge(replace(worst, limited=True, ratio=replace(worst.ratio, high=1.7))).word == "reproduced"


def test_regret_alone_does_not_reproduce_what_was_predicted() -> None:
    """Seconds are 10 % off; of two ways whose bytes were counted one moved others, then none."""
    whole = judged("median", 1.25)
    limited = replace(whole, network={name: {"kind": "namespaces", "external": "1gbit"} for name in SECONDS})
    assert limited.plan is not None
    assert judge_experiment(EXPERIMENT, limited).word == "partly reproduced"
    facts = {**limited.plan.facts, COUNTED_BYTES: {"one: a": 50_000_000}}
    right = replace(limited, plan=replace(limited.plan, facts=facts))
    assert judge_experiment(EXPERIMENT, right).word == "reproduced"
    far = {**facts, PREDICTED_SECONDS: {name: 1.3 * value for name, value in SECONDS.items()}}
    found = judge_experiment(EXPERIMENT, replace(limited, plan=replace(limited.plan, facts=far)))
    assert found.word == "partly reproduced"
    assert "30 % off" in found.why


def test_a_way_without_measurement_leaves_no_regret() -> None:
    whole = judged("median", 1.15)
    without = replace(whole, measurements=tuple(one for one in whole.measurements if one.variant != "two: b"))
    assert [one.value for one in ratio_figures(without)] == [None]
    assert judge(ratio_figures(without)[0]).why.startswith("a cell could not")


def test_tables_have_a_row_for_each_cell_and_say_how_near_it_was() -> None:
    whole = judged("median", 1.15)
    table, words = regret_tables(whole)
    assert "| two | a | 1.32 | 1.2 | b 1 | 1.20 |" in table
    assert "| one | a | 1.1 | 1 |  | 1.00 |" in table
    assert "10 % off in the median" in words
    found = nearness(whole)
    assert found is not None
    assert (found.variants, found.counted, found.differ, found.is_near) == (6, 2, 1, False)
    assert regret_tables(outcome()) == []
    page = section(EXPERIMENT, whole)
    assert table in page
    assert "chosen / fastest, median of 3 cells" in page
    assert PREDICTED_SECONDS not in page


def test_cells_come_back_from_a_result(tmp_path: Path) -> None:
    whole = judged("worst", 1.5)
    back = results.read_one(results.write(tmp_path, whole))
    assert back is not None
    assert back.plan is not None
    assert whole.plan is not None
    assert back.plan.ratios == whole.plan.ratios
    missing = replace(whole.plan, variants=whole.plan.variants[:-1])
    with pytest.raises(ConfigError, match="no variant is called three: b"):
        check_plan("A1", missing)


@pytest.mark.wide
def test_a_grid_is_planned_by_real_dry_runs(tmp_path: Path) -> None:
    size = choice.Size(nodes=800, batch_size=40, whole_nodes=600, deep_nodes=600, hidden=(8,))
    grid = choice.grid_of(size)
    grid = replace(grid, families=grid.families[:2], cuts=("random",), rates=("100mbit", "10gbit"))
    plan = choice.plan_of(BenchPlan(suite="papers", out=tmp_path, work=tmp_path / "work"), grid)
    check_plan("A1", plan)
    cells = plan.ratios[0].cells
    assert [cell.name for cell in cells] == [
        f"{family.name}, random, 8, {rate}" for family in grid.families for rate in grid.rates
    ]
    assert all(cell.chosen in cell.ways for cell in cells)
    assert {one.job.params["strategy"] for one in plan.variants} == {
        "data_parallel", "push_pull", "full_graph", "shared_preload", "cooperative",
    }  # fmt: skip
    for one in plan.variants:
        told = read_params(TrainParams, {**one.job.params, **one.job.warm})
        assert (told.strategy in ("data_parallel", "push_pull")) == (list(told.fanouts) == [10, 25])
        assert plan.facts[PREDICTED_SECONDS][one.name] > 0
        assert plan.facts[COUNTED_BYTES][one.name] > 0
    # At another bandwidth the same is done.
    assert len(differing(plan.variants)) == len(plan.variants) / 2
