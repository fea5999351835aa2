"""``node_split`` and ``edge_split``: division of selected rows over the ranks (DistDGL, two levels)."""

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

    Not collective; the same arguments give the same result on every rank.

    Args:
        nodes: Mask over all nodes of ``ntype`` or ids of some, see :func:`read_marked_ids`.
        partition_book: ``g.get_partition_book()``; None: the DistTensor's or the last opened graph's.
        ntype: Type of the nodes; by default that of a column.
        rank: Whose share; None: this rank's.
        force_even: Shares differ by at most one over all ranks: the marked nodes are cut into runs of ids,
            one per server, so that a few may be another server's. Else each server divides its own nodes.
            Within a server they are assigned at random with the server's number as the seed.
        node_trainer_ids: (N,) preferred rank of each node, numbered over all ranks (or over a multiple of
            them), as ``g.ndata["trainer_id"]`` of a graph that was cut for trainers; respected within a
            server as far as the shares stay even.

    Returns:
        (n,) int64 ids, ascending.

    Raises:
        ConfigError: ``nodes`` is neither a mask nor ids, or could be both; no graph is open; an unknown type.
        IndexError: an id is out of range.
    """
    book = _book(nodes, partition_book)
    bounds = book.node_bounds(_type_of(nodes, "node", ntype, NODE_TYPE))
    return _split(nodes, book, bounds, rank, force_even, node_trainer_ids)


def edge_split(
    edges: Marked,
    partition_book: PartitionBook | None = None,
    etype: str | EdgeType = EDGE_TYPE,
    rank: int | None = None,
    force_even: bool = True,
    edge_trainer_ids: DistTensor | Tensor | Array | None = None,
) -> Tensor:
    """Return a rank's share of the marked edges, as :func:`node_split`."""
    book = _book(edges, partition_book)
    bounds = book.edge_bounds(_type_of(edges, "edge", etype, EDGE_TYPE))
    return _split(edges, book, bounds, rank, force_even, edge_trainer_ids)


def _type_of(marked: Marked, kind: str, given: T, default: T) -> T:
    """Return the type that a column belongs to, unless another one was ``given`` than the ``default``."""
    if given == default and isinstance(marked, DistTensor) and marked.part_policy.kind == kind:
        return cast("T", marked.part_policy.type_name)
    return given


def read_marked_ids(marked: Marked, count: int) -> Array:
    """Return the ids that a mask or a list of ids marks, ascending.

    DGL takes any argument for a mask, so that a list of ids silently marks the wrong rows. Here

    * bool values are a mask and must be ``count`` many;
    * integers of which one is above 1, or that are not ``count`` many, are ids and must be distinct;
    * ``count`` integers that are all 0 or 1 are a mask, as DGL stores masks, if one value repeats. The
      remaining cases, such as ``[0, 1]`` over two rows, could be both and are refused.

    Raises:
        ConfigError: it is neither, or could be both, or ids repeat.
        IndexError: an id is out of range.
    """
    if isinstance(marked, DistTensor) and marked.dtype == torch.bool and marked.shape == (count,):
        return marked.kvstore.nonzero(marked.kvstore_key)
    values = _values_of(marked)
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


def _split(
    marked: Marked,
    book: PartitionBook,
    bounds: Array,
    rank: int | None,
    force_even: bool,
    trainer_ids: DistTensor | Tensor | Array | None,
) -> Tensor:
    session = marked.kvstore.session if isinstance(marked, DistTensor) else current_session()
    topology = session.topology
    if rank is not None:
        topology = Topology(rank, topology.world_size, topology.server_of_rank)
    count, world_size = int(bounds[-1]), topology.world_size
    ids, preferred = read_marked_ids(marked, count), None
    if trainer_ids is not None:
        trainers = _values_of(trainer_ids)
        if trainers.shape != (count,) or trainers.dtype.kind not in "iu":
            raise ConfigError(
                f"the trainer ids are {trainers.dtype} of shape {trainers.shape}; give one integer "
                f"for each of the {count} rows"
            )
        # The last trainers may have no row of this type, so the largest id is no count of them.
        is_of_dataset = isinstance(trainer_ids, DistTensor) and trainer_ids.name == TRAINER_ID
        known = book.num_trainers if is_of_dataset and book.num_trainers else 0
        num_trainers = max(world_size, known, int(trainers.max(initial=-1)) + 1)
        if num_trainers % world_size:
            raise ConfigError(
                f"trainer ids go up to {num_trainers - 1} but there are {world_size} ranks; partition for a "
                "multiple of the ranks, or leave the trainer ids out"
            )
        preferred = trainers[ids].astype(np.int64) * world_size // num_trainers
    return torch.from_numpy(split_ids(ids, bounds, topology, force_even=force_even, trainer_of=preferred))


def _values_of(given: Marked) -> Array:
    return as_array(given.to_local() if isinstance(given, DistTensor) else given)


def _book(marked: Marked, book: PartitionBook | None) -> PartitionBook:
    if book is not None:
        return book
    if isinstance(marked, DistTensor):
        return marked.part_policy.partition_book
    return get_opened_graph().get_partition_book()
