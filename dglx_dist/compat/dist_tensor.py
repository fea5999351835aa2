"""DGL's ``KVClient``, over our KVStore."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast, final
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from dglx_dist.comm.collectives import barrier, gather_json
from dglx_dist.comm.session import SessionField, Shared
from dglx_dist.compat.partition_book import PartitionPolicy, graph_of_store, inner_policy, outer_policy
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.dist_tensor import DistTensor as InnerDistTensor
from dglx_dist.graph.dist_tensor import opened_graph, union
from dglx_dist.graph.embedding import DistEmbedding as InnerDistEmbedding
from dglx_dist.graph.ids import Ids, as_ids
from dglx_dist.graph.kvstore import KVStore
from dglx_dist.graph.opening import together
from dglx_dist.graph.row_kernels import torch_dtype
from dglx_dist.graph.shared_memory import InitRows

_BATCH: SessionField[LastBatch | None] = SessionField(lambda: None)


@final
class LastBatch:
    """The batch that was yielded last: its input nodes and the rows on its first block, held weakly.

    The rows, not the block: copies that a script makes (``block.int()``) hold the same ones.
    """

    def __init__(self, g: DistGraph, input_nodes: Tensor, block: Any) -> None:
        self._nodes = weakref.ref(input_nodes)
        self._rows = {name: weakref.ref(rows) for name, rows in block.srcdata.items()}
        self._policy = g.get_node_partition_policy(g.ntypes[0])

    def rows(self, tensor: InnerDistTensor, index: object) -> Tensor | None:
        """Return the rows of ``tensor`` that the block has, if ``index`` is the batch's own tensor of ids."""
        if index is None or index is not self._nodes() or tensor.name not in self._rows:
            return None
        # Edges, or another graph, may have something of that name.
        is_of_nodes = tensor.kvstore_key == self._policy.key(tensor.name)
        return self._rows[tensor.name]() if is_of_nodes and tensor.kvstore is self._policy.store else None


def remember(g: DistGraph, input_nodes: object, blocks: Any) -> None:
    """Note what is yielded now; ids by type are not noted, as strategies that cut columns have one type."""
    if isinstance(input_nodes, Tensor):
        _BATCH.set(g.session, LastBatch(g, input_nodes, blocks[0]))


def attached_rows(tensor: InnerDistTensor, index: object) -> Tensor | None:
    """Return what the last batch's first block has of ``tensor`` for its own ids ``index``, or None.

    Under a strategy that cuts features by column, ``g.ndata[name][input_nodes]`` is then what the wrapped
    model takes, this rank's columns, and no row is fetched.
    """
    batch = _BATCH.of(tensor.kvstore.session)
    return None if batch is None else batch.rows(tensor, index)


_HIDDEN, _KINDS = "hidden~", ("node~", "edge~")


