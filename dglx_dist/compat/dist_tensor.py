"""DGL's ``DistTensor``, ``DistEmbedding`` with its optimizers, and ``KVClient`` around ours."""

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
    edge_ids,
    graph_of_store,
    inner_policy,
    our_edges,
    shown_edges,
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
"""Weak references to the input nodes of the last batch, and to the rows on its first block by store and key:
not to the block, since copies that a script makes (``block.int()``) hold the same rows."""


def remember(g: DistGraph, input_nodes: object, blocks: Any) -> None:
    """Keep the batch that is yielded now; ids by type are not needed, as column-wise strategies have one."""
    if isinstance(input_nodes, Tensor):
        policy = g.get_node_partition_policy(g.ntypes[0])
        rows = {(g.kvstore, policy.key(name)): weakref.ref(x) for name, x in blocks[0].srcdata.items()}
        _BATCH.set(g.session, (weakref.ref(input_nodes), rows))


def attached_rows(tensor: InnerDistTensor, index: object) -> Tensor | None:
    """Return the rows of ``tensor`` on the last batch's first block if ``index`` is its input nodes, or None.

    Where features are cut by column these are this rank's columns, which the wrapped model takes.
    """
    input_nodes, rows = _BATCH.get(tensor.kvstore.session)
    key = tensor.kvstore, tensor.kvstore_key
    return rows[key]() if index is not None and index is input_nodes() and key in rows else None


_HIDDEN, _KINDS = "hidden~", ("node~", "edge~")


