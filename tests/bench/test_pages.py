"""Pages: the README.md of a folder of results, docs/results/index.md, and the pictures beside them."""

import gzip
import re
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from dglx_dist.errors import ConfigError, DglxError, StorageError
from scripts.bench import plots, results
from scripts.bench.figures import figures_of, variant_rows
from scripts.bench.notes import read_notes
from scripts.bench.pages import find_page, render, write_page
from scripts.bench.performance import main
from scripts.bench.records import Line, Outcome, check_plan
from scripts.bench.suites import everything, find
from tests.bench.helpers import EXPERIMENT, outcome, scaling, with_curves

DOCS = Path(__file__).parents[2] / "docs"
NOTES = """How to read it.

## P1
Title: push-pull
Suites: papers
Paper: A paper
Claim: it is faster
Setting: 4 machines
Predicted: 2x
Strategies: data_parallel, push_pull
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
    result = tmp_path / "results"
    result.mkdir()
    (result / "notes.md").write_text(NOTES)
    return result


def page_of(folder: Path, *outcomes: Outcome) -> str:
    figures = {item.experiment: figures_of(find(item.experiment), item) for item in outcomes}
    return "\n\n".join(render(figures, read_notes(folder / "notes.md"), folder).values())


def row(page: str, experiment: str) -> str:
    found_rows = re.findall(rf"(?m)^\| \[?{experiment}(?:\]\([^)]*\))?: .*$", page)
    # The index may have it in its short table, too.
    (result,) = set(found_rows)
    return str(result)


def test_figures_and_page_are_what_raw_results_and_notes_give() -> None:
    assert main(["--check"]) == 0, "run: python scripts/bench performance"
    for path in (DOCS / "results").glob("[!n]*.md"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 600, path
    for path in (DOCS / "results").glob("*.json"):
        assert len(path.read_text(encoding="utf-8").splitlines()) < 200, path


def test_every_experiment_appears_and_has_hand_written_texts() -> None:
    notes = read_notes(DOCS / "results" / "notes.md")
    pages = {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "results").glob("*.md")}
    for experiment in everything():
        assert row(pages["index.md"], experiment.id)
        is_shown = f"\n## {experiment.id}: " in pages.get(find_page(experiment.id), "")
        assert {"Here", "Lesson"} if is_shown else {"Here"} <= set(notes.experiments[experiment.id])
    anchors = {
        (name, re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-"))
        for name, page in pages.items()
        for title in re.findall(r"(?m)^## (.*)$", page)
    }
    assert set(re.findall(r"\]\(([a-z_0-9]+\.md)#([^)]*)\)", pages["index.md"])) <= anchors


def test_without_results_nothing_is_measured_yet_and_parts_stand_at_the_end(folder: Path) -> None:
    page = page_of(folder)
    assert "No experiment has been measured yet." in page
    for experiment in everything():
        assert row(page, experiment.id).endswith("| - | not measured yet |")
    assert "| [First part](package.md#first-part) | aim: 1.7 | 2.3 | met |" in page
    assert page.endswith("\n\n## First part\n\n    a command\n\n## Second part\n\ntext\n")
    assert len(render({}, read_notes(folder / "notes.md"), folder)) == 2


def test_results_are_gzipped_and_found_out_of_date_when_they_change(folder: Path, tmp_path: Path) -> None:
    out, page = tmp_path / "out", tmp_path / "pages"
    results.write(out, replace(outcome(), experiment="P1"))
    expected = ["--results", str(folder), "--to", str(page)]
    assert main([*expected, "--add", str(out)]) == 0
    packed = folder / "raw" / "P1.json.gz"
    assert gzip.decompress(packed.read_bytes()) == (out / "P1.json").read_bytes()
    assert "speed-up: 2.00" in (page / "index.md").read_text(encoding="utf-8")
    before = packed.read_bytes()
    assert main([*expected, "--add", str(out), "--check"]) == 0
    assert packed.read_bytes() == before
    results.write(out, replace(outcome(fast=(0.5,) * 5), experiment="P1"))
    assert main([*expected, "--add", str(out), "--check"]) == (
        f"out of date: {folder / 'P1.json'}, {page / 'index.md'}, {page / 'p3.md'}"
    )


def test_missing_and_misshapen_sources_are_refused(folder: Path) -> None:
    with pytest.raises(StorageError, match="no notes"):
        read_notes(folder / "none.md")
    (folder / "notes.md").write_text("## P1\nLesson: x.\n")
    with pytest.raises(StorageError, match="section P1 needs 'Title"):
        read_notes(folder / "notes.md")
    (folder / "P1.json.gz").write_bytes(gzip.compress(b"{}" * 1000)[:-10])
    with pytest.raises(StorageError, match=r"P1\.json\.gz is damaged"):
        results.read(folder)


def readme(folder: Path, *outcomes: Outcome) -> str:
    for item in outcomes:
        results.write(folder, item)
    return write_page(folder).read_text()


def test_a_folder_of_results_becomes_its_readme(tmp_path: Path) -> None:
    absent = Outcome(experiment="Y1", status="absent", reason="no lambda")
    (tmp_path / "P1-phases.png").write_bytes(b"")
    text = readme(tmp_path, absent, replace(outcome(), experiment="P1"))
    assert text.index("## P1:") < text.index("## Y1:")
    assert "![P1](P1-phases.png)" in text
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["P1-phases.png", "P1.json", "README.md", "Y1.json"]
    # Numbers, verdicts with their reason, setting and circumstances.
    assert row(text, "Y1").endswith("| - | absent |")
    assert "**absent**. No lambda." in text
    assert "| random | 2 | 1 | 96mbit, phi 0.65 | 2.10 (2.00 to 2.20) | 1.05 |" in text
    assert "| 10 | 40 | 42 | 1.05 | 300 |" in text
    ratio = "| speed-up | seconds: random / metis | 1.9 | 2.00 | at least 1.5 | reproduced |"
    assert ratio in text
    assert "**reproduced**. 2.00 is at least 1.5.\n" in text
    assert "- edge cut: random 0.75, metis 0.125\n" in text
    assert "- Servers (random, metis): kind namespaces.\n- Machine: cpu A processor" in text
    for word in ("Predicted", "Here"):
        assert f"- **{word}**: " in text


def test_loopback_quick_looks_failures_and_simulations_are_said(tmp_path: Path) -> None:
    loopback = readme(tmp_path / "a", outcome(kind="loopback"))
    assert row(loopback, "D1").endswith("links not limited |")
    assert "not limited (plain loopback)" in loopback
    assert "needs root; start it with sudo" in loopback
    assert "**reproduced" not in loopback
    quick = readme(tmp_path / "b", replace(outcome(), label="quick look, fewer than 5 repetitions"))
    assert row(quick, "D1").endswith("reproduced; quick look, fewer than 5 repetitions |")
    failed = readme(tmp_path / "c", replace(outcome(), status="failed", reason="rank 1 did not answer"))
    assert "**failed**. Rank 1 did not answer." in failed
    assert "2.10 (2.00 to 2.20)" in failed
    simulated = readme(tmp_path / "d", scaling()[1])
    assert all(
        line.endswith("| True |") for line in simulated.splitlines() if line.startswith("| 2 servers | 2")
    )
    assert "Simulated: compute is slept." in simulated


def test_bad_folders_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="nowhere"):
        write_page(tmp_path / "nowhere")
    results.write(tmp_path, replace(outcome(), experiment="Z9"))
    with pytest.raises(DglxError, match="Z9"):
        write_page(tmp_path)
    assert not (tmp_path / "README.md").exists()
    (tmp_path / "Z9.json").unlink()
    (tmp_path / "README.md" / "in the way").mkdir(parents=True)
    with pytest.raises(StorageError, match=r"README\.md"):
        write_page(tmp_path)


@pytest.mark.wide
def test_an_experiment_gets_the_pictures_that_it_has_figures_for(tmp_path: Path) -> None:
    for case in (replace(outcome(), experiment="P1"), Outcome(experiment="P2", status="absent", reason="no")):
        results.write(tmp_path, case)
    drawn = plots.draw(tmp_path)
    assert [path.name for path in drawn] == ["P1-phases.png", "P1-bytes.png"]
    for path in drawn:
        picture = imread(path)
        assert picture.shape[1] > picture.shape[0] > 400
        assert picture[..., :3].std() > 0.05
    drawn = plots.draw_experiment(EXPERIMENT, with_curves(outcome()), tmp_path)
    assert [path.name for path in drawn][2:] == ["D1-accuracy.png"]
    drawn = plots.draw_experiment(*scaling(), tmp_path)
    assert [path.name for path in drawn][2:] == ["D3-scaling.png"]
    assert plots.draw_experiment(EXPERIMENT, replace(outcome(), measurements=()), tmp_path) == ()
    assert not plots.is_scaling(outcome())
    inputs = outcome()
    assert inputs.plan is not None
    lines = (
        Line(what="alpha", name="ours", points=((0.1, "random"), (0.2, "metis"))),
        Line(what="rate", name="ours", points=((1000, "metis"),)),
    )
    drawn = plots.draw_experiment(
        EXPERIMENT, replace(inputs, plan=replace(inputs.plan, lines=lines)), tmp_path
    )
    assert [path.name for path in drawn][2:] == ["D1-alpha.png", "D1-rate.png"]
    sent, seconds = Figure().subplots(1, 2)
    plots.draw_lines(variant_rows(inputs), lines[:1], sent, seconds)
    assert sent.lines[0].get_xydata().tolist() == [[0.1, 40], [0.2, 10]]
    assert seconds.lines[0].get_xydata().tolist() == [[0.1, 2.1], [0.2, 1.05]]
    with pytest.raises(ConfigError, match="no variant is called elsewhere"):
        check_plan(
            "D1", replace(inputs.plan, lines=(Line(what="rate", name="x", points=((1, "elsewhere"),)),))
        )
