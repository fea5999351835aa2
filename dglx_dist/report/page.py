"""Write one self-contained HTML page for one or several runs, with Plotly figures and sortable tables."""

import hashlib
import json
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from html import escape as escape_markup
from pathlib import Path
from typing import Any, TypeAlias, final

from dglx_dist.data.storage.files import replace_atomically
from dglx_dist.errors import ConfigError
from dglx_dist.memory import format_bytes
from dglx_dist.progress import visible
from dglx_dist.report.run_folder import Run, read_plan
from dglx_dist.report.tables import COLORS, HIDDEN, INSIDE_COLOR, OUTSIDE_COLOR, PHASES, flat_cells, summarise

Values: TypeAlias = Mapping[str, Any]
Cells: TypeAlias = Mapping[str, tuple[object, str]]
"""By column, the value to sort by and the text."""
_ABSENT_VALUES = (None, "-")
_SPLIT = re.compile(r"(?:^|(?<=[/_ ]))(train|val|test)(?:[/_ ]|$)")
_DASHES = {"": "solid", "train": "dot", "val": "solid", "test": "dash"}
_COST = re.compile(r".*_s|seconds|num_samples|cache_.*|.*bytes_.*")
_PLANNED_FIGURES = ("epoch_seconds", "bytes_outside", "bytes_inside", "memory_bytes")
_MAX_BARS = 12
"""Maximum number of candidates in a plan's figure."""
_BEGIN = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="generator" content="dglx report">"""


def escape(text: str, quote: bool = True) -> str:
    """Return ``text`` as HTML without tags and control codes."""
    return escape_markup(visible(text), quote)


def check_page(path: Path) -> None:
    """Raise ConfigError if ``path`` does not end in .html, or is a file but no report page."""
    try:
        may_replace = not path.exists()
        if path.is_file():
            with path.open("rb") as file:
                may_replace = file.read(len(_BEGIN)) == _BEGIN.encode()
    except OSError as error:
        raise ConfigError(f"--html {path} cannot be read: {error}. Name another file.") from error
    if path.suffix != ".html" or not may_replace:
        raise ConfigError(
            f"--html {path} must end in .html, and may only replace a page of a report. Name another file."
        )


def write_page(runs: Mapping[str, Run], path: Path, means: Mapping[str, Cells] | None = None) -> None:
    """Write the page for the named ``runs`` to ``path`` atomically.

    ``means`` over seeds (:func:`dglx_dist.report.tables.spread_cells`) are added to its first table. Raises
    ConfigError if Plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ConfigError(
            f"--html {path} needs Plotly. Run `pip install 'dglx_dist[report]'`, or leave it out for tables."
        ) from error
    text = render_page(runs, get_plotlyjs(), means)
    with replace_atomically(path) as partial:
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")


def render_page(runs: Mapping[str, Run], plotly: str, means: Mapping[str, Cells] | None = None) -> str:
    """Render the page.

    ``plotly`` is the source text of plotly.js. Only that and the page's own script can run.
    """
    title = escape(", ".join(runs))
    summaries: dict[str, Values] = {}
    unfinished = ""
    for name, run in runs.items():
        summaries[name] = run.summary or summarise({}, run.epochs)
        if not run.summary:
            unfinished += f"<p>{escape(name)} did not finish, or still runs.</p>"
    # The choice by ``auto`` has its own section, so the table with runs leaves it out.
    rows: dict[str, Cells] = {}
    for name, summary in summaries.items():
        rows[name] = flat_cells({**summary, "auto": {}})
    rows |= means or {}

    # The figures are in the page's order, because the script finds their places by number.
    figures = _Figures()
    learning = _draw_curves(figures, runs)
    costs = ""
    for name, run in runs.items():
        costs += _draw_cost(figures, name, run) + _draw_traffic(figures, name, summaries[name])
    costs += _draw_memory(figures, summaries)
    plans = ""
    for name, run in runs.items():
        plan = read_plan(run.folder)
        if plan:
            plans += _describe_plan(figures, name, plan)

    script_hashes = f"{_hash_script(plotly)} {_hash_script(_SCRIPT)}"
    # A text in the data may contain the script's end tag.
    data = json.dumps(figures, allow_nan=False).replace("<", "\\u003c")
    return f"""{_BEGIN}<title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data: blob:;
style-src 'unsafe-inline'; script-src {script_hashes}">
<style>{_STYLE}</style></head><body><header><h1>{title}</h1>
<label>smoothing <input id="smooth" type="range" max="0.95" step="0.05" value="0"></label>
<button id="theme" type="button">light / dark</button></header><main>
{unfinished}
{_section("Runs", _build_table("run", rows))}{_section("Learning and speed", learning, "grid")}
{_section("Cost", costs, "grid")}{plans}
{_section("Configuration and environment", _list_options(runs))}</main>
<script type="application/json" id="data">{data}</script>
<script>{plotly}</script><script>{_SCRIPT}</script></body></html>
"""


