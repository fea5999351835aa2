"""From a description to a dataset in one part, within a limit of memory."""

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

from dglx_dist.data.ingest.columns import (
    Codes,
    Features,
    Labels,
    Place,
    Rows,
    drawn,
    make_transforms,
    named,
    write_tensors,
)
from dglx_dist.data.ingest.config import EdgeSpec, FeatureSpec, FileSet, IngestConfig, LabelSpec, NodeSpec
from dglx_dist.data.ingest.external_memory import (
    PROGRAM,
    SHARES,
    Reader,
    Scatter,
    Spill,
    frugal,
    give_back,
    open_budget,
    text_buffers,
)
from dglx_dist.data.ingest.id_map import Buckets, IdMap, RowNumbers, refuse_unknown
from dglx_dist.data.ingest.tables import Piece, Table, ids_of
from dglx_dist.data.storage.columns import edge_folder, node_folder, write_string_chunks
from dglx_dist.data.storage.files import named_failures, partial_folder, peak
from dglx_dist.data.storage.manifest import Manifest, write_manifest
from dglx_dist.data.storage.writer import check_target, put_in_place
from dglx_dist.errors import ConfigError, DatasetError
from dglx_dist.progress import progress
from dglx_dist.records import SPLITS, Array, ColumnInfo, EdgeType

IDS = ColumnInfo(dtype="int64", row_shape=())


@dataclass(frozen=True, kw_only=True)
class IngestedNodes:
    """What the edges and the manifest need of a node type that is written."""

    ids: IdMap
    is_text: bool
    """Whether ids are looked up as texts."""
    user_ids: str | None
    """Kind of the ids that were kept; None where they are 0..N-1."""
    columns: Mapping[str, ColumnInfo]
    num_classes: int | None
    class_names: tuple[str, ...]
    """In the order of their numbers; none where labels are numbers."""
    settled: list[Mapping[str, Any]]
    """Settings of the transform of each feature."""


@dataclass(frozen=True, kw_only=True)
class _Survey:
    num_rows: int
    id_bytes: int
    is_range: bool


def ingest_nodes(spec: NodeSpec, *, is_text: bool, seed: int, place: Place) -> IngestedNodes:
    """Write one node type, in the order of its table.

    Args:
        spec: Of the description.
        is_text: Whether its ids are texts, somewhere.
        seed: Of the split.
        place: Where to.

    Raises:
        DatasetError: naming file, row and column of what is wrong.
    """
    table = Table(spec.files, place.budget.batch)
    features = Features(spec.features, place.budget.batch)
    labels = _labels(spec.label)
    survey = _look(spec, table, features, labels, is_text)
    give_back()
    settled = features.settle(str(spec.files.paths[0]))
    if labels is not None:
        labels.settle(str(spec.files.paths[0]))
    ids = _keep_ids(spec, table, survey, is_text, place)
    folder = node_folder(0, spec.ntype)
    place.write(f"{folder}/original_ids.arrow", IDS, survey.num_rows, _counting(survey.num_rows, place))
    codes = None if spec.label is None else _codes(spec, spec.label, ids, is_text, seed, place)
    rows = Rows(
        table=table,
        num_rows=survey.num_rows,
        features=features,
        labels=labels,
        codes=codes,
        folder=folder,
        arrange=lambda chunks, _: chunks,
    )
    kept = isinstance(ids, Buckets)
    return IngestedNodes(
        ids=ids,
        is_text=is_text,
        user_ids=("string" if is_text else "int64") if kept else None,
        columns=write_tensors(rows, place),
        num_classes=None if labels is None else labels.num_classes,
        class_names=() if labels is None else labels.names,
        settled=settled,
    )


def _labels(spec: LabelSpec | None) -> Labels | None:
    if spec is None or spec.column is None:
        return None
    return Labels(spec.column, spec.task == "regression")


