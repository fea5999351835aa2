"""``node_split`` and ``edge_split``: which of the marked rows this rank works on (DistDGL, two levels)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from dglx_dist.comm.session import current_session
from dglx_dist.comm.topology import Topology
from dglx_dist.data.partition.hierarchical import TRAINER_ID
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_tensor import DistTensor, opened_graph
from dglx_dist.graph.ids import as_array, check_ids, to_tensor
from dglx_dist.graph.partition_book import PartitionBook
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Array, EdgeType


def quotas(num_ids: int, topology: Topology) -> list[Array]:
    """Return how many of ``num_ids`` each rank takes, server by server; all differ by at most 1."""
    base, extra = divmod(num_ids, topology.world_size)
    by_position = np.full(topology.world_size, base, dtype=np.int64)
    by_position[:extra] += 1
    sizes = [len(topology.ranks_of_server(server)) for server in range(topology.num_servers)]
    return np.split(by_position, np.cumsum(sizes)[:-1])


def range_of_server(num_ids: int, topology: Topology, server: int) -> tuple[int, int]:
    """Return the positions [first, last) of the sorted ids that the ranks of ``server`` take together."""
    totals = [int(quota.sum()) for quota in quotas(num_ids, topology)]
    return sum(totals[:server]), sum(totals[: server + 1])


def share_of_rank(
    ids: Array, quota: Array, local_rank: int, seed: int, preferred: Array | None = None
) -> Array:
    """Deal the ids of one server to its ranks at random, the same deal on every rank.

    Args:
        ids: (n,) int64 ids that the ranks of the server share.
        quota: (ranks,) int64 how many each of them takes; sums to n.
        local_rank: Whose share to return.
        seed: Of the deal; the server's number, so that servers differ and runs repeat.
        preferred: (n,) the local rank that would like each id, or one that does not exist for "any";
            honoured up to the quotas.

    Returns:
        (``quota[local_rank]``,) int64, ascending.
    """
    order = np.random.default_rng(seed).permutation(len(ids))
    owner = np.repeat(np.arange(len(quota)), quota)
    if preferred is not None:
        owner = _honour(preferred[order], quota)
    return np.sort(ids[order[owner == local_rank]])


def even_quota(num_ids: int, num_ranks: int) -> Array:
    """Return (``num_ranks``,) counts that sum to ``num_ids`` and differ by at most 1."""
    base, extra = divmod(num_ids, num_ranks)
    return base + (np.arange(num_ranks) < extra).astype(np.int64)


def _honour(preferred: Array, quota: Array) -> Array:
    """Give each position to who prefers it while that rank's quota lasts, and the rest to who has room."""
    owner = np.full(len(preferred), -1, dtype=np.int64)
    for rank, size in enumerate(quota):
        owner[np.flatnonzero(preferred == rank)[:size]] = rank
    room = quota - np.bincount(owner[owner >= 0], minlength=len(quota))
    owner[owner < 0] = np.repeat(np.arange(len(quota)), room)
    return owner


Marked: TypeAlias = DistTensor | Tensor | Array | Sequence[Any]
"""A mask of one value per node (or edge), or ids that cannot be taken for one; see :func:`marked_ids`."""


@dataclass(frozen=True)
class _Trainers:
    """Which trainer would like each row, and how many trainers the graph was cut for, if it was."""

    of_row: DistTensor | Tensor | Array
    number: int | None


def node_split(
    nodes: Marked,
    partition_book: PartitionBook | None = None,
    ntype: str = NODE_TYPE,
    rank: int | None = None,
    force_even: bool = True,
    node_trainer_ids: DistTensor | Tensor | Array | None = None,
) -> Tensor:
    """Return the marked nodes that a rank works on. Shares are disjoint and make up the whole.

    Not collective; the same arguments give the same answer on every rank.

    Args:
        nodes: Mask over all nodes of ``ntype`` or ids of some, see :func:`marked_ids`.
        partition_book: ``g.get_partition_book()``; None: the DistTensor's or the last opened graph's.
        ntype: Node type.
        rank: Whose share; None: this rank's.
        force_even: Shares differ by at most one over all ranks: the marked nodes are cut into runs of ids,
            one per server, so that a few may be another server's. Else each server works on its own.
            Inside a server they are dealt at random with the server's number as the seed.
        node_trainer_ids: (N,) rank that would like each node, numbered over all ranks (or over a multiple of
            them), as ``g.ndata["trainer_id"]`` of a graph that was cut for trainers; honoured inside a
            server as far as the shares stay even.

    Returns:
        (n,) int64 ids, ascending.

    Raises:
        ConfigError: ``nodes`` is neither a mask nor ids, or could be both; no graph is open; an unknown type.
        IndexError: an id is out of range.
    """
    book = _book(nodes, partition_book)
    trainers = None if node_trainer_ids is None else _Trainers(node_trainer_ids, book.num_trainers)
    return _split(nodes, book.node_bounds(ntype), rank, force_even, trainers)


def edge_split(
    edges: Marked,
    partition_book: PartitionBook | None = None,
    etype: str | EdgeType = EDGE_TYPE,
    rank: int | None = None,
    force_even: bool = True,
    edge_trainer_ids: DistTensor | Tensor | Array | None = None,
) -> Tensor:
    """Return the marked edges that a rank works on; as :func:`node_split`."""
    book = _book(edges, partition_book)
    trainers = None if edge_trainer_ids is None else _Trainers(edge_trainer_ids, book.num_trainers)
    return _split(edges, book.edge_bounds(etype), rank, force_even, trainers)


