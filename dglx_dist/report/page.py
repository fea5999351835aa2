"""One self-contained HTML page of one or several runs: figures by Plotly, sortable tables."""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, TypeAlias, final

from dglx_dist.data.storage.files import readable_bytes, replaced_file
from dglx_dist.errors import ConfigError, StorageError
from dglx_dist.report.pictures import COLORS, HIDDEN, INSIDE, OUTSIDE, PHASES
from dglx_dist.report.run_folder import Run, read_plan
from dglx_dist.report.tables import flat_cells, readable_seconds, summarise

_SPLIT = re.compile(r"(?:^|(?<=[/_ ]))(train|val|test)(?:[/_ ]|$)")
_DASHES = {"": "solid", "train": "dot", "val": "solid", "test": "dash"}
_COST = re.compile(r".*_s|seconds|num_samples|cache_.*|bytes_.*")
"""Figures of an epoch that are drawn as its cost."""
Trace: TypeAlias = Mapping[str, Any]
Cells: TypeAlias = Mapping[str, tuple[object, str]]
"""Column -> value to sort by, and text."""


def write_page(runs: Mapping[str, Run], path: Path) -> None:
    """Write the page of named ``runs`` to ``path`` atomically; it loads nothing from anywhere.

    Raises:
        ConfigError: Plotly is not installed.
        StorageError: ``path`` cannot be written, or a plan is damaged.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ConfigError(
            f"--html {path} needs Plotly, which is not installed; `pip install 'dglx_dist[report]'`, or "
            "leave --html out for the tables alone"
        ) from error
    text = page_of(runs, get_plotlyjs())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced_file(path) as partial:
            partial.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise StorageError(f"cannot write the page {path}: {error}; choose another file") from error


def page_of(runs: Mapping[str, Run], plotly: str) -> str:
    """Return the page; ``plotly`` is the text of plotly.js. Only that and the page's own script can run."""
    figures = _Figures()
    summaries = {name: run.summary or summarise({}, run.epochs) for name, run in runs.items()}
    plans = {name: plan for name, run in runs.items() if (plan := read_plan(run.folder)) is not None}
    rows = {name: flat_cells(summary) for name, summary in summaries.items()}
    costs = (
        _cost(figures, name, run) + _traffic(figures, name, summaries[name]) for name, run in runs.items()
    )
    body = [
        *(
            f"<p>{escape(name)} did not finish, or still runs.</p>"
            for name, run in runs.items()
            if not run.summary
        ),
        _section("Runs", _table("run", rows)),
        _section("Learning and speed", _curves(figures, runs) + _memory(figures, summaries), "grid"),
        _section("Cost", "".join(costs), "grid"),
        *(_plan(figures, name, plan) for name, plan in plans.items()),
        _section("Configuration and environment", _options(runs)),
    ]
    scripts = (plotly, _SCRIPT)
    hashes = (b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in scripts)
    allowed = " ".join(f"'sha256-{one}'" for one in hashes)
    data = json.dumps(figures.found, allow_nan=False).replace("<", "\\u003c")
    title = escape(", ".join(runs))
    return "".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data: blob:; ',
            f"style-src 'unsafe-inline'; script-src {allowed}\">",
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title><style>{_STYLE}</style></head><body><header><h1>{title}</h1>",
            '<label>smoothing <input id="smooth" type="range" max="0.95" step="0.05" value="0"></label>',
            '<button id="theme" type="button">light / dark</button></header><main>',
            *body,
            f'</main><script type="application/json" id="data">{data}</script>',
            *(f"<script>{one}</script>" for one in scripts),
            "</body></html>\n",
        ]
    )


@final
class _Figures:
    """Figures for Plotly, in the order of their places."""

    def __init__(self) -> None:
        self.found: list[Mapping[str, Any]] = []

    def place(self, title: str, traces: Sequence[Trace], choices: Trace | None = None, **layout: Any) -> str:
        """Keep a figure and return its place; of ``choices`` the reader selects what replaces its data."""
        self.found.append({"data": traces, "layout": layout, "choices": choices})
        options = "".join(f"<option>{escape(name)}</option>" for name in choices or ())
        select = f"<select>{options}</select>" if options else ""
        return f'<figure><figcaption>{escape(title)} {select}</figcaption><div class="plot"></div></figure>'


def _label(text: str, most: int = 36) -> str:
    # Plotly reads tags in texts.
    return escape(text if len(text) <= most else text[: most - 1] + "…", quote=False)


def _axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": title}, **more}


