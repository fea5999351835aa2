"""Cost model: bytes, memory and seconds of an epoch for each candidate (docs/design/planner.md)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np
import torch
from torch import nn

from dglx_dist.comm.ledger import ring_bytes
from dglx_dist.comm.topology import silence_profiler
from dglx_dist.errors import ConfigError
from dglx_dist.planner.closures import FullWork
from dglx_dist.planner.model_shape import FirstLayer, ModelShape, exchanged_bytes
from dglx_dist.planner.profile import Rates
from dglx_dist.planner.records import Candidate, Cluster, FullGraphScheme, GraphStats, Prediction, Seconds
from dglx_dist.planner.workload import BatchWork, CacheHits, Draws, Survey
from dglx_dist.records import EDGE_TYPE, Array
from dglx_dist.strategies.full_graph.memory_estimate import MemoryTrace, trace_memory

_SHORT_ID_BYTES, _LABEL_BYTES, _STATISTICS_BYTES = 4, 4, 2 * 2 * 8
"""Of an id; of a label, sent as a number where the paper sends one-hot rows; of loss and correct predictions:
two float64 for each half of a fused task."""


@dataclass(frozen=True, kw_only=True)
class ServerlessSetting:
    """Inputs of :func:`serverless_bytes`, for convolutions that map sums, as GCN's."""

    widths: Sequence[int]
    """(L + 1,) d_0 to d_L: features, hidden widths, classes."""
    nodes: int
    """n, of all graph servers."""
    ghosts: int
    """|G|: pairs of a node and another graph server that reads it."""
    intervals: int
    fusion: bool = True
    rematerialise: bool = True
    itemsize: int = 4


def serverless_bytes(setting: ServerlessSetting) -> dict[str, int]:
    """Return the bytes of an epoch by ledger phase, over all ranks, with one parameter server.

    Streaming changes none of them. For each layer l of L, with s bytes a number and K intervals::

        ghosts            |G| (4 + s d_l)               l < L, and as much back
        AV l              n d_{l-1} s down              n d_l s up, twice that without rematerialisation
        fused AV L        n (d_{L-1} s + 4) down        n d_{L-1} s up, not for L = 1; 32 K of loss and count
        gradAV l          n (d_{l-1} + d_l) s down      n d_{l-1} s up, not for l = 1; n d_l s more down
                                                        without rematerialisation
        weights           K |W_l| s for each task down, once back
    """
    hidden = sum(setting.widths[1:-1])
    boundary = setting.ghosts * (_SHORT_ID_BYTES * (len(setting.widths) - 2) + setting.itemsize * hidden)
    down = up = weights_down = weights_up = 0
    last = len(setting.widths) - 1
    for layer in range(1, last + 1):
        wide, narrow = setting.widths[layer - 1], setting.widths[layer]
        weights = setting.intervals * (wide + 1) * narrow * setting.itemsize
        back = 0 if layer == 1 else setting.nodes * wide * setting.itemsize
        weights_up += weights
        if layer == last and setting.fusion:
            down += setting.nodes * (wide * setting.itemsize + _LABEL_BYTES)
            up += back + setting.intervals * _STATISTICS_BYTES
            weights_down += weights
            continue
        saved = 0 if setting.rematerialise else setting.nodes * narrow * setting.itemsize
        rows = setting.nodes * setting.itemsize
        down += rows * wide + rows * (wide + narrow) + saved
        up += rows * narrow + saved + back
        weights_down += 2 * weights
    return {
        "ghost_gradients": boundary,
        "ghosts": boundary,
        "lambda_down": down,
        "lambda_up": up,
        "weights_down": weights_down,
        "weights_up": weights_up,
    }


PROGRAM_BYTES = 690 * 10**6
"""Of a rank that has imported everything, compiled its kernels and evaluated once (torch 2.13, Linux)."""
_COPIES_WITH_ADAM = 4
"""Parameters, their gradients, and Adam's two moments."""
_ALLOCATOR_OVERHEAD = 1.3
"""Held by used memory: each thread keeps what it freed for the next step."""
_BLOCK_EDGE_BYTES, _BLOCK_ROW_BYTES = 28, 24
"""Of a sampled block: ids, positions and the formats for message passing."""
_PLAN_EDGE_BYTES = 44
"""Of the plan and block of a full-graph layer, as ``memory_estimate.structure_bytes`` has it."""


