"""Load graphs from DGL, its datasets and files, and OGB, and register all other dataset sources."""

from __future__ import annotations

import difflib
import gzip
import importlib
import importlib.util
import inspect
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar, cast, final

import numpy as np

from dglx_dist.data.dgl_files import check_files, load_graphs
from dglx_dist.data.external_memory import Workspace
from dglx_dist.data.storage.remote import fetch_objects
from dglx_dist.data.validate import FEW_CLASSES, check_raw_graph, column_error, number_codes
from dglx_dist.errors import ConfigError, DatasetError, DglxError, StorageError, UnknownNameError
from dglx_dist.memory import format_bytes
from dglx_dist.options import check_integer, check_names, format_location
from dglx_dist.records import (
    EDGE_TYPE,
    FEATURE,
    LABEL,
    NODE_TYPE,
    SPLITS,
    Array,
    EdgeType,
    NodeColumn,
    RawGraph,
    SparseRows,
)
from dglx_dist.registry import Registry, suggest_name

# dgl and torch take 250 MB, so they are imported only where they are used. Other sources, and ingestion
# within a memory limit, do not need them.
if TYPE_CHECKING:
    import dgl
    import torch


class DatasetSource(ABC):
    """Loads graphs from one kind of source.

    Args:
        location: Spec without the source's name: a path, a dataset's name, or settings.
        options: Keyword arguments passed to ``load_dataset``.

    Raises:
        ConfigError: the source does not have an option, or its value is wrong.
    """

    external: ClassVar[bool] = False
    """Whether :attr:`workspace` is used, so that a graph may be larger than the granted memory."""

    memory_per_byte: ClassVar[int] = 4
    """Memory that :meth:`load` needs per byte in its uncompressed files. A number in text takes 8 bytes."""

    workspace: Workspace | None = None
    """Workspace for limited memory. It is set before :meth:`load`."""

    known_options: ClassVar[tuple[str, ...]] = ()

    def __init__(self, location: str, options: Mapping[str, object]) -> None:
        """Accept a path and :attr:`known_options`. Sources that have no path override this method."""
        check_names(f"the dataset source {DATASETS.name_of(type(self))!r}", options, self.known_options)
        self._path = Path(location).expanduser()

    @abstractmethod
    def load(self) -> RawGraph:
        """Read the whole graph. Node ids are 0..N-1 per type, and splits are boolean masks.

        Raises DatasetError if the data is missing or wrong. The message names the file, the column and the
        first wrong row.
        """


OTHER_NAMES = {"features": FEATURE, "feats": FEATURE, "labels": LABEL}
"""Standard column name by alternative name."""


def standard_columns(
    columns: Mapping[str, NodeColumn], where: str, *, rename: bool = True
) -> dict[str, NodeColumn]:
    """Rename and cast columns: integer features to float32, class labels to int64, splits to boolean.

    Floating-point labels count as class labels if all are NaN or whole numbers from 0. If none is NaN, they
    must also be below the number of rows or ``FEW_CLASSES``, because a column of whole numbers may be a
    measurement. Otherwise they are regression targets and keep their dtype. uint64 labels are also targets if
    one is 2**63 or more.

    ``features`` and ``feats`` become ``feat``, and ``labels`` becomes ``label``, unless that name is taken.
    Without ``rename``, names and dtypes are kept, except for splits and class labels. Error messages start
    with ``where``. Raises DatasetError if a split has a value other than 0 and 1, or a label is not a number.
    """
    standard: dict[str, NodeColumn] = {}
    for source_name, column in columns.items():
        name = OTHER_NAMES.get(source_name, source_name)
        if not rename or (name != source_name and name in columns):
            name = source_name
        if isinstance(column, SparseRows):
            standard[name] = column
        elif name in SPLITS:
            standard[name] = _convert_mask(column, name, where)
        elif name == LABEL and (rename or column.dtype.kind != "f" or np.isnan(column).any()):
            standard[name] = _convert_labels(column, where)
        elif rename and name == FEATURE and column.dtype.kind in "iub":
            standard[name] = column.astype(np.float32)
        else:
            standard[name] = column
    return standard


