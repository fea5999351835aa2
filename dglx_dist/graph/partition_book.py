"""Row ids, and who owns the rows: partition book, row owners, and parts on servers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeAlias, TypeVar, final

import numpy as np
import torch
from torch import Tensor

from dglx_dist.comm.topology import Topology
from dglx_dist.comm.wire import FRAME_BYTES
from dglx_dist.errors import ConfigError
from dglx_dist.graph.row_kernels import check_ids
from dglx_dist.internals.pytorch import ids_on_host
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Array, EdgeType, IdRanges, format_type


@final
class RowOwners:
    """Assigns one owner rank to every row. A server's ranks own even, contiguous runs of its rows.

    All ranks on a server can read and overwrite its rows. Only the owner makes updates that depend on the old
    value, such as an optimizer step, so that no update is lost.

    ``bounds`` are (S + 1,) int64. Server s has the rows ``bounds[s]:bounds[s + 1]``.
    """

    def __init__(self, bounds: Array, topology: Topology) -> None:
        if bounds.shape != (topology.num_servers + 1,):
            raise ConfigError(
                f"bounds have shape {bounds.shape} for {topology.num_servers} servers, but "
                f"must have shape ({topology.num_servers + 1},)"
            )
        self._bounds = bounds
        self._topology = topology

    @cached_property
    def starts(self) -> Array:
        """(W + 1,) int64: each rank's first row, and the total row count.

        Rank r owns the rows ``starts[r]:starts[r + 1]``. A server's ranks share its rows evenly.
        """
        starts = []
        for server in range(self._topology.num_servers):
            first_row = int(self._bounds[server])
            num_rows = int(self._bounds[server + 1]) - first_row
            num_ranks = len(self._topology.ranks_of_server(server))
            for local_rank in range(num_ranks):
                starts.append(first_row + (num_rows * local_rank) // num_ranks)
        return np.array([*starts, self._bounds[-1]], dtype=np.int64)

    def find_rank(self, ids: Array) -> Array:
        """Return the (K,) int64 ranks that own the (K,) int64 ``ids``. The ids must be in range."""
        # Search from the right. If several ranks start at the same row, only the last one owns any.
        return np.searchsorted(self.starts, ids, side="right") - 1

    def get_range(self, rank: int) -> tuple[int, int]:
        """Return the first row that ``rank`` owns, and the row after its last."""
        return int(self.starts[rank]), int(self.starts[rank + 1])


K = TypeVar("K", bound=Hashable)


class PartitionBook:
    """Tells owners and local ids for nodes and edges, like DGL's RangePartitionBook.

    A partition is what one server owns. Each partition has a contiguous range of ids within a type.
    *Homogeneous* ids number all nodes (or all edges) across types: partition by partition, and type by type
    inside a partition. Results are (K,) int64 tensors in the order of the given ids.

    Args:
        node_bounds, edge_bounds: Type to (Q + 1,) int64 bounds. Partition q owns the ids ``[q]:[q + 1]``.
        partid: This rank's partition.
        num_trainers: Number of trainers in ``trainer_id``, or None if the graph was not cut for them.
    """

    def __init__(
        self,
        node_bounds: Mapping[str, Array],
        edge_bounds: Mapping[EdgeType, Array],
        partid: int,
        num_trainers: int | None = None,
    ) -> None:
        self._nodes = _Ranges(node_bounds, "nodes")
        self._edges = _Ranges(edge_bounds, "edges")
        self.partid = partid
        self.num_trainers = num_trainers

    @property
    def ntypes(self) -> list[str]:
        """Node types. A type's position is its type id."""
        return list(self._nodes.types)

    @property
    def canonical_etypes(self) -> list[EdgeType]:
        """Edge types as triples. A type's position is its type id."""
        return list(self._edges.types)

    @property
    def etypes(self) -> list[str]:
        return [relation for _, relation, _ in self._edges.types]

    def num_partitions(self) -> int:
        return self._nodes.num_partitions

    def metadata(self) -> list[dict[str, int]]:
        """Return one record per partition: ``machine_id``, ``num_nodes`` and ``num_edges`` over all types."""
        num_nodes = np.diff(self._nodes.ends).tolist()
        num_edges = np.diff(self._edges.ends).tolist()
        records = []
        for part, (nodes, edges) in enumerate(zip(num_nodes, num_edges, strict=True)):
            records.append({"machine_id": part, "num_nodes": nodes, "num_edges": edges})
        return records

    def num_nodes(self, ntype: str | None = None) -> int:
        return self._nodes.total(ntype)

    def num_edges(self, etype: str | EdgeType | None = None) -> int:
        return self._edges.total(None if etype is None else self.to_canonical_etype(etype))

    def to_canonical_etype(self, etype: str | EdgeType) -> EdgeType:
        return resolve_etype(etype, self._edges.types)

    def homogeneous(self) -> PartitionBook:
        """Return the book for homogeneous ids. It has one node type and one edge type."""
        return PartitionBook({NODE_TYPE: self._nodes.ends}, {EDGE_TYPE: self._edges.ends}, self.partid)

    def node_bounds(self, ntype: str = NODE_TYPE) -> Array:
        return self._nodes.bounds(ntype)

    def edge_bounds(self, etype: str | EdgeType = EDGE_TYPE) -> Array:
        return self._edges.bounds(self.to_canonical_etype(etype))

    def nid2partid(self, nids: Ids, ntype: str = NODE_TYPE) -> Tensor:
        """Return the partition that owns each node. Raise IndexError if an id does not exist."""
        return self._nodes.owner(nids, ntype)

    def eid2partid(self, eids: Ids, etype: str | EdgeType = EDGE_TYPE) -> Tensor:
        """Return the partition that owns each edge. It is the partition that owns the edge's destination."""
        return self._edges.owner(eids, self.to_canonical_etype(etype))

    def partid2nids(self, partid: int, ntype: str = NODE_TYPE) -> Tensor:
        """Return all node ids in a partition, ascending. Raise ConfigError if there is no such partition."""
        return self._nodes.list_ids(partid, ntype)

    def partid2eids(self, partid: int, etype: str | EdgeType = EDGE_TYPE) -> Tensor:
        return self._edges.list_ids(partid, self.to_canonical_etype(etype))

    def nid2localnid(self, nids: Ids, partid: int, ntype: str = NODE_TYPE) -> Tensor:
        """Return ids relative to the partition's first node. Raise IndexError if an id lies outside it."""
        return self._nodes.local(nids, partid, ntype)

    def eid2localeid(self, eids: Ids, partid: int, etype: str | EdgeType = EDGE_TYPE) -> Tensor:
        return self._edges.local(eids, partid, self.to_canonical_etype(etype))

    def map_to_per_ntype(self, ids: Ids) -> tuple[Tensor, Tensor]:
        """Split homogeneous node ids into (type id, id within the type)."""
        return self._nodes.split_types(ids)

    def map_to_homo_nid(self, ids: Ids, ntype: str = NODE_TYPE) -> Tensor:
        """Turn ids within ``ntype`` into homogeneous node ids."""
        return self._nodes.join_types(ids, ntype)

    def map_to_per_etype(self, ids: Ids) -> tuple[Tensor, Tensor]:
        return self._edges.split_types(ids)

    def map_to_homo_eid(self, ids: Ids, etype: str | EdgeType = EDGE_TYPE) -> Tensor:
        return self._edges.join_types(ids, self.to_canonical_etype(etype))


