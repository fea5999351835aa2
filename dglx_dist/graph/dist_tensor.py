"""``DistTensor``: a tensor with rows on the servers that is read and written like a local one."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, Protocol, TypeVar, cast, final

import numpy as np
import torch
from torch import Tensor

from dglx_dist.comm.collectives import barrier, check_equal, run_on_all_ranks
from dglx_dist.comm.session import Session, SessionField, Shared, current_session
from dglx_dist.data.storage.columns import numpy_dtype
from dglx_dist.data.storage.reader import StoredDataset
from dglx_dist.data.storage.row_files import RowFile, SavedRows, check_rows, read_index, read_rows, write_rows
from dglx_dist.errors import ConfigError, RemoteError, StorageError
from dglx_dist.graph.column import Column, Shard
from dglx_dist.graph.kvstore import KVStore
from dglx_dist.graph.partition_book import (
    Ids,
    PartitionBook,
    RowOwners,
    as_array,
    as_ids,
    integer_ids,
    split_ids,
)
from dglx_dist.graph.row_kernels import (
    check_ids,
    make_column_info,
    torch_dtype,
    view_as_numpy,
    view_as_tensor,
)
from dglx_dist.graph.shared_memory import InitRows, map_shared_rows, save_folder
from dglx_dist.graph.structure import Structure
from dglx_dist.internals.pytorch import to_device
from dglx_dist.records import Array, ColumnInfo, EdgeType, format_type

K = TypeVar("K")
V = TypeVar("V")
U = TypeVar("U")

GRAPH_REMEDY = (
    "Its nodes and edges lie on the servers. Change the graph before dx.distribute. Get batches from a "
    "loader of dglx_dist.dataloading. Pass messages along their blocks, or on dx.local_graph(g)."
)
TENSOR_REMEDY = (
    "Its rows lie on the servers. t[:] returns all of them as one torch tensor, and t[ids] "
    "returns some. dx.node_split(mask) returns this rank's share of a mask."
)


def make_unsupported(what: str, remedy: str) -> Callable[[Any, str], NoReturn]:
    """Return a ``__getattr__`` that raises AttributeError with a ``remedy`` for every name."""

    def raise_unsupported(_: Any, name: str) -> NoReturn:
        message = f"{what} has no {name!r}. {remedy}"
        if name.startswith("__"):
            # Python probes such names itself, and never shows the message.
            message = name
        raise AttributeError(message)

    return raise_unsupported


@dataclass(frozen=True, kw_only=True, eq=False)
class PartitionPolicy:
    """Distribution of rows over the servers. The rows belong to a node type, an edge type, or neither."""

    kind: Literal["node", "edge", "own"]
    type_name: str | EdgeType
    """Node type, edge type, or the name that the user gave to an own policy."""
    bounds: Array
    """(S + 1,) int64 bounds. Server s owns the rows ``bounds[s]:bounds[s + 1]``."""
    partition_book: PartitionBook
    store: KVStore
    dataset: str = ""
    """Checksum of the dataset whose ids number the rows. Empty for rows that no dataset numbers."""

    @cached_property
    def policy_str(self) -> str:
        """``node~<type>`` or ``edge~<source>:<relation>:<destination>`` as in DGL, or ``own~<name>``."""
        return f"{self.kind}~{format_type(self.type_name)}"

    @property
    def part_id(self) -> int:
        return self.partition_book.partid

    @property
    def owned_range(self) -> tuple[int, int]:
        """First row that this rank owns (see :class:`RowOwners`), and the row after its last."""
        topology = self.store.placement.topology
        return RowOwners(self.bounds, topology).get_range(topology.rank)

    def get_size(self) -> int:
        return int(self.bounds[-1])

    def get_part_size(self) -> int:
        return int(self.bounds[self.part_id + 1] - self.bounds[self.part_id])

    def to_partid(self, id_tensor: Ids) -> Tensor:
        """Return the partition that owns each row. Raise IndexError if an id is out of range."""
        rows = as_ids(id_tensor, self.get_size(), self.policy_str)
        return torch.from_numpy(np.searchsorted(self.bounds, rows, side="right") - 1)

    def to_local(self, id_tensor: Ids) -> Tensor:
        """Return ids relative to this server's first row. Raise IndexError if another server owns a row."""
        first = int(self.bounds[self.part_id])
        local_ids = as_ids(id_tensor, self.get_size(), self.policy_str) - first
        description = f"{self.policy_str} of this server (ids counted from {first})"
        check_ids(local_ids, self.get_part_size(), description)
        return torch.from_numpy(local_ids)

    def key(self, name: str) -> str:
        return f"{self.policy_str}~{name}"

    def hidden_key(self, name: str) -> str:
        """Return a name in the store that ``g.nodes[...].data`` does not show."""
        return f"hidden~{self.policy_str}~{name}"


