"""Partition a graph into a dataset on disk."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from dglx_dist.data.external_memory import (
    Ranks,
    Workspace,
    concatenate_chunks,
    map_spill,
    open_workspace,
    spill,
)
from dglx_dist.data.partition.balance import PartitionQuality, measure
from dglx_dist.data.partition.base import PARTITIONERS, PartitionPlan
from dglx_dist.data.partition.graph_views import MASKS, constraint_columns, has_node_column, iterate_slices
from dglx_dist.data.partition.hierarchical import assign_two_levels, with_trainer_ids
from dglx_dist.data.partition.one_pass import COLUMNS, FEATURES
from dglx_dist.data.sources import load_dataset
from dglx_dist.data.storage.columns import safe_name
from dglx_dist.data.storage.files import discard
from dglx_dist.data.storage.manifest import check_target, read_manifest
from dglx_dist.data.storage.reader import StoredDataset, load_raw_graph, open_dataset
from dglx_dist.data.storage.remote import is_dataset
from dglx_dist.data.storage.writer import check_ends, sorting_budget, write_dataset
from dglx_dist.errors import ConfigError, StorageError
from dglx_dist.memory import read_size
from dglx_dist.options import format_location
from dglx_dist.records import FEATURE, REVERSE, SPLITS, Array, Assignment, RawGraph, SparseRows

if TYPE_CHECKING:
    import dgl


_MANY_CONSTRAINTS = 10
"""Balance weights above this number cause a warning, because they increase the cut."""

log = logging.getLogger(__name__)

WriteColumns: TypeAlias = Callable[[StoredDataset, int], None]
"""Takes a dataset and a number of ranks, and writes the feature columns that each rank will read."""


@contextmanager
def open_work(
    spec: str | os.PathLike[str],
    folder: Path,
    plan: PartitionPlan,
    ranks: Ranks | None = None,
    /,
    **options: object,
) -> Iterator[Workspace | None]:
    """Open a workspace to load ``spec`` and partition it, or yield None if memory is not limited.

    The workspace is the folder NAME.work beside ``folder`` or in ``plan.scratch``, see
    :func:`open_workspace`. All ``ranks`` share the work, and each may use ``plan.memory``. By default this
    process works alone. See :func:`load_graph` for ``spec`` and ``options``.
    """
    if plan.memory is None:
        yield None
        return

    path = Path(spec).expanduser()
    source: list[object] = [str(spec), options, _read_stamps(path)]
    if is_dataset(spec):
        source = [read_manifest(path).checksum]
    with _open_plan_workspace(folder, plan, source, ranks) as workspace:
        yield workspace


def _read_stamps(path: Path) -> list[tuple[str, int, int]]:
    """Return (name, size, modification time) for the file ``path``, or for all files in a folder."""
    paths = [path]
    if path.is_dir():
        paths += sorted(path.rglob("*"))

    stamps = []
    for file in paths:
        if file.is_file():
            stat = file.stat()
            stamps.append((file.name, stat.st_size, stat.st_mtime_ns))
    return stamps


def _open_plan_workspace(
    folder: Path, plan: PartitionPlan, source: object, ranks: Ranks | None = None
) -> AbstractContextManager[Workspace]:
    """Open a workspace to partition ``source``. A later call resumes the work if no setting differs."""
    assert plan.memory is not None, "checked by the caller"
    settings: dict[str, object] = {"graph": source}
    for plan_field in fields(plan):
        if plan_field.name not in _SETTINGS_WITHOUT_EFFECT:
            settings[plan_field.name] = getattr(plan, plan_field.name)
    settings["method"] = plan.partitioner
    settings["file"] = _read_stamps(Path(plan.options.file)) if plan.options.file else []
    settings["version"] = version("dglx_dist")

    target = folder.absolute()
    work = (plan.scratch or target.parent) / f"{target.name}.work"
    if work.resolve().is_relative_to(target.resolve()):
        raise ConfigError(f"scratch {plan.scratch} is in {folder}, the folder to write; choose another place")
    texts = {name: repr(value) for name, value in settings.items()}
    return open_workspace(work, texts, read_size(plan.memory), ranks)


_SETTINGS_WITHOUT_EFFECT = ("memory", "scratch", "overwrite")
"""Plan fields that do not change the result."""
_PREPARATIONS = ("add_reverse_edges", "add_self_loops", "normalize_features")
"""Plan fields that change the graph before it is partitioned."""


def load_graph(
    spec: str | os.PathLike[str] | dgl.DGLGraph, *, workspace: Workspace | None = None, **options: object
) -> RawGraph:
    """Load a graph from a dataset with one part, or from anything that :func:`load_dataset` accepts.

    Edges from a dataset keep their stored order. With a ``workspace``, edge arrays are memory-mapped. For
    errors see :func:`load_dataset`.
    """
    if not isinstance(spec, (str, os.PathLike)):
        return load_dataset(spec, workspace=workspace, **options)
    folder = Path(spec).expanduser()
    if not is_dataset(spec):
        return load_dataset(spec, workspace=workspace, **options)

    if options:
        option_name = next(iter(options))
        raise ConfigError(
            f"{format_location(folder)} is a dataset and has no option {option_name!r}; leave it out"
        )
    return load_raw_graph(open_dataset(folder), workspace)


def partition_to_disk(
    graph: RawGraph,
    folder: str | Path,
    plan: PartitionPlan,
    *,
    weights: Mapping[str, Array] | None = None,
    workspace: Workspace | None = None,
    write_columns: WriteColumns | None = None,
) -> PartitionQuality:
    """Partition ``graph`` and write it atomically to ``folder``.

    One process calls this, or all ranks in ``workspace``.

    Args:
        weights: (N,) non-negative numbers by name, for ``plan.options.balance``. They are not written. The
            graph must have one node type.
        workspace: Workspace from :func:`open_work` that the graph was loaded in. If it is None but
            ``plan.memory`` is limited, a workspace is opened. It resumes if the graph has the same content.
        write_columns: Called with the finished dataset if the partitioner stores features by column
            (``feature``). If it raises StorageError, the error is logged. Training writes missing columns.

    Returns:
        The partition's quality, which the manifest has, too.

    Raises:
        ConfigError: plan and graph do not match, the partitioner does not exist, or the memory is too small.
        StorageError: ``folder`` must not be replaced, or files cannot be written.
    """
    target = Path(folder)
    check_target(target, plan.overwrite)
    if plan.memory is not None and workspace is None:
        source = [content_key(graph, plan), *sorted(weights or {})]
        with _open_plan_workspace(target, plan, source) as opened:
            return partition_to_disk(
                graph, target, plan, weights=weights, workspace=opened, write_columns=write_columns
            )

    if workspace is not None:
        # Assigning nodes takes hours, so a lack of memory is reported before.
        sorting_budget(graph, workspace.budget)
    for etype in graph.edges:
        # Compiled code does not check ids before it uses them as indices.
        check_ends(graph, etype)

    is_first = workspace is None or workspace.ranks.is_first
    graph = _prepare(graph, plan, workspace)
    weighted_graph = _add_weights(graph, weights or {})
    split = _partition(weighted_graph, plan, workspace)
    if is_first:
        _warn(graph, split.quality)
    if split.trainers is not None:
        graph = with_trainer_ids(graph, split.trainers, workspace)

    if plan.format == "dgl":
        # This module imports dgl and torch, which other formats do not need.
        from dglx_dist.data.storage.dgl_format import write_dgl_format

        write_dgl_format(graph, split.parts, target, feature_dtype=plan.feature_dtype)
        return split.quality

    _write_dataset(graph, split, target, plan, workspace)
    if is_first and write_columns and split.parts.parameters.get(FEATURES) == COLUMNS:
        try:
            write_columns(open_dataset(target, verify="never"), split.parts.num_parts)
        except StorageError as error:
            log.warning("%s", error)
    return split.quality


@dataclass(frozen=True, kw_only=True)
class _Split:
    """How nodes are assigned to parts, and to trainers if parts are split again, with quality figures."""

    parts: Assignment
    quality: PartitionQuality
    trainers: Assignment | None = None
    of_trainers: Mapping[str, object] | None = None
    """Quality figures for the trainers' assignment."""


