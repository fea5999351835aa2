"""The bench's datasets, made once by recipe and found again by its key, and what is counted on them."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dglx_dist
from dglx_dist.data.partition.base import PartitionPlan
from dglx_dist.data.partition.prepare import partition_to_disk
from dglx_dist.data.storage.columns import MANIFEST
from dglx_dist.data.storage.reader import open_dataset
from dglx_dist.data.synthetic import SyntheticConfig, generate
from dglx_dist.errors import StorageError
from dglx_dist.planner.costs.base import Survey
from dglx_dist.progress import progress
from dglx_dist.records import RawGraph
from dglx_dist.strategies.push_pull.feature_columns import write_slices
from scripts.bench.pool import do_alone
from scripts.bench.records import Job
from scripts.bench.simulate import ComputeCost
from scripts.bench.worker import read_json
from scripts.json_records import read_record
from scripts.out_files import write_text

log = logging.getLogger(__name__)


def prepare(graph: SyntheticConfig, cuts: Mapping[str, PartitionPlan], work: Path) -> dict[str, Path]:
    """Return the folder of ``graph`` cut in each way, making those that are not there; one process calls it.

    A folder appears whole or not at all. Of several processes that prepare the same ones the first to finish
    wins. StorageError: ``work`` cannot be written, or what lies there is damaged.
    """
    folders = {name: work / f"synthetic-{recipe_key(graph, cut)}" for name, cut in cuts.items()}
    missing = [name for name, folder in folders.items() if not (folder / MANIFEST).is_file()]
    if missing:
        with progress(f"making datasets {', '.join(missing)}", 1 + len(missing)) as advance:
            raw = generate(graph)
            advance(1)
            for name in missing:
                _cut(raw, folders[name], cuts[name])
                advance(1)
    for folder in folders.values():
        # Reads the manifest and the sizes of all files: a dataset that somebody cut short is told here.
        open_dataset(folder)
    return folders


def recipe_key(graph: SyntheticConfig, cut: PartitionPlan) -> str:
    """Return 16 hexadecimal digits that name the content by what gives it: recipe, version of the package."""
    told = (dglx_dist.__version__, graph, cut.partitioner, cut)
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


def facts(folder: Path) -> dict[str, object]:
    """Return what a report shows of a dataset, JSON values, and what making it took if it was made here."""
    manifest = open_dataset(folder).manifest
    quality = dict(manifest.quality)
    kept = ("edge_cut", "balance", "missed", "replication_factor")
    return {
        "nodes": sum(manifest.num_nodes(ntype) for ntype in manifest.node_types),
        "edges": sum(manifest.num_edges(etype) for etype in manifest.edge_types),
        "parts": manifest.num_parts,
        "partitioned_by": manifest.method,
        **{name: quality[name] for name in kept if name in quality},
        **(read_json(_cost_path(folder)) or {}),
    }


def _cost_path(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.cost.json")


def _cut(raw: RawGraph, folder: Path, cut: PartitionPlan) -> None:
    begin = time.perf_counter()
    try:
        partition_to_disk(raw, folder, cut, write_columns=write_slices)
        cost = {"seconds_to_cut_and_write": time.perf_counter() - begin}
        write_text(_cost_path(folder), json.dumps(cost))
    except StorageError:
        # Another process that made the same one was quicker.
        if not (folder / MANIFEST).is_file():
            raise
        log.info("%s was made by another process meanwhile", folder)


def survey(jobs: Mapping[str, Mapping[str, Any]], servers: Mapping[str, int] | int) -> dict[str, Survey]:
    """Count what runs of the job ``train`` (name to parameters) move on so many servers of one rank."""
    by_name = dict.fromkeys(jobs, servers) if isinstance(servers, int) else servers
    asked = {name: {"train": dict(job), "servers": by_name[name]} for name, job in jobs.items()}
    return {name: Survey(**one) for name, one in do_alone(Job(kind="survey", params=asked)).items()}


def calibrated(params: Mapping[str, Any]) -> ComputeCost:
    """Measure on one core what the job ``train`` with ``params`` computes; nothing else should run."""
    found: ComputeCost = read_record(ComputeCost, do_alone(Job(kind="calibrate", params=params)))
    return found