def _resolve_policy(
    shape: Sequence[int], dtype: torch.dtype, policy_or_graph: PartitionPolicy | OpenedGraph
) -> tuple[PartitionPolicy, ColumnInfo]:
    """Return a tensor's policy, dtype and row shape. Raise ConfigError if they do not fit."""
    try:
        sizes = tuple(operator.index(size) for size in shape)
    except TypeError:
        raise ConfigError(f"shape is {shape!r}. Use integers, such as (g.num_nodes(), 16).") from None
    if not sizes or min(sizes) < 0:
        raise ConfigError(f"shape is {sizes}. Start with the number of rows, and use no size below 0.")

    num_rows, *row_shape = sizes
    if isinstance(policy_or_graph, PartitionPolicy):
        policy = policy_or_graph
    else:
        policy = policy_or_graph.find_policy_of_length(num_rows)
    if num_rows != policy.get_size():
        raise ConfigError(
            f"a tensor has {num_rows} rows, but {policy.policy_str} has {policy.get_size()}. "
            "Use the same number."
        )
    return policy, make_column_info(dtype, tuple(row_shape))


def _create(policy: PartitionPolicy, key: str, info: ColumnInfo, init: InitRows | None) -> None:
    """Add a tensor in shared memory to the policy's store. Every rank must call this."""
    store = policy.store
    shape = [policy.get_size(), *info.row_shape]
    facts = {"key": key, "shape": shape, "dtype": info.dtype, "bounds": policy.bounds.tolist()}
    check_equal(store.session, "a tensor", facts, "create it with the same arguments on all ranks")

    file_name = f"{store.label}-tensor-{store.next_number()}"
    rows = map_shared_rows(store.session, file_name, policy.get_part_size(), info, init)
    shard = Shard(first=int(policy.bounds[policy.part_id]), rows=rows)
    store.add_column(Column(name=key, info=info, bounds=policy.bounds, shards=(shard,), writable=True))
    barrier(store.session, f"creating {key}")


def _view_rows(column: Column, first: int, last: int) -> Array:
    """Return the local server's rows ``first`` to ``last - 1``: a view, or a copy if they span shards."""
    for shard in column.shards:
        if shard.first <= first and last <= shard.first + len(shard.rows):
            return shard.rows[first - shard.first : last - shard.first]
    rows = np.empty((last - first, *column.info.row_shape), numpy_dtype(column.info.dtype))
    column.read(np.arange(first, last), rows)
    return rows


def _check_same(
    folder: Path, saved: SavedRows, facts: object, policy: PartitionPolicy, column: Column
) -> None:
    """Raise StorageError if ``saved`` has another shape, dtype, policy or dataset than ``column``."""
    dtype = column.info.dtype
    shape = (column.num_rows, *column.info.row_shape)
    if saved.shape != shape or saved.info.dtype != dtype:
        raise StorageError(
            f"{folder} holds {saved.name!r} as {saved.info.dtype} of shape {saved.shape}, but the tensor to "
            f"fill is {dtype} of shape {shape}. Create a tensor with the saved shape and dtype."
        )
    # If rows are neither nodes nor edges, the dataset and the policy name do not matter.
    if not policy.dataset:
        return

    saved_facts = cast("dict[str, object]", facts)
    for key, expected in (("policy", policy.policy_str), ("dataset", policy.dataset)):
        if saved_facts.get(key) != expected:
            raise StorageError(
                f"{folder} holds {saved.name!r} of the {key} {saved_facts.get(key)!r}, but the tensor to "
                f"fill belongs to {expected!r}, which numbers rows differently. Load it with its own dataset."
            )


OPENED: SessionField[OpenedGraph | None] = SessionField(lambda _: None)
"""The graph that was opened last."""