@dataclass(frozen=True, kw_only=True)
class MemoryModel:
    """Peak memory of a rank; the inputs are the same for all candidates."""

    graph: GraphStats
    shape: ModelShape
    cluster: Cluster
    program_bytes: int
    replicated: bool
    """Whether every server maps the structure of the whole graph."""
    of_batches: MemoryTrace | None = None
    """Allocation trace of a step on sampled blocks; None: estimated from widths."""
    of_graphs: MemoryTrace | None = None
    """The same for layers that exchange rows."""
    batches_ahead: int = 1

    @property
    def fixed(self) -> int:
        """Bytes of the program, the model and its optimizer."""
        return self.program_bytes + _COPIES_WITH_ADAM * self.shape.parameters * self.shape.itemsize

    def batches(
        self, largest: Sequence[Sequence[int]], *, held: int, owners: int = 1, in_flight: int = 1
    ) -> int:
        """Return the peak of a rank that trains on mini-batches.

        Args:
            largest: (3, L) sources, targets and edges of the largest batch.
            held: Bytes of features that are mapped or kept.
            owners: Ranks whose layer-1 blocks belong to a batch (push-pull's N_f). Each brings its part of
                the columns; together they are as many as of one whole row.
            in_flight: Batches that are trained at a time.
        """
        sources, targets, edges = largest
        inputs = round(sources[0] * self.shape.features * self.shape.itemsize)
        blocks = _BLOCK_EDGE_BYTES * sum(edges) + _BLOCK_ROW_BYTES * sum(sources)
        blocks += (owners - 1) * (_BLOCK_EDGE_BYTES * edges[0] + _BLOCK_ROW_BYTES * sources[0])
        step = self._step(self.of_batches, [sources[0], *targets], sources, edges)
        return (
            self.fixed
            + held
            + self.structure
            + round(_ALLOCATOR_OVERHEAD * (step + (self.batches_ahead + 1 + in_flight) * (inputs + blocks)))
        )

    def full(self, work: FullWork, *, ahead: int = 0) -> int:
        """Return the peak of a rank that trains on whole graphs; ``ahead``: batches loaded in advance."""
        inputs = work.rows[0] * self.shape.features * self.shape.itemsize
        # Equal layers share one block.
        distinct = dict.fromkeys(zip(work.sources, work.rows[1:], work.edges, strict=True))
        blocks = sum(_PLAN_EDGE_BYTES * edges + 16 * sources + 8 * rows for sources, rows, edges in distinct)
        step = self._step(self.of_graphs, work.rows, work.sources, work.edges)
        own = self.graph.nodes // self.cluster.servers * self.graph.feature_bytes
        return self.fixed + own + round(_ALLOCATOR_OVERHEAD * (step + (1 + ahead) * (inputs + blocks)))

    @property
    def structure(self) -> int:
        """Bytes of the in-edges that a rank maps."""
        share = 1.0 if self.replicated else 1.0 / self.cluster.servers
        each = 4 if self.graph.nodes < 2**31 else 8
        return round(share * (8 * self.graph.nodes + each * self.graph.edges))

    @property
    def own_features(self) -> int:
        """Bytes of the feature rows of a server, which its ranks share."""
        return -(-self.graph.nodes // self.cluster.servers) * self.graph.feature_bytes

    def _step(
        self,
        memory_trace: MemoryTrace | None,
        rows: Sequence[int],
        sources: Sequence[int],
        edges: Sequence[int],
    ) -> int:
        # The peak of a step beyond its inputs and its blocks.
        if memory_trace is not None:
            counts: Array = np.array([1, *rows, *sources, *edges], np.int64)
            return int(memory_trace.running(counts).max())
        kept = [
            rows[place + 1] * (layer.summed + 3 * layer.outputs) + sources[place] * layer.outputs
            for place, layer in enumerate(self.shape.layers)
        ]
        return self.shape.itemsize * (sum(kept) + 2 * max(kept))


@dataclass(frozen=True, kw_only=True)
class Ghosts:
    """Pairs of a node and another rank that reads it, which intervals exchange."""

    outside: int
    inside: int
    counted: bool = True
    """Whether over all nodes of the graph; False: estimated, or only of nodes that training needs."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Statistics and measurements of one graph, model and cluster."""

    graph: GraphStats
    shape: ModelShape
    cluster: Cluster
    rates: Rates
    """Of mini-batch steps; of full-graph steps if there are none."""
    memory: MemoryModel
    batches: BatchWork | None
    """None: mini-batches were not requested."""
    whole: Mapping[FullGraphScheme, FullWork]
    ghosts: Ghosts | None
    structure_partitioned: bool
    """Whether servers ask each other for in-edges."""
    epoch: int
    plan_rates: Rates | None = None
    """Of steps on whole graphs and cooperative batches, whose blocks differ; None: as :attr:`rates`."""
    assumptions: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Duration of each part of the dry run."""
    draws: Draws | None = None

    @property
    def trained(self) -> str:
        if self.draws is None:
            return self.shape.words
        fanouts = ",".join(map(str, self.draws.fanouts))
        return f"{self.shape.words}; mini-batches of {self.draws.batch_size} a rank, fan-outs {fanouts}"


def row_bytes(found: Survey) -> dict[str, int]:
    """Return data-parallel bytes by ledger phase, over all ranks; empty phases are left out."""
    return _present(
        features=found.feature_bytes,
        sampling=found.sampling_bytes,
        labels=found.label_bytes,
        gradients=found.gradient_bytes,
    )


def column_bytes(
    found: Survey, first: FirstLayer, *, group_size: int = 0, pushed: bool = True
) -> dict[str, int]:
    """Return push-pull's bytes by ledger phase, over all ranks; empty phases are left out.

    For each batch, with N_f parts in a group (by default all ranks W)::

        structure             (N_f - 1) 4 (D1 + 1 + E1 + L0)       nothing when every part samples for itself
        activations           (N_f - 1) s (D1 H + 2 (L0 + D1) K)   K only where layer 1 attends
        activation_gradients  the same, the other way
        gradients             2 (W - 1) (|theta_D| + flags) s, and for W / N_f > 1 groups the cut weights too

    Depth, order and versions of weights change none of it.

    Args:
        found: Counted on the same cut, seeds and fan-outs, one rank per server.
        first: Of the model.
        group_size: Parts that together hold all columns; 0: all ranks.
        pushed: Whether owners send the structure of their first blocks.

    Raises:
        ConfigError: ``group_size`` does not divide the ranks.
    """
    ranks = found.ranks
    size = group_size or ranks
    if size < 1 or ranks % size:
        raise ConfigError(f"group_size={group_size} does not divide {ranks} ranks; give a divisor of it")
    batches, groups = found.steps * ranks, ranks // size
    pulled = found.first_targets * first.sum_width
    pulled += 2 * (found.input_rows + found.first_targets) * first.logit_width
    indices = found.first_targets + batches + found.first_edges + found.input_rows
    # Each part's pieces, summed over the groups that have the same.
    cut = 2 * (groups - 1) * first.cut_bytes
    return _present(
        structure=(size - 1) * _SHORT_ID_BYTES * indices if pushed else 0,
        activations=(size - 1) * first.itemsize * pulled,
        activation_gradients=(size - 1) * first.itemsize * pulled,
        sampling=found.sampling_bytes,
        labels=found.label_bytes,
        gradients=found.steps * (2 * (ranks - 1) * first.replicated_bytes + cut),
    )


def break_even_width(found: Survey, *, pushed: bool = True) -> float:
    """Return H*, the hidden width at which push-pull moves as much as data parallelism.

    From feature rows, pushed structure and sums alone; gradients and what both move are left out. See
    docs/strategies/push_pull.md, "When it pays".

    Raises:
        ConfigError: there are no batches, or one rank.
    """
    ranks = found.ranks
    moved_per_column = 2 * (ranks - 1) * found.first_targets * 4
    if not moved_per_column:
        raise ConfigError("a break-even width needs batches on at least 2 ranks")
    indices = found.first_targets + found.steps * ranks + found.first_edges + found.input_rows
    structure = (ranks - 1) * _SHORT_ID_BYTES * indices if pushed else 0
    return (found.feature_bytes - structure) / moved_per_column


def _present(**phases: int) -> dict[str, int]:
    return {name: count for name, count in sorted(phases.items()) if count}


GRADIENTS = "gradients"
_ID_BYTES = 8
_SUMS = ("structure", "activations", "activation_gradients")
_GHOSTS = ("ghosts", "ghost_gradients")
_INTERVALS = 8
"""Per graph server: the default of strategy ``lambda``."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of one epoch by ledger phase, of all ranks."""

    outside: Mapping[str, int] = field(default_factory=dict)
    inside: Mapping[str, int] = field(default_factory=dict)
    once: int = 0
    """Between servers, before the first epoch."""
    exact: bool = True


def rows_traffic(known: Measured, work: BatchWork, cache: CacheHits | None) -> Traffic:
    """Return the traffic of data parallelism (docs/design/contracts.md); with a cache, of misses only."""
    row = _ID_BYTES + known.graph.feature_bytes
    found = work.survey
    if cache is not None:
        found = replace(found, feature_bytes=found.feature_bytes - cache.hits * row)
    phases = row_bytes(found)
    sums = ring_split(known.shape.gradient_bytes, known.cluster, 1, work.steps)
    once = 0 if cache is None else cache.rows * row
    return _split(
        {name: count for name, count in phases.items() if name != GRADIENTS}, {}, sums, once, work.counted
    )


def columns_traffic(known: Measured, work: BatchWork, size: int, *, pushed: bool) -> Traffic:
    """Return the traffic of push-pull in groups of ``size`` ranks (docs/strategies/push_pull.md)."""
    first, cluster = known.shape.first, known.cluster
    assert first is not None, "the model cannot be split"
    phases = column_bytes(work.survey, first, group_size=size, pushed=pushed)
    inside: dict[str, int] = {}
    others, away = _others_of_group(cluster, size)
    outside = {name: count for name, count in phases.items() if name not in (*_SUMS, GRADIENTS)}
    for name in _SUMS:
        count = phases.get(name, 0)
        outside[name] = count * away // others if others else 0
        inside[name] = count - outside[name]
    sums = ring_split(first.replicated_bytes, cluster, 1, work.steps)
    groups = cluster.ranks // size
    if groups > 1:
        # Every part's ring has the same bytes, up to columns that do not divide evenly.
        every = 2 * (groups - 1) * first.cut_bytes * work.steps
        server_of = cluster.server_of_rank
        far = sum(server != server_of[(rank + size) % cluster.ranks] for rank, server in enumerate(server_of))
        crossing = every * far // cluster.ranks
        sums = sums[0] + crossing, sums[1] + every - crossing
    moved = known.graph.nodes * (cluster.servers - 1) // cluster.servers * known.graph.feature_bytes
    aligned = size % cluster.ranks_per_server == 0 or cluster.ranks_per_server % size == 0
    return _split(outside, inside, sums, cluster.ranks * moved // size, work.counted and aligned)


def plans_traffic(known: Measured, work: FullWork, *, use_pp: bool) -> Traffic:
    """Return the traffic of whole graphs with exchanged rows (docs/strategies/shared_preload.md)."""
    widths, row = known.shape.widths, known.graph.feature_bytes
    outside = exchanged_bytes(work.pairs.outside, widths, use_pp=use_pp)
    inside = exchanged_bytes(work.pairs.inside, widths, use_pp=use_pp)
    sums = ring_split(known.shape.gradient_bytes, known.cluster, 1, work.steps)
    halo = work.pairs.outside[0] * row if use_pp else 0
    one_planner = work.steps == 1 or known.cluster.ranks_per_server == 1
    # The width of exchanged rows is unknown for a guessed shape.
    widths_known = not known.shape.guessed or not (outside or inside)
    once = work.external_rows * (_ID_BYTES + row) + halo
    return _split(outside, inside, sums, once, work.counted and one_planner and widths_known)


def intervals_traffic(known: Measured, ghosts: Ghosts) -> Traffic:
    """Return the traffic of intervals (docs/strategies/lambda.md); traffic to workers leaves the server."""
    shape, total = known.shape, ghosts.outside + ghosts.inside
    phases = serverless_bytes(
        ServerlessSetting(
            widths=(shape.features, *(layer.outputs for layer in shape.layers)),
            nodes=known.graph.nodes,
            ghosts=total,
            intervals=_INTERVALS * known.cluster.ranks,
        )
    )
    inside = {name: phases[name] * ghosts.inside // max(total, 1) for name in _GHOSTS}
    outside = {name: count - inside.get(name, 0) for name, count in phases.items()}
    once = ghosts.outside * (2 * _ID_BYTES + known.graph.feature_bytes)
    counted = ghosts.counted and shape.kind == "gcn" and not shape.guessed
    return _split(outside, inside, (0, 0), once, counted)


def ring_split(num_bytes: int, cluster: Cluster, distance: int, steps: int) -> tuple[int, int]:
    """Return the bytes (between servers, within servers) of ring all-reduces over all ranks.

    Args:
        num_bytes: Summed in one step.
        cluster: Whose ranks.
        distance: To the next rank of the ring.
        steps: Number of all-reduces.
    """
    ranks, server_of, outside, inside = cluster.ranks, cluster.server_of_rank, 0, 0
    for rank in range(ranks) if ranks > 1 else ():
        sent = ring_bytes(num_bytes, ranks, rank) * steps
        if server_of[rank] == server_of[(rank + distance) % ranks]:
            inside += sent
        else:
            outside += sent
    return outside, inside


def _others_of_group(cluster: Cluster, size: int) -> tuple[int, int]:
    """Return pairs of an owner and another part of its group, and those of them on two servers."""
    server_of, same_server = cluster.server_of_rank, 0
    for first in range(0, cluster.ranks, size):
        same_server += sum(count * count for count in Counter(server_of[first : first + size]).values())
    # A group has size squared ordered pairs of ranks, including pairs with itself.
    return cluster.ranks * (size - 1), cluster.ranks * size - same_server


def _split(
    outside: Mapping[str, int], inside: Mapping[str, int], sums: tuple[int, int], once: int, exact: bool
) -> Traffic:
    return Traffic(
        outside=_present(**{**outside, GRADIENTS: sums[0]}),
        inside=_present(**{**inside, GRADIENTS: sums[1]}),
        once=once,
        exact=exact,
    )


_FEW_CORES = 2.0
"""With fewer cores, a rank's loader and its training share one."""
_HIDDEN = ((_FEW_CORES, 0.9), (1.0, 0.7), (0.0, 0.35))
"""From so many cores of a rank on, the share of prefetching that costs no time. On its own core a rank
computes while it waits for the network, except while it copies (A1: 0.5 to 0.9; PEER1: 0.4); where ranks
share a core, the network also waits for their time slices (D1 and P1: about a third)."""
_WIRE_BYTE_S = 0.75e-9
"""To send or to receive a byte, on a core (PEER1 with and without a cache)."""
_ROUNDS_OF_PULL, _ROUNDS_OF_SUMS = 2, 4
"""Sequential messages: request and reply; the same for forward and backward."""
_BLOCK_S = 1.5e-3
"""Of a core, to launch push-pull's operations on the block of one more owner, forward and backward, of any
size: the sums and products are the same in one block or in many (P1, P9: 1 to 3 ms)."""
_COLUMNS_OF_A_HEAD = 50
"""With attention, every part computes the softmax of every owner's edges: so many columns of an edge per head
(P9: 40 to 60, with 8 heads and with 2)."""
_STORED_EDGE_BYTES = 16
"""Of a cooperative batch's plan on disk, per edge of its first layer: source and edge, 8 bytes each."""
_READ_S = 5e-3
"""Of a core, to open the files of a cooperative batch and to make its blocks, of any size (A1)."""
_EXCHANGE_S = 0.4e-3
"""Of a core, to gather and scatter exchanged rows, however few: 28 times in a step of 14 layers (A1)."""
_MEETING_S = 4e-3
"""Per step, until the sum of gradients has gone through gloo's threads on busy cores and the slowest rank has
arrived: measured idle time on 1 Gbit/s, independent of the bytes (A1)."""
_ASYNC = 0.85
"""An epoch without barriers, relative to one with them (Dorylus, section 7.4)."""
_WORKER_OVERHEAD = 1.5
"""Tensor work by workers, which receive and return rows, relative to the rank itself."""


def hidden_share(cores: float) -> float:
    """Return the share of prefetching that costs no time, while there is enough computing."""
    return next(share for least, share in _HIDDEN if cores >= least)


def rows_seconds(known: Measured, work: BatchWork, traffic: Traffic) -> Seconds:
    pulled_bytes = sum(count for name, count in traffic.outside.items() if name != GRADIENTS)
    rounds = _ROUNDS_OF_PULL * (1 + (len(known.shape.layers) if known.structure_partitioned else 0))
    pulled = pulled_bytes * work.card_share / known.cluster.external_bytes_per_s
    pulled += _waits(rounds * work.steps, known.cluster) if pulled_bytes else 0.0
    compute = _computing(known.rates, known.shape.work(*work.worked), work, fresh=True)
    return _overlapped(
        known,
        work,
        traffic,
        _UnoverlappedSeconds(compute=compute, sampling=_sampling(known, work, 1), pulled=pulled),
    )


def columns_seconds(known: Measured, work: BatchWork, size: int, traffic: Traffic, *, late: bool) -> Seconds:
    """Return the seconds of push-pull in groups of ``size`` ranks.

    Args:
        known: Measurements.
        work: Of the same batches under data parallelism.
        size: N_f.
        traffic: Its bytes.
        late: Whether several batches are in flight, so that sums travel while others compute.
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
    parts = _UnoverlappedSeconds(
        compute=compute,
        sampling=_sampling(known, work, draws),
        pulled=ahead + (waited if late else 0.0),
        waited=0.0 if late else waited,
        inside=own,
    )
    return _overlapped(known, work, traffic, parts)


def plans_seconds(known: Measured, work: FullWork, traffic: Traffic, *, use_pp: bool) -> Seconds:
    """Return the seconds of whole graphs whose layers exchange rows, in one step or in several."""
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
    """Return the seconds of intervals, with workers that share the cores of their graph server."""
    cluster = known.cluster
    rates = known.plan_rates or known.rates
    compute = _WORKER_OVERHEAD * rates.compute_s(known.shape.work(*work.worked), 1)
    ghosts = sum(traffic.outside.get(name, 0) for name in ("ghosts", "ghost_gradients"))
    outside = ghosts / cluster.servers / cluster.external_bytes_per_s
    # Only ghosts stay inside: traffic to workers leaves the server.
    inside = sum(traffic.inside.values()) / cluster.servers / cluster.internal_bytes_per_s
    factor = _ASYNC if overlaps else 1.0
    return Seconds(compute=factor * compute, outside=factor * outside, inside=factor * inside)


def _computing(rates: Rates, counted: tuple[int, int], work: BatchWork | FullWork, *, fresh: bool) -> float:
    # Blocks that are new in each step also need their message-passing formats.
    formats = rates.fresh_edge_s * sum(work.worked[2]) if fresh else 0.0
    return rates.compute_s(counted, work.steps) + formats


def _reading(known: Measured, work: FullWork) -> float:
    # Plans and rows of all cooperative batches from disk, including checksums.
    read = work.read_rows * known.graph.feature_bytes + _STORED_EDGE_BYTES * max(work.worked[2])
    rates = known.plan_rates or known.rates
    return read * rates.check_byte_s + work.steps * _READ_S / min(known.cluster.cores, 1.0)


def _after_bursts(moving: float, messages: int, compute: float, cluster: Cluster) -> float:
    """Return the seconds of equal messages, less what a card sends at once after a pause for computing."""
    pause = min(cluster.burst_bytes / cluster.external_bytes_per_s, compute / max(messages, 1))
    return max(0.0, moving - messages * pause)


def _exchanged(rows: tuple[int, ...], first: int, hidden: int, use_pp: bool, *, learns: bool) -> int:
    above = 2 * hidden * sum(rows[1:])
    return above + (0 if use_pp else first * rows[0] * (2 if learns else 1))


def _sampling(known: Measured, work: BatchWork, draws: int) -> float:
    rates, (sources, _, edges) = known.rates, work.worked
    return (
        draws * rates.sample_edge_s * sum(edges)
        + rates.gather_byte_s * sources[0] * known.graph.feature_bytes
    )


@dataclass(frozen=True, kw_only=True)
class _UnoverlappedSeconds:
    compute: float
    sampling: float
    pulled: float
    waited: float = 0.0
    inside: float = 0.0


def _overlapped(known: Measured, work: BatchWork, traffic: Traffic, parts: _UnoverlappedSeconds) -> Seconds:
    share = hidden_share(known.cluster.cores)
    compute = parts.compute + _handling(known, traffic)
    # On few cores, sampling a batch delays computing another one.
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
    cluster = known.cluster
    outside = traffic.outside.get(GRADIENTS, 0) / cluster.servers / cluster.external_bytes_per_s
    outside = _after_bursts(outside, steps, compute, cluster)
    inside = traffic.inside.get(GRADIENTS, 0) / cluster.servers / cluster.internal_bytes_per_s
    meeting = _MEETING_S * steps if cluster.ranks > 1 and cluster.cores < _FEW_CORES else 0.0
    return max(outside, inside) + _waits(2 * (cluster.servers - 1) * steps, cluster) + meeting


def _handling(known: Measured, traffic: Traffic) -> float:
    # With few cores, sending and receiving delays computing.
    if known.cluster.cores >= _FEW_CORES:
        return 0.0
    moved = 2 * sum(traffic.outside.values()) / known.cluster.ranks
    return moved * _WIRE_BYTE_S / min(known.cluster.cores, 1.0)


def _waits(messages: int, cluster: Cluster) -> float:
    return messages * cluster.latency_s if cluster.servers > 1 else 0.0


def predict(candidate: Candidate, known: Measured) -> Prediction:
    """Return the predicted epoch of ``candidate``; if it is not feasible, the reason and zeros."""
    why_not = _refusal(candidate, known)
    found = _NO_ESTIMATE if why_not else _FORMULAS[candidate.moves](candidate, known)
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
        note=_note(candidate),
    )


@dataclass(frozen=True, kw_only=True)
class _Estimate:
    seconds: Seconds
    traffic: Traffic
    memory: int
    shared: int = 0
    """Part of it that the ranks of a server map together."""


_NO_ESTIMATE = _Estimate(seconds=Seconds(), traffic=Traffic(exact=False), memory=0)


def _rows_estimate(candidate: Candidate, known: Measured) -> _Estimate:
    work, cache = _counted_batches(known), _cache(candidate, known)
    traffic = rows_traffic(known, work, cache)
    row = known.graph.feature_bytes
    kept = 0 if cache is None else cache.rows * (row + 4) // known.cluster.servers
    shared = known.memory.own_features + kept
    return _Estimate(
        seconds=rows_seconds(known, work, traffic),
        traffic=traffic,
        memory=known.memory.batches(work.largest, held=shared),
        shared=shared + known.memory.structure,
    )


def _columns_estimate(candidate: Candidate, known: Measured) -> _Estimate:
    work, ranks = _counted_batches(known), known.cluster.ranks
    size = int(candidate.options.get("group_size", ranks))
    traffic = columns_traffic(known, work, size, pushed=candidate.options.get("structure") == "push")
    depth = int(candidate.options.get("depth", 1))
    took = columns_seconds(known, work, size, traffic, late=depth > 1)
    columns = known.graph.nodes * known.graph.feature_bytes // size
    held = columns + known.memory.own_features
    memory = known.memory.batches(work.largest, held=held, owners=size, in_flight=depth)
    memory += (depth - 1) * 4 * work.largest[1][0] * known.shape.layers[0].outputs
    shared = known.memory.own_features + known.memory.structure
    return _Estimate(seconds=took, traffic=traffic, memory=memory, shared=shared)


def _plans_estimate(candidate: Candidate, known: Measured) -> _Estimate:
    assert candidate.scheme is not None
    work = known.whole[candidate.scheme]
    use_pp = candidate.scheme.cooperative_batches == 1
    traffic = plans_traffic(known, work, use_pp=use_pp)
    return _Estimate(
        seconds=plans_seconds(known, work, traffic, use_pp=use_pp),
        traffic=traffic,
        memory=known.memory.full(work, ahead=0 if work.steps == 1 else 1),
        shared=known.memory.own_features,
    )


def _intervals_estimate(candidate: Candidate, known: Measured) -> _Estimate:
    assert candidate.scheme is not None
    assert known.ghosts is not None
    traffic, work = intervals_traffic(known, known.ghosts), known.whole[candidate.scheme]
    staleness = int(candidate.options.get("staleness", -1)) + 1
    took = intervals_seconds(known, work, traffic, overlaps=not candidate.exact)
    # Every epoch in flight keeps its activations.
    kept = known.memory.full(work) - known.memory.fixed
    memory = known.memory.fixed + round(kept * (1 + 0.5 * staleness))
    return _Estimate(seconds=took, traffic=traffic, memory=memory)


_FORMULAS: Mapping[str, Callable[[Candidate, Measured], _Estimate]] = MappingProxyType(
    {
        "rows": _rows_estimate,
        "columns": _columns_estimate,
        "plans": _plans_estimate,
        "intervals": _intervals_estimate,
    }
)


def _counted_batches(known: Measured) -> BatchWork:
    assert known.batches is not None, "candidates of mini-batches need counted batches"
    return known.batches


def _cache(candidate: Candidate, known: Measured) -> CacheHits | None:
    if candidate.cache is None:
        return None
    return next(one for one in _counted_batches(known).caches if one.alpha == candidate.cache_alpha)


def _refusal(candidate: Candidate, known: Measured) -> str:
    if candidate.unit == "mini_batch" and known.batches is None:
        return "no mini-batches were requested"
    if candidate.moves == "columns" and known.shape.first is None:
        return known.shape.why_not_split
    if candidate.moves == "intervals" and known.shape.why_not_chained:
        return known.shape.why_not_chained
    if candidate.moves == "plans" and known.shape.why_not_whole:
        return known.shape.why_not_whole
    if candidate.scheme is not None and candidate.scheme not in known.whole:
        return "its plans were not counted"
    if candidate.cache is not None and not any(
        one.alpha == candidate.cache_alpha for one in _counted_batches(known).caches
    ):
        return "its cache was not counted"
    return ""


def _note(candidate: Candidate) -> str:
    notes = ["workers on the same servers"] if candidate.moves == "intervals" else []
    if candidate.epochs_factor != 1.0:
        notes.append(f"about {candidate.epochs_factor:g} x the epochs")
    return "; ".join(notes)


log = logging.getLogger(__name__)


def with_memory_traces(model: MemoryModel, module: nn.Module, *, whole: bool) -> MemoryModel:
    """Return ``model`` with allocation traces of steps of ``module``, where they can be traced.

    Args:
        model: Of its shape.
        module: Called as ``module(blocks, features)``; not changed.
        whole: Whether to trace full-graph steps, whose layers exchange rows, too.
    """
    return replace(
        model,
        of_batches=_traced_memory(module, model.shape, with_halo=False),
        of_graphs=_traced_memory(module, model.shape, with_halo=True) if whole else None,
    )


def _traced_memory(module: nn.Module, shape: ModelShape, *, with_halo: bool) -> MemoryTrace | None:
    kind = next((one.dtype for one in module.parameters() if one.is_floating_point()), torch.float32)
    row = torch.zeros(1, shape.features, dtype=kind)
    silence_profiler()
    try:
        return trace_memory(
            module,
            len(shape.layers),
            row,
            with_halo=with_halo,
            etype=EDGE_TYPE,
            out_degrees=lambda ids: torch.ones(len(ids), dtype=torch.int64),
        )
    except ConfigError as problem:
        log.info("memory is estimated from widths: %s", problem)
        return None
