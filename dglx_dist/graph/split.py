"""``node_split`` and ``edge_split``: divide selected rows among the ranks (DistDGL, two levels)."""

from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from dglx_dist.comm.session import current_session
from dglx_dist.comm.topology import Topology
from dglx_dist.data.partition.hierarchical import TRAINER_ID
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_tensor import DistTensor, get_opened_graph
from dglx_dist.graph.partition_book import PartitionBook, as_array, split_ids
from dglx_dist.graph.row_kernels import check_ids
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Array, EdgeType

T = TypeVar("T")
Marked: TypeAlias = DistTensor | Tensor | Array | Sequence[Any]
"""A mask with one value per node (or edge), or ids; see :func:`read_marked_ids`."""


def node_split(
    nodes: Marked,
    partition_book: PartitionBook | None = None,
    ntype: str = NODE_TYPE,
    rank: int | None = None,
    force_even: bool = True,
    node_trainer_ids: DistTensor | Tensor | Array | None = None,
) -> Tensor:
    """Return a rank's share of the marked nodes. Shares are disjoint and cover all marked nodes.

    Not collective. The same arguments give the same result on every rank.

    Args:
        nodes: Mask over all nodes of type ``ntype``, or some node ids; see :func:`read_marked_ids`.
        partition_book: ``g.get_partition_book()``. The default is the DistTensor's book, or else the book for
            the graph that was opened last.
        ntype: Node type. The default is the column's type.
        rank: Rank that gets the share. The default is this rank.
        force_even: Whether shares differ by at most one over all ranks. Each server then gets a run of marked
            nodes, and may own only some of these. Otherwise each server divides its own nodes. Within a
            server, nodes are assigned at random. The seed is the server's number.
        node_trainer_ids: (N,) preferred rank for each node. Numbers go over all ranks or a multiple of them,
            such as ``g.ndata["trainer_id"]`` in a graph that was cut for trainers. A server respects
            preferences as far as the shares stay even.

    Returns:
        (n,) int64 ids, ascending.

    Raises:
        ConfigError: ``nodes`` is neither a mask nor a list of ids, no graph is open, or the type is unknown.
        IndexError: an id is out of range.
    """
    book = _find_book(nodes, partition_book)
    bounds = book.node_bounds(_resolve_type(nodes, "node", ntype, NODE_TYPE))
    return _split(nodes, book, bounds, rank, force_even, node_trainer_ids)


def edge_split(
    edges: Marked,
    partition_book: PartitionBook | None = None,
    etype: str | EdgeType = EDGE_TYPE,
    rank: int | None = None,
    force_even: bool = True,
    edge_trainer_ids: DistTensor | Tensor | Array | None = None,
) -> Tensor:
    """Return a rank's share of the marked edges, with the same rules and arguments as :func:`node_split`."""
    book = _find_book(edges, partition_book)
    bounds = book.edge_bounds(_resolve_type(edges, "edge", etype, EDGE_TYPE))
    return _split(edges, book, bounds, rank, force_even, edge_trainer_ids)


def _resolve_type(marked: Marked, kind: str, name: T, default: T) -> T:
    # The default stands for the column's type.
    if name == default and isinstance(marked, DistTensor) and marked.part_policy.kind == kind:
        return cast("T", marked.part_policy.type_name)
    return name