@final
class KVClient(Wrapper, of=KVStore):
    """Named tensors of a graph; ``g._client`` and ``tensor.kvstore`` are one of these."""

    def __init__(self, *_: object, **__: object) -> None:
        raise ConfigError("there are no servers to connect to; the store of a graph is g._client")

    inner: KVStore
    group_count, role = 1, "default"
    """DGL's server processes per machine, and its role of trainers."""

    @property
    def all_possible_part_policy(self) -> dict[str, PartitionPolicy]:
        g = graph_of_store(self.inner)
        policies = [*map(g.get_node_partition_policy, g.ntypes)]
        policies += map(g.get_edge_partition_policy, g.canonical_etypes)
        return {policy.policy_str: PartitionPolicy.over(policy) for policy in policies}

    num_servers = property(attrgetter("inner.placement.topology.num_servers"))
    client_id = property(attrgetter("inner.placement.topology.rank"))
    machine_id = property(attrgetter("inner.placement.topology.server"))

    @property
    def data_store(self) -> Mapping[str, Tensor]:
        """The own server's rows by name; a copy, made on access, for tensors of the dataset."""
        return _LocalRows(self)

    def barrier(self) -> None:
        """Wait for all ranks; afterwards every rank sees what was pushed before."""
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
        """Create a tensor called ``<policy>~<tensor>``; every rank must call it."""
        short = name.removeprefix(part_policy.get_data_name(""))
        if short in ("", name):
            raise ConfigError(f"the name {name!r} must be {part_policy.get_data_name('<tensor>')!r}")
        policy = inner_policy(part_policy)
        InnerDistTensor(tuple(shape), dtype, short, init_func, policy, True, is_gdata, False)

    def delete_data(self, name: str) -> None:
        """Free a tensor; every rank must call it."""
        self._tensor(name).delete()

    def push(self, name: str, id_tensor: Ids, data_tensor: Tensor) -> None:
        """Overwrite rows and wait until their owners have them; DGL does not wait."""
        DistTensor.over(self._tensor(name))[id_tensor] = data_tensor

    def pull(self, name: str, id_tensor: Ids) -> Tensor:
        return DistTensor.over(self._tensor(name))[id_tensor]

    def register_push_handler(self, name: str, func: Callable[..., None]) -> None:
        """Apply pushes with ``func(store, name, local ids, rows)`` on the owner; all ranks must call it."""
        self.inner.register_push_handler(
            self._key(name), lambda rows, ids, values: func({name: rows}, name, ids, values)
        )

    def register_pull_handler(self, name: str, func: Callable[..., Tensor]) -> None:
        """Answer pulls with ``func(store, name, local ids)``; all ranks must call it."""
        self.inner.register_pull_handler(self._key(name), lambda rows, ids: func({name: rows}, name, ids))

    def get_partid(self, name: str, id_tensor: Ids) -> Tensor:
        return self._tensor(name).part_policy.to_partid(id_tensor)

    def data_name_list(self) -> list[str]:
        """Return the names of all tensors, including those created with ``is_gdata=False``."""
        hidden = [key for key in self.inner.names() if key.removeprefix(_HIDDEN).startswith(_KINDS)]
        # Hidden columns of the dataset, which are read-only, are none of the script's tensors.
        created = [key for key in hidden if key.startswith(_HIDDEN) and self.inner.column(key).writable]
        return [*self.gdata_name_list(), *(key.removeprefix(_HIDDEN) for key in created)]

    def gdata_name_list(self) -> list[str]:
        # Without those that no object of this rank refers to: DGL would have freed them.
        gone = {name for name, users in users_of(self.inner).items() if not users}
        return [name for name in self.inner.names() if name.startswith(_KINDS) and name not in gone]

    def get_data_meta(self, name: str) -> tuple[torch.dtype, tuple[int, ...], PartitionPolicy]:
        tensor = self._tensor(name)
        return tensor.dtype, tensor.shape, PartitionPolicy.over(tensor.part_policy)

    def union(self, operand1_name: str, operand2_name: str, output_name: str) -> None:
        """Write the bitwise or of two tensors into a third; every rank must call it."""
        joined = self._tensor(operand1_name) | self._tensor(operand2_name)
        output = self._tensor(output_name)
        first, last = output.local_range
        if self.inner.placement.topology.local_rank == 0:
            output[first:last] = joined.local_rows()
        joined.delete()
        self.barrier()

    def count_nonzero(self, name: str) -> int:
        return self.inner.count_nonzero(self._key(name))

    def map_shared_data(self, partition_book: object) -> None:
        raise ConfigError("the ranks of a server share their rows already; leave map_shared_data() out")

    def _key(self, name: str) -> str:
        # The store prefixes the names of tensors that the graph does not show.
        return f"{_HIDDEN}{name}" if not self.inner.has(name) and self.inner.has(f"{_HIDDEN}{name}") else name

    def _tensor(self, name: str) -> InnerDistTensor:
        key = self.inner.column(self._key(name)).name
        shown = key.removeprefix(_HIDDEN)
        if not shown.startswith(_KINDS):
            raise ConfigError(f"{name!r} is not laid out by nodes or edges of a type; use its own tensor")
        kind, type_name, short = shown.split("~", 2)
        policy = self.all_possible_part_policy[f"{kind}~{type_name}"]
        return InnerDistTensor.from_existing(policy.inner, short, key)


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


_USERS: SessionField[dict[str, dict[str, WeakSet[object]]]] = SessionField(lambda _: {})


def users_of(store: KVStore) -> dict[str, WeakSet[object]]:
    """Return who refers to each tensor of ``store`` on this rank that is freed once nobody does, by key."""
    # By label of the store: two graphs may have tensors of the same name.
    return _USERS.get(store.session).setdefault(store.label, {})


def use(tensor: InnerDistTensor, user: object) -> None:
    """Keep ``tensor``, if it may be freed, as long as ``user`` exists."""
    users_of(tensor.kvstore).get(tensor.kvstore_key, WeakSet()).add(user)


