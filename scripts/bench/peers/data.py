"""One graph, cut once, in the format of each system, and variants that are launched on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np

from dglx_dist.data.partition.base import PartitionPlan
from dglx_dist.data.storage.files import partial_folder
from dglx_dist.data.storage.reader import StoredDataset, open_dataset
from dglx_dist.data.synthetic import SyntheticConfig, generate
from dglx_dist.records import FEATURE, LABEL, NODE_TYPE, Assignment, RawGraph
from scripts.bench import data
from scripts.bench.experiments.common import of_job
from scripts.bench.peers.launch import KIND
from scripts.bench.peers.workload import Launch, Workload
from scripts.bench.records import Variant


def launch_of(
    system: str,
    graph: SyntheticConfig,
    cut: PartitionPlan,
    work: Path,
    training: Mapping[str, Any],
    **more: Any,
) -> Launch:
    """Return a launch of ``system`` on ``graph``, a part per server; writes datasets that are not there."""
    workload = Workload(features=graph.features, classes=graph.classes, **training)
    return Launch(
        system=cast("Any", system), workload=workload, data=str(copy_of(system, graph, cut, work)), **more
    )


def launch_variant(name: str, launch: Launch, **where: Any) -> Variant:
    """Return a variant that is launched anew for every repetition; ``where``: as of ``common.of_job``."""
    return of_job(name, KIND, asdict(launch), **where)


def copy_of(system: str, graph: SyntheticConfig, cut: PartitionPlan, work: Path) -> Path:
    """Return where ``graph`` lies as ``system`` reads it: ours; DGL's JSON file; uncut NumPy arrays for PyG.

    DGL's format has the very same parts and new ids as ours.
    """
    ours = data.prepare(graph, {"peers": cut}, work)["peers"]
    key = data.recipe_key(graph, cut)
    folder = work / f"{'dgl' if system == 'stock' else 'arrays'}-{key}"
    if system == "stock" and not folder.is_dir():
        # Only here: writing DGL's files needs DGL.
        from dglx_dist.data.storage.dgl_format import write_dgl_format

        write_dgl_format(generate(graph), assignment_of(open_dataset(ours)), folder)
    if system == "pyg" and not folder.is_dir():
        _write_arrays(generate(graph), folder)
    return next(folder.glob("*.json")) if system == "stock" else folder if system == "pyg" else ours


def assignment_of(dataset: StoredDataset) -> Assignment:
    """Return the owner of every node of a homogeneous ``dataset``, by the ids of its source."""
    manifest = dataset.manifest
    part_of = np.empty(manifest.num_nodes(NODE_TYPE), dtype=np.int32)
    for part in range(manifest.num_parts):
        part_of[dataset.part(part).original_node_ids(NODE_TYPE)] = part
    return Assignment(
        num_parts=manifest.num_parts, part_of={NODE_TYPE: part_of}, method=manifest.method, seed=manifest.seed
    )


def _write_arrays(graph: RawGraph, folder: Path) -> None:
    # edge_index (2, E) int64, feat (N, F), label (N,) int64 and train_mask (N,) bool.
    (ends,) = graph.edges.values()
    columns = graph.node_data[NODE_TYPE]
    with partial_folder(folder) as partial:
        np.save(partial / "edge_index.npy", np.stack(ends).astype(np.int64))
        for name in (FEATURE, LABEL, "train_mask"):
            np.save(partial / f"{name}.npy", np.asarray(columns[name]))
        partial.rename(folder)