def _bar(name: str, x: Sequence[object], y: Iterable[float], number_or_color: int | str) -> dict[str, Any]:
    color = number_or_color if isinstance(number_or_color, str) else COLORS[number_or_color % len(COLORS)]
    return {"type": "bar", "x": x, "y": [*y], "name": name, "marker": {"color": color}}


def _curves(figures: _Figures, runs: Mapping[str, Run]) -> str:
    panels: dict[str, list[dict[str, Any]]] = {}
    for number, (run_name, run) in enumerate(runs.items()):
        points: dict[str, dict[int, float]] = {}
        for one in run.epochs:
            for name, value in one.scalars().items():
                points.setdefault(name, {})[one.epoch] = value
        for name in (one for one in points if not _COST.fullmatch(one)):
            split = match[1] if (match := _SPLIT.search(name)) else ""
            color = COLORS[(number if len(runs) > 1 else len(split)) % len(COLORS)]
            label = " ".join([_label(run_name)] * (len(runs) > 1) + [split] * bool(split))
            trace = {"x": [*points[name]], "y": [*points[name].values()], "name": label}
            trace |= {"line": {"color": color, "dash": _DASHES[split]}}
            faint = {"opacity": 0.3, "showlegend": False, "hoverinfo": "skip", "visible": False}
            panel = panels.setdefault(_SPLIT.sub("", name).rpartition("/")[2].replace("_", " "), [])
            panel += (
                {**trace, "mode": "lines+markers", "marker": {"size": 4}, "meta": "smooth"},
                trace | faint,
            )
    return "".join(figures.place(name, panel, xaxis=_axis("epoch")) for name, panel in panels.items())


def _memory(figures: _Figures, summaries: Mapping[str, Trace]) -> str:
    bars = []
    for number, (name, summary) in enumerate(summaries.items()):
        ranks = summary.get("rank_memory_bytes") or [summary.get("peak_memory_bytes") or 0]
        bars.append(_bar(_label(name), [*range(len(ranks))], (one / 1e6 for one in ranks), number))
    axes = {"xaxis": _axis("rank", dtick=1), "yaxis": _axis("MB"), "showlegend": len(bars) > 1}
    return figures.place("peak memory of each rank", bars, **axes)


def _cost(figures: _Figures, name: str, run: Run) -> str:
    epochs = [one.epoch for one in run.epochs]

    def values(field: str, unit: float = 1.0) -> list[float]:
        return [getattr(one, field) / unit for one in run.epochs]

    times = [_bar(label, epochs, values(field), color) for label, field, color in PHASES]
    for label, field, color in HIDDEN:
        line = {"color": color, "dash": "dash"}
        times.append({"x": epochs, "y": values(field), "name": label, "line": line})
    moved = [
        _bar("inside a server", epochs, values("bytes_inside", 1e6), INSIDE),
        _bar("between servers", epochs, values("bytes_outside", 1e6), OUTSIDE),
    ]
    layout: dict[str, Any] = {"barmode": "stack", "xaxis": _axis("epoch")}
    # The first epoch compiles kernels; at full height, it would flatten all others.
    sums = [one.wait_s + one.compute_s + one.exchange_s for one in run.epochs]
    warm, cut, axis = max(sums[1:], default=0.0), "", _axis("s")
    if sums and sums[0] > 2 * warm > 0:
        axis["range"], cut = [0, 1.6 * warm], f" (the first epoch, {readable_seconds(sums[0])} s, is cut off)"
    drawn = figures.place(f"{name}: seconds of an epoch{cut}", times, **layout, yaxis=axis)
    return drawn + figures.place(f"{name}: payload of an epoch", moved, **layout, yaxis=_axis("MB"))