def _write_dataset(
    graph: RawGraph, split: _Split, folder: Path, plan: PartitionPlan, workspace: Workspace | None
) -> None:
    figures = asdict(split.quality)
    if split.of_trainers is not None:
        figures["trainers"] = split.of_trainers

    parameters = dict(split.parts.parameters)
    for name in _PREPARATIONS:
        if getattr(plan, name):
            parameters[name] = getattr(plan, name)

    write_dataset(
        graph,
        replace(split.parts, parameters=parameters),
        folder,
        quality=figures,
        overwrite=plan.overwrite,
        feature_dtype=plan.feature_dtype,
        workspace=workspace,
    )


def _partition(graph: RawGraph, plan: PartitionPlan, workspace: Workspace | None) -> _Split:
    """Assign nodes to parts. A ``workspace`` stores the result as a stage, and all its ranks call this."""
    if workspace is None:
        return _assign(graph, plan, None)
    # The owners become a stage in the workspace. Once it is stored, the stages before it can be deleted.
    inner_workspace = replace(workspace, folder=workspace.folder / "owners.work")

    def make(folder: Path) -> None:
        split = _assign(graph, plan, inner_workspace)
        if workspace.ranks.is_first:
            _store(split, graph, folder)

    folder = workspace.stage("owners", make, shared=True)
    if workspace.ranks.is_first and inner_workspace.folder.is_dir():
        discard(inner_workspace.folder)
    return _load_split(graph, folder)


