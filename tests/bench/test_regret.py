"""A grid of choices: its cells from a real dry run, its figures and tables from outcomes made by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from dglx_dist.errors import ConfigError
from scripts.bench import results
from scripts.bench.driver import check_plan, differing
from scripts.bench.experiments.choice import Size, grid_of, plan_of
from scripts.bench.figures import nearness, ratio_figures, regret_tables
from scripts.bench.jobs.params import TrainParams, read_params
from scripts.bench.pages import judge, judge_experiment, section
from scripts.bench.records import COUNTED_BYTES, PREDICTED_SECONDS, BenchPlan, Cell, Outcome, Ratio
from tests.bench.measured import EXPERIMENT, measurements, outcome, variant

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


def test_regret_alone_does_not_reproduce_what_was_foretold() -> None:
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
    size = Size(nodes=800, batch_size=40, whole_nodes=600, deep_nodes=600, hidden=(8,))
    grid = grid_of(size)
    grid = replace(grid, families=grid.families[:2], cuts=("random",), rates=("100mbit", "10gbit"))
    plan = plan_of(BenchPlan(suite="papers", out=tmp_path, work=tmp_path / "work"), grid)
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
