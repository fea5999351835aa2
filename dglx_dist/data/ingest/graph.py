"""Ingest tables larger than memory into a dataset with one part, within a memory limit."""

import copy
import json
import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from dglx_dist.data.external_memory import (
    EdgeColumn,
    EdgeStream,
    ScatteredRows,
    SortedEdges,
    Spill,
    low_memory_allocators,
    open_budget,
    sort_edges,
)
from dglx_dist.data.ingest.config import FeatureSpec, IngestConfig, IngestPlan, TypeSpec
from dglx_dist.data.ingest.features import make_transforms
from dglx_dist.data.ingest.node_ids import IdMap
from dglx_dist.data.ingest.tensors import DatasetOutput, Reorder, TypeRows
from dglx_dist.data.storage.columns import IDS, edge_folder, id_dtype, node_folder, write_strings
from dglx_dist.data.storage.files import name_write_failures, partial_folder
from dglx_dist.data.storage.manifest import Manifest, check_target, put_in_place, write_manifest
from dglx_dist.data.table_graphs import is_node_id
from dglx_dist.data.tables import PiecewiseTable, parse_ids
from dglx_dist.errors import ConfigError
from dglx_dist.memory import peak_bytes, read_size
from dglx_dist.progress import progress
from dglx_dist.records import REVERSE, SPLITS, Array, ColumnInfo, EdgeType

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Ingested:
    """Result of one ingestion."""

    manifest: Manifest
    description: Mapping[str, Any]
    """Description with the transforms' statistics, for later tables."""
    peak_bytes: int
    """The process's peak memory since its start."""