def count_classes(columns: Mapping[str, NodeColumn]) -> int | None:
    """Count the classes: the largest ``label`` + 1, or the columns in ``label`` if it is a matrix.

    Return None if there are no class labels.
    """
    label = columns.get(LABEL)
    if label is None or isinstance(label, SparseRows) or label.size == 0:
        return None
    if label.ndim > 1:
        return int(label.shape[1])
    if label.dtype.kind not in "iu":
        return None
    largest = int(label.max())
    if largest < 0:  # Negative labels stand for no label.
        return None
    return largest + 1


def classes_of(node_data: Mapping[str, Mapping[str, NodeColumn]]) -> dict[str, int]:
    """Return :func:`count_classes` for each node type with class labels."""
    counts = {}
    for ntype, columns in node_data.items():
        num_classes = count_classes(columns)
        if num_classes is not None:
            counts[ntype] = num_classes
    return counts


def masks_of_split(split_of: Array) -> dict[str, Array]:
    """Convert (N,) split codes to masks by split: 0 is train, 1 is validation and 2 is test."""
    return {name: split_of == code for code, name in enumerate(SPLITS)}


def _convert_mask(column: Array, name: str, where: str) -> Array:
    if column.dtype == np.bool_:
        return column
    is_invalid = (column != 0) & (column != 1)
    if is_invalid.any():
        row = int(np.argmax(is_invalid.reshape(len(is_invalid), -1).any(axis=1)))
        raise column_error(where, name, f"{column[row]} is neither 0 nor 1 (false nor true)", row)
    return column.astype(np.bool_)


def _convert_labels(column: Array, where: str) -> Array:
    """Return int64 class labels with -1 for NaN, or regression targets."""
    if column.ndim == 2 and column.shape[1] == 1:
        column = column[:, 0]
    if column.dtype == np.uint64 and (column >= 2.0**63).any():
        column = column.astype(np.float64)
    if column.dtype.kind in "iub":
        return column.astype(np.int64) if column.ndim == 1 else column
    if column.dtype.kind != "f":
        raise column_error(where, LABEL, f"must hold numbers; it is {column.dtype}")
    if column.ndim > 1:
        return column

    # Sources that lack some labels store them in floating point, with NaN for the missing ones. If no label
    # is missing, the column may be a measurement, so only small whole numbers count as classes.
    labels = column[~np.isnan(column)]
    limit = 2.0**63 if len(labels) < len(column) else max(len(column), FEW_CLASSES)
    is_target = (labels != np.floor(labels)) | (labels < 0) | (labels >= limit)
    if is_target.any():
        return column
    return np.nan_to_num(column, nan=-1.0).astype(np.int64)


_GRAPH_OPTIONS = ("index", "split")
"""Options that choose a graph in a file, and a split in its masks."""


def _read_graph_options(options: Mapping[str, object]) -> tuple[int | None, ...]:
    """Return the graph's and the split's number, or None for a missing option."""
    numbers: list[int | None] = []
    for name in _GRAPH_OPTIONS:
        value = options.get(name)
        numbers.append(None if value is None else check_integer(name, value, least=0))
    return tuple(numbers)


