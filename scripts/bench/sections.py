"""One experiment's part of a Markdown report: what was claimed, foretold, done and measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dglx_dist.data.storage.files import readable_bytes
from dglx_dist.report.tables import markdown_table, plural, readable_percent, readable_seconds
from scripts.bench.circumstances import circumstances, facts_in_lines
from scripts.bench.closed_form import PREDICTED_ONCE, closed_form_table, once_table
from scripts.bench.figures import (
    HIDDEN,
    PHASES,
    RatioFigures,
    Spread,
    VariantFigures,
    ratio_figures,
    time_to_accuracy,
    variant_figures,
)
from scripts.bench.phase_table import PREDICTED_BYTES, phase_table
from scripts.bench.records import Experiment, Outcome, Ratio
from scripts.bench.regret import COUNTED_BYTES, PREDICTED_SECONDS
from scripts.bench.regret_table import cells_of, regret_tables
from scripts.bench.verdict import bounds_in_words, judge, judge_experiment

_VARIANT_HEAD = (
    "variant", "link between servers", "s per epoch (IQR)", "wait", "compute", "exchange",
    "sample (threads)", "fetch (threads)", "MB inside", "MB outside", "wire MB (x ledger)", "peak of a rank",
)  # fmt: skip
_RATIO_HEAD = ("ratio", "of", "predicted", "measured (IQR)", "reproduced when", "verdict")
_QUANTITIES = {
    "seconds": "seconds per epoch",
    "bytes_outside": "payload between servers",
    "samples_per_second": "samples per second",
    "epochs_to_target": "epochs to the target",
    "dollars": "simulated dollars per epoch",
    "value": "value, 1 / (time x simulated dollars)",
}

_PHASES_TOLD = "Payload between servers by phase, of all ranks, beside what the formulas give:"

OVERVIEW_HEAD = ("id", "what is claimed", "paper", "predicted", "measured (IQR)", "verdict")


def overview_row(experiment: Experiment, outcome: Outcome | None) -> tuple[str, ...]:
    """Return the cells under OVERVIEW_HEAD; ``outcome`` None: there is no result."""
    ratios = () if outcome is None else ratio_figures(outcome)
    return (
        experiment.id,
        experiment.claim.says,
        f"{experiment.claim.paper}: {experiment.claim.setting}",
        experiment.prediction,
        "; ".join(f"{one.ratio.name}: {ratio_in_words(one)}" for one in ratios) or "-",
        _with_label(str(judge_experiment(experiment, outcome)), outcome),
    )


def section(experiment: Experiment, outcome: Outcome | None, pictures: Sequence[str] = ()) -> str:
    """Return the section of an experiment, headed by ``##``.

    Args:
        experiment: What it is.
        outcome: What became of it; None: there is no result.
        pictures: Paths as the page should link them.
    """
    verdict = judge_experiment(experiment, outcome)
    told = {
        "Claim": f"{experiment.claim.says} ({experiment.claim.paper}).",
        "Setting there": f"{experiment.claim.setting}.",
        "Predicted here": experiment.prediction,
        "How": experiment.how,
        "Verdict": f"**{_with_label(str(verdict), outcome)}**: {verdict.why}.",
        "Note": experiment.note,
    }
    parts = [f"## {experiment.id}: {experiment.title}"]
    parts.append("\n".join(f"- {name}: {text}" for name, text in told.items() if text))
    if outcome is not None and outcome.plan is not None and outcome.measurements:
        parts += _measured(outcome)
    parts += [f"![{experiment.id}]({picture})" for picture in pictures]
    if outcome is not None:
        parts += circumstances(outcome)
    return "\n\n".join(part for part in parts if part)


def ratio_in_words(figures: RatioFigures) -> str:
    """Write e.g. "2.10 (2.05 to 2.15)", with "simulated" where it is; "-" when it could not be formed."""
    if figures.value is None:
        return "-"
    return _marked(_spread(figures.value, "{:.2f}".format), figures.simulated)


def not_reproduced(pairs: Sequence[tuple[Experiment, Outcome | None]]) -> list[str]:
    """Return one sentence for each experiment that does not support its claim here."""
    sentences = []
    for experiment, outcome in pairs:
        verdict = judge_experiment(experiment, outcome)
        if verdict.word != "reproduced" or verdict.simulated:
            sentences.append(f"**{experiment.id}**, {experiment.title}: {verdict}; {verdict.why}.")
    return sentences


def accuracy_in_words(outcome: Outcome) -> str:
    """Say when each variant came to the best accuracy that all of them reach; empty without two curves."""
    times = time_to_accuracy(outcome)
    if times is None:
        return ""
    assert outcome.plan is not None
    simulated = {one.name: one.simulated for one in outcome.plan.variants}
    each = (f"{name} {_marked(f'{value:.3g} s', simulated[name])}" for name, value in times.seconds.items())
    reached = readable_percent(times.accuracy)
    return f"Time to a validation accuracy of {reached}, which all reach: {', '.join(each)}."


def _with_label(text: str, outcome: Outcome | None) -> str:
    return f"{text}; {outcome.label}" if outcome is not None and outcome.label else text


def _measured(outcome: Outcome) -> list[str]:
    assert outcome.plan is not None
    variants = variant_figures(outcome)
    counts = sorted({one.repetitions for one in variants})
    several = f"Medians of {' to '.join(str(count) for count in counts)} repetitions run in turn"
    what = "One repetition" if counts == [1] else several
    parts = [
        f"{what}; seconds per epoch, phases as means over ranks (wait, compute and exchange are its parts, "
        "sample and fetch run on threads beside them); bytes per epoch of all ranks:",
        # Every way of every cell is a page of rows that nobody reads.
        *(
            []
            if cells_of(outcome)
            else [markdown_table(_VARIANT_HEAD, [_variant_cells(one) for one in variants])]
        ),
    ]
    parts += regret_tables(outcome)
    if outcome.plan.ratios:
        parts.append(markdown_table(_RATIO_HEAD, [_ratio_cells(one) for one in ratio_figures(outcome)]))
    phases = phase_table(outcome)
    parts += [_PHASES_TOLD, phases] if phases else []
    parts += [table for table in (closed_form_table(outcome), once_table(outcome)) if table]
    simulated = {one.name: one.simulated for one in outcome.plan.variants if one.simulated}
    parts += [f"Simulated in {name}: {text}." for name, text in simulated.items()]
    parts += [accuracy_in_words(outcome)]
    if outcome.plan.facts:
        # Bytes by phase stand in their table.
        facts = {
            name: fact
            for name, fact in outcome.plan.facts.items()
            if name not in (PREDICTED_BYTES, PREDICTED_ONCE, PREDICTED_SECONDS, COUNTED_BYTES)
        }
        parts += ["What the prediction rests on:", facts_in_lines(facts)] if facts else []
    return parts


def _variant_cells(figures: VariantFigures) -> tuple[str, ...]:
    mark = figures.variant.simulated
    name = f"{figures.variant.name} (simulated)" if mark else figures.variant.name
    shape = figures.variant.shape
    ranks = f"{plural(shape.servers, 'server')} of {plural(shape.ranks_per_server, 'rank')}"
    wire = "-" if figures.bytes_wire is None else _megabytes(figures.bytes_wire)
    if figures.wire_over_ledger is not None:
        wire += f" ({figures.wire_over_ledger:.2f})"
    return (
        name,
        f"{ranks}, {figures.link.words}",
        _marked(_spread(figures.seconds, readable_seconds), mark),
        *(_marked(readable_seconds(figures.phases[phase].median), mark) for phase in PHASES),
        *(_marked(readable_seconds(figures.phases[phase].median), mark) for phase in HIDDEN),
        _megabytes(figures.bytes_inside),
        _megabytes(figures.bytes_outside),
        wire,
        readable_bytes(figures.peak_bytes) if figures.peak_bytes else "-",
    )


def _ratio_cells(figures: RatioFigures) -> tuple[str, ...]:
    ratio = figures.ratio
    verdict = judge(figures)
    return (
        ratio.name,
        f"{_QUANTITIES[ratio.quantity]}: {_quotient_of(ratio)}",
        "-" if ratio.predicted is None else f"{ratio.predicted:.2f}",
        ratio_in_words(figures),
        bounds_in_words(ratio.low, ratio.high),
        f"{verdict}: {verdict.why}",
    )


def _quotient_of(ratio: Ratio) -> str:
    if ratio.cells:
        return f"chosen / fastest, {ratio.of_cells} of {len(ratio.cells)} cells"
    return f"{ratio.over} / {ratio.under}"


def _spread(value: Spread, form: Any) -> str:
    return f"{form(value.median)} ({form(value.low)} to {form(value.high)})"


def _megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.1f}"


def _marked(text: str, simulated: str) -> str:
    return f"{text} simulated" if simulated else text
