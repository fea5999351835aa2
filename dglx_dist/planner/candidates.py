"""Candidates of the planner: every strategy with its main options."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from dglx_dist.planner.records import Candidate, FullGraphScheme

EAS_HOPS: Mapping[str, int] = MappingProxyType({"eas, 1 hop": 1, "eas, 2 hops": 2})
"""Variants of expansion-aware sampling: ``FullGraphScheme.limit`` to hops between servers."""
EAS_FANOUT = 15
"""External fan-out, as in the paper."""
CO_BATCH_COUNTS = (2, 8)
"""Numbers of cooperative batches to compare, for graphs that do not fit the memory at once."""
CACHE_SIZES = (0.1, 0.5)
"""Cache sizes as fractions of the server's own nodes."""
ASYNC_EPOCHS = {0: 1.08, 1: 1.4}
"""Staleness to epochs to the same accuracy, relative to the pipeline with barriers (Dorylus has
1.00 to 1.14 and 1.07 to 1.58)."""
_MOST_CO_BATCHES = 16


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """Properties of model and cluster that define the candidates."""

    ranks: int
    servers: int
    num_layers: int
    steps: int
    """Of an epoch of mini-batches; 0: no mini-batches."""
    caches: tuple[float, ...] = CACHE_SIZES


def enumerate_candidates(space: SearchSpace) -> tuple[Candidate, ...]:
    """Return all candidates, mini-batches first."""
    batches = (*_by_rows(space), *_by_columns(space), *_by_servers(space)) if space.steps else ()
    return (*batches, *_by_plans(space), *_by_intervals(space))


def schemes_of(candidates: Iterable[Candidate]) -> tuple[FullGraphScheme, ...]:
    """Return the full-graph schemes of ``candidates``, each once."""
    return tuple(dict.fromkeys(one.scheme for one in candidates if one.scheme is not None))


def choosable() -> Mapping[str, frozenset[str]]:
    """Return every strategy that may be chosen, with its option names."""
    found: dict[str, frozenset[str]] = {}
    for one in enumerate_candidates(SearchSpace(ranks=4, servers=2, num_layers=3, steps=3)):
        found[one.strategy] = found.get(one.strategy, frozenset()) | one.options.keys()
    return found


def _by_rows(space: SearchSpace) -> Iterator[Candidate]:
    make = partial(Candidate, strategy="data_parallel", unit="mini_batch", moves="rows")
    yield make()
    for alpha in space.caches if space.servers > 1 else ():
        yield make(cache="vip", cache_alpha=alpha)


def _by_columns(space: SearchSpace) -> Iterator[Candidate]:
    if space.ranks == 1:
        return
    make = partial(Candidate, strategy="push_pull", unit="mini_batch", moves="columns")
    yield make(options={"structure": "push"})
    yield make(options={"structure": "resample"})
    for size in _groups(space):
        yield make(options={"structure": "push", "group_size": size})
    for late in ({"depth": 3}, {"depth": 3, "weights": "split"}):
        yield make(options={"structure": "push", **late}, exact=False)


def _by_servers(space: SearchSpace) -> Iterator[Candidate]:
    number = _cooperative_batches(space)
    if space.servers == 1 or not number:
        return
    yield Candidate(
        strategy="cooperative",
        options={"batches": number},
        unit="mini_batch",
        moves="plans",
        scheme=FullGraphScheme(space.num_layers, cooperative_batches=number),
    )


def _by_plans(space: SearchSpace) -> Iterator[Candidate]:
    make = partial(Candidate, unit="full_graph", moves="plans")
    yield make(strategy="full_graph", scheme=FullGraphScheme(0))
    if space.servers == 1:
        return
    for hops in sorted({1, space.num_layers - 1} - {0, space.num_layers}):
        yield make(strategy="shared_preload", options={"hops": hops}, scheme=FullGraphScheme(hops))
    yield make(strategy="shared_preload", scheme=FullGraphScheme(space.num_layers))
    for limit, reach in EAS_HOPS.items():
        options = {"external_hops": reach, "external_fanout": EAS_FANOUT}
        scheme = FullGraphScheme(space.num_layers, limit)
        yield make(strategy="shared_preload", options=options, scheme=scheme, exact=False)
    for number in sorted({*CO_BATCH_COUNTS} - {_cooperative_batches(space)}):
        scheme = FullGraphScheme(space.num_layers, cooperative_batches=number)
        yield make(strategy="cooperative", options={"batches": number}, scheme=scheme)


def _by_intervals(space: SearchSpace) -> Iterator[Candidate]:
    make = partial(
        Candidate, strategy="lambda", unit="full_graph", moves="intervals", scheme=FullGraphScheme(0)
    )
    yield make()
    for staleness, factor in ASYNC_EPOCHS.items():
        yield make(options={"mode": "async", "staleness": staleness}, exact=False, epochs_factor=factor)


def _cooperative_batches(space: SearchSpace) -> int:
    # As many cooperative batches as mini-batches, so that an epoch has as many updates; 0: none.
    # With too many, the neighbourhoods do not fit; with fewer, the epoch would be a different one.
    return max(space.steps, 2) if 0 < space.steps <= _MOST_CO_BATCHES else 0


def _groups(space: SearchSpace) -> list[int]:
    # One rank with all columns, the ranks of a server, half of all ranks.
    sizes = {1, space.ranks // space.servers, space.ranks // 2}
    return sorted(size for size in sizes if space.ranks % size == 0 and size < space.ranks)
