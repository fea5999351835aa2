"""Seconds of an epoch, a formula for each way in which strategies move things (algorithms 5)."""

from __future__ import annotations

from collections.abc import Mapping

from dglx_dist.planner.batch_work import BatchWork
from dglx_dist.planner.full_work import FullWork
from dglx_dist.planner.measured import Measured
from dglx_dist.planner.records import Cluster, Seconds

_FEW_CORES, _HIDDEN_BY_FEW, _HIDDEN_BY_MANY = 2.0, 0.25, 0.9
"""With fewer cores than that, a rank's loader and its training share one, and what is fetched ahead is hidden
only while the rank waits for its turn: by the measurements of D1 and P1 (docs/performance.md) a quarter."""
_ROUNDS_OF_PULL, _ROUNDS_OF_SUMS = 2, 4
"""Messages one after another: there and back; and forward and back."""
_KAPPA_OF_AN_OWNER, _KAPPA_OF_ATTENTION = 0.1, 2.7
"""What one more owner adds to the computing of push-pull, by that of data parallelism: many small blocks in
place of a large one, and with attention the softmax of every owner on every part (P1, P9)."""
_ASYNC = 0.85
"""An epoch without barriers, by one with them (Dorylus, 7.4)."""
_WORKER_OVERHEAD = 1.5
"""Tensor work by workers, which receive rows and send them back, by that of the rank itself."""


def hidden_share(cores: float) -> float:
    """Return how much of what is fetched ahead costs no time, while there is as much computing."""
    return _HIDDEN_BY_FEW if cores < _FEW_CORES else _HIDDEN_BY_MANY


def rows_seconds(known: Measured, work: BatchWork, pulled_bytes: int) -> Seconds:
    """Return those of data parallelism that pulls ``pulled_bytes`` between servers, all ranks together."""
    compute = known.rates.compute_s(known.shape.work(*work.worked), work.steps)
    sampling = _sampling(known, work, 1)
    rounds = _ROUNDS_OF_PULL * (1 + (len(known.shape.layers) if known.structure_partitioned else 0))
    pulled = _busiest(pulled_bytes, work.card_share, known.cluster)
    pulled += _waits(rounds * work.steps, known.cluster) if pulled_bytes else 0.0
    return _ahead(known, work, compute, sampling, pulled, 0.0, 0.0)


def columns_seconds(
    known: Measured,
    work: BatchWork,
    size: int,
    phases: tuple[Mapping[str, int], Mapping[str, int]],
    *,
    late: bool,
) -> Seconds:
    """Return those of push-pull in groups of ``size`` ranks.

    Args:
        known: What was measured.
        work: Of the same batches under data parallelism.
        size: N_f.
        phases: Bytes between servers and inside of them, by the ledger's phases.
        late: Whether several batches are in flight, so that sums travel beside computing.
    """
    cluster, first = known.cluster, known.shape.first
    outside, inside = phases
    attends = first is not None and first.logit_width > 0
    each = _KAPPA_OF_ATTENTION if attends else _KAPPA_OF_AN_OWNER
    compute = (1 + each * (size - 1)) * known.rates.compute_s(known.shape.work(*work.worked), work.steps)
    draws = size if size > 1 and "structure" not in {**outside, **inside} else 1
    sums = ("activations", "activation_gradients")
    waited = sum(outside.get(name, 0) for name in sums) / cluster.servers / cluster.external_bytes_per_s
    if waited:
        waited += _waits(_ROUNDS_OF_SUMS * work.steps, cluster)
    others = sum(count for name, count in outside.items() if name not in (*sums, "gradients"))
    ahead = others / cluster.servers / cluster.external_bytes_per_s
    own = sum(inside.get(name, 0) for name in sums) / cluster.servers / cluster.internal_bytes_per_s
    sampling = _sampling(known, work, draws)
    if late:
        return _ahead(known, work, compute, sampling, ahead + waited, 0.0, own)
    return _ahead(known, work, compute, sampling, ahead, waited, own)


def plans_seconds(known: Measured, work: FullWork, *, use_pp: bool) -> Seconds:
    """Return those of whole graphs whose layers exchange rows, in one step or in several co-batches."""
    cluster, widths = known.cluster, known.shape.widths
    compute = known.rates.compute_s(known.shape.work(*work.worked), work.steps)
    outside = _exchanged(work.card_rows, widths.first, widths.hidden, use_pp, learns=widths.first_learns)
    inside = _exchanged(work.inside_rows, widths.first, widths.hidden, use_pp, learns=widths.first_learns)
    waits = 2 * sum(1 for rows in work.card_rows if rows) * work.steps
    return Seconds(
        compute=compute,
        outside=outside * widths.itemsize / cluster.external_bytes_per_s + _waits(waits, cluster),
        inside=inside * widths.itemsize / cluster.internal_bytes_per_s,
        all_reduce=_all_reduce(known, work.steps),
    )


def intervals_seconds(
    known: Measured, work: FullWork, outside: Mapping[str, int], *, overlaps: bool
) -> Seconds:
    """Return those of training in intervals, with workers that share the cores of their graph server."""
    cluster = known.cluster
    compute = _WORKER_OVERHEAD * known.rates.compute_s(known.shape.work(*work.worked), 1)
    ghosts = sum(outside.get(name, 0) for name in ("ghosts", "ghost_gradients"))
    network = ghosts / cluster.servers / cluster.external_bytes_per_s
    factor = _ASYNC if overlaps else 1.0
    return Seconds(compute=factor * compute, outside=factor * network)


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


def _ahead(
    known: Measured,
    work: BatchWork,
    compute: float,
    sampling: float,
    pulled: float,
    waited: float,
    inside: float,
) -> Seconds:
    """Return seconds of steps whose batches are made while others are computed."""
    share = hidden_share(known.cluster.cores)
    # On few cores, drawing a batch takes its time from computing another one.
    drawn = sampling if known.cluster.cores < _FEW_CORES else max(0.0, sampling - share * compute)
    hidden = share * min(pulled, compute + drawn)
    return Seconds(
        compute=compute,
        sampling=drawn,
        outside=pulled - hidden + waited,
        inside=inside,
        all_reduce=_all_reduce(known, work.steps),
    )


def _all_reduce(known: Measured, steps: int) -> float:
    """Return the seconds of summing all gradients in a ring, for so many steps."""
    cluster, ranks = known.cluster, known.cluster.ranks
    if ranks == 1:
        return 0.0
    sent = 2 * (ranks - 1) / ranks * known.shape.gradient_bytes
    outside = sent / cluster.external_bytes_per_s if cluster.servers > 1 else 0.0
    inside = (
        sent * cluster.ranks_per_server / cluster.internal_bytes_per_s
        if cluster.ranks_per_server > 1
        else 0.0
    )
    rounds = 2 * (cluster.servers - 1)
    return steps * max(outside, inside) + _waits(rounds * steps, cluster)


def _busiest(num_bytes: int, card_share: float, cluster: Cluster) -> float:
    return num_bytes * card_share / cluster.external_bytes_per_s


def _waits(messages: int, cluster: Cluster) -> float:
    return messages * cluster.latency_s if cluster.servers > 1 else 0.0
