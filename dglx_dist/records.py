"""Frozen records that all packages share.

Shape letters in docstrings: N nodes, E edges, F feature columns, K requested rows, P parts, W ranks, S
servers, B seeds in a batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
EdgeType: TypeAlias = tuple[str, str, str]
"""Canonical edge type: (source node type, relation, destination node type)."""

NODE_TYPE = "_N"
"""DGL's name for the only node type in a homogeneous graph."""

EDGE_TYPE: EdgeType = ("_N", "_E", "_N")
"""DGL's name for the only edge type in a homogeneous graph."""


def format_type(kind: str | EdgeType) -> str:
    """Return a node type unchanged, and an edge type as ``source:relation:destination``."""
    return kind if isinstance(kind, str) else ":".join(kind)


REVERSE = "-rev"
"""Suffix for reverse relations, as in GraphStorm."""

FEATURE, LABEL = "feat", "label"
SEED_ID = "seed_id"
"""Node column in blocks with a tree for each seed: the seed's position in the batch."""
TIME = "time"
"""Node column in blocks with times: the seed's time."""
ROW_ID = "_row_id"
"""Node column in blocks with a tree for each seed: the row's id, because a node has several rows."""
SPLITS = TRAIN, VALIDATION, TEST = ("train_mask", "val_mask", "test_mask")


@dataclass(frozen=True, kw_only=True)
class SparseRows:
    """An (N, F) matrix in compressed rows, for features that are mostly zero."""

    indptr: Array
    """(N + 1,) int64: row n is at ``indptr[n]:indptr[n + 1]``."""
    indices: Array
    """(nnz,) int32 columns in [0, F)."""
    values: Array
    """(nnz,) values with any numeric dtype."""
    num_columns: int

    @property
    def shape(self) -> tuple[int, int]:
        """(N, F)."""
        return len(self.indptr) - 1, self.num_columns

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.values.dtype

    def dense(self, rows: Array) -> Array:
        """Return the rows at the (K,) int64 indices ``rows``, in any order, as a dense (K, F) array."""
        starts = self.indptr[rows]
        counts = self.indptr[rows + 1] - starts
        # For each value that is not zero: its row in the result, and its place among that row's values.
        result_rows = np.repeat(np.arange(len(rows)), counts)
        first_of_row = np.cumsum(counts) - counts
        places = np.arange(len(result_rows)) - np.repeat(first_of_row, counts)

        positions = np.repeat(starts, counts) + places
        dense = np.zeros((len(rows), self.num_columns), dtype=self.values.dtype)
        dense[result_rows, self.indices[positions]] = self.values[positions]
        return dense


NodeColumn: TypeAlias = Array | SparseRows


@dataclass(frozen=True, kw_only=True)
class RawGraph:
    """A graph in memory or memory-mapped, as a dataset source returns it.

    Ids are 0..N-1 per node type, in the source's order. A homogeneous graph has the node type ``_N`` and the
    edge type ``("_N", "_E", "_N")``.
    """

    name: str
    num_nodes: Mapping[str, int]
    edges: Mapping[EdgeType, tuple[Array, Array]]
    """Edge type to (source ids, destination ids), both (E,) int32 or int64. The direction is kept."""
    node_data: Mapping[str, Mapping[str, NodeColumn]] = field(default_factory=dict)
    """Node type to name to (N, ...) array. Usual names: feat, label, train_mask, val_mask, test_mask."""
    edge_data: Mapping[EdgeType, Mapping[str, Array]] = field(default_factory=dict)
    """Edge type to name to (E, ...) array, ordered like ``edges``."""
    edge_ids: Mapping[EdgeType, Array] = field(default_factory=dict)
    """Edge type to (E,) ids in the source, a permutation of 0..E-1, if ``edges`` are in another order."""
    num_classes: Mapping[str, int] = field(default_factory=dict)
    """Node type to the class count in its ``label``. A node without a label has -1."""
    class_names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Node type, or edge type as SOURCE:RELATION:DESTINATION, to the class names in its ``label``."""
    user_ids: Mapping[str, Array] = field(default_factory=dict)
    """Node type to the user's own (N,) int64 or unicode ids, if they are not 0..N-1."""

    @property
    def is_homogeneous(self) -> bool:
        """Whether there is one node type and one edge type."""
        return len(self.num_nodes) == 1 and len(self.edges) == 1

    @property
    def total_nodes(self) -> int:
        """Node count over all types."""
        return sum(self.num_nodes.values())

    @property
    def total_edges(self) -> int:
        """Edge count over all types."""
        return sum(len(src) for src, _ in self.edges.values())


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The part that every node is assigned to."""

    num_parts: int
    part_of: Mapping[str, Array]
    """Node type to (N,) int32 parts in [0, P)."""
    method: str
    seed: int
    parameters: Mapping[str, object] = field(default_factory=dict)
    """The partitioner's options and promises. JSON values only."""


@dataclass(frozen=True, kw_only=True)
class ColumnInfo:
    """Dtype and row shape for a named node or edge tensor."""

    dtype: str
    """Torch's name without the prefix: float32, bfloat16, int64, bool, ..."""
    row_shape: tuple[int, ...]
    """Shape of one row. () for a scalar per node."""


@dataclass(frozen=True, kw_only=True)
class StepShare:
    """Targets of this rank and of all ranks in one step (gradient rule, docs/development/contracts.md)."""

    num_local: int
    num_global: int
    step_number: int | None = field(default=None, compare=False)
    """The step's number in the run, equal on all ranks. It keys dropout. None: unknown."""


