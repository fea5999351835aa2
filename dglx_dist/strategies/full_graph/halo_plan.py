"""Plans of full-graph steps: records, the smallest exchange of sums, and files beside the dataset.

A plan on disk is a folder of one array, see :mod:`dglx_dist.data.storage.arrays`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass, replace
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
"""(rank, rows received from it), ascending by rank, without ranks that send nothing."""

Sent: TypeAlias = tuple[tuple[int, Array], ...]
"""(rank, (n,) int64 own rows sent to it), ascending by rank, without ranks that receive nothing."""


@final
@dataclass(frozen=True, kw_only=True)
class HaloLayer:
    """One layer's block on one rank, l of ``1..L``.

    The sources are the rank's own rows of the previous layer, followed by the halo: rows of other ranks,
    grouped by rank in ascending order and ascending by id within a rank. The targets are the first
    ``targets`` own rows. The block holds each in-edge of every target once, and no other edges.
    """

    own_rows: int
    """Rows of layer l - 1 that this rank holds: at layer 1 rows of the features."""
    targets: int
    """Rows of layer l that this rank computes; at most :attr:`own_rows`."""
    indptr: Array
    """(targets + 1,) int64; the in-edges of target i are at ``indptr[i]:indptr[i + 1]``."""
    indices: Array
    """(E,) int64 sources: own rows below :attr:`own_rows`, then positions in the halo."""
    edge_ids: Array
    """(E,) int64 global edge ids."""
    halo_nodes: Array
    """(n_halo,) int64 global ids of the halo rows, in the order of arrival."""
    receive: Received
    """Ranks that send the halo; the counts add up to n_halo."""
    send: Sent
    """Own rows that other ranks need, ordered by id; as many as the peer's :attr:`receive` says."""
    cover: Cover | None = None
    """The exchange for sums over the in-edges; None: that of the halo, as for everything else."""

    @property
    def num_sources(self) -> int:
        return self.own_rows + len(self.halo_nodes)

    def halo_of(self, rank: int) -> Array:
        """Return the (n,) ascending int64 global ids of the halo rows that ``rank`` holds."""
        first = 0
        for other, count in self.receive:
            if other == rank:
                return self.halo_nodes[first : first + count]
            first += count
        return self.halo_nodes[:0]


@final
@dataclass(frozen=True, kw_only=True)
class Cover:
    """A :class:`HaloLayer` with the same sums over in-edges, for which fewer rows are sent."""

    layer: HaloLayer
    """Behind the own rows are the partial sums for other ranks. Its halo are source rows, and partial sums of
    other ranks with one edge each; ``edge_ids`` are positions among the in-edges, -1 for a partial sum."""
    indptr: Array
    """(m + 1,) int64; the summands of partial sum i are at ``indptr[i]:indptr[i + 1]``."""
    indices: Array
    """(e,) int64 own rows."""
    send_edges: Sent
    """In-edges that other ranks sum, in the order of their :attr:`indices`."""
    receive_edges: Received


@final
@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """One rank's share of a full-graph step.

    Rows are sorted by the last layer that needs them (latest first), then by id. So the rows of layer l are a
    prefix of the rows of layer l - 1, and their in-edges a prefix of the in-edges of layer l - 1.
    """

    nodes: Array
    """(n,) int64 global ids of the feature rows of this rank."""
    layers: tuple[HaloLayer, ...]
    """The L layers, input layer first."""
    external_nodes: int
    """|R_i^0 without I_i|: feature rows that this server fetches from others, once."""

    @property
    def seeds(self) -> int:
        return self.layers[-1].targets

    def rows(self, level: int) -> Array:
        """Return the (n_l,) int64 global ids of this rank's rows of the output of layer ``level``, 0..L."""
        count = self.layers[0].own_rows if level == 0 else self.layers[level - 1].targets
        return self.nodes[:count]


NO_IDS: Array = np.empty(0, np.int64)


