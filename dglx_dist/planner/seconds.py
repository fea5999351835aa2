"""Seconds of an epoch, a formula for each way in which strategies move things (algorithms 5)."""

from __future__ import annotations

from dataclasses import dataclass

from dglx_dist.planner.batch_work import BatchWork
from dglx_dist.planner.full_work import FullWork
from dglx_dist.planner.measured import Measured
from dglx_dist.planner.rates import Rates
from dglx_dist.planner.records import Cluster, Seconds
from dglx_dist.planner.traffic import GRADIENTS, Traffic

_FEW_CORES = 2.0
"""With fewer cores than that, a rank's loader and its training share one."""
_HIDDEN = ((_FEW_CORES, 0.9), (1.0, 0.7), (0.0, 0.35))
"""From so many cores of a rank on, the share of what is fetched ahead that costs no time. On a core of its
own a rank computes while it waits for the network, though not for what it has to copy (A1: 0.5 to 0.9;
PEER1: 0.4); where ranks share one the network waits for their turns, too (D1 and P1: some third)."""
_WIRE_BYTE_S = 0.75e-9
"""To send or to receive a byte, on a core (PEER1 with and without a cache)."""
_ROUNDS_OF_PULL, _ROUNDS_OF_SUMS = 2, 4
"""Messages one after another: there and back; and forward and back."""
_BLOCK_S = 1.5e-3
"""Of a core, to start what push-pull computes on the block of one more owner, forward and backward, however
small it is: what is summed and multiplied is the same in one block or in many (P1, P9: 1 to 3 ms)."""
_COLUMNS_OF_A_HEAD = 50
"""With attention, every part has the softmax of every owner's edges: so many columns of an edge for each head
(P9: 40 to 60, with 8 heads and with 2)."""
_PLAN_EDGE_BYTES = 16
"""Of a co-batch's plan on disk, by the edges of its first layer: source and edge, 8 bytes each."""
_READ_S = 5e-3
"""Of a core, to open the files of a co-batch and to make its blocks, however small it is (A1)."""
_EXCHANGE_S = 0.4e-3
"""Of a core, to bring rows together and to put others in their place, however few they are: 28 times in a
step of 14 layers (A1)."""
_MEETING_S = 4e-3
"""Of each step, until the sum of gradients has gone through gloo's threads on cores that compute, and the
slower rank is there too: what ranks stood still on 1 Gbit/s, however little they sent (A1)."""
_ASYNC = 0.85
"""An epoch without barriers, by one with them (Dorylus, 7.4)."""
_WORKER_OVERHEAD = 1.5
"""Tensor work by workers, which receive rows and send them back, by that of the rank itself."""


def hidden_share(cores: float) -> float:
    """Return how much of what is fetched ahead costs no time, while there is as much computing."""
    return next(share for least, share in _HIDDEN if cores >= least)


def rows_seconds(known: Measured, work: BatchWork, traffic: Traffic) -> Seconds:
    """Return those of data parallelism."""
    pulled_bytes = sum(count for name, count in traffic.outside.items() if name != GRADIENTS)
    rounds = _ROUNDS_OF_PULL * (1 + (len(known.shape.layers) if known.structure_partitioned else 0))
    pulled = pulled_bytes * work.card_share / known.cluster.external_bytes_per_s
    pulled += _waits(rounds * work.steps, known.cluster) if pulled_bytes else 0.0
    compute = _computing(known.rates, known.shape.work(*work.worked), work, fresh=True)
    return _ahead(
        known, work, traffic, _Parts(compute=compute, sampling=_sampling(known, work, 1), pulled=pulled)
    )


