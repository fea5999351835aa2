"""Pages in Markdown: circumstances, verdicts, one section for each experiment, the README.md of a folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from dglx_dist.data.storage.files import readable_bytes
from dglx_dist.report.tables import markdown_table, plural, readable_percent, readable_seconds
from scripts.bench import results
from scripts.bench.figures import (
    ERROR,
    HIDDEN,
    PHASES,
    Nearness,
    RatioFigures,
    Spread,
    VariantFigures,
    cells_of,
    closed_form_table,
    nearness,
    once_table,
    phase_table,
    ratio_figures,
    regret_tables,
    time_to_accuracy,
    variant_figures,
)
from scripts.bench.plots import WHAT
from scripts.bench.records import (
    COUNTED_BYTES,
    PREDICTED_BYTES,
    PREDICTED_ONCE,
    PREDICTED_SECONDS,
    Experiment,
    Outcome,
    Ratio,
)
from scripts.bench.suites import EXPERIMENTS, find, why_absent

_MOST_NAMES = 60
_OF_ONE_LAB = ("name", "external", "phi", "calibration")
"""Of ``Lab.describe()`` and what the driver adds: not the same for variants that share a shape."""


def circumstances(outcome: Outcome) -> list[str]:
    """Return paragraphs: label, machine, servers, calibration, date; then the command."""
    lines = [f"- {outcome.label[:1].upper()}{outcome.label[1:]}."] if outcome.label else []
    if outcome.machine:
        lines.append(f"- Machine: {flat(outcome.machine)}.")
    lines += [f"- Servers ({_some(names)}): {words}." for words, names in _servers(outcome).items()]
    lines += [f"- {words}." for words in _calibrations(outcome)]
    if outcome.date:
        lines.append(f"- Date: {outcome.date}.")
    command = f"    {outcome.command}" if outcome.command else ""
    return [part for part in ("\n".join(lines), command) if part]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= _MOST_NAMES else f"all {len(names)} variants"


def flat(values: Mapping[str, Any]) -> str:
    """Write JSON values in one line: each name before its value, nested ones in brackets."""
    return "; ".join(_named(name, value) for name, value in values.items())


def _named(name: str, value: object) -> str:
    words = name.replace("_", " ")
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{words.removesuffix(' bytes')} {readable_bytes(value)}"
    return f"{words} {_plain(value)}"


def facts_in_lines(facts: Mapping[str, Any]) -> str:
    """Write JSON values as a list; one of names to values gets a line for each name, indented."""
    lines = []
    for name, value in facts.items():
        if isinstance(value, Mapping) and any(isinstance(inner, Mapping) for inner in value.values()):
            lines.append(f"- {name}:")
            lines += [f"  - {inner}: {_bare(of)}" for inner, of in value.items()]
        else:
            lines.append(f"- {name}: {_bare(value)}")
    return "\n".join(lines)


def _servers(outcome: Outcome) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, values in _networks(outcome).items():
        # Namespaces' rates stand with each variant; plain loopback's label says why there are none.
        left_out = {*_OF_ONE_LAB, "label"} if values.get("kind") == "namespaces" else {*_OF_ONE_LAB}
        known = {key: value for key, value in values.items() if key not in left_out}
        words = flat({key: value for key, value in known.items() if value not in (None, {}, [], "")})
        found.setdefault(words, []).append(name)
    return found


def _calibrations(outcome: Outcome) -> list[str]:
    networks = _networks(outcome)
    notes = [one["calibration"] for one in networks.values() if one.get("calibration")]
    seconds = {one.variant.name: one.seconds.median for one in variant_figures(outcome)}
    sentences = []
    for note in notes:
        text = (
            f"Matched phi: at {note['rate']} the network costs {note['baseline']} {note['phi']:.2f} of its "
            f"time ({note['seconds_at_rate']:.3g} s per epoch, {note['seconds_free']:.3g} s with free links)"
        )
        baseline = note["baseline"]
        if networks.get(baseline, {}).get("calibration") == note and baseline in seconds:
            phi = 1 - note["seconds_free"] / seconds[baseline]
            text += f"; by the median of the repetitions {phi:.2f}"
        if not note.get("within_tolerance", True):
            text += f"; {note['wanted']:g} was wanted and not reached"
        sentences.append(text)
    return list(dict.fromkeys(sentences))


def _networks(outcome: Outcome) -> dict[str, Mapping[str, Any]]:
    return {name: one for name, one in outcome.network.items() if isinstance(one, Mapping)}


def _bare(value: object) -> str:
    return _plain(value)[1:-1] if isinstance(value, Mapping) and value else _plain(value)


def _plain(value: object) -> str:
    if value is None or value in ("", [], {}):
        return "none"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str | int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, Mapping):
        within = ", ".join(f"{name} {_plain(inner)}" for name, inner in value.items())
        return f"({within})"
    if isinstance(value, Sequence):
        return "[" + ", ".join(_plain(inner) for inner in value) + "]"
    return json.dumps(value)


Word = Literal[
    "reproduced", "not reproduced", "partly reproduced", "no bound", "links not limited", "phi not matched",
    "absent", "failed", "not measured yet",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A word that a table can show, and the sentence behind it."""

    word: Word
    why: str
    simulated: bool = False

    def __str__(self) -> str:
        return f"{self.word} (simulated)" if self.simulated else self.word