@final
class KVClient:
    """Named tensors of a graph; ``g._client`` and ``tensor.kvstore`` are one of these.

    Raises:
        ConfigError: it is made by hand: there are no servers to connect to.
    """

    def __init__(self, *_: object, **__: object) -> None:
        raise ConfigError("there are no servers to connect to; the store of a graph is g._client")

    @staticmethod
    def over(store: KVStore) -> KVClient:
        """Return DGL's view of our store."""
        made = KVClient.__new__(KVClient)
        made.inner = store
        return made

    inner: KVStore

    @property
    def all_possible_part_policy(self) -> dict[str, PartitionPolicy]:
        """The policies of the graph's nodes and edges by name."""
        g = graph_of_store(self.inner)
        policies = [outer_policy(g.get_node_partition_policy(ntype)) for ntype in g.ntypes]
        policies += [outer_policy(g.get_edge_partition_policy(etype)) for etype in g.canonical_etypes]
        return {policy.policy_str: policy for policy in policies}

    @property
    def num_servers(self) -> int:
        """S."""
        return self.inner.placement.topology.num_servers

    @property
    def group_count(self) -> int:
        """1: what DGL calls servers of a machine."""
        return 1

    @property
    def client_id(self) -> int:
        """The rank of this process."""
        return self.inner.placement.topology.rank

    @property
    def machine_id(self) -> int:
        """The server of this rank."""
        return self.inner.placement.topology.server

    @property
    def role(self) -> str:
        """``default``, as DGL calls trainers."""
        return "default"

    @property
    def data_store(self) -> Mapping[str, Tensor]:
        """The own server's rows by name; of the dataset's tensors a copy, made when it is asked for."""
        return _LocalRows(self)

    def barrier(self) -> None:
        """Wait until every rank is here; what was pushed before is then seen by all."""
        together(self.inner.session, self.inner.fence)
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
        """Create a tensor; every rank must call it.

        Args:
            name: ``<policy>~<tensor>``, as DGL composes it.
            shape: Of the whole.
            dtype: Torch's.
            part_policy: How its rows are laid.
            init_func: First rows of the own server; zeros when None.
            is_gdata: Whether the graph shows it.

        Raises:
            ConfigError: the name does not begin with the policy's, or exists already.
        """
        short = name.removeprefix(part_policy.get_data_name(""))
        if short in ("", name):
            raise ConfigError(f"the name {name!r} must be {part_policy.get_data_name('<tensor>')!r}")
        InnerDistTensor(
            tuple(shape), dtype, short, init_func, inner_policy(part_policy), True, is_gdata, False
        )

    def delete_data(self, name: str) -> None:
        """Free a tensor; every rank must call it."""
        self._tensor(name).delete()

    def push(self, name: str, id_tensor: Ids, data_tensor: Tensor) -> None:
        """Overwrite rows and wait until they are there, which DGL does not."""
        self._tensor(name)[id_tensor] = data_tensor

    def pull(self, name: str, id_tensor: Ids) -> Tensor:
        """Return rows."""
        return self._tensor(name)[id_tensor]

    def register_push_handler(self, name: str, func: Callable[..., None]) -> None:
        """Let ``func(store, name, local ids, rows)`` do what is pushed, on the rank that owns the rows.

        Every rank must call it.
        """
        self.inner.register_push_handler(
            self._key(name), lambda rows, ids, values: func({name: rows}, name, ids, values)
        )

    def register_pull_handler(self, name: str, func: Callable[..., Tensor]) -> None:
        """Let ``func(store, name, local ids)`` compute what is pulled. Every rank must call it."""
        self.inner.register_pull_handler(self._key(name), lambda rows, ids: func({name: rows}, name, ids))

    def get_partid(self, name: str, id_tensor: Ids) -> Tensor:
        """Return the partition of each row."""
        policy = self._tensor(name).part_policy
        return policy.to_partid(torch.from_numpy(as_ids(id_tensor, policy.get_size(), name)))

    def data_name_list(self) -> list[str]:
        """Return the names of all tensors, also those made with ``is_gdata=False``."""
        stored = {name.removeprefix(_HIDDEN): name for name in self.inner.names() if name.startswith(_HIDDEN)}
        # What the dataset hides is not the script's.
        made = [
            name
            for name, key in stored.items()
            if name.startswith(_KINDS) and self.inner.column(key).writable
        ]
        return [*self.gdata_name_list(), *made]

    def gdata_name_list(self) -> list[str]:
        """Return the names of all tensors that the graph shows."""
        return [name for name in self.inner.names() if name.startswith(_KINDS)]

    def get_data_meta(self, name: str) -> tuple[torch.dtype, tuple[int, ...], PartitionPolicy]:
        """Return dtype, shape and policy."""
        tensor = self._tensor(name)
        return tensor.dtype, tensor.shape, outer_policy(tensor.part_policy)

    def union(self, operand1_name: str, operand2_name: str, output_name: str) -> None:
        """Write the bitwise or of two tensors into a third. Every rank must call it."""
        joined = union(self._tensor(operand1_name), self._tensor(operand2_name))
        output = self._tensor(output_name)
        first, last = output.local_range
        if self.inner.placement.topology.local_rank == 0:
            output[first:last] = joined.local_rows()
        joined.delete()
        self.barrier()

    def count_nonzero(self, name: str) -> int:
        """Return how many values of a tensor are not zero."""
        return self.inner.count_nonzero(self._key(name))

    def map_shared_data(self, partition_book: object) -> None:
        """Not needed.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("the ranks of a server share their rows already; leave map_shared_data() out")

    def _key(self, name: str) -> str:
        """Return under which name the store has a tensor, which is another one where the graph hides it."""
        return f"{_HIDDEN}{name}" if not self.inner.has(name) and self.inner.has(f"{_HIDDEN}{name}") else name

    def _tensor(self, name: str) -> InnerDistTensor:
        key = self._key(name)
        column, shown = self.inner.column(key), key.removeprefix(_HIDDEN)
        of_types = self.all_possible_part_policy
        found = next((one for one in of_types if shown.startswith(f"{one}~")), None)
        if found is None:
            raise ConfigError(f"{name!r} does not go with the nodes or edges of a type; use its own tensor")
        shape, short = (column.num_rows, *column.info.row_shape), shown.removeprefix(f"{found}~")
        dtype, policy = torch_dtype(column.info.dtype), inner_policy(of_types[found])
        return InnerDistTensor(shape, dtype, short, None, policy, is_gdata=shown == key)


@final
class _LocalRows(Mapping[str, Tensor]):
    """The own server's rows of each tensor, looked up when they are asked for."""

    def __init__(self, client: KVClient) -> None:
        self._client = client

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._client.data_name_list():
            raise KeyError(name)
        return self._client._tensor(name).local_rows()

    def __iter__(self) -> Iterator[str]:
        return iter(self._client.data_name_list())

    def __len__(self) -> int:
        return len(self._client.data_name_list())


