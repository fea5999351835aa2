"""From what a user writes to a checked raw graph."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from dglx_dist.datasets.check import check_raw_graph
from dglx_dist.datasets.registry import DATASETS
from dglx_dist.errors import DatasetError
from dglx_dist.records import RawGraph

if TYPE_CHECKING:
    import dgl

_SOURCE_OF_SUFFIX = {".npz": "npz", ".bin": "dgl_binary", ".dgl": "dgl_binary", ".json": "tables"}
_EXPECTED = (
    "a .npz file, a .bin file of saved DGL graphs, a folder or a .json description of CSV / Parquet "
    "tables, or NAME:WHERE with NAME one of"
)


def load_dataset(spec: str | os.PathLike[str] | dgl.DGLGraph, /, **options: object) -> RawGraph:
    """Load the graph that ``spec`` means and check it; any process alone.

    Args:
        spec: ``synthetic``, ``synthetic:nodes=20000,degree=25,seed=0``, a path (``.npz``, ``.bin`` of
            saved DGL graphs, a folder or ``.json`` of tables), ``dgl:CoraGraphDataset``,
            ``ogb:ogbn-arxiv``, or a DGLGraph. ``NAME:WHERE`` names the source, whatever the suffix.
        options: What the source takes besides; see its class.

    Returns:
        The graph, with everything that :func:`check_raw_graph` asserts.

    Raises:
        DatasetError: there is nothing at that path, or the data is wrong.
        UnknownNameError: no source has the name before the colon.
        ConfigError: an option that the source does not have, or with a wrong value.
    """
    if not isinstance(spec, (str, os.PathLike)):
        # Only here, so that reading a file needs no DGL.
        from dglx_dist.datasets.dgl_source import raw_graph_from_dgl

        graph = raw_graph_from_dgl(spec, **options)  # type: ignore[arg-type]  # it checks its options
        check_raw_graph(graph, where=f"the DGLGraph {graph.name!r}")
        return graph
    name, location = _source_and_location(os.fspath(spec))
    graph = DATASETS.get(name)(location, options).load()
    check_raw_graph(graph, where=str(spec))
    return graph


def _source_and_location(spec: str) -> tuple[str, str]:
    path = Path(spec).expanduser()
    if path.exists():
        return _source_of_path(path), str(path)
    if spec in DATASETS.names():
        return spec, ""
    name, colon, location = spec.partition(":")
    if colon and "/" not in name and "\\" not in name:
        return DATASETS.resolve(name), location
    raise DatasetError(_nothing_at(path))


def _source_of_path(path: Path) -> str:
    if path.is_dir():
        return "tables"
    if path.suffix in _SOURCE_OF_SUFFIX:
        return _SOURCE_OF_SUFFIX[path.suffix]
    raise DatasetError(
        f"{path}: the suffix {path.suffix!r} belongs to no dataset source; expected {_EXPECTED} "
        f"{', '.join(DATASETS.names())} (a lone table goes into a folder as edges.csv or edges.parquet)"
    )


def _nothing_at(path: Path) -> str:
    beside = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, [*beside, *DATASETS.names()], n=3, cutoff=0.5)
    hint = f"; near it: {', '.join(near)}" if near else ""
    if not path.parent.is_dir():
        hint = f"; the folder {path.parent} does not exist either"
    return (
        f"there is no file or folder {path} (that is {path.absolute()}){hint}. "
        f"Expected {_EXPECTED} {', '.join(DATASETS.names())}"
    )