def raw_graph_from_dgl(
    graph: dgl.DGLGraph,
    *,
    name: str = "graph",
    split: int | None = None,
    num_classes: int | None = None,
    rename: bool = True,
) -> RawGraph:
    """Convert a DGLGraph with all its node and edge data. Edges keep their order.

    Arrays share memory with the graph if dtype and device allow it. bfloat16 becomes float32. The ids that
    DGL keeps in subgraphs (``dgl.NID``) are left out.

    Args:
        split: Column to use from masks with several splits.
        num_classes: Minimum number of classes for labelled node types.
        rename: See :func:`standard_columns`.

    Raises:
        ConfigError: ``graph`` is not a DGLGraph, or is a block.
        DatasetError: a mask has several splits and ``split`` is not one of them.
    """
    import dgl

    if not isinstance(graph, dgl.DGLGraph):
        raise ConfigError(
            f"a graph must be a path, a spec or a DGLGraph, not {type(graph).__module__}."
            f"{type(graph).__qualname__}; for a dataset of DGL give dataset[0]"
        )

    if graph.is_block:
        raise ConfigError("the graph is a block of a mini-batch; give the graph from which it was sampled")

    node_data = {}
    for node_type in graph.ntypes:
        where = f"{name}, nodes {node_type!r}"
        arrays = _convert_frame(graph.nodes[node_type].data, dgl.NID)
        for key in SPLITS:
            if key in arrays:
                arrays[key] = _choose_split(key, arrays[key], split, where)
        node_data[node_type] = standard_columns(arrays, where, rename=rename)

    edge_data = {}
    for edge_type in graph.canonical_etypes:
        columns = _convert_frame(graph.edges[edge_type].data, dgl.EID)
        where = f"{name}, edges {edge_type[1]!r}"
        for key in SPLITS:
            if key in columns:
                columns[key] = _convert_mask(columns[key], key, where)
        edge_data[edge_type] = columns
    return RawGraph(
        name=name,
        num_nodes={node_type: graph.num_nodes(node_type) for node_type in graph.ntypes},
        edges=edges_of_dgl(graph),
        node_data=node_data,
        edge_data=edge_data,
        num_classes={ntype: max(count, num_classes or 0) for ntype, count in classes_of(node_data).items()},
    )


def edges_of_dgl(graph: dgl.DGLGraph) -> dict[EdgeType, tuple[Array, Array]]:
    """Return each edge type's (E,) sources and destinations, ordered by edge id."""
    formats = graph.formats()
    if "coo" not in (*formats["created"], *formats["not created"]):
        # Only this format returns edges ordered by id.
        graph = graph.formats(["coo", "csr", "csc"])
    edges = {}
    for etype in graph.canonical_etypes:
        sources, destinations = graph.edges(etype=etype, order="eid")
        edges[etype] = (array_of_tensor(sources), array_of_tensor(destinations))
    return edges


@final
class DglDataSource(DatasetSource):
    """A dataset class in ``dgl.data``, which downloads its files, such as ``dgl:CoraGraphDataset``.

    If there are several graphs, the option ``index`` chooses one by number. If masks have several splits,
    ``split`` chooses one. All other options are passed to the class (``raw_dir=``, ``force_reload=`` ...).
    """

    def __init__(self, location: str, options: Mapping[str, object]) -> None:
        self._name = location
        self._factory = _find_dataset_class(location)
        self._index, self._split = _read_graph_options(options)
        self._arguments = {key: value for key, value in options.items() if key not in _GRAPH_OPTIONS}
        parameters = inspect.signature(self._factory).parameters
        # A class with **kwargs accepts any name, so its arguments cannot be checked.
        if inspect.Parameter.VAR_KEYWORD not in {parameter.kind for parameter in parameters.values()}:
            check_names(f"the dataset source 'dgl:{location}'", self._arguments, parameters)
        if "verbose" in parameters:
            self._arguments.setdefault("verbose", False)

    def load(self) -> RawGraph:
        try:
            dataset = self._factory(**self._arguments)
        except (OSError, RuntimeError) as error:
            raise DatasetError(
                f"dgl:{self._name} could not be downloaded or read ({error}); if you have "
                "the files, give their folder as raw_dir="
            ) from error

        item = dataset[_check_index(len(dataset), self._index, f"dgl:{self._name}")]
        # Datasets for whole-graph tasks yield pairs (graph, label for the graph).
        graph = item[0] if isinstance(item, tuple) else item
        # In some of DGL's datasets, ``num_classes`` is missing or a method.
        class_count = getattr(dataset, "num_classes", None)
        num_classes = int(class_count) if isinstance(class_count, (int, np.integer)) else None
        return raw_graph_from_dgl(graph, name=self._name, split=self._split, num_classes=num_classes)


