import gzip
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from dglx_dist.errors import StorageError
from scripts.bench import results
from scripts.bench.performance import dump_figures, figures_of, main, read_notes, render
from scripts.bench.suites import EXPERIMENTS, find
from tests.bench.helpers import outcome

DOCS = Path(__file__).parents[2] / "docs"
NOTES = """How to read it.

## P1
Here: two servers.

Lesson: it pays.

## First part
Overview: aim: 1.7 | 2.3 | met

    a command

## Second part

text
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Notes, and no results."""
    found = tmp_path / "results"
    found.mkdir()
    (found / "notes.md").write_text(NOTES)
    return found


def row(page: str, experiment: str) -> str:
    (found,) = re.findall(rf"(?m)^\| \[?{experiment}(?:\]\([^)]*\))?: .*$", page)
    return str(found)


def measure(folder: Path, **fields: str) -> None:
    """Keep figures of P1, and one picture."""
    figures = figures_of(find("P1"), replace(outcome(**fields), experiment="P1"))
    (folder / "P1.json").write_text(dump_figures(figures))
    (folder / "P1-bytes.png").write_bytes(b"")


def test_figures_and_page_are_what_raw_results_and_notes_give() -> None:
    assert main(["--check"]) == 0, "run: python scripts/bench performance"
    assert len((DOCS / "performance.md").read_text(encoding="utf-8").splitlines()) <= 600
    for path in (DOCS / "results").glob("*.json"):
        assert len(path.read_text(encoding="utf-8").splitlines()) < 200, path


def test_every_experiment_appears_and_the_measured_ones_have_hand_written_texts() -> None:
    page = (DOCS / "performance.md").read_text(encoding="utf-8")
    notes = read_notes(DOCS / "results" / "notes.md")
    for experiment in EXPERIMENTS:
        assert row(page, experiment)
        assert (experiment in notes.experiments) == (f"\n## {experiment}: " in page)


def test_links_of_the_overview_lead_to_sections() -> None:
    page = (DOCS / "performance.md").read_text(encoding="utf-8")
    anchors = {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"(?m)^## (.*)$", page)
    }
    assert set(re.findall(r"\]\(#([^)]*)\)", page)) <= anchors


def test_without_results_nothing_is_measured_yet_and_parts_stand_at_the_end(folder: Path) -> None:
    page = render(folder)
    assert "No experiment has been measured yet." in page
    for experiment in EXPERIMENTS:
        assert row(page, experiment).endswith(("| - | absent |", "| - | not measured yet |"))
    assert "| [First part](#first-part) | aim: 1.7 | 2.3 | met |" in page
    assert page.endswith("\n\n## First part\n\n    a command\n\n## Second part\n\ntext\n")


def test_a_result_fills_its_row_and_gets_a_section(folder: Path) -> None:
    measure(folder)
    page = render(folder)
    assert row(page, "P1").endswith("| speed-up: 2.00 | reproduced |")
    assert "`speed-up` **2.00**, predicted 1.90, bound at least 1.5 met." in page
    assert "- **Here**: Two servers.\n" in page
    assert "- **Verdict**: **reproduced**. It pays.\n" in page
    assert (
        "`python scripts/bench --suite papers --only D1 --out results`, 5 repetitions, 2026-11-21 "
        "![P1](results/P1-b" in page
    )
    assert "2026-11-21 to 2026-11-21 on: cpu A processor; cores 2; versions (torch 2.13.0)." in page


def test_a_simulated_result_is_not_passed_off_as_measured(folder: Path) -> None:
    measure(folder, simulated="compute is slept")
    page = render(folder)
    assert row(page, "P1").endswith("| speed-up: 2.00 simulated | reproduced (simulated) |")
    assert "**2.00** simulated, predicted 1.90" in page
    assert "Simulated: compute is slept." in page


def test_figures_keep_medians_with_one_line_for_each_variant() -> None:
    text = dump_figures(figures_of(find("P1"), replace(outcome(), experiment="P1")))
    (line,) = (line for line in text.splitlines() if line.startswith('  {"name": "random"'))
    assert '"seconds": [2.1, 2.0, 2.2]' in line
    assert '"mb_outside": 40.0' in line
    assert json.loads(text)["variants"][0]["peak_mb"] == 300


def test_results_are_taken_over_gzipped_and_found_out_of_date_when_they_change(
    folder: Path, tmp_path: Path
) -> None:
    out, page = tmp_path / "out", tmp_path / "page.md"
    results.write(out, replace(outcome(), experiment="P1"))
    wanted = ["--results", str(folder), "--to", str(page)]
    assert main([*wanted, "--add", str(out)]) == 0
    packed = folder / "raw" / "P1.json.gz"
    assert gzip.decompress(packed.read_bytes()) == (out / "P1.json").read_bytes()
    assert "speed-up: 2.00" in page.read_text(encoding="utf-8")
    before = packed.read_bytes()
    assert main([*wanted, "--add", str(out), "--check"]) == 0
    assert packed.read_bytes() == before
    results.write(out, replace(outcome(fast=(0.5,) * 5), experiment="P1"))
    assert main([*wanted, "--add", str(out), "--check"]) == f"out of date: {folder / 'P1.json'}"


def test_missing_and_misshapen_sources_are_refused(folder: Path) -> None:
    with pytest.raises(StorageError, match="no notes"):
        read_notes(folder / "none.md")
    (folder / "notes.md").write_text("## P1\nHere: x.\n")
    with pytest.raises(StorageError, match="section P1 needs"):
        read_notes(folder / "notes.md")
    (folder / "P1.json").write_text("{")
    with pytest.raises(StorageError, match=r"P1\.json is damaged"):
        render(folder)


def test_a_gzipped_result_cut_short_is_named(tmp_path: Path) -> None:
    path = tmp_path / "P1.json.gz"
    path.write_bytes(gzip.compress(b"{}" * 1000)[:-10])
    with pytest.raises(StorageError, match=r"P1\.json\.gz is damaged"):
        results.read(tmp_path)