def resolve_etype(etype: str | EdgeType | None, etypes: Sequence[EdgeType]) -> EdgeType:
    """Return the edge type in ``etypes`` that ``etype`` names.

    ``etype`` is a triple, a relation, ``source:relation:destination``, or None for the only edge type. Raise
    ConfigError if no edge type matches, or several do.
    """
    candidates = [triple for triple in etypes if etype is None or etype in (triple, triple[1])]
    if not candidates:
        candidates = [triple for triple in etypes if format_type(triple) == etype]
    if len(candidates) == 1:
        return candidates[0]

    names = ", ".join(map(format_type, etypes))
    if etype is None:
        raise ConfigError(f"the graph has the edge types {names}. Choose one with etype=.")
    problem = "several edge types have the relation" if candidates else "there is no edge type"
    raise ConfigError(f"{problem} {etype!r}. Use one of {names}.")


class _Ranges(Generic[K]):
    """Id ranges for nodes or for edges. They implement the methods of :class:`PartitionBook`."""

    def __init__(self, bounds: Mapping[K, Array], what: str) -> None:
        self._what = what
        self.types = tuple(bounds)
        self._bounds = {key: np.asarray(value, dtype=np.int64) for key, value in bounds.items()}
        self.num_partitions = len(next(iter(self._bounds.values()))) - 1
        self._ids = IdRanges.from_offsets([*self._bounds.values()])

    def bounds(self, key: K) -> Array:
        if key not in self._bounds:
            types = ", ".join(map(repr, self.types))
            raise ConfigError(f"there are no {self._what} of type {key!r} (known: {types})")
        return self._bounds[key]

    @property
    def ends(self) -> Array:
        """(P + 1,) first homogeneous id in each partition, and the end."""
        return np.concatenate([[0], np.cumsum(self._ids.counts.sum(axis=0))])

    def total(self, key: K | None) -> int:
        return int(self._ids.counts.sum() if key is None else self.bounds(key)[-1])

    def _check_ids(self, ids: Ids, key: K) -> Array:
        return as_ids(ids, self.total(key), f"the {self._what} of type {key!r}")

    def owner(self, ids: Ids, key: K) -> Tensor:
        rows = self._check_ids(ids, key)
        return torch.from_numpy(np.searchsorted(self.bounds(key), rows, side="right") - 1)

    def list_ids(self, partition: int, key: K) -> Tensor:
        return torch.arange(*self._get_range(partition, key))

    def local(self, ids: Ids, partition: int, key: K) -> Tensor:
        first, last = self._get_range(partition, key)
        local_ids = self._check_ids(ids, key) - first
        check_ids(local_ids, last - first, f"partition {partition} (ids counted from its first, {first})")
        return torch.from_numpy(local_ids)

    def split_types(self, ids: Ids) -> tuple[Tensor, Tensor]:
        homogeneous_ids = as_ids(ids, self.total(None), f"the {self._what} of all types")
        type_ids, ids_within_type = self._ids.to_typed(homogeneous_ids)
        return torch.from_numpy(type_ids), torch.from_numpy(ids_within_type)

    def join_types(self, ids: Ids, key: K) -> Tensor:
        type_id = self.types.index(key)
        return torch.from_numpy(self._ids.from_typed(type_id, self._check_ids(ids, key)))

    def _get_range(self, partition: int, key: K) -> tuple[int, int]:
        bounds = self.bounds(key)
        if not 0 <= partition < self.num_partitions:
            raise ConfigError(f"there is no partition {partition}, only 0 to {self.num_partitions - 1}.")
        return int(bounds[partition]), int(bounds[partition + 1])


