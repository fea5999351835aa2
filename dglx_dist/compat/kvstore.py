"""DGL's ``KVClient``, over our KVStore."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import final

import torch
from torch import Tensor

from dglx_dist.cluster.collectives import barrier
from dglx_dist.compat.opened import graph_of_store
from dglx_dist.compat.policy import PartitionPolicy, inner_policy, outer_policy
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_tensor import DistTensor as Inner
from dglx_dist.graph.dist_tensor import union
from dglx_dist.graph.dtypes import torch_dtype
from dglx_dist.graph.ids import Ids, as_ids
from dglx_dist.graph.kvstore import KVStore
from dglx_dist.graph.opening import together
from dglx_dist.graph.shared_rows import InitRows

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
        Inner(tuple(shape), dtype, short, init_func, inner_policy(part_policy), True, is_gdata, False)

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

    def _tensor(self, name: str) -> Inner:
        key = self._key(name)
        column, shown = self.inner.column(key), key.removeprefix(_HIDDEN)
        of_types = self.all_possible_part_policy
        found = next((one for one in of_types if shown.startswith(f"{one}~")), None)
        if found is None:
            raise ConfigError(f"{name!r} does not go with the nodes or edges of a type; use its own tensor")
        shape, short = (column.num_rows, *column.info.row_shape), shown.removeprefix(f"{found}~")
        dtype, policy = torch_dtype(column.info.dtype), inner_policy(of_types[found])
        return Inner(shape, dtype, short, None, policy, is_gdata=shown == key)


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
