"""Collective opening of a dataset; one rank per machine checks the files."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal, TypeAlias

import psutil

from dglx_dist.comm.collectives import check_equal, gather_json, run_on_all_ranks
from dglx_dist.comm.session import Session
from dglx_dist.data.storage.columns import MANIFEST
from dglx_dist.data.storage.dgl_format import import_dgl_format
from dglx_dist.data.storage.reader import StoredDataset, Verify, open_dataset, open_structure
from dglx_dist.errors import ConfigError, StorageError
from dglx_dist.graph.partition_book import Placement
from dglx_dist.graph.structure import CSCShard, PartitionedStructure, ReplicatedStructure, Structure
from dglx_dist.records import EdgeType

StructureMode: TypeAlias = Literal["auto", "replicated", "partitioned"]

log = logging.getLogger(__name__)


def open_together(folder: Path, session: Session, verify: Verify) -> StoredDataset:
    """Open a dataset on every rank; the first rank of each machine checks its files. Collective.

    Raises:
        StorageError: on all ranks, when it cannot be opened on one, or the ranks see different datasets.
        DatasetError: an id is out of range, on the rank that checks; StorageError on the others.
    """
    first = is_first_on_machine(session)
    checked = run_on_all_ranks(session, lambda: open_dataset(folder, verify=verify) if first else None)
    dataset = run_on_all_ranks(session, lambda: checked or open_dataset(folder, verify=verify, checked=True))
    checksum = dataset.manifest.checksum
    check_equal(session, f"the dataset in {folder}", checksum, "copy it again", StorageError)
    return dataset


def imported(part_config: Path, session: Session) -> Path:
    """Return the folder of our dataset beside DGL's files, imported now if these are newer. Collective."""
    folder = part_config.absolute().with_suffix(".dglx")

    def check() -> None:
        if not part_config.exists():
            raise StorageError(
                f"{part_config} does not exist; give the JSON file that DGL's partition_graph wrote"
            )

    def import_if_newer() -> None:
        manifest = folder / MANIFEST
        if not manifest.exists() or manifest.stat().st_mtime < _newest(part_config):
            log.info("importing %s into %s", part_config, folder)
            import_dgl_format(part_config, folder, overwrite=folder.exists())

    # On all ranks, or one that does not see the file would wait for the others.
    run_on_all_ranks(session, check)
    # Rank 0 goes first: on a shared file system the other machines then find the result.
    run_on_all_ranks(session, lambda: import_if_newer() if session.topology.rank == 0 else None)
    run_on_all_ranks(session, lambda: import_if_newer() if is_first_on_machine(session) else None)
    return folder


def _newest(part_config: Path) -> float:
    # Scripts write columns into a part and leave the JSON file unchanged.
    of_parts = part_config.parent.glob("part*/*.dgl")
    return max(path.stat().st_mtime for path in (part_config, *of_parts))


def open_structures(
    dataset: StoredDataset, session: Session, placement: Placement, label: str, mode: StructureMode
) -> dict[EdgeType, Structure]:
    """Open the structure of every edge type, replicated or partitioned. Collective."""
    if mode not in ("auto", "replicated", "partitioned"):
        raise ConfigError(f"structure is {mode!r}; choose 'auto', 'replicated' or 'partitioned'")
    manifest = dataset.manifest
    if mode == "auto":
        fits = gather_json(run_on_all_ranks(session, lambda: _fits(dataset)), session)
        mode = "replicated" if all(fits) else "partitioned"
    if session.topology.rank == 0:
        log.info("%s: %d parts, structure %s", dataset.folder, manifest.num_parts, mode)
    if mode == "partitioned":
        return {
            etype: _partitioned(dataset, session, placement, label, etype) for etype in manifest.edge_types
        }
    return {etype: _replicated(dataset, session, etype) for etype in manifest.edge_types}


def is_first_on_machine(session: Session) -> bool:
    hosts = session.hosts
    return hosts.index(hosts[session.topology.rank]) == session.topology.rank


def _fits(dataset: StoredDataset) -> bool:
    """Whether all parts are on this machine and their structure takes at most half its free memory."""
    manifest = dataset.manifest
    if not all(dataset.has_part(part) for part in range(manifest.num_parts)):
        return False
    num_bytes = sum(
        8 * (manifest.num_nodes(etype[2]) + 1)
        + dataset.part(0).indices(etype).itemsize * manifest.num_edges(etype)
        for etype in manifest.edge_types
    )
    return num_bytes <= psutil.virtual_memory().available // 2


def _replicated(dataset: StoredDataset, session: Session, etype: EdgeType) -> ReplicatedStructure:
    # The first rank of a machine makes the copy on disk that the others map.
    first = is_first_on_machine(session)
    made = run_on_all_ranks(session, lambda: open_structure(dataset, etype) if first else None)
    csc = run_on_all_ranks(session, lambda: made or open_structure(dataset, etype))
    return ReplicatedStructure(etype, dataset.manifest.num_nodes(etype[0]), csc.indptr, csc.indices)


def _partitioned(
    dataset: StoredDataset, session: Session, placement: Placement, label: str, etype: EdgeType
) -> PartitionedStructure:
    manifest = dataset.manifest
    node_offsets, edge_offsets = manifest.node_offsets[etype[2]], manifest.edge_offsets[etype]
    shards = run_on_all_ranks(
        session,
        lambda: tuple(
            CSCShard(
                indptr=dataset.part(part).indptr(etype),
                indices=dataset.part(part).indices(etype),
                first_node=int(node_offsets[part]),
                first_edge=int(edge_offsets[part]),
            )
            for part in placement.local_parts
        ),
    )
    bounds = placement.server_offsets(node_offsets), placement.server_offsets(edge_offsets)
    return PartitionedStructure(
        session, placement, label, etype, manifest.num_nodes(etype[0]), shards, bounds
    )