@final
class DistTensor(Shared):
    """A tensor that is cut by rows over the servers, in shared memory or in the dataset on disk.

    Creating a tensor is collective. If the name exists, the new object refers to the existing tensor. Other
    ranks need not take part in that. Any rank may read and write any rows alone, from any thread, at any
    time. If one rank writes rows that another rank reads, the program must order the two (``g.barrier()``).

    Args:
        shape: Global shape. Without ``part_policy`` its first size selects the node or edge type.
        name: Name, the same on all ranks. With None, nothing can attach to the tensor later.
        init_func: Function from (shape, dtype) to the first values for the local server's rows. One rank per
            server calls it. The default is zeros.
        part_policy: ``g.get_node_partition_policy(ntype)``, ``g.get_edge_partition_policy(etype)``, or
            ``g.new_policy(name, rows)`` for rows that are neither.
        persistent: Accepted for DGL, without effect. Tensors live until :meth:`delete`, or until their
            ``with`` block or the session ends.
        is_gdata: Whether ``g.nodes[...].data`` shows the tensor.
        attach: Whether the name may belong to an existing tensor.
        graph: Graph that the tensor belongs to. The default is the graph that was opened last.

    Raises:
        ConfigError: on all ranks, if ranks disagree, memory is short, or the shape fits no type or several.
            Also if the name belongs to a tensor with another shape or dtype, or to any tensor and ``attach``
            is False.
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
        graph: OpenedGraph | None = None,
    ) -> None:
        policy_or_graph: PartitionPolicy | OpenedGraph
        if isinstance(part_policy, PartitionPolicy):
            policy_or_graph = part_policy
            store = part_policy.store
        else:
            policy_or_graph = graph or get_opened_graph()
            store = policy_or_graph.kvstore
        # All ranks take a number for an unnamed tensor before one of them can fail.
        self._name = f"unnamed-{store.next_number()}" if name is None else name
        self.persistent = persistent
        self._device = torch.device("cpu")

        def resolve() -> tuple[PartitionPolicy, ColumnInfo, str]:
            if part_policy is not None and part_policy is not policy_or_graph:
                raise ConfigError(f"part_policy is {part_policy!r}. Use g.get_node_partition_policy(ntype).")
            policy, info = _resolve_policy(shape, dtype, policy_or_graph)
            key = policy.key(self._name) if is_gdata else policy.hidden_key(self._name)
            return policy, info, key

        # A rank can attach to an existing tensor alone. Creating a tensor is collective, and an error in its
        # arguments must reach all ranks. So the arguments are resolved alone only if the name exists.
        if any(key.endswith(f"~{self._name}") for key in store.names()):
            self.part_policy, info, self._key = resolve()
            if store.has(self._key):
                self._check_attach(info, attach, init_func)
                return

        self.part_policy, info, self._key = run_on_all_ranks(store.session, resolve, ConfigError)
        _create(self.part_policy, self._key, info, init_func)

    @classmethod
    def from_existing(cls, policy: PartitionPolicy, name: str, key: str) -> DistTensor:
        """Return a handle to a tensor that exists already.

        Args:
            policy: Policy that distributes its rows.
            name: Name for the handle.
            key: Name of its column in the store.
        """
        # The constructor would create a tensor, which is collective.
        tensor = cls.__new__(cls)
        tensor.part_policy = policy
        tensor._name = name
        tensor._key = key
        tensor._device = torch.device("cpu")
        tensor.persistent = False
        return tensor

    if not TYPE_CHECKING:
        __getattr__ = make_unsupported("a DistTensor", TENSOR_REMEDY)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Return all rows. Without this method NumPy would read them one by one."""
        return np.asarray(as_array(self.to_local()), dtype=dtype)

    def nonzero(self, *, as_tuple: bool = False) -> Any:
        """Return this rank's share of the nonzero ids, shaped like the result of ``torch.nonzero``.

        Scripts for one machine train on ``mask.nonzero()``. Here each rank gets the ids that
        ``dx.node_split`` assigns to it. Raises ConfigError if the tensor has more than one dimension.
        """
        nonzero_ids = self.kvstore.nonzero(self._key)
        topology = self.kvstore.session.topology
        share = torch.from_numpy(split_ids(nonzero_ids, self.part_policy.bounds, topology))
        return (share,) if as_tuple else share[:, None]

    @classmethod
    def __torch_function__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise TypeError for every torch function except ``nonzero``."""
        if func is not torch.nonzero:
            raise TypeError(f"torch's {func.__name__} takes no DistTensor. {TENSOR_REMEDY}")
        options = dict(kwargs or {})
        tensor = args[0] if args else options.pop("input")
        return tensor.nonzero(**options)

    def __array_function__(self, func: Any, _: Any, args: Any, kwargs: Any) -> Any:
        """Let NumPy's functions take all rows. Only ``nonzero`` returns this rank's share."""
        if func is np.nonzero:
            return (self.nonzero(as_tuple=True)[0].numpy(),)
        # NumPy's own implementation calls __array__, also for tensors in lists.
        return func._implementation(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        """Compare by identity. Raise TypeError for numbers and arrays, because they would never be equal."""
        if isinstance(other, int | float | Tensor | np.ndarray | np.generic):
            raise TypeError(f"a DistTensor is not compared by value. {TENSOR_REMEDY}")
        return self is other

    __hash__ = Shared.__hash__

    @property
    def name(self) -> str:
        return self._name

    tensor_name = name
    """DGL's name for :attr:`name`."""

    @property
    def kvstore_key(self) -> str:
        return self._key

    @property
    def kvstore(self) -> KVStore:
        return self.part_policy.store

    @property
    def shape(self) -> tuple[int, ...]:
        column = self._column
        return (column.num_rows, *column.info.row_shape)

    @property
    def dtype(self) -> torch.dtype:
        return torch_dtype(self._column.info.dtype)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def local_range(self) -> tuple[int, int]:
        """The local server's first row, and the row after its last."""
        bounds, server = self.part_policy.bounds, self.part_policy.part_id
        return int(bounds[server]), int(bounds[server + 1])

    def __len__(self) -> int:
        return self._column.num_rows

    def __repr__(self) -> str:
        return f"DistTensor({self._name!r}, shape={self.shape}, dtype={self.dtype})"

    def __getitem__(self, index: Ids) -> Tensor:
        """Read rows by global id, from any server. Return (K, *row), or (*row) for a single integer.

        The rows are on the index's device if that is an accelerator. Otherwise they are on :attr:`device`.

        Args:
            index: (K,) integers of any width (tensor, array or list), a mask over all rows, or a slice.

        Raises:
            IndexError: an id is out of range (the message shows the first one and its position), or ``index``
                has an unsupported type.
            PeerError: an owner is dead or silent.
        """
        if isinstance(index, tuple):
            raise IndexError(f"{self._name!r} is indexed by rows. For a column write t[ids][:, column].")
        ids = integer_ids(index, self._column.num_rows, repr(self._name))
        device = self._device
        if isinstance(index, Tensor) and index.device.type != "cpu":
            device = index.device
        rows = to_device(self.part_policy.store.pull(self._key, ids), device)
        return rows[0] if isinstance(index, int | np.integer) else rows

    def __setitem__(self, index: Ids, values: Tensor) -> None:
        """Overwrite rows and wait until their owners have them, as in :meth:`push`."""
        self.push(index, values)

    def push(self, index: Ids, values: Tensor, *, accumulate: bool = False, wait: bool = True) -> None:
        """Overwrite rows, or add to them. Any rank can call this alone.

        Args:
            index: Rows, as for reading. If an id is repeated, its last value wins, or all its values are
                added.
            values: (K, *row), or broadcastable to it. Floating-point values are rounded to the tensor's
                dtype. Integer and bool tensors take only values that they can hold.
            accumulate: Whether to add to the present rows; see :meth:`KVStore.push`.
            wait: Whether to wait until every later read on any rank sees the values. Otherwise :meth:`fence`
                or ``g.barrier()`` waits.

        Raises:
            ConfigError: ``values`` do not fit. Other errors are those of :meth:`KVStore.push`.
        """
        ids = integer_ids(index, len(self), repr(self._name))
        try:
            rows = torch.as_tensor(values).detach().cpu()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"{self._name!r} takes no {type(values).__name__} here: {error}") from None

        shape = (len(ids), *self._column.info.row_shape)
        try:
            rows = self._convert(rows).broadcast_to(shape)
        except RuntimeError:
            raise ConfigError(f"{self._name!r} takes shape {shape} here, not {tuple(rows.shape)}") from None
        row_array = view_as_numpy(rows.contiguous())
        self.kvstore.push(self._key, ids, row_array, accumulate=accumulate, wait=wait)

    def fence(self, timeout_s: float | None = None) -> None:
        self.kvstore.fence(timeout_s)

    def __or__(self, other: DistTensor) -> DistTensor:
        """Return a new tensor with the bitwise or, which unites two masks. Every rank must call this.

        Raises ConfigError on all ranks if they differ in shape, dtype or policy, or are floating-point.
        """
        if not isinstance(other, DistTensor):
            return NotImplemented
        policy = self.part_policy.policy_str
        other_policy = other.part_policy.policy_str
        is_alike = (self.shape, self.dtype, policy) == (other.shape, other.dtype, other_policy)
        if not is_alike or self.kvstore is not other.kvstore or self.dtype.is_floating_point:
            raise ConfigError(
                f"{self} | {other} with the policies {policy} and {other_policy} cannot be joined. Use "
                "two masks, or tensors of integers, of the same shape, dtype, policy and graph."
            )

        result = DistTensor(self.shape, self.dtype, part_policy=self.part_policy)
        ids = np.arange(*self.part_policy.owned_range)
        joined_rows = (self[ids] | other[ids]).cpu()
        self.kvstore.write_local(result.kvstore_key, ids, view_as_numpy(joined_rows))
        barrier(self.kvstore.session, f"joining {self.name!r} and {other.name!r}")
        return result

    def count_nonzero(self) -> int:
        """Count the nonzero values in the complete tensor. Any rank can call this alone."""
        return self.kvstore.count_nonzero(self._key)

    def to(self, device: torch.device | str | None = None) -> DistTensor:
        """Return this tensor with reads that go to ``device``. The rows stay where they are."""
        tensor = copy.copy(self)
        tensor._device = torch.device("cpu" if device is None else device)
        return tensor

    def save(self, folder: str | Path) -> None:
        """Write the tensor into ``folder``. If this fails, the former content stays. All ranks call this.

        Every rank writes the rows that it owns as one file. Rank 0 then writes the index and renames the
        folder. All ranks must see the folder under the same name. Pushes that other ranks make during this
        call may be saved or not. Raises StorageError on all ranks, if a rank cannot write or does not see the
        folder, or if the folder holds something other than a saved tensor.
        """

        def write_owned_rows(temporary: Path) -> list[RowFile]:
            first, last = self.part_policy.owned_range
            rows = _view_rows(self._column, first, last)
            return [write_rows(temporary, self._name, first, rows, info=self._column.info)]

        def finish_writes() -> Path:
            self.fence()
            return Path(folder)

        target = run_on_all_ranks(self.kvstore.session, finish_writes)
        facts = {"policy": self.part_policy.policy_str, "dataset": self.part_policy.dataset}
        save_folder(self.kvstore.session, target, write_owned_rows, facts)

    def load(self, folder: str | Path, name: str | None = None) -> None:
        """Fill the tensor from a folder that :meth:`save` wrote. Every rank must call this.

        The number of ranks may differ from that at the save. ``name`` may be None if the folder has one
        tensor. Raises ConfigError if this tensor belongs to the dataset on disk. Raises StorageError on all
        ranks if the folder is missing or damaged for a rank, or has another shape, dtype or dataset. After an
        error, the tensor is unchanged.
        """
        column = self._column
        session = self.kvstore.session
        first, last = self.part_policy.owned_range

        def check_saved() -> tuple[Path, SavedRows]:
            source = Path(folder)
            column.check_writable()
            self.fence()

            index = read_index(source)
            saved_name = name
            if saved_name is None:
                if len(index.tensors) != 1:
                    names = ", ".join(map(repr, index.tensors))
                    raise StorageError(f"{source} holds the tensors {names}. Choose one with name=.")
                (saved_name,) = index.tensors
            saved = index.tensor(saved_name, source)
            _check_same(source, saved, index.facts, self.part_policy, column)
            check_rows(source, saved, first, last)
            return source, saved

        # All ranks check the files before the first rank changes a row.
        source, saved = run_on_all_ranks(session, check_saved)
        owned_rows = view_as_numpy(view_owned_rows(self))
        run_on_all_ranks(session, lambda: read_rows(source, saved, first, last, owned_rows))
        barrier(session, f"loading {self._key}")

    def __enter__(self) -> DistTensor:
        """Return the tensor. Leaving the block frees it, so every rank must reach the end."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.delete()
        # After an error the other ranks may never reach the end of the block, so don't wait for them.
        elif self.kvstore.has(self._key):
            self.kvstore.remove(self._key)

    def local_rows(self) -> Tensor:
        """Return the local server's (n, *row) rows: a view of shared memory, or a copy of dataset rows."""
        column = self._column
        # Only a column in memory is writable, and such a column has one shard.
        if column.writable:
            return view_as_tensor(column.shards[0].rows, column.info)
        first, last = self.local_range
        return self[first:last]

    def to_local(self) -> Tensor:
        return self[:]

    def delete(self) -> None:
        """Free the tensor. Every rank must call this, and no rank may use the tensor afterwards.

        The tensor still exists after an error. Raises ConfigError if the tensor belongs to the dataset, and
        RemoteError on all ranks, once, if a push with ``wait=False`` failed.
        """
        if not self._column.writable:
            raise ConfigError(
                f"{self._name!r} is data of the dataset and cannot be removed from the graph. Leave it where "
                "it is (only columns that a sampler or a model names are read), or use its rows: t[:]."
            )
        run_on_all_ranks(self.kvstore.session, self.kvstore.fence, RemoteError)
        barrier(self.kvstore.session, f"deleting {self._name!r}")
        self.kvstore.remove(self._key)

    def _check_attach(self, info: ColumnInfo, attach: bool, init: InitRows | None) -> None:
        """Raise ConfigError if the constructor's arguments do not fit the existing tensor."""
        column = self._column
        if not attach:
            raise ConfigError(f"there is already a tensor {self._name!r}. Choose another name.")

        present = _describe_rows(column.info, column.bounds)
        requested = _describe_rows(info, self.part_policy.bounds)
        if present != requested:
            raise ConfigError(f"the tensor {self._name!r} is {present}, not {requested}. Use another name.")
        if init is not None and not column.writable:
            raise ConfigError(f"{self._name!r} is data of the dataset. init_func cannot fill it.")

    def _convert(self, values: Tensor) -> Tensor:
        """Convert ``values`` to this tensor's dtype. Raise ConfigError if an integer would change."""
        # A number without dimensions may have any dtype, as in torch.
        if values.dim() and not torch.can_cast(values.dtype, self.dtype):
            raise ConfigError(f"{self._name!r} holds {self.dtype}. Convert the {values.dtype} values first.")

        rows = values.to(self.dtype)
        if rows.dtype != values.dtype and not self.dtype.is_floating_point:
            changed_values = values[rows != values]
            if len(changed_values):
                value = changed_values[0].item()
                raise ConfigError(f"{self._name!r} holds {self.dtype}, which cannot hold {value}")
        return rows

    @property
    def device(self) -> torch.device:
        """Device that reads return rows on, unless the index is on an accelerator."""
        return self._device

    @property
    def _column(self) -> Column:
        return self.part_policy.store.column(self._key)


