"""The ways to train that are compared: every strategy with its main parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from dglx_dist.planner.records import Candidate, Way

EAS_HOPS: Mapping[str, int] = MappingProxyType({"eas, 1 hop": 1, "eas, 2 hops": 2})
"""Of expansion-aware sampling: the second field of a way to m."""
EAS_FANOUT = 15
"""k, as in the paper."""
PIECES = (2, 8)
"""R of whole graphs that are trained on in co-batches, where one does not fit."""
CACHE_SIZES = (0.1, 0.5)
"""Of caches of remote rows, by the server's own nodes."""
ASYNC_EPOCHS = {0: 1.08, 1: 1.4}
"""Staleness to epochs to the same accuracy, by those of the pipeline with barriers (algorithms 6.2: Dorylus
has 1.00 to 1.14 and 1.07 to 1.58)."""
_MOST_CO_BATCHES = 16


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """What decides which candidates there are."""

    ranks: int
    servers: int
    num_layers: int
    steps: int
    """Of an epoch of mini-batches; 0: none."""
    caches: tuple[float, ...] = CACHE_SIZES
    """Sizes that were counted."""


def enumerate_candidates(frame: SearchSpace) -> tuple[Candidate, ...]:
    """Return all ways to train, those of mini-batches first."""
    batches = (*_by_rows(frame), *_by_columns(frame), *_by_servers(frame)) if frame.steps else ()
    return (*batches, *_by_plans(frame), *_by_intervals(frame))


def ways_of(candidates: Iterable[Candidate]) -> tuple[Way, ...]:
    """Return what must be counted of whole graphs for ``candidates``, each once."""
    return tuple(dict.fromkeys(one.way for one in candidates if one.way is not None))


def choosable() -> Mapping[str, frozenset[str]]:
    """Return every strategy that may be chosen, with the names of the options that it is chosen with."""
    found: dict[str, frozenset[str]] = {}
    for one in enumerate_candidates(SearchSpace(ranks=4, servers=2, num_layers=3, steps=3)):
        found[one.strategy] = found.get(one.strategy, frozenset()) | one.options.keys()
    return found


def _by_rows(frame: SearchSpace) -> Iterator[Candidate]:
    make = partial(Candidate, strategy="data_parallel", unit="mini_batch", moves="rows")
    yield make()
    for alpha in frame.caches if frame.servers > 1 else ():
        yield make(cache="vip", cache_alpha=alpha)


def _by_columns(frame: SearchSpace) -> Iterator[Candidate]:
    if frame.ranks == 1:
        return
    make = partial(Candidate, strategy="push_pull", unit="mini_batch", moves="columns")
    yield make(options={"structure": "push"})
    yield make(options={"structure": "resample"})
    for size in _groups(frame):
        yield make(options={"structure": "push", "group_size": size})
    for late in ({"depth": 3}, {"depth": 3, "weights": "split"}):
        yield make(options={"structure": "push", **late}, exact=False)


def _by_servers(frame: SearchSpace) -> Iterator[Candidate]:
    number = _co_batches(frame)
    if frame.servers == 1 or not number:
        return
    yield Candidate(
        strategy="cooperative",
        options={"batches": number},
        unit="mini_batch",
        moves="plans",
        way=(frame.num_layers, "", number),
    )


def _by_plans(frame: SearchSpace) -> Iterator[Candidate]:
    make = partial(Candidate, unit="full_graph", moves="plans")
    yield make(strategy="full_graph", way=(0, "", 1))
    if frame.servers == 1:
        return
    for hops in sorted({1, frame.num_layers - 1} - {0, frame.num_layers}):
        yield make(strategy="shared_preload", options={"hops": hops}, way=(hops, "", 1))
    yield make(strategy="shared_preload", way=(frame.num_layers, "", 1))
    for kind, reach in EAS_HOPS.items():
        limits = {"external_hops": reach, "external_fanout": EAS_FANOUT}
        yield make(strategy="shared_preload", options=limits, way=(frame.num_layers, kind, 1), exact=False)
    for number in sorted({*PIECES} - {_co_batches(frame)}):
        yield make(strategy="cooperative", options={"batches": number}, way=(frame.num_layers, "", number))


def _by_intervals(frame: SearchSpace) -> Iterator[Candidate]:
    make = partial(Candidate, strategy="lambda", unit="full_graph", moves="intervals", way=(0, "", 1))
    yield make()
    for staleness, factor in ASYNC_EPOCHS.items():
        yield make(options={"mode": "async", "staleness": staleness}, exact=False, epochs_factor=factor)


def _co_batches(frame: SearchSpace) -> int:
    """Return as many co-batches as an epoch has steps of mini-batches, so that both learn as often; 0: none.

    More than some are too many neighbourhoods to hold, and fewer than the steps would be another epoch.
    """
    return max(frame.steps, 2) if 0 < frame.steps <= _MOST_CO_BATCHES else 0


def _groups(frame: SearchSpace) -> list[int]:
    """Return sizes of groups below all ranks: one rank that has all columns, those of a server, a half."""
    sizes = {1, frame.ranks // frame.servers, frame.ranks // 2}
    return sorted(size for size in sizes if frame.ranks % size == 0 and size < frame.ranks)