_LIFETIMES: SessionField[dict[str, Lifetimes]] = SessionField(dict)
"""By label of the store."""


@final
class Lifetimes:
    """Which tensors of a store that are not persistent a script still refers to, on this rank."""

    def __init__(self) -> None:
        self._users: dict[str, WeakSet[object]] = {}

    def add(self, key: str, user: object) -> None:
        """Free the tensor ``key`` once ``user``, and whoever else uses it by then, is gone."""
        self._users[key] = WeakSet([user])

    def use(self, key: str, user: object) -> None:
        """Keep the tensor ``key``, if it is one that may be freed, as long as ``user`` is there."""
        if key in self._users:
            self._users[key].add(user)

    def free(self, store: KVStore) -> None:
        """Free what no rank refers to any more. Every rank must call it.

        Args:
            store: Whose tensors these are.
        """
        unused = [key for key, users in self._users.items() if not users and store.has(key)]
        # The answers come when all have asked, so nobody reads these rows any more.
        together(store.session, store.fence)
        told = [set(one) for one in cast("list[list[str]]", gather_json(unused, store.session))]
        for key in sorted(set.intersection(*told)):
            store.remove(key)
            del self._users[key]


def lifetimes_of(store: KVStore) -> Lifetimes:
    """Return those of a graph's store: two graphs may have tensors of the same name."""
    return _LIFETIMES.of(store.session).setdefault(store.label, Lifetimes())


@final
class DistTensor(Shared):
    """Rows on the servers, with DGL's arguments; ``.inner`` is ours.

    Creating one is collective. Writing waits until the rows are there, as DGL's does not. A tensor that is
    not persistent is freed when a later one is created and no rank refers to it any more.

    Args:
        shape: Of the whole.
        dtype: Torch's.
        name: Attaches to what exists of that name.
        init_func: (shape, dtype) to the first rows; zeros when None.
        part_policy: Needed where several types have so many nodes or edges.
        persistent: Whether it stays when nobody refers to it any more.
        is_gdata: Whether ``g.nodes[...].data`` shows it.
        attach: Of no effect: DGL appends the number of a group of clients, of which there is one here.

    Raises:
        ConfigError: a persistent tensor without a name, or as for ``dglx_dist.DistTensor``.
    """

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
            raise ConfigError("a tensor that nobody can find by name cannot be persistent; give it a name")
        policy = inner_policy(part_policy)
        store = opened_graph().kvstore if policy is None else policy.store
        lifetimes, known = lifetimes_of(store), set(store.names())
        # Attaching to what exists is not collective, and freeing is.
        if name is None or not any(key.endswith(f"~{name}") for key in known):
            lifetimes.free(store)
        self.inner = InnerDistTensor(tuple(shape), dtype, name, init_func, policy, persistent, is_gdata)
        if persistent or self.inner.kvstore_key in known:
            lifetimes.use(self.inner.kvstore_key, self)
        else:
            lifetimes.add(self.inner.kvstore_key, self)

    @staticmethod
    def over(inner: InnerDistTensor) -> DistTensor:
        """Return DGL's view of one of our tensors."""
        made = DistTensor.__new__(DistTensor)
        made.inner = inner
        lifetimes_of(inner.kvstore).use(inner.kvstore_key, made)
        return made

    def __getitem__(self, idx: Ids) -> Tensor:
        """Return the rows of ``idx``, (K, *row); of one integer, (1, *row)."""
        found = attached_rows(self.inner, idx)
        return self.inner[_many(idx)] if found is None else found

    def __setitem__(self, idx: Ids, val: Tensor) -> None:
        """Overwrite rows, and wait until their owners have them."""
        self.inner[_many(idx)] = val

    def __or__(self, other: DistTensor) -> DistTensor:
        """Return a new tensor, such as the union of two masks. Collective."""
        if not isinstance(other, DistTensor):
            return NotImplemented
        made = DistTensor.over(self.inner | other.inner)
        lifetimes_of(self.inner.kvstore).add(made.inner.kvstore_key, made)
        return made

    def __len__(self) -> int:
        return len(self.inner)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Be saved by ``torch.save`` as the tensor of all rows, which is read without this package."""
        rows = self.inner.to_local()
        return rows.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # torch leaves it bare

    def __copy__(self) -> DistTensor:
        return self

    def __repr__(self) -> str:
        return repr(self.inner)

    @property
    def kvstore(self) -> KVClient:
        """The store, as DGL's client shows it."""

        return KVClient.over(self.inner.kvstore)

    @property
    def kvstore_key(self) -> str:
        """Under which ``kvstore`` knows it; as :attr:`name`."""
        return self.name

    @property
    def local_partition(self) -> Tensor:
        """The own server's rows."""
        return self.inner.local_rows()

    @property
    def part_policy(self) -> PartitionPolicy:
        """How its rows are laid over the partitions."""
        return outer_policy(self.inner.part_policy)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole."""
        return self.inner.shape

    @property
    def dtype(self) -> torch.dtype:
        """Torch's dtype."""
        return self.inner.dtype

    @property
    def name(self) -> str:
        """``<policy>~<name given at creation>``, as DGL has it."""
        return f"{self.inner.part_policy.policy_str}~{self.inner.name}"

    @property
    def tensor_name(self) -> str:
        """The name given at creation."""
        return self.inner.name

    def count_nonzero(self) -> int:
        """Return how many values of the whole are not zero."""
        return self.inner.count_nonzero()