def minimum_cover(sources: Array, targets: Array, num_sources: int, num_targets: int) -> tuple[Array, Array]:
    """Return bool masks, (num_sources,) and (num_targets,), of a minimum vertex cover of the (E,) edges.

    Its size is that of a maximum matching (Koenig's theorem), so at most either number. If rows of the
    covered sources and sums for the covered targets are sent, each edge is in one of them.
    """
    shape = num_sources, num_targets
    graph = csr_matrix((np.ones(len(sources), bool), (sources, targets)), shape=shape)
    matched = maximum_bipartite_matching(graph, perm_type="column")
    mate = np.full(num_targets, -1)
    mate[matched[matched >= 0]] = np.flatnonzero(matched >= 0)
    # Steps of alternating paths, from source to source; one more node leads to all unmatched sources. No
    # path that starts there ends in an unmatched target.
    ends = np.repeat(np.arange(num_sources), np.diff(graph.indptr))
    following, unmatched = mate[graph.indices], np.flatnonzero(matched < 0)
    indices = np.concatenate([np.where(following < 0, ends, following), unmatched])
    indptr = np.append(graph.indptr, len(indices))
    paths = csr_matrix((np.ones(len(indices)), indices, indptr), shape=(num_sources + 1, num_sources + 1))
    reached = np.zeros(num_sources + 1, bool)
    reached[breadth_first_order(paths, num_sources, return_predecessors=False)] = True
    covered = np.zeros(num_targets, bool)
    covered[graph.indices[reached[ends]]] = True
    return ~reached[:num_sources], covered


@final
@dataclass(frozen=True, kw_only=True)
class PairCover:
    """What one rank sends another for a layer; positions count the halo rows that are sent without cover."""

    rows: Array
    """(n,) int64 ascending positions of the halo rows that are sent."""
    targets: Array
    """(m,) int64 ascending targets for which a partial sum is sent; only known to the receiver."""
    counts: Array
    """(m,) int64 sources in each sum, with repetitions."""
    sources: Array
    """(e,) int64 positions of the halo rows in the sums, in the order of :attr:`edges`."""
    edges: Array
    """(e,) int64 in-edges of the receiver that are summed by the sender, by target; only known there."""

    def to_message(self) -> Array:
        """Return what the sender must know, as one array."""
        sizes = np.array([len(self.rows), len(self.counts), len(self.sources)], np.int64)
        return np.concatenate([sizes, self.rows, self.counts, self.sources])

    @classmethod
    def from_message(cls, rank: int, numbers: Array, num_rows: int) -> PairCover:
        """Read the :meth:`to_message` of ``rank``, to which ``num_rows`` halo rows are sent without cover.

        PeerError: they do not fit together, or name other rows.
        """
        sizes, rest = numbers[:3], numbers[3:]
        is_array = numbers.dtype == np.int64 and numbers.ndim == 1
        if is_array and len(sizes) == 3 and numbers.min() >= 0:
            rows, counts, sources = np.split(rest, np.cumsum(sizes[:2]))
            # Each number by itself first, because sums overflow.
            fits = max(sizes) <= len(rest) == sizes.sum() and max(counts, default=0) <= len(sources)
            most = max(rows.max(initial=-1), sources.max(initial=-1))
            if fits and counts.sum() == len(sources) and most < num_rows:
                return cls(rows=rows, targets=NO_IDS, counts=counts, sources=sources, edges=NO_IDS)
        raise PeerError(
            f"rank {rank} asks for partial sums of rows that this rank does not send it; run the same "
            "version on all ranks, on the same files"
        )


def find_covers(layer: HaloLayer) -> dict[int, PairCover]:
    """Return, by sending rank, the smallest exchange for sums over the in-edges of ``layer``."""
    target_of, first = _target_of(layer), layer.own_rows
    found: dict[int, PairCover] = {}
    for rank, count in layer.receive:
        edges = np.flatnonzero((layer.indices >= first) & (layer.indices < first + count))
        sources = layer.indices[edges] - first
        targets, target = np.unique(target_of[edges], return_inverse=True)
        is_sent, is_summed = minimum_cover(sources, target, count, len(targets))
        summed = ~is_sent[sources]
        found[rank] = PairCover(
            rows=np.flatnonzero(is_sent),
            targets=targets[is_summed],
            counts=np.bincount(target[summed], minlength=len(targets))[is_summed],
            sources=sources[summed],
            edges=edges[summed],
        )
        first += count
    return found