def marked_ids(marked: Marked, count: int) -> Array:
    """Return the ids that a mask or a list of ids names, ascending.

    DGL takes whatever it is given for a mask, so that a list of ids silently marks the wrong rows. Here

    * bool values are a mask and must be ``count`` many;
    * integers of which one is above 1, or that are not ``count`` many, are ids and must be distinct;
    * ``count`` integers that are all 0 or 1 are a mask, as DGL stores masks, if one value repeats. What is
      left, such as ``[0, 1]`` over two rows, could be both and is refused.

    Args:
        marked: Mask or ids, one-dimensional.
        count: Nodes or edges of the type.

    Raises:
        ConfigError: it is neither, or could be both, or ids repeat.
        IndexError: an id is out of range.
    """
    if isinstance(marked, DistTensor) and marked.dtype == torch.bool and marked.shape == (count,):
        return marked.kvstore.nonzero(marked.kvstore_key)
    values = marked.to_local().numpy() if isinstance(marked, DistTensor) else as_array(marked)
    if values.ndim != 1:
        raise ConfigError(f"the marked rows have shape {values.shape}; give a mask or ids of one dimension")
    if values.dtype == np.bool_:
        if len(values) != count:
            raise ConfigError(f"the mask has {len(values)} elements for {count} rows; give one per row")
        return np.flatnonzero(values)
    if len(values) == 0:
        return np.empty(0, dtype=np.int64)
    if values.dtype.kind not in "iu":
        raise ConfigError(f"the marked rows are {values.dtype}; give a bool mask or integer ids")
    looks_like_mask = len(values) == count and values.min() >= 0 and values.max() <= 1
    ids = np.unique(values.astype(np.int64))
    if looks_like_mask and len(ids) < len(values):
        return np.flatnonzero(values)
    if looks_like_mask:
        raise ConfigError(f"{values.tolist()} over {count} rows could be a mask or ids; give a bool mask")
    check_ids(values.astype(np.int64), count, "the rows to split")
    if len(ids) < len(values):
        raise ConfigError(f"{len(values) - len(ids)} of the {len(values)} ids are repeated; give each once")
    return ids


def split_ids(
    ids: Array, bounds: Array, topology: Topology, *, force_even: bool = True, trainer_of: Array | None = None
) -> Array:
    """Return the share of ``topology.rank``; pure arithmetic.

    Args:
        ids: (n,) int64, ascending and distinct.
        bounds: (S + 1,) int64 id ranges of the servers.
        topology: Who the ranks are.
        force_even: As for :func:`node_split`.
        trainer_of: (n,) rank that would like each of ``ids``, or None.
    """
    server = topology.server
    ranks = topology.ranks_of_server(server)
    if force_even:
        first, last = range_of_server(len(ids), topology, server)
        quota = quotas(len(ids), topology)[server]
    else:
        first, last = (int(at) for at in np.searchsorted(ids, bounds[server : server + 2]))
        quota = even_quota(last - first, len(ranks))
    preferred = None if trainer_of is None else trainer_of[first:last] - ranks[0]
    if preferred is not None and not force_even:
        quota = _as_preferred(preferred, quota)
    return share_of_rank(ids[first:last], quota, topology.local_rank, server, preferred)


def _split(
    marked: Marked,
    bounds: Array,
    rank: int | None,
    force_even: bool,
    trainers: _Trainers | None,
) -> Tensor:
    topology = (
        marked.kvstore.session.topology if isinstance(marked, DistTensor) else current_session().topology
    )
    if rank is not None:
        topology = Topology(rank, topology.world_size, topology.server_of_rank)
    ids = marked_ids(marked, int(bounds[-1]))
    trainer_of = None if trainers is None else _requested(trainers, ids, int(bounds[-1]), topology.world_size)
    return to_tensor(split_ids(ids, bounds, topology, force_even=force_even, trainer_of=trainer_of))


def _requested(wanted: _Trainers, ids: Array, count: int, world_size: int) -> Array:
    """Return the rank that each of ``ids`` prefers; several trainers fold onto one rank."""
    of_row = wanted.of_row
    trainers = of_row.to_local().numpy() if isinstance(of_row, DistTensor) else as_array(of_row)
    if trainers.shape != (count,) or trainers.dtype.kind not in "iu":
        raise ConfigError(
            f"the trainer ids are {trainers.dtype} of shape {trainers.shape}; give one integer "
            f"for each of the {count} rows"
        )
    # The last trainers may have no row of this type, so the largest id does not tell how many there are.
    is_of_dataset = isinstance(of_row, DistTensor) and of_row.name == TRAINER_ID
    known = wanted.number if is_of_dataset and wanted.number else 0
    num_trainers = max(world_size, known, int(trainers.max(initial=-1)) + 1)
    if num_trainers % world_size:
        raise ConfigError(
            f"trainer ids go up to {num_trainers - 1} but there are {world_size} ranks; partition for a "
            "multiple of the ranks, or leave the trainer ids out"
        )
    return trainers[ids].astype(np.int64) * world_size // num_trainers


def _as_preferred(preferred: Array, even: Array) -> Array:
    """Return the counts that give everyone what it prefers, and the even ones' shape for what nobody does."""
    known = preferred[(preferred >= 0) & (preferred < len(even))]
    wanted = np.bincount(known, minlength=len(even))
    return wanted + even_quota(len(preferred) - len(known), len(even))


def _book(marked: Marked, book: PartitionBook | None) -> PartitionBook:
    if book is not None:
        return book
    if isinstance(marked, DistTensor):
        return marked.part_policy.partition_book
    return opened_graph().get_partition_book()
