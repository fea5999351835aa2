"""Writes Markdown pages from figures and notes: README.md of a folder, and the pages of docs/results."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.bench import results
from scripts.bench.figures import figures_of, judge_experiment
from scripts.bench.notes import Notes, read_notes
from scripts.bench.plots import WHAT
from scripts.bench.records import Experiment
from scripts.bench.suites import everything, find
from scripts.out_files import markdown_table, write_text

_WIDTH = 120
_HEAD = "<!-- Made by `python scripts/bench performance` from docs/results: change what is there. -->"
INDEX = "index.md"
_PACKAGE = "package.md"
_PAGES = {
    "distdgl.md": ("D", "DistDGL: partitions and scaling"),
    "p3.md": ("P", "P3: push_pull"),
    "granndis.md": ("G", "GraNNDis: preloading"),
    "dorylus.md": ("Y", "Dorylus: stateless workers"),
    "fewer_bytes.md": ("B", "Caches, covers and narrow rows"),
    "auto.md": ("A", "The automatic choice"),
    "peers.md": ("PEER", "Other packages"),
    _PACKAGE: ("", "Parts of this package"),
}
"""Page to the letters that the ids of its experiments begin with, and its title."""
_TEN = ("D1", "D2", "P1", "P6", "G1", "G4", "Y2", "B1", "A1", "PEER1")
"""The experiments of the short table."""
_PICTURE = "G1-phases.png"
_LEGEND = """How to read it: a ratio is the quotient of two medians. The range behind it has the quartiles
of the quotients of single repetitions, which ran one after the other. A claim counts as
reproduced when the ratio is within the bounds that its experiment states. If the bounds claim
a difference, the range must leave 1 out. phi is the share of its time that the baseline spends
on the network at the rate shown. Seconds, phases and MB are those of one epoch. Phases are
means over the ranks, and MB are sums. Sample and fetch run on threads beside the others. What
is simulated is marked. On plain loopback nothing limits the links, and no claim is judged."""
_OVERVIEW = ("experiment", "claim of, or aim", "measured here", "verdict")
_RATIO_HEADS = ("comparison", "measured", "predicted", "bound")
_DETAILS = ("variants", "ratios", "cells", "bytes", "closed form", "done once")
"""Keys of the figures that a detailed section shows as tables."""


def write_page(out: Path) -> Path:
    """Write ``out/README.md`` from the results in ``out``, with links to the pictures there."""
    outcomes = {find(outcome.experiment).id: outcome for outcome in results.read(out)}
    notes = read_notes()
    rows, sections = [], []
    for experiment in everything():
        if experiment.id in outcomes:
            figures = figures_of(experiment, outcomes[experiment.id])
            rows.append(_overview_row(experiment, figures))
            note = notes.experiments.get(experiment.id, {})
            sections.append(_section(experiment, figures, note, pictures_of(experiment, out), detailed=True))
    overview = markdown_table(_OVERVIEW, rows)
    return write_text(out / "README.md", "\n\n".join(["# Results", overview, _LEGEND, *sections]) + "\n")


def render(figures: Mapping[str, Mapping[str, Any]], notes: Notes, folder: Path) -> dict[str, str]:
    """Return the text of each page of docs/results, with the pictures that are in ``folder``."""
    rows: dict[str, tuple[str, ...]] = {}
    sections: dict[str, list[str]] = {page: [] for page in _PAGES}
    for experiment in everything():
        experiment_figures = figures.get(experiment.id)
        page = find_page(experiment.id)
        shown = bool(experiment_figures and (experiment_figures["variants"] or experiment_figures["cells"]))
        rows[experiment.id] = _overview_row(experiment, experiment_figures, page)
        if experiment_figures and shown:
            note = notes.experiments.get(experiment.id, {})
            pictures = pictures_of(experiment, folder)
            sections[page].append(_section(experiment, experiment_figures, note, pictures))
    parts = []
    for title, part in notes.parts.items():
        if part["Overview"]:
            parts.append(
                (_link(title, page=_PACKAGE), *(cell.strip() for cell in part["Overview"].split("|")))
            )
        sections[_PACKAGE].append(f"## {title}\n\n{part['Text']}")
    intro, _, settings = notes.intro.partition("### Settings\n")
    index = [
        "# Results",
        _HEAD,
        intro,
        "## In ten rows",
        markdown_table(_OVERVIEW, [rows[name] for name in _TEN]),
        f"![Seconds of an epoch by phase]({_PICTURE})" if (folder / _PICTURE).is_file() else "",
        "## All experiments",
        markdown_table(_OVERVIEW, list(rows.values())),
        "## Parts of this package",
        markdown_table(("part", *_OVERVIEW[1:]), parts),
        f"## Settings\n{settings}" if settings else "",
        "## Machines",
        _machines(list(figures.values())),
    ]
    pages = {page: [f"# {title}", _HEAD, *sections[page]] for page, (_, title) in _PAGES.items()}
    return {
        page: "\n\n".join(part.strip("\n") for part in content if part) + "\n"
        for page, content in {INDEX: index, **pages}.items()
        if len(content) > 2
    }


def find_page(experiment: str) -> str:
    """Return the page of an experiment: that of the letters which its id begins with."""
    letters = experiment.rstrip("0123456789")
    return next((page for page, (prefix, _) in _PAGES.items() if prefix == letters), _PACKAGE)


def pictures_of(experiment: Experiment, folder: Path) -> list[str]:
    """Return the names of the pictures of ``experiment`` in ``folder``."""
    names = [f"{experiment.id}-{kind}.png" for kind in WHAT]
    return [name for name in names if (folder / name).is_file()]


def _overview_row(
    experiment: Experiment, figures: Mapping[str, Any] | None, page: str = ""
) -> tuple[str, ...]:
    paper = experiment.claim.paper
    if figures is None:
        return (_title(experiment), paper, "-", str(judge_experiment(experiment, None)))
    bounded = [ratio for ratio in figures["ratios"] if ratio["bound"]]
    met = sum(ratio["verdict"].startswith("reproduced") for ratio in bounded)
    ratios_shown = [
        f"{ratio['name']}: {_format_measured(ratio)}" for ratio in (bounded or figures["ratios"])[:1]
    ]
    verdict = _verdict(figures)
    count = f" ({met} of {len(bounded)} bounds)" if verdict.startswith("partly") else ""
    link = _link(_title(experiment), experiment.id, page)
    return f"{link}: {experiment.title}", paper, " ".join(ratios_shown) or "-", verdict + count


def _verdict(figures: Mapping[str, Any]) -> str:
    return "; ".join(text for text in (figures["verdict"], figures["label"]) if text)


def summary(figures: Mapping[str, Any]) -> str:
    """Return one line with the verdict of an experiment and its ratios."""
    verdict = _verdict(figures)
    why = "" if figures["ratios"] else figures["why"].splitlines()[0]
    return ": ".join(
        text for text in (verdict, why, "; ".join(map(_format_ratio, figures["ratios"]))) if text
    )


def _section(
    experiment: Experiment,
    figures: Mapping[str, Any],
    note: Mapping[str, str],
    pictures: Sequence[str],
    *,
    detailed: bool = False,
) -> str:
    claim = experiment.claim
    verdict = _verdict(figures)
    # The lesson was written for the published result, so a new result shows its verdict instead.
    lesson = f"{figures['why']}." if detailed else note.get("Lesson", "")
    ratios = [ratio for ratio in figures["ratios"] if ratio["bound"] or not _is_formula(ratio)]
    result = [_format_bytes(figures["bytes"]), figures["nearness"], figures["accuracy"]]
    result += [f"Simulated: {text}" for text in figures["simulated"]]
    bullets = {
        "Claim": f"{_capitalize(claim.says)} ({claim.paper}).",
        "Their setting": f"{_capitalize(claim.setting)}.",
        "Predicted": experiment.prediction if detailed else "",
        "Here": _capitalize(note.get("Here", "")),
        "Also": " ".join(f"{_capitalize(text).rstrip('.')}." for text in result if text),
        "Verdict": f"**{verdict}**. {_capitalize(lesson)}",
    }
    source = f"`{figures['command']}`, {figures['repetitions']} repetitions, {figures['date'][:10]}"
    parts = [
        f"## {_title(experiment)}",
        "\n".join(_fill(f"- **{name}**: {text}", "  ") for name, text in bullets.items() if text),
        *(
            [markdown_table(_RATIO_HEADS, [_ratio_row(ratio) for ratio in ratios])]
            if ratios and not detailed
            else ()
        ),
        *(_details(figures) if detailed else ()),
        source,
        *(f"![{experiment.id}]({picture})" for picture in pictures),
    ]
    return "\n\n".join(parts)


def _details(figures: Mapping[str, Any]) -> list[str]:
    tables = [_table(figures[name]) for name in _DETAILS if figures[name]]
    lines = [*figures["facts"], *(f"- {text}" for text in figures["circumstances"])]
    lines += [f"- Machine: {figures['machine']}."] if figures["machine"] else []
    return [part for part in (*tables, "\n".join(lines)) if part]


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    heads = list(dict.fromkeys(name for row in rows for name in row))
    return markdown_table(heads, [[_cell(row.get(name)) for name in heads] for row in rows])


def _cell(value: object) -> str:
    if isinstance(value, list):
        return _format_spread(value)
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _format_spread(value: Sequence[float] | None, mark: str = "") -> str:
    """Format a spread as "2.10 (2.05 to 2.15)", or "-" for None."""
    if value is None:
        return "-"
    middle, low, high = (f"{number:.2f}" for number in value)
    return f"{mark}{middle}{mark}" if low == high else f"{mark}{middle}{mark} ({low} to {high})"


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]


def _title(experiment: Experiment) -> str:
    return f"{experiment.id}: {experiment.title}"


def _link(title: str, text: str = "", page: str = "") -> str:
    anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
    return f"[{text or title}]({page}#{anchor})"


def _format_measured(ratio: Mapping[str, Any], mark: str = "") -> str:
    words = _format_spread(ratio["measured"], mark)
    return f"{words} simulated" if "simulated" in ratio["verdict"] and ratio["measured"] else words


def _is_formula(ratio: Mapping[str, Any]) -> bool:
    measured, predicted = ratio["measured"], ratio["predicted"]
    of_bytes = bool(ratio["of"].startswith("bytes") and measured and predicted)
    return of_bytes and abs(measured[0] / predicted - 1) < 0.005


def _format_ratio(ratio: Mapping[str, Any]) -> str:
    words = [_format_measured(ratio, "**")]
    words += [] if ratio["predicted"] is None else [f"predicted {ratio['predicted']:.2f}"]
    met = "met" if ratio["verdict"].startswith("reproduced") else "missed"
    words += [f"bound {ratio['bound']} {met}"] if ratio["bound"] else []
    return f"`{ratio['name']}` {', '.join(words)}"


def _ratio_row(ratio: Mapping[str, Any]) -> tuple[str, ...]:
    predicted = "" if ratio["predicted"] is None else f"{ratio['predicted']:.2f}"
    met = "met" if ratio["verdict"].startswith("reproduced") else "missed"
    return (
        ratio["name"],
        _format_measured(ratio),
        predicted,
        f"{ratio['bound']}: {met}" if ratio["bound"] else "",
    )


def _format_bytes(rows: Sequence[Mapping[str, str]]) -> str:
    if not rows:
        return ""
    differences = [abs(int(row["difference, bytes"])) for row in rows]
    if not any(differences):
        return f"Bytes by phase equal the formulas in all {len(rows)} variants."
    differ, most = sum(map(bool, differences)), max(differences)
    return f"Bytes by phase differ from the formulas in {differ} of {len(rows)} variants, by at most {most}."


def _fill(text: str, indent: str = "") -> str:
    words = " ".join(text.split())
    return textwrap.fill(
        words, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _machines(all_figures: Sequence[Mapping[str, Any]]) -> str:
    machines: dict[str, list[str]] = {}
    for figures in all_figures:
        machines.setdefault(figures["machine"], []).append(figures["date"][:10])
    lines = [
        f"Experiments measured {min(dates)} to {max(dates)} on: {machine}."
        for machine, dates in machines.items()
        if machine
    ]
    return "\n\n".join(map(_fill, lines)) or "No experiment has been measured yet."