@final
class DglBinarySource(DatasetSource):
    """A file from ``dgl.save_graphs``. See :class:`DglDataSource` for its options ``index`` and ``split``."""

    known_options = _GRAPH_OPTIONS

    def __init__(self, location: str, options: Mapping[str, object]) -> None:
        super().__init__(location, options)
        self._index, self._split = _read_graph_options(options)

    def load(self) -> RawGraph:
        if not self._path.is_file():
            raise DatasetError(f"there is no file {self._path.absolute()}; expected a dgl.save_graphs file")
        try:
            check_files([("graphs", self._path)])
            graphs = load_graphs(self._path)
        except StorageError as error:
            raise DatasetError(
                f"{self._path} is not a file of saved DGL graphs, or is damaged; copy it "
                "again, or write it with dgl.save_graphs"
            ) from error

        graph = graphs[_check_index(len(graphs), self._index, str(self._path))]
        return raw_graph_from_dgl(graph, name=self._path.stem, split=self._split)


def _find_dataset_class(name: str) -> Any:
    import dgl

    classes = {}
    for key, value in vars(dgl.data).items():
        if inspect.isclass(value) and issubclass(value, dgl.data.DGLDataset):
            classes[key] = value
    if name not in classes:
        hint = suggest_name(name, sorted(classes))
        raise UnknownNameError(f"dgl.data has no dataset {name!r}{hint} (write e.g. dgl:CoraGraphDataset)")
    return classes[name]


def _check_index(num_graphs: int, index: int | None, where: str) -> int:
    if index is None and num_graphs == 1:
        return 0
    if index is None or index >= num_graphs:
        reason = "no index was given" if index is None else f"index={index} is not among them"
        raise ConfigError(f"{where} has {num_graphs} graphs and {reason}; choose index=0 to {num_graphs - 1}")
    return index


def _convert_frame(data: Mapping[str, torch.Tensor], excluded: str) -> dict[str, Array]:
    return {key: array_of_tensor(tensor) for key, tensor in data.items() if key != excluded}


def array_of_tensor(tensor: torch.Tensor) -> Array:
    """Return a dense tensor as an array. bfloat16 becomes float32."""
    import torch

    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    return np.asarray(tensor.numpy())


def _choose_split(name: str, column: Array, split: int | None, where: str) -> Array:
    if column.ndim != 2:
        return column
    if split is None or split >= column.shape[1]:
        raise DatasetError(
            f"{where}: column {name!r} has {column.shape[1]} splits; choose one with split=0 "
            f"to {column.shape[1] - 1}, or set g.ndata[{name!r}] = g.ndata[{name!r}][:, 0]"
        )
    return column[:, split]


DATASETS: Registry[DatasetSource] = Registry(
    "dataset source",
    DatasetSource,  # type: ignore[type-abstract]  # the base is only compared with
    builtin={
        "synthetic": "dglx_dist.data.synthetic:SyntheticSource",
        "npz": "dglx_dist.data.array_graphs:NpzSource",
        "torch": "dglx_dist.data.array_graphs:TorchSource",
        "networkx": "dglx_dist.data.graph_files:NetworkxSource",
        "edge_list": "dglx_dist.data.graph_files:EdgeListSource",
        "dgl": "dglx_dist.data.sources:DglDataSource",
        "dgl_binary": "dglx_dist.data.sources:DglBinarySource",
        "ogb": "dglx_dist.data.sources:OgbSource",
        "tables": "dglx_dist.data.table_graphs:TablesSource",
    },
    group="dglx_dist.datasets",
)