STANDARD_ERROR = "_se"
"""Ending of the name of a metric's standard error, if the metric is an estimate from a sample."""


@dataclass(frozen=True, kw_only=True)
class EpochRecord:
    """Figures for one epoch over all ranks. Counts and bytes are sums, times are means over the ranks.

    ``wait_s``, ``compute_s`` and ``exchange_s`` sum to ``seconds``. The loader's threads work at the same
    time, so their times overlap with these.
    """

    epoch: int
    loss: float
    """Mean over the epoch's targets."""
    train_accuracy: float
    """Accuracy in training. NaN if a task has no classes."""
    val_accuracy: float | None
    """Validation accuracy. None if this epoch was not evaluated or a task has no classes."""
    seconds: float
    """Wall-clock training time on the slowest rank, without evaluation."""
    num_samples: int
    sample_s: float = 0.0
    """Time for sampling neighbours and building blocks, on the loader's threads."""
    fetch_s: float = 0.0
    """Time for reading feature and label rows, local and remote, on the loader's threads."""
    wait_s: float = 0.0
    """Time that the training loop waited for the loader."""
    compute_s: float
    """Time for forward, backward and optimizer, without exchange."""
    exchange_s: float = 0.0
    """Time for exchanging gradients or activations."""
    bytes_inside: int = 0
    """Payload between ranks on the same server, in bytes."""
    bytes_outside: int = 0
    """Payload between servers, in bytes."""
    cache_hits: int = 0
    """Rows on other servers that were found in a cache of remote rows."""
    cache_misses: int = 0
    """Rows in cached columns that had to be fetched."""
    checkpoint_s: float = 0.0
    """Time that training stood still for checkpoints on the slowest rank. Not part of ``seconds``."""
    evaluation_s: float = 0.0
    """Time for the evaluation after this epoch on the slowest rank. Not part of ``seconds``."""
    evaluation_bytes_outside: int = 0
    """Payload between servers during that evaluation, in bytes. Not part of ``bytes_outside``."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics on the validation and test targets, like ``val_f1_micro``. Empty if not evaluated.

    They are exact unless they have standard errors, like ``val_f1_micro_se``.
    """

    @property
    def samples_per_second(self) -> float:
        """Targets trained on per second, over all ranks."""
        return self.num_samples / self.seconds if self.seconds > 0 else 0.0

    def scalars(self) -> dict[str, float]:
        """Return the finite numbers in ``metrics.jsonl`` without the epoch. Nested ones keep their names."""
        figures: dict[str, Any] = {}
        for name, value in asdict(self).items():
            if isinstance(value, Mapping):
                figures.update(value)
            else:
                figures[name] = value
        figures["samples_per_second"] = self.samples_per_second
        del figures["epoch"]

        scalars = {}
        for name, value in figures.items():
            if isinstance(value, (int, float)) and math.isfinite(value):
                scalars[name] = value
        return scalars

    @property
    def cache_hit_rate(self) -> float | None:
        """Share of hits among remote rows in cached columns. None without a cache or without remote rows."""
        total = self.cache_hits + self.cache_misses
        if total == 0:
            return None
        return self.cache_hits / total


@dataclass(frozen=True, kw_only=True, eq=False)
class IdRanges:
    """Homogeneous node or edge ids as DGL numbers them: part by part, and type by type within a part.

    There are T types and P parts.
    """

    starts: Array
    """(T, P) int64: the first id that a type's nodes (or edges) have in the part."""
    counts: Array
    """(T, P) int64."""

    @staticmethod
    def from_offsets(offsets: Sequence[Array]) -> IdRanges:
        """Return the ranges for T arrays with (P + 1,) per-type offsets."""
        counts = np.stack([np.diff(type_offsets) for type_offsets in offsets]).astype(np.int64)
        # Transposed, the ranges are in id order: part by part.
        counts_by_part = counts.T
        ends = np.cumsum(counts_by_part.ravel())
        starts_by_part = np.concatenate([[0], ends])[:-1].reshape(counts_by_part.shape)
        return IdRanges(starts=np.ascontiguousarray(starts_by_part.T), counts=counts)

    @property
    def offsets(self) -> Array:
        """(T, P + 1): per-type ids of part p are ``offsets[t, p] .. offsets[t, p + 1] - 1``."""
        return np.pad(np.cumsum(self.counts, axis=1), ((0, 0), (1, 0)))

    def part_range(self, part: int) -> tuple[int, int]:
        """Return the first id in a part and the first id after it."""
        first = int(self.starts[0, part])
        return first, first + int(self.counts[:, part].sum())

    def from_typed(self, type_id: int, ids: Array) -> Array:
        """Turn (K,) per-type ids into homogeneous ids. ``type_id`` is the type's number."""
        offsets = self.offsets[type_id]
        part = np.searchsorted(offsets[1:], ids, side="right")
        return self.starts[type_id][part] + (ids - offsets[part])

    def locate(self, ids: Array) -> tuple[Array, Array]:
        """Return the type number and the part for each of the (K,) homogeneous ids."""
        # The ranges are numbered in id order: part by part, and by type within a part.
        ends = (self.starts + self.counts).T.ravel()
        range_index = np.searchsorted(ends, ids, side="right")
        num_types = len(self.starts)
        return range_index % num_types, range_index // num_types

    def to_typed(self, ids: Array) -> tuple[Array, Array]:
        """Return the type number and the per-type id for each of the (K,) homogeneous ids."""
        type_id, part = self.locate(ids)
        return type_id, ids - self.starts[type_id, part] + self.offsets[type_id, part]
