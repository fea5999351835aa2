"""A tensor whose rows lie on the servers, read and written like one that does not."""

from __future__ import annotations

import copy
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, cast, final

import numpy as np
import torch
from torch import Tensor

from dglx_dist.cluster.collectives import barrier
from dglx_dist.cluster.session import current_session
from dglx_dist.cluster.shared import Shared
from dglx_dist.errors import ConfigError, RemoteError
from dglx_dist.graph.column import Column
from dglx_dist.graph.dtypes import numpy_view, tensor_view, torch_dtype
from dglx_dist.graph.elsewhere import TENSOR_REMEDY, lacking
from dglx_dist.graph.ids import Ids, as_ids
from dglx_dist.graph.kvstore import KVStore
from dglx_dist.graph.opening import together
from dglx_dist.graph.owners import RowOwners
from dglx_dist.graph.policy import PartitionPolicy
from dglx_dist.graph.shared_rows import InitRows
from dglx_dist.graph.tensor_create import WantedTensor, agreed, create, wanted_tensor
from dglx_dist.graph.tensor_files import load_rows, save_rows
from dglx_dist.records import Array

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph

GRAPH = "graph"
"""Where the session keeps the graph opened last."""


@final
class DistTensor(Shared):
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
        part_policy: ``g.get_node_partition_policy(ntype)``, ``g.get_edge_partition_policy(etype)``, or
            ``g.new_policy(name, rows)`` for rows that are neither.
        persistent: As DGL has it, and of no effect: DGL frees a tensor with its object unless this is True,
            which no rank can do alone. Here tensors live until :meth:`delete`, the end of a ``with`` block of
            theirs, or the end of the session, and their memory is then free however the ranks end.
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
        policy = part_policy if isinstance(part_policy, PartitionPolicy) else None
        store = policy.store if policy is not None else (graph or opened_graph()).kvstore
        # Numbered before anything can go wrong on one rank alone.
        self._name = f"unnamed-{store.next_number()}" if name is None else name
        self.persistent = persistent
        self._device = torch.device("cpu")
        wanted: WantedTensor | None = None
        problem = ""
        try:
            if policy is not part_policy:
                raise ConfigError(
                    f"part_policy is {part_policy!r}; give what g.get_node_partition_policy gives"
                )
            wanted = wanted_tensor(shape, dtype, self._name, policy or graph or opened_graph(), is_gdata)
        except ConfigError as error:
            if any(key.endswith(f"~{self._name}") for key in store.names()):
                raise  # attaching is no affair of the other ranks
            problem = str(error)
        if wanted is None or not store.has(wanted.key):
            wanted = agreed(store.session, wanted, problem)
            create(wanted, init_func)
        else:
            column = store.column(wanted.key)
            wanted.check_attach(self._name, column, attach)
            if init_func is not None and not column.writable:
                raise ConfigError(
                    f"{self._name!r} is data of the dataset, which init_func cannot fill; choose another name"
                )
        self.part_policy, self._key = wanted.policy, wanted.key

    if not TYPE_CHECKING:
        __getattr__ = lacking("a DistTensor", TENSOR_REMEDY)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Return all rows for NumPy, which else would ask for one after the other."""
        return np.asarray(self.to_local().numpy(), dtype=dtype)

    @classmethod
    def __torch_function__(cls, func: Any, *_: object) -> NoReturn:
        """Refuse to be given to a function of torch.

        Raises:
            TypeError: always, with what to give instead.
        """
        raise TypeError(f"torch's {func.__name__} takes no DistTensor: {TENSOR_REMEDY}")

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
        device = self._device
        if isinstance(index, Tensor) and index.device.type != "cpu":
            device = index.device
        rows = rows.to(device)
        return rows[0] if isinstance(index, int | np.integer) else rows

    def __setitem__(self, index: Ids, values: Tensor) -> None:
        """Overwrite rows and wait until their owners have them; as :meth:`push`."""
        self.push(index, values)

    def push(self, index: Ids, values: Tensor, *, accumulate: bool = False, wait: bool = True) -> None:
        """Overwrite rows, or add to them; any rank alone.

        Args:
            index: As for reading. Of repeated ids the last value stays, or all are added.
            values: (K, *row), or what can be broadcast to it. Floating-point values are rounded to the
                tensor's dtype; into integers or bool only values go that they can hold.
            accumulate: Add to what is there; see :meth:`KVStore.push`.
            wait: Until every later read of any rank sees it. Else :meth:`fence` or ``g.barrier()`` does.

        Raises:
            ConfigError: the tensor belongs to the dataset, or ``values`` does not fit.
            IndexError: an id is out of range.
            PeerError: an owner is dead or silent.
            RemoteError: an owner could not write.
        """
        ids = as_ids(index, len(self), repr(self._name))
        try:
            given = torch.as_tensor(values).detach().cpu()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"{self._name!r} takes no {type(values).__name__} here: {error}") from None
        shape = (len(ids), *self._column.info.row_shape)
        try:
            given = self._converted(given).broadcast_to(shape)
        except RuntimeError:
            raise ConfigError(
                f"{self._name!r} takes values of shape {shape} here, not {tuple(given.shape)}"
            ) from None
        rows = numpy_view(given.contiguous())
        self.kvstore.push(self._key, ids, rows, accumulate=accumulate, wait=wait)

    def fence(self, timeout_s: float | None = None) -> None:
        """Wait for what this rank pushed with ``wait=False``; see :meth:`KVStore.fence`."""
        self.kvstore.fence(timeout_s)

    def __or__(self, other: DistTensor) -> DistTensor:
        """Return a new tensor of the bitwise or of both, such as the union of two masks. Collective.

        Raises:
            ConfigError: on all ranks: they differ in shape, dtype or policy, or hold fractions.
        """
        if not isinstance(other, DistTensor):
            return NotImplemented
        return union(self, other)

    def count_nonzero(self) -> int:
        """Return how many values of the whole are not zero; any rank alone, few bytes."""
        return self.kvstore.count_nonzero(self._key)

    def to(self, device: torch.device | str | None = None) -> DistTensor:
        """Return this tensor with reads that land on ``device``; the rows stay where they are."""
        moved = copy.copy(self)
        moved._device = torch.device("cpu" if device is None else device)
        return moved

    def save(self, folder: str | Path) -> None:
        """Write the tensor into a folder that all ranks see; collective. See :func:`save_rows`."""
        save_rows(folder, self._name, self.part_policy, self._key)

    def load(self, folder: str | Path, name: str | None = None) -> None:
        """Fill the tensor from a folder, whatever number of ranks saved it; collective.

        See :func:`load_rows`, also for what is refused; ``name``: which tensor there, when there are several.
        """
        load_rows(folder, name, self.part_policy, self._key)

    def __enter__(self) -> DistTensor:
        """Return itself; the end of the block frees the tensor, so every rank must come there."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.delete()
        # Else the other ranks may never come to the end of the block: nobody is waited for.
        elif self.kvstore.has(self._key):
            self.kvstore.remove(self._key)

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
        """Free the tensor; every rank must call it, and no rank may use it afterwards.

        Raises:
            RemoteError: on all ranks, once, when a push that was not waited for failed; the tensor is
                still there.
        """
        together(self.kvstore.session, self.kvstore.fence, RemoteError)
        barrier(self.kvstore.session, f"deleting {self._name!r}")
        self.kvstore.remove(self._key)

    def _converted(self, values: Tensor) -> Tensor:
        """Return ``values`` in the tensor's dtype, which must be able to hold them."""
        if values.dim() and not torch.can_cast(values.dtype, self.dtype):
            raise ConfigError(f"{self._name!r} holds {self.dtype}; convert the {values.dtype} values first")
        converted = values.to(self.dtype)
        if converted.dtype == values.dtype or self.dtype.is_floating_point:
            return converted
        lost = values[converted != values]
        if len(lost):
            raise ConfigError(f"{self._name!r} holds {self.dtype}, which cannot hold {lost[0].item()}")
        return converted

    @property
    def device(self) -> torch.device:
        """Where reads land when the index does not say."""
        return self._device

    @property
    def _column(self) -> Column:
        return self.kvstore.column(self._key)