def _free_unused(store: KVStore, wanted: Sequence[str]) -> list[int]:
    """Free the tensors that no rank refers to any more; return who refers to ``wanted``. Collective."""
    users = users_of(store)
    if any(users.get(key) for key in wanted):
        gc.collect()  # a cycle may be all that refers to it here
    unused = [key for key, of in users.items() if not of and store.has(key)]
    # The gather ends after every rank has entered it, so no rank still reads these rows.
    run_on_all_ranks(store.session, store.fence)
    unused_by_rank = gather_json(unused, store.session)
    for key in sorted(set.intersection(*map(set, unused_by_rank))):
        store.remove(key)
        del users[key]
    kept = {key for key in wanted if key in users}
    return [rank for rank, of_rank in enumerate(unused_by_rank) if kept - set(of_rank)]


@final
class DistTensor(Wrapper, of=InnerDistTensor):
    """Rows on the servers, with DGL's arguments; ``.inner`` is ours.

    Creating one is collective. Writing waits until the owners have the rows, unlike DGL's. A tensor that is
    not persistent is freed when a later one is created and no rank refers to it any more, and its name is
    then free for any shape; as long as one rank refers to it, all attach to it. Attaching to others, which
    are never freed, is not collective. ``attach`` has no effect: DGL appends the number of a group of
    clients, of which there is one here.
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
            raise ConfigError("a tensor without a name cannot be persistent; give it a name")
        policy = inner_policy(part_policy)
        store = get_opened_graph().kvstore if policy is None else policy.store
        taken = [key for key in store.names() if name is not None and key.endswith(f"~{name}")]
        # Decided by the arguments and the store, which are alike on all ranks.
        holders = []
        if not taken or not users_of(store).keys().isdisjoint(taken):
            holders = _free_unused(store, taken)
        known = set(store.names())
        if taken and name is not None:
            # The state of an optimizer, and what else the graph does not show.
            place = policy or get_opened_graph().find_policy_of_length(next(iter(shape)))
            is_gdata = is_gdata and (place.key(name) in known or place.hidden_key(name) not in known)
        try:
            first = init_func and _by_our_ids(init_func, policy, shape)
            self.inner = InnerDistTensor(tuple(shape), dtype, name, first, policy, persistent, is_gdata)
        except ConfigError as error:
            raise ConfigError(f"{error}, or delete it on the ranks {holders}") if holders else error from None
        if not persistent and self.inner.kvstore_key not in known:
            users_of(store)[self.inner.kvstore_key] = WeakSet()
        use(self.inner, self)

    @classmethod
    def over(cls, inner: InnerDistTensor) -> DistTensor:
        made = super().over(inner)
        use(inner, made)
        return made

    def __getitem__(self, idx: Ids) -> Tensor:
        """Return the rows of ``idx``, (K, *row); of one integer, (1, *row)."""
        found = attached_rows(self.inner, idx)
        return self.inner[_rows(self.inner, idx)] if found is None else found

    def __setitem__(self, idx: Ids, val: Tensor) -> None:
        self.inner[_rows(self.inner, idx)] = val

    def __or__(self, other: DistTensor) -> DistTensor:
        """Return the bitwise or as a new tensor, such as the union of two masks; collective."""
        if not isinstance(other, DistTensor):
            return NotImplemented
        made = DistTensor.over(self.inner | other.inner)
        users_of(made.inner.kvstore)[made.inner.kvstore_key] = WeakSet([made])
        return made

    def __len__(self) -> int:
        return len(self.inner)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Return all rows; without this method NumPy would read them one by one."""
        return np.asarray(as_array(self.to_local()), dtype=dtype)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Save the tensor of all rows under ``torch.save``, so that it loads without this package."""
        return self.to_local().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # torch leaves it bare

    def __copy__(self) -> DistTensor:
        return self

    def __repr__(self) -> str:
        return repr(self.inner)

    def to_local(self) -> Tensor:
        """Return all rows as one tensor."""
        return self._by_id(self.inner.to_local())

    @property
    def local_partition(self) -> Tensor:
        return self._by_id(self.inner.local_rows())

    def nonzero(self, *, as_tuple: bool = False) -> Any:
        ids = self.inner.nonzero()
        share = shown_edges(self.inner.kvstore, self.inner.part_policy.type_name, ids)
        return (share[:, 0],) if as_tuple else share

    def _by_id(self, rows: Tensor) -> Tensor:
        ids = edge_ids(self.inner.kvstore, self.inner.part_policy.type_name)
        return rows if ids is None else rows[torch.from_numpy(ids.ours)]

    @property
    def name(self) -> str:
        """``<policy>~<name given at creation>``, as in DGL."""
        return f"{self.inner.part_policy.policy_str}~{self.inner.name}"

    kvstore_key = name


def inner_tensor(value: object) -> object:
    """Return our tensor behind DGL's view of it; any other ``value`` as it is."""
    return value.inner if isinstance(value, DistTensor) else value


