"""Ingestion of tables larger than memory into a dataset of one part, within a memory limit."""

import copy
import json
import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
    """Description with the statistics of its transforms, for later tables."""
    peak_bytes: int
    """Peak memory of the process since its start."""


def _ingest_nodes(
    spec: TypeSpec[str], *, is_text: bool, seed: int, output: DatasetOutput
) -> tuple[TypeRows, IdMap]:
    folder = node_folder(0, spec.kind)
    column = next(iter(spec.id_columns), None)
    rows = TypeRows(spec, folder, output)
    names = [] if column else rows.table.names(spec.files.paths[0])
    if candidates := [name for name in names if is_node_id(name, spec.kind)]:
        message = "nodes %r are numbered by row; if column %r has their ids, give it as node_id_col"
        _LOG.warning(message, spec.kind, candidates[0])
    id_bytes, is_range = 0, not is_text
    for piece in rows.scan(*spec.id_columns):
        if column is not None:
            ids = parse_ids(piece.columns[column], is_text=is_text)
            id_bytes += (pc.sum(pc.binary_length(ids)).as_py() or 0) if is_text else 8 * len(ids)
            is_range = is_range and np.array_equal(ids, np.arange(piece.row, piece.row + len(ids)))

    num_nodes = rows.num_rows
    step = output.budget.batch // 8
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
    numbers = (np.arange(first, min(first + step, num_nodes)) for first in range(0, num_nodes, step))
    output.write(f"{folder}/original_ids.arrow", IDS, num_nodes, numbers)
    rows.write(seed, ids=id_map)
    return rows, id_map


def _write_ids(
    id_map: IdMap, table: PiecewiseTable, column: str, path: str, id_bytes: int, output: DatasetOutput
) -> None:
    # Ids other than 0..N-1 become a column. They are added to the map at the same time.
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
    # Reverse edges are another edge type without tensors.
    rows = TypeRows(spec, edge_folder(0, spec.kind), output)
    for _ in rows.scan():
        pass
    end_spills: list[Spill] = []
    for column, ntype in zip(spec.id_columns, spec.kind[::2], strict=True):
        folder = output.work / f"end{len(end_spills)}"
        end_spills.append(ids[ntype].find(rows.table, column, f"the {ntype!r} nodes", folder))
        output.advance(1)

    ends = (end_spills[0], end_spills[1])
    sizes = ids[spec.kind[0]].num_nodes, ids[spec.kind[2]].num_nodes
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
    def rows(step: int) -> Iterator[Array]:
        total = ends[0].num_rows
        return (np.arange(first, min(first + step, total)) for first in range(0, total, step))

    num_sources, num_destinations = sizes
    stream = EdgeStream(
        sources=ends[0].chunks,
        destinations=ends[1].chunks,
        columns=[EdgeColumn(IDS, rows)],
        num_sources=num_sources,
        num_destinations=num_destinations,
    )
    edges = sort_edges(stream, output.work / name, output.budget)
    folder = edge_folder(0, etype)
    chunk_rows = output.budget.batch // 8
    output.write(f"{folder}/indptr.arrow", IDS, num_destinations + 1, edges.indptr.chunks(chunk_rows))
    info = ColumnInfo(dtype=id_dtype(num_sources).__name__, row_shape=())
    output.write(f"{folder}/indices.arrow", info, edges.indices.num_rows, edges.indices.chunks(chunk_rows))
    sorted_rows = edges.columns[0]
    output.write(f"{folder}/original_ids.arrow", IDS, sorted_rows.num_rows, sorted_rows.chunks(chunk_rows))
    return edges