def _hash_script(script: str) -> str:
    """Return the Content Security Policy's source expression that allows ``script``."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{b64encode(digest).decode()}'"


@final
class _Figures(list[Values]):
    """The figures' data and layouts for Plotly."""

    def place(self, title: str, traces: Sequence[Values], layout: Values) -> str:
        """Add a figure and return the markup for its place."""
        self.append({"data": traces, "layout": layout})
        return f'<figure><figcaption>{escape(title)}</figcaption><div class="plot"></div></figure>'


def _label(text: str, most: int = 36) -> str:
    """Shorten ``text`` to ``most`` characters, as a label for Plotly, which interprets tags."""
    if len(text) > most:
        # The middle is cut, because names often differ only at their end.
        half = most // 2
        text = f"{text[: half - 1]}…{text[-half:]}"
    return escape(text, quote=False)


def _axes(x: str, y: str = "", *, grid: bool = True, **more: Any) -> dict[str, Any]:
    """Build a layout with axis titles and ``more`` entries."""
    return {
        "xaxis": {"title": {"text": x, "standoff": 8}, "showgrid": grid},
        "yaxis": {"title": {"text": y, "standoff": 8}, "showgrid": grid},
        **more,
    }


def _bar(name: str, x: Sequence[object], y: Sequence[float], color: str) -> dict[str, Any]:
    return {"type": "bar", "name": name, "x": x, "y": y, "marker": {"color": color}}


def _draw_curves(figures: _Figures, runs: Mapping[str, Run]) -> str:
    """Place a figure for each metric, with a curve for each run and split."""
    panels: dict[str, list[Values]] = {}
    for run_index, (run_name, run) in enumerate(runs.items()):
        points: dict[str, list[tuple[int, float]]] = {}
        for record in run.epochs:
            for name, value in record.scalars().items():
                if not _COST.fullmatch(name):
                    points.setdefault(name, []).append((record.epoch, value))

        for name, metric_points in points.items():
            match = _SPLIT.search(name)
            split = match[1] if match else ""
            label = split
            if len(runs) > 1:
                label = f"{_label(run_name)} {split}".strip()
            epochs, values = zip(*metric_points, strict=True)
            trace = {
                "name": label,
                "line": {"color": COLORS[run_index % len(COLORS)], "dash": _DASHES[split]},
                "mode": "lines+markers",
                "marker": {"size": 4},
                "x": epochs,
                "y": values,
            }
            # A metric's curves for all splits share a figure.
            title = _SPLIT.sub("", name).rpartition("/")[2].replace("_", " ")
            panels.setdefault(title, []).append(trace)

    return "".join(figures.place(title, traces, _axes("epoch")) for title, traces in panels.items())


def _draw_memory(figures: _Figures, summaries: Mapping[str, Values]) -> str:
    """Place a figure with the ranks' peak memory, or return "" if no run has measured it."""
    bars = []
    for run_index, (name, summary) in enumerate(summaries.items()):
        rank_bytes = summary.get("rank_memory_bytes")
        peak_bytes = summary.get("peak_memory_bytes")
        if not rank_bytes and peak_bytes:
            rank_bytes = [peak_bytes]
        if rank_bytes:
            ranks = [f"rank {rank}" for rank in range(len(rank_bytes))]
            megabytes = [num_bytes / 1e6 for num_bytes in rank_bytes]
            bars.append(_bar(_label(name), ranks, megabytes, COLORS[run_index % len(COLORS)]))

    if not bars:
        return ""
    layout = _axes("", "MB", showlegend=len(bars) > 1)
    return figures.place("peak memory of each rank", bars, layout)


def _draw_cost(figures: _Figures, name: str, run: Run) -> str:
    """Place two figures that show each epoch's seconds and bytes."""
    epochs = [record.epoch for record in run.epochs]

    def make_bars(columns: Iterable[tuple[str, str, str]], unit: float = 1.0) -> list[dict[str, Any]]:
        bars = []
        for label, field, color in columns:
            values = [getattr(record, field) / unit for record in run.epochs]
            bars.append(_bar(label, epochs, values, color))
        return bars

    # Phases on the loader's threads run beside the others, so they are lines.
    line_style = {"type": "scatter", "mode": "lines", "line": {"dash": "dash"}}
    times = make_bars(PHASES)
    for bar in make_bars(HIDDEN):
        times.append(bar | line_style)
    byte_columns = (
        ("inside a server", "bytes_inside", INSIDE_COLOR),
        ("between servers", "bytes_outside", OUTSIDE_COLOR),
    )
    payloads = make_bars(byte_columns, unit=1e6)

    seconds_layout = _axes("epoch", "s", barmode="stack")
    bytes_layout = _axes("epoch", "MB", barmode="stack")
    seconds_figure = figures.place(f"{name}: seconds of an epoch", times, seconds_layout)
    return seconds_figure + figures.place(f"{name}: payload of an epoch", payloads, bytes_layout)