_SOURCE_OF_SUFFIX = {
    ".npz": "npz",
    **dict.fromkeys((".bin", ".dgl"), "dgl_binary"),
    **dict.fromkeys((".pt", ".pth"), "torch"),
    **dict.fromkeys((".graphml", ".gml", ".json"), "networkx"),
    **dict.fromkeys(
        (".txt", ".tsv", ".edgelist", ".edges", ".ncol", ".dat", ".data", ".rating"), "edge_list"
    ),
    **dict.fromkeys((".mtx", ".graph"), "edge_list"),
}
FORMATS = (
    "a `.npz` of arrays or of a SciPy matrix, a `.bin` of saved DGL graphs, a `.pt` of "
    "tensors (PyG), NetworkX's `.graphml`, `.gml` or `.json`, a `.txt` of edges (SNAP) or "
    "triples, a `.mtx`, METIS's `.graph`, these also with `.gz`, a folder of CSV / Parquet "
    "tables, or of triples in train.txt, valid.txt and test.txt"
)
"""Text that tells which files :func:`load_dataset` reads."""
LINE_FORMATS = ("triples", "edges", "interactions")
"""Line formats in text files."""


def suffix_of(path: Path) -> str:
    """Return the suffix that ``path`` has, including the one before ``.gz``."""
    if path.suffix != ".gz":
        return path.suffix
    return "".join(path.suffixes[-2:])


def load_dataset(
    spec: str | os.PathLike[str] | dgl.DGLGraph, /, *, workspace: Workspace | None = None, **options: object
) -> RawGraph:
    """Load a graph and check it with :func:`check_raw_graph`. Not collective.

    Args:
        spec: ``synthetic``, ``synthetic:nodes=20000,degree=25,seed=0``, a path (:data:`FORMATS`),
            ``dgl:CoraGraphDataset``, ``ogb:ogbn-arxiv``, or a DGLGraph. ``NAME:WHERE`` names the source
            explicitly. A path may be an address in an object store. Its objects are copied to a cache.
        workspace: Workspace for limited memory. Edge arrays are mapped into it.
        options: Options for the source. See its class.

    Raises:
        DatasetError: the path does not exist, or the data is wrong.
        UnknownNameError: there is no source with the name before the colon.
        ConfigError: the source does not have an option, its value is wrong, or the source needs more memory.
    """
    if not isinstance(spec, (str, os.PathLike)):
        graph = raw_graph_from_dgl(spec, **options)  # type: ignore[arg-type]  # raw_graph_from_dgl checks the options
        check_raw_graph(graph, where=f"the DGLGraph {graph.name!r}")
        return graph

    spec = fetch_objects(format_location(spec))
    name, location = _find_source(spec)
    location = fetch_objects(location)
    source = DATASETS.get(name)(location, options)
    source.workspace = workspace
    if workspace is not None and not source.external:
        _check_fits(name, source.memory_per_byte, Path(location).expanduser(), workspace)
    graph = number_codes(source.load(), str(spec))
    check_raw_graph(graph, where=str(spec))
    return graph


@contextmanager
def open_text(path: Path, content_kind: str) -> Iterator[IO[bytes]]:
    """Open a file, and decompress it if it ends in ``.gz``.

    Raises DatasetError if the file cannot be opened, or what the block reads is not a ``content_kind``.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield cast("IO[bytes]", file)
    except DglxError:  # Some errors in this package are a ValueError, too.
        raise
    except (ValueError, EOFError, OSError, zlib.error) as error:
        problem = str(error)
        if isinstance(error, UnicodeDecodeError):
            problem = "the text is not UTF-8; save it as UTF-8"
        elif isinstance(error, gzip.BadGzipFile):
            problem = "it ends in .gz, but is not compressed by gzip; remove the suffix"
        elif isinstance(error, (EOFError, zlib.error)):
            problem = "its compressed content is damaged or incomplete; copy it again"
        raise DatasetError(f"{path}: not a readable {content_kind}: {problem}") from error


def _estimate_bytes(path: Path) -> int:
    """Return a file's size, or the size of all files in a folder, without compression."""
    if path.is_dir():
        return sum(_estimate_bytes(file) for file in path.rglob("*") if file.is_file())
    if path.suffix != ".gz":
        return path.stat().st_size
    num_bytes = 0
    with open_text(path, "file") as file:
        while chunk := file.read(1 << 20):
            num_bytes += len(chunk)
    return num_bytes