def _traffic(figures: _Figures, name: str, summary: Trace) -> str:
    phases: Mapping[str, Sequence[Sequence[int]]] = summary.get("traffic") or {}
    if not phases:
        return ""
    rows = [row for rows in phases.values() for row in rows]
    ends = {end for row in rows for end in row[:2]}.union(range(summary.get("ranks", 0)))
    ranks = sorted(ends, key=lambda one: (one < 0, one))
    labels = [f"rank {one}" if one >= 0 else "workers" for one in ranks]

    def matrix(rows: Iterable[Sequence[int]]) -> dict[str, Any]:
        cells: list[list[int | None]] = [[None] * len(ranks) for _ in ranks]
        for source, destination, num_bytes in rows:
            row, column = cells[ranks.index(source)], ranks.index(destination)
            row[column] = (row[column] or 0) + num_bytes
        return {
            "z": cells,
            "text": [["" if one is None else readable_bytes(one) for one in row] for row in cells],
        }

    choices = {label: matrix(some) for label, some in {"all phases": rows, **phases}.items()}
    trace = {"type": "heatmap", "x": labels, "y": labels, "colorscale": "Blues", "reversescale": True}
    trace |= {**choices["all phases"], "hovertemplate": "%{y} to %{x}: %{text}<extra></extra>"}
    trace |= {"texttemplate": "%{text}" if len(ranks) <= 12 else "", "showscale": False, "xgap": 2, "ygap": 2}
    axes = {
        "xaxis": _axis("to", showgrid=False),
        "yaxis": _axis("from", showgrid=False, autorange="reversed"),
    }
    return figures.place(f"{name}: bytes between ranks in training", [trace], choices, **axes)


def _plan(figures: _Figures, name: str, plan: Trace) -> str:
    named = {f"{number}. {one['name']}": one for number, one in enumerate(plan["predictions"], 1)}
    taken = plan["chosen"]
    fast = {place: one for place, one in named.items() if one["feasible"] and one["epoch_seconds"]}
    fast = dict([*fast.items()][:12])
    places, bars = [_label(place, 28) for place in fast], []
    for number, part in enumerate(("compute", "sampling", "outside", "inside", "all_reduce")):
        bar = _bar(part.replace("_", "-"), [], (), number)
        seconds = [one["seconds"][part] for one in fast.values()]
        bars.append({**bar, "orientation": "h", "y": places, "x": seconds})
    rows = {}
    for place, one in named.items():
        figures_of = {
            key: one[key] for key in ("epoch_seconds", "bytes_outside", "bytes_inside", "memory_bytes")
        }
        remark = "chosen" if one["name"] == taken else one["why_not"] or one["barred"] or one["note"]
        rows[place] = flat_cells({**figures_of, "remark": remark})
    outcome = flat_cells({f"measured {key}": value for key, value in (plan["outcome"] or {}).items()})
    reasons = [*plan["why"], *(f"{key}: {text}" for key, (_, text) in outcome.items())]
    listed = "".join(f"<li>{escape(str(one))}</li>" for one in (*reasons, *plan["assumptions"]))
    layout = {"barmode": "stack", "yaxis": {"autorange": "reversed"}, "xaxis": _axis("s")}
    drawn = figures.place("predicted seconds of an epoch", bars, **layout)
    return _section(f"{name}: why {taken}", f"<ul>{listed}</ul>{drawn}{_table('candidate', rows)}")


def _options(runs: Mapping[str, Run]) -> str:
    columns = {name: flat_cells(run.config) for name, run in runs.items()}
    rows: dict[str, Cells] = {}
    for option in dict.fromkeys(option for cells in columns.values() for option in cells):
        rows[option] = {name: cells.get(option, (None, "")) for name, cells in columns.items()}
    differs = [option for option, cells in rows.items() if len({text for _, text in cells.values()}) > 1]
    return _table("option", rows, marked=differs)


def _table(corner: str, rows: Mapping[str, Cells], marked: Sequence[str] = ()) -> str:
    columns = list(dict.fromkeys(column for cells in rows.values() for column in cells))
    names = (escape(one.replace("_", " ")) for one in (corner, *columns))
    lines = ["<tr>" + "".join(f'<th><button type="button">{name}</button></th>' for name in names) + "</tr>"]
    for row, cells in rows.items():
        found = (cells.get(column, ("", "")) for column in columns)
        texts = (f'<td data-value="{escape(str(value))}">{escape(text)}</td>' for value, text in found)
        kind = "marked" if row in marked else ""
        lines.append(f'<tr class="{kind}"><th>{escape(row)}</th>{"".join(texts)}</tr>')
    head, *body = lines
    return f'<div class="scroll"><table><thead>{head}</thead><tbody>{"".join(body)}</tbody></table></div>'


def _section(title: str, content: str, kind: str = "") -> str:
    return f'<section class="{kind}"><h2>{escape(title)}</h2>{content}</section>'


