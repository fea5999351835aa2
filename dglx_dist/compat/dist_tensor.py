"""Offer DGL's ``DistTensor``, ``DistEmbedding`` with its optimizers, and ``KVClient``.

They wrap this package's tensors, embeddings and store.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeAlias, final
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from dglx_dist.comm.collectives import barrier, gather_json, run_on_all_ranks
from dglx_dist.comm.session import SessionField
from dglx_dist.compat.partition_book import (
    PartitionPolicy,
    find_our_edges,
    find_shown_edges,
    find_store_graph,
    get_edge_ids,
    inner_policy,
)
from dglx_dist.compat.wrappers import InnerAttribute, Wrapper
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.dist_tensor import DistTensor as InnerDistTensor
from dglx_dist.graph.dist_tensor import PartitionPolicy as InnerPolicy
from dglx_dist.graph.dist_tensor import get_opened_graph
from dglx_dist.graph.embedding import DistEmbedding as InnerDistEmbedding
from dglx_dist.graph.kvstore import KVStore
from dglx_dist.graph.optim import SparseOptimizer
from dglx_dist.graph.partition_book import Ids, as_array
from dglx_dist.graph.shared_memory import InitRows
from dglx_dist.graph.sparse_update import UpdateRule, adagrad_rule, adam_rule
from dglx_dist.records import Array

_Rows: TypeAlias = Mapping[tuple[KVStore, str], Callable[[], Any]]
_BATCH: SessionField[tuple[Callable[[], Any], _Rows]] = SessionField(lambda _: (lambda: None, {}))
"""Weak references to the last batch's input nodes, and to the rows on its first block by store and key. There
is no reference to the block, because copies that a script makes (``block.int()``) hold the same rows.
"""


def remember_batch(g: DistGraph, input_nodes: object, blocks: Any) -> None:
    """Keep weak references to the batch that is yielded now, for :func:`find_attached_rows`."""
    # Only strategies that cut columns need the references, and they do not need ids by type.
    if not isinstance(input_nodes, Tensor):
        return
    policy = g.get_node_partition_policy(g.ntypes[0])
    attached_rows = {}
    for name, rows in blocks[0].srcdata.items():
        attached_rows[g.kvstore, policy.key(name)] = weakref.ref(rows)
    _BATCH.set(g.session, (weakref.ref(input_nodes), attached_rows))


def find_attached_rows(tensor: InnerDistTensor, index: object) -> Tensor | None:
    """Return the rows of ``tensor`` that the last batch's first block has, or None.

    ``index`` must be the tensor with input nodes that this batch gave to the script. If features are cut by
    column, the block has this rank's columns, which the wrapped model expects.
    """
    get_input_nodes, attached_rows = _BATCH.get(tensor.kvstore.session)
    if index is None or index is not get_input_nodes():
        return None
    get_rows = attached_rows.get((tensor.kvstore, tensor.kvstore_key))
    return None if get_rows is None else get_rows()


_HIDDEN = "hidden~"
_KINDS = ("node~", "edge~")


@final
class KVClient(Wrapper, of=KVStore):
    """A graph's named tensors. ``g._client`` and ``tensor.kvstore`` are clients."""

    def __init__(self, *_: object, **__: object) -> None:
        raise ConfigError("there are no servers to connect to. Use g._client, the store of a graph.")

    inner: KVStore
    group_count, role = 1, "default"
    """DGL's number of server processes per machine, and its role for trainers."""

    @property
    def all_possible_part_policy(self) -> dict[str, PartitionPolicy]:
        g = find_store_graph(self.inner)
        policies = [*map(g.get_node_partition_policy, g.ntypes)]
        policies += map(g.get_edge_partition_policy, g.canonical_etypes)
        return {policy.policy_str: PartitionPolicy.over(policy) for policy in policies}

    num_servers = property(attrgetter("inner.placement.topology.num_servers"))
    client_id = property(attrgetter("inner.placement.topology.rank"))
    machine_id = property(attrgetter("inner.placement.topology.server"))

    @property
    def data_store(self) -> Mapping[str, Tensor]:
        """This server's rows by name. For tensors in the dataset, each access makes a copy."""
        return _LocalRows(self)

    def barrier(self) -> None:
        """Wait for all ranks. Afterwards every rank sees all earlier pushes."""
        run_on_all_ranks(self.inner.session, self.inner.fence)
        barrier(self.inner.session, "client.barrier()")

    def init_data(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        part_policy: PartitionPolicy,
        init_func: InitRows | None = None,
        is_gdata: bool = True,
    ) -> None:
        """Create a tensor called ``<policy>~<tensor>``. Every rank must call it."""
        tensor_name = name.removeprefix(part_policy.get_data_name(""))
        if tensor_name in ("", name):
            raise ConfigError(f"the name {name!r} must be {part_policy.get_data_name('<tensor>')!r}")
        InnerDistTensor(
            tuple(shape),
            dtype,
            tensor_name,
            init_func,
            inner_policy(part_policy),
            persistent=True,
            is_gdata=is_gdata,
            attach=False,
        )

    def delete_data(self, name: str) -> None:
        """Free a tensor. Every rank must call it."""
        self._tensor(name).delete()

    def push(self, name: str, id_tensor: Ids, data_tensor: Tensor) -> None:
        """Overwrite rows and wait until their owners have them. DGL does not wait."""
        DistTensor.over(self._tensor(name))[id_tensor] = data_tensor

    def pull(self, name: str, id_tensor: Ids) -> Tensor:
        return DistTensor.over(self._tensor(name))[id_tensor]

    def register_push_handler(self, name: str, func: Callable[..., None]) -> None:
        """Apply pushes with ``func(store, name, local ids, rows)`` on the owner. All ranks must call it."""

        def handle(rows: Tensor, ids: Tensor, values: Tensor) -> None:
            func({name: rows}, name, ids, values)

        self.inner.register_push_handler(self._key(name), handle)

    def register_pull_handler(self, name: str, func: Callable[..., Tensor]) -> None:
        """Answer pulls with ``func(store, name, local ids)``. All ranks must call it."""
        self.inner.register_pull_handler(self._key(name), lambda rows, ids: func({name: rows}, name, ids))

    def get_partid(self, name: str, id_tensor: Ids) -> Tensor:
        return self._tensor(name).part_policy.to_partid(id_tensor)

    def data_name_list(self) -> list[str]:
        """List the names of all tensors, including those created with ``is_gdata=False``."""
        names = self.gdata_name_list()
        for key in self.inner.names():
            name = key.removeprefix(_HIDDEN)
            is_hidden = name != key and name.startswith(_KINDS)
            # The dataset's hidden columns are read-only and do not belong to the script.
            if is_hidden and self.inner.column(key).writable:
                names.append(name)
        return names

    def gdata_name_list(self) -> list[str]:
        # Tensors without a reference on this rank are left out, because DGL would have freed them.
        unused = {name for name, users in get_users(self.inner).items() if not users}
        return [name for name in self.inner.names() if name.startswith(_KINDS) and name not in unused]

    def get_data_meta(self, name: str) -> tuple[torch.dtype, tuple[int, ...], PartitionPolicy]:
        tensor = self._tensor(name)
        return tensor.dtype, tensor.shape, PartitionPolicy.over(tensor.part_policy)

    def union(self, operand1_name: str, operand2_name: str, output_name: str) -> None:
        """Write the bitwise or of two tensors to a third one. Every rank must call it."""
        joined = self._tensor(operand1_name) | self._tensor(operand2_name)
        output = self._tensor(output_name)
        # One rank on each server writes the server's rows.
        if self.inner.placement.topology.local_rank == 0:
            first, end = output.local_range
            output[first:end] = joined.local_rows()
        joined.delete()
        self.barrier()

    def count_nonzero(self, name: str) -> int:
        return self.inner.count_nonzero(self._key(name))

    def map_shared_data(self, partition_book: object) -> None:
        raise ConfigError("the ranks of a server share their rows already. Leave map_shared_data() out.")

    def _key(self, name: str) -> str:
        # The store prefixes the names of tensors that the graph does not show.
        hidden_key = f"{_HIDDEN}{name}"
        is_hidden = not self.inner.has(name) and self.inner.has(hidden_key)
        return hidden_key if is_hidden else name

    def _tensor(self, name: str) -> InnerDistTensor:
        key = self.inner.column(self._key(name)).name
        public_key = key.removeprefix(_HIDDEN)
        if not public_key.startswith(_KINDS):
            raise ConfigError(f"{name!r} is not partitioned by nodes or edges of a type. Use its own tensor.")
        kind, type_name, tensor_name = public_key.split("~", 2)
        policy = self.all_possible_part_policy[f"{kind}~{type_name}"]
        return InnerDistTensor.from_existing(policy.inner, tensor_name, key)