def read_marked_ids(marked: Marked, count: int) -> Array:
    """Return the ids that a mask or a list selects, ascending.

    DGL takes any argument for a mask, so a list of ids silently marks the wrong rows. The rules here are:

    * bool values are a mask and must have ``count`` elements;
    * integers are distinct ids if one is above 1 or if there are not ``count`` of them;
    * ``count`` integers that are all 0 or 1 are a mask, as DGL stores masks, if one value repeats. Other
      cases, such as ``[0, 1]`` over two rows, could be both and are refused.

    Raises:
        ConfigError: ``marked`` is neither a mask nor ids, could be both, or contains repeated ids.
        IndexError: an id is out of range.
    """
    # For a distributed mask, the servers send one bit per row. Other tensors are read in full.
    if isinstance(marked, DistTensor) and marked.dtype == torch.bool and marked.shape == (count,):
        return marked.kvstore.nonzero(marked.kvstore_key)
    values = _read_values(marked)
    if values.ndim != 1:
        raise ConfigError(f"the marked rows have shape {values.shape}. Use a one-dimensional mask or ids.")
    if values.dtype == np.bool_:
        if len(values) != count:
            raise ConfigError(f"the mask has {len(values)} elements for {count} rows. Use one per row.")
        return np.flatnonzero(values)
    if len(values) == 0:
        return np.empty(0, dtype=np.int64)
    if values.dtype.kind not in "iu":
        raise ConfigError(f"the marked rows are {values.dtype}. Use a bool mask or integer ids.")

    looks_like_mask = len(values) == count and values.min() >= 0 and values.max() <= 1
    ids = np.unique(values.astype(np.int64))
    if looks_like_mask and len(ids) < len(values):
        return np.flatnonzero(values)
    if looks_like_mask:
        raise ConfigError(f"{values.tolist()} over {count} rows could be a mask or ids. Use a bool mask.")
    check_ids(values.astype(np.int64), count, "the rows to split")
    num_repeated = len(values) - len(ids)
    if num_repeated:
        raise ConfigError(f"{num_repeated} of the {len(values)} ids are repeated. Pass each once.")
    return ids


def _split(
    marked: Marked,
    book: PartitionBook,
    bounds: Array,
    rank: int | None,
    force_even: bool,
    trainer_ids: DistTensor | Tensor | Array | None,
) -> Tensor:
    """Return a rank's share of the marked nodes or edges. Arguments are as in :func:`node_split`.

    Server s owns the ids ``bounds[s]:bounds[s + 1]``. ``rank`` is the session's rank by default.
    """
    session = marked.kvstore.session if isinstance(marked, DistTensor) else current_session()
    topology = session.topology
    if rank is not None:
        topology = Topology(rank, topology.world_size, topology.server_of_rank)
    num_rows = int(bounds[-1])
    ids = read_marked_ids(marked, num_rows)
    preferred_ranks = None
    if trainer_ids is not None:
        num_ranks = topology.world_size
        trainers, num_trainers = _read_trainers(trainer_ids, book, num_rows, num_ranks)
        preferred_ranks = trainers[ids].astype(np.int64) * num_ranks // num_trainers
    share = split_ids(ids, bounds, topology, force_even=force_even, trainer_of=preferred_ranks)
    return torch.from_numpy(share)


def _read_trainers(
    trainer_ids: DistTensor | Tensor | Array, book: PartitionBook, num_rows: int, num_ranks: int
) -> tuple[Array, int]:
    """Return each row's trainer, (N,), and the trainer count, which is a multiple of the rank count."""
    trainers = _read_values(trainer_ids)
    if trainers.shape != (num_rows,) or trainers.dtype.kind not in "iu":
        raise ConfigError(
            f"the trainer ids are {trainers.dtype} of shape {trainers.shape}. Use one integer "
            f"for each of the {num_rows} rows."
        )
    num_trainers = max(num_ranks, int(trainers.max(initial=-1)) + 1)
    # The last trainers may have no row of this type. The book knows how many the dataset was cut for.
    is_of_dataset = isinstance(trainer_ids, DistTensor) and trainer_ids.name == TRAINER_ID
    if is_of_dataset and book.num_trainers is not None:
        num_trainers = max(num_trainers, book.num_trainers)
    if num_trainers % num_ranks:
        raise ConfigError(
            f"trainer ids go up to {num_trainers - 1} but there are {num_ranks} ranks. "
            "Partition for a multiple of the ranks, or leave the trainer ids out."
        )
    return trainers, num_trainers


def _read_values(marked: Marked) -> Array:
    return as_array(marked.to_local() if isinstance(marked, DistTensor) else marked)


def _find_book(marked: Marked, book: PartitionBook | None) -> PartitionBook:
    if book is not None:
        return book
    if isinstance(marked, DistTensor):
        return marked.part_policy.partition_book
    return get_opened_graph().get_partition_book()