def _draw_traffic(figures: _Figures, name: str, summary: Values) -> str:
    """Place a map with the bytes between ranks, or return "" if the summary has none."""
    phases: Mapping[str, Sequence[tuple[int, int, int]]] = summary.get("traffic") or {}
    ends = set()
    for rows in phases.values():
        for source, destination, _ in rows:
            ends |= {source, destination}
    # Runs on one rank send nothing.
    if not ends:
        return ""

    # Workers have the rank -1 and come last.
    ranks = sorted(ends, key=lambda rank: (rank < 0, rank))
    labels = [f"rank {rank}" if rank >= 0 else "workers" for rank in ranks]
    sums: list[list[int | None]] = [[None] * len(ranks) for _ in ranks]
    hover_texts = [[f"{source} to {destination}" for destination in labels] for source in labels]
    for phase, rows in phases.items():
        for source, destination, num_bytes in rows:
            row = ranks.index(source)
            column = ranks.index(destination)
            sums[row][column] = (sums[row][column] or 0) + num_bytes
            hover_texts[row][column] += f"<br>{_label(phase)}: {format_bytes(num_bytes)}"

    texts = [["" if total is None else format_bytes(total) for total in row] for row in sums]
    trace = {"type": "heatmap", "x": labels, "y": labels, "xgap": 2, "ygap": 2, "zmin": 0, "showscale": False}
    trace |= {"colorscale": [[0, "#e4eefb"], [1, "#2b5c9e"]], "z": sums, "text": texts}
    trace |= {"texttemplate": "", "hovertext": hover_texts, "hoverinfo": "text"}
    # Texts do not fit in the small cells that many ranks need.
    if len(ranks) <= 12:
        trace["texttemplate"] = "%{text}"
    layout = _axes("to", "from", grid=False)
    layout["yaxis"]["autorange"] = "reversed"
    return figures.place(f"{name}: bytes between ranks in training since the last start", [trace], layout)


def _describe_plan(figures: _Figures, name: str, plan: Values) -> str:
    """Build the section with the candidates that ``auto`` compared, and why it chose one."""
    seconds: list[float] = []
    labels: list[str] = []
    rows: dict[str, Cells] = {}
    for number, candidate in enumerate(plan["predictions"], 1):
        title = f"{number}. {candidate['name']}"
        if candidate["feasible"] and candidate["epoch_seconds"]:
            seconds.append(candidate["epoch_seconds"])
            labels.append(_label(title, 28))

        remark = candidate["why_not"] or candidate["not_tried"] or candidate["barred"] or candidate["note"]
        if candidate["name"] == plan["chosen"]:
            remark = "chosen"
        figures_of_candidate = {key: candidate[key] for key in _PLANNED_FIGURES}
        rows[title] = flat_cells({**figures_of_candidate, "remark": remark})

    sentences = list(plan["why"])
    for key, (_, text) in flat_cells(plan["outcome"] or {}).items():
        sentences.append(f"measured {key}: {text}")
    sentences += plan["assumptions"]
    items = "".join(f"<li>{escape(str(sentence))}</li>" for sentence in sentences)

    bar = _bar("epoch", seconds[:_MAX_BARS], [], COLORS[0])
    bar |= {"orientation": "h", "y": labels[:_MAX_BARS]}
    layout = _axes("s")
    # Plotly draws the first bar at the bottom otherwise.
    layout["yaxis"]["autorange"] = "reversed"
    figure = figures.place("seconds of an epoch of each candidate", [bar], layout)
    table = _build_table("candidate", rows)
    return _section(f"{name}: why {plan['chosen']}", f"<ul>{items}</ul>{figure}{table}")


def _list_options(runs: Mapping[str, Run]) -> str:
    """Build a table with all runs' options. Options with several values are marked."""
    rows: dict[str, dict[str, tuple[object, str]]] = {}
    for name, run in runs.items():
        for option, cell in flat_cells(run.config).items():
            rows.setdefault(option, dict.fromkeys(runs, _ABSENT_VALUES))[name] = cell

    marked = []
    for option, cells in rows.items():
        texts = {text for _, text in cells.values()}
        # Options in which the runs differ are easy to overlook in a long table.
        if len(texts) > 1:
            marked.append(option)
    return _build_table("option", rows, marked=marked)