def _look(spec: NodeSpec, table: Table, features: Features, labels: Labels | None, is_text: bool) -> _Survey:
    """Read once what must be known of all rows."""
    names = [*features.looked_at, *([labels.column] if labels is not None else [])]
    names += [spec.id_column] if spec.id_column is not None else []
    num_rows, id_bytes, is_range = 0, 0, True
    for piece in table.pieces(names):
        features.look(piece)
        if labels is not None:
            labels.look(piece.columns[labels.column], piece.where, piece.first_row)
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
    return _Survey(num_rows=num_rows, id_bytes=id_bytes, is_range=is_range and not is_text)


def _ids(column: str, piece: Piece, is_text: bool) -> Any:
    return ids_of(piece.columns[column], column, piece.where, piece.first_row, is_text=is_text)


def _keep_ids(spec: NodeSpec, table: Table, survey: _Survey, is_text: bool, place: Place) -> IdMap:
    """Make the look-up of ids, and write them into the dataset where they are not 0..N-1."""
    memory = place.budget.bucket
    if spec.id_column is None or survey.is_range:
        return RowNumbers(survey.num_rows, memory)
    buckets = Buckets(place.work / "ids", survey.num_rows, survey.id_bytes, memory)
    written = _WrittenIds(place, is_text)
    for piece in table.pieces([spec.id_column]):
        ids = _ids(spec.id_column, piece, is_text)
        buckets.add(ids, piece.row)
        written.add(ids)
    buckets.check_unique(table, spec.id_column)
    written.write(f"{node_folder(0, spec.ntype)}/user_ids.arrow")
    return buckets


class _WrittenIds:
    """Ids in the order of the table, on disk until all are known."""

    def __init__(self, place: Place, is_text: bool) -> None:
        self._place = place
        self._is_text = is_text
        self._numbers = Spill(place.work / "user_ids", np.int64)
        """The ids, or where each text ends."""
        self._texts = Spill(place.work / "user_id_texts", np.uint8)
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
        at_once = self._place.budget.batch // 8
        numbers = self._numbers.chunks(at_once)
        if not self._is_text:
            self._place.write(path, IDS, self._numbers.num_rows, numbers)
            return
        data = self._texts.chunks(8 * at_once)
        self._place.files[path] = write_string_chunks(
            self._place.folder / path, self._numbers.num_rows - 1, self._texts.num_rows, numbers, data
        )
        self._place.advance(1)


def _codes(spec: NodeSpec, label: LabelSpec, ids: IdMap, is_text: bool, seed: int, place: Place) -> Codes:
    shares = label.split
    if shares is not None:
        return lambda has_label, count: drawn(has_label, count, shares, seed)
    owner = f"{spec.files.paths[0]}{' ...' if len(spec.files.paths) > 1 else ''}"
    return lambda has_label, count: named(
        label, ids, owner, place.work / "split", is_text=is_text, memory=place.budget.bucket
    )


def _counting(count: int, place: Place) -> Iterator[Array]:
    step = place.budget.batch // 8
    for first in range(0, count, step):
        yield np.arange(first, min(first + step, count))


