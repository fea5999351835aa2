"""One node type: its ids, where they are kept, and its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.compute as pc

from dglx_dist.errors import DatasetError
from dglx_dist.ingest.config import LabelSpec, NodeSpec
from dglx_dist.ingest.features import Features
from dglx_dist.ingest.id_hash import text_buffers
from dglx_dist.ingest.id_map import Buckets, IdMap, RowNumbers
from dglx_dist.ingest.labels import Labels
from dglx_dist.ingest.memory import give_back
from dglx_dist.ingest.spill import Spill
from dglx_dist.ingest.splits import drawn, named
from dglx_dist.ingest.tables import Piece, Table
from dglx_dist.ingest.tensors import Codes, Place, Rows, write_tensors
from dglx_dist.ingest.values import ids_of
from dglx_dist.records import Array, ColumnInfo
from dglx_dist.storage.columns import write_string_chunks
from dglx_dist.storage.layout import node_folder

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