@final
class _LocalRows(Mapping[str, Tensor]):
    def __init__(self, client: KVClient) -> None:
        self._client = client

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._client.data_name_list():
            raise KeyError(name)
        return DistTensor.over(self._client._tensor(name)).local_partition

    def __iter__(self) -> Iterator[str]:
        return iter(self._client.data_name_list())

    def __len__(self) -> int:
        return len(self._client.data_name_list())


_USERS_BY_TENSOR: SessionField[dict[str, dict[str, WeakSet[object]]]] = SessionField(lambda _: {})


def get_users(store: KVStore) -> dict[str, WeakSet[object]]:
    """Return the objects on this rank that refer to each tensor that may be freed, by key."""
    # Users are kept by the store's label, because two graphs may have tensors with the same name.
    return _USERS_BY_TENSOR.get(store.session).setdefault(store.label, {})


def add_user(tensor: InnerDistTensor, user: object) -> None:
    """Keep ``tensor``, if it may be freed, as long as ``user`` exists."""
    get_users(tensor.kvstore).get(tensor.kvstore_key, WeakSet()).add(user)


def _free_unused(store: KVStore, keys: Sequence[str]) -> list[int]:
    """Free tensors that no rank refers to. Return the ranks that use ``keys``. Every rank must call this."""
    users = get_users(store)
    if any(users.get(key) for key in keys):
        gc.collect()  # the last reference may be in a cycle
    unused = [key for key, references in users.items() if not references and store.has(key)]

    # The gather ends after every rank has entered it, so no rank still reads these rows.
    run_on_all_ranks(store.session, store.fence)
    unused_by_rank = [set(unused_keys) for unused_keys in gather_json(unused, store.session)]
    for key in sorted(set.intersection(*unused_by_rank)):
        store.remove(key)
        del users[key]

    remaining = users.keys() & set(keys)
    return [rank for rank, unused_keys in enumerate(unused_by_rank) if remaining - unused_keys]


