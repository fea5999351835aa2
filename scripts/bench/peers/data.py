"""The graph of a workload, cut once and written in the format of each system, and launches on it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dglx_dist.data.partition.base import PartitionOptions
from dglx_dist.data.storage.reader import StoredDataset, open_dataset
from dglx_dist.data.synthetic import SyntheticConfig, generate
from dglx_dist.errors import ConfigError
from dglx_dist.planner.records import Rate
from dglx_dist.prepare import PartitionPlan
from dglx_dist.records import FEATURE, LABEL, NODE_TYPE, Assignment, RawGraph
from scripts.bench import data
from scripts.bench.peers.launch import KIND, Launch, phases_in_words, versions
from scripts.bench.peers.workload import Workload
from scripts.bench.records import Job, MatchedPhi, Shape, Variant

_ARRAYS = ("edge_index", FEATURE, LABEL, "train_mask")


@dataclass(frozen=True, kw_only=True)
class Written:
    """Where one partition lies."""

    ours: Path
    dgl: Path | None = None
    """DGL's JSON file; None: not asked for."""
    arrays: Path | None = None
    """Folder of whole NumPy arrays, see :func:`write_arrays`; None: not asked for."""


def prepare(
    workload: Workload, parts: int, work: Path, *, dgl: bool = False, arrays: bool = False
) -> Written:
    """Write the graph of ``workload`` cut into ``parts``, in our format and others; what is there is taken.

    Args:
        workload: Whose graph.
        parts: One per server.
        work: Where datasets lie.
        dgl: Whether to write DGL's format, with the very same parts and new ids.
        arrays: Whether to write whole arrays, uncut.

    Raises:
        ConfigError: graph and parts do not fit.
        StorageError: ``work`` cannot be written.
    """
    config = SyntheticConfig(
        nodes=workload.nodes,
        degree=workload.degree,
        features=workload.features,
        classes=workload.classes,
        train_rate=workload.train_rate,
        seed=workload.seed,
    )
    cut = PartitionPlan(num_parts=parts, seed=workload.seed, options=PartitionOptions(balance=("train",)))
    ours = data.prepare(config, {"peers": cut}, work)["peers"]
    array_folder = work / f"arrays-{data.recipe_key(config, cut)}"
    if arrays and not array_folder.is_dir():
        write_arrays(generate(config), array_folder)
    return Written(
        ours=ours,
        dgl=dgl_copy(config, cut, ours, work) if dgl else None,
        arrays=array_folder if arrays else None,
    )


def dgl_copy(config: SyntheticConfig, cut: PartitionPlan, ours: Path, work: Path) -> Path:
    """Return DGL's JSON file of the dataset ``ours``, with its parts and new ids; written if it is not there.

    Args:
        config: The graph.
        cut: How ``ours`` was made of it.
        ours: What ``data.prepare`` returned for both.
        work: Where datasets lie.

    Raises:
        StorageError: ``work`` cannot be written.
    """
    folder = work / f"dgl-{data.recipe_key(config, cut)}"
    if not folder.is_dir():
        _write_dgl(generate(config), open_dataset(ours), folder)
    return next(folder.glob("*.json"))


def assignment_of(dataset: StoredDataset) -> Assignment:
    """Return the owner of every node of a homogeneous ``dataset``, by the ids of its source."""
    manifest = dataset.manifest
    part_of = np.empty(manifest.num_nodes(NODE_TYPE), dtype=np.int32)
    for part in range(manifest.num_parts):
        part_of[dataset.part(part).original_node_ids(NODE_TYPE)] = part
    return Assignment(
        num_parts=manifest.num_parts, part_of={NODE_TYPE: part_of}, method=manifest.method, seed=manifest.seed
    )


def write_arrays(graph: RawGraph, folder: Path) -> None:
    """Write edge_index (2, E) int64, feat (N, F), label (N,) int64 and train_mask (N,) bool as ``.npy``."""
    ((source, destination),) = graph.edges.values()
    columns = graph.node_data[NODE_TYPE]
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        np.save(partial / "edge_index.npy", np.stack([source, destination]).astype(np.int64))
        for name in _ARRAYS[1:]:
            np.save(partial / f"{name}.npy", np.asarray(columns[name]))
        os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_dgl(graph: RawGraph, dataset: StoredDataset, folder: Path) -> None:
    # Only here: writing DGL's files needs DGL.
    from dglx_dist.data.storage.dgl_format import write_dgl_format

    write_dgl_format(graph, assignment_of(dataset), folder)


def stock_launch(
    graph: SyntheticConfig, cut: PartitionPlan, work: Path, *, epochs: int, **training: Any
) -> Launch:
    """Return how stock DistDGL trains on ``graph`` cut so, as another variant does; writes what is not there.

    Args:
        graph: The built-in graph.
        cut: How it is cut.
        work: Where datasets lie.
        epochs: Of a repetition.
        training: More of :class:`Workload`: hidden, fanouts, batch_size, lr.

    Raises:
        StorageError: the datasets cannot be written.
    """
    ours = data.prepare(graph, {cut.partitioner: cut}, work)[cut.partitioner]
    names = ("nodes", "features", "classes", "train_rate", "seed")
    told = {name: getattr(graph, name) for name in names} | {"degree": int(graph.degree)}
    copy = dgl_copy(graph, cut, ours, work)
    return Launch(system="stock", workload=Workload(**told, **training), data=str(copy), epochs=epochs)


def variant(name: str, launch: Launch, *, shape: Shape, rate: Rate | MatchedPhi | None = None) -> Variant:
    """Return a variant that launches ``launch`` for every repetition; one epoch of one launch warms up."""
    job = Job(kind=KIND, params=launch.params(), warm={"epochs": 1, "warmup": 0})
    return Variant(name=name, shape=shape, job=job, rate=rate)


def launch_of(system: str, workload: Workload, written: Written, **settings: Any) -> Launch:
    """Return a launch of ``system`` on its own copy of ``written``.

    Raises:
        ConfigError: the graph was not written in the format of ``system``.
    """
    path = {"stock": written.dgl, "pyg": written.arrays}.get(system, written.ours)
    if path is None:
        raise ConfigError(f"the graph of {system} is not written; ask prepare() for its format")
    return Launch(system=system, workload=workload, data=str(path), **settings)


def facts_of(written: Written, systems: Iterable[str]) -> Mapping[str, Any]:
    """Return what the report shows beside the figures, JSON values."""
    return {
        **data.facts(written.ours),
        "versions": versions(),
        "phases": {system: phases_in_words(system) for system in systems},
    }
