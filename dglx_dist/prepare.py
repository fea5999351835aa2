"""Partitioning a graph to a dataset on disk."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from dglx_dist.data.partition.balance import PartitionQuality, measure
from dglx_dist.data.partition.base import PARTITIONERS, PartitionOptions, default_partitioner
from dglx_dist.data.partition.hierarchical import assign_two_levels, with_trainer_ids
from dglx_dist.data.partition.one_pass import COLUMNS, FEATURES
from dglx_dist.data.sources import load_dataset
from dglx_dist.data.storage.columns import MANIFEST
from dglx_dist.data.storage.manifest import check_target
from dglx_dist.data.storage.reader import graph_of, open_dataset
from dglx_dist.data.storage.writer import FeatureDtype, check_feature_dtype, in_precision, write_dataset
from dglx_dist.errors import ConfigError, StorageError
from dglx_dist.records import Array, Assignment, EdgeType, RawGraph, SparseRows

if TYPE_CHECKING:
    import dgl


_MANY_CONSTRAINTS = 10
"""A warning is logged for more balance weights than this, since they increase the cut."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PartitionPlan:
    """Partitioning method, its options, and the format of the dataset; a wrong value is a ConfigError."""

    num_parts: int
    method: str | None = None
    """Name of a partitioner; None: the default for the options."""
    seed: int = 0
    options: PartitionOptions = field(default_factory=PartitionOptions)
    format: Literal["dglx", "dgl"] = "dglx"
    overwrite: bool = False
    trainers_per_part: int = 1
    """t above 1: each part is split again, and nodes and edges get a ``trainer_id`` in [0, P x t)."""
    feature_dtype: FeatureDtype | None = None
    """Stored dtype of features, see :func:`in_precision`; None: unchanged."""

    def __post_init__(self) -> None:
        if self.num_parts < 1:
            raise ConfigError(f"the number of parts is {self.num_parts}; it must be at least 1")
        if self.format not in ("dglx", "dgl"):
            raise ConfigError(f"format is {self.format!r}; it is 'dglx' or 'dgl'")
        if self.seed < 0:
            raise ConfigError(f"the seed is {self.seed}; it must be at least 0")
        if self.trainers_per_part < 1:
            raise ConfigError(f"{self.trainers_per_part} trainers per part; there must be at least 1")
        check_feature_dtype(self.feature_dtype)
        dtype = self.feature_dtype
        dtypes = list(dtype.values()) if isinstance(dtype, Mapping) else [dtype]
        if self.format == "dgl" and "bfloat16" in dtypes:
            raise ConfigError("DGL's files cannot hold bfloat16; take float16, or format 'dglx'")

    @property
    def partitioner(self) -> str:
        """Resolved name of the partitioner; UnknownNameError if it does not exist."""
        return PARTITIONERS.resolve(self.method or default_partitioner(self.options))


def load_graph(spec: str | os.PathLike[str] | dgl.DGLGraph, **options: object) -> RawGraph:
    """Return the graph of any spec of :func:`load_dataset`, or of a dataset of one part; same errors."""
    if isinstance(spec, (str, os.PathLike)) and (Path(spec).expanduser() / MANIFEST).is_file():
        folder = Path(spec).expanduser()
        if options:
            raise ConfigError(
                f"{folder} is a dataset, which has no option {next(iter(options))!r}; leave it out"
            )
        return graph_of(open_dataset(folder))
    return load_dataset(spec, **options)


