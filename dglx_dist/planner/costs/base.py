"""Costs of an epoch without seconds: counts, byte formulas and memory formulas that cost models share.

A cost model belongs to one strategy. It names the counts for a candidate, and returns the bytes and the
memory that follow from them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn

from dglx_dist.comm.ledger import ring_bytes
from dglx_dist.planner.records import Cluster, Draws, GraphStats, ModelShape
from dglx_dist.records import Array, EdgeType
from dglx_dist.registry import Registry
from dglx_dist.strategies.candidate import Candidate, CandidateContext
from dglx_dist.strategies.full_graph.graph_types import UnifiedGraph

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph
    from dglx_dist.strategies.full_graph.plan_builder import PartitionContext

GRADIENTS = "gradients"
"""Ledger phase of summed gradients."""
ID_BYTES = 8
OPTIMIZER_COPIES = 2
"""Number of tensors that Adam keeps, each as large as the parameters."""
_BATCHES_AHEAD = 1
ALLOCATOR_OVERHEAD = 1.3
"""Held memory relative to memory in use. Each thread keeps freed memory for the next step."""
_BLOCK_EDGE_BYTES, _BLOCK_ROW_BYTES = 28, 24
"""Bytes of a sampled block per edge and per row: ids, positions and the formats for message passing."""


@dataclass(frozen=True)
class Work(ABC):
    """Work of an epoch other than mini-batches. All candidates that need a work share its counts.

    Subclasses are frozen dataclasses of JSON values.
    """

    @abstractmethod
    def describe(self, num_layers: int) -> str:
        """Return a description of the counted work, for progress messages."""

    @abstractmethod
    def count(self, run: PlannedRun) -> Any:
        """Return the counts of all ranks, or None if counting takes too long. Every rank must call this."""

    def blocks(self, counts: Any) -> tuple[list[Any], int] | None:
        """Return the blocks of a step of the busiest rank, and an epoch's steps. None by default."""
        return None


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run to count, either by its own ranks together or by one process alone."""

    g: DistGraph
    partition: PartitionContext
    ntype: str
    """Type of the training nodes."""
    bounds: Mapping[str, Array]
    """(S + 1,) int64 first node of each server by node type."""
    seeds: Array
    """(K,) ascending int64 training nodes of ``ntype``, of all servers."""
    trained_types: frozenset[str] = frozenset()
    """Node types with trainable rows instead of features."""
    graph: GraphStats
    cluster: Cluster
    num_layers: int
    in_job: bool
    """Whether each rank of the run counts its own work. Otherwise this process counts for all ranks."""
    works: dict[Work, Any] = field(default_factory=dict)
    """Counts of the works that are already done."""

    @property
    def plan_seeds(self) -> Array:
        """(K,) int64 training nodes in the ids of :attr:`partition`, which are unified ids of all types."""
        structure = self.partition.structure
        if isinstance(structure, UnifiedGraph):
            return structure.unify({self.ntype: self.seeds})
        return self.seeds

    @property
    def ranks_here(self) -> Sequence[int]:
        """Ranks that this process counts for."""
        topology = self.partition.topology
        if self.in_job:
            return [topology.rank]
        return range(topology.world_size)


@dataclass(frozen=True, kw_only=True)
class TrainedRows:
    """Number of trainable rows that ranks read in an epoch and do not own, over all ranks and steps."""

    outside: int = 0
    """Rows of another server."""
    inside: int = 0
    """Rows of another rank of the same server."""

    def traffic(self, row_bytes: int) -> tuple[dict[str, int], dict[str, int]]:
        """Return the bytes between servers and within servers by ledger phase.

        Rows of other servers are pulled, with their ids. Gradients are sent to the rank that owns the row.
        """
        size = ID_BYTES + row_bytes
        outside = present(embeddings=size * self.outside, sparse_gradients=size * self.outside)
        return outside, present(sparse_gradients=size * self.inside)


@dataclass(frozen=True, kw_only=True)
class TypedFeatures:
    """Input of a model of several types."""

    etypes: tuple[EdgeType, ...]
    widths: Mapping[str, int]
    """Number of feature columns by node type. Types without features are missing."""


@dataclass(frozen=True, kw_only=True)
class TypedCounts:
    """Totals of the layer-1 blocks of an epoch over all ranks, by type."""

    batches: int
    sources: Mapping[str, int]
    """L0 by node type."""
    targets: Mapping[str, int]
    """D1 by node type."""
    edges: Mapping[EdgeType, int]
    """E1 by edge type."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Totals of an epoch of mini-batches over all ranks."""

    steps: int
    """Number of steps of every rank. The rank with the most seeds needs this number."""
    input_rows: int
    remote_rows: int
    """Number of input rows that belong to another server."""
    edges: int
    seeds_per_rank: list[int]
    feature_bytes: int
    """(8 + F s) bytes for each remote row."""
    sampling_bytes: int
    """8 bytes per remote node whose in-edges are read, and 24 per edge. 0 if ranks have all edges."""
    label_bytes: int
    gradient_bytes: int
    """2 (W - 1) (|theta| s + a flag of s bytes for each parameter tensor) bytes for each step."""
    first_targets: int = 0
    """D1, the destinations of the layer-1 blocks. Their sources, L0, are ``input_rows``."""
    first_edges: int = 0
    trained_rows: TrainedRows = TrainedRows()
    first_layer: TypedCounts | None = None

    @property
    def ranks(self) -> int:
        return len(self.seeds_per_rank)