def _assign(graph: RawGraph, plan: PartitionPlan, workspace: Workspace | None) -> _Split:
    """Assign nodes to parts. If training nodes are far from balanced, try again and keep the better one."""
    split = _assign_once(graph, plan, workspace)
    if plan.options.balance or "train" not in _find_imbalances(graph, split.quality):
        return split

    # Try again with balanced training nodes, unless the method cannot balance them reproducibly.
    balanced_plan = replace(plan, options=replace(plan.options, balance=("train",)))
    partitioner_class = PARTITIONERS.get(balanced_plan.partitioner)
    balances_several = partitioner_class.max_constraints is None
    if "balance" not in partitioner_class.honours or not balances_several or plan.options.threads != 1:
        return split

    share = split.quality.balance["train"]
    if workspace is None or workspace.ranks.is_first:
        log.warning(
            "with %s the fullest part has %.2f times its share of the training nodes; partitioning again "
            "with %s and balance train, and keeping the better result (balance nodes keeps the first)",
            plan.partitioner,
            share,
            balanced_plan.partitioner,
        )

    if workspace is not None:
        workspace = replace(workspace, folder=workspace.folder / "balanced.work")
    balanced_split = _assign_once(graph, balanced_plan, workspace)
    if balanced_split.quality.balance["train"] < share:
        return balanced_split
    return split


def _assign_once(graph: RawGraph, plan: PartitionPlan, workspace: Workspace | None) -> _Split:
    if plan.trainers_per_part == 1:
        partitioner = PARTITIONERS.get(plan.partitioner)(plan.options).within(workspace, graph)
        parts = partitioner.assign(graph, plan.num_parts, plan.seed)
        return _Split(parts=parts, quality=measure(graph, parts))

    size = (plan.num_parts, plan.trainers_per_part)
    split = assign_two_levels(graph, plan.partitioner, plan.options, size, plan.seed, workspace)
    trainer_quality = measure(graph, split.trainers)
    quality = measure(graph, split.parts)
    figures = ("num_parts", "num_nodes", "num_edges", "edge_cut", "balance", "missed")
    trainer_figures = {name: getattr(trainer_quality, name) for name in figures}
    return _Split(parts=split.parts, quality=quality, trainers=split.trainers, of_trainers=trainer_figures)


def _store(split: _Split, graph: RawGraph, folder: Path) -> None:
    """Write ``split`` to ``folder``: the owners as arrays, and all other fields as JSON."""
    record: dict[str, object] = {"quality": asdict(split.quality), "of_trainers": split.of_trainers}
    for name, assignment in (("parts", split.parts), ("trainers", split.trainers)):
        if assignment is None:
            record[name] = None
            continue
        record[name] = {**vars(assignment), "part_of": None}
        for i, ntype in enumerate(graph.num_nodes):
            spill(folder, f"{name}{i}", np.int32, [assignment.part_of[ntype]])
    (folder / "split.json").write_text(json.dumps(record))


def _load_split(graph: RawGraph, folder: Path) -> _Split:
    record = json.loads((folder / "split.json").read_text())
    for name in ("parts", "trainers"):
        if record[name] is None:
            continue
        # The arrays are copied, because the stage may be deleted while they are in use.
        owners = [np.array(map_spill(folder, f"{name}{i}")) for i in range(len(graph.num_nodes))]
        record[name]["part_of"] = dict(zip(graph.num_nodes, owners, strict=True))
        record[name] = Assignment(**record[name])

    quality: dict[str, Any] = record["quality"]
    for name, value in quality.items():
        if isinstance(value, list):  # JSON has no tuples.
            quality[name] = tuple(value)
    record["quality"] = PartitionQuality(**quality)
    return _Split(**record)