def _check_fits(name: str, per_byte: int, path: Path, workspace: Workspace) -> None:
    """Raise ConfigError if the source ``name`` needs more memory to read ``path`` than is granted."""
    if not path.exists():
        return
    needed = per_byte * _estimate_bytes(path)
    if needed > workspace.budget.work:
        remedy = "give an uncompressed .npz"
        if path.is_dir():
            remedy = "first `dglx ingest` them (docs/guides/ingest.md)"
        raise ConfigError(
            f"{path} would take about {format_bytes(needed)} of memory, because {name} reads "
            f"it at once; {remedy}, or grant more --memory"
        )


def _find_source(spec: str) -> tuple[str, str]:
    """Find the source for ``spec``. Return its name, and the path or other argument that it gets."""
    path = Path(spec).expanduser()
    known = f"{FORMATS}, or NAME:WHERE with NAME one of {', '.join(DATASETS.names())}"
    if path.exists():
        if path.is_file() and not path.stat().st_size:
            raise DatasetError(f"{path} is empty; write the graph again, or remove the file")
        source = _SOURCE_OF_SUFFIX.get(suffix_of(path).removesuffix(".gz"))
        if path.is_dir():
            source = "edge_list" if any(path.glob("train.t[xs][tv]")) else "tables"
        if source is None:
            if path.suffix in (".net", ".paj", ".gexf"):
                kind = "gexf" if path.suffix == ".gexf" else "pajek"
                known = f"GraphML, so write networkx.write_graphml(networkx.read_{kind}(FILE), 'a.graphml')"
            raise DatasetError(
                f"{path}: the suffix {path.suffix!r} belongs to no dataset source; expected "
                f"{known} (a lone table goes into a folder as edges.csv or edges.parquet)"
            )

        return source, str(path)

    if spec in DATASETS.names():
        return spec, ""
    name, colon, location = spec.partition(":")
    if colon and "/" not in name and "\\" not in name:
        return DATASETS.resolve(name), location
    nearby_names = list(DATASETS.names())
    if path.parent.is_dir():
        nearby_names += [entry.name for entry in path.parent.iterdir()]
    candidates = difflib.get_close_matches(path.name, nearby_names)
    hint = f"; near it: {', '.join(candidates)}" if candidates else ""
    if not path.parent.is_dir():
        hint = f"; the folder {path.parent} does not exist either"
    raise DatasetError(
        f"there is no file or folder {path} (that is {path.absolute()}){hint}. Expected {known}"
    )


_MASK_OF_OGB_SPLIT = dict(zip(("train", "valid", "test"), SPLITS, strict=True))


@final
class OgbSource(DatasetSource):
    """A dataset from OGB, such as ``ogb:ogbn-arxiv``. It needs the package ogb.

    The option ``root`` is the folder for downloads.
    """

    def __init__(self, location: str, options: Mapping[str, object]) -> None:
        check_names("the dataset source 'ogb'", options, ("root",))
        if not location.startswith("ogbn-"):
            raise ConfigError(
                f"ogb:{location} is not a node dataset; those that can be loaded start with "
                "ogbn-, e.g. ogb:ogbn-arxiv"
            )

        if importlib.util.find_spec("ogb") is None:
            raise ConfigError(
                f"ogb:{location} needs the package ogb, which is not installed; run "
                f"pip install 'dglx_dist[ogb]' (or pip install ogb)"
            )

        self._name = location
        self._root = Path(str(options.get("root", "dataset"))).expanduser()

    def load(self) -> RawGraph:
        # ogb downloads a dataset if it is not under root yet, and asks before large downloads.
        datasets = importlib.import_module("ogb.nodeproppred")
        with cache_set_aside(self._root / self._name.replace("-", "_")):
            try:
                dataset = datasets.NodePropPredDataset(name=self._name, root=str(self._root))
            except (OSError, ValueError) as error:
                raise DatasetError(
                    f"ogb:{self._name} could not be read or downloaded below {self._root.absolute()}: {error}"
                ) from error

        graph, labels = dataset[0]
        return raw_graph_from_ogb(self._name, graph, labels, dataset.get_idx_split())