@final
class DistTensor(Wrapper, of=InnerDistTensor):
    """Rows on the servers, with DGL's arguments. ``.inner`` is this package's tensor.

    Creating one is collective. Writing waits until the owners have the rows, unlike in DGL. A tensor that is
    not persistent is freed when a later one is created and no rank refers to it any more. Its name is then
    free for any shape. As long as one rank refers to the tensor, all attach to it. Attaching to persistent
    tensors, which are never freed, is not collective. ``attach`` has no effect. In DGL it appends a client
    group's number, but there is one group here.
    """

    inner: InnerDistTensor
    part_policy: Any = InnerAttribute(InnerDistTensor, "part_policy")

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        name: str | None = None,
        init_func: InitRows | None = None,
        part_policy: PartitionPolicy | None = None,
        persistent: bool = False,
        is_gdata: bool = True,
        attach: bool = True,
    ) -> None:
        if name is None and persistent:
            raise ConfigError("a tensor without a name cannot be persistent. Give it a name.")
        policy = inner_policy(part_policy)
        store = get_opened_graph().kvstore if policy is None else policy.store
        existing_keys: list[str] = []
        if name is not None:
            existing_keys = [key for key in store.names() if key.endswith(f"~{name}")]

        # The decision depends on the arguments and the store, which are equal on all ranks.
        may_free = not get_users(store).keys().isdisjoint(existing_keys)
        holders: list[int] = []
        if may_free or not existing_keys:
            holders = _free_unused(store, existing_keys)
        known_keys = set(store.names())
        if existing_keys and name is not None:
            # The graph does not show an optimizer's state and some other tensors.
            row_policy = policy or get_opened_graph().find_policy_of_length(next(iter(shape)))
            is_hidden = row_policy.hidden_key(name) in known_keys
            is_gdata = is_gdata and (row_policy.key(name) in known_keys or not is_hidden)

        if init_func is not None:
            init_func = _by_our_ids(init_func, policy, shape)
        try:
            self.inner = InnerDistTensor(tuple(shape), dtype, name, init_func, policy, persistent, is_gdata)
        except ConfigError as error:
            if holders:
                raise ConfigError(f"{error}, or delete it on the ranks {holders}") from None
            raise

        key = self.inner.kvstore_key
        if not persistent and key not in known_keys:
            get_users(store)[key] = WeakSet()
        add_user(self.inner, self)

    @classmethod
    def over(cls, inner: InnerDistTensor) -> DistTensor:
        tensor = super().over(inner)
        add_user(inner, tensor)
        return tensor

    def __getitem__(self, idx: Ids) -> Tensor:
        """Return the rows for ``idx``, (K, *row), or (1, *row) for one integer."""
        rows = find_attached_rows(self.inner, idx)
        if rows is None:
            rows = self.inner[_convert_ids(self.inner, idx)]
        return rows

    def __setitem__(self, idx: Ids, val: Tensor) -> None:
        self.inner[_convert_ids(self.inner, idx)] = val

    def __or__(self, other: DistTensor) -> DistTensor:
        """Return the bitwise or as a new tensor, for instance the union of two masks. All ranks call this."""
        if not isinstance(other, DistTensor):
            return NotImplemented
        union = DistTensor.over(self.inner | other.inner)
        get_users(union.inner.kvstore)[union.inner.kvstore_key] = WeakSet([union])
        return union

    def __len__(self) -> int:
        return len(self.inner)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Return all rows. Without this method NumPy would read them one by one."""
        return np.asarray(as_array(self.to_local()), dtype=dtype)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Save all rows as one tensor under ``torch.save``, so that it loads without this package."""
        return self.to_local().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # torch does not annotate this

    def __copy__(self) -> DistTensor:
        return self

    def __repr__(self) -> str:
        return repr(self.inner)

    def to_local(self) -> Tensor:
        """Return all rows as one tensor."""
        return self._order_by_id(self.inner.to_local())

    @property
    def local_partition(self) -> Tensor:
        return self._order_by_id(self.inner.local_rows())

    def nonzero(self, *, as_tuple: bool = False) -> Any:
        ids = self.inner.nonzero()
        share = find_shown_edges(self.inner.kvstore, self.inner.part_policy.type_name, ids)
        return (share[:, 0],) if as_tuple else share

    def _order_by_id(self, rows: Tensor) -> Tensor:
        """Return ``rows`` in the order of the ids that scripts know."""
        ids = get_edge_ids(self.inner.kvstore, self.inner.part_policy.type_name)
        if ids is None:
            return rows
        return rows[torch.from_numpy(ids.ours)]

    @property
    def name(self) -> str:
        """``<policy>~<name given at creation>``, as in DGL."""
        return f"{self.inner.part_policy.policy_str}~{self.inner.name}"

    kvstore_key = name


