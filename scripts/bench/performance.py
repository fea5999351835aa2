"""Compact figures of all experiments, docs/results/ID.json, and the page made from them, docs/performance.md.

python scripts/bench performance                # from docs/results/raw and docs/results/notes.md
python scripts/bench performance --add DIR      # first take over the results and pictures of a bench
python scripts/bench performance --check        # fail where figures or page are out of date
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dglx_dist.errors import StorageError
from dglx_dist.report.tables import markdown_table
from scripts.bench.figures import (
    HIDDEN,
    PHASES,
    Spread,
    cells_of,
    closed_form_table,
    nearness,
    once_table,
    phase_table,
    ratio_figures,
    regret_tables,
    variant_figures,
)
from scripts.bench.pages import (
    accuracy_in_words,
    bounds_in_words,
    circumstances,
    facts_in_lines,
    flat,
    judge,
    judge_experiment,
    pictures_of,
)
from scripts.bench.records import (
    COUNTED_BYTES,
    PREDICTED_BYTES,
    PREDICTED_ONCE,
    PREDICTED_SECONDS,
    Experiment,
    Outcome,
)
from scripts.bench.results import make_folder, read, result_path, write_text
from scripts.bench.suites import everything

FORMAT, VERSION = "dglx bench figures", 1
DOCS = Path(__file__).parents[2] / "docs"
_WIDTH = 120
_BASES = (PREDICTED_BYTES, PREDICTED_ONCE, PREDICTED_SECONDS, COUNTED_BYTES)
"""Facts that stand in tables of their own."""

_HEAD = """<!-- Made by `python scripts/bench performance` from docs/results: change what is there. -->

# Performance: what was measured, and the command that repeats it"""


@dataclass(frozen=True, kw_only=True)
class Notes:
    """The hand-written part of the page."""

    intro: str
    """Before all sections: how to read it, settings that experiments share."""
    experiments: Mapping[str, Mapping[str, str]]
    """Experiment's id -> ``Here`` (the setting) and ``Lesson``."""
    parts: Mapping[str, Mapping[str, str]]
    """Title -> ``Overview`` ("aim | measured | verdict", may be absent) and ``Text``."""


def figures_of(experiment: Experiment, outcome: Outcome) -> dict[str, Any]:
    """Return what ``<ID>.json`` keeps of a result: medians, quartiles, circumstances; JSON values."""
    verdict = judge_experiment(experiment, outcome)
    near = nearness(outcome)
    facts = {} if outcome.plan is None else outcome.plan.facts
    simulated = () if outcome.plan is None else (one.simulated for one in outcome.plan.variants)
    return {
        "format": FORMAT,
        "version": VERSION,
        "experiment": experiment.id,
        "verdict": str(verdict),
        "why": verdict.why,
        "label": outcome.label,
        "simulated": sorted({text for text in simulated if text}),
        "repetitions": max((one.repetitions for one in variant_figures(outcome)), default=0),
        "date": outcome.date,
        "command": outcome.command,
        "machine": flat(outcome.machine),
        "circumstances": [
            line.removeprefix("- ")
            for line in circumstances(outcome)[0].splitlines()
            if line.startswith(("- Servers", "- Matched phi"))
        ],
        "ratios": _ratios(outcome),
        "variants": [] if cells_of(outcome) else _variants(outcome),
        "cells": _rows_of("\n".join(regret_tables(outcome)[:1])),
        "nearness": "" if near is None else near.in_words,
        "bytes": _rows_of(phase_table(outcome)),
        "closed form": _rows_of(closed_form_table(outcome)),
        "done once": _rows_of(once_table(outcome)),
        "accuracy": accuracy_in_words(outcome),
        "facts": facts_in_lines({name: facts[name] for name in facts if name not in _BASES}).splitlines(),
    }


