"""Plans for full-graph steps, the smallest exchange for sums, and the plan cache on disk.

On disk, a plan is a folder with one array. See :mod:`dglx_dist.data.storage.arrays`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any, TypeAlias, final

import numpy as np
from numba import njit
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import breadth_first_order, maximum_bipartite_matching
from torch import Tensor

from dglx_dist.comm.topology import Topology
from dglx_dist.data.storage.arrays import ArrayCache, ArrayFolder
from dglx_dist.errors import PeerError
from dglx_dist.graph.column import Column
from dglx_dist.graph.row_kernels import (
    SlotTable,
    compute_table_sizes,
    fill_table,
    find_slot,
    view_as_numpy,
    view_as_tensor,
)
from dglx_dist.records import Array

Received: TypeAlias = tuple[tuple[int, int], ...]
"""Pairs (rank, row count received from it), ascending by rank, without ranks that send nothing."""

Sent: TypeAlias = tuple[tuple[int, Array], ...]
"""Pairs (rank, (n,) int64 own rows sent to it), ascending by rank, without ranks that receive nothing."""

NO_IDS: Array = np.empty(0, np.int64)


@final
@dataclass(frozen=True, kw_only=True)
class HaloLayer:
    """One rank's block at layer l, for l in ``1..L``.

    The sources are the rank's own rows from the previous layer, followed by the halo. The halo rows are
    grouped by rank in ascending order, and ascend by id within a rank. The targets are the first ``targets``
    own rows. The block holds each in-edge into every target once, and no other edges.
    """

    own_rows: int
    """Number of rows that this rank holds at layer l - 1. At layer 1 these are feature rows."""
    targets: int
    """Number of rows that this rank computes at layer l. At most :attr:`own_rows`."""
    indptr: Array
    """(targets + 1,) int64. Target i has its in-edges at ``indptr[i]:indptr[i + 1]``."""
    indices: Array
    """(E,) int64 sources. Values below :attr:`own_rows` are own rows, the others are halo rows."""
    edge_ids: Array
    """(E,) int64 global edge ids."""
    halo_nodes: Array
    """(n_halo,) int64 global ids for the halo rows, in the order in which they arrive."""
    receive: Received
    """Ranks that send the halo. The counts add up to n_halo."""
    send: Sent
    """Own rows that other ranks need, ordered by id."""
    cover: Cover | None = None
    """Exchange for sums over the in-edges. If it is None, halo rows are exchanged for sums too."""

    @classmethod
    def from_rows(cls, own_rows: int, halo_nodes: Array, receive: Received, send: Sent) -> HaloLayer:
        """Make a layer without targets and edges, for an exchange that only moves rows."""
        return cls(
            own_rows=own_rows,
            targets=0,
            indptr=np.zeros(1, np.int64),
            indices=NO_IDS,
            edge_ids=NO_IDS,
            halo_nodes=halo_nodes,
            receive=receive,
            send=send,
        )

    @property
    def num_sources(self) -> int:
        return self.own_rows + len(self.halo_nodes)

    def halo_of(self, rank: int) -> Array:
        """Return the (n,) ascending int64 global ids for those halo rows that ``rank`` holds."""
        first = 0
        for sender, count in self.receive:
            if sender == rank:
                return self.halo_nodes[first : first + count]
            first += count
        return self.halo_nodes[:0]


@final
@dataclass(frozen=True, kw_only=True)
class Cover:
    """Computes the same sums over in-edges as a :class:`HaloLayer`, but sends fewer rows."""

    layer: HaloLayer
    """Layer with partial sums.

    The own rows are followed by the partial sums for other ranks. The halo consists of source rows, and of
    partial sums from other ranks, which have one edge each. ``edge_ids`` are positions among the in-edges, or
    -1 for a partial sum.
    """
    indptr: Array
    """(m + 1,) int64. Partial sum i has its summands at ``indptr[i]:indptr[i + 1]``."""
    indices: Array
    """(e,) int64 own rows to sum."""
    send_edges: Sent
    """In-edges that other ranks sum, in the same order as their :attr:`indices`."""
    receive_edges: Received


@final
@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """One rank's plan for a full-graph step.

    Rows are sorted by the last layer that needs them (latest first), then by id. So layer l uses a prefix of
    the rows and in-edges that layer l - 1 uses.
    """

    nodes: Array
    """(n,) int64 global ids for this rank's feature rows."""
    layers: tuple[HaloLayer, ...]
    """The L layers, input layer first."""
    external_nodes: int
    """Number of feature rows that this server fetches once from other servers, |R_i^0 without I_i|."""
    edge_counts: Array = field(default_factory=lambda: NO_IDS)
    """(L * R,) int64 edge counts over all ranks, by layer and edge type. Empty with a single type."""
    covers: tuple[Cover, ...] = ()
    """(R * L,) covers by edge type and layer, if there are several types."""

    @property
    def seeds(self) -> int:
        return self.layers[-1].targets

    def rows(self, level: int) -> Array:
        """Return the (n_l,) int64 global ids for this rank's output rows at layer ``level``, from 0 to L."""
        count = self.layers[0].own_rows if level == 0 else self.layers[level - 1].targets
        return self.nodes[:count]