def inner_tensor(value: object) -> object:
    """Return our tensor behind DGL's view. Any other ``value`` is unchanged."""
    return value.inner if isinstance(value, DistTensor) else value


def _by_our_ids(init: InitRows, policy: InnerPolicy | None, shape: Sequence[int]) -> InitRows:
    """Wrap ``init``, which returns rows in DGL's order, so that its rows are in our order."""

    def init_rows(local_shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        row_policy = policy or get_opened_graph().find_policy_of_length(shape[0])
        rows = init(local_shape, dtype)
        ids = get_edge_ids(row_policy.store, row_policy.type_name)
        if ids is None:
            return rows
        # The ids may be a read-only file map, and torch warns about those.
        return rows[torch.from_numpy(ids.source.copy())]

    return init_rows


def _convert_ids(tensor: InnerDistTensor, idx: Ids) -> Ids:
    ids: Ids = idx
    if isinstance(idx, int | np.integer):
        ids = [int(idx)]
    return find_our_edges(tensor.kvstore, tensor.part_policy.type_name, ids)


def _init_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


@final
class DistEmbedding(Wrapper, of=InnerDistEmbedding):
    """Trainable rows, initially zero, with DGL's arguments. Creation is collective.

    ``.inner`` is this package's embedding.
    """

    inner: InnerDistEmbedding

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        name: str | None = None,
        init_func: InitRows | None = None,
        part_policy: PartitionPolicy | None = None,
    ) -> None:
        policy = inner_policy(part_policy)
        graph = get_opened_graph() if policy is None else find_store_graph(policy.store)
        if init_func is None:
            # Without a function, our embeddings would be random.
            init_func = _init_zeros
        init = _by_our_ids(init_func, policy, (num_embeddings,))
        self.inner = InnerDistEmbedding(num_embeddings, embedding_dim, name, init, policy, graph=graph)

    def __call__(self, idx: Ids, device: torch.device | str = "cpu") -> Tensor:
        """Return rows. An optimizer from ``dgl.distributed.optim`` uses their gradients."""
        return self.inner(find_our_edges(self.inner.kvstore, self.inner.part_policy.type_name, idx), device)

    weight: Any = InnerAttribute(InnerDistEmbedding, "weight")
    optm_state: Any = InnerAttribute(InnerDistEmbedding, "optm_state")
    """The optimizer's tensors. Empty without an optimizer."""
    data_name = property(attrgetter("inner.weight.kvstore_key"))