def build_cover(layer: HaloLayer, received: Mapping[int, PairCover], sent: Mapping[int, PairCover]) -> Cover:
    """Return the cover of ``layer`` from what it receives and sends, by ascending rank."""
    own_rows, sending, summands = layer.own_rows, list[tuple[int, Array]](), [NO_IDS]
    for rank, rows in layer.send:
        pair = sent[rank]
        sums = own_rows + np.arange(len(pair.counts))
        sending.append((rank, np.concatenate([rows[pair.rows], sums])))
        summands.append(rows[pair.sources])
        own_rows += len(sums)
    kept, position = np.ones(len(layer.indices), bool), np.arange(layer.num_sources)
    old, new, sums_at = layer.own_rows, own_rows, [NO_IDS]
    for rank, count in layer.receive:
        pair = received[rank]
        kept[pair.edges] = False
        position[old + pair.rows] = new + np.arange(len(pair.rows))
        new += len(pair.rows) + len(pair.targets)
        sums_at.append(np.arange(new - len(pair.targets), new))
        old += count
    edges, pairs = np.flatnonzero(kept), received.values()
    target = np.concatenate([_target_of(layer)[edges], *(pair.targets for pair in pairs)])
    order = np.argsort(target, kind="stable")
    sums = np.concatenate(sums_at)
    return Cover(
        layer=HaloLayer(
            own_rows=own_rows,
            targets=layer.targets,
            indptr=_offsets(np.bincount(target, minlength=layer.targets)),
            indices=np.concatenate([position[layer.indices[edges]], sums])[order],
            edge_ids=np.concatenate([edges, np.full(len(sums), -1)])[order],
            halo_nodes=np.full(new - own_rows, -1),
            receive=tuple((rank, len(pair.rows) + len(pair.targets)) for rank, pair in received.items()),
            send=tuple(sending),
        ),
        indptr=_offsets(np.concatenate([NO_IDS, *(pair.counts for pair in sent.values())])),
        indices=np.concatenate(summands),
        send_edges=tuple((rank, pair.edges) for rank, pair in received.items() if len(pair.edges)),
        receive_edges=tuple((rank, len(pair.sources)) for rank, pair in sent.items() if len(pair.sources)),
    )


def _target_of(layer: HaloLayer) -> Array:
    return np.repeat(np.arange(layer.targets), np.diff(layer.indptr))


def _offsets(counts: Array) -> Array:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


@final
class RowPositions:
    """Hash index from (n,) int64 distinct ids in [0, ``num_ids``) to their positions.

    Takes 4 bytes for each of ``num_ids`` ids, or 24 to 48 bytes per row if that is less.
    """

    def __init__(self, ids: Array, num_ids: int) -> None:
        num_slots, num_keys = compute_table_sizes(len(ids), num_ids, direct_limit=0)
        self._table = SlotTable(np.empty(num_slots, np.int32), np.empty(num_keys, np.int64))
        self._num_ids = num_ids
        fill_table(self._table, ids)

    def find(self, ids: Array) -> Array:
        """Return the (K,) int64 positions of any (K,) int64 ``ids``; -1 for ids without a row."""
        places = np.empty(len(ids), np.int64)
        _places(self._table, self._num_ids, ids, places)
        return places


@njit(cache=True, nogil=True)
def _places(table: SlotTable, num_ids: int, ids: Array, places: Array) -> None:
    for k in range(len(ids)):
        # Other ranks send ids: outside of the range they would be read beside the table.
        places[k] = find_slot(table, ids[k]) if 0 <= ids[k] < num_ids else -1


VERSION = 6
NUMBERS, ROWS = "numbers", "rows"