def _ingest_nodes(
    spec: TypeSpec[str], *, is_text: bool, seed: int, output: DatasetOutput
) -> tuple[TypeRows, IdMap]:
    """Write one type's nodes, and return them with the map from their ids to node numbers."""
    folder = node_folder(0, spec.kind)
    rows = TypeRows(spec, folder, output)
    column = None
    if spec.id_columns:
        (column,) = spec.id_columns
    else:
        _warn_of_ids(spec, rows.table)

    id_bytes = 0
    is_range = not is_text
    for piece in rows.scan(*spec.id_columns):
        if column is None:
            continue
        ids = parse_ids(piece.columns[column], is_text=is_text)
        if is_text:
            id_bytes += pc.sum(pc.binary_length(ids)).as_py() or 0  # Without ids, the sum is None.
        else:
            id_bytes += 8 * len(ids)
            is_range = is_range and np.array_equal(ids, np.arange(piece.row, piece.row + len(ids)))

    num_nodes = rows.num_rows
    id_map = IdMap(
        output.work / "ids",
        num_nodes,
        is_text=is_text,
        id_bytes=None if column is None or is_range else id_bytes,
        memory=output.budget.bucket,
    )
    if column is not None and not id_map.is_range:
        _write_ids(id_map, rows.table, column, f"{folder}/user_ids.arrow", id_bytes, output)
        id_map.check_unique(rows.table, column)
    row_numbers = _iterate_rows(num_nodes, output.budget.batch // 8)
    output.write(f"{folder}/original_ids.arrow", IDS, num_nodes, row_numbers)
    rows.write(seed, ids=id_map)
    return rows, id_map


def _warn_of_ids(spec: TypeSpec[str], table: PiecewiseTable) -> None:
    names = table.names(spec.files.paths[0])
    candidates = [name for name in names if is_node_id(name, spec.kind)]
    if candidates:
        message = "nodes %r are numbered by row; if column %r has their ids, give it as node_id_col"
        _LOG.warning(message, spec.kind, candidates[0])


def _iterate_rows(num_rows: int, step: int) -> Iterator[Array]:
    for first in range(0, num_rows, step):
        yield np.arange(first, min(first + step, num_rows))


def _write_ids(
    id_map: IdMap, table: PiecewiseTable, column: str, path: str, id_bytes: int, output: DatasetOutput
) -> None:
    """Write ids other than 0..N-1 as a column, and add them to the map at the same time."""

    def add_ids() -> Iterator[Any]:
        for piece, ids in id_map.read(table, column):
            id_map.add(ids, piece.row)
            yield ids

    if not id_map.is_text:
        output.write(path, IDS, id_map.num_nodes, (ids.to_numpy(zero_copy_only=False) for ids in add_ids()))
        return
    texts = (ids for _, ids in id_map.read(table, column))
    output.files[path] = write_strings(output.folder / path, id_map.num_nodes, id_bytes, add_ids(), texts)
    output.advance(1)


def _ingest_edges(
    spec: TypeSpec[EdgeType],
    ids: Mapping[str, IdMap],
    *,
    reverse: EdgeType | None,
    seed: int,
    output: DatasetOutput,
) -> TypeRows:
    """Write one type's edges. ``reverse`` is the type for the reverse edges, which have no tensors."""
    rows = TypeRows(spec, edge_folder(0, spec.kind), output)
    for _ in rows.scan():
        pass  # The scan collects statistics, and its pieces are not needed.
    source, _, destination = spec.kind
    end_spills: list[Spill] = []
    for column, ntype in zip(spec.id_columns, (source, destination), strict=True):
        folder = output.work / f"end{len(end_spills)}"
        end_spills.append(ids[ntype].find(rows.table, column, f"the {ntype!r} nodes", folder))
        output.advance(1)

    ends = (end_spills[0], end_spills[1])
    sizes = ids[source].num_nodes, ids[destination].num_nodes
    edges = _write_structure(spec.kind, ends, sizes, "forward", output)
    if spec.features or spec.label is not None:
        rows.write(seed, reorder=_make_reordering(edges.columns[0], output))
    shutil.rmtree(output.work / "forward")
    if reverse is not None:
        _write_structure(reverse, ends[::-1], sizes[::-1], "reverse", output)
    for i in range(2):
        shutil.rmtree(output.work / f"end{i}")
    return rows


def _write_structure(
    etype: EdgeType, ends: tuple[Spill, Spill], sizes: tuple[int, ...], name: str, output: DatasetOutput
) -> SortedEdges:
    """Sort and write one type's edges. ``sizes`` counts sources and destinations."""
    num_edges = ends[0].num_rows
    num_sources, num_destinations = sizes
    stream = EdgeStream(
        sources=ends[0].chunks,
        destinations=ends[1].chunks,
        columns=[EdgeColumn(IDS, partial(_iterate_rows, num_edges))],
        num_sources=num_sources,
        num_destinations=num_destinations,
    )
    edges = sort_edges(stream, output.work / name, output.budget)
    folder = edge_folder(0, etype)

    chunk_rows = output.budget.batch // 8
    output.write(f"{folder}/indptr.arrow", IDS, num_destinations + 1, edges.indptr.chunks(chunk_rows))
    info = ColumnInfo(dtype=id_dtype(num_sources).__name__, row_shape=())
    output.write(f"{folder}/indices.arrow", info, num_edges, edges.indices.chunks(chunk_rows))
    output.write(f"{folder}/original_ids.arrow", IDS, num_edges, edges.columns[0].chunks(chunk_rows))
    return edges


def _make_reordering(rows: Spill, output: DatasetOutput) -> Reorder:
    """Return a function that reorders table rows like the edges. ``rows`` has each edge's table row."""
    folder = output.work / "forward" / "arrange"
    memory = output.budget.bucket
    num_edges = rows.num_rows
    # The inverse permutation: each table row's position among the sorted edges.
    scatter = ScatteredRows(folder / "scatter", num_edges, np.int64, memory=memory)
    first_edge = 0
    for chunk in rows.chunks(memory // 64 + 1):
        scatter.put(chunk, np.arange(first_edge, first_edge + len(chunk)))
        first_edge += len(chunk)
    positions = Spill(folder / "positions", np.int64, scatter.chunks())
    file_numbers = count()

    def reorder(chunks: Iterable[Array], info: ColumnInfo) -> Iterator[Array]:
        path = folder / str(next(file_numbers))
        scattered = ScatteredRows(path, num_edges, info.dtype, info.row_shape, memory=memory)
        with positions.path.open("rb") as file:
            for rows in chunks:
                scattered.put(np.fromfile(file, np.int64, len(rows)), rows)
        return scattered.chunks()

    return reorder


def ingest(config: IngestConfig, plan: IngestPlan) -> Ingested:
    """Read the tables and write a dataset with one part atomically. One process calls this function.

    Memory holds pieces of tables, and buckets with ids and edges, but no array over all nodes or edges.
    Temporary files take about three times the edges, beside the dataset.

    Raises:
        ConfigError: If the memory limit is too small for the program or one sort, a transform's setting is
            invalid, a reverse type already exists, or another output path is inside the dataset.
        DatasetError: If a value in a table is wrong. The message names file, row and column.
        StorageError: If the target is not empty, or cannot be written.
    """
    out = plan.out.absolute()
    check_target(out, plan.overwrite)
    workspace = (plan.workspace or out.parent).absolute()
    for option_name, path in (("workspace", workspace), ("output-conf-file", plan.output_description)):
        if path is not None and path.resolve().is_relative_to(out.resolve()):
            raise ConfigError(f"the {option_name} {path} is in {out}, the dataset's folder; choose another")

    _check_tables(config)
    reverse = _reverse_types(config) if plan.reverse_edges else {}
    is_text = _find_text_types(config)
    budget = open_budget(read_size(plan.memory))

    with (
        low_memory_allocators(),
        name_write_failures(out),
        partial_folder(out) as partial,
        partial_folder(workspace / f"{out.name}.work") as work,
        progress("Ingesting", _count_steps(config, len(reverse))) as advance,
    ):
        output = DatasetOutput(folder=partial, work=work, budget=budget, advance=advance)
        nodes = {}
        ids = {}
        edges = {}
        for i, node in enumerate(config.nodes):
            node_output = replace(output, work=work / f"nodes{i}")
            rows, id_map = _ingest_nodes(node, is_text=is_text[node.kind], seed=plan.seed, output=node_output)
            nodes[node.kind] = rows
            ids[node.kind] = id_map
            advance.say(f"{rows.num_rows} nodes {node.kind!r}")

        for i, edge in enumerate(config.edges):
            edge_output = replace(output, work=work / f"edges{i}")
            reverse_type = reverse.get(edge.kind)
            rows = _ingest_edges(edge, ids, reverse=reverse_type, seed=plan.seed, output=edge_output)
            edges[edge.kind] = rows
            advance.say(f"{rows.num_rows} edges {':'.join(edge.kind)}")

        description = copy.deepcopy(dict(config.mapping))
        for entry, node in zip(description["nodes"], config.nodes, strict=True):
            _add_settings(entry, node.features, nodes[node.kind].settings)
        for entry, edge in zip(description["edges"], config.edges, strict=True):
            _add_settings(entry, edge.features, edges[edge.kind].settings)
        manifest = _make_manifest(plan, reverse, output, nodes, ids, edges, description)
        manifest = write_manifest(manifest, partial)
        put_in_place(partial, out, plan.overwrite)

    return Ingested(manifest=manifest, description=description, peak_bytes=peak_bytes())


def write_description(ingested: Ingested, path: Path) -> None:
    """Write the description with its transforms' statistics. Raise ConfigError if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(ingested.description, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; choose another place") from error


def _check_tables(config: IngestConfig) -> None:
    """Raise an error if a transform is invalid, or a column that the description names does not exist."""
    specs: tuple[TypeSpec[Any], ...] = (*config.nodes, *config.edges)
    for spec in specs:
        columns = list(spec.id_columns)
        for feature in spec.features:
            make_transforms(feature)
            columns += feature.columns
        label = spec.label
        if label is not None and label.column is not None:
            columns.append(label.column)
        PiecewiseTable(spec.files, 1).check(columns)

        if label is not None and label.id_column is not None:
            for files in label.files.values():
                PiecewiseTable(files, 1).check([label.id_column])


def _reverse_types(config: IngestConfig) -> dict[EdgeType, EdgeType]:
    etypes = [edge.kind for edge in config.edges]
    reverse = {}
    for etype in etypes:
        reverse[etype] = (etype[2], f"{etype[1]}{REVERSE}", etype[0])
        if reverse[etype] in etypes:
            raise ConfigError(
                f"{config.path}: reverse edges of {etype} would be {reverse[etype]}, which "
                "is described already; leave --add-reverse-edges out"
            )
    return reverse


def _find_text_types(config: IngestConfig) -> dict[str, bool]:
    """Return for each node type whether its ids are texts. They are texts unless all tables hold integers."""
    is_text = {}
    for node in config.nodes:
        # Without an id column, edges have row numbers, which are integers even in a CSV file.
        is_text[node.kind] = False
        if not node.id_columns:
            continue
        columns = [(node.files, column) for column in node.id_columns]
        for edge in config.edges:
            source, _, destination = edge.kind
            for ntype, column in zip((source, destination), edge.id_columns, strict=True):
                if ntype == node.kind:
                    columns.append((edge.files, column))
        for files, column in columns:
            if not PiecewiseTable(files, 0).is_integer(column):
                is_text[node.kind] = True
                break
    return is_text


def _count_steps(config: IngestConfig, num_reverse: int) -> int:
    """Count roughly how many files will be written, for the progress."""
    specs: tuple[TypeSpec[Any], ...] = (*config.nodes, *config.edges)
    num_steps = 2 * len(config.nodes) + 5 * len(config.edges) + 3 * num_reverse
    for spec in specs:
        num_steps += len(spec.features)
        if spec.label is not None:
            num_steps += 1 + len(SPLITS)
    return num_steps


def _add_settings(
    entry: dict[str, Any], features: Sequence[FeatureSpec], settings: Sequence[Mapping[str, Any]]
) -> None:
    for feature, spec, feature_settings in zip(entry.get("features") or [], features, settings, strict=True):
        if feature_settings:
            feature["transform"] = {"name": spec.transform, **feature_settings}


def _make_manifest(
    plan: IngestPlan,
    reverse: Mapping[EdgeType, EdgeType],
    output: DatasetOutput,
    nodes: Mapping[str, TypeRows],
    ids: Mapping[str, IdMap],
    edges: Mapping[EdgeType, TypeRows],
    description: Mapping[str, Any],
) -> Manifest:
    edge_columns = {etype: rows.columns for etype, rows in edges.items()}
    num_edges = {etype: rows.num_rows for etype, rows in edges.items()}
    for etype, reverse_type in reverse.items():
        edge_columns[reverse_type] = {}
        num_edges[reverse_type] = num_edges[etype]

    num_classes = {}
    class_names = {}
    user_ids = {}
    for ntype, rows in nodes.items():
        if rows.labels is not None and rows.labels.num_classes is not None:
            num_classes[ntype] = rows.labels.num_classes
        if not ids[ntype].is_range:
            user_ids[ntype] = "string" if ids[ntype].is_text else "int64"
    for name, rows in (*nodes.items(), *((":".join(etype), rows) for etype, rows in edges.items())):
        if rows.labels is not None and rows.labels.names:
            class_names[name] = list(rows.labels.names)
    return Manifest(
        name=plan.name or plan.out.absolute().name,
        num_parts=1,
        node_offsets={ntype: np.array([0, rows.num_rows], np.int64) for ntype, rows in nodes.items()},
        edge_offsets={etype: np.array([0, size], np.int64) for etype, size in num_edges.items()},
        node_columns={ntype: rows.columns for ntype, rows in nodes.items()},
        edge_columns=edge_columns,
        num_classes=num_classes,
        user_ids=user_ids,
        method="ingest",
        seed=plan.seed,
        parameters={"description": description, "class_names": class_names},
        files=output.files,
    )
