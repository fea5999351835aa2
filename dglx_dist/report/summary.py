"""What a run comes to, in the few figures that one compares runs by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from dglx_dist.records import EpochRecord
from dglx_dist.report.units import plural


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What the epochs do not tell about a run."""

    strategy: str
    ranks: int
    servers: int
    test_accuracy: float | None
    """Over all test nodes, exact layer-wise inference; None without a test split."""
    val_accuracy: float | None
    """Of the same model as ``test_accuracy``."""
    peak_memory_bytes: int
    """Largest resident set of any rank."""


def summarise(facts: RunFacts, epochs: Sequence[EpochRecord]) -> dict[str, object]:
    """Return the content of ``summary.json``.

    The first epoch warms caches and compiles kernels, so with two epochs or more it counts in none
    of the figures: ``epoch_seconds`` and ``samples_per_second`` are medians of the others,
    ``bytes_*`` and ``phase_seconds`` their means per epoch.
    """
    warm = list(epochs[1:]) or list(epochs)
    return {
        "strategy": facts.strategy,
        "ranks": facts.ranks,
        "servers": facts.servers,
        "test_accuracy": facts.test_accuracy,
        "val_accuracy": facts.val_accuracy,
        "epochs": len(epochs),
        "epoch_seconds": median(e.seconds for e in warm) if warm else None,
        "samples_per_second": median(e.samples_per_second for e in warm) if warm else None,
        "bytes_inside": round(fmean(e.bytes_inside for e in warm)) if warm else 0,
        "bytes_outside": round(fmean(e.bytes_outside for e in warm)) if warm else 0,
        **_cache_figures(warm),
        "peak_memory_bytes": facts.peak_memory_bytes,
        "phase_seconds": phase_seconds(warm),
    }


def _cache_figures(epochs: Sequence[EpochRecord]) -> dict[str, object]:
    """Return the hit rate over all of ``epochs``, or nothing when no row of a cached tensor was remote."""
    hits, misses = sum(e.cache_hits for e in epochs), sum(e.cache_misses for e in epochs)
    return {"cache_hit_rate": hits / (hits + misses)} if hits + misses else {}


def run_title(summary: Mapping[str, object], config: Mapping[str, object]) -> str:
    """Return the heading of a run's picture."""
    said = {**config, **summary}
    return (
        f"{said.get('graph', '?')}: {said.get('model', '?')} by {said.get('strategy', '?')}, "
        f"{plural(said.get('ranks', '?'), 'rank')} on {plural(said.get('servers', '?'), 'server')}"
    )


def phase_seconds(epochs: Sequence[EpochRecord]) -> dict[str, float]:
    """Return the mean seconds per epoch of each phase, empty without epochs."""
    if not epochs:
        return {}
    return {
        "sample": fmean(e.sample_s for e in epochs),
        "fetch": fmean(e.fetch_s for e in epochs),
        "wait": fmean(e.wait_s for e in epochs),
        "compute": fmean(e.compute_s for e in epochs),
        "exchange": fmean(e.exchange_s for e in epochs),
    }
