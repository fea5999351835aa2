from dataclasses import replace
from typing import Any

import pytest

from scripts.bench.figures import crossing, different_blocks, phase_table
from scripts.bench.pages import section
from scripts.bench.records import PREDICTED_BYTES, ExperimentPlan, Job, Measurement, Outcome
from tests.bench.measured import EXPERIMENT, epoch, variant

PARAMS = {"data": "d", "fanouts": [3, 2]}


def measured(name: str, phases: dict[str, int], **drawn: int) -> Measurement:
    """Two epochs."""
    extra: dict[str, Any] = {"bytes_outside_by_phase": phases, **drawn}
    return Measurement(variant=name, repetition=0, epochs=(epoch(1.0), epoch(1.0)), extra=extra)


def outcome(*measurements: Measurement, facts: dict[str, Any]) -> Outcome:
    variants = tuple(
        replace(variant(name), job=Job(kind="train", params=PARAMS)) for name in ("random", "columns")
    )
    return Outcome(
        experiment="D1",
        status="measured",
        plan=ExperimentPlan(variants=variants, facts=facts),
        measurements=measurements,
    )


FOUND = outcome(
    measured("random", {"features": 8_000_000, "control": 70}, input_rows=10, edges=20, input_ids=30),
    measured("columns", {"activations": 2_000_002}, input_rows=10, edges=20, input_ids=31),
    facts={PREDICTED_BYTES: {"random": {"features": 4_000_000}, "columns": {"activations": 1_000_000}}},
)


def rows(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()]


def test_bytes_of_an_epoch_stand_beside_the_formula() -> None:
    head, _, random, columns = rows(phase_table(FOUND))
    assert head == ["MB per epoch", "activations", "features", "total", "by the formula", "difference, bytes"]
    assert random == ["random", "0.000", "4.000", "4.000", "4.000", "0"]
    assert columns == ["columns", "1.000", "0.000", "1.000", "1.000", "+1"]


def test_bytes_are_of_a_repetition_in_which_no_task_was_launched_again() -> None:
    again = measured("random", {"features": 9_000_000}, relaunched=1)
    given = replace(FOUND, measurements=(again, *FOUND.measurements))
    assert phase_table(given) == phase_table(FOUND)


def test_without_a_prediction_there_is_no_table() -> None:
    assert phase_table(outcome(*FOUND.measurements, facts={})) == ""
    assert phase_table(outcome(facts={PREDICTED_BYTES: {"random": {"features": 1}}})) == ""


def test_a_report_has_the_table_and_not_the_fact() -> None:
    page = section(EXPERIMENT, FOUND)
    assert phase_table(FOUND) in page
    assert PREDICTED_BYTES not in page


def test_other_blocks_are_told() -> None:
    assert different_blocks(FOUND) == ["columns"]
    same = measured("columns", {}, input_rows=10, edges=20, input_ids=30)
    assert different_blocks(outcome(FOUND.measurements[0], same, facts={})) == []


def test_lines_cross_between_two_points() -> None:
    assert crossing([(16, 10.0, 2.0), (32, 10.0, 6.0), (64, 10.0, 14.0)]) == pytest.approx(48.0)
    assert crossing([(16, 10.0, 2.0), (32, 10.0, 6.0)]) is None
    assert crossing([]) is None