def _make_reordering(rows: Spill, output: DatasetOutput) -> Reorder:
    """Return a function that reorders table rows like the edges. ``rows`` has the table row of each edge."""
    folder = output.work / "forward" / "arrange"
    memory = output.budget.bucket
    num_edges = rows.num_rows
    names = count()
    offset = 0
    scatter = ScatteredRows(folder / "scatter", num_edges, np.int64, memory=memory)
    for chunk in rows.chunks(memory // 64 + 1):
        scatter.put(chunk, np.arange(offset, offset + len(chunk)))
        offset += len(chunk)
    positions = Spill(folder / "positions", np.int64, scatter.chunks())

    def reorder(chunks: Iterable[Array], info: ColumnInfo) -> Iterator[Array]:
        path = folder / str(next(names))
        scattered = ScatteredRows(path, num_edges, info.dtype, info.row_shape, memory=memory)
        with positions.path.open("rb") as file:
            for rows in chunks:
                scattered.put(np.fromfile(file, np.int64, len(rows)), rows)
        return scattered.chunks()

    return reorder


def ingest(config: IngestConfig, plan: IngestPlan) -> Ingested:
    """Read the tables and write a dataset of one part atomically. One process calls it.

    Pieces of tables and buckets of ids and edges are in memory, but no array of all nodes or edges. Temporary
    files take about three times the edges, beside the dataset.

    Raises:
        ConfigError: the memory limit is too small for the program or one sort, a setting of a transform is
            invalid, a reverse type already exists, or another output path is inside the dataset.
        DatasetError: a value in a table is wrong. The message names file, row and column.
        StorageError: the target is not empty, or cannot be written.
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
            scoped = replace(output, work=work / f"nodes{i}")
            result = _ingest_nodes(node, is_text=is_text[node.kind], seed=plan.seed, output=scoped)
            nodes[node.kind], ids[node.kind] = result
            advance.say(f"{nodes[node.kind].num_rows} nodes {node.kind!r}")

        for i, edge in enumerate(config.edges):
            scoped = replace(output, work=work / f"edges{i}")
            reverse_type = reverse.get(edge.kind)
            edges[edge.kind] = _ingest_edges(edge, ids, reverse=reverse_type, seed=plan.seed, output=scoped)
            advance.say(f"{edges[edge.kind].num_rows} edges {':'.join(edge.kind)}")

        description = copy.deepcopy(dict(config.raw))
        for entry, node in zip(description["nodes"], config.nodes, strict=True):
            _add_settings(entry, node.features, nodes[node.kind].settings)
        for entry, edge in zip(description["edges"], config.edges, strict=True):
            _add_settings(entry, edge.features, edges[edge.kind].settings)
        manifest = _make_manifest(plan, reverse, output, nodes, ids, edges, description)
        manifest = write_manifest(manifest, partial)
        put_in_place(partial, out, plan.overwrite)

    return Ingested(manifest=manifest, description=description, peak_bytes=peak_bytes())


def write_description(ingested: Ingested, path: Path) -> None:
    """Write the description with the statistics of its transforms. Raise ConfigError if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(ingested.description, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; choose another place") from error


def _check_tables(config: IngestConfig) -> None:
    specs: tuple[TypeSpec[Any], ...] = (*config.nodes, *config.edges)
    for spec in specs:
        for feature in spec.features:
            make_transforms(feature)
        label = spec.label
        columns = [*spec.id_columns, *(column for feature in spec.features for column in feature.columns)]
        if label is not None and label.column is not None:
            columns.append(label.column)
        PiecewiseTable(spec.files, 1).check(columns)
        if label is not None and label.id_column is not None:
            for files in label.files.values():
                PiecewiseTable(files, 1).check([label.id_column])


def _reverse_types(config: IngestConfig) -> dict[EdgeType, EdgeType]:
    etypes = {edge.kind for edge in config.edges}
    reverse = {etype: (etype[2], f"{etype[1]}{REVERSE}", etype[0]) for etype in etypes}
    for etype, reverse_type in reverse.items():
        if reverse_type in etypes:
            raise ConfigError(
                f"{config.path}: reverse edges of {etype} would be {reverse_type}, which is described "
                "already; leave --add-reverse-edges out"
            )

    return reverse


def _find_text_types(config: IngestConfig) -> dict[str, bool]:
    # Ids are texts unless all tables that name them hold Parquet integers.
    is_text = {}
    for node in config.nodes:
        columns = [(node.files, column) for column in node.id_columns]
        for edge in config.edges:
            ends = zip(edge.kind[::2], edge.id_columns, strict=True)
            columns += [(edge.files, column) for ntype, column in ends if ntype == node.kind]
        # Row numbers are integers, even if they are in a CSV file.
        is_text[node.kind] = bool(node.id_columns) and not all(
            PiecewiseTable(files, 0).is_integer(column) for files, column in columns
        )
    return is_text


def _count_steps(config: IngestConfig, num_reverse: int) -> int:
    # The result is about the number of files, for the progress.
    specs: tuple[TypeSpec[Any], ...] = (*config.nodes, *config.edges)
    tensors = sum(len(spec.features) + (0 if spec.label is None else 1 + len(SPLITS)) for spec in specs)
    return 2 * len(config.nodes) + 5 * len(config.edges) + 3 * num_reverse + tensors


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
    columns = {etype: rows.columns for etype, rows in edges.items()}
    counts = {etype: rows.num_rows for etype, rows in edges.items()}
    for etype, reverse_type in reverse.items():
        columns[reverse_type] = {}
        counts[reverse_type] = counts[etype]
    labels = {ntype: rows.labels for ntype, rows in nodes.items()}
    all_labels = {**labels, **{":".join(etype): rows.labels for etype, rows in edges.items()}}
    names = {kind: list(item.names) for kind, item in all_labels.items() if item is not None and item.names}
    id_kinds = {ntype: "string" if item.is_text else "int64" for ntype, item in ids.items()}
    return Manifest(
        name=plan.name or plan.out.absolute().name,
        num_parts=1,
        node_offsets={ntype: np.array([0, rows.num_rows], np.int64) for ntype, rows in nodes.items()},
        edge_offsets={etype: np.array([0, number], np.int64) for etype, number in counts.items()},
        node_columns={ntype: rows.columns for ntype, rows in nodes.items()},
        edge_columns=columns,
        num_classes={
            ntype: item.num_classes for ntype, item in labels.items() if item and item.num_classes is not None
        },
        user_ids={ntype: kind for ntype, kind in id_kinds.items() if not ids[ntype].is_range},
        method="ingest",
        seed=plan.seed,
        parameters={"description": description, "class_names": names},
        files=output.files,
    )