class _Optimizer(SparseOptimizer):
    """A sparse optimizer with DGL's arguments.

    :meth:`save` writes embeddings and state to a folder on a shared disk. DGL writes one pickle per rank with
    the state alone. Every rank must call it, and :meth:`load`, which works on any number of ranks.
    """

    def __init__(self, params: Sequence[DistEmbedding], rule: Callable[[], UpdateRule]) -> None:
        embeddings: Any = [param.inner if isinstance(param, DistEmbedding) else param for param in params]
        super().__init__(embeddings, rule)


@final
class SparseAdagrad(_Optimizer):
    """Adagrad on the rows used in a step, see ``dglx_dist.optim.SparseAdagrad``."""

    def __init__(self, params: Sequence[DistEmbedding], lr: float, eps: float = 1e-10) -> None:
        super().__init__(params, lambda: adagrad_rule(lr, eps))


@final
class SparseAdam(_Optimizer):
    """Adam on the rows used in a step, with one step count per embedding and ``eps`` as in DGL."""

    saved_as = "AdamAsDgl"  # other ``eps`` than dglx_dist.optim.SparseAdam, so states are not exchangeable

    def __init__(
        self,
        params: Sequence[DistEmbedding],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, lambda: adam_rule(lr, betas, eps, corrected=True))