_STYLE = """
:root { color-scheme: light dark; --line: light-dark(#ddd, #444); --back: light-dark(#fff, #16181c);
  --text: light-dark(#222, #ddd); --mark: light-dark(#fff3c4, #4a3f14) }
body { margin: 0; font: 15px/1.5 system-ui, sans-serif; background: var(--back); color: var(--text) }
header { display: flex; flex-wrap: wrap; gap: .5rem 1.5rem; align-items: center; padding: .75rem 1rem;
  border-bottom: 1px solid var(--line) }
h1 { font-size: 1.2rem; margin: 0 auto 0 0; overflow-wrap: anywhere }
h2 { font-size: 1.05rem; overflow-wrap: anywhere }
main { padding: 0 1rem; max-width: 90rem; margin: auto }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 1rem }
.grid h2 { grid-column: 1 / -1; margin-bottom: 0 }
figure { margin: 0; min-width: 0; border: 1px solid var(--line); border-radius: 6px; padding: .5rem }
figcaption { font-weight: 600; overflow-wrap: anywhere } select { max-width: 100% } .plot { height: 20rem }
.scroll { overflow-x: auto; margin: .5rem 0 }
table { border-collapse: collapse; font-size: .85rem; width: max-content }
th, td { padding: .2rem .6rem; border-bottom: 1px solid var(--line); text-align: left; white-space: nowrap }
td { font-variant-numeric: tabular-nums; max-width: 30rem; white-space: normal; overflow-wrap: break-word }
thead button { all: unset; cursor: pointer; font-weight: 600 }
thead button:focus-visible { outline: 2px solid }
[aria-sort=ascending] button::after { content: " ▲" } [aria-sort=descending] button::after { content: " ▼" }
.marked { background: var(--mark) }
"""

_SCRIPT = """
'use strict';
const figures = JSON.parse(document.getElementById('data').textContent);
const plots = [...document.querySelectorAll('.plot')];
const root = document.documentElement, preferred = matchMedia('(prefers-color-scheme: dark)');
function colours() {
  const text = getComputedStyle(document.body).color;
  const line = getComputedStyle(document.querySelector('header')).borderBottomColor;
  const found = {'font.color': text};
  for (const axis of ['xaxis', 'yaxis'])
    for (const name of ['gridcolor', 'zerolinecolor', 'linecolor']) found[`${axis}.${name}`] = line;
  return found;
}
function smoothed(values, share) {
  let last = values[0];
  return values.map(value => last = share * last + (1 - share) * value);
}
figures.forEach((figure, number) => {
  const place = plots[number], {xaxis, yaxis, ...layout} = figure.layout;
  const base = {font: {size: 12}, margin: {l: 50, r: 10, t: 10, b: 40}, paper_bgcolor: 'rgba(0,0,0,0)',
    plot_bgcolor: 'rgba(0,0,0,0)', legend: {orientation: 'h', x: 0, y: 1.02, yanchor: 'bottom'},
    xaxis: {automargin: true, ...xaxis}, yaxis: {automargin: true, ...yaxis}, ...layout};
  Plotly.newPlot(place, figure.data, base, {responsive: true, displaylogo: false, displayModeBar: false})
    .then(() => Plotly.relayout(place, colours()));
  const select = place.parentElement.querySelector('select');
  if (select) select.onchange = () => {
    const {z, text} = figure.choices[select.value];
    Plotly.restyle(place, {z: [z], text: [text]});
  };
});
function recolour() { plots.forEach(place => Plotly.relayout(place, colours())); }
preferred.onchange = recolour;
document.getElementById('theme').onclick = () => {
  const isDark = root.style.colorScheme ? root.style.colorScheme === 'dark' : preferred.matches;
  root.style.colorScheme = isDark ? 'light' : 'dark';
  recolour();
};
document.getElementById('smooth').oninput = event => figures.forEach((figure, number) => {
  const share = Number(event.target.value);
  figure.data.forEach((trace, index) => {
    if (trace.meta !== 'smooth') return;
    Plotly.restyle(plots[number], {y: [smoothed(figure.data[index + 1].y, share)]}, [index]);
    Plotly.restyle(plots[number], {visible: share > 0}, [index + 1]);
  });
});
for (const button of document.querySelectorAll('thead button')) button.onclick = () => {
  const head = button.parentElement, body = head.closest('table').tBodies[0], column = head.cellIndex;
  const rises = head.ariaSort !== 'ascending', sign = rises ? 1 : -1;
  for (const other of head.parentElement.cells) other.ariaSort = null;
  head.ariaSort = rises ? 'ascending' : 'descending';
  const key = row => row.cells[column].dataset.value ?? row.cells[column].textContent;
  const order = (a, b) => a - b || a.localeCompare(b, 'en', {numeric: true});  // not a number: as texts
  body.append(...[...body.rows].sort((a, b) => sign * order(key(a), key(b))));
};
"""