def columns_seconds(known: Measured, work: BatchWork, size: int, traffic: Traffic, *, late: bool) -> Seconds:
    """Return those of push-pull in groups of ``size`` ranks.

    Args:
        known: What was measured.
        work: Of the same batches under data parallelism.
        size: N_f.
        traffic: Its bytes.
        late: Whether several batches are in flight, so that sums travel beside computing.
    """
    cluster, first = known.cluster, known.shape.first
    outside, inside = traffic.outside, traffic.inside
    logits = 0 if first is None else first.logit_width * _COLUMNS_OF_A_HEAD * work.worked[2][0]
    of_an_owner = work.steps * _BLOCK_S / min(cluster.cores, 1.0) + logits * known.rates.edge_column_s
    compute = (
        _computing(known.rates, known.shape.work(*work.worked), work, fresh=True) + (size - 1) * of_an_owner
    )
    draws = size if size > 1 and "structure" not in {**outside, **inside} else 1
    sums = ("activations", "activation_gradients")
    waited = sum(outside.get(name, 0) for name in sums) / cluster.servers / cluster.external_bytes_per_s
    if waited:
        waited = _after_bursts(waited, 2 * work.steps, compute, cluster)
        waited += _waits(_ROUNDS_OF_SUMS * work.steps, cluster)
    others = sum(count for name, count in outside.items() if name not in (*sums, GRADIENTS))
    ahead = others / cluster.servers / cluster.external_bytes_per_s
    own = sum(inside.get(name, 0) for name in sums) / cluster.servers / cluster.internal_bytes_per_s
    parts = _Parts(
        compute=compute,
        sampling=_sampling(known, work, draws),
        pulled=ahead + (waited if late else 0.0),
        waited=0.0 if late else waited,
        inside=own,
    )
    return _ahead(known, work, traffic, parts)


def plans_seconds(known: Measured, work: FullWork, traffic: Traffic, *, use_pp: bool) -> Seconds:
    """Return those of whole graphs whose layers exchange rows, in one step or in several co-batches."""
    cluster, widths = known.cluster, known.shape.widths
    compute = _computing(
        known.plan_rates or known.rates, known.shape.work(*work.worked), work, fresh=work.steps > 1
    )
    read = _reading(known, work) if work.steps > 1 else 0.0
    if cluster.cores >= _FEW_CORES:
        read = max(0.0, read - hidden_share(cluster.cores) * compute)
    outside = _exchanged(work.card_rows, widths.first, widths.hidden, use_pp, learns=widths.first_learns)
    inside = _exchanged(work.inside_rows, widths.first, widths.hidden, use_pp, learns=widths.first_learns)
    waiting = work.card_rows[1:] if use_pp else work.card_rows
    waits = 2 * sum(1 for rows in waiting if rows) * work.steps
    moving = outside * widths.itemsize / cluster.external_bytes_per_s
    handling = _handling(known, traffic) + waits * _EXCHANGE_S / min(cluster.cores, 1.0)
    return Seconds(
        compute=compute + handling,
        sampling=read,
        outside=_after_bursts(moving, waits, compute, cluster) + _waits(waits, cluster),
        inside=inside * widths.itemsize / cluster.internal_bytes_per_s,
        all_reduce=_all_reduce(known, work.steps, traffic, compute),
    )


def intervals_seconds(known: Measured, work: FullWork, traffic: Traffic, *, overlaps: bool) -> Seconds:
    """Return those of training in intervals, with workers that share the cores of their graph server."""
    cluster = known.cluster
    rates = known.plan_rates or known.rates
    compute = _WORKER_OVERHEAD * rates.compute_s(known.shape.work(*work.worked), 1)
    ghosts = sum(traffic.outside.get(name, 0) for name in ("ghosts", "ghost_gradients"))
    outside = ghosts / cluster.servers / cluster.external_bytes_per_s
    # Nothing but ghosts stays inside: what goes to workers leaves the server.
    inside = sum(traffic.inside.values()) / cluster.servers / cluster.internal_bytes_per_s
    factor = _ASYNC if overlaps else 1.0
    return Seconds(compute=factor * compute, outside=factor * outside, inside=factor * inside)


