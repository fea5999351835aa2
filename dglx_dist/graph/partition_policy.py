"""Partition policies: the distribution of a tensor's rows over the servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dglx_dist.errors import ConfigError
from dglx_dist.graph.ids import Ids, as_ids
from dglx_dist.graph.kvstore import KVStore
from dglx_dist.graph.partition_book import PartitionBook, RowOwners
from dglx_dist.records import Array, EdgeType


@dataclass(frozen=True, kw_only=True, eq=False)
class PartitionPolicy:
    """Distribution of rows that belong to nodes or edges of one type (as DGL's policies), or to neither."""

    kind: Literal["node", "edge", "own"]
    type_name: str | EdgeType
    """Of nodes or edges; of an own policy the user's name."""
    bounds: Array
    """(S + 1,) int64; server s owns the rows ``bounds[s]:bounds[s + 1]``."""
    partition_book: PartitionBook
    store: KVStore
    dataset: str = ""
    """Checksum of the dataset that numbers the rows; "" for rows that no dataset numbers."""

    @cached_property
    def policy_str(self) -> str:
        """``node~<type>`` or ``edge~<source>:<relation>:<destination>``, as in DGL; ``own~<name>``."""
        return f"{self.kind}~{type_text(self.type_name)}"

    @property
    def part_id(self) -> int:
        return self.partition_book.partid

    @property
    def owned_range(self) -> tuple[int, int]:
        """The first row that this rank owns (see :class:`RowOwners`), and the one after its last."""
        topology = self.store.placement.topology
        return RowOwners(self.bounds, topology).range_of(topology.rank)

    def get_size(self) -> int:
        return int(self.bounds[-1])

    def get_part_size(self) -> int:
        return int(self.bounds[self.part_id + 1] - self.bounds[self.part_id])

    def to_partid(self, ids: Ids) -> Tensor:
        """Return the partition of each row; IndexError when an id is out of range."""
        rows = as_ids(ids, self.get_size(), self.policy_str)
        return torch.from_numpy(np.searchsorted(self.bounds, rows, side="right") - 1)

    def to_local(self, ids: Tensor) -> Tensor:
        """Return the ids relative to the first row of the local server, which must own them."""
        return ids - int(self.bounds[self.part_id])

    def key(self, name: str) -> str:
        """Return the store's name of the tensor that users call ``name``."""
        return f"{self.policy_str}~{name}"

    def hidden_key(self, name: str) -> str:
        """Return a name in the store that ``g.nodes[...].data`` does not show."""
        return f"hidden~{self.policy_str}~{name}"


def type_text(type_name: str | EdgeType) -> str:
    return type_name if isinstance(type_name, str) else ":".join(type_name)


def policy_of_length(policies: Sequence[PartitionPolicy], num_rows: int) -> PartitionPolicy:
    """Return the one of ``policies`` that has ``num_rows``; ConfigError when none or several have."""
    found = [policy for policy in policies if policy.get_size() == num_rows]
    if len(found) == 1:
        return found[0]
    sizes = ", ".join(f"{policy.policy_str}: {policy.get_size()}" for policy in policies)
    problem = "several types have" if found else "no type has"
    raise ConfigError(
        f"{problem} {num_rows} rows ({sizes}); say which with part_policy=, or give rows that are neither "
        f"nodes nor edges part_policy=g.new_policy(name, {num_rows})"
    )


def own_policy(name: str, rows: int | Sequence[int], book: PartitionBook, store: KVStore) -> PartitionPolicy:
    """Return a policy for rows that are neither nodes nor edges, such as relations. Not collective.

    ``name`` is part of the names of its tensors. ``rows`` is their number, cut evenly over the S servers, or
    (S + 1,) bounds: server s has the rows ``rows[s]:rows[s + 1]``.

    Raises:
        ConfigError: ``~`` in the name, a negative number, or invalid bounds.
    """
    if "~" in name:
        raise ConfigError(f"the policy {name!r} has a '~', which separates it from its tensors' names")
    servers = store.placement.topology.num_servers
    if isinstance(rows, int | np.integer):
        if rows < 0:
            raise ConfigError(f"the policy {name!r} was given {rows} rows; give 0 or more")
        bounds = np.arange(servers + 1, dtype=np.int64) * int(rows) // servers
    else:
        bounds = np.array(rows, dtype=np.int64)
        if bounds.shape != (servers + 1,) or bounds[0] != 0 or (np.diff(bounds) < 0).any():
            raise ConfigError(
                f"the policy {name!r} was given the bounds {list(rows)} for {servers} server(s); give "
                f"{servers + 1} ascending numbers from 0 on, or the number of rows alone"
            )
    return PartitionPolicy(kind="own", type_name=name, bounds=bounds, partition_book=book, store=store)