def union(one: DistTensor, other: DistTensor) -> DistTensor:
    """Return a new tensor of the bitwise or of both. Every rank must call it.

    Raises:
        ConfigError: on all ranks: they differ in shape, dtype or policy, or hold fractions.
    """
    facts = [(tensor.shape, tensor.dtype, tensor.part_policy.policy_str) for tensor in (one, other)]
    if facts[0] != facts[1] or one.kvstore is not other.kvstore or one.dtype.is_floating_point:
        raise ConfigError(
            f"{one} | {other} with the policies {facts[0][2]} and {facts[1][2]} cannot be joined; give two "
            "masks, or tensors of integers, of the same shape, dtype, policy and graph"
        )
    joined = DistTensor(one.shape, one.dtype, part_policy=one.part_policy)
    topology = one.kvstore.session.topology
    ids = np.arange(*RowOwners(one.part_policy.bounds, topology).range_of(topology.rank))
    rows = one[ids] | other[ids]
    one.kvstore.write_local(joined.kvstore_key, ids, numpy_view(rows))
    barrier(one.kvstore.session, f"joining {one.name!r} and {other.name!r}")
    return joined


def opened_graph() -> DistGraph:
    """Return the graph opened last in the current session.

    Raises:
        ConfigError: none is open.
    """
    found = current_session().attached.get(GRAPH)
    if found is None:
        raise ConfigError("no graph is open; open a DistGraph first")
    return cast("DistGraph", found)