def _build_table(corner: str, rows: Mapping[str, Cells], marked: Sequence[str] = ()) -> str:
    """Build a table with a row for each of the named ``rows``. ``corner`` is the heading above the names."""
    columns: dict[str, None] = {}
    for cells in rows.values():
        columns |= dict.fromkeys(cells)
    head = ""
    for name in (corner, *columns):
        head += f'<th><button type="button">{escape(name)}</button></th>'

    body = ""
    for row_name, cells in rows.items():
        row_class = "marked" if row_name in marked else ""
        body += f'<tr class="{row_class}"><th>{escape(row_name)}</th>'
        for column in columns:
            value, text = cells.get(column, _ABSENT_VALUES)
            key = "" if value is None else escape(str(value))
            body += f'<td data-value="{key}">{escape(text)}</td>'
        body += "</tr>"
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _section(title: str, content: str, kind: str = "") -> str:
    return f'<section class="{kind}"><h2>{escape(title)}</h2>{content}</section>'


_STYLE = """
:root { color-scheme: light dark; --line: light-dark(#ddd, #444); --mark: light-dark(#fff3c4, #4a3f14) }
body { margin: 0; font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere;
  background: light-dark(#fff, #16181c); color: light-dark(#222, #ddd) }
header { display: flex; flex-wrap: wrap; gap: .5rem 1.5rem; align-items: center; padding: .75rem 1rem }
h1 { font-size: 1.2rem; margin: 0 auto 0 0 } h2 { font-size: 1.05rem } figcaption { font-weight: 600 }
main { padding: 0 1rem; max-width: 90rem; margin: auto } .plot { height: 20rem }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 1rem }
.grid h2 { grid-column: 1 / -1; margin-bottom: 0 } .marked { background: var(--mark) }
figure { margin: 0; min-width: 0; border: 1px solid var(--line); border-radius: 6px; padding: .5rem }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: .85rem; width: max-content }
th, td { padding: .2rem .6rem; border-bottom: 1px solid var(--line); text-align: left; max-width: 30rem;
  overflow-wrap: break-word } thead button { all: unset; cursor: pointer; &:focus-visible { outline: solid } }
[aria-sort=ascending] button::after { content: " ▲" } [aria-sort=descending] button::after { content: " ▼" }
"""

_SCRIPT = """
const figures = JSON.parse(document.getElementById('data').textContent);
const plots = [...document.querySelectorAll('.plot')], root = document.documentElement;
const preferred = matchMedia('(prefers-color-scheme: dark)');
figures.forEach(({data, layout: {xaxis, yaxis, ...more}}, number) => {
  const layout = {margin: {l: 50, r: 10, t: 10, b: 40}, paper_bgcolor: 'transparent',
    plot_bgcolor: 'transparent', legend: {orientation: 'h', x: 0, y: 1.02, yanchor: 'bottom'},
    xaxis: {automargin: true, ...xaxis}, yaxis: {automargin: true, ...yaxis}, ...more};
  // A copy: smoothing begins with the values in `figures`.
  Plotly.newPlot(plots[number], structuredClone(data), layout, {responsive: true, displayModeBar: false});
});
function recolour() {
  const colours = {'font.color': getComputedStyle(document.body).color, 'font.size': 12};
  const line = getComputedStyle(document.querySelector('figure')).borderTopColor;
  for (const axis of ['xaxis', 'yaxis'])
    for (const part of ['grid', 'zeroline', 'line']) colours[`${axis}.${part}color`] = line;
  plots.forEach(place => Plotly.relayout(place, colours));
}
recolour();
preferred.onchange = recolour;
document.getElementById('theme').onclick = () => {
  const now = root.style.colorScheme || (preferred.matches ? 'dark' : 'light');
  root.style.colorScheme = now === 'dark' ? 'light' : 'dark';
  recolour();
};
document.getElementById('smooth').oninput = ({target}) => figures.forEach(({data}, number) => {
  const share = Number(target.value);
  data.forEach(({mode, y: raw}, index) => {
    if (mode !== 'lines+markers') return;
    let last = raw[0];
    const y = raw.map(value => last = share * last + (1 - share) * value);
    Plotly.restyle(plots[number], {y: [y]}, [index]);
  });
});
for (const button of document.querySelectorAll('thead button')) button.onclick = () => {
  const head = button.parentElement, body = head.closest('table').tBodies[0];
  const sign = head.ariaSort === 'ascending' ? -1 : 1;
  for (const other of head.parentElement.cells) other.ariaSort = null;
  head.ariaSort = sign > 0 ? 'ascending' : 'descending';
  const key = ({cells: {[head.cellIndex]: cell}}) => cell.dataset.value ?? cell.textContent;
  // What is absent comes last; what is no number is ordered as text.
  const order = (a, b) => (a === '') - (b === '') ||
    sign * (a - b || a.localeCompare(b, 'en', {numeric: true}));
  body.append(...[...body.rows].sort((a, b) => order(key(a), key(b))));
};
"""