def raw_graph_from_ogb(
    name: str, graph: Mapping[str, Any], labels: Any, split: Mapping[str, Any]
) -> RawGraph:
    """Convert an item from ``NodePropPredDataset`` with one node type or several.

    A type has N nodes or E edges. With several types, each value below is a dict by type, and the names in
    ``graph`` end in ``_dict``.

    Args:
        graph: The (2, E) ``edge_index`` and columns with names ``node_*`` and ``edge_*``.
        labels: (N, 1) classes, or (N, tasks) targets.
        split: Node ids for ``train``, ``valid`` and ``test``.
    """
    if "edge_index_dict" not in graph:
        graph, labels, split = _convert_to_several_types(graph, labels, split)
    num_nodes = {node_type: int(count) for node_type, count in graph["num_nodes_dict"].items()}
    edges: dict[EdgeType, tuple[Array, Array]] = {}
    for edge_type, (sources, destinations) in graph["edge_index_dict"].items():
        edges[edge_type] = (sources, destinations)
    node_data: dict[str, dict[str, NodeColumn]] = {}
    for node_type, count in num_nodes.items():
        columns = _get_columns(graph, "node_", node_type)
        if node_type in labels:
            columns[LABEL] = np.asarray(labels[node_type])
        for split_name, mask_name in _MASK_OF_OGB_SPLIT.items():
            ids = split[split_name].get(node_type)
            if ids is not None:
                columns[mask_name] = np.zeros(count, dtype=np.bool_)
                columns[mask_name][ids] = True
        node_data[node_type] = standard_columns(columns, f"ogb:{name}, nodes {node_type!r}")

    return RawGraph(
        name=name,
        num_nodes=num_nodes,
        edges=edges,
        node_data=node_data,
        edge_data={edge_type: _get_columns(graph, "edge_", edge_type) for edge_type in edges},
        num_classes=classes_of(node_data),
    )


def _convert_to_several_types(
    graph: Mapping[str, Any], labels: Any, split: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Convert a dataset's values with one type to the dicts that a dataset with several types has."""
    typed_graph: dict[str, Any] = {"num_nodes_dict": {NODE_TYPE: graph["num_nodes"]}}
    for key, value in graph.items():
        if key == "edge_index":
            typed_graph["edge_index_dict"] = {EDGE_TYPE: value}
        elif key != "num_nodes" and value is not None:
            type_key: object = NODE_TYPE if key.startswith("node_") else EDGE_TYPE
            typed_graph[key] = {type_key: value}
    return typed_graph, {NODE_TYPE: labels}, {name: {NODE_TYPE: ids} for name, ids in split.items()}


def _get_columns(graph: Mapping[str, Any], prefix: str, type_key: object) -> dict[str, Array]:
    """Return the columns for a node or edge type. Their keys in ``graph`` begin with ``prefix``."""
    columns = {}
    for key, values in graph.items():
        if not key.startswith(prefix) or key == "edge_index_dict":
            continue
        if values is None or values.get(type_key) is None:
            continue
        name = key.removeprefix(prefix).removesuffix("_dict")
        value = np.asarray(values[type_key])
        # OGB stores scalars as (K, 1), for example a paper's year.
        if name != "feat" and value.ndim == 2 and value.shape[1] == 1:
            value = value[:, 0]
        columns[FEATURE if name == "feat" else name] = value
    return columns


@contextmanager
def cache_set_aside(folder: Path) -> Iterator[None]:
    """Hide ogb's cache in ``folder`` while the block runs, and remove a new one.

    ogb's cache is a pickle, and ``torch.load`` rejects it since version 2.6. Without a cache, ogb reads its
    raw files, which hold plain numbers.
    """
    cache = folder / "processed" / "data_processed"
    aside = cache.with_name("data_processed.set_aside")
    if cache.is_file():
        cache.replace(aside)
    elif (folder / "raw").is_dir():
        # ogb expects this folder. If it existed before a download, ogb would ask whether to update.
        cache.parent.mkdir(exist_ok=True)

    try:
        yield
    finally:
        cache.unlink(missing_ok=True)
        if aside.is_file():
            aside.replace(cache)
