"""A tensor whose rows lie on the servers, read and written like one that does not."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast, final

import numpy as np
import torch
from torch import Tensor

from dglx_dist.cluster.collectives import barrier, gather_json
from dglx_dist.cluster.session import current_session
from dglx_dist.errors import ConfigError
from dglx_dist.graph.column import Column, Shard
from dglx_dist.graph.dtypes import column_info, numpy_view, tensor_view, torch_dtype
from dglx_dist.graph.ids import Ids, as_ids
from dglx_dist.graph.kvstore import KVStore
from dglx_dist.graph.policy import PartitionPolicy
from dglx_dist.graph.shared_rows import InitRows, shared_rows

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph

GRAPH = "graph"
"""Where the session keeps the graph opened last."""


@final
class DistTensor:
    """A tensor cut by rows over the servers, in shared memory or of the dataset on disk.

    Creating one is collective; when the name is known already it attaches to what exists, which is not.
    Reading and writing any rows is open to any rank alone, from any thread, at any time; between one
    rank's write and another's read of the same rows, the program must order them (``g.barrier()``).

    Args:
        shape: Of the whole; its first size tells, without ``part_policy``, which nodes or edges it goes with.
        dtype: Torch's.
        name: On all ranks the same; None: nobody else can attach to it.
        init_func: (shape, dtype) of the own server's rows to their first values; zeros when None. Called on
            one rank of each server.
        part_policy: ``g.get_node_partition_policy(ntype)`` or ``g.get_edge_partition_policy(etype)``.
        persistent: Accepted as DGL has it; tensors live until :meth:`delete` or the end of the session.
        is_gdata: Whether ``g.nodes[...].data`` shows it.
        attach: Whether an existing tensor of this name may be taken.
        graph: None: the graph opened last.

    Raises:
        ConfigError: on all ranks: ranks disagree, there is no room, the shape fits no type or several, or
            the name is taken by a tensor of another shape or dtype or ``attach`` is False.
    """

    def __init__(  # noqa: PLR0913 - DGL's signature
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        name: str | None = None,
        init_func: InitRows | None = None,
        part_policy: PartitionPolicy | None = None,
        persistent: bool = False,
        is_gdata: bool = True,
        attach: bool = True,
        *,
        graph: DistGraph | None = None,
    ) -> None:
        shape = _whole_sizes(shape)
        policy = part_policy or (graph or opened_graph()).policy_of_length(shape[0])
        if shape[0] != policy.get_size():
            raise ConfigError(
                f"a tensor of {shape[0]} rows does not go with {policy.policy_str}, of which there are "
                f"{policy.get_size()}"
            )
        self.part_policy = policy
        self.persistent = persistent
        self._name = f"unnamed-{policy.store.next_number()}" if name is None else name
        self._key = policy.key(self._name) if is_gdata else policy.hidden_key(self._name)
        if policy.store.has(self._key):
            self._check_attach(shape, dtype, attach)
        else:
            _create(policy, self._key, shape, dtype, init_func)

    @property
    def name(self) -> str:
        """The name given at creation."""
        return self._name

    @property
    def tensor_name(self) -> str:
        """As :attr:`name`, which is what DGL calls it."""
        return self._name

    @property
    def kvstore_key(self) -> str:
        """Under which the KVStore knows it."""
        return self._key

    @property
    def kvstore(self) -> KVStore:
        """The store that holds it."""
        return self.part_policy.store

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole."""
        column = self._column
        return (column.num_rows, *column.info.row_shape)

    @property
    def dtype(self) -> torch.dtype:
        """Torch's dtype."""
        return torch_dtype(self._column.info.dtype)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def local_range(self) -> tuple[int, int]:
        """The first row of the own server and the one after its last."""
        bounds, server = self.part_policy.bounds, self.part_policy.part_id
        return int(bounds[server]), int(bounds[server + 1])

    def __len__(self) -> int:
        """Rows of all servers."""
        return self._column.num_rows

    def __repr__(self) -> str:
        return f"DistTensor({self._name!r}, shape={self.shape}, dtype={self.dtype})"

    def __getitem__(self, index: Ids) -> Tensor:
        """Return rows, (K, *row), or one row for one integer; on the device of ``index``.

        Args:
            index: (K,) integers (any width, torch, NumPy or list), a bool mask over all rows, a slice.

        Raises:
            IndexError: an id is out of range (the first and its position are named), or ``index`` is
                not of these kinds.
            PeerError: an owner is dead or silent.
        """
        ids = as_ids(index, len(self), repr(self._name))
        rows = self.kvstore.pull(self._key, ids)
        if isinstance(index, Tensor) and index.device.type != "cpu":
            rows = rows.to(index.device)
        return rows[0] if isinstance(index, int | np.integer) else rows

    def __setitem__(self, index: Ids, values: Tensor) -> None:
        """Overwrite rows and wait until their owners have them; of repeated ids the last value stays.

        Args:
            index: As for reading.
            values: (K, *row), or what can be broadcast to it; a dtype that holds more is refused.

        Raises:
            ConfigError: the tensor belongs to the dataset, or ``values`` does not fit.
            IndexError: an id is out of range.
        """
        ids = as_ids(index, len(self), repr(self._name))
        given = torch.as_tensor(values).detach().cpu()
        shape = (len(ids), *self._column.info.row_shape)
        if given.dim() and not torch.can_cast(given.dtype, self.dtype):
            raise ConfigError(f"{self._name!r} holds {self.dtype}; convert the {given.dtype} values first")
        try:
            given = given.to(self.dtype).broadcast_to(shape)
        except RuntimeError:
            raise ConfigError(
                f"{self._name!r} takes values of shape {shape} here, not {tuple(given.shape)}"
            ) from None
        self.kvstore.push(self._key, ids, numpy_view(given.contiguous()))

    def local_rows(self) -> Tensor:
        """Return the own server's rows, (n, *row); of a tensor in memory, the memory its ranks share."""
        column = self._column
        if column.writable:
            return tensor_view(column.shards[0].rows, column.info)
        first, last = self.local_range
        return self[first:last]

    def to_local(self) -> Tensor:
        """Return all rows of all servers, in this process."""
        return self[:]

    def delete(self) -> None:
        """Free the tensor; every rank must call it, and no rank may use it afterwards."""
        barrier(self.kvstore.session, f"deleting {self._name!r}")
        self.kvstore.remove(self._key)

    @property
    def _column(self) -> Column:
        return self.kvstore.column(self._key)

    def _check_attach(self, shape: tuple[int, ...], dtype: torch.dtype, attach: bool) -> None:
        if not attach:
            raise ConfigError(f"there is a tensor {self._name!r} already; choose another name")
        if (self.shape, self.dtype) != (shape, dtype):
            raise ConfigError(
                f"the existing tensor {self._name!r} is {self.dtype} of shape {self.shape}, not {dtype} of "
                f"shape {shape}; choose another name"
            )


