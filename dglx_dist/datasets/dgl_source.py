"""Graphs that DGL holds: an object, one of its datasets, or a file of saved graphs."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import dgl
import numpy as np
import torch

from dglx_dist.datasets.base import DatasetSource
from dglx_dist.datasets.columns import count_classes, standard_columns
from dglx_dist.datasets.options import refuse_unknown, whole_number
from dglx_dist.errors import ConfigError, DatasetError, UnknownNameError
from dglx_dist.records import LABEL, SPLITS, Array, RawGraph

_OWN_OPTIONS = ("index", "split")
_MAGIC = (0xDD2E4FF046B4A13F).to_bytes(8, "little")
"""What a file of ``dgl.save_graphs`` starts with."""


def raw_graph_from_dgl(
    graph: dgl.DGLGraph,
    *,
    name: str = "graph",
    split: int | None = None,
    num_classes: int | None = None,
    rename: bool = True,
) -> RawGraph:
    """Convert a DGLGraph with all its node and edge data; homogeneous or heterogeneous.

    Arrays share memory with the graph where dtype and device allow it. bfloat16 becomes float32,
    which NumPy has. ``labels`` is read as ``label`` and ``features`` as ``feat``, unless ``rename`` is False.
    The ids that DGL keeps in subgraphs (``dgl.NID``) are left out.

    Args:
        graph: On any device; edges keep their order.
        name: What the dataset will be called.
        split: Which column of masks that hold several splits; None when they hold one.
        num_classes: Of the labelled node types; None to take the largest label + 1.
        rename: False to keep the names of all columns.

    Raises:
        ConfigError: ``graph`` is not a DGLGraph, or a block.
        DatasetError: a mask holds several splits and ``split`` names none of them.
    """
    if not isinstance(graph, dgl.DGLGraph):
        raise ConfigError(
            f"a graph is given as a path, a spec or a DGLGraph, not as {type(graph).__module__}."
            f"{type(graph).__qualname__}; of a dataset of DGL give dataset[0]"
        )
    if graph.is_block:
        raise ConfigError("the graph is a block of a mini-batch; give the graph that it was drawn from")
    known = graph.formats()
    if "coo" not in (*known["created"], *known["not created"]):
        # No other format tells the edges in the order of their ids.
        graph = graph.formats(["coo", "csr", "csc"])
    node_data, classes = {}, {}
    for node_type in graph.ntypes:
        where = f"{name}, nodes {node_type!r}"
        arrays = {
            key: _one_split(key, _as_array(tensor), split, where)
            for key, tensor in graph.nodes[node_type].data.items()
            if key != dgl.NID
        }
        node_data[node_type] = standard_columns(arrays, where, rename=rename)
        counted = count_classes(node_data[node_type])
        if LABEL in node_data[node_type] and counted is not None:
            classes[node_type] = max(counted, num_classes or 0)
    edges, edge_data = {}, {}
    for edge_type in graph.canonical_etypes:
        source_ids, destination_ids = graph.edges(etype=edge_type, order="eid")
        edges[edge_type] = (_as_array(source_ids), _as_array(destination_ids))
        edge_data[edge_type] = _edge_columns(graph, edge_type, name)
    return RawGraph(
        name=name,
        num_nodes={node_type: graph.num_nodes(node_type) for node_type in graph.ntypes},
        edges=edges,
        node_data=node_data,
        edge_data=edge_data,
        num_classes=classes,
    )


@final
class DglDataSource(DatasetSource):
    """``dgl:CoraGraphDataset``: a class of ``dgl.data``, which downloads what it needs.

    Options: ``index`` of the graph when the dataset has several, ``split`` when its masks hold
    several; all others go to the class (``raw_dir=``, ``force_reload=`` ...).
    """

    def __init__(self, location: str, options: Mapping[str, object]) -> None:
        self._name = location
        self._factory = _dataset_class(location)
        self._index = whole_number(options, "index")
        self._split = whole_number(options, "split")
        self._arguments = {key: value for key, value in options.items() if key not in _OWN_OPTIONS}
        parameters = inspect.signature(self._factory).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            refuse_unknown(self._arguments, parameters, f"dgl:{location}")
        if "verbose" in parameters:
            self._arguments.setdefault("verbose", False)

    def load(self) -> RawGraph:
        """Build the dataset, downloading it if it is not there yet."""
        try:
            dataset = self._factory(**self._arguments)
        except (OSError, RuntimeError) as error:
            raise DatasetError(
                f"dgl:{self._name} could not be downloaded or read ({error}); with the files at hand, "
                f"give their folder as raw_dir="
            ) from error
        graph = _graph_of(dataset[_position(len(dataset), self._index, f"dgl:{self._name}")])
        # Not every dataset of DGL says how many classes it has.
        num_classes = getattr(dataset, "num_classes", None)
        if not isinstance(num_classes, (int, np.integer)):
            num_classes = None
        return raw_graph_from_dgl(
            graph,
            name=self._name,
            split=self._split,
            num_classes=None if num_classes is None else int(num_classes),
        )


@final
class DglBinarySource(DatasetSource):
    """A file that ``dgl.save_graphs`` wrote; options ``index`` and ``split`` as above."""

    def __init__(self, location: str, options: Mapping[str, object]) -> None:
        refuse_unknown(options, _OWN_OPTIONS, "dgl_binary")
        self._path = Path(location).expanduser()
        self._index = whole_number(options, "index")
        self._split = whole_number(options, "split")

    def load(self) -> RawGraph:
        """Read every graph of the file and return the one asked for."""
        if not self._path.is_file():
            raise DatasetError(f"there is no file {self._path.absolute()}; expected one of dgl.save_graphs")
        with self._path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise DatasetError(
                    f"{self._path}: not a file of saved DGL graphs; write one with dgl.save_graphs"
                )
        try:
            graphs, _ = dgl.load_graphs(str(self._path))
        except (dgl.DGLError, RuntimeError) as error:
            # DGL's text is a check of its C++ and a stack; neither helps here.
            raise DatasetError(
                f"{self._path}: this file of saved DGL graphs is damaged or cut off; copy it again, or write "
                "it again with dgl.save_graphs"
            ) from error
        graph = graphs[_position(len(graphs), self._index, str(self._path))]
        return raw_graph_from_dgl(graph, name=self._path.stem, split=self._split)


def _dataset_class(name: str) -> Any:
    known = sorted(
        key
        for key, value in vars(dgl.data).items()
        if inspect.isclass(value) and issubclass(value, dgl.data.DGLDataset)
    )
    if name in known:
        return getattr(dgl.data, name)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UnknownNameError(f"dgl.data has no dataset {name!r}{hint} (write e.g. dgl:CoraGraphDataset)")


def _graph_of(item: Any) -> Any:
    # Datasets for whole-graph tasks yield pairs (graph, label of the graph).
    return item[0] if isinstance(item, tuple) else item


def _position(num_graphs: int, index: int | None, where: str) -> int:
    if index is None and num_graphs == 1:
        return 0
    if index is None or index >= num_graphs:
        asked = "no index was given" if index is None else f"index={index} is not among them"
        raise ConfigError(f"{where} has {num_graphs} graphs and {asked}; choose index=0 to {num_graphs - 1}")
    return index


def _edge_columns(graph: Any, edge_type: tuple[str, str, str], name: str) -> dict[str, Array]:
    columns = {
        key: _as_array(tensor) for key, tensor in graph.edges[edge_type].data.items() if key != dgl.EID
    }
    masks = {key: columns.pop(key) for key in SPLITS if key in columns}
    standard = standard_columns(masks, f"{name}, edges {edge_type[1]!r}")
    return columns | {key: mask for key, mask in standard.items() if isinstance(mask, np.ndarray)}


def _as_array(tensor: torch.Tensor) -> Array:
    tensor = tensor.detach().cpu()
    return np.asarray((tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy())


def _one_split(name: str, column: Array, split: int | None, where: str) -> Array:
    if name not in SPLITS or column.ndim != 2:
        return column
    if split is None or split >= column.shape[1]:
        raise DatasetError(
            f"{where}: column {name!r} holds {column.shape[1]} splits; choose one with split=0 to "
            f"{column.shape[1] - 1}, or in the graph: g.ndata[{name!r}] = g.ndata[{name!r}][:, 0]"
        )
    return column[:, split]