@dataclass(frozen=True)
class Placement:
    """Assigns a dataset's parts to servers in contiguous blocks that are as even as possible."""

    num_parts: int
    topology: Topology

    def __post_init__(self) -> None:
        servers = self.topology.num_servers
        if self.num_parts < servers:
            raise ConfigError(
                f"the dataset has {self.num_parts} part(s) but the run has {servers} servers. "
                f"Partition it again with `dglx partition DATA --parts {servers} --out DIR`, "
                f"or start {self.num_parts} server(s)."
            )

    @cached_property
    def server_of_part(self) -> Array:
        """(P,) int64: the server that holds each part. Part p is on server p * S // P."""
        return np.arange(self.num_parts, dtype=np.int64) * self.topology.num_servers // self.num_parts

    def parts_of_server(self, server: int) -> range:
        """Return the consecutive parts on ``server``. There is at least one."""
        first, end = np.searchsorted(self.server_of_part, [server, server + 1], side="left")
        return range(int(first), int(end))

    @property
    def local_parts(self) -> range:
        return self.parts_of_server(self.topology.server)

    def server_offsets(self, offsets: Array) -> Array:
        """Merge (P + 1,) int64 id offsets by part into (S + 1,) int64 offsets by server."""
        servers = np.arange(self.topology.num_servers + 1)
        first_parts = np.searchsorted(self.server_of_part, servers, side="left")
        return np.asarray(offsets, dtype=np.int64)[first_parts]

    @cached_property
    def serving_ranks(self) -> tuple[int, ...]:
        """For each server, the rank that this rank asks for rows. For its own server, that is this rank.

        To spread the load, local rank i asks the other server's local rank i modulo the number of ranks
        there.
        """
        ranks_by_server = map(self.topology.ranks_of_server, range(self.topology.num_servers))
        return tuple(ranks[self.topology.local_rank % len(ranks)] for ranks in ranks_by_server)


