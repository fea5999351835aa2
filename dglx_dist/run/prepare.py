"""From any graph to a partitioned dataset on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from dglx_dist.errors import ConfigError, StorageError
from dglx_dist.partition import PARTITIONERS, PartitionOptions, PartitionQuality, default_partitioner, measure
from dglx_dist.records import Array, RawGraph, SparseRows
from dglx_dist.storage.writer import write_dataset


@dataclass(frozen=True, kw_only=True)
class PartitionPlan:
    """How a graph is cut and in which format it is written.

    Raises:
        ConfigError: a value is out of its range.
    """

    num_parts: int
    method: str | None = None
    """Name of a partitioner; None: the default one for these options."""
    seed: int = 0
    options: PartitionOptions = field(default_factory=PartitionOptions)
    format: Literal["dglx", "dgl"] = "dglx"
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.num_parts < 1:
            raise ConfigError(f"the number of parts is {self.num_parts}; it must be at least 1")
        if self.format not in ("dglx", "dgl"):
            raise ConfigError(f"format is {self.format!r}; it is 'dglx' or 'dgl'")
        if self.seed < 0:
            raise ConfigError(f"the seed is {self.seed}; it must be at least 0")

    @property
    def partitioner(self) -> str:
        """Name of the partitioner that will be used.

        Raises:
            UnknownNameError: there is no such one.
        """
        return PARTITIONERS.resolve(self.method or default_partitioner(self.options))

    def check_target(self, folder: Path) -> None:
        """Raise StorageError when ``folder`` holds something and may not be replaced; costs nothing."""
        if folder.is_dir() and any(folder.iterdir()) and not self.overwrite:
            raise StorageError(
                f"{folder} exists and is not empty; choose another folder, or say that it may be replaced "
                "(--overwrite, overwrite=True)"
            )


def partition_to_disk(
    graph: RawGraph, folder: str | Path, plan: PartitionPlan, *, weights: Mapping[str, Array] | None = None
) -> PartitionQuality:
    """Cut ``graph`` as ``plan`` says and write it to ``folder``; one process calls it.

    Args:
        graph: What to cut.
        folder: Where the dataset appears, whole or not at all.
        plan: How.
        weights: Name to (N,) non-negative numbers that ``plan.options.balance`` may name and that are
            not written; for graphs with one node type.

    Returns:
        The figures of the partition, which the dataset keeps in its manifest too.

    Raises:
        ConfigError: plan and graph do not fit, or no partitioner has the name.
        StorageError: ``folder`` holds something and the plan does not say to replace it.
    """
    target = Path(folder)
    plan.check_target(target)
    weighted = _with_weights(graph, weights or {})
    assignment = PARTITIONERS.get(plan.partitioner)(plan.options).assign(weighted, plan.num_parts, plan.seed)
    quality = measure(weighted, assignment)
    if plan.format == "dgl":
        # Only here: writing DGL's files needs DGL.
        from dglx_dist.storage.dgl_format import write_dgl_format

        write_dgl_format(graph, assignment, target)
    else:
        write_dataset(graph, assignment, target, quality=quality.to_json(), overwrite=plan.overwrite)
    return quality


def content_key(graph: RawGraph, plan: PartitionPlan) -> str:
    """Return 16 hexadecimal digits that name ``graph`` cut as ``plan`` says; reads every byte of it."""
    digest = hashlib.sha256()
    told = (
        *(graph.name, sorted(graph.num_nodes.items()), sorted(graph.num_classes.items())),
        *(plan.num_parts, plan.partitioner, plan.seed, plan.options, plan.format),
    )
    digest.update(repr(told).encode())
    for name, array in _arrays(graph):
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8).data if array.size else b"")
    return digest.hexdigest()[:16]


def _arrays(graph: RawGraph) -> Iterator[tuple[str, Array]]:
    for etype, (source, destination) in sorted(graph.edges.items()):
        yield f"edges {etype} source", source
        yield f"edges {etype} destination", destination
        for name, values in sorted(graph.edge_data.get(etype, {}).items()):
            yield f"edges {etype} {name}", values
    for ntype, columns in sorted(graph.node_data.items()):
        for name, column in sorted(columns.items()):
            if isinstance(column, SparseRows):
                yield f"nodes {ntype} {name} indptr", column.indptr
                yield f"nodes {ntype} {name} indices {column.num_columns}", column.indices
                yield f"nodes {ntype} {name} values", column.values
            else:
                yield f"nodes {ntype} {name}", column
    for ntype, ids in sorted(graph.user_ids.items()):
        yield f"ids {ntype}", ids


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