def _describe_rows(info: ColumnInfo, bounds: Array) -> str:
    shape = (int(bounds[-1]), *info.row_shape)
    return f"{info.dtype} of shape {shape}, server bounds {bounds.tolist()}"


def view_owned_rows(tensor: DistTensor) -> Tensor:
    """Return the rows that this rank owns as a view of shared memory. The tensor must be in memory."""
    first, last = tensor.part_policy.owned_range
    start = tensor.local_range[0]
    return tensor.local_rows()[first - start : last - start]


@final
class DataView(MutableMapping[str, DistTensor]):
    """Tensors by name, for one node or edge type."""

    def __init__(self, policy: PartitionPolicy) -> None:
        self._policy = policy
        self._prefix = policy.key("")
        self._tensors_of_rank: dict[str, DistTensor] = {}
        """Tensors that the program named on this rank alone."""

    def __getitem__(self, name: str) -> DistTensor:
        """Return the tensor called ``name``. If there is none, a KeyError lists the existing tensors."""
        if isinstance(name, str) and name in self._tensors_of_rank:
            return self._tensors_of_rank[name]
        key = f"{self._prefix}{name}"
        if not self._policy.store.has(key):
            known = ", ".join(map(repr, self)) or "none"
            raise KeyError(f"{self._policy.policy_str} has no tensor {name!r} (known: {known})")
        return DistTensor.from_existing(self._policy, name, key)

    def __setitem__(self, name: str, value: DistTensor) -> None:
        """Give an existing tensor a name on this rank. Other ranks know the name if they set it, too."""
        if not isinstance(value, DistTensor):
            raise ConfigError(
                f"{name!r} must be a DistTensor, because other ranks cannot read a {type(value).__name__} of "
                "this rank. Create t = dx.DistTensor(..., part_policy=...), and write rows by t[ids] = rows."
            )
        num_rows = self._policy.get_size()
        if len(value) != num_rows:
            raise ConfigError(
                f"{self._policy.policy_str} has {num_rows} rows, but the tensor for {name!r} has {len(value)}"
            )
        self._tensors_of_rank[name] = value

    def __delitem__(self, name: str) -> None:
        """Delete the name if it was set on this rank. Otherwise free the tensor, which is collective."""
        if name in self._tensors_of_rank:
            del self._tensors_of_rank[name]
        else:
            self[name].delete()

    def pop(self, name: str, *default: Any) -> Any:
        """Delete the tensor called ``name`` and return all its rows, as DGL does.

        Return ``default`` if there is no such tensor. If the name was set on this rank, only the name is
        deleted, and the result is the tensor itself. Raises ConfigError if the tensor belongs to the dataset.
        """
        if name not in self and default:
            return default[0]
        tensor = self[name]
        result: Any = tensor
        # The deletion below refuses dataset tensors, so their rows are not read first.
        if name not in self._tensors_of_rank and tensor._column.writable:
            result = tensor.to_local()
        del self[name]
        return result

    def popitem(self) -> tuple[str, Any]:
        name = next(iter(self))
        return name, self.pop(name)

    def __iter__(self) -> Iterator[str]:
        names = self._policy.store.names()
        prefix = self._prefix
        stored_names = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        # A name may be both in the store and set on this rank. The dict keeps it once, in order.
        return iter(dict.fromkeys([*stored_names, *self._tensors_of_rank]))

    def __len__(self) -> int:
        return sum(1 for _ in self)