def write_plan(folder: ArrayFolder, plan: RankPlan) -> bool:
    """Replace ``folder`` by ``plan``, whose arrays are int64; see :meth:`ArrayFolder.save`."""
    arrays: list[Array] = []

    def flat(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            first = sum(map(len, arrays))
            arrays.append(np.ascontiguousarray(value, np.int64))
            return {"at": [first, first + len(value)]}
        if isinstance(value, tuple):
            return list(map(flat, value))
        return {name: flat(one) for name, one in vars(value).items()} if is_dataclass(value) else value

    # Deep models have many layers on one structure.
    layers = [
        None if n and layer is plan.layers[n - 1] else flat(layer) for n, layer in enumerate(plan.layers)
    ]
    head = flat(replace(plan, layers=())) | {"layers": layers}
    return folder.save({NUMBERS: np.concatenate(arrays)}, head, "the plan")


def read_plan(folder: ArrayFolder) -> RankPlan:
    """Return the plan in ``folder``, mapped copy-on-write; raises as :meth:`ArrayFolder.read`."""
    head, arrays = folder.read("c")

    def restored(value: Any) -> Any:
        if isinstance(value, list):
            return tuple(map(restored, value))
        if not isinstance(value, Mapping):
            return value
        if "at" in value:
            return arrays[NUMBERS][slice(*value["at"])]
        return {name: restored(one) for name, one in value.items()}

    plan, layers = restored(head), list[HaloLayer]()
    for layer in plan.pop("layers"):
        if layer is not None and layer["cover"] is not None:
            layer["cover"]["layer"] = HaloLayer(**layer["cover"]["layer"])
            layer["cover"] = Cover(**layer["cover"])
        layers.append(HaloLayer(**layer) if layer is not None else layers[-1])
    return RankPlan(layers=tuple(layers), **plan)


@final
class PlanCache:
    """The plans of one rank on disk, in the dataset's ``cache``, and the column rows fetched for them.

    Not collective, not thread-safe. ``facts`` are all other inputs of the plans as JSON values, equal on all
    ranks. The first failure to write is logged, and later calls do not try again.
    """

    def __init__(self, cache: ArrayCache, facts: Mapping[str, Any], topology: Topology) -> None:
        text = json.dumps({**facts, "version": VERSION}, sort_keys=True)
        key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        # The cache object keeps the entry from eviction.
        self._cache, self.folder = cache, cache.entry("cobatches", key)
        self._topology, self._can_write = topology, True

    def holds(self, step: int) -> bool:
        """Return whether the plan of ``step`` exists and is undamaged; damage is logged."""
        return self._folder_of(step).find() is not None

    def read(self, step: int) -> RankPlan:
        """Return the mapped plan of ``step``; raise StorageError if it is missing or damaged."""
        return read_plan(self._folder_of(step))

    def write(self, step: int, plan: RankPlan) -> bool:
        """Store the plan of ``step``; return whether it was written.

        An existing plan is replaced even if it is undamaged: it may stem from an earlier run whose plans
        other ranks have lost, and only plans made together fit together.
        """
        self._can_write = self._can_write and write_plan(self._folder_of(step), plan)
        return self._can_write

    def accepts(self, column: Column, ids: Array) -> bool:
        """Return whether to store the rows of ``ids``: read-only, and some from other servers."""
        first, last = column.bounds[self._topology.server : self._topology.server + 2]
        has_foreign = bool(((ids < first) | (ids >= last)).any())
        return has_foreign and not column.writable and column.row_bytes > 0

    def read_rows(self, column: Column, ids: Array) -> Tensor | None:
        """Return (K, *row), copy-on-write mapped, in the stored dtype; None if missing or damaged (logged).

        The checksum is verified, so the rows are in the page cache when they are used.
        """
        found = self._folder_of_rows(column, ids).find(mode="c")
        return view_as_tensor(found[1][ROWS], column.info) if found is not None else None

    def write_rows(self, column: Column, ids: Array, rows: Tensor) -> bool:
        """Store ``rows`` (K, *row) in the stored dtype; return whether they were written."""
        arrays, what = (
            {ROWS: np.ascontiguousarray(view_as_numpy(rows))},
            f"the fetched rows of {column.name!r}",
        )
        self._can_write = self._can_write and self._folder_of_rows(column, ids).save(arrays, {}, what)
        return self._can_write

    def _folder_of(self, step: int) -> ArrayFolder:
        return self.folder.subfolder(f"{step}-{self._topology.rank}")

    def _folder_of_rows(self, column: Column, ids: Array) -> ArrayFolder:
        digest = hashlib.blake2b(np.ascontiguousarray(ids, np.int64).data, digest_size=16)
        digest.update(json.dumps([column.name, column.info.dtype, *column.info.row_shape]).encode())
        return self.folder.subfolder(f"rows-{self._topology.rank}").subfolder(digest.hexdigest())