def dump_figures(figures: Mapping[str, Any]) -> str:
    """Return ``figures`` as JSON text with one line for each variant, ratio or other entry."""
    lines = []
    for name, value in figures.items():
        text = json.dumps(value, ensure_ascii=False)
        if isinstance(value, list) and value:
            inner = ",\n".join(f"  {json.dumps(one, ensure_ascii=False)}" for one in value)
            text = f"[\n{inner}\n ]"
        lines.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read_figures(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the figures in ``folder`` by id of their experiment.

    Raises:
        StorageError: a file of figures is damaged.
    """
    found = {}
    for path in sorted(folder.glob("*.json")):
        try:
            value = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise StorageError(
                f"{path} is damaged ({error}); run python scripts/bench performance"
            ) from error
        if isinstance(value, dict) and value.get("format") == FORMAT:
            found[str(value["experiment"])] = value
    return found


def read_notes(path: Path) -> Notes:
    """Return the hand-written texts: sections headed ``## <id>`` belong to experiments, others are parts.

    Raises:
        StorageError: there is no such file, or the section of an experiment lacks ``Here:`` or ``Lesson:``.
    """
    if not path.is_file():
        raise StorageError(f"there are no notes at {path}; they are a part of the page")
    ids = {one.id for one in everything()}
    experiments, parts = {}, {}
    intro, *sections = re.split(r"(?m)^## ", path.read_text(encoding="utf-8"))
    for section in sections:
        title, _, body = section.partition("\n")
        fields = dict(re.findall(r"(?ms)^(Here|Lesson|Overview): (.*?)(?=\n\n|\Z)", body))
        if title not in ids:
            parts[title] = {"Overview": fields.get("Overview", ""), "Text": _without_overview(body)}
        elif {"Here", "Lesson"} <= set(fields):
            experiments[title] = fields
        else:
            raise StorageError(f"{path}: section {title} needs paragraphs 'Here: ...' and 'Lesson: ...'")
    return Notes(intro=intro, experiments=experiments, parts=parts)


def render(folder: Path) -> str:
    """Return the page from figures, ``notes.md`` and pictures in ``folder``, which it links as beside it.

    Raises:
        StorageError: notes are missing, or a file is damaged.
    """
    figures, notes = read_figures(folder), read_notes(folder / "notes.md")
    rows, sections = [], []
    for experiment in everything():
        found = figures.get(experiment.id)
        rows.append(_overview_row(experiment, found))
        if found and (found["variants"] or found["cells"]):
            note = notes.experiments.get(experiment.id, {})
            pictures = [f"{folder.name}/{name}" for name in pictures_of(experiment, folder)]
            sections.append(_section(experiment, found, note, pictures))
    for title, part in notes.parts.items():
        if part["Overview"]:
            rows.append((_link(title), *(cell.strip() for cell in part["Overview"].split("|"))))
        sections.append(f"## {title}\n\n{part['Text']}")
    parts = [
        _HEAD,
        notes.intro,
        markdown_table(("experiment", "claim of, or aim", "measured here", "verdict"), rows),
        _machines(list(figures.values())),
        *sections,
    ]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> int | str:
    """Write figures and page; return 0, or what is out of date."""
    parser = argparse.ArgumentParser(
        prog="python scripts/bench performance",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--results", type=Path, default=DOCS / "results", help="folder of raw/ and notes.md")
    parser.add_argument("--to", type=Path, default=DOCS / "performance.md")
    parser.add_argument("--add", type=Path, help="folder that the bench wrote (its --out)")
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    if options.add:
        add(options.add, options.results)
    stale = []
    experiments = {one.id: one for one in everything()}
    for outcome in read(options.results / "raw"):
        path = result_path(options.results, outcome.experiment)
        stale += _put(path, dump_figures(figures_of(experiments[outcome.experiment], outcome)), options.check)
    stale += _put(options.to, render(options.results), options.check)
    return f"out of date: {', '.join(map(str, stale))}" if options.check and stale else 0


def add(out: Path, folder: Path) -> None:
    """Take over what is in ``out``: results gzipped into ``folder/raw``, pictures as PNG of 256 colours."""
    from PIL import Image

    make_folder(folder / "raw")
    for outcome in read(out):
        data = result_path(out, outcome.experiment).read_bytes()
        packed = folder / "raw" / f"{outcome.experiment}.json.gz"
        packed.write_bytes(gzip.compress(data, mtime=0))
        for picture in out.glob(f"{outcome.experiment}-*.png"):
            with Image.open(picture) as image:
                few = image.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
                few.save(folder / picture.name, optimize=True)


def _put(path: Path, text: str, check: bool) -> list[Path]:
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return []
    if not check:
        write_text(path, text)
    return [path]


def _without_overview(body: str) -> str:
    return re.sub(r"(?ms)^Overview: .*?(\n\n|\Z)", "", body).strip("\n")


def _ratios(outcome: Outcome) -> list[dict[str, Any]]:
    return [
        {
            "name": one.ratio.name,
            "of": f"{one.ratio.quantity}: {one.ratio.over} / {one.ratio.under}",
            "predicted": None if one.ratio.predicted is None else _number(one.ratio.predicted),
            "measured": None if one.value is None else _numbers(one.value),
            "bound": "" if judge(one).word == "no bound" else bounds_in_words(one.ratio.low, one.ratio.high),
            "verdict": str(judge(one)),
        }
        for one in ratio_figures(outcome)
    ]


def _variants(outcome: Outcome) -> list[dict[str, Any]]:
    return [
        {
            "name": one.variant.name,
            "servers": one.variant.shape.servers,
            "ranks_per_server": one.variant.shape.ranks_per_server,
            "link": one.link.words,
            "seconds": _numbers(one.seconds),
            **{name: _number(one.phases[name].median) for name in (*PHASES, *HIDDEN)},
            "mb_inside": _number(one.bytes_inside / 1e6),
            "mb_outside": _number(one.bytes_outside / 1e6),
            "mb_wire": None if one.bytes_wire is None else _number(one.bytes_wire / 1e6),
            "peak_mb": round(one.peak_bytes / 1e6),
        }
        for one in variant_figures(outcome)
    ]


def _numbers(value: Spread) -> list[float]:
    return [_number(value.median), _number(value.low), _number(value.high)]


def _number(value: float) -> float:
    return float(f"{value:.6g}")


def _rows_of(table: str) -> list[dict[str, str]]:
    cells = [[cell.strip() for cell in line[1:-1].split(" | ")] for line in table.splitlines()]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def _overview_row(experiment: Experiment, figures: Mapping[str, Any] | None) -> tuple[str, ...]:
    paper = experiment.claim.paper
    if figures is None:
        return (f"{experiment.id}: {experiment.title}", paper, "-", str(judge_experiment(experiment, None)))
    bounded = [one for one in figures["ratios"] if one["bound"]]
    met = sum(one["verdict"].startswith("reproduced") for one in bounded)
    shown = [f"{one['name']}: {_measured(one)}" for one in (bounded or figures["ratios"])[:1]]
    verdict = "; ".join(text for text in (figures["verdict"], figures["label"]) if text)
    count = f" ({met} of {len(bounded)} bounds)" if verdict.startswith("partly") else ""
    return (
        f"{_link(_title(experiment), experiment.id)}: {experiment.title}",
        paper,
        " ".join(shown) or "-",
        verdict + count,
    )


def _section(
    experiment: Experiment, figures: Mapping[str, Any], note: Mapping[str, str], pictures: Sequence[str]
) -> str:
    claim = experiment.claim
    verdict = "; ".join(text for text in (figures["verdict"], figures["label"]) if text)
    shown = [one for one in figures["ratios"] if one["bound"] or not _is_formula(one)]
    result = ["; ".join(map(_in_words, shown)), _bytes_in_words(figures["bytes"])]
    result += [figures["nearness"], figures["accuracy"]]
    result += [f"Simulated: {text}" for text in figures["simulated"]]
    bullets = {
        "Claim": f"{claim.says} ({claim.paper}; {claim.setting}).",
        "Here": _capitalised(note.get("Here", experiment.how)),
        "Result": " ".join(f"{_capitalised(text).rstrip('.')}." for text in result if text),
        "Verdict": f"**{verdict}**. {_capitalised(note.get('Lesson', experiment.note))}",
    }
    what = f"`{figures['command']}`, {figures['repetitions']} repetitions, {figures['date'][:10]}"
    parts = [
        f"## {_title(experiment)}",
        "\n".join(_filled(f"- **{name}**: {text}", "  ") for name, text in bullets.items()),
        " ".join([what, *(f"![{experiment.id}]({picture})" for picture in pictures)]),
    ]
    return "\n\n".join(parts)


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def _title(experiment: Experiment) -> str:
    return f"{experiment.id}: {experiment.title}"


def _link(title: str, text: str = "") -> str:
    anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
    return f"[{text or title}](#{anchor})"


def _measured(ratio: Mapping[str, Any], mark: str = "") -> str:
    if ratio["measured"] is None:
        return "-"
    value, low, high = (f"{number:.2f}" for number in ratio["measured"])
    words = f"{mark}{value}{mark}" if low == high else f"{mark}{value}{mark} ({low} to {high})"
    return f"{words} simulated" if "simulated" in ratio["verdict"] else words


def _is_formula(ratio: Mapping[str, Any]) -> bool:
    measured, predicted = ratio["measured"], ratio["predicted"]
    return (
        bool(ratio["of"].startswith("bytes") and measured and predicted)
        and abs(measured[0] / predicted - 1) < 0.005
    )


def _in_words(ratio: Mapping[str, Any]) -> str:
    words = [_measured(ratio, "**")]
    words += [] if ratio["predicted"] is None else [f"predicted {ratio['predicted']:.2f}"]
    met = "met" if ratio["verdict"].startswith("reproduced") else "missed"
    words += [f"bound {ratio['bound']} {met}"] if ratio["bound"] else []
    return f"`{ratio['name']}` {', '.join(words)}"


def _bytes_in_words(rows: Sequence[Mapping[str, str]]) -> str:
    if not rows:
        return ""
    differences = [abs(int(row["difference, bytes"])) for row in rows]
    if not any(differences):
        return f"Bytes by phase equal the formulas in all {len(rows)} variants."
    differ = sum(map(bool, differences))
    most = max(differences)
    return f"Bytes by phase differ from the formulas in {differ} of {len(rows)} variants, by at most {most}."


def _filled(text: str, indent: str = "") -> str:
    words = " ".join(text.split())
    return textwrap.fill(
        words, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _machines(found: Sequence[Mapping[str, Any]]) -> str:
    machines: dict[str, list[str]] = {}
    for figures in found:
        machines.setdefault(figures["machine"], []).append(figures["date"][:10])
    lines = [
        f"Experiments measured {min(dates)} to {max(dates)} on: {machine}."
        for machine, dates in machines.items()
        if machine
    ]
    return "\n\n".join(map(_filled, lines)) or "No experiment has been measured yet."


if __name__ == "__main__":
    sys.exit(main())