@dataclass(frozen=True, kw_only=True)
class CacheHits:
    """Hits and cost of a cache of remote rows."""

    policy: str
    alpha: float
    """Size as a fraction of the server's own nodes."""
    hits: int = 0
    """Remote rows of an epoch found in a cache, over all ranks."""
    once_rows: int = 0
    """Rows fetched before the first epoch, by all ranks."""
    server_bytes: int = 0
    """Bytes of the cache that the ranks of a server share."""
    rank_bytes: int = 0
    """Bytes of the cache per rank. They include the tables and drawn batches of a cache that looks ahead."""


LayerCounts: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""(L,) sources, targets and edges of each layer."""


@dataclass(frozen=True, kw_only=True)
class BatchWork:
    """Work of one epoch of mini-batches."""

    survey: Survey
    largest: LayerCounts
    """Counts of the largest batch."""
    caches: tuple[CacheHits, ...] = ()
    is_complete: bool = True
    """Whether every batch of the epoch was counted."""

    @property
    def steps(self) -> int:
        return self.survey.steps


@dataclass(frozen=True, kw_only=True)
class EpochCounts:
    """Statistics and counts of an epoch for one graph, model and cluster."""

    graph: GraphStats
    shape: ModelShape
    cluster: Cluster
    program_bytes: int
    """Memory of a rank without a graph and a model."""
    context: CandidateContext
    batches: BatchWork | None
    """Counted mini-batches. None if no mini-batches were requested."""
    works: Mapping[Work, Any]
    structure_partitioned: bool
    """Whether servers ask each other for in-edges."""
    epoch: int
    assumptions: tuple[str, ...] = ()
    draws: Draws | None = None

    @property
    def description(self) -> str:
        if self.draws is None:
            return self.shape.summary
        fanouts = ",".join(map(str, self.draws.fanouts))
        return f"{self.shape.summary}; mini-batches of {self.draws.batch_size} a rank, fan-outs {fanouts}"

    @property
    def mini_batches(self) -> BatchWork:
        """Counted mini-batches. They exist for every candidate that trains on mini-batches."""
        assert self.batches is not None, "candidates of mini-batches need counted batches"
        return self.batches

    @property
    def fixed_bytes(self) -> int:
        """Bytes of the program and the model."""
        return self.program_bytes + self.parameter_bytes

    @property
    def parameter_bytes(self) -> int:
        return self.shape.parameters * self.shape.itemsize

    @property
    def structure_bytes(self) -> int:
        """Bytes of the in-edges that a rank maps."""
        if self.structure_partitioned:
            return self.graph.structure_bytes // self.cluster.servers
        return self.graph.structure_bytes

    @property
    def own_feature_bytes(self) -> int:
        """Bytes of a server's features, which its ranks share."""
        # The negations round up.
        return -(-self.graph.all_feature_bytes // self.cluster.servers)

    def activations(self, targets: Sequence[int], sources: Sequence[int]) -> list[int]:
        """Return the (L,) bytes that forward keeps for backward in each layer.

        ``targets`` and ``sources`` are the (L,) numbers of rows of the layers. For each target, a layer keeps
        its sums and three tensors of the width of its result. For each source, it keeps one such tensor.
        """
        layer_bytes = []
        for layer, num_targets, num_sources in zip(self.shape.layers, targets, sources, strict=True):
            num_values = num_targets * (layer.summed + 3 * layer.outputs) + num_sources * layer.outputs
            layer_bytes.append(self.shape.itemsize * num_values)
        return layer_bytes

    def backward_bytes(self, activations: Sequence[int]) -> int:
        """Return the gradient bytes for the parameters and for the rows in the largest layer."""
        return self.parameter_bytes + 2 * max(activations)

    def batch_memory(self, *, held: int, owners: int = 1, in_flight: int = 1) -> int:
        """Return the peak memory of a rank that trains on mini-batches.

        Args:
            held: Bytes of features that are mapped or kept.
            owners: Ranks with layer-1 blocks in a batch (push-pull's N_f). Each brings its part of the
                columns, and all parts together are as large as the whole rows.
            in_flight: Number of batches that are trained at a time.
        """
        sources, targets, edges = self.mini_batches.largest
        input_bytes = sources[0] * self.shape.features * self.shape.itemsize
        block_bytes = _BLOCK_EDGE_BYTES * sum(edges) + _BLOCK_ROW_BYTES * sum(sources)
        first_block_bytes = _BLOCK_EDGE_BYTES * edges[0] + _BLOCK_ROW_BYTES * sources[0]
        block_bytes += (owners - 1) * first_block_bytes

        # The loader holds the batch that it builds and the batches ahead of training.
        num_loaded = _BATCHES_AHEAD + 1 + in_flight
        loaded_bytes = num_loaded * (input_bytes + block_bytes)
        activations = self.activations(targets, sources)
        step_bytes = sum(activations) + self.backward_bytes(activations)

        optimizer_bytes = OPTIMIZER_COPIES * self.parameter_bytes
        static_bytes = self.fixed_bytes + optimizer_bytes + held + self.structure_bytes
        return static_bytes + round(ALLOCATOR_OVERHEAD * (step_bytes + loaded_bytes))

    def find_cache(self, candidate: Candidate) -> CacheHits | None:
        """Return the counted cache of ``candidate``.

        The result is None if the candidate has no cache, or if its cache was not counted.
        """
        if self.batches is None or candidate.cache is None:
            return None
        for cache in self.batches.caches:
            if (cache.policy, cache.alpha) == (candidate.cache, candidate.cache_alpha):
                return cache
        return None


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of one epoch by ledger phase, of all ranks."""

    outside: Mapping[str, int] = field(default_factory=dict)
    """Bytes between servers."""
    inside: Mapping[str, int] = field(default_factory=dict)
    """Bytes between ranks of the same server."""
    once: int = 0
    """Bytes between servers before the first epoch."""
    exact: bool = True
    """Whether the ledger of a run shows the same bytes. False: the bytes are estimates."""

    def seconds(self, cluster: Cluster) -> float:
        """Return the seconds of an epoch on the slower links, which are between or within servers.

        All servers send at the same time, so each of them needs its share of the seconds.
        """
        outside = sum(self.outside.values()) / cluster.external_bytes_per_s
        inside = sum(self.inside.values()) / cluster.internal_bytes_per_s
        return max(outside, inside) / cluster.servers


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Bytes and memory of an epoch of a candidate."""

    traffic: Traffic = Traffic(exact=False)
    memory: int = 0
    """Peak memory of a rank in bytes, including the program. 0: unknown."""
    shared: int = 0
    """Part of that memory that the ranks of a server map together."""
    on_host: int = 0
    """Part of that memory on the host if ranks compute on GPUs. The rest is on the GPU."""
    note: str = ""
    """Remark for tables."""
    why_not: str = ""
    """Reason why the candidate is not feasible. Empty if the candidate is feasible."""


class CostModel(ABC):
    """Bytes and memory of the candidates of one strategy."""

    @staticmethod
    def inspect(model: nn.Module, features: Any) -> Any:
        """Return what :meth:`cost` must know of a model. It is stored in ``shape.inspected``.

        ``features`` is the number of input columns, or :class:`TypedFeatures` for several types.

        Raises ConfigError if the strategy cannot train the model, as far as that is known without a step.
        """
        return None

    @staticmethod
    def works(candidate: Candidate, context: CandidateContext) -> tuple[Work, ...]:
        """Return the works to count for ``candidate`` beside mini-batches."""
        return ()

    @staticmethod
    @abstractmethod
    def cost(candidate: Candidate, counts: EpochCounts) -> Cost:
        """Return the cost of an epoch without I/O. Bytes that follow from counts must equal the ledger's."""


COSTS: Registry[CostModel] = Registry(
    "cost model",
    CostModel,  # type: ignore[type-abstract]  # the registry only asks for subclasses of it
    builtin={
        "cooperative": "dglx_dist.planner.costs.full_graph:FullGraphCosts",
        "data_parallel": "dglx_dist.planner.costs.data_parallel:DataParallelCosts",
        "full_graph": "dglx_dist.planner.costs.full_graph:FullGraphCosts",
        "lambda": "dglx_dist.planner.costs.serverless:LambdaCosts",
        "push_pull": "dglx_dist.planner.costs.push_pull:PushPullCosts",
        "shared_preload": "dglx_dist.planner.costs.full_graph:FullGraphCosts",
    },
    group="dglx_dist.costs",
)
"""Cost models by the strategy's name. Without a cost model, a strategy is tried with unknown bytes."""


def present(**phases: int) -> dict[str, int]:
    """Return the bytes by ledger phase, sorted by name, without phases of 0 bytes."""
    return {name: count for name, count in sorted(phases.items()) if count}


def build_traffic(
    outside: Mapping[str, int],
    inside: Mapping[str, int],
    gradient_sums: Sequence[int],
    *,
    startup_bytes: int = 0,
    is_exact: bool,
) -> Traffic:
    """Return the traffic of an epoch, without phases that send nothing.

    Args:
        outside: Bytes between servers by ledger phase, without the sums of gradients.
        inside: Bytes between ranks of the same server by ledger phase, without the sums of gradients.
        gradient_sums: Bytes to sum the gradients over all ranks, as (between servers, within servers).
        startup_bytes: Bytes between servers before the first epoch.
        is_exact: Whether the ledger of a run will show the same bytes. Otherwise they are estimates.
    """
    gradients_outside, gradients_inside = gradient_sums
    return Traffic(
        outside=present(**{**outside, GRADIENTS: gradients_outside}),
        inside=present(**{**inside, GRADIENTS: gradients_inside}),
        once=startup_bytes,
        exact=is_exact,
    )


def ring_split(num_bytes: int, server_of: Sequence[int], steps: int) -> tuple[int, int]:
    """Return the bytes that ring all-reduces send between servers, and the bytes that they send within them.

    Args:
        num_bytes: Size of the reduced array.
        server_of: (W,) server of each rank.
        steps: Number of all-reduces.
    """
    num_ranks = len(server_of)
    outside = 0
    for rank, server in enumerate(server_of):
        # A rank of the ring sends to the next rank, which may be on another server.
        next_rank = (rank + 1) % num_ranks
        if server_of[next_rank] != server:
            outside += steps * ring_bytes(num_bytes, num_ranks, rank)

    # In an all-reduce, the W ranks together send 2 (W - 1) times the array's size.
    total = steps * 2 * (num_ranks - 1) * num_bytes
    return outside, total - outside