_SLOTS = 1 << 16
_EDGE = np.dtype([("destination", np.int64), ("source", np.int64), ("row", np.int64)])
_SORTING_BYTES = 3 * _EDGE.itemsize
"""What sorting takes for each edge: the edge, its place, and a sorted copy of each column in turn."""
_MOST_STEPS = 5
"""What a hub may take of the memory, in shares of it; nothing else is held meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Ends:
    """Both ends of the edges of one table, in the order of its rows."""

    sources: Spill
    """(E,) int64."""
    destinations: Spill
    """(E,) int64."""

    @property
    def num_edges(self) -> int:
        """E."""
        return self.sources.num_rows

    def reversed(self) -> Ends:
        """Return the same edges the other way."""
        return Ends(sources=self.destinations, destinations=self.sources)


@dataclass(frozen=True, kw_only=True)
class InEdges:
    """CSC: edges ordered by (destination, source, row)."""

    indptr: Spill
    """(N_dst + 1,) int64."""
    indices: Spill
    """(E,) sources."""
    rows: Spill
    """(E,) int64 row of the table of each edge."""

    def places(self, folder: Path, memory: int) -> Spill:
        """Return (E,) int64: where the edge of each row of the table stands now."""
        count = self.rows.num_rows
        scatter = Scatter(folder / "scatter", count, np.int64, memory=memory)
        first = 0
        for rows in self.rows.chunks(memory // 64 + 1):
            scatter.put(rows, np.arange(first, first + len(rows)))
            first += len(rows)
        places = Spill(folder / "places", np.int64)
        for piece in scatter.chunks():
            places.append(piece)
        return places


def sort_edges(ends: Ends, num_sources: int, num_destinations: int, folder: Path, memory: int) -> InEdges:
    """Sort by destination, then source, then row of the table.

    The in-edges of consecutive destinations are sorted at a time, as many as fit; those of a 65,536th of the
    destinations are sorted together, in five times ``memory`` if need be.

    Args:
        ends: By row, all within range.
        num_sources: Nodes of the source type; their ids are stored in 32 bits where these do.
        num_destinations: Nodes of the destination type.
        folder: For files.
        memory: Bytes for one sort.

    Raises:
        ConfigError: more edges than that end at a node, or at neighbours in the table.
    """
    width = -(-num_destinations // _SLOTS)
    step = max(1, memory // _SORTING_BYTES)
    firsts = _first_destinations(ends, num_destinations, width, step)
    _deal_out(ends, firsts, folder / "buckets", step)
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
        # A stable sort of two keys: edges of a bucket are by row already.
        order = np.lexsort((edges["source"], edges["destination"]))
        result.indices.append(edges["source"][order])
        result.rows.append(edges["row"][order])
        result.indptr.append(total + np.cumsum(counts))
        total += len(edges)
        del edges, order
        give_back()
    return result


def _first_destinations(ends: Ends, num_destinations: int, width: int, step: int) -> list[int]:
    """Return each bucket's first destination, so that none but a lone slot has more than ``step`` edges."""
    counts = np.zeros(-(-num_destinations // width), np.int64)
    for destinations in ends.destinations.chunks(step):
        counts += np.bincount(destinations // width, minlength=len(counts))
    _check_fits(counts, width, _MOST_STEPS * step)
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
        needed = int(counts[slot]) * _SORTING_BYTES * SHARES // _MOST_STEPS
        raise ConfigError(
            f"{counts[slot]} edges end at the nodes of {nodes} of their table, and are sorted together; "
            f"grant --memory {(needed + PROGRAM) // 2**20 + 1}MB"
        )


def _deal_out(ends: Ends, firsts: list[int], folder: Path, step: int) -> None:
    folder.mkdir(parents=True)
    row = 0
    for edges in _edges(ends, step):
        edges["row"] = np.arange(row, row + len(edges))
        row += len(edges)
        buckets = np.searchsorted(firsts, edges["destination"], side="right") - 1
        order = np.argsort(buckets, kind="stable")
        buckets = buckets[order]
        starts = np.flatnonzero(np.diff(buckets, prepend=-1))
        for start, end in zip(starts, [*starts[1:], len(order)], strict=True):
            with (folder / str(buckets[start])).open("ab") as file:
                edges[order[start:end]].tofile(file)


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
class IngestedEdges:
    """What the manifest needs of an edge type that is written."""

    num_edges: int
    columns: Mapping[str, ColumnInfo]
    class_names: tuple[str, ...]
    """In the order of their numbers; none where labels are numbers."""
    settled: list[Mapping[str, Any]]


def ingest_edges(
    spec: EdgeSpec,
    nodes: Mapping[str, IngestedNodes],
    *,
    reverse: EdgeType | None,
    seed: int,
    place: Place,
) -> IngestedEdges:
    """Write one edge type, and the same edges the other way round as another, without tensors.

    Args:
        spec: Of the description.
        nodes: All node types.
        reverse: Type of the edges the other way; None: they are not written.
        seed: Of the split.
        place: Where to.

    Raises:
        DatasetError: naming file, row and column of what is wrong, such as an id that is no node's.
    """
    table = Table(spec.files, place.budget.batch)
    features = Features(spec.features, place.budget.batch)
    labels = None
    if spec.label is not None and spec.label.column is not None:
        labels = Labels(spec.label.column, spec.label.task == "regression")
    num_edges = _look_edges(table, features, labels)
    if num_edges == 0:
        raise DatasetError(f"{spec.files.paths[0]}: the table has no row, so there is no edge {spec.etype}")
    settled = features.settle(str(spec.files.paths[0]))
    ends = _look_up(spec, table, num_edges, nodes, place)
    sizes = nodes[spec.etype[0]].ids.num_nodes, nodes[spec.etype[2]].ids.num_nodes
    edges = _write_structure(spec.etype, ends, sizes, "forward", place)
    columns = {}
    if features.names or labels is not None or spec.label is not None:
        rows = Rows(
            table=table,
            num_rows=num_edges,
            features=features,
            labels=labels,
            codes=_codes_edges(spec, seed),
            folder=edge_folder(0, spec.etype),
            arrange=_Arranger(edges, place).arrange,
        )
        columns = dict(write_tensors(rows, place))
    shutil.rmtree(place.work / "forward")
    if reverse is not None:
        _write_structure(reverse, ends.reversed(), sizes[::-1], "reverse", place)
    for number in range(2):
        shutil.rmtree(place.work / f"end{number}")
    names = () if labels is None else labels.names
    return IngestedEdges(num_edges=num_edges, columns=columns, class_names=names, settled=settled)


def _look_edges(table: Table, features: Features, labels: Labels | None) -> int:
    """Read once what must be known of all rows; return how many there are."""
    names = [*features.looked_at, *([labels.column] if labels is not None else [])]
    if not names:
        return table.count()
    num_rows = 0
    for piece in table.pieces(names):
        features.look(piece)
        if labels is not None:
            labels.look(piece.columns[labels.column], piece.where, piece.first_row)
        num_rows += piece.num_rows
    if labels is not None:
        labels.settle(str(table.files.paths[0]))
    return num_rows


def _look_up(
    spec: EdgeSpec, table: Table, num_edges: int, nodes: Mapping[str, IngestedNodes], place: Place
) -> Ends:
    """Return the node numbers of both ends of every edge."""
    found: list[Spill] = []
    for column, ntype in ((spec.source_column, spec.etype[0]), (spec.destination_column, spec.etype[2])):
        known = nodes[ntype]
        folder = place.work / f"end{len(found)}"
        result = known.ids.find(_ids_edges(table, column, known.is_text), num_edges, folder)
        refuse_unknown(result.unknown, table.place, column, f"the {ntype!r} nodes")
        spill = Spill(folder / "nodes", np.int64)
        for piece in result.rows.chunks():
            spill.append(piece)
        found.append(spill)
        place.advance(1)
    return Ends(sources=found[0], destinations=found[1])


def _ids_edges(table: Table, column: str, is_text: bool) -> Iterator[Any]:
    for piece in table.pieces([column]):
        yield ids_of(piece.columns[column], column, piece.where, piece.first_row, is_text=is_text)


def _write_structure(etype: EdgeType, ends: Ends, sizes: tuple[int, ...], name: str, place: Place) -> InEdges:
    num_sources, num_destinations = sizes
    edges = sort_edges(ends, num_sources, num_destinations, place.work / name, place.budget.bucket)
    folder, at_once = edge_folder(0, etype), place.budget.batch // 8
    place.write(f"{folder}/indptr.arrow", IDS, num_destinations + 1, edges.indptr.chunks(at_once))
    info = ColumnInfo(dtype="int32" if num_sources < 2**31 else "int64", row_shape=())
    place.write(f"{folder}/indices.arrow", info, ends.num_edges, edges.indices.chunks(at_once))
    place.write(f"{folder}/original_ids.arrow", IDS, ends.num_edges, edges.rows.chunks(at_once))
    return edges


def _codes_edges(spec: EdgeSpec, seed: int) -> Codes | None:
    shares = None if spec.label is None else spec.label.split
    if shares is None:
        return None
    return lambda has_label, count: drawn(has_label, count, shares, seed)


class _Arranger:
    """Puts rows of the table into the order of the edges."""

    def __init__(self, edges: InEdges, place: Place) -> None:
        self._folder: Path = place.work / "forward" / "arrange"
        self._memory = place.budget.bucket
        self._count = edges.rows.num_rows
        self._places = edges.places(self._folder, self._memory)
        self._number = 0

    def arrange(self, chunks: Iterable[Array], info: ColumnInfo) -> Iterator[Array]:
        self._number += 1
        folder = self._folder / str(self._number)
        scatter = Scatter(folder, self._count, info.dtype, info.row_shape, memory=self._memory)
        places = Reader(self._places, self._memory // 64)
        for rows in chunks:
            scatter.put(places.take(len(rows)), rows)
        return scatter.chunks()


METHOD = "ingest"
"""What the manifest says in place of a partitioner."""
REVERSE = "-rev"
"""Ends the relation of reverse edges, as in GraphStorm."""


@dataclass(frozen=True, kw_only=True)
class IngestPlan:
    """How and where to.

    Raises:
        ConfigError: the seed is negative.
    """

    out: Path
    memory: int
    """Bytes that the process may hold at most, program and libraries included."""
    name: str | None = None
    """Of the graph; None: that of the folder."""
    seed: int = 0
    """Of the splits."""
    reverse_edges: bool = False
    overwrite: bool = False
    workspace: Path | None = None
    """For what does not fit into memory meanwhile; None: beside ``out``."""
    settled: Path | None = None
    """Where :func:`write_settled` is going to write, to be told beforehand where that cannot be."""

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigError(f"the seed is {self.seed}; it must be at least 0")


@dataclass(frozen=True, kw_only=True)
class Ingested:
    """What came of it."""

    manifest: Manifest
    settled: Mapping[str, Any]
    """The description with what its transforms found out, to treat later tables alike."""
    peak_bytes: int
    """The most that the process has held, since it was started."""


def ingest(config: IngestConfig, plan: IngestPlan) -> Ingested:
    """Read the tables and write a dataset of one part, which appears whole or not at all; one process.

    Holds pieces of tables, buckets of ids and of edges, and no array over all nodes or edges. The disk needs
    room for about the edges three times over, beside the dataset.

    Args:
        config: What is in the tables.
        plan: How and where to.

    Raises:
        ConfigError: the memory does not hold the program, or what must be sorted together; a setting of a
            transform cannot be honoured; a reverse type exists already; or other files were to be in
            the dataset.
        DatasetError: naming file, row and column of what is wrong in a table.
        StorageError: the target holds something else, or the disk refuses.
    """
    out = plan.out.absolute()
    check_target(out, plan.overwrite)
    workspace = (plan.workspace or out.parent).absolute()
    for what, path in (("workspace", workspace), ("output-conf-file", plan.settled)):
        if path is not None and path.resolve().is_relative_to(out.resolve()):
            raise ConfigError(f"the {what} {path} is in {out}, which holds a dataset only; choose another")
    _check_tables(config)
    reverse = _reverse_types(config) if plan.reverse_edges else {}
    is_text = _text_types(config)
    budget = open_budget(plan.memory)
    with (
        frugal(),
        named_failures(out),
        partial_folder(out) as partial,
        partial_folder(workspace / f"{out.name}.work") as work,
        progress("Ingesting", _num_steps(config, len(reverse))) as advance,
    ):
        place = Place(folder=partial, work=work, budget=budget, advance=advance)
        nodes = {}
        for i, node in enumerate(config.nodes):
            own = replace(place, work=work / f"nodes{i}")
            nodes[node.ntype] = ingest_nodes(node, is_text=is_text[node.ntype], seed=plan.seed, place=own)
            advance.say(f"{nodes[node.ntype].ids.num_nodes} nodes {node.ntype!r}")
        edges = {}
        for i, edge in enumerate(config.edges):
            own = replace(place, work=work / f"edges{i}")
            other = reverse.get(edge.etype)
            edges[edge.etype] = ingest_edges(edge, nodes, reverse=other, seed=plan.seed, place=own)
            advance.say(f"{edges[edge.etype].num_edges} edges {':'.join(edge.etype)}")
        settled = _settled(config, nodes, edges)
        manifest = write_manifest(_manifest(config, plan, reverse, place, nodes, edges), partial)
        put_in_place(partial, out, plan.overwrite)
    return Ingested(manifest=manifest, settled=settled, peak_bytes=peak())


def write_settled(ingested: Ingested, path: Path) -> None:
    """Write the description with what the transforms found out.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(ingested.settled, indent=1) + "\n", encoding="utf-8")
    except OSError as problem:
        raise ConfigError(f"{path} cannot be written: {problem.strerror}; choose another place") from problem


def _check_tables(config: IngestConfig) -> None:
    """Find out before anything is read in full whether there are all columns, and settings make sense."""
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
        named = (*ids, *others, None if label is None else label.column)
        Table(spec.files, 1).check([column for column in named if column is not None])
        if label is not None and label.id_column is not None:
            for files in label.files.values():
                Table(files, 1).check([label.id_column])


def _reverse_types(config: IngestConfig) -> dict[EdgeType, EdgeType]:
    own = {edge.etype for edge in config.edges}
    reverse = {etype: (etype[2], f"{etype[1]}{REVERSE}", etype[0]) for etype in own}
    for etype, other in reverse.items():
        if other in own:
            raise ConfigError(
                f"{config.path}: reverse edges of {etype} would be {other}, which is described already; "
                "leave --add-reverse-edges out"
            )
    return reverse


def _text_types(config: IngestConfig) -> dict[str, bool]:
    """Return which node types have texts for ids: all but those that only Parquet whole numbers name."""
    is_text = {}
    for node in config.nodes:
        named = [(node.files, node.id_column)]
        for edge in config.edges:
            named += [(edge.files, edge.source_column)] if edge.etype[0] == node.ntype else []
            named += [(edge.files, edge.destination_column)] if edge.etype[2] == node.ntype else []
        # Row numbers are numbers, also where a CSV file names them.
        is_text[node.ntype] = node.id_column is not None and not all(
            _is_whole_number(files, column) for files, column in named if column is not None
        )
    return is_text


def _is_whole_number(files: FileSet, column: str) -> bool:
    return Table(files, 0).is_whole_number(column)


def _num_steps(config: IngestConfig, num_reverse: int) -> int:
    def tensors(spec: NodeSpec | EdgeSpec) -> int:
        return len({feature.name for feature in spec.features}) + (
            0 if spec.label is None else 1 + len(SPLITS)
        )

    nodes = sum(2 + tensors(spec) for spec in config.nodes)
    return nodes + sum(5 + tensors(spec) for spec in config.edges) + 3 * num_reverse


def _settled(
    config: IngestConfig, nodes: Mapping[str, IngestedNodes], edges: Mapping[EdgeType, IngestedEdges]
) -> Mapping[str, Any]:
    """Return the description with what was found out; the order of types and features is that of the file."""
    told = copy.deepcopy(dict(config.raw))
    for entry, node in zip(told["nodes"], config.nodes, strict=True):
        _settle(entry, node.features, nodes[node.ntype].settled)
    for entry, edge in zip(told["edges"], config.edges, strict=True):
        _settle(entry, edge.features, edges[edge.etype].settled)
    return told


def _settle(
    entry: dict[str, Any], features: Sequence[FeatureSpec], settled: Sequence[Mapping[str, Any]]
) -> None:
    for feature, spec, found in zip(entry.get("features") or [], features, settled, strict=True):
        if found:
            feature["transform"] = {"name": spec.transform, **found}


def _manifest(
    config: IngestConfig,
    plan: IngestPlan,
    reverse: Mapping[EdgeType, EdgeType],
    place: Place,
    nodes: Mapping[str, IngestedNodes],
    edges: Mapping[EdgeType, IngestedEdges],
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
        method=METHOD,
        seed=plan.seed,
        parameters={"description": _settled(config, nodes, edges), "class_names": names},
        files=place.files,
    )
