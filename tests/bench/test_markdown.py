import re
from dataclasses import replace
from pathlib import Path

import pytest

from dglx_dist.errors import DglxError, StorageError
from scripts.bench import results
from scripts.bench.figures import variant_figures
from scripts.bench.pages import render, write_page
from scripts.bench.records import Outcome
from scripts.bench.suites import find
from tests.bench.measured import EXPERIMENT, outcome, scaling, with_curves


def tables(page: str) -> list[list[list[str]]]:
    """Cells of all tables of a page, heads included, the lines under heads left out."""
    found: list[list[list[str]]] = []
    inside = False
    for line in page.splitlines():
        if line.startswith("| "):
            found = found if inside else [*found, []]
            found[-1].append([cell.strip() for cell in line.strip("|").split(" | ")])
        inside = line.startswith("|")
    return found


def test_numbers_in_the_table_are_the_medians() -> None:
    given = outcome()
    _, variants, ratios = tables(render([(EXPERIMENT, given)]))
    head, random, metis = variants
    cells = dict(zip(head, random, strict=True))
    figures = variant_figures(given)[0]
    assert cells["variant"] == "random"
    assert cells["link between servers"] == "2 servers of 1 rank, 96mbit, phi 0.65"
    assert cells["s per epoch (IQR)"] == "2.100 (2.000 to 2.200)"
    for column, phase in {"wait": "wait_s", "compute": "compute_s", "fetch (threads)": "fetch_s"}.items():
        assert float(cells[column]) == pytest.approx(figures.phases[phase].median, abs=5e-4)
    assert (cells["MB inside"], cells["MB outside"]) == ("10.0", "40.0")
    assert cells["wire MB (x ledger)"] == "42.0 (1.05)"
    assert cells["peak of a rank"] == "300 MB"
    assert dict(zip(head, metis, strict=True))["wire MB (x ledger)"] == "11.0 (1.10)"
    assert ratios[1] == [
        "speed-up",
        "seconds per epoch: random / metis",
        "1.90",
        "2.00 (2.00 to 2.00)",
        "at least 1.5",
        "reproduced: 2.00 is at least 1.5",
    ]


def test_the_first_table_has_a_row_for_every_experiment() -> None:
    absent = Outcome(experiment="P1", status="absent", reason="this release has no strategy push_pull")
    page = render([(EXPERIMENT, outcome()), (find("P1"), absent), scaling()])
    overview = tables(page)[0]
    assert [row[0] for row in overview] == ["id", "D1", "P1", "D3"]
    assert overview[1][4:] == ["speed-up: 2.00 (2.00 to 2.00)", "reproduced"]
    assert overview[2][4:] == ["-", "absent"]
    assert overview[3][5] == "reproduced (simulated)"


def test_what_is_not_reproduced_is_said_in_words() -> None:
    absent = Outcome(experiment="P1", status="absent", reason="this release has no strategy push_pull")
    slow = replace(EXPERIMENT, id="D2")
    page = render([(EXPERIMENT, outcome()), (slow, outcome(fast=(1.9,) * 5)), (find("P1"), absent)])
    said = re.search(r"## What is not reproduced.*?\n\n(.*?)\n\n", page, flags=re.DOTALL)
    assert said is not None
    lines = said[1].splitlines()
    assert lines[0] == (
        "- **D2**, random or metis: not reproduced; 1.11 is below the least that counts as reproduced, 1.5."
    )
    assert lines[1].startswith("- **P1**")
    assert "push_pull" in lines[1]
    assert len(lines) == 2


def test_loopback_is_said_and_nothing_is_called_reproduced() -> None:
    page = render([(EXPERIMENT, outcome(kind="loopback"))])
    assert tables(page)[0][1][5] == "links not limited"
    assert "not limited (plain loopback)" in tables(page)[1][1][1]
    assert "needs root; start it with sudo" in page
    assert "reproduced:" not in page


def test_every_time_of_a_simulated_variant_is_marked() -> None:
    experiment, given = scaling()
    page = render([(experiment, given)])
    _, variants, ratios = tables(page)
    for row in variants[1:]:
        assert row[0].endswith("(simulated)")
        assert all(cell.endswith("simulated") for cell in row[2:8]), row
    assert all(row[3].endswith("simulated") and "(simulated)" in row[5] for row in ratios[1:])
    assert "Simulated in 4 servers: compute is slept." in page


def test_nothing_is_marked_simulated_that_is_not() -> None:
    assert [
        row for table in tables(render([(EXPERIMENT, outcome())])) for row in table if "simulated" in row
    ] == []


def test_a_failed_experiment_shows_what_was_measured_before() -> None:
    page = render([(EXPERIMENT, replace(outcome(), status="failed", reason="rank 1 did not answer"))])
    assert "**failed**: rank 1 did not answer" in page
    assert "2.100 (2.000 to 2.200)" in page


def test_a_quick_look_is_labelled() -> None:
    page = render([(EXPERIMENT, replace(outcome(), label="quick look, fewer than 5 repetitions"))])
    assert tables(page)[0][1][5] == "reproduced; quick look, fewer than 5 repetitions"
    assert "- Quick look, fewer than 5 repetitions." in page
    assert "supports its claim, D1 by a quick look only: repeat it before you rely on it." in page
    assert "supports its claim." in render([(EXPERIMENT, outcome())])


def test_circumstances_command_facts_and_curves_are_there() -> None:
    given = with_curves(outcome())
    note = {
        "rate": "96mbit", "baseline": "random", "phi": 0.58, "wanted": 0.65, "within_tolerance": False,
        "seconds_at_rate": 2.5, "seconds_free": 1.05,
    }  # fmt: skip
    network = {name: {**values, "calibration": note} for name, values in given.network.items()}
    page = render([(EXPERIMENT, replace(given, network=network))], {"D1": ["D1-phases.png"]})
    assert "    python scripts/bench --suite papers --only D1 --out results" in page
    assert "cpu A processor; cores 2; versions (torch 2.13.0)" in page
    assert "- edge cut: random 0.75, metis 0.125\n" in page
    assert "at 96mbit the network costs random 0.58 of its time" in page
    assert "0.65 was wanted and not reached" in page
    assert "Time to a validation accuracy of 87.5 %, which all reach: random 3 s, metis 3 s." in page
    assert "![D1](D1-phases.png)" in page
    assert "2026-11-21" in page


def test_a_folder_of_results_becomes_its_readme(tmp_path: Path) -> None:
    results.write(tmp_path, Outcome(experiment="Y1", status="absent", reason="no lambda"))
    results.write(tmp_path, Outcome(experiment="P1", status="absent", reason="no push_pull"))
    (tmp_path / "P1-phases.png").write_bytes(b"")
    page = write_page(tmp_path)
    assert page == tmp_path / "README.md"
    text = page.read_text()
    assert text.index("## P1:") < text.index("## Y1:")
    assert "![P1](P1-phases.png)" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "P1-phases.png", "P1.json", "README.md", "Y1.json",
    ]  # fmt: skip


def test_bad_folders_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="nowhere"):
        write_page(tmp_path / "nowhere")
    results.write(tmp_path, replace(outcome(), experiment="Z9"))
    with pytest.raises(DglxError, match="Z9"):
        write_page(tmp_path)
    assert not (tmp_path / "README.md").exists()


def test_a_page_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "README.md").mkdir()
    (tmp_path / "README.md" / "in the way").write_text("")
    results.write(tmp_path, Outcome(experiment="P1", status="absent", reason="no push_pull"))
    with pytest.raises(StorageError, match=r"README\.md"):
        write_page(tmp_path)
