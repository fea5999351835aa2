"""Datasets of the bench. Each one is generated once and found again by a key of its recipe."""

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
    """Return the folders of ``graph``, partitioned by each plan of ``cuts``. Missing ones are generated.

    A folder appears complete or not at all. If several processes prepare the same folder, the first one to
    finish wins.

    Raises:
        StorageError: ``work`` cannot be written, or a dataset in it is damaged.
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
        # Opening reads the manifest and all file sizes, so that truncated datasets are detected here.
        open_dataset(folder)
    return folders


def recipe_key(graph: SyntheticConfig, cut: PartitionPlan) -> str:
    """Return 16 hexadecimal digits that identify the recipe and the version of the package."""
    recipe = (dglx_dist.__version__, graph, cut.partitioner, cut)
    return hashlib.sha256(repr(recipe).encode()).hexdigest()[:16]


def facts(folder: Path) -> dict[str, object]:
    """Return the JSON values that a report shows for a dataset, with its cost if it was generated here."""
    manifest = open_dataset(folder).manifest
    quality = dict(manifest.quality)
    shown = ("edge_cut", "balance", "missed", "replication_factor")
    return {
        "nodes": sum(manifest.num_nodes(ntype) for ntype in manifest.node_types),
        "edges": sum(manifest.num_edges(etype) for etype in manifest.edge_types),
        "parts": manifest.num_parts,
        "partitioned_by": manifest.method,
        **{name: quality[name] for name in shown if name in quality},
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
        # Another process may have finished the same folder first.
        if not (folder / MANIFEST).is_file():
            raise
        log.info("%s was made by another process meanwhile", folder)


def survey(jobs: Mapping[str, Mapping[str, Any]], servers: Mapping[str, int] | int) -> dict[str, Survey]:
    """Count the bytes that each ``train`` job moves on the given number of servers with one rank each."""
    server_counts = dict.fromkeys(jobs, servers) if isinstance(servers, int) else servers
    params = {name: {"train": dict(job), "servers": server_counts[name]} for name, job in jobs.items()}
    return {name: Survey(**fields) for name, fields in do_alone(Job(kind="survey", params=params)).items()}


def measure_compute_cost(params: Mapping[str, Any]) -> ComputeCost:
    """Measure the computation of the job ``train`` with ``params`` on one core. The machine must be idle."""
    cost: ComputeCost = read_record(ComputeCost, do_alone(Job(kind="calibrate", params=params)))
    return cost
