"""The HTML page of runs: nothing is loaded, nothing of a run is run, and every figure is drawn."""

import json
import math
import re
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from dglx_dist.cli.app import app
from dglx_dist.errors import ConfigError
from dglx_dist.records import EpochRecord
from dglx_dist.report import run_folder
from dglx_dist.report.page import render_page, write_page
from dglx_dist.report.run_folder import Run, read_run, write_json, write_run
from dglx_dist.report.tables import flat_cells, spread, summarise
from tests.helpers import wide
from tests.helpers.browser import BROWSER, MISSING, open_page
from tests.report.records import epoch

HOSTILE = "</script><script>window.stolen = 1</script><img src=x onerror='window.stolen = 1'>"
TRAFFIC = {"features": [[0, 1, 700], [1, 0, 30], [1, -1, 5]], "gradients": [[0, 1, 300]]}
PLAN = {
    "predictions": [
        {
            "name": name, "epoch_seconds": seconds, "bytes_outside": 10, "bytes_inside": 0, "memory_bytes": 9,
            "feasible": not why_not, "why_not": why_not, "not_tried": "", "barred": "", "note": "",
        }
        for name, seconds, why_not in (("data_parallel", 1.5, ""), (HOSTILE, 2.5, ""), ("lambda", 0, HOSTILE))
    ],
    "picked": 0, "chosen": "data_parallel", "outcome": None,
    "why": [f"fast {HOSTILE}"], "assumptions": [HOSTILE],
}  # fmt: skip


def run_in(folder: Path, number: float = 0, text: str = "cora") -> Run:
    epochs = [epoch(index, loss=2.0 / (1 + index), seconds=1.0 + number) for index in range(6)]
    facts = {"graph": text, "strategy": text, "ranks": 2, "rank_memory_bytes": [5, 7], "test_accuracy": 0.5}
    facts |= {"late": 3} if number == 8.5 else {}
    summary = {**summarise(facts, epochs), "traffic": {**TRAFFIC, text: [[0, 1, 1]]}}
    config = {"data": text, "lr": 0.01, "hidden": 16 * (1 + number), text: text}
    write_run(folder, config, epochs, summary, plan=PLAN)
    return read_run(folder)


def data_of(page: str) -> list[Any]:
    (result,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.DOTALL)
    return json.loads(result)


def titles(page: str) -> list[str]:
    return re.findall("<figcaption>(.*?)</figcaption>", page)


def test_curves_cost_bytes_memory_and_the_plan_are_figures(tmp_path: Path) -> None:
    page = render_page({"one": run_in(tmp_path)}, "PLOTLY")
    figures = dict(zip(titles(page), data_of(page), strict=True))
    assert [*figures] == [
        "loss", "accuracy", "samples per second", "one: seconds of an epoch", "one: payload of an epoch",
        "one: bytes between ranks in training since the last start", "peak memory of each rank",
        "seconds of an epoch of each candidate",
    ]  # fmt: skip
    assert figures["loss"]["data"][0]["y"] == [2.0 / (1 + index) for index in range(6)]
    assert [figure["name"] for figure in figures["accuracy"]["data"]] == ["train", "val"]
    bytes_between = figures["one: bytes between ranks in training since the last start"]
    assert bytes_between["data"][0]["x"] == ["rank 0", "rank 1", "workers"]
    assert bytes_between["data"][0]["z"] == [[None, 1001, None], [30, None, 5], [None, None, None]]
    phases = "features: 700 B<br>gradients: 300 B<br>cora: 1 B"
    assert bytes_between["data"][0]["hovertext"][0][1] == f"rank 0 to rank 1<br>{phases}"
    assert figures["peak memory of each rank"]["data"][0]["y"] == [5e-6, 7e-6]


def test_several_runs_share_curves_and_what_differs_is_marked(tmp_path: Path) -> None:
    runs = {name: run_in(tmp_path / name, number) for number, name in enumerate(("a", "b"))}
    page = render_page(runs, "PLOTLY")
    loss = data_of(page)[0]["data"]
    assert [record["name"] for record in loss] == ["a", "b"]
    marked = re.findall('<tr class="marked"><th>(.*?)</th>', page)
    assert marked == ["hidden"]


@dataclass(frozen=True, kw_only=True)
class Measured(EpochRecord):
    scores: dict[str, float]


