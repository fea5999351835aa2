"""Gain from phi, kappa and beta, for variants that overlap nothing, beside the one that was measured."""

from __future__ import annotations

from dglx_dist.report.tables import markdown_table
from scripts.bench.figures import variant_figures
from scripts.bench.phase_table import measured_bytes
from scripts.bench.records import KAPPA, PREDICTED_ONCE, MatchedPhi, Outcome
from scripts.bench.speedup_model import predicted_time

_BEFORE, _SECONDS_BEFORE, _PRELOAD = "bytes_outside_before", "seconds_before", "preload"


def closed_form_table(outcome: Outcome) -> str:
    """Return a table in Markdown: phi as reached, kappa, beta, the gain they foretell and the one measured.

    Variants at a calibrated rate, in the plan's order; empty where no kappa is known or nothing measured.
    """
    kappas = {} if outcome.plan is None else outcome.plan.facts.get(KAPPA, {})
    figures, sent = {one.variant.name: one for one in variant_figures(outcome)}, measured_bytes(outcome)
    rows = []
    for name, kappa in kappas.items():
        rate = figures[name].variant.rate if name in figures else None
        if not isinstance(rate, MatchedPhi) or name not in sent or rate.baseline not in sent:
            continue
        phi = float(outcome.network.get(name, {}).get("phi") or rate.phi)
        beta = sum(sent[name].values()) / sum(sent[rate.baseline].values())
        gain = figures[rate.baseline].seconds.median / figures[name].seconds.median
        foretold = 1.0 / predicted_time(phi, kappa, beta)
        rows.append((name, f"{phi:.2f}", f"{kappa:.2f}", f"{beta:.3f}", f"{foretold:.2f}", f"{gain:.2f}"))
    head = ("by the baseline", "phi reached", "kappa", "beta", "gain by the formula", "gain measured")
    return markdown_table(head, rows) if rows else ""


def once_table(outcome: Outcome) -> str:
    """Return a table in Markdown of what variants do once: seconds, and bytes of features beside the formula.

    Seconds are the median of all that a repetition did before its epochs, preparing ranks included.
    """
    foretold = {} if outcome.plan is None else outcome.plan.facts.get(PREDICTED_ONCE, {})
    rows = []
    for one in variant_figures(outcome) if foretold else ():
        found = [
            measurement.extra
            for measurement in outcome.measurements
            if measurement.variant == one.variant.name and measurement.epochs and _BEFORE in measurement.extra
        ]
        if not found:
            continue
        sent, expected = found[0][_BEFORE].get(_PRELOAD, 0), foretold.get(one.variant.name)
        seconds = sorted(extra[_SECONDS_BEFORE] for extra in found)[len(found) // 2]
        formula, difference = ("-", "-") if expected is None else (f"{expected / 1e6:.3f}", sent - expected)
        rows.append((one.variant.name, f"{seconds:.2f}", f"{sent / 1e6:.3f}", formula, str(difference)))
    head = ("done once", "s", "MB of features outside", "by the formula", "difference, bytes")
    return markdown_table(head, rows) if rows else ""
