"""The folder of what ``dx.distribute`` has cut, each graph under a name made from its content."""

from __future__ import annotations

import logging
from pathlib import Path

from dglx_dist.errors import DatasetError, StorageError
from dglx_dist.records import RawGraph
from dglx_dist.run.prepare import PartitionPlan, content_key, partition_to_disk
from dglx_dist.storage.folders import named_failures, partial_folder, remove_abandoned
from dglx_dist.storage.layout import MANIFEST
from dglx_dist.storage.reader import open_dataset

log = logging.getLogger(__name__)


def cut_once(graph: RawGraph, plan: PartitionPlan, cache: Path) -> Path:
    """Return the folder in ``cache`` of ``graph`` cut as ``plan`` says, cut now unless it is there and whole.

    One process calls it. Another run may cut the same graph into the same cache meanwhile: the first to
    finish counts. What runs that were killed have left half written is removed.

    Raises:
        ConfigError: plan and graph do not fit.
        StorageError: the cache cannot be written; told before the work of cutting.
    """
    folder = (cache / f"{Path(graph.name).name}-{content_key(graph, plan)}").absolute()
    if (folder / MANIFEST).is_file() and _is_whole(folder):
        return folder
    with named_failures(cache), partial_folder(folder):
        remove_abandoned(folder.parent, below=False)
    try:
        partition_to_disk(graph, folder, plan)
    except StorageError:
        if not (folder / MANIFEST).is_file():
            raise
    return folder


def _is_whole(folder: Path) -> bool:
    """Whether a cut is what was written; a damaged one is removed."""
    try:
        # All of it: naming it has read every byte of the graph too.
        open_dataset(folder, verify="full")
    except (DatasetError, StorageError) as problem:
        log.warning("%s is cut again: %s", folder, problem)
        with named_failures(folder), partial_folder(folder) as aside:
            folder.rename(aside)
        return False
    return True