def partition_to_disk(
    graph: RawGraph, folder: str | Path, plan: PartitionPlan, *, weights: Mapping[str, Array] | None = None
) -> PartitionQuality:
    """Partition ``graph`` and write it atomically to ``folder``; one process calls it.

    If the partitioner wants features by column (``feature``), files of columns are written after the dataset;
    a failure to write them is logged, and training then writes them.

    Args:
        graph: The graph.
        folder: Target folder.
        plan: The method.
        weights: Name -> (N,) non-negative numbers for ``plan.options.balance``, which are not written; for
            graphs with one node type.

    Returns:
        The quality of the partition, which is also in the manifest.

    Raises:
        ConfigError: plan and graph do not match, or the partitioner does not exist.
        StorageError: ``folder`` is not empty and must not be replaced.
    """
    target = Path(folder)
    check_target(target, plan.overwrite)
    weighted = _with_weights(graph, weights or {})
    assignment, figures, trainers = _partition(weighted, plan)
    _warn_of_many(figures)
    bfloat16: frozenset[tuple[str | EdgeType, str]] = frozenset()
    if trainers is not None:
        graph = with_trainer_ids(graph, trainers)
    if plan.feature_dtype is not None:
        graph, bfloat16 = in_precision(graph, plan.feature_dtype)
    if plan.format == "dgl":
        # Imports dgl and torch, which other formats do not need.
        from dglx_dist.data.storage.dgl_format import write_dgl_format

        write_dgl_format(graph, assignment, target)
    else:
        kept = asdict(figures)
        if trainers is not None:
            kept["trainers"] = _trainer_figures(measure(weighted, trainers))
        write_dataset(graph, assignment, target, quality=kept, overwrite=plan.overwrite, bfloat16=bfloat16)
        if assignment.parameters.get(FEATURES) == COLUMNS:
            _write_columns(target, assignment.num_parts)
    return figures


def _write_columns(folder: Path, num_parts: int) -> None:
    # Imports torch.
    from dglx_dist.strategies.push_pull.feature_columns import write_slices

    try:
        write_slices(open_dataset(folder, verify="never"), num_parts)
    except StorageError as problem:
        log.warning("%s", problem)


def _partition(
    graph: RawGraph, plan: PartitionPlan
) -> tuple[Assignment, PartitionQuality, Assignment | None]:
    # The last is the assignment to trainers, if parts are split again.
    if plan.trainers_per_part == 1:
        assignment = PARTITIONERS.get(plan.partitioner)(plan.options).assign(graph, plan.num_parts, plan.seed)
        return assignment, measure(graph, assignment), None
    size = (plan.num_parts, plan.trainers_per_part)
    split = assign_two_levels(graph, plan.partitioner, plan.options, size, plan.seed)
    return split.parts, measure(graph, split.parts), split.trainers


def _warn_of_many(figures: PartitionQuality) -> None:
    if len(figures.tolerance) > _MANY_CONSTRAINTS:
        log.warning(
            "%d weights are balanced at once, and %.0f %% of the edges are cut: each one more leaves less "
            "choice; balance fewer, such as degree, the in-edges of all types together, in place of etype",
            len(figures.tolerance),
            100 * figures.edge_cut,
        )


def _trainer_figures(quality: PartitionQuality) -> dict[str, object]:
    kept = ("num_parts", "num_nodes", "num_edges", "edge_cut", "balance", "missed")
    return {name: getattr(quality, name) for name in kept}


def content_key(graph: RawGraph, plan: PartitionPlan) -> str:
    """Return 16 hexadecimal digits that identify ``graph`` and ``plan``; reads all data."""
    digest = hashlib.sha256()
    settings = (
        *(graph.name, sorted(graph.num_nodes.items()), sorted(graph.num_classes.items())),
        *(plan.num_parts, plan.partitioner, plan.seed, plan.options, plan.format),
        *(plan.trainers_per_part, plan.feature_dtype),
    )
    digest.update(repr(settings).encode())
    data = {"edges": graph.edges, "of edges": graph.edge_data, "of nodes": graph.node_data}
    for name, array in _arrays({**data, "ids": graph.user_ids}):
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8).data if array.size else b"")
    return digest.hexdigest()[:16]


def _arrays(data: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Array]]:
    for key, value in sorted(data.items()):
        name = f"{prefix}{key!r} "
        if isinstance(value, Mapping):
            yield from _arrays(value, name)
        elif isinstance(value, tuple):
            yield from _arrays(dict(enumerate(value)), name)
        elif isinstance(value, SparseRows):
            yield from _arrays(vars(value) | {"num_columns": np.array(value.num_columns)}, name)
        else:
            yield name, value


def _with_weights(graph: RawGraph, weights: Mapping[str, Array]) -> RawGraph:
    if not weights:
        return graph
    if len(graph.num_nodes) != 1:
        raise ConfigError(
            f"weights were given for a graph with the node types {', '.join(graph.num_nodes)}; balance "
            "'ntype' or a column of the graph instead"
        )
    (ntype,) = graph.num_nodes
    return replace(graph, node_data={ntype: {**graph.node_data.get(ntype, {}), **weights}})
