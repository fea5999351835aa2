"""From what is known to what an epoch of a candidate comes to. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from dglx_dist.planner import seconds as formulas
from dglx_dist.planner.batch_work import BatchWork, CacheHits
from dglx_dist.planner.measured import Measured
from dglx_dist.planner.records import Candidate, Prediction, Seconds
from dglx_dist.planner.traffic import (
    Traffic,
    columns_traffic,
    intervals_traffic,
    plans_traffic,
    rows_traffic,
)


def predict(candidate: Candidate, known: Measured) -> Prediction:
    """Return what an epoch of ``candidate`` comes to; where it cannot be taken, why, and zeros."""
    why_not = _refusal(candidate, known)
    found = _NOTHING if why_not else _FORMULAS[candidate.moves](candidate, known)
    needed = found.memory - found.shared + found.shared // known.cluster.ranks_per_server
    if not why_not and needed > known.cluster.memory_bytes:
        why_not = f"needs {needed / 1e9:.1f} GB a rank, of {known.cluster.memory_bytes / 1e9:.1f}"
    return Prediction(
        candidate=candidate,
        seconds=found.seconds,
        outside=found.traffic.outside,
        inside=found.traffic.inside,
        bytes_exact=found.traffic.exact,
        once_bytes=found.traffic.once,
        memory_bytes=found.memory,
        why_not=why_not,
        note=_note(candidate, known),
    )


@dataclass(frozen=True, kw_only=True)
class _Found:
    """What a formula gives."""

    seconds: Seconds
    traffic: Traffic
    memory: int
    """Peak of a rank."""
    shared: int = 0
    """Of it, what the ranks of a server map together."""


_NOTHING = _Found(seconds=Seconds(), traffic=Traffic(exact=False), memory=0)


def _rows(candidate: Candidate, known: Measured) -> _Found:
    work, cache = _batches(known), _cache(candidate, known)
    traffic = rows_traffic(known, work, cache)
    row = known.graph.feature_bytes
    kept = 0 if cache is None else cache.rows * (row + 4) // known.cluster.servers
    shared = known.memory.own_features + kept
    return _Found(
        seconds=formulas.rows_seconds(known, work, traffic),
        traffic=traffic,
        memory=known.memory.batches(work.largest, held=shared),
        shared=shared + known.memory.structure,
    )


def _columns(candidate: Candidate, known: Measured) -> _Found:
    work, ranks = _batches(known), known.cluster.ranks
    size = int(candidate.options.get("group_size", ranks))
    traffic = columns_traffic(known, work, size, pushed=candidate.options.get("structure") == "push")
    depth = int(candidate.options.get("depth", 1))
    took = formulas.columns_seconds(known, work, size, traffic, late=depth > 1)
    columns = known.graph.nodes * known.graph.feature_bytes // size
    held = columns + known.memory.own_features
    memory = known.memory.batches(work.largest, held=held, owners=size, in_flight=depth)
    memory += (depth - 1) * 4 * work.largest[1][0] * known.shape.layers[0].outputs
    shared = known.memory.own_features + known.memory.structure
    return _Found(seconds=took, traffic=traffic, memory=memory, shared=shared)


def _plans(candidate: Candidate, known: Measured) -> _Found:
    assert candidate.way is not None
    work = known.whole[candidate.way]
    use_pp = candidate.way[2] == 1
    traffic = plans_traffic(known, work, use_pp=use_pp)
    return _Found(
        seconds=formulas.plans_seconds(known, work, traffic, use_pp=use_pp),
        traffic=traffic,
        memory=known.memory.full(work, ahead=0 if work.steps == 1 else 1),
        shared=known.memory.own_features,
    )


def _intervals(candidate: Candidate, known: Measured) -> _Found:
    assert candidate.way is not None
    assert known.ghosts is not None
    traffic, work = intervals_traffic(known, known.ghosts), known.whole[candidate.way]
    staleness = int(candidate.options.get("staleness", -1)) + 1
    took = formulas.intervals_seconds(known, work, traffic, overlaps=not candidate.exact)
    # Every epoch in flight keeps its activations.
    kept = known.memory.full(work) - known.memory.fixed
    memory = known.memory.fixed + round(kept * (1 + 0.5 * staleness))
    return _Found(seconds=took, traffic=traffic, memory=memory)


_FORMULAS: Mapping[str, Callable[[Candidate, Measured], _Found]] = MappingProxyType(
    {"rows": _rows, "columns": _columns, "plans": _plans, "intervals": _intervals}
)


def _batches(known: Measured) -> BatchWork:
    assert known.batches is not None, "candidates of mini-batches need counted batches"
    return known.batches


def _cache(candidate: Candidate, known: Measured) -> CacheHits | None:
    if candidate.cache is None:
        return None
    return next(one for one in _batches(known).caches if one.alpha == candidate.cache_alpha)


def _refusal(candidate: Candidate, known: Measured) -> str:
    """Return why the strategy would refuse; empty: it would not."""
    if candidate.unit == "mini_batch" and known.batches is None:
        return "no mini-batches were asked for"
    if candidate.moves == "columns" and known.shape.first is None:
        return known.shape.why_not_split
    if candidate.moves == "intervals" and known.shape.why_not_chained:
        return known.shape.why_not_chained
    if candidate.moves == "plans" and known.shape.why_not_whole:
        return known.shape.why_not_whole
    if candidate.way is not None and candidate.way not in known.whole:
        return "its plans were not counted"
    if candidate.cache is not None and not any(
        one.alpha == candidate.cache_alpha for one in _batches(known).caches
    ):
        return "its cache was not counted"
    return ""


def _note(candidate: Candidate, known: Measured) -> str:
    said = ["workers on the same servers", "no dropout"] if candidate.moves == "intervals" else []
    if candidate.epochs_factor != 1.0:
        said.append(f"about {candidate.epochs_factor:g} x the epochs")
    return "; ".join(said)