_MAX_IMBALANCE = 1.5
"""Up to this balance, a split causes no warning."""


def _find_imbalances(graph: RawGraph, quality: PartitionQuality) -> dict[str, float]:
    """Return the balance of each train, val or test split that gives a part far more nodes than its share."""
    imbalances: dict[str, float] = {}
    if quality.num_parts == 1:
        return imbalances
    for name, ratio in quality.balance.items():
        if name not in MASKS:
            continue
        _, column = next(constraint_columns(graph, name))
        share = max(int(column.sum()), 1) / quality.num_parts
        # Nodes are indivisible, so a part may exceed a small share by almost one node.
        min_ratio = math.ceil(share) / share
        if ratio > max(_MAX_IMBALANCE, min_ratio):
            imbalances[name] = ratio
    return imbalances


def _warn(graph: RawGraph, quality: PartitionQuality) -> None:
    if len(quality.tolerance) > _MANY_CONSTRAINTS:
        log.warning(
            "%d weights are balanced at once, and %.0f %% of the edges are cut; balance fewer weights, "
            "such as degree (the in-edges of all types together) instead of etype",
            len(quality.tolerance),
            100 * quality.edge_cut,
        )
    imbalances = _find_imbalances(graph, quality)
    if imbalances:
        texts = [f"{ratio:.2f} times its share of the {name} nodes" for name, ratio in imbalances.items()]
        log.warning(
            "the fullest part has %s, so other ranks will wait for its rank; add --balance "
            "%s, with metis, ldg or fennel",
            " and ".join(texts),
            ",".join(imbalances),
        )
    if graph.is_homogeneous and _is_one_way(graph):
        log.warning(
            "most edges of %s have no opposite edge, and messages follow the direction of edges, so a node "
            "without in-edges only sees itself; if the graph is undirected, add --add-reverse-edges",
            graph.name,
        )


_SAMPLE_SIZE = 4096
_CHUNK_ROWS = 1 << 18


def _is_one_way(graph: RawGraph) -> bool:
    """Return whether most of 4,096 sampled edges have no opposite edge. The graph is homogeneous."""
    ((src, dst),) = graph.edges.values()
    if len(src) == 0:
        return False
    sample = np.random.default_rng(0).integers(0, len(src), _SAMPLE_SIZE)
    sample = sample[src[sample] != dst[sample]]
    opposite = np.unique(_make_edge_keys(dst[sample], src[sample], graph.total_nodes))
    has_opposite = np.zeros(len(opposite), np.bool_)
    for rows in iterate_slices(len(src), _CHUNK_ROWS):
        # Once half the opposite edges are found, the answer is known.
        if 2 * has_opposite.sum() >= len(has_opposite):
            return False
        has_opposite |= np.isin(opposite, _make_edge_keys(src[rows], dst[rows], graph.total_nodes))

    return bool(2 * has_opposite.sum() < len(has_opposite))


def _make_edge_keys(src: Array, dst: Array, num_nodes: int) -> Array:
    """Return (E,) int64 keys that are equal for edges between the same nodes."""
    # In NumPy 1.26, int32 times an int64 scalar is int32 and overflows.
    keys = src.astype(np.int64)
    keys *= num_nodes
    keys += dst
    return keys


def _prepare(graph: RawGraph, plan: PartitionPlan, workspace: Workspace | None) -> RawGraph:
    """Apply the plan's changes to edges and features. Raise ConfigError if ``graph`` does not allow them."""
    # Check options before any stage is written, because a command with corrected options cannot resume it.
    if plan.normalize_features and not has_node_column(graph, FEATURE):
        raise ConfigError(f"{graph.name} has no features {FEATURE!r}; leave out --normalize-features")
    if plan.add_self_loops and not graph.is_homogeneous:
        raise ConfigError(
            f"self-loops need a graph with one node type and one edge type, but {graph.name} "
            f"has {len(graph.num_nodes)} and {len(graph.edges)}; leave out --add-self-loops, "
            "because models for several types have a weight for a node's own row"
        )

    if plan.add_reverse_edges:
        graph = _add_reverse_edges(graph, workspace)
    if plan.add_self_loops:
        graph = _add_self_loops(graph, workspace)
    if plan.normalize_features:
        graph = _normalize_features(graph, workspace)
    return graph


