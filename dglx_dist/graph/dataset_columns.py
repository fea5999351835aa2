"""What a dataset holds, made known to the partition book and the KVStore."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dglx_dist.errors import StorageError
from dglx_dist.graph.kvstore import KVStore
from dglx_dist.graph.partition_book import PartitionBook
from dglx_dist.graph.placement import Placement
from dglx_dist.graph.policy import PartitionPolicy
from dglx_dist.partition.two_level import TRAINERS_PER_PART
from dglx_dist.records import Array, ColumnInfo, EdgeType
from dglx_dist.storage.manifest import Manifest
from dglx_dist.storage.reader import StoredDataset, StoredPart

ORIGINAL_IDS, USER_IDS = "original ids", "user ids"
_IDS = ColumnInfo(dtype="int64", row_shape=())


def book_of(placement: Placement, manifest: Manifest) -> PartitionBook:
    """Return the partition book of a dataset on these servers, a partition being what a server holds."""
    per_part = manifest.parameters.get(TRAINERS_PER_PART)
    return PartitionBook(
        {ntype: placement.server_offsets(offsets) for ntype, offsets in manifest.node_offsets.items()},
        {etype: placement.server_offsets(offsets) for etype, offsets in manifest.edge_offsets.items()},
        placement.topology.server,
        manifest.num_parts * per_part if isinstance(per_part, int) else None,
    )


def node_policies(book: PartitionBook, store: KVStore, dataset: str) -> dict[str, PartitionPolicy]:
    """Return the policy of every node type of the dataset with that checksum."""
    return {
        ntype: PartitionPolicy(
            kind="node",
            type_name=ntype,
            bounds=book.node_bounds(ntype),
            partition_book=book,
            store=store,
            dataset=dataset,
        )
        for ntype in book.ntypes
    }


def edge_policies(book: PartitionBook, store: KVStore, dataset: str) -> dict[EdgeType, PartitionPolicy]:
    """Return the policy of every edge type of the dataset with that checksum."""
    return {
        etype: PartitionPolicy(
            kind="edge",
            type_name=etype,
            bounds=book.edge_bounds(etype),
            partition_book=book,
            store=store,
            dataset=dataset,
        )
        for etype in book.canonical_etypes
    }


def add_columns(
    dataset: StoredDataset,
    placement: Placement,
    nodes: Mapping[str, PartitionPolicy],
    edges: Mapping[EdgeType, PartitionPolicy],
) -> None:
    """Add every tensor of the dataset to the store, memory-mapped, and the ids of the source hidden.

    Raises:
        StorageError: a file of the own server's parts is missing or damaged.
    """
    manifest = dataset.manifest
    parts = {part: dataset.part(part) for part in placement.local_parts}

    for ntype, policy in nodes.items():
        offsets = manifest.node_offsets[ntype]
        for name, info in manifest.node_columns[ntype].items():
            rows = {part: stored.node_data(ntype, name) for part, stored in parts.items()}
            policy.store.add(policy.key(name), offsets, rows, info)
        rows = {part: stored.original_node_ids(ntype) for part, stored in parts.items()}
        policy.store.add(policy.hidden_key(ORIGINAL_IDS), offsets, rows, _IDS)
        if manifest.user_ids.get(ntype) == "int64":
            rows = {part: _user_ids(stored, ntype) for part, stored in parts.items()}
            policy.store.add(policy.hidden_key(USER_IDS), offsets, rows, _IDS)
    for etype, policy in edges.items():
        offsets = manifest.edge_offsets[etype]
        for name, info in manifest.edge_columns[etype].items():
            rows = {part: stored.edge_data(etype, name) for part, stored in parts.items()}
            policy.store.add(policy.key(name), offsets, rows, info)
        rows = {part: stored.original_edge_ids(etype) for part, stored in parts.items()}
        policy.store.add(policy.hidden_key(ORIGINAL_IDS), offsets, rows, _IDS)


def text_ids(dataset: StoredDataset, ntype: str) -> Array:
    """Return the (N,) unicode ids that the user knows the nodes by; read anew each time.

    Raises:
        StorageError: a part is not on this machine.
    """
    parts = range(dataset.manifest.num_parts)
    return np.concatenate([_user_ids(dataset.part(part), ntype) for part in parts])


def _user_ids(part: StoredPart, ntype: str) -> Array:
    found = part.user_ids(ntype)
    if found is None:
        raise StorageError(
            f"the ids of {ntype!r} nodes that the manifest speaks of are missing; partition again"
        )
    return found
