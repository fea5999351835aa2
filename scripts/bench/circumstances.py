"""Under which circumstances an experiment was measured, in lines of Markdown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dglx_dist.data.storage.files import readable_bytes
from scripts.bench.figures import variant_figures
from scripts.bench.records import Outcome

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
    """Return description -> the variants whose servers it describes."""
    found: dict[str, list[str]] = {}
    for name, values in _networks(outcome).items():
        # Namespaces' rates stand with each variant; plain loopback's label says why there are none.
        left_out = {*_OF_ONE_LAB, "label"} if values.get("kind") == "namespaces" else {*_OF_ONE_LAB}
        known = {key: value for key, value in values.items() if key not in left_out}
        words = flat({key: value for key, value in known.items() if value not in (None, {}, [], "")})
        found.setdefault(words, []).append(name)
    return found


def _calibrations(outcome: Outcome) -> list[str]:
    """Return a sentence for each rate that was sought, with what became of the phi in the repetitions."""
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
