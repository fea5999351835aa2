"""The closed form beside what was measured, and what is done once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scripts.bench.figures import closed_form_table, once_table
from scripts.bench.records import KAPPA, PREDICTED_ONCE, Measurement, Outcome
from scripts.bench.speedup_model import predicted_time
from tests.bench.measured import epoch
from tests.bench.outcomes import plan_of


def measured(name: str, seconds: float, sent: int, preloaded: int) -> Measurement:
    extra = {
        "bytes_outside_by_phase": {"halo": sent},
        "bytes_outside_before": {"preload": preloaded, "halo": 5},
        "seconds_before": 1.5,
    }
    return Measurement(variant=name, repetition=0, epochs=(epoch(seconds),), extra=extra)


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
