"""Who owns which ids: DGL's partition book over contiguous ranges, without a table per node."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from dglx_dist.errors import ConfigError
from dglx_dist.graph.ids import Ids, as_ids, check_ids, to_tensor
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Array, EdgeType

K = TypeVar("K", bound=Hashable)


class PartitionBook:
    """Owners and local ids of nodes and edges from range bounds; methods as DGL's RangePartitionBook.

    A partition is what one server holds. Ids of one type are contiguous per partition. *Homogeneous* ids
    number the nodes (edges) of all types together: partition by partition, and inside one type by type.
    Answers are (K,) int64 tensors in the order of the (K,) ids asked for.

    Args:
        node_bounds: node type -> (Q + 1,) int64; partition q owns the ids ``[q]:[q + 1]``.
        edge_bounds: edge type -> (Q + 1,) int64, likewise.
        partid: The partition of this rank.
        num_trainers: How many trainers the graph was cut for in its second level; None: there is none.
    """

    def __init__(
        self,
        node_bounds: Mapping[str, Array],
        edge_bounds: Mapping[EdgeType, Array],
        partid: int,
        num_trainers: int | None = None,
    ) -> None:
        self._nodes = _Ranges(node_bounds, "nodes")
        self._edges = _Ranges(edge_bounds, "edges")
        self._partid = partid
        self._num_trainers = num_trainers

    @property
    def partid(self) -> int:
        """The partition of this rank."""
        return self._partid

    @property
    def num_trainers(self) -> int | None:
        """How many trainers ``trainer_id`` numbers; None: the graph was not cut for trainers."""
        return self._num_trainers

    @property
    def ntypes(self) -> list[str]:
        """Node types; the position of one is its type id."""
        return list(self._nodes.types)

    @property
    def canonical_etypes(self) -> list[EdgeType]:
        """Edge types as triples; the position of one is its type id."""
        return list(self._edges.types)

    @property
    def etypes(self) -> list[str]:
        """Names of the relations, in the order of :attr:`canonical_etypes`."""
        return [relation for _, relation, _ in self._edges.types]

    def num_partitions(self) -> int:
        """Return the number of partitions."""
        return self._nodes.num_partitions

    def metadata(self) -> list[dict[str, int]]:
        """Return one record per partition: ``machine_id``, ``num_nodes`` and ``num_edges`` over all types."""
        nodes, edges = self._nodes.sizes(), self._edges.sizes()
        return [
            {"machine_id": part, "num_nodes": int(nodes[part]), "num_edges": int(edges[part])}
            for part in range(self.num_partitions())
        ]

    def num_nodes(self, ntype: str | None = None) -> int:
        """Return the number of nodes of ``ntype``, or of all types."""
        return self._nodes.total(ntype)

    def num_edges(self, etype: str | EdgeType | None = None) -> int:
        """Return the number of edges of ``etype``, or of all types."""
        return self._edges.total(None if etype is None else self.to_canonical_etype(etype))

    def to_canonical_etype(self, etype: str | EdgeType) -> EdgeType:
        """Return the triple of an edge type given by triple or by relation.

        Raises:
            ConfigError: there is no such type, or several with this relation.
        """
        return canonical_etype(etype, self._edges.types)

    def node_bounds(self, ntype: str = NODE_TYPE) -> Array:
        """Return the (Q + 1,) int64 bounds of the partitions of ``ntype``."""
        return self._nodes.bounds(ntype)

    def edge_bounds(self, etype: str | EdgeType = EDGE_TYPE) -> Array:
        """Return the (Q + 1,) int64 bounds of the partitions of ``etype``."""
        return self._edges.bounds(self.to_canonical_etype(etype))

    def nid2partid(self, nids: Ids, ntype: str = NODE_TYPE) -> Tensor:
        """Return the partition of each node.

        Raises:
            IndexError: an id does not exist.
        """
        return self._nodes.owner(nids, ntype)

    def eid2partid(self, eids: Ids, etype: str | EdgeType = EDGE_TYPE) -> Tensor:
        """Return the partition of each edge: the one of its destination."""
        return self._edges.owner(eids, self.to_canonical_etype(etype))

    def partid2nids(self, partid: int, ntype: str = NODE_TYPE) -> Tensor:
        """Return all node ids of a partition, ascending.

        Raises:
            ConfigError: there is no such partition.
        """
        return self._nodes.ids_of(partid, ntype)

    def partid2eids(self, partid: int, etype: str | EdgeType = EDGE_TYPE) -> Tensor:
        """Return all edge ids of a partition, ascending."""
        return self._edges.ids_of(partid, self.to_canonical_etype(etype))

    def nid2localnid(self, nids: Ids, partid: int, ntype: str = NODE_TYPE) -> Tensor:
        """Return the ids counted from the first node of ``partid``, which must own them.

        Raises:
            IndexError: an id is not of that partition.
        """
        return self._nodes.local(nids, partid, ntype)

    def eid2localeid(self, eids: Ids, partid: int, etype: str | EdgeType = EDGE_TYPE) -> Tensor:
        """Return the ids counted from the first edge of ``partid``, which must own them."""
        return self._edges.local(eids, partid, self.to_canonical_etype(etype))

    def map_to_per_ntype(self, ids: Ids) -> tuple[Tensor, Tensor]:
        """Return (type id, id within the type) of homogeneous node ids."""
        return self._nodes.split_types(ids)

    def map_to_homo_nid(self, ids: Ids, ntype: str = NODE_TYPE) -> Tensor:
        """Return the homogeneous ids of nodes of ``ntype``."""
        return self._nodes.join_types(ids, ntype)

    def map_to_per_etype(self, ids: Ids) -> tuple[Tensor, Tensor]:
        """Return (type id, id within the type) of homogeneous edge ids."""
        return self._edges.split_types(ids)

    def map_to_homo_eid(self, ids: Ids, etype: str | EdgeType = EDGE_TYPE) -> Tensor:
        """Return the homogeneous ids of edges of ``etype``."""
        return self._edges.join_types(ids, self.to_canonical_etype(etype))


def canonical_etype(etype: str | EdgeType | None, known: Sequence[EdgeType]) -> EdgeType:
    """Return the triple of ``etype``, which is one or the name of a relation; of None: the only one.

    Raises:
        ConfigError: there is no such type, or several with this relation, or None is one of several.
    """
    found = [triple for triple in known if etype is None or etype in (triple, triple[1])]
    if len(found) == 1:
        return found[0]
    problem = "there is no edge type" if not found else "several edge types have the relation"
    listed = ", ".join(map(str, known))
    raise ConfigError(f"{problem} {etype!r}; give one of the triples {listed}")


class _Ranges(Generic[K]):
    """Contiguous ranges of several types over the same partitions."""

    def __init__(self, bounds: Mapping[K, Array], what: str) -> None:
        self._what = what
        self.types = tuple(bounds)
        self._bounds = {key: np.asarray(value, dtype=np.int64) for key, value in bounds.items()}
        self.num_partitions = len(next(iter(self._bounds.values()))) - 1
        by_partition = np.stack([np.diff(self._bounds[key]) for key in self.types], axis=1)
        # First homogeneous id of each (partition, type), partitions outermost, and the end.
        self._homogeneous = np.concatenate([[0], np.cumsum(by_partition.reshape(-1))])

    def bounds(self, key: K) -> Array:
        if key not in self._bounds:
            known = ", ".join(map(repr, self.types))
            raise ConfigError(f"there are no {self._what} of type {key!r} (known: {known})")
        return self._bounds[key]

    def sizes(self) -> Array:
        return sum(
            (np.diff(bounds) for bounds in self._bounds.values()), np.zeros(self.num_partitions, np.int64)
        )

    def total(self, key: K | None) -> int:
        return int(self._homogeneous[-1] if key is None else self.bounds(key)[-1])

    def owner(self, ids: Ids, key: K) -> Tensor:
        bounds = self.bounds(key)
        asked = as_ids(ids, int(bounds[-1]), f"the {self._what} of type {key!r}")
        return to_tensor(np.searchsorted(bounds, asked, side="right") - 1)

    def ids_of(self, partition: int, key: K) -> Tensor:
        bounds = self.bounds(key)
        self._check_partition(partition)
        return torch.arange(int(bounds[partition]), int(bounds[partition + 1]))

    def local(self, ids: Ids, partition: int, key: K) -> Tensor:
        bounds = self.bounds(key)
        self._check_partition(partition)
        first, last = int(bounds[partition]), int(bounds[partition + 1])
        local = as_ids(ids, int(bounds[-1]), f"the {self._what} of type {key!r}") - first
        check_ids(local, last - first, f"partition {partition} (ids counted from its first, {first})")
        return to_tensor(local)

    def split_types(self, ids: Ids) -> tuple[Tensor, Tensor]:
        asked = as_ids(ids, int(self._homogeneous[-1]), f"the {self._what} of all types")
        cell = np.searchsorted(self._homogeneous, asked, side="right") - 1
        partition, type_id = cell // len(self.types), cell % len(self.types)
        first = np.stack([self._bounds[key] for key in self.types], axis=1)
        within = asked - self._homogeneous[cell] + first[partition, type_id]
        return to_tensor(type_id), to_tensor(within)

    def join_types(self, ids: Ids, key: K) -> Tensor:
        bounds = self.bounds(key)
        asked = as_ids(ids, int(bounds[-1]), f"the {self._what} of type {key!r}")
        partition = np.searchsorted(bounds, asked, side="right") - 1
        cell = partition * len(self.types) + self.types.index(key)
        return to_tensor(asked - bounds[partition] + self._homogeneous[cell])

    def _check_partition(self, partition: int) -> None:
        if not 0 <= partition < self.num_partitions:
            raise ConfigError(f"there is no partition {partition}; they are 0 to {self.num_partitions - 1}")