def test_any_metric_of_an_epoch_is_a_curve_by_split(tmp_path: Path) -> None:
    scores = {"val_accuracy": 0.5, "val_f1_micro": 0.25, "test_f1_micro": 0.125, "val_mae": math.nan}
    epochs = tuple(Measured(**asdict(epoch(index)), scores=scores) for index in range(3))
    page = render_page({"run": replace(run_in(tmp_path), epochs=epochs)}, "PLOTLY")
    drawn = dict(zip(titles(page), data_of(page), strict=True))
    assert [*drawn][:4] == ["loss", "accuracy", "f1 micro", "samples per second"]
    curves = drawn["f1 micro"]["data"]
    assert [(curve["name"], curve["y"]) for curve in curves] == [("val", [0.25] * 3), ("test", [0.125] * 3)]


def test_runs_of_one_name_have_their_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("x/run", "y/run"):
        run_in(Path(folder))
    shown = CliRunner().invoke(app, ["report", "x/run", "y/run"])
    assert ["x/run", "y/run"] in [line.split() for line in shown.output.splitlines()]


def test_texts_of_a_run_are_only_texts(tmp_path: Path) -> None:
    page = render_page({HOSTILE: run_in(tmp_path, text=HOSTILE)}, "PLOTLY")
    assert "<img" not in page
    assert page.count("<script") == 3
    assert "<script>window" not in page
    # Plotly's own reading of tags in texts.
    assert "<" not in json.dumps(data_of(page)).replace("<br>", "")


def test_codes_in_names_are_written_out(tmp_path: Path) -> None:
    name = "a\u202eb\x1b[1m\n"
    page = render_page({name: run_in(tmp_path, text=name)}, "PLOTLY")
    assert r"a\u202eb\x1b[1m\n" in page
    assert not set(page.partition("<header>")[2].partition("<script")[0]) & set("\u202e\x1b")
    assert r"\u202eb\x1b" not in json.dumps(data_of(page)).replace(r"\\", "")


def test_without_plotly_the_command_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ConfigError, match=r"pip install 'dglx_dist\[report\]'"):
        write_page({"run": run_in(tmp_path)}, tmp_path / "page.html")


def test_an_unfinished_run_says_so(tmp_path: Path) -> None:
    run_in(tmp_path)
    (tmp_path / "summary.json").unlink()
    page = render_page({"run": read_run(tmp_path)}, "PLOTLY")
    assert "did not finish" in page
    assert "loss" in titles(page)
    assert not any("memory" in title for title in titles(page))
    single = {"run": read_run(tmp_path), "other": run_in(tmp_path / "other")}
    assert re.search('<th>run</th>.*?<td data-value="">-</td>', render_page(single, "PLOTLY"))