def inner_tensor(value: object) -> object:
    """Return ours where ``value`` is DGL's view of it, else ``value``."""
    return value.inner if isinstance(value, DistTensor) else value


def _many(idx: Ids) -> Ids:
    return [int(idx)] if isinstance(idx, int | np.integer) else idx


@final
class DistEmbedding(Shared):
    """Trainable rows with DGL's arguments; ``.inner`` is ours. Creating one is collective.

    Args:
        num_embeddings: Rows.
        embedding_dim: Columns.
        name: Attaches to what exists of that name.
        init_func: (shape, dtype) to the first rows; zeros when None, as with DGL.
        part_policy: Needed where several types have so many nodes or edges.

    Raises:
        ConfigError: as for ``dglx_dist.DistEmbedding``.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        name: str | None = None,
        init_func: InitRows | None = None,
        part_policy: PartitionPolicy | None = None,
    ) -> None:
        policy = inner_policy(part_policy)
        first = init_func or _zeros
        graph = opened_graph() if policy is None else graph_of_store(policy.store)
        self.inner = InnerDistEmbedding(num_embeddings, embedding_dim, name, first, policy, graph=graph)

    def __call__(self, idx: Ids, device: torch.device | str = "cpu") -> Tensor:
        """Return rows, whose gradients an optimizer of ``dgl.distributed.optim`` will take."""
        return self.inner(idx, device)

    def reset_trace(self) -> None:
        """Forget the gradients that are there."""
        self.inner.reset_trace()

    @property
    def weight(self) -> DistTensor:
        """The rows."""
        return DistTensor.over(self.inner.weight)

    @property
    def name(self) -> str:
        """The name given at creation."""
        return self.inner.name

    @property
    def data_name(self) -> str:
        """Under which the store knows the rows."""
        return self.inner.weight.kvstore_key

    @property
    def kvstore(self) -> KVClient:
        """The store that holds the rows."""
        return KVClient.over(self.inner.kvstore)

    @property
    def num_embeddings(self) -> int:
        """Rows."""
        return self.inner.num_embeddings

    @property
    def embedding_dim(self) -> int:
        """Columns."""
        return self.inner.embedding_dim

    @property
    def part_policy(self) -> PartitionPolicy:
        """How the rows are laid over the partitions."""
        return outer_policy(self.inner.part_policy)

    @property
    def optm_state(self) -> tuple[DistTensor, ...]:
        """The optimizer's tensors, once there is one."""
        return tuple(DistTensor.over(state) for state in self.inner.optm_state)


def inner_embedding(embedding: object) -> object:
    """Return ours where ``embedding`` is DGL's view of it, else ``embedding``."""
    return embedding.inner if isinstance(embedding, DistEmbedding) else embedding


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype)