def minimum_cover(sources: Array, targets: Array, num_sources: int, num_targets: int) -> tuple[Array, Array]:
    """Find a minimum vertex cover for the (E,) edges. Return bool masks (num_sources,) and (num_targets,).

    If rows are sent for the covered sources and sums for the covered targets, each edge is covered. By
    Koenig's theorem the cover is as large as a maximum matching.
    """
    shape = num_sources, num_targets
    graph = csr_matrix((np.ones(len(sources), bool), (sources, targets)), shape=shape)
    match_of_source = maximum_bipartite_matching(graph, perm_type="column")
    matched_source = np.full(num_targets, -1)
    matched_source[match_of_source[match_of_source >= 0]] = np.flatnonzero(match_of_source >= 0)

    # Alternating paths lead from source to source. An extra node has edges to all unmatched sources, so one
    # search from it finds all sources on alternating paths.
    edge_sources = np.repeat(np.arange(num_sources), np.diff(graph.indptr))
    next_source = matched_source[graph.indices]
    unmatched = np.flatnonzero(match_of_source < 0)
    indices = np.concatenate([np.where(next_source < 0, edge_sources, next_source), unmatched])
    indptr = np.append(graph.indptr, len(indices))
    paths = csr_matrix((np.ones(len(indices)), indices, indptr), shape=(num_sources + 1, num_sources + 1))
    is_reached = np.zeros(num_sources + 1, bool)
    is_reached[breadth_first_order(paths, num_sources, return_predecessors=False)] = True
    is_covered = np.zeros(num_targets, bool)
    is_covered[graph.indices[is_reached[edge_sources]]] = True
    return ~is_reached[:num_sources], is_covered


