"""One edge type: both ends looked up, sorted by destination, and its tensors."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dglx_dist.errors import DatasetError
from dglx_dist.ingest.config import EdgeSpec
from dglx_dist.ingest.features import Features
from dglx_dist.ingest.id_map import refuse_unknown
from dglx_dist.ingest.labels import Labels
from dglx_dist.ingest.nodes import IDS, IngestedNodes
from dglx_dist.ingest.scatter import Scatter
from dglx_dist.ingest.spill import Reader, Spill
from dglx_dist.ingest.splits import drawn
from dglx_dist.ingest.structure import Ends, InEdges, sort_edges
from dglx_dist.ingest.tables import Table
from dglx_dist.ingest.tensors import Codes, Place, Rows, write_tensors
from dglx_dist.ingest.values import ids_of
from dglx_dist.records import Array, ColumnInfo, EdgeType
from dglx_dist.storage.layout import edge_folder


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
    num_edges = _look(table, features, labels)
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
            codes=_codes(spec, seed),
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


def _look(table: Table, features: Features, labels: Labels | None) -> int:
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
        result = known.ids.find(_ids(table, column, known.is_text), num_edges, folder)
        refuse_unknown(result.unknown, table.place, column, f"the {ntype!r} nodes")
        spill = Spill(folder / "nodes", np.int64)
        for piece in result.rows.chunks():
            spill.append(piece)
        found.append(spill)
        place.advance(1)
    return Ends(sources=found[0], destinations=found[1])


def _ids(table: Table, column: str, is_text: bool) -> Iterator[Any]:
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


def _codes(spec: EdgeSpec, seed: int) -> Codes | None:
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
