import re
from dataclasses import replace
from pathlib import Path

import pytest

from dglx_dist.errors import StorageError
from scripts.bench import results
from scripts.bench.performance import read_notes, render
from scripts.bench.suites import EXPERIMENTS
from tests.bench.measured import outcome

DOCS = Path(__file__).parents[2] / "docs"
OF_THE_PAPERS = (
    *("D1", "D2", "D3", "P1", "P2", "P4", "P5", "P6", "P7", "P8", "P9"),
    *("G1", "G2", "G3", "G4", "G5"),
    *("Y1", "Y2", "Y3", "Y4", "Y5"),
)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Empty results and two notes."""
    found, notes = tmp_path / "results", tmp_path / "notes"
    found.mkdir()
    notes.mkdir()
    (notes / "20-second.md").write_text("## Second\n\ntext\n")
    (notes / "10-first.md").write_text("## First\n\n    a command\n")
    return found, notes


def row(page: str, experiment: str) -> str:
    (found,) = re.findall(rf"(?m)^\| {experiment} \|.*$", page)
    return str(found)


def test_the_page_is_what_its_sources_give() -> None:
    page = (DOCS / "performance.md").read_text(encoding="utf-8")
    made = render(DOCS / "results", DOCS / "results" / "notes")
    assert page == made, "do not edit docs/performance.md; run: python scripts/bench performance"


@pytest.mark.parametrize("experiment", OF_THE_PAPERS)
def test_every_experiment_of_the_papers_appears(experiment: str) -> None:
    assert row((DOCS / "performance.md").read_text(encoding="utf-8"), experiment)


def test_without_results_everything_is_absent_or_not_measured_yet(folders: tuple[Path, Path]) -> None:
    page = render(*folders)
    assert "No experiment has been measured yet." in page
    for experiment in EXPERIMENTS:
        assert row(page, experiment).endswith(("| - | absent | - |", "| - | not measured yet | - |"))
        assert f"- **{experiment}**, " in page


def test_notes_stand_at_the_end_by_name(folders: tuple[Path, Path]) -> None:
    page = render(*folders)
    assert page.endswith("\n\n## First\n\n    a command\n\n## Second\n\ntext\n")


def test_a_result_fills_its_row_and_gets_a_section(folders: tuple[Path, Path]) -> None:
    found, notes = folders
    results.write(found, replace(outcome(), experiment="P1"))
    (found / "P1-bytes.png").write_bytes(b"")
    page = render(found, notes)
    assert "speed-up: 2.00 (2.00 to 2.00) | reproduced | `python scripts/bench" in row(page, "P1")
    assert "## P1: " in page
    assert "![P1](results/P1-bytes.png)" in page
    assert "- P1 (2026-11-21): cpu A processor; cores 2; versions (torch 2.13.0)." in page
    assert "- **P1**, " not in page
    assert "- **P2**, " in page


def test_a_simulated_result_is_not_passed_off_as_measured(folders: tuple[Path, Path]) -> None:
    found, notes = folders
    results.write(found, replace(outcome(simulated="compute is slept"), experiment="P1"))
    page = render(found, notes)
    assert "2.00 (2.00 to 2.00) simulated | reproduced (simulated)" in row(page, "P1")
    assert "- **P1**, " in page


def test_missing_and_misshapen_sources_are_refused(folders: tuple[Path, Path]) -> None:
    found, notes = folders
    with pytest.raises(StorageError, match="no-results"):
        render(found.parent / "no-results", notes)
    with pytest.raises(StorageError, match="no notes"):
        read_notes(found)
    (notes / "30-odd.md").write_text("no heading\n")
    with pytest.raises(StorageError, match="30-odd"):
        read_notes(notes)
