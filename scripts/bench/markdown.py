"""The README.md of a folder of results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dglx_dist.report.tables import markdown_table
from scripts.bench import results
from scripts.bench.plots import WHAT
from scripts.bench.records import Experiment, Outcome
from scripts.bench.sections import OVERVIEW_HEAD, not_reproduced, overview_row, section
from scripts.bench.suites import EXPERIMENTS, find

Pairs = Sequence[tuple[Experiment, Outcome]]

_LEGEND = """How to read it: a ratio's value is the quotient of two medians, the range behind it the quartiles
of the quotients of single repetitions, which ran one after the other. A claim counts as reproduced when the
value is within the bounds that its experiment states and, where these claim a difference, the range leaves 1
out. phi is the share of its time that the baseline spends on the network at the rate shown. What is simulated
is marked so, number by number. On plain loopback nothing limits the links, and no claim is judged there."""


def write(out: Path) -> Path:
    """Write ``out/README.md`` from the results in ``out``; link the pictures that lie there.

    Raises:
        StorageError: a result is damaged, or the page cannot be written.
        UnknownNameError: a result is of an experiment that this release does not have.
    """
    pairs = read_pairs(out)
    pictures = {experiment.id: pictures_of(experiment, out) for experiment, _ in pairs}
    return results.write_text(out / "README.md", render(pairs, pictures))


def read_pairs(out: Path) -> Pairs:
    """Return each result of ``out`` beside its experiment, in the order of all experiments.

    Raises:
        StorageError: no such folder, or a result in it is damaged.
        UnknownNameError: a result is of an experiment that this release does not have.
    """
    pairs = [(find(outcome.experiment), outcome) for outcome in results.read(out)]
    order = list(EXPERIMENTS)
    return sorted(pairs, key=lambda pair: order.index(pair[0].id))


def pictures_of(experiment: Experiment, folder: Path) -> list[str]:
    """Return the names of the pictures of ``experiment`` in ``folder``."""
    names = [f"{experiment.id}-{what}.png" for what in WHAT]
    return [name for name in names if (folder / name).is_file()]


def render(pairs: Pairs, pictures: dict[str, list[str]] | None = None) -> str:
    """Return the whole page: one table, what is not reproduced, and a section per experiment.

    Args:
        pairs: Experiments and what became of them, in the order of the page.
        pictures: Experiment's id -> paths as the page links them.
    """
    missing = [f"- {sentence}" for sentence in not_reproduced(pairs)]
    parts = [
        "# Results",
        markdown_table(OVERVIEW_HEAD, [overview_row(*pair) for pair in pairs]),
        _LEGEND,
        "## What is not reproduced here, or in simulation only",
        "\n".join(missing) or _all_support(pairs),
        *(
            section(experiment, outcome, (pictures or {}).get(experiment.id, ()))
            for experiment, outcome in pairs
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _all_support(pairs: Pairs) -> str:
    quick = [experiment.id for experiment, outcome in pairs if outcome is not None and outcome.label]
    doubt = f", {', '.join(quick)} by a quick look only: repeat it before you rely on it" if quick else ""
    return f"Every experiment of this folder supports its claim{doubt}."