def _add_reverse_edges(graph: RawGraph, workspace: Workspace | None) -> RawGraph:
    if not graph.is_homogeneous:
        return _add_reverse_types(graph)
    ((etype, (src, dst)),) = graph.edges.items()
    if len(src) == 0:
        return graph

    if workspace is not None:
        row_bytes = 8
        for column in graph.edge_data.get(etype, {}).values():
            row_bytes = max(row_bytes, math.prod(column.shape[1:]) * column.dtype.itemsize)
        workspace.remaining((24 + row_bytes) * len(src), 0, "finding the edges without an opposite one")

    existing_keys = _make_edge_keys(src, dst, graph.total_nodes)
    existing_keys.sort()
    lone_rows = []
    for rows in iterate_slices(len(src), _CHUNK_ROWS):
        opposite_keys = _make_edge_keys(dst[rows], src[rows], graph.total_nodes)
        positions = np.searchsorted(existing_keys, opposite_keys)
        positions = np.minimum(positions, len(existing_keys) - 1)
        is_lone = existing_keys[positions] != opposite_keys
        lone_rows.append(rows.start + np.flatnonzero(is_lone))

    # The keys take 8 bytes per edge, and appending edges needs that memory.
    del existing_keys
    new_rows = np.concatenate(lone_rows)
    del lone_rows
    return _append_edges(graph, (dst[new_rows], src[new_rows]), new_rows, "reverse edges", workspace)


def _add_reverse_types(graph: RawGraph) -> RawGraph:
    """Add a reverse type for each edge type, with source and destination swapped."""
    edges = dict(graph.edges)
    edge_ids = dict(graph.edge_ids)
    for etype, (src, dst) in graph.edges.items():
        reverse_type = (etype[2], f"{etype[1]}{REVERSE}", etype[0])
        if reverse_type in graph.edges:
            raise ConfigError(
                f"reverse edges of {etype} already exist as {reverse_type}; leave out --add-reverse-edges"
            )
        edges[reverse_type] = (dst, src)
        if etype in graph.edge_ids:
            edge_ids[reverse_type] = graph.edge_ids[etype]
    return replace(graph, edges=edges, edge_ids=edge_ids)


def _add_self_loops(graph: RawGraph, workspace: Workspace | None) -> RawGraph:
    ((src, dst),) = graph.edges.values()
    has_no_loop = np.ones(graph.total_nodes, np.bool_)
    for rows in iterate_slices(len(src), _CHUNK_ROWS):
        is_loop = src[rows] == dst[rows]
        has_no_loop[src[rows][is_loop]] = False
    nodes = np.flatnonzero(has_no_loop).astype(src.dtype, copy=False)
    return _append_edges(graph, (nodes, nodes), None, "self-loops", workspace)


def _append_edges(
    graph: RawGraph,
    ends: tuple[Array, Array],
    rows: Array | None,
    stage: str,
    workspace: Workspace | None,
) -> RawGraph:
    """Append edges to a homogeneous ``graph``. No edge split contains them.

    Args:
        ends: Sources and destinations of the new edges.
        rows: Existing edges that the new ones copy their columns from. None: columns are 1.
        stage: Name of the stage in ``workspace``.
    """
    ((etype, (src, dst)),) = graph.edges.items()
    columns = graph.edge_data.get(etype, {})
    num_new = len(ends[0])

    def join_rows(old: Array, new: Array) -> Iterator[Array]:
        for chunk in iterate_slices(max(len(old), 1), _CHUNK_ROWS):
            yield old[chunk]
        yield new.astype(old.dtype, copy=False)

    def join_column(name: str, old: Array) -> Iterator[Array]:
        if name in SPLITS:
            new = np.zeros((num_new, *old.shape[1:]), old.dtype)
        elif rows is None:
            new = np.ones((num_new, *old.shape[1:]), old.dtype)
        else:
            new = old[rows]
        return join_rows(old, new)

    makers = [partial(join_rows, src, ends[0]), partial(join_rows, dst, ends[1])]
    makers += [partial(join_column, name, column) for name, column in columns.items()]
    if etype in graph.edge_ids:
        new_ids = np.arange(len(src), len(src) + num_new)
        makers.append(partial(join_rows, graph.edge_ids[etype], new_ids))
    arrays = concatenate_chunks(workspace, stage, makers, len(makers) * (len(src) + num_new))

    # The workspace stores flat arrays.
    edge_data = {}
    for (name, old), new in zip(columns.items(), arrays[2:], strict=False):
        edge_data[name] = new.reshape(-1, *old.shape[1:])
    return replace(
        graph,
        edges={etype: (arrays[0], arrays[1])},
        edge_data={etype: edge_data},
        edge_ids={etype: arrays[-1]} if etype in graph.edge_ids else {},
    )


