"""One self-contained HTML page of one or several runs, with figures by Plotly and sortable tables."""

import hashlib
import json
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape as escape_markup
from pathlib import Path
from typing import Any, TypeAlias, final

from dglx_dist.data.storage.files import replace_atomically
from dglx_dist.errors import ConfigError
from dglx_dist.memory import format_bytes
from dglx_dist.progress import visible
from dglx_dist.report.run_folder import Run, read_plan
from dglx_dist.report.tables import COLORS, HIDDEN, INSIDE, OUTSIDE, PHASES, flat_cells, summarise

Values: TypeAlias = Mapping[str, Any]
Cells: TypeAlias = Mapping[str, tuple[object, str]]  # column -> value to sort by, and text
_ABSENT = (None, "-")
_SPLIT = re.compile(r"(?:^|(?<=[/_ ]))(train|val|test)(?:[/_ ]|$)")
_DASHES = {"": "solid", "train": "dot", "val": "solid", "test": "dash"}
_COST = re.compile(r".*_s|seconds|num_samples|cache_.*|.*bytes_.*")
_PLANNED = ("epoch_seconds", "bytes_outside", "bytes_inside", "memory_bytes")
_BEGIN = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="generator" content="dglx report">"""


def escape(text: str, quote: bool = True) -> str:
    """Return ``text`` as HTML without tags and control codes."""
    return escape_markup(visible(text), quote)


def check_page(path: Path) -> None:
    """Raise ConfigError unless ``path`` ends in .html and is new, or is a page of :func:`write_page`."""
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
    """Write the page of named ``runs`` to ``path`` atomically. Raise ConfigError if Plotly is not installed.

    ``means`` over seeds (:func:`dglx_dist.report.tables.spread_cells`) are added to its first table.
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
    """Return the page. ``plotly`` is the text of plotly.js. Only that and the page's own script can run."""
    figures = _Figures()
    title = escape(", ".join(runs))
    summaries = {name: run.summary or summarise({}, run.epochs) for name, run in runs.items()}
    rows = {name: flat_cells({**summary, "auto": {}}) for name, summary in summaries.items()}

    # The figures are in the order of the page, because the script finds their places by number.
    learning = _curves(figures, runs)
    costs = [_cost(figures, name, runs[name]) + _traffic(figures, name, summaries[name]) for name in runs]
    costs.append(_memory(figures, summaries))
    plans = [_plan(figures, name, plan) for name, run in runs.items() if (plan := read_plan(run.folder))]
    scripts = (plotly, _SCRIPT)
    digests = [b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    data = json.dumps(figures, allow_nan=False).replace("<", "\\u003c")
    return f"""{_BEGIN}<title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data: blob:;
style-src 'unsafe-inline'; script-src {" ".join(f"'sha256-{digest}'" for digest in digests)}">
<style>{_STYLE}</style></head><body><header><h1>{title}</h1>
<label>smoothing <input id="smooth" type="range" max="0.95" step="0.05" value="0"></label>
<button id="theme" type="button">light / dark</button></header><main>
{"".join(f"<p>{escape(name)} did not finish, or still runs.</p>" for name in runs if not runs[name].summary)}
{_section("Runs", _table("run", rows | dict(means or {})))}{_section("Learning and speed", learning, "grid")}
{_section("Cost", "".join(costs), "grid")}{"".join(plans)}
{_section("Configuration and environment", _options(runs))}</main>
<script type="application/json" id="data">{data}</script>
<script>{plotly}</script><script>{_SCRIPT}</script></body></html>
"""


@final
class _Figures(list[Values]):
    def place(self, title: str, traces: Sequence[Values], layout: Values) -> str:
        self.append({"data": traces, "layout": layout})
        return f'<figure><figcaption>{escape(title)}</figcaption><div class="plot"></div></figure>'


def _label(text: str, most: int = 36) -> str:
    # Plotly interprets tags in texts. The middle is cut, because names often differ only at their end.
    middle = most // 2
    return escape(text if len(text) <= most else f"{text[: middle - 1]}…{text[-middle:]}", quote=False)


def _axes(x: str, y: str = "", *, grid: bool = True, **more: Any) -> dict[str, Any]:
    titles = {"xaxis": {"text": x, "standoff": 8}, "yaxis": {"text": y, "standoff": 8}}
    return {name: {"title": title, "showgrid": grid} for name, title in titles.items()} | more


def _bar(name: str, x: Sequence[object], y: Sequence[float], color: str) -> dict[str, Any]:
    return {"type": "bar", "name": name, "x": x, "y": y, "marker": {"color": color}}


def _curves(figures: _Figures, runs: Mapping[str, Run]) -> str:
    panels: dict[str, list[Values]] = {}
    for number, (run_name, run) in enumerate(runs.items()):
        scalars = [(record.epoch, record.scalars()) for record in run.epochs]
        names = dict.fromkeys(name for _, figure in scalars for name in figure if not _COST.fullmatch(name))
        for name in names:
            split = match[1] if (match := _SPLIT.search(name)) else ""
            points = [(epoch, figure[name]) for epoch, figure in scalars if name in figure]
            label = f"{_label(run_name)} {split}".strip() if len(runs) > 1 else split
            line = {"color": COLORS[number % len(COLORS)], "dash": _DASHES[split]}
            trace = {"name": label, "line": line, "mode": "lines+markers", "marker": {"size": 4}}
            panel = panels.setdefault(_SPLIT.sub("", name).rpartition("/")[2].replace("_", " "), [])
            panel.append(trace | dict(zip("xy", zip(*points, strict=True), strict=True)))
    return "".join(figures.place(name, panel, _axes("epoch")) for name, panel in panels.items())


def _memory(figures: _Figures, summaries: Mapping[str, Values]) -> str:
    bars = []
    for number, (name, summary) in enumerate(summaries.items()):
        peak = summary.get("peak_memory_bytes")
        held = summary.get("rank_memory_bytes") or ([peak] if peak else [])
        color = COLORS[number % len(COLORS)]
        ranks = [f"rank {rank}" for rank in range(len(held))]
        if held:
            bars.append(_bar(_label(name), ranks, [num_bytes / 1e6 for num_bytes in held], color))

    layout = _axes("", "MB", showlegend=len(bars) > 1)
    return figures.place("peak memory of each rank", bars, layout) if bars else ""


def _cost(figures: _Figures, name: str, run: Run) -> str:
    epochs = [record.epoch for record in run.epochs]

    def make_bars(*parts: tuple[str, str, str], unit: float = 1.0) -> list[dict[str, Any]]:
        columns = {part: [getattr(record, part) / unit for record in run.epochs] for _, part, _ in parts}
        return [_bar(label, epochs, columns[part], color) for label, part, color in parts]

    line_style = {"type": "scatter", "mode": "lines", "line": {"dash": "dash"}}
    lines = [bar | line_style for bar in make_bars(*HIDDEN)]
    moved = (("inside a server", "bytes_inside", INSIDE), ("between servers", "bytes_outside", OUTSIDE))
    times = _axes("epoch", "s", barmode="stack")
    sizes = _axes("epoch", "MB", barmode="stack")
    drawn = figures.place(f"{name}: seconds of an epoch", make_bars(*PHASES) + lines, times)
    return drawn + figures.place(f"{name}: payload of an epoch", make_bars(*moved, unit=1e6), sizes)


def _traffic(figures: _Figures, name: str, summary: Values) -> str:
    phases: Mapping[str, Sequence[Sequence[int]]] = summary.get("traffic") or {}
    # Workers have the rank -1 and come last.
    ends = {end for rows in phases.values() for row in rows for end in row[:2]}
    ranks = sorted(ends, key=lambda rank: (rank < 0, rank))
    labels = [f"rank {rank}" if rank >= 0 else "workers" for rank in ranks]
    sums: list[list[int | None]] = [[None] * len(ranks) for _ in ranks]
    parts = [[f"{source} to {destination}" for destination in labels] for source in labels]
    for phase, rows in phases.items():
        for source, destination, num_bytes in rows:
            row = ranks.index(source)
            column = ranks.index(destination)
            sums[row][column] = (sums[row][column] or 0) + num_bytes
            parts[row][column] += f"<br>{_label(phase)}: {format_bytes(num_bytes)}"

    texts = [["" if total is None else format_bytes(total) for total in row] for row in sums]
    trace = {"type": "heatmap", "x": labels, "y": labels, "xgap": 2, "ygap": 2, "zmin": 0, "showscale": False}
    trace |= {"colorscale": [[0, "#e4eefb"], [1, "#2b5c9e"]], "texttemplate": "%{text}" * (len(ranks) <= 12)}
    trace |= {"z": sums, "text": texts, "hovertext": parts, "hoverinfo": "text"}
    layout = _axes("to", "from", grid=False)
    layout["yaxis"]["autorange"] = "reversed"
    title = f"{name}: bytes between ranks in training since the last start"
    return figures.place(title, [trace], layout) if ranks else ""


def _plan(figures: _Figures, name: str, plan: Values) -> str:
    candidates = enumerate(plan["predictions"], 1)
    named = {f"{number}. {candidate['name']}": candidate for number, candidate in candidates}
    timed = {
        place: candidate
        for place, candidate in named.items()
        if candidate["feasible"] and candidate["epoch_seconds"]
    }
    seconds = [candidate["epoch_seconds"] for candidate in timed.values()][:12]
    places = [_label(place, 28) for place in timed][:12]
    bars = [_bar("epoch", seconds, [], COLORS[0]) | {"orientation": "h", "y": places}]
    rows = {}
    for place, candidate in named.items():
        remark = (
            "chosen"
            if candidate["name"] == plan["chosen"]
            else candidate["why_not"] or candidate["not_tried"] or candidate["barred"] or candidate["note"]
        )
        rows[place] = flat_cells({key: candidate[key] for key in _PLANNED} | {"remark": remark})

    outcome = flat_cells(plan["outcome"] or {})
    reasons = [*plan["why"], *(f"measured {key}: {text}" for key, (_, text) in outcome.items())]
    listed = "".join(f"<li>{escape(str(candidate))}</li>" for candidate in (*reasons, *plan["assumptions"]))
    layout = _axes("s")
    layout["yaxis"]["autorange"] = "reversed"
    drawn = figures.place("seconds of an epoch of each candidate", bars, layout)
    return _section(f"{name}: why {plan['chosen']}", f"<ul>{listed}</ul>{drawn}{_table('candidate', rows)}")


def _options(runs: Mapping[str, Run]) -> str:
    rows: dict[str, dict[str, tuple[object, str]]] = {}
    for name, run in runs.items():
        for option, cell in flat_cells(run.config).items():
            rows.setdefault(option, dict.fromkeys(runs, _ABSENT))[name] = cell
    differs = [option for option, cells in rows.items() if len({text for _, text in cells.values()}) > 1]
    return _table("option", rows, marked=differs)


def _table(corner: str, rows: Mapping[str, Cells], marked: Sequence[str] = ()) -> str:
    columns = list(dict.fromkeys(column for cells in rows.values() for column in cells))
    names = map(escape, (corner, *columns))
    head = "".join(f'<th><button type="button">{name}</button></th>' for name in names)
    body = ""
    for row, cells in rows.items():
        body += f'<tr class="{"marked" * (row in marked)}"><th>{escape(row)}</th>'
        for value, text in (cells.get(column, _ABSENT) for column in columns):
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
