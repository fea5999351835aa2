"""Counts, byte formulas and memory formulas that cost models share. None of them needs measured seconds.

Each cost model belongs to one strategy. It names what to count for a candidate, and computes bytes and memory
from these counts.
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
"""Ledger phase for summed gradients."""
ID_BYTES = 8
OPTIMIZER_COPIES = 2
"""Tensors that Adam keeps per parameter, each as large as the parameter."""
_BATCHES_AHEAD = 1
ALLOCATOR_OVERHEAD = 1.3
"""Held memory relative to memory in use. Each thread keeps freed memory for the next step."""
_BLOCK_EDGE_BYTES, _BLOCK_ROW_BYTES = 28, 24
"""Bytes per edge and per row in a sampled block: ids, positions and the formats for message passing."""


@dataclass(frozen=True)
class Work(ABC):
    """Epoch work other than mini-batches. It is counted once, for all candidates that need it.

    Subclasses are frozen dataclasses with JSON values.
    """

    @abstractmethod
    def describe(self, num_layers: int) -> str:
        """Describe what is counted, for progress messages."""

    @abstractmethod
    def count(self, run: PlannedRun) -> Any:
        """Return the counts of all ranks, or None if counting takes too long. Every rank must call this."""

    def blocks(self, counts: Any) -> tuple[list[Any], int] | None:
        """Return the blocks of the busiest rank's step, and the steps per epoch. None by default."""
        return None


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run to count, either by its own ranks together or by one process alone."""

    g: DistGraph
    partition: PartitionContext
    ntype: str
    """Type of the training nodes."""
    bounds: Mapping[str, Array]
    """(S + 1,) int64 first node on each server, by node type."""
    seeds: Array
    """(K,) ascending int64 training nodes on all servers, as ids within ``ntype``."""
    trained_types: frozenset[str] = frozenset()
    """Node types with trainable rows instead of features."""
    graph: GraphStats
    cluster: Cluster
    num_layers: int
    in_job: bool
    """Whether each rank of the run counts its own work. Otherwise this process counts for all ranks."""
    works: dict[Work, Any] = field(default_factory=dict)
    """Counts that are already complete."""

    @property
    def plan_seeds(self) -> Array:
        """(K,) int64 training nodes in the ids of :attr:`partition`, unified if there are several types."""
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
    """Trainable rows that ranks read in an epoch but do not own, summed over all ranks and steps."""

    outside: int = 0
    """Rows on another server."""
    inside: int = 0
    """Rows on another rank within the same server."""

    def traffic(self, row_bytes: int) -> tuple[dict[str, int], dict[str, int]]:
        """Return the bytes between servers and within servers, each by ledger phase.

        Rows on other servers are pulled, with their ids. Gradients are sent to the rank that owns the row.
        """
        size = ID_BYTES + row_bytes
        outside = present(embeddings=size * self.outside, sparse_gradients=size * self.outside)
        return outside, present(sparse_gradients=size * self.inside)


@dataclass(frozen=True, kw_only=True)
class TypedFeatures:
    """Input for a model with several node types."""

    etypes: tuple[EdgeType, ...]
    widths: Mapping[str, int]
    """Number of feature columns by node type. Types without features are missing."""


@dataclass(frozen=True, kw_only=True)
class TypedCounts:
    """Size of the layer-1 blocks by type, summed over all ranks and all batches in an epoch."""

    batches: int
    sources: Mapping[str, int]
    """Source rows, L0, by node type."""
    targets: Mapping[str, int]
    """Destinations, D1, by node type."""
    edges: Mapping[EdgeType, int]
    """Edges, E1, by edge type."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Size and bytes of all mini-batches in an epoch, summed over all ranks."""

    steps: int
    """Steps per rank. Every rank makes as many as the rank with the most seeds needs."""
    input_rows: int
    remote_rows: int
    """Input rows that belong to another server."""
    edges: int
    seeds_per_rank: list[int]
    feature_bytes: int
    """(8 + F s) bytes per remote row: its id, and F features with s bytes each."""
    sampling_bytes: int
    """8 bytes per remote node with in-edges to read, and 24 per edge. 0 if ranks have all edges."""
    label_bytes: int
    gradient_bytes: int
    """2 (W - 1) (|theta| s + one flag with s bytes for each parameter tensor) bytes per step."""
    first_targets: int = 0
    """D1, the destinations in layer-1 blocks. Their sources, L0, are ``input_rows``."""
    first_edges: int = 0
    trained_rows: TrainedRows = TrainedRows()
    first_layer: TypedCounts | None = None

    @property
    def ranks(self) -> int:
        return len(self.seeds_per_rank)


@dataclass(frozen=True, kw_only=True)
class CacheHits:
    """Savings and cost of a cache for remote rows."""

    policy: str
    alpha: float
    """Size as a fraction of the server's own nodes."""
    hits: int = 0
    """Remote rows that are found in a cache during an epoch, over all ranks."""
    once_rows: int = 0
    """Rows fetched before the first epoch, by all ranks."""
    server_bytes: int = 0
    """Cache bytes that the ranks on a server share."""
    rank_bytes: int = 0
    """Cache bytes per rank. They include the tables and drawn batches that a cache with look-ahead needs."""