@final
@dataclass(frozen=True)
class TypeView(Generic[V]):
    """``g.nodes[ntype]`` or ``g.edges[etype]``."""

    data: V


@final
class TypedViews(Generic[K, V]):
    """``g.nodes`` and ``g.edges``. In DGL, calling them returns ids. ``remedy`` is code for that here."""

    def __init__(self, get_view: Callable[[K], V], remedy: str) -> None:
        self._get_view, self._remedy = get_view, remedy

    def __getitem__(self, key: K) -> TypeView[V]:
        return TypeView(self._get_view(key))

    def map(self, wrap: Callable[[V], U], unknown: type[ConfigError]) -> TypedViews[K, U]:
        """Return views that apply ``wrap`` to the data, and raise ``unknown`` for a type that is missing."""

        def get_view(key: K) -> U:
            try:
                return wrap(self._get_view(key))
            except ConfigError as error:
                raise unknown(str(error)) from None

        return TypedViews(get_view, self._remedy)

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Raise ConfigError. In DGL this call returns all ids, which this graph does not list."""
        raise ConfigError(
            f"a distributed graph does not list its ids. Write {self._remedy}, or dx.node_split(mask) or "
            "dx.edge_split(mask) for this rank's share. Change the graph before dx.distribute."
        )


class OpenedGraph(Protocol):
    """Interface of :class:`DistGraph`, for modules that cannot import it because it imports them."""

    session: Session
    dataset: StoredDataset
    kvstore: KVStore

    @property
    def ntypes(self) -> list[str]: ...
    @property
    def canonical_etypes(self) -> list[EdgeType]: ...
    @property
    def nodes(self) -> TypedViews[str, DataView]: ...
    @property
    def edges(self) -> TypedViews[str | EdgeType, DataView]: ...
    def num_nodes(self, ntype: str | None = None) -> int: ...
    def num_edges(self, etype: str | EdgeType | None = None) -> int: ...
    def structure(self, etype: str | EdgeType | None = None) -> Structure: ...
    def get_partition_book(self) -> PartitionBook: ...
    def get_node_partition_policy(self, ntype: str) -> PartitionPolicy: ...
    def get_edge_partition_policy(self, etype: str | EdgeType) -> PartitionPolicy: ...
    def find_policy_of_length(self, num_rows: int) -> PartitionPolicy: ...


def get_opened_graph() -> OpenedGraph:
    """Return the graph that was opened last in the current session. Raise ConfigError if there is none."""
    graph = OPENED.get(current_session())
    if graph is None:
        raise ConfigError("no graph is open. Open a DistGraph first.")
    return graph