def _computing(rates: Rates, counted: tuple[int, int], work: BatchWork | FullWork, *, fresh: bool) -> float:
    """Return the seconds of steps; ``fresh``: on blocks that are new in each."""
    formats = rates.fresh_edge_s * sum(work.worked[2]) if fresh else 0.0
    return rates.compute_s(counted, work.steps) + formats


def _reading(known: Measured, work: FullWork) -> float:
    """Return what it takes to have all co-batches' plans and rows from disk, checksums compared."""
    read = work.read_rows * known.graph.feature_bytes + _PLAN_EDGE_BYTES * max(work.worked[2])
    rates = known.plan_rates or known.rates
    return read * rates.check_byte_s + work.steps * _READ_S / min(known.cluster.cores, 1.0)


def _after_bursts(moving: float, messages: int, compute: float, cluster: Cluster) -> float:
    """Return the seconds of so many equal messages, without what a card lets pass at once after computing."""
    pause = min(cluster.burst_bytes / cluster.external_bytes_per_s, compute / max(messages, 1))
    return max(0.0, moving - messages * pause)


def _exchanged(rows: tuple[int, ...], first: int, hidden: int, use_pp: bool, *, learns: bool) -> int:
    """Return numbers that cross forward and back, of rows by layer."""
    above = 2 * hidden * sum(rows[1:])
    return above + (0 if use_pp else first * rows[0] * (2 if learns else 1))


def _sampling(known: Measured, work: BatchWork, draws: int) -> float:
    rates, (sources, _, edges) = known.rates, work.worked
    return (
        draws * rates.sample_edge_s * sum(edges)
        + rates.gather_byte_s * sources[0] * known.graph.feature_bytes
    )


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """Seconds of an epoch before any of them are hidden."""

    compute: float
    sampling: float
    pulled: float
    """What is fetched ahead."""
    waited: float = 0.0
    """What a step stands still for."""
    inside: float = 0.0


def _ahead(known: Measured, work: BatchWork, traffic: Traffic, parts: _Parts) -> Seconds:
    """Return seconds of steps whose batches are made while others are computed."""
    share = hidden_share(known.cluster.cores)
    compute = parts.compute + _handling(known, traffic)
    # On few cores, drawing a batch takes its time from computing another one.
    few = known.cluster.cores < _FEW_CORES
    drawn = parts.sampling if few else max(0.0, parts.sampling - share * compute)
    hidden = share * min(parts.pulled, compute + drawn)
    return Seconds(
        compute=compute,
        sampling=drawn,
        outside=parts.pulled - hidden + parts.waited,
        inside=parts.inside,
        all_reduce=_all_reduce(known, work.steps, traffic, compute),
    )


def _all_reduce(known: Measured, steps: int, traffic: Traffic, compute: float) -> float:
    """Return the seconds of summing gradients in rings, for so many steps."""
    cluster = known.cluster
    outside = traffic.outside.get(GRADIENTS, 0) / cluster.servers / cluster.external_bytes_per_s
    outside = _after_bursts(outside, steps, compute, cluster)
    inside = traffic.inside.get(GRADIENTS, 0) / cluster.servers / cluster.internal_bytes_per_s
    meeting = _MEETING_S * steps if cluster.ranks > 1 and cluster.cores < _FEW_CORES else 0.0
    return max(outside, inside) + _waits(2 * (cluster.servers - 1) * steps, cluster) + meeting


def _handling(known: Measured, traffic: Traffic) -> float:
    """Return what sending and receiving take of computing, where there are few cores."""
    if known.cluster.cores >= _FEW_CORES:
        return 0.0
    moved = 2 * sum(traffic.outside.values()) / known.cluster.ranks
    return moved * _WIRE_BYTE_S / min(known.cluster.cores, 1.0)


def _waits(messages: int, cluster: Cluster) -> float:
    return messages * cluster.latency_s if cluster.servers > 1 else 0.0