def _normalize_features(graph: RawGraph, workspace: Workspace | None) -> RawGraph:
    """Divide each feature row by the sum of its absolute values. Rows with only zeros stay as they are."""
    node_data = {ntype: dict(columns) for ntype, columns in graph.node_data.items()}
    for ntype, columns in node_data.items():
        column = columns.get(FEATURE)
        if isinstance(column, SparseRows):
            row_of_value = np.repeat(np.arange(column.shape[0]), np.diff(column.indptr))
            sums = np.bincount(row_of_value, np.abs(column.values.astype(np.float64)))
            columns[FEATURE] = replace(column, values=_divide(column.values, sums[row_of_value]))
        elif column is not None:
            make_chunks = [partial(_normalize_rows, column)]
            stage = f"features {safe_name(ntype)}"
            (normalized,) = concatenate_chunks(workspace, stage, make_chunks, column.size)
            columns[FEATURE] = normalized.reshape(column.shape)
    return replace(graph, node_data=node_data)


def _normalize_rows(column: Array) -> Iterator[Array]:
    row_size = max(1, math.prod(column.shape[1:]))
    for chunk in iterate_slices(max(len(column), 1), max(1, _CHUNK_ROWS // row_size)):
        rows = column[chunk].reshape(-1, row_size)
        sums = np.abs(rows.astype(np.float64)).sum(axis=1, keepdims=True)
        yield _divide(rows, sums)


def _divide(values: Array, sums: Array) -> Array:
    """Return ``values / sums``, where a sum of 0 counts as 1. Floats keep their dtype, others get float32."""
    dtype = values.dtype if values.dtype.kind == "f" else np.float32
    return np.divide(values, np.where(sums > 0, sums, 1)).astype(dtype)


def content_key(graph: RawGraph, plan: PartitionPlan) -> str:
    """Hash the content of ``graph`` and ``plan`` to 16 hexadecimal digits."""
    digest = hashlib.sha256()
    settings: list[object] = [
        *(graph.name, sorted(graph.num_nodes.items()), sorted(graph.num_classes.items())),
        *(plan.num_parts, plan.partitioner, plan.seed, plan.options, plan.format),
        *(plan.trainers_per_part, plan.feature_dtype),
    ]
    settings += [getattr(plan, name) for name in _PREPARATIONS]
    if graph.class_names:
        settings.append(sorted(graph.class_names.items()))
    digest.update(repr(tuple(settings)).encode())

    data = {
        "edges": graph.edges,
        "of edges": graph.edge_data,
        "of nodes": graph.node_data,
        "ids": graph.user_ids,
        "of source": graph.edge_ids,
    }
    for name, array in _iterate_arrays(data):
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        if array.size:
            digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()[:16]


def _iterate_arrays(data: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Array]]:
    """Yield (name, array) for each leaf in nested ``data``, sorted by key."""
    for key, value in sorted(data.items()):
        name = f"{prefix}{key!r} "
        if isinstance(value, Mapping):
            yield from _iterate_arrays(value, name)
        elif isinstance(value, tuple):
            yield from _iterate_arrays(dict(enumerate(value)), name)
        elif isinstance(value, SparseRows):
            yield from _iterate_arrays(vars(value) | {"num_columns": np.array(value.num_columns)}, name)
        else:
            yield name, value


def _add_weights(graph: RawGraph, weights: Mapping[str, Array]) -> RawGraph:
    if not weights:
        return graph

    if len(graph.num_nodes) != 1:
        raise ConfigError(
            "weights need a graph with one node type, but it has "
            f"{', '.join(graph.num_nodes)}; balance 'ntype' or a column of the graph instead"
        )

    (ntype,) = graph.num_nodes
    return replace(graph, node_data={ntype: {**graph.node_data.get(ntype, {}), **weights}})
