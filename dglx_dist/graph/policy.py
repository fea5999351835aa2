"""How the rows of a tensor are laid over the servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from dglx_dist.errors import ConfigError
from dglx_dist.graph.kvstore import KVStore
from dglx_dist.graph.partition_book import PartitionBook
from dglx_dist.records import Array, EdgeType


@dataclass(frozen=True, kw_only=True, eq=False)
class PartitionPolicy:
    """Rows that go with the nodes or edges of one type (as DGL's policies of that name)."""

    kind: Literal["node", "edge"]
    type_name: str | EdgeType
    bounds: Array
    """(S + 1,) int64; server s owns the rows ``bounds[s]:bounds[s + 1]``."""
    partition_book: PartitionBook
    store: KVStore

    @property
    def policy_str(self) -> str:
        """``node~<type>`` or ``edge~<source>:<relation>:<destination>``, as DGL writes it."""
        return f"{self.kind}~{type_text(self.type_name)}"

    @property
    def part_id(self) -> int:
        """The partition of this rank."""
        return self.partition_book.partid

    def get_size(self) -> int:
        """Return the number of rows of all servers."""
        return int(self.bounds[-1])

    def get_part_size(self) -> int:
        """Return the number of rows of the own server."""
        return int(self.bounds[self.part_id + 1] - self.bounds[self.part_id])

    def to_partid(self, ids: Tensor) -> Tensor:
        """Return the partition of each row."""
        if self.kind == "node":
            return self.partition_book.nid2partid(ids, str(self.type_name))
        return self.partition_book.eid2partid(ids, self.type_name)

    def to_local(self, ids: Tensor) -> Tensor:
        """Return the ids counted from the first row of the own server, which must own them."""
        return ids - int(self.bounds[self.part_id])

    def key(self, name: str) -> str:
        """Return the name under which the store knows the tensor that users call ``name``."""
        return f"{self.policy_str}~{name}"

    def hidden_key(self, name: str) -> str:
        """Return a name for the store that ``g.nodes[...].data`` does not show."""
        return f"hidden~{self.policy_str}~{name}"


def type_text(type_name: str | EdgeType) -> str:
    """Return a node type as it is, an edge type joined by colons."""
    return type_name if isinstance(type_name, str) else ":".join(type_name)


def policy_of_length(policies: Sequence[PartitionPolicy], num_rows: int) -> PartitionPolicy:
    """Return the one of ``policies`` that has ``num_rows``.

    Raises:
        ConfigError: none or several have that many.
    """
    found = [policy for policy in policies if policy.get_size() == num_rows]
    if len(found) == 1:
        return found[0]
    sizes = ", ".join(f"{policy.policy_str}: {policy.get_size()}" for policy in policies)
    problem = "several types have" if found else "no type has"
    raise ConfigError(f"{problem} {num_rows} rows ({sizes}); say which with part_policy=")