@final
@dataclass(frozen=True, kw_only=True)
class PairCover:
    """Rows and sums that one rank sends another for a layer. Positions refer to the halo without a cover."""

    rows: Array
    """(n,) int64 ascending halo positions whose rows are sent."""
    targets: Array
    """(m,) int64 ascending targets that get a partial sum. Only the receiver knows them."""
    counts: Array
    """(m,) int64 sources in each sum, with repetitions."""
    sources: Array
    """(e,) int64 halo positions that the sums add, in the same order as :attr:`edges`."""
    edges: Array
    """(e,) int64 in-edges that the sender sums, ordered by target. Only the receiver knows them."""

    def to_message(self) -> Array:
        """Return the sizes, rows, counts and sources as one array. The sender of the rows needs them."""
        sizes = np.array([len(self.rows), len(self.counts), len(self.sources)], np.int64)
        return np.concatenate([sizes, self.rows, self.counts, self.sources])

    @classmethod
    def from_message(cls, rank: int, message: Array, num_rows: int) -> PairCover:
        """Read a message from ``rank``, which would receive ``num_rows`` halo rows without a cover.

        Raises PeerError if the numbers are inconsistent, or refer to rows beyond ``num_rows``.
        """
        sizes = message[:3]
        values = message[3:]
        has_sizes = message.dtype == np.int64 and message.ndim == 1 and len(sizes) == 3
        if has_sizes and message.min() >= 0:
            rows, counts, sources = np.split(values, np.cumsum(sizes[:2]))
            # Each number is checked by itself first, because sums may overflow.
            fits = max(sizes) <= len(values) == sizes.sum() and counts.max(initial=0) <= len(sources)
            largest_row = max(rows.max(initial=-1), sources.max(initial=-1))
            if fits and counts.sum() == len(sources) and largest_row < num_rows:
                return cls(rows=rows, targets=NO_IDS, counts=counts, sources=sources, edges=NO_IDS)

        raise PeerError(
            f"rank {rank} asks for partial sums of rows that this rank does not send to it; run the same "
            "version on all ranks, on the same files"
        )


def find_covers(layer: HaloLayer) -> dict[int, PairCover]:
    """Return the smallest exchange for sums over the in-edges in ``layer``, by sending rank."""
    target_of = _expand_edge_targets(layer)
    first_source = layer.own_rows
    covers: dict[int, PairCover] = {}
    for rank, count in layer.receive:
        edges = np.flatnonzero((layer.indices >= first_source) & (layer.indices < first_source + count))
        sources = layer.indices[edges] - first_source
        targets, target_index = np.unique(target_of[edges], return_inverse=True)
        if len(edges):
            is_sent, is_summed = minimum_cover(sources, target_index, count, len(targets))
        else:
            # Only other edge types read the rows from ``rank``.
            is_sent = np.zeros(count, bool)
            is_summed = np.zeros(0, bool)

        is_summed_edge = ~is_sent[sources]
        covers[rank] = PairCover(
            rows=np.flatnonzero(is_sent),
            targets=targets[is_summed],
            counts=np.bincount(target_index[is_summed_edge], minlength=len(targets))[is_summed],
            sources=sources[is_summed_edge],
            edges=edges[is_summed_edge],
        )
        first_source += count
    return covers


def build_cover(layer: HaloLayer, received: Mapping[int, PairCover], sent: Mapping[int, PairCover]) -> Cover:
    """Build the cover for ``layer`` from the exchanges with its peers, by ascending rank."""
    # Partial sums for other ranks follow the own rows, and are sent like own rows.
    own_rows = layer.own_rows
    send = list[tuple[int, Array]]()
    summands = [NO_IDS]
    for rank, rows in layer.send:
        pair = sent[rank]
        sum_rows = own_rows + np.arange(len(pair.counts))
        send.append((rank, np.concatenate([rows[pair.rows], sum_rows])))
        summands.append(rows[pair.sources])
        own_rows += len(sum_rows)

    # A peer's halo starts with its rows. Then come its partial sums, which replace some in-edges.
    is_kept = np.ones(len(layer.indices), bool)
    new_positions = np.arange(layer.num_sources)
    old_start = layer.own_rows
    new_end = own_rows
    received_sums = [NO_IDS]
    sum_targets = [NO_IDS]
    for rank, count in layer.receive:
        pair = received[rank]
        is_kept[pair.edges] = False
        new_positions[old_start + pair.rows] = new_end + np.arange(len(pair.rows))
        new_end += len(pair.rows) + len(pair.targets)
        received_sums.append(np.arange(new_end - len(pair.targets), new_end))
        sum_targets.append(pair.targets)
        old_start += count

    # Each partial sum is the source for one edge. Edges are sorted by target.
    edges = np.flatnonzero(is_kept)
    sums = np.concatenate(received_sums)
    targets = np.concatenate([_expand_edge_targets(layer)[edges], *sum_targets])
    order = np.argsort(targets, kind="stable")
    return Cover(
        layer=HaloLayer(
            own_rows=own_rows,
            targets=layer.targets,
            indptr=_compute_offsets(np.bincount(targets, minlength=layer.targets)),
            indices=np.concatenate([new_positions[layer.indices[edges]], sums])[order],
            edge_ids=np.concatenate([edges, np.full(len(sums), -1)])[order],
            halo_nodes=np.full(new_end - own_rows, -1),
            receive=tuple((rank, len(pair.rows) + len(pair.targets)) for rank, pair in received.items()),
            send=tuple(send),
        ),
        indptr=_compute_offsets(np.concatenate([NO_IDS, *(pair.counts for pair in sent.values())])),
        indices=np.concatenate(summands),
        send_edges=tuple((rank, pair.edges) for rank, pair in received.items() if len(pair.edges)),
        receive_edges=tuple((rank, len(pair.sources)) for rank, pair in sent.items() if len(pair.sources)),
    )


