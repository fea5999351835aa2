"""Ingestion: tables larger than memory -> a dataset of one part, within a memory limit."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from dglx_dist.data.ingest.config import EdgeSpec, FeatureSpec, IngestConfig, LabelSpec, NodeSpec
from dglx_dist.data.ingest.external_memory import (
    BUDGET_SHARES,
    PROGRAM_BYTES,
    Scatter,
    Spill,
    SpillReader,
    low_memory_allocators,
    open_budget,
    release_memory,
    runs,
    text_buffers,
)
from dglx_dist.data.ingest.features import Features, make_transforms
from dglx_dist.data.ingest.id_map import BucketIdMap, IdMap, RangeIdMap, check_known
from dglx_dist.data.ingest.tables import Piece, Table, ids_of
from dglx_dist.data.ingest.tensors import (
    DatasetOutput,
    Labels,
    Rows,
    SplitCodes,
    draw_split_codes,
    read_split_codes,
    write_tensors,
)
from dglx_dist.data.storage.columns import IDS, edge_folder, node_folder, write_string_chunks
from dglx_dist.data.storage.files import named_failures, partial_folder, peak
from dglx_dist.data.storage.manifest import Manifest, check_target, put_in_place, write_manifest
from dglx_dist.errors import ConfigError, DatasetError
from dglx_dist.progress import progress
from dglx_dist.records import SPLITS, Array, ColumnInfo, EdgeType

_REVERSE = "-rev"
"""Suffix of reverse relations, as in GraphStorm."""


@dataclass(frozen=True, kw_only=True)
class IngestPlan:
    """Target, limits and options of one ingestion.

    Raises:
        ConfigError: the seed is negative.
    """

    out: Path
    memory: int
    """Maximum bytes of the process, program and libraries included."""
    name: str | None = None
    """Of the graph; None: that of the folder."""
    seed: int = 0
    """Of the splits."""
    reverse_edges: bool = False
    overwrite: bool = False
    workspace: Path | None = None
    """Folder for temporary files; None: beside ``out``."""
    output_description: Path | None = None
    """Target of :func:`write_description`, checked before ingestion starts."""

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigError(f"the seed is {self.seed}; it must be at least 0")


@dataclass(frozen=True, kw_only=True)
class Ingested:
    """Result of one ingestion."""

    manifest: Manifest
    description: Mapping[str, Any]
    """The description with the statistics of its transforms, for later tables."""
    peak_bytes: int
    """Peak memory of the process since its start."""


@dataclass(frozen=True, kw_only=True)
class _IngestedNodes:
    ids: IdMap
    is_text: bool
    """Whether ids are looked up as texts."""
    user_ids: str | None
    """Kind of the stored user ids; None where they are 0..N-1."""
    columns: Mapping[str, ColumnInfo]
    num_classes: int | None
    class_names: tuple[str, ...]
    """By class number; empty where labels are numbers."""
    found_settings: list[Mapping[str, Any]]
    """Transform settings of each feature, with statistics."""


@dataclass(frozen=True, kw_only=True)
class _NodeScan:
    num_rows: int
    id_bytes: int
    is_range: bool


def _ingest_nodes(spec: NodeSpec, *, is_text: bool, seed: int, output: DatasetOutput) -> _IngestedNodes:
    table = Table(spec.files, output.budget.batch)
    features = Features(spec.features, output.budget.batch)
    labels = _labels(spec.label)
    scanned = _scan_nodes(spec, table, features, labels, is_text)
    release_memory()
    found_settings = features.finalize(str(spec.files.paths[0]))
    if labels is not None:
        labels.finalize(str(spec.files.paths[0]))
    ids = _make_id_map(spec, table, scanned, is_text, output)
    folder = node_folder(0, spec.ntype)
    output.write(
        f"{folder}/original_ids.arrow", IDS, scanned.num_rows, _row_numbers(scanned.num_rows, output)
    )
    codes = None if spec.label is None else _node_split(spec, spec.label, ids, is_text, seed, output)
    rows = Rows(
        table=table,
        num_rows=scanned.num_rows,
        features=features,
        labels=labels,
        codes=codes,
        folder=folder,
        reorder=lambda chunks, _: chunks,
    )
    kept = isinstance(ids, BucketIdMap)
    return _IngestedNodes(
        ids=ids,
        is_text=is_text,
        user_ids=("string" if is_text else "int64") if kept else None,
        columns=write_tensors(rows, output),
        num_classes=None if labels is None else labels.num_classes,
        class_names=() if labels is None else labels.names,
        found_settings=found_settings,
    )


def _labels(spec: LabelSpec | None) -> Labels | None:
    if spec is None or spec.column is None:
        return None
    return Labels(spec.column, spec.task == "regression")


def _scan_nodes(
    spec: NodeSpec, table: Table, features: Features, labels: Labels | None, is_text: bool
) -> _NodeScan:
    num_rows, id_bytes, is_range = 0, 0, True
    for piece in _scanned(table, features, labels, spec.id_column):
        if spec.id_column is not None:
            ids = _ids(spec.id_column, piece, is_text)
            if is_text:
                id_bytes += pc.sum(pc.binary_length(ids)).as_py() or 0
            else:
                is_range = is_range and np.array_equal(ids, np.arange(num_rows, num_rows + len(ids)))
                id_bytes += 8 * len(ids)
        num_rows += piece.num_rows
    if num_rows == 0:
        raise DatasetError(f"{spec.files.paths[0]}: the table has no row, so there is no node {spec.ntype!r}")
    return _NodeScan(num_rows=num_rows, id_bytes=id_bytes, is_range=is_range and not is_text)


def _scanned(
    table: Table, features: Features, labels: Labels | None, id_column: str | None = None
) -> Iterator[Piece]:
    # One pass over everything that must be known of all rows.
    others = ([labels.column] if labels is not None else []) + ([id_column] if id_column is not None else [])
    for piece in table.pieces([*features.scanned_columns, *others]):
        features.scan(piece)
        if labels is not None:
            labels.scan(piece.columns[labels.column], piece.where, piece.first_row)
        yield piece


def _ids(column: str, piece: Piece, is_text: bool) -> Any:
    return ids_of(piece.columns[column], column, piece.where, piece.first_row, is_text=is_text)


def _make_id_map(
    spec: NodeSpec, table: Table, scanned: _NodeScan, is_text: bool, output: DatasetOutput
) -> IdMap:
    # Ids that are not 0..N-1 are also written to the dataset.
    memory = output.budget.bucket
    if spec.id_column is None or scanned.is_range:
        return RangeIdMap(scanned.num_rows, memory)
    buckets = BucketIdMap(output.work / "ids", scanned.num_rows, scanned.id_bytes, memory)
    written = _UserIdWriter(output, is_text)
    for piece in table.pieces([spec.id_column]):
        ids = _ids(spec.id_column, piece, is_text)
        buckets.add(ids, piece.row)
        written.add(ids)
    buckets.check_unique(table, spec.id_column)
    written.write(f"{node_folder(0, spec.ntype)}/user_ids.arrow")
    return buckets


class _UserIdWriter:
    """Collects ids in table order on disk, then writes them as one column."""

    def __init__(self, output: DatasetOutput, is_text: bool) -> None:
        self._output = output
        self._is_text = is_text
        # The ids, or the end offset of each text.
        self._numbers = Spill(output.work / "user_ids", np.int64)
        self._texts = Spill(output.work / "user_id_texts", np.uint8)
        if is_text:
            self._numbers.append(np.zeros(1, np.int64))

    def add(self, ids: Any) -> None:
        if not self._is_text:
            self._numbers.append(ids.to_numpy(zero_copy_only=False))
            return
        ends, data = text_buffers(ids)
        self._numbers.append(ends[1:] + self._texts.num_rows)
        self._texts.append(data)

    def write(self, path: str) -> None:
        at_once = self._output.budget.batch // 8
        numbers = self._numbers.chunks(at_once)
        if not self._is_text:
            self._output.write(path, IDS, self._numbers.num_rows, numbers)
            return
        data = self._texts.chunks(8 * at_once)
        self._output.files[path] = write_string_chunks(
            self._output.folder / path, self._numbers.num_rows - 1, self._texts.num_rows, numbers, data
        )
        self._output.advance(1)


def _node_split(
    spec: NodeSpec, label: LabelSpec, ids: IdMap, is_text: bool, seed: int, output: DatasetOutput
) -> SplitCodes:
    drawn = _drawn_split(label, seed)
    if drawn is not None:
        return drawn
    owner = f"{spec.files.paths[0]}{' ...' if len(spec.files.paths) > 1 else ''}"
    return lambda has_label, count: read_split_codes(
        label, ids, owner, output.work / "split", is_text=is_text, memory=output.budget.bucket
    )


def _drawn_split(label: LabelSpec | None, seed: int) -> SplitCodes | None:
    shares = None if label is None else label.split
    if shares is None:
        return None
    return lambda has_label, count: draw_split_codes(has_label, count, shares, seed)


def _row_numbers(count: int, output: DatasetOutput) -> Iterator[Array]:
    step = output.budget.batch // 8
    for first in range(0, count, step):
        yield np.arange(first, min(first + step, count))


_SLOTS = 1 << 16
_EDGE = np.dtype([("destination", np.int64), ("source", np.int64), ("row", np.int64)])
_SORTING_BYTES = 3 * _EDGE.itemsize
"""Memory of sorting per edge: the edge, its position, and a sorted copy of one column at a time."""
_HUB_SHARES = 5
"""Memory shares that the edges of a hub may take; nothing else is in memory then."""


@dataclass(frozen=True, kw_only=True)
class Ends:
    """Both ends of the edges of one table, in the order of its rows."""

    sources: Spill
    """(E,) int64."""
    destinations: Spill
    """(E,) int64."""

    @property
    def num_edges(self) -> int:
        return self.sources.num_rows

    def reversed(self) -> Ends:
        """Return the same edges in the opposite direction."""
        return Ends(sources=self.destinations, destinations=self.sources)


@dataclass(frozen=True, kw_only=True)
class InEdges:
    """CSC: edges ordered by (destination, source, row)."""

    indptr: Spill
    """(N_dst + 1,) int64."""
    indices: Spill
    """(E,) sources."""
    rows: Spill
    """(E,) int64 table row of each edge."""

    def positions(self, folder: Path, memory: int) -> Spill:
        """Return (E,) int64: the position of each table row in this order."""
        count = self.rows.num_rows
        scatter = Scatter(folder / "scatter", count, np.int64, memory=memory)
        first = 0
        for rows in self.rows.chunks(memory // 64 + 1):
            scatter.put(rows, np.arange(first, first + len(rows)))
            first += len(rows)
        return Spill(folder / "positions", np.int64).extend(scatter.chunks())


def sort_edges(ends: Ends, num_sources: int, num_destinations: int, folder: Path, memory: int) -> InEdges:
    """Sort edges by (destination, source, table row).

    Sorts the in-edges of as many consecutive destinations as fit into ``memory`` bytes, but at least
    those of one of 65,536 slots of destinations, with up to five times ``memory``.

    Raises:
        ConfigError: a node, or a slot of neighbours in the table, has too many in-edges for one sort.
    """
    width = -(-num_destinations // _SLOTS)
    step = max(1, memory // _SORTING_BYTES)
    firsts = _first_destinations(ends, num_destinations, width, step)
    _write_buckets(ends, firsts, folder / "buckets", step)
    result = InEdges(
        indptr=Spill(folder / "indptr", np.int64),
        indices=Spill(folder / "indices", np.int32 if num_sources < 2**31 else np.int64),
        rows=Spill(folder / "rows", np.int64),
    )
    result.indptr.append(np.zeros(1, np.int64))
    total = 0
    for number, (first, last) in enumerate(zip(firsts, [*firsts[1:], num_destinations], strict=True)):
        edges = _read_bucket(folder / "buckets" / str(number))
        counts = np.bincount(edges["destination"] - first, minlength=last - first)
        # A stable sort by two keys suffices: the edges of a bucket are in row order already.
        order = np.lexsort((edges["source"], edges["destination"]))
        result.indices.append(edges["source"][order])
        result.rows.append(edges["row"][order])
        result.indptr.append(total + np.cumsum(counts))
        total += len(edges)
        del edges, order
        release_memory()
    return result


def _first_destinations(ends: Ends, num_destinations: int, width: int, step: int) -> list[int]:
    # A bucket has at most ``step`` edges, unless it is a single slot.
    counts = np.zeros(-(-num_destinations // width), np.int64)
    for destinations in ends.destinations.chunks(step):
        counts += np.bincount(destinations // width, minlength=len(counts))
    _check_fits(counts, width, _HUB_SHARES * step)
    firsts, held = [0], 0
    for slot, count in enumerate(counts.tolist()):
        if held and held + count > step:
            firsts.append(slot * width)
            held = 0
        held += count
    return firsts


def _check_fits(counts: Array, width: int, most: int) -> None:
    slot = int(np.argmax(counts))
    if counts[slot] > most:
        nodes = f"rows {slot * width} to {(slot + 1) * width - 1}" if width > 1 else f"row {slot}"
        needed = int(counts[slot]) * _SORTING_BYTES * BUDGET_SHARES // _HUB_SHARES
        raise ConfigError(
            f"{counts[slot]} edges end at the nodes of {nodes} of their table, and are sorted together; "
            f"grant --memory {(needed + PROGRAM_BYTES) // 2**20 + 1}MB"
        )


def _write_buckets(ends: Ends, firsts: list[int], folder: Path, step: int) -> None:
    folder.mkdir(parents=True)
    row = 0
    for edges in _edges(ends, step):
        edges["row"] = np.arange(row, row + len(edges))
        row += len(edges)
        buckets = np.searchsorted(firsts, edges["destination"], side="right") - 1
        order = np.argsort(buckets, kind="stable")
        for number, run in runs(buckets[order]):
            with (folder / str(number)).open("ab") as file:
                edges[order[run]].tofile(file)


def _edges(ends: Ends, step: int) -> Iterator[Array]:
    pairs = zip(ends.sources.chunks(step), ends.destinations.chunks(step), strict=True)
    for sources, destinations in pairs:
        edges = np.empty(len(sources), _EDGE)
        edges["source"], edges["destination"] = sources, destinations
        yield edges


def _read_bucket(path: Path) -> Array:
    if not path.exists():
        return np.empty(0, _EDGE)
    edges = np.fromfile(path, dtype=_EDGE)
    path.unlink()
    return edges


@dataclass(frozen=True, kw_only=True)
class _IngestedEdges:
    num_edges: int
    columns: Mapping[str, ColumnInfo]
    class_names: tuple[str, ...]
    found_settings: list[Mapping[str, Any]]


def _ingest_edges(
    spec: EdgeSpec,
    nodes: Mapping[str, _IngestedNodes],
    *,
    reverse: EdgeType | None,
    seed: int,
    output: DatasetOutput,
) -> _IngestedEdges:
    # The reverse edges are another edge type, without tensors; None: they are not written.
    table = Table(spec.files, output.budget.batch)
    features = Features(spec.features, output.budget.batch)
    labels = _labels(spec.label)
    if features.scanned_columns or labels is not None:
        num_edges = sum(piece.num_rows for piece in _scanned(table, features, labels))
    else:
        num_edges = table.count()
    if num_edges == 0:
        raise DatasetError(f"{spec.files.paths[0]}: the table has no row, so there is no edge {spec.etype}")
    found_settings = features.finalize(str(spec.files.paths[0]))
    if labels is not None:
        labels.finalize(str(spec.files.paths[0]))
    ends = _find_ends(spec, table, num_edges, nodes, output)
    sizes = nodes[spec.etype[0]].ids.num_nodes, nodes[spec.etype[2]].ids.num_nodes
    edges = _write_structure(spec.etype, ends, sizes, "forward", output)
    columns = {}
    if features.names or labels is not None or spec.label is not None:
        rows = Rows(
            table=table,
            num_rows=num_edges,
            features=features,
            labels=labels,
            codes=_drawn_split(spec.label, seed),
            folder=edge_folder(0, spec.etype),
            reorder=_EdgeReorderer(edges, output).reorder,
        )
        columns = dict(write_tensors(rows, output))
    shutil.rmtree(output.work / "forward")
    if reverse is not None:
        _write_structure(reverse, ends.reversed(), sizes[::-1], "reverse", output)
    for number in range(2):
        shutil.rmtree(output.work / f"end{number}")
    names = () if labels is None else labels.names
    return _IngestedEdges(
        num_edges=num_edges, columns=columns, class_names=names, found_settings=found_settings
    )


def _find_ends(
    spec: EdgeSpec, table: Table, num_edges: int, nodes: Mapping[str, _IngestedNodes], output: DatasetOutput
) -> Ends:
    found: list[Spill] = []
    for column, ntype in ((spec.source_column, spec.etype[0]), (spec.destination_column, spec.etype[2])):
        known = nodes[ntype]
        folder = output.work / f"end{len(found)}"
        ids = (_ids(column, piece, known.is_text) for piece in table.pieces([column]))
        result = known.ids.find(ids, num_edges, folder)
        check_known(result.unknown, table.locate, column, f"the {ntype!r} nodes")
        found.append(Spill(folder / "nodes", np.int64).extend(result.rows.chunks()))
        output.advance(1)
    return Ends(sources=found[0], destinations=found[1])


def _write_structure(
    etype: EdgeType, ends: Ends, sizes: tuple[int, ...], name: str, output: DatasetOutput
) -> InEdges:
    num_sources, num_destinations = sizes
    edges = sort_edges(ends, num_sources, num_destinations, output.work / name, output.budget.bucket)
    folder, at_once = edge_folder(0, etype), output.budget.batch // 8
    output.write(f"{folder}/indptr.arrow", IDS, num_destinations + 1, edges.indptr.chunks(at_once))
    info = ColumnInfo(dtype="int32" if num_sources < 2**31 else "int64", row_shape=())
    output.write(f"{folder}/indices.arrow", info, ends.num_edges, edges.indices.chunks(at_once))
    output.write(f"{folder}/original_ids.arrow", IDS, ends.num_edges, edges.rows.chunks(at_once))
    return edges


class _EdgeReorderer:
    """Reorders table rows into edge order."""

    def __init__(self, edges: InEdges, output: DatasetOutput) -> None:
        self._folder: Path = output.work / "forward" / "arrange"
        self._memory = output.budget.bucket
        self._count = edges.rows.num_rows
        self._positions = edges.positions(self._folder, self._memory)
        self._number = 0

    def reorder(self, chunks: Iterable[Array], info: ColumnInfo) -> Iterator[Array]:
        self._number += 1
        folder = self._folder / str(self._number)
        scatter = Scatter(folder, self._count, info.dtype, info.row_shape, memory=self._memory)
        positions = SpillReader(self._positions, self._memory // 64)
        for rows in chunks:
            scatter.put(positions.take(len(rows)), rows)
        return scatter.chunks()


def ingest(config: IngestConfig, plan: IngestPlan) -> Ingested:
    """Read the tables and write a dataset of one part atomically; one process calls it.

    Keeps pieces of tables and buckets of ids and edges in memory, but no array over all nodes or edges.
    Temporary files take about three times the edges, beside the dataset.

    Raises:
        ConfigError: the memory limit is too small for the program or one sort; a setting of a transform is
            invalid; a reverse type exists already; or another output path is inside the dataset.
        DatasetError: a value in a table is wrong; names file, row and column.
        StorageError: the target is not empty, or cannot be written.
    """
    out = plan.out.absolute()
    check_target(out, plan.overwrite)
    workspace = (plan.workspace or out.parent).absolute()
    for what, path in (("workspace", workspace), ("output-conf-file", plan.output_description)):
        if path is not None and path.resolve().is_relative_to(out.resolve()):
            raise ConfigError(f"the {what} {path} is in {out}, which holds a dataset only; choose another")
    _check_tables(config)
    reverse = _reverse_types(config) if plan.reverse_edges else {}
    is_text = _text_types(config)
    budget = open_budget(plan.memory)
    with (
        low_memory_allocators(),
        named_failures(out),
        partial_folder(out) as partial,
        partial_folder(workspace / f"{out.name}.work") as work,
        progress("Ingesting", _num_steps(config, len(reverse))) as advance,
    ):
        output = DatasetOutput(folder=partial, work=work, budget=budget, advance=advance)
        nodes = {}
        for i, node in enumerate(config.nodes):
            own = replace(output, work=work / f"nodes{i}")
            nodes[node.ntype] = _ingest_nodes(node, is_text=is_text[node.ntype], seed=plan.seed, output=own)
            advance.say(f"{nodes[node.ntype].ids.num_nodes} nodes {node.ntype!r}")
        edges = {}
        for i, edge in enumerate(config.edges):
            own = replace(output, work=work / f"edges{i}")
            other = reverse.get(edge.etype)
            edges[edge.etype] = _ingest_edges(edge, nodes, reverse=other, seed=plan.seed, output=own)
            advance.say(f"{edges[edge.etype].num_edges} edges {':'.join(edge.etype)}")
        description = _description_with_settings(config, nodes, edges)
        manifest = write_manifest(_manifest(config, plan, reverse, output, nodes, edges), partial)
        put_in_place(partial, out, plan.overwrite)
    return Ingested(manifest=manifest, description=description, peak_bytes=peak())


def write_description(ingested: Ingested, path: Path) -> None:
    """Write the description with the statistics of its transforms as JSON.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(ingested.description, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; choose another place") from error


def _check_tables(config: IngestConfig) -> None:
    specs: tuple[NodeSpec | EdgeSpec, ...] = (*config.nodes, *config.edges)
    for spec in specs:
        for feature in spec.features:
            make_transforms(feature)
        if isinstance(spec, EdgeSpec):
            ids: tuple[str | None, ...] = (spec.source_column, spec.destination_column)
        else:
            ids = (spec.id_column,)
        label = spec.label
        others = [column for feature in spec.features for column in feature.columns]
        columns = (*ids, *others, None if label is None else label.column)
        Table(spec.files, 1).check([column for column in columns if column is not None])
        if label is not None and label.id_column is not None:
            for files in label.files.values():
                Table(files, 1).check([label.id_column])


def _reverse_types(config: IngestConfig) -> dict[EdgeType, EdgeType]:
    own = {edge.etype for edge in config.edges}
    reverse = {etype: (etype[2], f"{etype[1]}{_REVERSE}", etype[0]) for etype in own}
    for etype, other in reverse.items():
        if other in own:
            raise ConfigError(
                f"{config.path}: reverse edges of {etype} would be {other}, which is described already; "
                "leave --add-reverse-edges out"
            )
    return reverse


def _text_types(config: IngestConfig) -> dict[str, bool]:
    # Ids are texts unless all tables that name them hold Parquet integers.
    is_text = {}
    for node in config.nodes:
        used = [(node.files, node.id_column)]
        for edge in config.edges:
            used += [(edge.files, edge.source_column)] if edge.etype[0] == node.ntype else []
            used += [(edge.files, edge.destination_column)] if edge.etype[2] == node.ntype else []
        # Row numbers are integers, also if a CSV file names them.
        is_text[node.ntype] = node.id_column is not None and not all(
            Table(files, 0).is_whole_number(column) for files, column in used if column is not None
        )
    return is_text


def _num_steps(config: IngestConfig, num_reverse: int) -> int:
    def tensors(spec: NodeSpec | EdgeSpec) -> int:
        return len({feature.name for feature in spec.features}) + (
            0 if spec.label is None else 1 + len(SPLITS)
        )

    nodes = sum(2 + tensors(spec) for spec in config.nodes)
    return nodes + sum(5 + tensors(spec) for spec in config.edges) + 3 * num_reverse


def _description_with_settings(
    config: IngestConfig, nodes: Mapping[str, _IngestedNodes], edges: Mapping[EdgeType, _IngestedEdges]
) -> Mapping[str, Any]:
    description = copy.deepcopy(dict(config.raw))
    for entry, node in zip(description["nodes"], config.nodes, strict=True):
        _add_settings(entry, node.features, nodes[node.ntype].found_settings)
    for entry, edge in zip(description["edges"], config.edges, strict=True):
        _add_settings(entry, edge.features, edges[edge.etype].found_settings)
    return description


def _add_settings(
    entry: dict[str, Any], features: Sequence[FeatureSpec], found_settings: Sequence[Mapping[str, Any]]
) -> None:
    for feature, spec, found in zip(entry.get("features") or [], features, found_settings, strict=True):
        if found:
            feature["transform"] = {"name": spec.transform, **found}


def _manifest(
    config: IngestConfig,
    plan: IngestPlan,
    reverse: Mapping[EdgeType, EdgeType],
    output: DatasetOutput,
    nodes: Mapping[str, _IngestedNodes],
    edges: Mapping[EdgeType, _IngestedEdges],
) -> Manifest:
    columns = {etype: dict(one.columns) for etype, one in edges.items()}
    counts = {etype: one.num_edges for etype, one in edges.items()}
    for etype, other in reverse.items():
        columns[other], counts[other] = {}, counts[etype]
    names = {ntype: list(one.class_names) for ntype, one in nodes.items() if one.class_names}
    names |= {":".join(etype): list(one.class_names) for etype, one in edges.items() if one.class_names}
    return Manifest(
        name=plan.name or plan.out.absolute().name,
        num_parts=1,
        node_offsets={t: np.array([0, one.ids.num_nodes], np.int64) for t, one in nodes.items()},
        edge_offsets={etype: np.array([0, count], np.int64) for etype, count in counts.items()},
        node_columns={ntype: one.columns for ntype, one in nodes.items()},
        edge_columns=columns,
        num_classes={t: one.num_classes for t, one in nodes.items() if one.num_classes is not None},
        user_ids={ntype: one.user_ids for ntype, one in nodes.items() if one.user_ids is not None},
        method="ingest",
        seed=plan.seed,
        parameters={"description": _description_with_settings(config, nodes, edges), "class_names": names},
        files=output.files,
    )
