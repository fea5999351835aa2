"""docs/performance.md: what was measured, put together from results and from notes kept by hand."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Sequence
from pathlib import Path

from dglx_dist.errors import StorageError
from dglx_dist.report.table import markdown_table
from scripts.bench.circumstances import flat
from scripts.bench.markdown import pictures_of, read_pairs
from scripts.bench.records import Experiment, Outcome
from scripts.bench.results import write_text
from scripts.bench.sections import OVERVIEW_HEAD, not_reproduced, overview_row, section
from scripts.bench.suites import everything

DOCS = Path(__file__).parents[2] / "docs"

Pairs = Sequence[tuple[Experiment, Outcome | None]]

_HEAD = """<!-- Put together by scripts/bench/performance.py from docs/results: change what is there. -->

# Performance: what was measured, and the command that repeats it

First the claims of papers and the comparisons with other packages, also those that are absent or not
reproduced; then the figures of the package's own parts. No speed is tested by the test suite. How experiments
are run and judged stands in [bench.md](bench.md)."""


def render(results_folder: Path, notes_folder: Path) -> str:
    """Return the page.

    Args:
        results_folder: Holds ``<ID>.json`` of some or all experiments, and their pictures, which the
            page links as lying in a folder beside it.
        notes_folder: Markdown files, each a section that starts with ``##``; put at the end by name.

    Raises:
        StorageError: a folder or its notes are missing, or a result is damaged.
    """
    measured = {experiment.id: outcome for experiment, outcome in read_pairs(results_folder)}
    pairs = [(experiment, measured.get(experiment.id)) for experiment in everything()]
    parts = [
        _HEAD,
        "## The machine of the experiments",
        _machines(list(measured.values())),
        "## Claims of papers, and other packages",
        markdown_table((*OVERVIEW_HEAD, "command"), [_row(*pair) for pair in pairs]),
        "## What is not reproduced, in simulation only, or not measured",
        "\n".join(f"- {sentence}" for sentence in not_reproduced(pairs)) or "Every claim is reproduced.",
        *(
            _section(experiment, outcome, results_folder)
            for experiment, outcome in pairs
            if _has_figures(outcome)
        ),
        *read_notes(notes_folder),
    ]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def read_notes(folder: Path) -> list[str]:
    """Return the notes of ``folder`` by name of file.

    Raises:
        StorageError: there are none, or one does not start with a heading of the second level.
    """
    paths = sorted(folder.glob("*.md"))
    if not paths:
        raise StorageError(f"there are no notes (*.md) in {folder}; they are a part of the page")
    texts = [path.read_text(encoding="utf-8") for path in paths]
    for path, text in zip(paths, texts, strict=True):
        if not text.startswith("## "):
            raise StorageError(f"{path} starts with {text[:20]!r}; begin it with '## ' and a title")
    return texts


def _row(experiment: Experiment, outcome: Outcome | None) -> tuple[str, ...]:
    command = f"`{outcome.command}`" if outcome is not None and outcome.command else "-"
    return (*overview_row(experiment, outcome), command)


def _has_figures(outcome: Outcome | None) -> bool:
    return outcome is not None and bool(outcome.measurements)


def _section(experiment: Experiment, outcome: Outcome | None, folder: Path) -> str:
    return section(experiment, outcome, [f"{folder.name}/{name}" for name in pictures_of(experiment, folder)])


def _machines(outcomes: Sequence[Outcome]) -> str:
    """Say on which machines, and when, experiments were measured."""
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.measurements:
            found.setdefault(flat(outcome.machine), []).append(outcome)
    if not found:
        return "No experiment has been measured yet."
    lines = []
    for machine, of in found.items():
        dates = sorted({outcome.date[:10] for outcome in of if outcome.date})
        when = f" ({dates[0]})" if len(dates) == 1 else f" ({dates[0]} to {dates[-1]})" if dates else ""
        lines.append(f"- {', '.join(outcome.experiment for outcome in of)}{when}: {machine}.")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Put docs/performance.md together from docs/results: results of experiments, and notes.

    python scripts/bench performance
    python scripts/bench performance --check     # only say whether it is up to date
    """
    parser = argparse.ArgumentParser(
        description=inspect.cleandoc(main.__doc__ or ""), formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=DOCS / "results", help="folder of <ID>.json")
    parser.add_argument("--notes", type=Path, default=DOCS / "results" / "notes", help="folder of *.md")
    parser.add_argument("--to", type=Path, default=DOCS / "performance.md")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 when the page is out of date")
    options = parser.parse_args(argv)
    page = render(options.results, options.notes)
    if not options.check:
        print(write_text(options.to, page))
        return 0
    return 0 if options.to.is_file() and options.to.read_text(encoding="utf-8") == page else 1