LayerCounts: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""(L,) sources, targets and edges by layer."""


@dataclass(frozen=True, kw_only=True)
class BatchWork:
    """Work that one epoch with mini-batches causes."""

    survey: Survey
    largest: LayerCounts
    """Counts for the largest batch."""
    caches: tuple[CacheHits, ...] = ()
    is_complete: bool = True
    """Whether every batch in the epoch was counted."""

    @property
    def steps(self) -> int:
        return self.survey.steps


@dataclass(frozen=True, kw_only=True)
class EpochCounts:
    """Everything that is counted in an epoch for one graph, model and cluster."""

    graph: GraphStats
    shape: ModelShape
    cluster: Cluster
    program_bytes: int
    """Memory that a rank needs without a graph and a model."""
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
        """Bytes that the program and the model take."""
        return self.program_bytes + self.parameter_bytes

    @property
    def parameter_bytes(self) -> int:
        return self.shape.parameters * self.shape.itemsize

    @property
    def structure_bytes(self) -> int:
        """Bytes that a rank maps for in-edges."""
        if self.structure_partitioned:
            return self.graph.structure_bytes // self.cluster.servers
        return self.graph.structure_bytes

    @property
    def own_feature_bytes(self) -> int:
        """Bytes for a server's features, which its ranks share."""
        # The negations round up.
        return -(-self.graph.all_feature_bytes // self.cluster.servers)

    def activations(self, targets: Sequence[int], sources: Sequence[int]) -> list[int]:
        """Return the (L,) bytes that forward keeps for backward in each layer.

        For each target, a layer keeps its sums and three tensors as wide as its result. For each source, it
        keeps one such tensor.

        Args:
            targets: (L,) target rows by layer.
            sources: (L,) source rows by layer.
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
        """Return a rank's peak memory when it trains on mini-batches.

        Args:
            held: Bytes of features that are mapped or kept.
            owners: Ranks with layer-1 blocks in a batch (push-pull's N_f). Each brings its part of the
                columns, and all parts together are as large as the full rows.
            in_flight: How many batches are trained at a time.
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
        """Look up the counted cache for ``candidate``.

        Return None if the candidate has no cache, or if its cache was not counted.
        """
        if self.batches is None or candidate.cache is None:
            return None
        for cache in self.batches.caches:
            if (cache.policy, cache.alpha) == (candidate.cache, candidate.cache_alpha):
                return cache
        return None


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that all ranks send in one epoch, by ledger phase."""

    outside: Mapping[str, int] = field(default_factory=dict)
    """Bytes between servers."""
    inside: Mapping[str, int] = field(default_factory=dict)
    """Bytes between ranks on the same server."""
    once: int = 0
    """Bytes between servers before the first epoch."""
    exact: bool = True
    """Whether a run's ledger shows the same bytes. Otherwise the bytes are estimates."""

    def seconds(self, cluster: Cluster) -> float:
        """Return how long an epoch's bytes take on the slower links, either between servers or within them.

        All servers send at the same time, so each needs only its share of the seconds.
        """
        outside = sum(self.outside.values()) / cluster.external_bytes_per_s
        inside = sum(self.inside.values()) / cluster.internal_bytes_per_s
        return max(outside, inside) / cluster.servers


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Bytes and memory that a candidate needs for an epoch."""

    traffic: Traffic = Traffic(exact=False)
    memory: int = 0
    """A rank's peak memory in bytes, including the program. 0: unknown."""
    shared: int = 0
    """Bytes within ``memory`` that the ranks on a server map together."""
    on_host: int = 0
    """Bytes within ``memory`` that lie on the host if ranks compute on GPUs. The rest is on the GPU."""
    note: str = ""
    """Remark for tables."""
    why_not: str = ""
    """Reason if the candidate is not feasible, or empty."""


class CostModel(ABC):
    """Computes bytes and memory for the candidates of one strategy."""

    @staticmethod
    def inspect(model: nn.Module, features: Any) -> Any:
        """Extract what :meth:`cost` must know about a model. The result is stored in ``shape.inspected``.

        Args:
            model: The model, which makes no step here.
            features: Number of input columns, or :class:`TypedFeatures` for several node types.

        Raises:
            ConfigError: If the strategy cannot train the model, as far as that is known without a step.
        """
        return None

    @staticmethod
    def works(candidate: Candidate, context: CandidateContext) -> tuple[Work, ...]:
        """List what must be counted for ``candidate`` besides mini-batches."""
        return ()

    @staticmethod
    @abstractmethod
    def cost(candidate: Candidate, counts: EpochCounts) -> Cost:
        """Compute the cost without I/O. Bytes that follow from counts must equal the ledger's."""


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
"""Cost models by strategy name. A strategy without a cost model is tried with unknown bytes."""


def present(**phases: int) -> dict[str, int]:
    """Drop the phases with 0 bytes, and sort the others by name."""
    return {name: count for name, count in sorted(phases.items()) if count}


def build_traffic(
    outside: Mapping[str, int],
    inside: Mapping[str, int],
    gradient_sums: Sequence[int],
    *,
    startup_bytes: int = 0,
    is_exact: bool,
) -> Traffic:
    """Build an epoch's traffic, without phases that send nothing.

    Args:
        outside: Bytes between servers by ledger phase, without gradient sums.
        inside: Bytes between ranks on the same server by ledger phase, without gradient sums.
        gradient_sums: Bytes to sum the gradients over all ranks, as (between servers, within servers).
        startup_bytes: Bytes between servers before the first epoch.
        is_exact: Whether a run's ledger will show the same bytes. Otherwise they are estimates.
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
        server_of: (W,) server by rank.
        steps: Number of all-reduces.
    """
    num_ranks = len(server_of)
    outside = 0
    for rank, server in enumerate(server_of):
        # Each rank in the ring sends to the next rank, which may be on another server.
        next_rank = (rank + 1) % num_ranks
        if server_of[next_rank] != server:
            outside += steps * ring_bytes(num_bytes, num_ranks, rank)

    # In an all-reduce, the W ranks together send 2 (W - 1) times the array's size.
    total = steps * 2 * (num_ranks - 1) * num_bytes
    return outside, total - outside
