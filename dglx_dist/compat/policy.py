"""DGL's partition policies, over ours."""

from __future__ import annotations

from typing import cast, final

from torch import Tensor

from dglx_dist.compat.book import RangePartitionBook
from dglx_dist.compat.opened import graph_of_book
from dglx_dist.errors import ConfigError
from dglx_dist.graph.ids import Ids
from dglx_dist.graph.policy import PartitionPolicy as Inner
from dglx_dist.graph.policy import type_text
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, EdgeType


class PartitionPolicy:
    """How rows are laid over partitions, as DGL says it.

    Args:
        policy_str: ``node~<type>`` or ``edge~<source>:<relation>:<destination>``; ``node`` and ``edge`` mean
            those of a graph of one type.
        partition_book: DGL's view of a book.

    Raises:
        ConfigError: it is neither.
    """

    def __init__(self, policy_str: str, partition_book: RangePartitionBook) -> None:
        kind, _, name = policy_str.partition("~")
        if kind not in ("node", "edge"):
            raise ConfigError(f"policy_str is {policy_str!r}; it must begin with 'node' or 'edge'")
        self._kind, self._book = kind, partition_book
        if kind == "node":
            self._type: str | EdgeType = name or NODE_TYPE
        else:
            pieces = tuple(name.split(":")) if ":" in name else name or EDGE_TYPE
            self._type = partition_book.to_canonical_etype(cast("str | EdgeType", pieces))
        bounds = partition_book.inner
        self._bounds = (
            bounds.node_bounds(cast("str", self._type)) if kind == "node" else bounds.edge_bounds(self._type)
        )

    @property
    def policy_str(self) -> str:
        """The name of the policy."""
        return f"{self._kind}~{type_text(self._type)}"

    @property
    def type_name(self) -> str | EdgeType:
        """The node type, or the edge type as a triple."""
        return self._type

    @property
    def part_id(self) -> int:
        """The own partition."""
        return self._book.partid

    @property
    def partition_book(self) -> RangePartitionBook:
        """The book."""
        return self._book

    @property
    def is_node(self) -> bool:
        """Whether the rows are those of nodes."""
        return self._kind == "node"

    def get_data_name(self, name: str) -> str:
        """Return under which the KVStore knows the tensor ``name``."""
        return f"{self.policy_str}~{name}"

    def to_local(self, id_tensor: Ids) -> Tensor:
        """Return the ids counted from the own partition's first."""
        if self.is_node:
            return self._book.nid2localnid(id_tensor, self.part_id, cast("str", self._type))
        return self._book.eid2localeid(id_tensor, self.part_id, self._type)

    def to_partid(self, id_tensor: Ids) -> Tensor:
        """Return the partition of each row."""
        if self.is_node:
            return self._book.nid2partid(id_tensor, cast("str", self._type))
        return self._book.eid2partid(id_tensor, self._type)

    def get_part_size(self) -> int:
        """Return the number of rows of the own partition."""
        return int(self._bounds[self.part_id + 1] - self._bounds[self.part_id])

    def get_size(self) -> int:
        """Return the number of rows of all partitions."""
        return int(self._bounds[-1])


@final
class NodePartitionPolicy(PartitionPolicy):
    """The policy of the nodes of a type."""

    def __init__(self, partition_book: RangePartitionBook, ntype: str = NODE_TYPE) -> None:
        super().__init__(f"node~{ntype}", partition_book)


@final
class EdgePartitionPolicy(PartitionPolicy):
    """The policy of the edges of a type, given as a triple."""

    def __init__(self, partition_book: RangePartitionBook, etype: EdgeType = EDGE_TYPE) -> None:
        super().__init__(f"edge~{type_text(etype)}", partition_book)


def inner_policy(policy: PartitionPolicy | Inner | None) -> Inner | None:
    """Return our policy for one of DGL's, of the open graph whose book it has.

    Raises:
        ConfigError: it is no policy, its book is of no open graph, or the graph has no such type.
    """
    if policy is None or isinstance(policy, Inner):
        return policy
    if not isinstance(policy, PartitionPolicy):
        raise ConfigError(f"part_policy is {policy!r}; give what g.get_node_partition_policy(ntype) returns")
    g = graph_of_book(policy.partition_book.inner)
    if policy.is_node:
        return g.get_node_partition_policy(cast("str", policy.type_name))
    return g.get_edge_partition_policy(policy.type_name)


def outer_policy(policy: Inner) -> PartitionPolicy:
    """Return DGL's view of one of our policies of nodes or edges."""
    return PartitionPolicy(policy.policy_str, RangePartitionBook.over(policy.partition_book))
