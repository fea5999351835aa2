"""How much of the traffic was hidden behind work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dglx_dist.cluster.timeline import COMPUTE, GRAPH_SERVER, NETWORK, WAIT, WORKER, Span
from dglx_dist.cluster.trace_events import TraceFile

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Seconds, summed over the ranks."""

    network_s: float
    """During which something of a rank was under way on the network; two transfers at once count once."""
    beside_s: float
    """Of them, those in which that rank computed too. Waiting is no computing."""
    compute_s: float
    """During which a rank computed."""

    @property
    def fraction(self) -> float | None:
        """``beside_s / network_s``; None where nothing was under way."""
        return self.beside_s / self.network_s if self.network_s > 0 else None


def overlap(trace: TraceFile) -> Overlap:
    """Return how long ranks computed while their network was in use."""
    network_s = beside_s = compute_s = 0.0
    for rank in trace.ranks:
        network, compute = _network(rank.spans), _compute(rank.spans)
        network_s += _length(network)
        compute_s += _length(compute)
        beside_s += _length(network) - _length(_without(network, compute))
    return Overlap(network_s=network_s, beside_s=beside_s, compute_s=compute_s)


def workers_beside(trace: TraceFile) -> tuple[float, float]:
    """Return seconds in which a rank had tasks at workers, and those of them in which it computed too."""
    worker_s = beside_s = 0.0
    for rank in trace.ranks:
        tasks = [one for one in rank.spans if one.row == WORKER and not is_wait(one)]
        busy = _union((one.begin_s, one.end_s) for one in tasks)
        worker_s += _length(busy)
        beside_s += _length(busy) - _length(_without(busy, _compute(rank.spans)))
    return worker_s, beside_s


def is_wait(span: Span) -> bool:
    """Whether a row stands still during ``span``."""
    return span.name.startswith(WAIT)


def _network(spans: Sequence[Span]) -> list[Interval]:
    return _union((one.begin_s, one.end_s) for one in spans if one.row == NETWORK and not is_wait(one))


def _compute(spans: Sequence[Span]) -> list[Interval]:
    rows = [one for one in spans if one.row in (COMPUTE, GRAPH_SERVER)]
    work = _union((one.begin_s, one.end_s) for one in rows if not is_wait(one))
    return _without(work, _union((one.begin_s, one.end_s) for one in rows if is_wait(one)))


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same points as intervals that are apart, in order."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def _without(kept: Sequence[Interval], cut: Sequence[Interval]) -> list[Interval]:
    """Return the points of ``kept`` that are not in ``cut``; both in order and apart, and so the result."""
    left: list[Interval] = []
    first = 0
    for begin, end in kept:
        while first < len(cut) and cut[first][1] <= begin:
            first += 1
        number = first
        while number < len(cut) and cut[number][0] < end:
            if begin < cut[number][0]:
                left.append((begin, cut[number][0]))
            begin = max(begin, cut[number][1])
            number += 1
        if begin < end:
            left.append((begin, end))
    return left


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)
