"""Cost of an epoch as strategies predict it: candidates, counts, rates, and the arithmetic that they share.

A strategy yields its options as candidates (``Strategy.candidates``) and returns the bytes, seconds and
memory of each (``Strategy.cost``) from what was counted and measured. The planner only compares the results.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from dglx_dist.comm.ledger import ring_bytes
from dglx_dist.comm.topology import Topology
from dglx_dist.records import Array

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph
    from dglx_dist.graph.structure import Structure
    from dglx_dist.layers.base import LayerWork

Unit: TypeAlias = Literal["mini_batch", "full_graph"]
"""What one step trains on."""

GRADIENTS = "gradients"
"""Ledger phase of summed gradients."""
CACHE_SIZES = (0.1, 0.5)
"""Cache sizes to compare, as fractions of the server's own nodes."""
ID_BYTES = 8
OPTIMIZER_COPIES = 2
"""Adam keeps two tensors of the size of the parameters."""
_BATCHES_AHEAD = 1
ALLOCATOR_OVERHEAD = 1.3
"""Held by used memory: each thread keeps what it freed for the next step."""
_BLOCK_EDGE_BYTES, _BLOCK_ROW_BYTES = 28, 24
"""Of a sampled block: ids, positions and the formats for message passing."""
_FEW_CORES = 2.0
_HIDDEN = ((_FEW_CORES, 0.9), (1.0, 0.7), (0.0, 0.35))
"""From so many cores of a rank on, the share of prefetching that costs no time. On its own core a rank
computes while it waits for the network, except while it copies (A1: 0.5 to 0.9; PEER1: 0.4); where ranks
share a core, the network also waits for their time slices (D1 and P1: about a third)."""
_WIRE_BYTE_S = 0.75e-9
"""To send or to receive a byte, on a core (PEER1 with and without a cache)."""
_MEETING_S = 4e-3
"""Per step, until the sum of gradients has gone through gloo's threads on busy cores and the slowest rank has
arrived: measured idle time on 1 Gbit/s, independent of the bytes (A1)."""
_FORWARD_AND_BACK, _FORWARD_AND_WEIGHTS = 3, 2
"""Matrix products of a layer relative to its forward pass; a layer whose input has no gradient saves one."""
_SUM_AND_BACK, _SUM_ONLY = 2, 1


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Servers of a run: configured, probed or assumed; see :attr:`assumptions`."""

    servers: int
    ranks_per_server: int
    external_bytes_per_s: float
    """Payload that a server's card sends, and as much that it receives."""
    internal_bytes_per_s: float
    """Payload between the ranks of a server, in total."""
    latency_s: float
    """One-way latency of a message between servers."""
    cores: float
    """Per rank; may be fractional."""
    memory_bytes: int
    device_memory_bytes: int = 0
    """Of a rank on its GPU; 0: ranks compute on CPUs."""
    burst_bytes: int = 0
    """Bytes that a card sends at once after a pause, beyond its rate: emulated links are token buckets."""
    link_spread: float = 0.0
    """Relative half-width of the interval of the rates; 0: configured."""
    assumptions: tuple[str, ...] = ()
    """What was neither configured nor measured, a sentence each."""

    @property
    def ranks(self) -> int:
        return self.servers * self.ranks_per_server

    @property
    def server_of_rank(self) -> tuple[int, ...]:
        """(W,) server of each rank: consecutive ranks share a server."""
        return tuple(rank // self.ranks_per_server for rank in range(self.ranks))

    @property
    def has_few_cores(self) -> bool:
        """Whether a rank's loader and its training share a core."""
        return self.cores < _FEW_CORES

    @property
    def hidden_share(self) -> float:
        """Share of prefetching that costs no time, while there is enough computing."""
        return next(share for least, share in _HIDDEN if self.cores >= least)

    def after_bursts(self, moving: float, messages: int, compute: float) -> float:
        """Return the seconds of equal messages, less what a card sends at once after each pause."""
        pause = min(self.burst_bytes / self.external_bytes_per_s, compute / max(messages, 1))
        return max(0.0, moving - messages * pause)

    def latencies(self, messages: int) -> float:
        """Return the seconds of ``messages`` that wait for each other between servers."""
        return messages * self.latency_s if self.servers > 1 else 0.0


@dataclass(frozen=True, kw_only=True)
class GraphStats:
    """Statistics of a graph of one node type and one edge type."""

    name: str
    nodes: int
    edges: int
    features: int
    """F, columns."""
    feature_bytes: int
    """Of one node's features, as they are stored."""
    classes: int
    train_nodes: int
    edge_cut: float
    """Fraction of the edges between different servers: rho of an edge."""
    method: str

    @property
    def structure_bytes(self) -> int:
        """Of the in-edges of the whole graph, as they are mapped."""
        return 8 * self.nodes + (4 if self.nodes < 2**31 else 8) * self.edges


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of all layers, input-most first, and of the parameters."""

    kind: str
    layers: tuple[LayerWork, ...]
    features: int
    hidden: int
    classes: int
    parameters: int
    """Number of scalars in all of them."""
    tensors: int
    inspected: Mapping[str, Any] = field(default_factory=dict)
    """Strategy to the result of ``Strategy.inspect``."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Strategy to the reason why it cannot train the model."""
    first_learns: bool = False
    """Whether the input of layer 1 has a gradient, as after an encoder."""
    itemsize: int = 4
    guessed: bool = False
    """Whether the layers are those of the most similar ready-made model."""

    @property
    def words(self) -> str:
        return f"{self.kind} of {len(self.layers)} layers, hidden width {self.hidden}"

    @property
    def gradient_bytes(self) -> int:
        """Sent in each step: every gradient, and a flag of one element for each tensor."""
        return (self.parameters + self.tensors) * self.itemsize

    def work(self, sources: Sequence[int], targets: Sequence[int], edges: Sequence[int]) -> tuple[int, int]:
        """Return (columns of edges summed, multiply-adds) of forward and backward.

        ``sources`` and ``targets`` are the (L,) rows that go into each layer and come out; (L,) ``edges``.
        """
        summed, multiplied = 0, 0
        for place, layer in enumerate(self.layers):
            learns = place > 0 or self.first_learns
            # If the product comes first, gradients of the sums reach the weights in the first layer too.
            goes_back = learns or layer.per_source > 0
            summed += edges[place] * layer.summed * (_SUM_AND_BACK if goes_back else _SUM_ONLY)
            products = sources[place] * layer.per_source + targets[place] * layer.per_target
            multiplied += products * (_FORWARD_AND_BACK if learns else _FORWARD_AND_WEIGHTS)
        return summed, multiplied


@dataclass(frozen=True, kw_only=True)
class PlanContext:
    """Properties of model and cluster that define the candidates."""

    ranks: int
    servers: int
    num_layers: int
    steps: int
    """Of an epoch of mini-batches; 0: no mini-batches."""
    caches: tuple[float, ...] = CACHE_SIZES
    labor: bool = False
    """Whether batches of a ``LaborSampler`` are a candidate; only counts tell what it saves."""


@dataclass(frozen=True)
class Work(ABC):
    """Work of an epoch, beside mini-batches, that is counted once for all candidates that name it.

    Subclasses are frozen dataclasses of JSON values.
    """

    @abstractmethod
    def describe(self, num_layers: int) -> str:
        """Return what is counted, for progress."""

    @abstractmethod
    def count(self, run: PlannedRun) -> Any:
        """Return the counts of all ranks, or None if counting takes too long; collective."""

    def trials(self, run: PlannedRun) -> Iterator[list[Any]]:
        """Yield the blocks of all layers for parts of the work, to time the model on; none by default."""
        return iter(())


@dataclass(frozen=True, kw_only=True)
class PartitionContext:
    """Graph, partition and ranks that all counts of a run share."""

    structure: Structure
    bounds: Array
    """(S + 1,) int64 first node of each server."""
    topology: Topology
    """Of this rank in a job, else of any rank of the run."""
    seed: int

    def own_range(self, server: int) -> tuple[int, int]:
        """Return the first node of ``server`` and the one after its last."""
        return int(self.bounds[server]), int(self.bounds[server + 1])

    def of_rank(self, rank: int) -> Topology:
        return Topology(rank, self.topology.world_size, self.topology.server_of_rank)


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run that is counted: by its own ranks together, or by one process alone."""

    g: DistGraph
    partition: PartitionContext
    seeds: Array
    """(K,) ascending int64 training nodes, of all servers."""
    graph: GraphStats
    cluster: Cluster
    num_layers: int
    in_job: bool
    """Whether the ranks of the run count together, each its own; False: this process counts for all."""
    works: dict[Work, Any] = field(default_factory=dict)
    """Results so far."""

    @property
    def ranks_here(self) -> Sequence[int]:
        """Ranks that this process counts for."""
        topology = self.partition.topology
        return [topology.rank] if self.in_job else range(topology.world_size)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A strategy with its main options."""

    unit: Unit
    strategy: str = ""
    """Its registered name; the planner sets it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    cache: str | None = None
    cache_alpha: float = 0.0
    """Its size as a fraction of the server's own nodes."""
    labor: bool = False
    """Whether batches are drawn by a ``LaborSampler`` of the same fan-outs, which only the user can pass."""
    works: tuple[Work, ...] = ()
    """To count beside mini-batches. The first is ``way`` in JSON."""
    exact: bool = True
    """Whether steps give the weights of one process on the same batches; False: another estimator."""
    epochs_factor: float = 1.0
    """Epochs to the same accuracy, relative to exact strategies of the same unit; from papers, assumed."""

    @property
    def name(self) -> str:
        """Name in tables: the strategy and its options."""
        options = [f"{name}={value}" for name, value in self.options.items()]
        cached = [f"cache={self.cache}:{self.cache_alpha:g}"] if self.cache else []
        return " ".join([self.strategy, *options, *["sampler=labor"] * self.labor, *cached])


@dataclass(frozen=True, kw_only=True)
class Draws:
    """Parameters of the counted mini-batches."""

    fanouts: tuple[int, ...]
    """Input-most first; -1: all."""
    batch_size: int
    """Seeds per rank and step."""
    epoch: int = 1
    force_even: bool = True
    most_seeds: int | None = None
    """Per rank; others are left out."""
    most_batches: int | None = None
    """Per rank; None: all of the epoch."""
    labor: bool = False
    """Whether by LABOR-0."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Totals of an epoch of mini-batches over all ranks."""

    steps: int
    """Of every rank: as many as the rank with most seeds needs."""
    input_rows: int
    remote_rows: int
    """Of these, rows of another server."""
    edges: int
    seeds_per_rank: list[int]
    feature_bytes: int
    """(8 + F s) for each remote row."""
    sampling_bytes: int
    """8 for each remote node asked for in-edges, 24 for each returned edge; 0 with the whole structure."""
    label_bytes: int
    gradient_bytes: int
    """2 (W - 1) (|theta| s + a flag of s bytes for each parameter tensor) for each step."""
    first_targets: int = 0
    """D1: destinations of the layer-1 blocks; their sources, L0, are ``input_rows``."""
    first_edges: int = 0

    @property
    def ranks(self) -> int:
        return len(self.seeds_per_rank)


@dataclass(frozen=True, kw_only=True)
class CacheHits:
    """Hits and cost of a cache of remote rows."""

    policy: str
    alpha: float
    """Its size as a fraction of the server's own nodes."""
    hits: int = 0
    """Remote rows of an epoch found in a cache, of all ranks."""
    once_rows: int = 0
    """Fetched before the first epoch, by all ranks."""
    server_bytes: int = 0
    """That the ranks of a server share."""
    rank_bytes: int = 0
    """Of each rank: with the tables and the drawn batches of one that looks ahead."""


LayerCounts: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""(L,) sources, targets and edges of each layer."""


@dataclass(frozen=True, kw_only=True)
class BatchWork:
    """Work of one epoch of mini-batches."""

    survey: Survey
    worked: LayerCounts
    """Of the rank with most edges, over the epoch."""
    largest: LayerCounts
    """Of the largest batch."""
    card_share: float
    """Remote rows through the busiest card, relative to those of all ranks."""
    caches: tuple[CacheHits, ...] = ()
    counted: bool = True
    """Whether every batch of the epoch was counted."""

    @property
    def steps(self) -> int:
        return self.survey.steps


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Speed of one rank; all terms are at least 0."""

    step_s: float
    """Fixed cost of a step: calls, loss, optimizer."""
    edge_column_s: float
    """To sum one column along one edge, forward or backward."""
    multiply_add_s: float
    sample_edge_s: float
    """To sample an edge and build its block."""
    gather_byte_s: float
    """To read a byte of a feature row from the own server's memory."""
    fresh_edge_s: float = 0.0
    """Extra time per edge of the first step on a block, for its message-passing formats. Mini-batches and
    cooperative batches pay it in every step, whole graphs once."""
    check_byte_s: float = 0.0
    """To compute the checksum of plans and rows read from disk."""
    copy_byte_s: float = 0.0
    """To copy a byte from the host's memory to the GPU; 0 on CPUs."""

    def compute_s(self, work: tuple[int, int], steps: int) -> float:
        """Return the seconds of ``work`` (see :meth:`ModelShape.work`) in ``steps`` steps."""
        summed, multiplied = work
        return steps * self.step_s + summed * self.edge_column_s + multiplied * self.multiply_add_s

    def slowed(self, factor: float) -> Rates:
        """Return the rates of a rank that is ``factor`` times slower."""
        return Rates(**{name: factor * seconds for name, seconds in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class MemoryTrace:
    """The allocations of a step in order, for the (3 L + 2,) int64 ``counts`` of any step: 1, rows of levels
    0..L, sources of layers 1..L, edges of layers 1..L.
    """

    kinds: Array
    """(A,) int64 kind of the rows, as index into ``counts``; 0: not proportional to any."""
    row_bytes: Array
    """(A,) int64 bytes per row; negative if freed."""
    backward_at: int
    """Number of allocations of the forward pass."""
    exchanged: Array
    """(2, L) int64 bytes per row that is sent, and per gradient that comes back; 0 for none."""
    parameter_bytes: int

    def peak(self, counts: Array) -> int:
        return int(np.cumsum(self.row_bytes * counts[self.kinds]).max(initial=0))

    def kept(self, counts: Array) -> Array:
        """Return (L,) int64 bytes that forward keeps for backward, by layer; level 0 belongs to the first."""
        num_layers, forward = self.exchanged.shape[1], self.kinds[: self.backward_at]
        layer = np.where(forward <= num_layers + 1, forward - 2, (forward - 2) % num_layers)
        held = self.row_bytes[: self.backward_at] * counts[forward]
        return np.bincount(np.maximum(layer, 0), weights=held, minlength=num_layers).astype(np.int64)


def trace_of_widths(shape: ModelShape) -> MemoryTrace:
    """Return the allocations that the widths of the layers suggest, of a model that was not traced."""
    size, num_layers = shape.itemsize, len(shape.layers)
    parameters = shape.parameters * size
    # Of each layer (kind, bytes per row): of its targets, and of its sources.
    kept = [
        [
            (place + 2, size * (layer.summed + 3 * layer.outputs)),
            (num_layers + 2 + place, size * layer.outputs),
        ]
        for place, layer in enumerate(shape.layers)
    ]
    gradients = [(kind, sign * each) for rows in kept for sign in (2, -2) for kind, each in rows]
    steps = np.array([*chain.from_iterable(kept), (0, parameters), *gradients], np.int64)
    sent = np.array([size * layer.inputs for layer in shape.layers], np.int64)
    has_gradient = [place > 0 or shape.first_learns for place in range(num_layers)]
    return MemoryTrace(
        kinds=steps[:, 0],
        row_bytes=steps[:, 1],
        backward_at=2 * num_layers,
        exchanged=np.stack([sent, sent * has_gradient]),
        parameter_bytes=parameters,
    )


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Statistics and measurements of one graph, model and cluster."""

    graph: GraphStats
    shape: ModelShape
    cluster: Cluster
    rates: Rates
    """Of mini-batch steps; of full-graph steps if there are none."""
    program_bytes: int
    """Of a rank without a graph and a model."""
    of_batches: MemoryTrace
    """Of a step on sampled blocks."""
    of_graphs: MemoryTrace
    """Of a step whose layers exchange rows."""
    batches: BatchWork | None
    """None: mini-batches were not requested."""
    works: Mapping[Work, Any]
    structure_partitioned: bool
    """Whether servers ask each other for in-edges."""
    epoch: int
    plan_rates: Rates | None = None
    """Of steps on whole graphs and cooperative batches, whose blocks differ; None: as :attr:`rates`."""
    assumptions: tuple[str, ...] = ()
    draws: Draws | None = None
    labor: tuple[BatchWork, float] | None = None
    """LABOR's batches, and the seconds of drawing an edge relative to :attr:`batches`; None: not counted."""
    spread: float = 0.0
    """Relative half-width of the interval of the rates; 0: assumed."""

    @property
    def trained(self) -> str:
        if self.draws is None:
            return self.shape.words
        fanouts = ",".join(map(str, self.draws.fanouts))
        return f"{self.shape.words}; mini-batches of {self.draws.batch_size} a rank, fan-outs {fanouts}"

    @property
    def mini_batches(self) -> BatchWork:
        """The counted mini-batches, which candidates of that unit always have."""
        assert self.batches is not None, "candidates of mini-batches need counted batches"
        return self.batches

    @property
    def fixed(self) -> int:
        """Bytes of the program and the model."""
        return self.program_bytes + self.shape.parameters * self.shape.itemsize

    @property
    def structure(self) -> int:
        """Bytes of the in-edges that a rank maps."""
        return self.graph.structure_bytes // (self.cluster.servers if self.structure_partitioned else 1)

    @property
    def own_features(self) -> int:
        """Bytes of the feature rows of a server, which its ranks share."""
        return -(-self.graph.nodes // self.cluster.servers) * self.graph.feature_bytes

    def batch_memory(self, *, held: int, owners: int = 1, in_flight: int = 1) -> int:
        """Return the peak of a rank that trains on mini-batches.

        Args:
            held: Bytes of features that are mapped or kept.
            owners: Ranks whose layer-1 blocks belong to a batch (push-pull's N_f). Each brings its part of
                the columns; together they are as many as of one whole row.
            in_flight: Batches that are trained at a time.
        """
        sources, targets, edges = self.mini_batches.largest
        inputs = sources[0] * self.shape.features * self.shape.itemsize
        blocks = _BLOCK_EDGE_BYTES * sum(edges) + _BLOCK_ROW_BYTES * sum(sources)
        blocks += (owners - 1) * (_BLOCK_EDGE_BYTES * edges[0] + _BLOCK_ROW_BYTES * sources[0])
        step = self.of_batches.peak(np.array([1, sources[0], *targets, *sources, *edges], np.int64))
        ahead = (_BATCHES_AHEAD + 1 + in_flight) * (inputs + blocks)
        kept = self.fixed + OPTIMIZER_COPIES * self.of_batches.parameter_bytes + held + self.structure
        return kept + round(ALLOCATOR_OVERHEAD * (step + ahead))

    def cache_of(self, candidate: Candidate) -> CacheHits | None:
        """Return the counted cache of ``candidate``; None: it has none, or it was not counted."""
        caches = () if self.batches is None or candidate.cache is None else self.batches.caches
        wanted = candidate.cache, candidate.cache_alpha
        return next((one for one in caches if (one.policy, one.alpha) == wanted), None)

    def compute_seconds(self) -> float:
        """Return the seconds of computing the mini-batches, whose blocks are new in each step."""
        work = self.mini_batches
        formats = self.rates.fresh_edge_s * sum(work.worked[2])
        return self.rates.compute_s(self.shape.work(*work.worked), work.steps) + formats

    def sampling_seconds(self, draws: int = 1) -> float:
        """Return the seconds of drawing each batch ``draws`` times, and of gathering and copying its rows."""
        rates, (sources, _, edges) = self.rates, self.mini_batches.worked
        return (
            draws * rates.sample_edge_s * sum(edges)
            + (rates.gather_byte_s + rates.copy_byte_s) * sources[0] * self.graph.feature_bytes
        )

    def batch_seconds(
        self,
        traffic: Traffic,
        *,
        compute: float,
        sampling: float,
        pulled: float,
        waited: float = 0.0,
        inside: float = 0.0,
    ) -> Seconds:
        """Return the seconds of an epoch of the mini-batches, where fetches overlap with computing.

        Args:
            traffic: Bytes of the epoch.
            pulled: To fetch what is fetched ahead from other servers.
            waited: For other servers, while nothing is computed.
            inside: For other ranks of the server, while nothing is computed.
        """
        share = self.cluster.hidden_share
        compute += self.handling_seconds(traffic)
        # On few cores, sampling a batch delays computing another one.
        drawn = sampling if self.cluster.has_few_cores else max(0.0, sampling - share * compute)
        hidden = share * min(pulled, compute + drawn)
        return Seconds(
            compute=compute,
            sampling=drawn,
            outside=pulled - hidden + waited,
            inside=inside,
            all_reduce=self.all_reduce_seconds(self.mini_batches.steps, traffic, compute),
        )

    def all_reduce_seconds(self, steps: int, traffic: Traffic, compute: float) -> float:
        """Return the seconds of one sum of gradients in each of ``steps``."""
        cluster = self.cluster
        outside = traffic.outside.get(GRADIENTS, 0) / cluster.servers / cluster.external_bytes_per_s
        outside = cluster.after_bursts(outside, steps, compute)
        inside = traffic.inside.get(GRADIENTS, 0) / cluster.servers / cluster.internal_bytes_per_s
        meeting = _MEETING_S * steps if cluster.ranks > 1 and cluster.has_few_cores else 0.0
        return max(outside, inside) + cluster.latencies(2 * (cluster.servers - 1) * steps) + meeting

    def handling_seconds(self, traffic: Traffic) -> float:
        """Return the seconds by which sending and receiving delay computing, where cores are few."""
        moved = 2 * sum(traffic.outside.values()) / self.cluster.ranks
        return moved * _WIRE_BYTE_S / min(self.cluster.cores, 1.0) if self.cluster.has_few_cores else 0.0


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Seconds of one epoch on the slowest rank or card."""

    compute: float = 0.0
    sampling: float = 0.0
    """Sampling blocks and gathering rows; 0 if hidden."""
    outside: float = 0.0
    """Waiting for rows of other servers, without the part hidden behind computing."""
    inside: float = 0.0
    """The same for ranks of the same server."""
    all_reduce: float = 0.0

    @property
    def total(self) -> float:
        return self.compute + self.sampling + self.outside + self.inside + self.all_reduce


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of one epoch by ledger phase, of all ranks."""

    outside: Mapping[str, int] = field(default_factory=dict)
    inside: Mapping[str, int] = field(default_factory=dict)
    once: int = 0
    """Between servers, before the first epoch."""
    exact: bool = True


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of an epoch of a candidate."""

    seconds: Seconds = Seconds()
    traffic: Traffic = Traffic(exact=False)
    memory: int = 0
    """Peak bytes of a rank, including the program."""
    shared: int = 0
    """Part of it that the ranks of a server map together."""
    on_host: int = 0
    """Part of it that is in the host's memory where ranks compute on GPUs; the rest is on the GPU."""
    note: str = ""
    """A remark for tables."""
    why_not: str = ""
    """Why the candidate is not feasible; empty: it is."""


def present(**phases: int) -> dict[str, int]:
    """Return the phases that have bytes, by name."""
    return {name: count for name, count in sorted(phases.items()) if count}


def traffic_with_sums(
    outside: Mapping[str, int],
    inside: Mapping[str, int],
    sums: tuple[int, int],
    *,
    once: int = 0,
    exact: bool,
) -> Traffic:
    """Return the traffic of rows, and of (outside, inside) bytes of summed gradients."""
    return Traffic(
        outside=present(**{**outside, GRADIENTS: sums[0]}),
        inside=present(**{**inside, GRADIENTS: sums[1]}),
        once=once,
        exact=exact,
    )


def ring_split(num_bytes: int, server_of: Sequence[int], steps: int) -> tuple[int, int]:
    """Return the bytes (between servers, within) of ``steps`` ring all-reduces by ranks on (W,) servers."""
    ranks = len(server_of)
    far = [rank for rank, server in enumerate(server_of) if server != server_of[(rank + 1) % ranks]]
    outside = steps * sum(ring_bytes(num_bytes, ranks, rank) for rank in far)
    return outside, steps * 2 * (ranks - 1) * num_bytes - outside