def _expand_edge_targets(layer: HaloLayer) -> Array:
    """Return the (E,) target for each in-edge."""
    return np.repeat(np.arange(layer.targets), np.diff(layer.indptr))


def _compute_offsets(counts: Array) -> Array:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


@final
class RowPositions:
    """Hash index from (n,) int64 distinct ids in [0, ``num_ids``) to their positions.

    It takes 4 bytes for every id below ``num_ids``, or 24 to 48 bytes per row if that is less.
    """

    def __init__(self, ids: Array, num_ids: int) -> None:
        num_slots, num_keys = compute_table_sizes(len(ids), num_ids, direct_limit=0)
        self._table = SlotTable(np.empty(num_slots, np.int32), np.empty(num_keys, np.int64))
        self._num_ids = num_ids
        fill_table(self._table, ids)

    def find(self, ids: Array) -> Array:
        """Look up the (K,) int64 ``ids``. Return their (K,) int64 positions, or -1 for ids without a row."""
        positions = np.empty(len(ids), np.int64)
        _find_positions(self._table, self._num_ids, ids, positions)
        return positions


@njit(cache=True, nogil=True)
def _find_positions(table: SlotTable, num_ids: int, ids: Array, positions: Array) -> None:
    for k in range(len(ids)):
        # Ids come from other ranks, so they are checked before they index the table.
        positions[k] = find_slot(table, ids[k]) if 0 <= ids[k] < num_ids else -1


VERSION = 7
NUMBERS, ROWS = "numbers", "rows"