def opened_graph() -> DistGraph:
    """Return the graph opened last in the current session.

    Raises:
        ConfigError: none is open.
    """
    found = current_session().attached.get(GRAPH)
    if found is None:
        raise ConfigError("no graph is open; open a DistGraph first")
    return cast("DistGraph", found)


def _whole_sizes(shape: Sequence[int]) -> tuple[int, ...]:
    try:
        sizes = tuple(operator.index(size) for size in shape)
    except TypeError:
        raise ConfigError(f"shape is {shape!r}; give whole numbers, such as (g.num_nodes(), 16)") from None
    if not sizes or min(sizes) < 0:
        raise ConfigError(f"shape is {sizes}; give the number of rows first, and no size below 0")
    return sizes


def _create(
    policy: PartitionPolicy, key: str, shape: tuple[int, ...], dtype: torch.dtype, init: InitRows | None
) -> None:
    store, session = policy.store, policy.store.session
    wanted = [key, list(shape), str(dtype)]
    for rank, other in enumerate(gather_json(wanted, session)):
        if other != wanted:
            raise ConfigError(
                f"rank {session.topology.rank} creates the tensor {wanted} while rank {rank} creates "
                f"{other}; creating one is collective: all ranks must do it alike"
            )
    info = column_info(dtype, shape[1:])
    file_name = f"{store.label}-tensor-{store.next_number()}"
    rows = shared_rows(session, file_name, policy.get_part_size(), info, init)
    first = int(policy.bounds[policy.part_id])
    shard = Shard(first=first, rows=rows)
    store.add_column(Column(name=key, info=info, bounds=policy.bounds, shards=(shard,), writable=True))
    barrier(session, f"creating {key}")