def _by_our_ids(init: InitRows, policy: InnerPolicy | None, shape: Sequence[int]) -> InitRows:
    def rows(local_shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        place, made = policy or get_opened_graph().find_policy_of_length(shape[0]), init(local_shape, dtype)
        ids = edge_ids(place.store, place.type_name)
        return made if ids is None else made[torch.from_numpy(ids.source.copy())]

    return rows


def _rows(tensor: InnerDistTensor, idx: Ids) -> Ids:
    many: Ids = [int(idx)] if isinstance(idx, int | np.integer) else idx
    return our_edges(tensor.kvstore, tensor.part_policy.type_name, many)


@final
class DistEmbedding(Wrapper, of=InnerDistEmbedding):
    """Trainable rows, zero at first, with DGL's arguments; ``.inner`` is ours. Creation is collective."""

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
        graph = get_opened_graph() if policy is None else graph_of_store(policy.store)
        init = init_func or (lambda shape, dtype: torch.zeros(shape, dtype=dtype))
        init = _by_our_ids(init, policy, (num_embeddings,))
        self.inner = InnerDistEmbedding(num_embeddings, embedding_dim, name, init, policy, graph=graph)

    def __call__(self, idx: Ids, device: torch.device | str = "cpu") -> Tensor:
        """Return rows; an optimizer of ``dgl.distributed.optim`` takes their gradients."""
        return self.inner(our_edges(self.inner.kvstore, self.inner.part_policy.type_name, idx), device)

    weight: Any = InnerAttribute(InnerDistEmbedding, "weight")
    optm_state: Any = InnerAttribute(InnerDistEmbedding, "optm_state")
    """The optimizer's tensors; empty without an optimizer."""
    data_name = property(attrgetter("inner.weight.kvstore_key"))


class _Optimizer(SparseOptimizer):
    """A sparse optimizer with DGL's arguments.

    :meth:`save` writes embeddings and state to a folder on a shared disk, where DGL writes one pickle per
    rank, with the state alone; every rank must call it, and :meth:`load`, on any number of ranks.
    """

    def __init__(self, params: Sequence[DistEmbedding], rule: Callable[[], UpdateRule]) -> None:
        inner: Any = [param.inner if isinstance(param, DistEmbedding) else param for param in params]
        super().__init__(inner, rule)


@final
class SparseAdagrad(_Optimizer):
    """Adagrad on the rows used in a step; see ``dglx_dist.optim.SparseAdagrad``."""

    def __init__(self, params: Sequence[DistEmbedding], lr: float, eps: float = 1e-10) -> None:
        super().__init__(params, lambda: adagrad_rule(lr, eps))


@final
class SparseAdam(_Optimizer):
    """Adam on the rows used in a step, with one step count per embedding; ``eps`` as in DGL."""

    saved_as = "AdamAsDgl"  # states of dglx_dist.optim.SparseAdam, which has another eps, must not load here

    def __init__(
        self,
        params: Sequence[DistEmbedding],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, lambda: adam_rule(lr, betas, eps, corrected=True))