def write_plan(folder: ArrayFolder, plan: RankPlan) -> bool:
    """Replace ``folder`` by ``plan``. Return False if it cannot be written, see :meth:`ArrayFolder.save`."""
    arrays: list[Array] = []

    def to_json(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            # All arrays are stored as one, so the JSON has each array's range.
            start = sum(map(len, arrays))
            arrays.append(np.ascontiguousarray(value, np.int64))
            return {"at": [start, start + len(value)]}
        if isinstance(value, tuple):
            return list(map(to_json, value))
        if is_dataclass(value):
            return {name: to_json(field) for name, field in vars(value).items()}
        return value

    layers: list[Any] = []
    previous_layer = None
    for layer in plan.layers:
        # Deep models have many layers with one structure. Repetitions are stored as null.
        layers.append(None if layer is previous_layer else to_json(layer))
        previous_layer = layer
    header = to_json(replace(plan, layers=())) | {"layers": layers}
    return folder.save({NUMBERS: np.concatenate(arrays)}, header, "the plan")


def read_plan(folder: ArrayFolder) -> RankPlan:
    """Return the plan in ``folder``, mapped copy-on-write. For errors see :meth:`ArrayFolder.read`."""
    header, arrays = folder.read("c")

    def from_json(value: Any) -> Any:
        if isinstance(value, list):
            return tuple(map(from_json, value))
        if not isinstance(value, Mapping):
            return value
        if "at" in value:
            return arrays[NUMBERS][slice(*value["at"])]
        return {name: from_json(field) for name, field in value.items()}

    plan = from_json(header)
    layers = list[HaloLayer]()
    for fields in plan.pop("layers"):
        if fields is None:
            layers.append(layers[-1])
            continue
        if fields["cover"] is not None:
            fields["cover"] = _read_cover(fields["cover"])
        layers.append(HaloLayer(**fields))
    covers = tuple(map(_read_cover, plan.pop("covers")))
    return RankPlan(layers=tuple(layers), covers=covers, **plan)


def _read_cover(fields: Mapping[str, Any]) -> Cover:
    return Cover(**{**fields, "layer": HaloLayer(**fields["layer"])})


@final
class PlanCache:
    """One rank's plans in the dataset's ``cache`` on disk, and the column rows fetched for them.

    Methods are neither collective nor thread-safe. ``facts`` are all other inputs to the plans as JSON
    values, equal on all ranks. The first failed write is logged, and later calls do not try again.
    """

    def __init__(self, cache: ArrayCache, facts: Mapping[str, Any], topology: Topology) -> None:
        text = json.dumps({**facts, "version": VERSION}, sort_keys=True)
        key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        # The entry cannot be evicted as long as the cache object lives.
        self._cache = cache
        self.folder = cache.entry("cobatches", key)
        self._topology = topology
        self._can_write = True

    def holds(self, step: int) -> bool:
        """Return whether the plan for ``step`` exists and is undamaged. Damage is logged."""
        return self._get_folder(step).find() is not None

    def read(self, step: int) -> RankPlan:
        """Return the mapped plan for ``step``. Raise StorageError if it is missing or damaged."""
        return read_plan(self._get_folder(step))

    def write(self, step: int, plan: RankPlan) -> bool:
        """Store the plan for ``step`` and return whether it was written.

        An existing plan is replaced even if it is undamaged. Other ranks may have lost theirs, and only plans
        that were made together fit together.
        """
        self._can_write = self._can_write and write_plan(self._get_folder(step), plan)
        return self._can_write

    def accepts(self, column: Column, ids: Array) -> bool:
        """Return whether to store the rows for ``ids``. They must be read-only, some from other servers."""
        first_row, end_row = column.bounds[self._topology.server : self._topology.server + 2]
        has_foreign = bool(((ids < first_row) | (ids >= end_row)).any())
        return has_foreign and not column.writable and column.row_bytes > 0

    def read_rows(self, column: Column, ids: Array) -> Tensor | None:
        """Return the stored (K, *row) rows, mapped copy-on-write, or None if they are missing or damaged.

        Damage is logged. The checksum is verified, so the rows are in the page cache when they are used.
        """
        entry = self._get_row_folder(column, ids).find(mode="c")
        if entry is None:
            return None
        _, arrays = entry
        return view_as_tensor(arrays[ROWS], column.info)

    def write_rows(self, column: Column, ids: Array, rows: Tensor) -> bool:
        """Store the (K, *row) ``rows`` and return whether they were written."""
        arrays = {ROWS: np.ascontiguousarray(view_as_numpy(rows))}
        description = f"the fetched rows of {column.name!r}"
        self._can_write = self._can_write and self._get_row_folder(column, ids).save(arrays, {}, description)
        return self._can_write

    def _get_folder(self, step: int) -> ArrayFolder:
        return self.folder.subfolder(f"{step}-{self._topology.rank}")

    def _get_row_folder(self, column: Column, ids: Array) -> ArrayFolder:
        digest = hashlib.blake2b(np.ascontiguousarray(ids, np.int64).data, digest_size=16)
        digest.update(json.dumps([column.name, column.info.dtype, *column.info.row_shape]).encode())
        return self.folder.subfolder(f"rows-{self._topology.rank}").subfolder(digest.hexdigest())