def judge(figures: RatioFigures) -> Verdict:
    """Judge one ratio by its bounds.

    A value inside the bounds is not enough where they claim a difference (all of them above 1, or all
    below): an interquartile range that holds 1 shows none. Two bounds with 1 between or on them claim none.
    """
    ratio, value, simulated = figures.ratio, figures.value, bool(figures.simulated)
    if value is None:
        of = "a cell" if ratio.cells else f"{ratio.over} over {ratio.under}"
        why = (
            f"{of} could not be formed: one has no measurement or did not come to "
            "the target in every repetition, or the lower is 0"
        )
        return Verdict(word="not reproduced", why=why, simulated=simulated)
    if not figures.limited:
        why = "the servers shared plain loopback, so nothing can be said about a network"
        return Verdict(word="links not limited", why=why, simulated=simulated)
    if figures.missed_phi:
        why = f"no rate was found at which it could be judged: {figures.missed_phi}"
        return Verdict(word="phi not matched", why=why, simulated=simulated)
    if ratio.low is None and ratio.high is None:
        return Verdict(word="no bound", why="no value of it was named as the claim's", simulated=simulated)
    bounds = bounds_in_words(ratio.low, ratio.high)
    if ratio.low is not None and value.median < ratio.low:
        why = f"{value.median:.2f} is below the least that counts as reproduced, {ratio.low:g}"
        return Verdict(word="not reproduced", why=why, simulated=simulated)
    if ratio.high is not None and value.median > ratio.high:
        why = f"{value.median:.2f} is above the most that counts as reproduced, {ratio.high:g}"
        return Verdict(word="not reproduced", why=why, simulated=simulated)
    if _claims_difference(ratio) and value.holds(1.0):
        why = f"its interquartile range, {value.low:.2f} to {value.high:.2f}, holds 1: no difference is shown"
        return Verdict(word="not reproduced", why=why, simulated=simulated)
    return Verdict(word="reproduced", why=f"{value.median:.2f} is {bounds}", simulated=simulated)


def _claims_difference(ratio: Ratio) -> bool:
    low, high = ratio.low, ratio.high
    if low is not None and high is not None and low <= 1 <= high:
        return False
    return (low is not None and low >= 1) or (high is not None and high <= 1)


def bounds_in_words(low: float | None, high: float | None) -> str:
    """Write e.g. "at least 1.5", "at most 1.1", "between 0.9 and 1.1", "without bounds"."""
    if low is not None and high is not None:
        return f"between {low:g} and {high:g}"
    if low is not None:
        return f"at least {low:g}"
    return "without bounds" if high is None else f"at most {high:g}"


def judge_experiment(experiment: Experiment, outcome: Outcome | None) -> Verdict:
    """Judge an experiment by all its ratios; without an outcome, say why there is none."""
    if outcome is None:
        # What is installed where a page is made says nothing about the experiment.
        lacking = why_absent(replace(experiment, needs=()))
        if lacking:
            return Verdict(word="absent", why=lacking)
        return Verdict(word="not measured yet", why="there is no result of it")
    if outcome.status != "measured":
        return Verdict(word=outcome.status, why=outcome.reason)
    verdicts = [(figures.ratio.name, judge(figures)) for figures in ratio_figures(outcome)]
    near = nearness(outcome)
    return _together([*verdicts, *([] if near is None else [("predictions", _of_nearness(near))])])


def _of_nearness(near: Nearness) -> Verdict:
    why = f"{near.in_words}, of at most {100 * ERROR:.0f} % and none"
    return Verdict(word="reproduced" if near.is_near else "not reproduced", why=why)


def _together(verdicts: Sequence[tuple[str, Verdict]]) -> Verdict:
    simulated = any(one.simulated for _, one in verdicts)
    judged = [(name, one) for name, one in verdicts if one.word != "no bound"]
    if not judged:
        return Verdict(word="no bound", why="no ratio of it has bounds", simulated=simulated)
    words = {one.word for _, one in judged}
    same = {one.why for _, one in judged}
    why = same.pop() if len(same) == 1 else "; ".join(f"{name}: {one.why}" for name, one in judged)
    for unfit in ("links not limited", "phi not matched"):
        if unfit in words:
            return Verdict(word=unfit, why=why, simulated=simulated)
    word: Word = judged[0][1].word if len(words) == 1 else "partly reproduced"
    return Verdict(word=word, why=why, simulated=simulated)


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


Pairs = Sequence[tuple[Experiment, Outcome]]

_LEGEND = """How to read it: a ratio's value is the quotient of two medians, the range behind it the quartiles
of the quotients of single repetitions, which ran one after the other. A claim counts as reproduced when the
value is within the bounds that its experiment states and, where these claim a difference, the range leaves 1
out. phi is the share of its time that the baseline spends on the network at the rate shown. What is simulated
is marked so, number by number. On plain loopback nothing limits the links, and no claim is judged there."""


def write_page(out: Path) -> Path:
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