def test_labels_are_cut_in_their_middle(tmp_path: Path) -> None:
    runs = {f"{'x' * 60}-seed{seed}": run_in(tmp_path / str(seed)) for seed in (1, 2)}
    names = [record["name"] for record in data_of(render_page(runs, "PLOTLY"))[0]["data"]]
    assert [(name[-6:], len(name)) for name in names] == [("-seed1", 36), ("-seed2", 36)]


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_only_a_page_is_replaced(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    run_in(tmp_path / "a")
    page, text = tmp_path / "page.html", tmp_path / "text.html"
    text.write_text("of somebody else")
    for _ in range(2):
        assert invoke(tmp_path / "a", "--html", page).exit_code == 0
    for target in (tmp_path / "a" / "metrics.jsonl", text):
        before = target.read_bytes()
        refused = invoke(tmp_path / "a", "--html", target).exception
        assert isinstance(refused, ConfigError)
        assert "must end in .html" in str(refused)
        assert target.read_bytes() == before


def test_one_folder_given_twice_is_one_run(tmp_path: Path) -> None:
    run_in(tmp_path)
    assert "samples/s" in invoke(tmp_path, tmp_path / ".." / tmp_path.name).output


def test_the_damaged_one_of_several_runs_is_named(tmp_path: Path) -> None:
    for name in "ab":
        run_in(tmp_path / name)
    (tmp_path / "b" / "summary.json").write_text(f'{{"bytes_inside": 1{"0" * 400}}}')
    for more in ([], ["--html", tmp_path / "page.html"]):
        assert str(tmp_path / "b") in str(invoke(tmp_path / "a", tmp_path / "b", *more).exception)


def test_the_page_of_several_seeds_has_their_mean_and_each_file_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("plotly", "plotly.offline"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(get_plotlyjs=lambda: "PLOTLY"))
    summaries = {f"seed-{seed}": dict(run_in(tmp_path / f"seed-{seed}").summary or {}) for seed in range(2)}
    summaries["seed-1"]["test_accuracy"] = 0.7
    write_json(tmp_path / "summary.json", spread(summaries))
    read, paths = run_folder.read_small_file, list[Path]()
    monkeypatch.setattr(run_folder, "read_small_file", lambda path: paths.append(path) or read(path))
    assert invoke(tmp_path, "--html", tmp_path / "page.html").exit_code == 0
    assert len(paths) == len(set(paths)) + 2, "a run alone is tried on a page of its own, with its plan"
    row = f'<th>{tmp_path}: mean ± std</th>.*?<td data-value="0.6">60.0 % ± 14.1 %</td>'
    assert re.search(row, (tmp_path / "page.html").read_text("utf-8"))


def test_names_of_runs_and_figures_are_shown_as_they_are(tmp_path: Path) -> None:
    for name in ("lr[a]", "lr[b]"):
        run_in(tmp_path / name)
    lines = invoke(*sorted(tmp_path.iterdir())).output.splitlines()
    assert ["lr[a]", "lr[b]"] in [line.split() for line in lines]
    assert flat_cells({".hidden.": 1, "a": {"b.": 1}}).keys() == {".hidden.", "a.b."}


def test_two_runs_are_side_by_side_on_the_terminal(tmp_path: Path) -> None:
    for number, name in enumerate(("a", "b")):
        run_in(tmp_path / name, number)
    shown = CliRunner().invoke(app, ["report", str(tmp_path / "a"), str(tmp_path / "b")])
    assert shown.exit_code == 0, shown.output
    lines = [line.split() for line in shown.output.splitlines()]
    assert ["a", "b"] in lines
    assert ["epoch_seconds", "1.000", "s", "2.000", "s"] in lines
    assert not any("traffic" in line for line in lines)


DRAWN = """
const plots = [...document.querySelectorAll('.plot')];
const marks = plot => plot.querySelectorAll('.main-svg :is(path.js-line, .point path, image)').length;
const column = (table, name) => [...table.tHead.rows[0].cells].findIndex(one => one.textContent === name);
const [runs] = document.querySelectorAll('table');
const place = column(runs, 'epoch_seconds');
const seconds = () => [...runs.tBodies[0].rows].map(row => row.cells[place].textContent);
const button = runs.tHead.rows[0].cells[place].querySelector('button');
const background = () => getComputedStyle(document.body).backgroundColor;
const label = () => plots[0].querySelector('.xtick text').style.fill;
const found = {marks: plots.map(marks), stolen: window.stolen ?? null, images: document.images.length};
found.width = [document.documentElement.scrollWidth, innerWidth];
button.click();
found.rising = seconds();
button.click();
found.falling = seconds();
const late = column(runs, 'late');
found.late = [1, 2].map(() => {
  runs.tHead.rows[0].cells[late].querySelector('button').click();
  return [...runs.tBodies[0].rows].map(row => row.cells[late].textContent);
});
found.before = [background(), label()];
document.getElementById('theme').click();
await new Promise(resolve => setTimeout(resolve, 300));
found.after = [background(), label()];
const loss = plots[0].data[0].y[1];
const slider = document.getElementById('smooth');
slider.value = 0.5;
slider.dispatchEvent(new Event('input'));
found.smooth = [loss, plots[0].data[0].y[1]];
found.loaded = performance.getEntriesByType('resource').map(one => one.name);
return found;
"""


@pytest.mark.skipif(BROWSER is None, reason=MISSING)
@pytest.mark.parametrize("size", [(1280, 900), *wide(((390, 844),))])
def test_a_browser_draws_every_figure_and_complains_of_nothing(tmp_path: Path, size: tuple[int, int]) -> None:
    pytest.importorskip("plotly")
    # As texts, and as numbers in texts, 9.5 is before 9.25.
    runs = {name: run_in(tmp_path / name[-1], at, HOSTILE) for at, name in ((8.5, HOSTILE), (8.25, "b"))}
    page = tmp_path / "page.html"
    write_page(runs, page)
    opened = open_page(page, DRAWN, size=size)
    assert opened.console == []
    record = opened.answers
    assert len(record["marks"]) == 4 + 2 * 3 + 2
    assert all(record["marks"]), record["marks"]
    assert (record["stolen"], record["images"], record["loaded"]) == (None, 0, [])
    assert record["width"] == [size[0], size[0]]
    assert record["rising"] == ["9.250 s", "9.500 s"]
    assert record["falling"] == ["9.500 s", "9.250 s"]
    # Absent is last, up or down.
    assert record["late"] == [["3", "-"], ["3", "-"]]
    assert all(left != right for left, right in zip(record["before"], record["after"], strict=True))
    assert record["smooth"] == [1.0, 1.5]