MAX_MESSAGE_BYTES = FRAME_BYTES
"""Maximum bytes that the rows in one message take. One frame holds them. More rows need several messages, so
that some are copied while others are in transit. Replies of 1 MiB cost the serving rank 1.5 times as much.
"""


def rows_per_message(row_bytes: int) -> int:
    """Return how many rows with their ids fit in one message, at least 1. A row has ``row_bytes`` bytes."""
    return max(1, MAX_MESSAGE_BYTES // max(row_bytes, 8))


def split_ids(
    ids: Array, bounds: Array, topology: Topology, *, force_even: bool = True, trainer_of: Array | None = None
) -> Array:
    """Divide ``ids`` among all ranks, and return the ids that ``topology.rank`` gets.

    Each id goes to one rank. A server assigns its ids to its ranks at random. The random seed is the server's
    number, so every rank can compute the same result.

    Args:
        ids: (n,) int64 distinct ids, ascending.
        bounds: (S + 1,) int64. Server s owns the ids ``bounds[s]`` to ``bounds[s + 1] - 1``.
        topology: Ranks by server, and the rank whose ids are returned.
        force_even: Whether any two ranks may differ by at most one id. A server then gets a contiguous range
            of ``ids``, and may own only some of them. Otherwise each server divides the ids that it owns.
        trainer_of: (n,) preferred rank for each id, or None if there are no preferences. With ``force_even``,
            an id goes to another rank if its preferred rank is already full.

    Returns:
        (k,) int64 ids, ascending.
    """
    server = topology.server
    ranks = topology.ranks_of_server(server)
    # This server's ids are ids[first:end]. Local rank r gets quota[r] ids from this range.
    if force_even:
        quota_of_all = _compute_even_quota(len(ids), topology.world_size)
        quota = quota_of_all[ranks[0] : ranks[-1] + 1]
        first = int(quota_of_all[: ranks[0]].sum())
        end = first + int(quota.sum())
    else:
        first, end = np.searchsorted(ids, bounds[server : server + 2]).tolist()
        quota = _compute_even_quota(end - first, len(ranks))

    order = np.random.default_rng(server).permutation(end - first)
    if trainer_of is None:
        local_ranks = np.repeat(np.arange(len(ranks)), quota)
    else:
        preferred = trainer_of[first:end] - ranks[0]
        if not force_even:
            # Every id with a preferred rank on this server goes to that rank.
            is_local = (preferred >= 0) & (preferred < len(ranks))
            num_others = int(np.count_nonzero(~is_local))
            quota = np.bincount(preferred[is_local], minlength=len(ranks))
            quota = quota + _compute_even_quota(num_others, len(ranks))
        local_ranks = _assign_preferred(preferred[order], quota)
    positions = order[local_ranks == topology.local_rank]
    return np.sort(ids[first:end][positions])


def _compute_even_quota(num_ids: int, num_ranks: int) -> Array:
    """Return (``num_ranks``,) counts that sum to ``num_ids`` and differ by at most 1."""
    base, extra = divmod(num_ids, num_ranks)
    return base + (np.arange(num_ranks) < extra).astype(np.int64)


def _assign_preferred(preferred: Array, quota: Array) -> Array:
    """Assign the (n,) ids to local ranks. Rank r gets ``quota[r]`` ids, first those that prefer rank r."""
    local_ranks = np.full(len(preferred), -1, dtype=np.int64)
    for local_rank, num_ids in enumerate(quota):
        positions = np.flatnonzero(preferred == local_rank)
        local_ranks[positions[:num_ids]] = local_rank
    # The ids without a rank fill up the quotas.
    num_assigned = np.bincount(local_ranks[local_ranks >= 0], minlength=len(quota))
    local_ranks[local_ranks < 0] = np.repeat(np.arange(len(quota)), quota - num_assigned)
    return local_ranks


Ids: TypeAlias = Tensor | Array | Sequence[int] | int | slice
"""Integers, a list of integers, one integer, a slice, or a mask over all rows: bool, or uint8 in a tensor."""


def as_array(values: Tensor | Array | Sequence[int] | int) -> Array:
    """Return ``values`` as a NumPy array, without a copy if possible."""
    if isinstance(values, Tensor):
        return ids_on_host(values).numpy()
    return np.asarray(values)


def as_ids(index: Ids, count: int, what: str) -> Array:
    """Return the ids that ``index`` names, each in [0, ``count``). Messages call the rows ``what``.

    Raises IndexError if an id is out of range, and as :func:`integer_ids` does.
    """
    ids = integer_ids(index, count, what)
    check_ids(ids, count, what)
    return ids


def integer_ids(index: Ids, count: int, what: str) -> Array:
    """Return the (K,) int64 ids that ``index`` names. Only a mask and a slice are compared with ``count``.

    Raises IndexError if a mask does not have ``count`` elements. Also raises it if ``index`` is not
    one-dimensional, has a dtype other than integer or bool, or has dtype uint8 and could be a mask or ids.
    """
    if isinstance(index, slice):
        return np.arange(*index.indices(count), dtype=np.int64)

    ids = np.atleast_1d(as_array(index))
    if ids.dtype == np.uint8 and ids.ndim == 1:
        ids = _read_bytes(ids, count, what, is_tensor=isinstance(index, Tensor))
    if ids.ndim != 1:
        raise IndexError(
            f"{what} is indexed with an array of shape {ids.shape}. Use one dimension, such as "
            "ids.squeeze(1) after nonzero()."
        )
    if ids.dtype == np.bool_:
        if len(ids) != count:
            raise IndexError(f"{what} has {count} rows but the mask has {len(ids)} elements")
        return np.flatnonzero(ids)
    # An empty list becomes an array of floats, so its dtype is not checked.
    if len(ids) == 0:
        return np.empty(0, dtype=np.int64)
    if ids.dtype.kind not in "iu":
        raise IndexError(f"{what} is indexed with {ids.dtype} values. Use integers or a bool mask.")
    return np.ascontiguousarray(ids, dtype=np.int64)


def _read_bytes(values: Array, count: int, what: str, *, is_tensor: bool) -> Array:
    """Return a uint8 index as a bool mask for tensors, as torch does, or as ids for arrays, as NumPy does."""
    looks_like_mask = len(values) == count and (is_tensor or values.max(initial=0) <= 1)
    if looks_like_mask != is_tensor:
        raise IndexError(
            f"{what} has {count} rows and is indexed with {len(values)} uint8 values, which "
            "torch reads as a mask and NumPy as ids. Convert a mask to bool, or ids to int64."
        )
    return values.astype(np.bool_) if is_tensor else values


def as_ids_or_all(index: Ids | None, count: int, what: str) -> Array:
    """Return the ids that ``index`` names, as :func:`as_ids`. None and DGL's ``"__ALL__"`` name all ids."""
    if index is None or isinstance(index, str):
        return np.arange(count, dtype=np.int64)
    return as_ids(index, count, what)
