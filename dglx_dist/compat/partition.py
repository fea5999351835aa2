"""DGL's partitioning functions: ``partition_graph``, its files, ``node_split`` and ``edge_split``."""

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import dgl
import numpy as np
import torch
from torch import Tensor

from dglx_dist.comm.session import warn_user
from dglx_dist.compat.dist_tensor import DistTensor, inner_tensor
from dglx_dist.compat.partition_book import (
    RangePartitionBook,
    find_book_graph,
    get_edge_ids,
    resolve_edge_type,
    resolve_node_type,
)
from dglx_dist.data.dgl_files import check_files, load_graphs, load_tensors
from dglx_dist.data.partition.base import PARTITIONERS, PartitionOptions
from dglx_dist.data.partition.hierarchical import TRAINER_ID, assign_two_levels, with_trainer_ids
from dglx_dist.data.sources import edges_of_dgl
from dglx_dist.data.storage.dgl_format import ranges_by_type, read_part_config, write_dgl_format
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.partition_book import as_array
from dglx_dist.graph.row_kernels import view_as_numpy
from dglx_dist.graph.split import edge_split as split_edges
from dglx_dist.graph.split import node_split as split_nodes
from dglx_dist.options import check_integer
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Array, EdgeType, RawGraph


def raw_graph(
    graph: dgl.DGLGraph, name: str, without: Set[str] = frozenset()
) -> tuple[RawGraph, frozenset[tuple[str | EdgeType, str]]]:
    """Convert a DGL graph, and list its uint16 columns that hold bfloat16 bits.

    Unlike ``load_dataset``, it keeps all names and dtypes, because scripts name their own columns. The
    columns that DGL adds to partitions are left out, and so are those in ``without``.
    """
    if not isinstance(graph, dgl.DGLGraph):
        raise ConfigError(f"partition_graph takes a DGLGraph, not a {type(graph).__name__}")
    bfloat16: set[tuple[str | EdgeType, str]] = set()
    dropped = {dgl.NID, dgl.EID, "inner_node", "inner_edge", *without}

    def read_columns(type_name: str | EdgeType, data: Any) -> dict[str, Array]:
        columns = {}
        for key, rows in data.items():
            if rows.dtype == torch.bfloat16:
                bfloat16.add((type_name, key))
            if key not in dropped:
                columns[key] = view_as_numpy(rows.detach().cpu().contiguous())
        return columns

    raw = RawGraph(
        name=name,
        num_nodes={ntype: graph.num_nodes(ntype) for ntype in graph.ntypes},
        edges=edges_of_dgl(graph),
        node_data={ntype: read_columns(ntype, graph.nodes[ntype].data) for ntype in graph.ntypes},
        edge_data={etype: read_columns(etype, graph.edges[etype].data) for etype in graph.canonical_etypes},
    )
    return raw, frozenset(bfloat16)


_GRAPHBOLT_OPTIONS = {"use_graphbolt", "store_eids", "store_inner_node", "store_inner_edge", "n_jobs"}
Ids: TypeAlias = Tensor | dict[Any, Tensor]
Loaded: TypeAlias = tuple[
    dgl.DGLGraph, dict[str, Tensor], dict[str, Tensor], RangePartitionBook, str, list[str], list[EdgeType]
]


def partition_graph(  # noqa: PLR0913 - DGL's signature
    g: dgl.DGLGraph,
    graph_name: str,
    num_parts: int,
    out_path: str | Path,
    num_hops: int = 1,
    part_method: str = "metis",
    balance_ntypes: Tensor | Mapping[str, Tensor] | None = None,
    balance_edges: bool = False,
    return_mapping: bool = False,
    num_trainers_per_machine: int = 1,
    objtype: str = "cut",
    graph_formats: str | Sequence[str] | None = None,
    use_graphbolt: bool = False,
    *,
    seed: int = 0,
    **kwargs: object,
) -> tuple[Ids, Ids] | None:
    """Partition ``g`` and write DGL's files, which DGL and this package can read. One process calls it.

    Nodes are numbered as in DGL: part by part, in their original order. Edges are numbered by part, then
    destination, then source. With one part they keep their ids, as in DGL.

    The arguments are DGL's, except:
        out_path: Files from an earlier partition in this folder are replaced.
        part_method: ``metis``, ``random``, or another partitioner in this package.
        balance_ntypes: (N,) integers, or a dict with such integers by node type. Each value is balanced
            separately. Several node types are balanced anyway if the method supports it.
        num_trainers_per_machine: Above 1, each part is partitioned once more, and nodes and edges get
            ``trainer_id`` in the files and in ``g``. Columns with that name are replaced.
        seed: Random seed. The same seed gives the same parts.

    With ``return_mapping``, return original node and edge ids in the new order, by type if there are several.
    """
    if use_graphbolt:
        kwargs = {"use_graphbolt": True, **kwargs}
    _warn_unused(num_hops, kwargs)
    check_integer("num_parts", num_parts, least=1)
    check_integer("num_trainers_per_machine", num_trainers_per_machine, least=1)
    check_integer("seed", seed, least=0)
    has_trainers = num_trainers_per_machine > 1

    # DGL overwrites an earlier partition's trainer ids too.
    raw, bfloat16 = raw_graph(g, graph_name, {TRAINER_ID} if has_trainers else set())
    method = PARTITIONERS.resolve(part_method)
    if method == "random" and (balance_edges or balance_ntypes is not None):
        warn_user(f"balance_ntypes and balance_edges have no effect with part_method={part_method!r}")
        balance_ntypes = None
        balance_edges = False

    weighted, balance = _add_weights(raw, balance_ntypes)
    if balance_edges:
        balance += ("etype",) if len(raw.edges) > 1 else ("degree",)
    if not balance and len(raw.num_nodes) > 1 and "balance" in PARTITIONERS.get(method).honours:
        balance = ("ntype",)
    options = PartitionOptions(balance=balance, objective=cast("Any", objtype))
    if has_trainers:
        split = assign_two_levels(weighted, method, options, (num_parts, num_trainers_per_machine), seed)
        assignment = split.parts
        raw = with_trainer_ids(raw, split.trainers)
    else:
        assignment = PARTITIONERS.get(method)(options).assign(weighted, num_parts, seed)

    write = partial(write_dgl_format, raw, assignment, bfloat16=bfloat16, formats=graph_formats)
    config = _replace_files(Path(out_path), write)
    if has_trainers:
        _set_trainer_ids(g, raw)
    return _read_mapping(config, num_parts) if return_mapping else None


def _warn_unused(num_hops: int, graphbolt_options: Mapping[str, object]) -> None:
    """Warn about options that have no effect here. Raise ConfigError for options that DGL does not have."""
    if num_hops != 1:
        warn_user(f"num_hops={num_hops}: parts store 1 hop and fetch farther nodes on demand")

    unknown = sorted(graphbolt_options.keys() - _GRAPHBOLT_OPTIONS)
    if unknown:
        raise ConfigError(f"partition_graph has no argument {', '.join(unknown)}. Leave it out.")
    if graphbolt_options:
        warn_user(
            f"{', '.join(graphbolt_options)}: not used, because GraphBolt's files are not "
            "written. Only DGL's GraphBolt needs them."
        )


def load_partition(
    part_config: str | Path, part_id: int, load_feats: bool = True, use_graphbolt: bool = False
) -> Loaded:
    """Load one part: (structure, node data, edge data, book, graph name, node types, edge types)."""
    if use_graphbolt:
        raise ConfigError("use_graphbolt=True is not supported, because there is one format. Leave it out.")
    book, name, ntypes, etypes = load_partition_book(part_config, part_id)
    graph = load_graphs(_file(part_config, part_id, "part_graph"))[0]
    nodes, edges = load_partition_feats(part_config, part_id, load_feats, load_feats)
    return graph, nodes or {}, edges or {}, book, name, list(ntypes), list(etypes)


def load_partition_feats(
    part_config: str | Path, part_id: int, load_nodes: bool = True, load_edges: bool = True
) -> tuple[dict[str, Tensor] | None, dict[str, Tensor] | None]:
    """Return the part's node data by ``type/name`` and its edge data by ``src:rel:dst/name``, or None."""
    nodes = _tensors(part_config, part_id, "node_feats", NODE_TYPE) if load_nodes else None
    edges = _tensors(part_config, part_id, "edge_feats", ":".join(EDGE_TYPE)) if load_edges else None
    return nodes, edges


def load_partition_book(
    part_config: str | Path, part_id: int, part_metadata: None = None
) -> tuple[RangePartitionBook, str, dict[str, int], dict[EdgeType, int]]:
    """Load a partition's (book, graph name, node types by number, edge types by number) from its file.

    ``part_metadata``, the file's content in newer DGL versions, is refused.
    """
    if part_metadata is not None:
        raise ConfigError("part_metadata is not supported, because part_config is read again. Leave it out.")
    config = read_part_config(Path(part_config).absolute())
    ntypes = {ntype: type_id for type_id, ntype in enumerate(config.ntypes)}
    etypes = {etype: type_id for type_id, etype in enumerate(config.etypes)}
    maps = ranges_by_type(config.ntypes, config.nodes), ranges_by_type(config.etypes, config.edges)
    book = RangePartitionBook(part_id, config.num_parts, *maps, ntypes, etypes)
    return book, config.name, ntypes, etypes


def _set_trainer_ids(g: dgl.DGLGraph, raw: RawGraph) -> None:
    # DGL has int64 trainer ids.
    for view, columns in ((g.nodes, raw.node_data), (g.edges, raw.edge_data)):
        for key, data in columns.items():
            view[key].data[TRAINER_ID] = torch.as_tensor(data[TRAINER_ID]).long()


def _add_weights(
    graph: RawGraph, balance_ntypes: Tensor | Mapping[str, Tensor] | None
) -> tuple[RawGraph, tuple[str, ...]]:
    """Add a 0/1 column for each value to balance. Return the graph, and these columns' names."""
    if balance_ntypes is None:
        return graph, ()
    if not isinstance(balance_ntypes, Mapping):
        if len(graph.num_nodes) > 1:
            raise ConfigError(
                "balance_ntypes is one tensor, but there are several node types. Pass a dict by type."
            )
        balance_ntypes = {next(iter(graph.num_nodes)): balance_ntypes}
    unknown = sorted(balance_ntypes.keys() - graph.num_nodes.keys())
    if unknown:
        raise ConfigError(f"balance_ntypes has {unknown}, but node types are {', '.join(graph.num_nodes)}")

    node_data = {ntype: dict(columns) for ntype, columns in graph.node_data.items()}
    names = []
    for ntype, num_nodes in graph.num_nodes.items():
        # Nodes are balanced as one group if their type is not mentioned.
        values = np.zeros(num_nodes, np.int64)
        if ntype in balance_ntypes:
            values = torch.as_tensor(balance_ntypes[ntype]).numpy()
        if values.shape != (num_nodes,):
            raise ConfigError(
                f"balance_ntypes has shape {values.shape} for the {num_nodes} nodes of {ntype!r}"
            )
        columns = node_data.setdefault(ntype, {})
        for value in np.unique(values):
            name = f"balance_ntypes.{ntype}={value}"
            columns[name] = (values == value).astype(np.int64)
            names.append(name)
    return replace(graph, node_data=node_data), tuple(names)


def _replace_files(out: Path, write: Callable[[Path], Path]) -> Path:
    """Call ``write`` with a new folder, and move its files to ``out``. Return the JSON file among them."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partition-", dir=out) as scratch:
        config = write(Path(scratch) / "parts")
        # The JSON file lists the other files, so it is removed first and written last.
        (out / config.name).unlink(missing_ok=True)
        for path in sorted(config.parent.iterdir(), key=lambda path: path == config):
            target = out / path.name
            if target.is_dir():
                shutil.rmtree(target)
            path.replace(target)
    return out / config.name


def _read_mapping(config: Path, num_parts: int) -> tuple[Ids, Ids]:
    """Read the original node and edge ids for all parts, by type if there are several."""
    contents = read_part_config(config.absolute())
    folders = [contents.file(part, "part_graph").parent for part in range(num_parts)]

    def join_parts(name: str, key: str) -> Tensor:
        return torch.cat([load_tensors(folder / name)[key] for folder in folders])

    nodes = {ntype: join_parts("orig_nids.dgl", ntype) for ntype in contents.ntypes}
    edges = {etype: join_parts("orig_eids.dgl", ":".join(etype)) for etype in contents.etypes}
    if len(nodes) == 1 and len(edges) == 1:
        return nodes[contents.ntypes[0]], edges[contents.etypes[0]]
    return nodes, edges


def _file(part_config: str | Path, part: int, kind: str) -> Path:
    path = Path(part_config).absolute()
    config = read_part_config(path)
    if not 0 <= part < config.num_parts:
        raise ConfigError(f"{path} has the parts 0 to {config.num_parts - 1}, not {part}")
    check_files(config.dgl_files(part))
    return config.file(part, kind)


def _tensors(part_config: str | Path, part: int, kind: str, type_name: str) -> dict[str, Tensor]:
    tensors = {}
    for name, tensor in load_tensors(_file(part_config, part, kind)).items():
        # Files from old versions do not name the type if there is only one.
        key = name if "/" in name else f"{type_name}/{name}"
        tensors[key] = tensor
    return tensors


def node_split(
    nodes: Any,
    partition_book: RangePartitionBook | None = None,
    ntype: str = NODE_TYPE,
    rank: int | None = None,
    force_even: bool = True,
    node_trainer_ids: Any = None,
) -> Tensor:
    """Return a rank's share of the marked nodes as ascending (n,) int64 ids.

    Args:
        nodes: (N,) DistTensor, tensor or array. A value other than 0 marks a node.
        partition_book: Book of an open graph, or one that was read from a file. The default is the book of
            the graph that the DistTensor belongs to, or else of the only open graph.
        ntype: Type of the nodes.
        rank: Rank to return the share of. The default is this rank.
        force_even: Whether all ranks get equally many nodes, up to one.
        node_trainer_ids: (N,) preferred rank of each node.
    """
    g = _find_graph(nodes, partition_book)
    ntype = resolve_node_type(g, ntype)
    mask = _mask(nodes, g.num_nodes(ntype), ntype)
    trainer_ids = cast("Any", inner_tensor(node_trainer_ids))
    return split_nodes(mask, g.get_partition_book(), ntype, rank, force_even, trainer_ids)


def edge_split(
    edges: Any,
    partition_book: RangePartitionBook | None = None,
    etype: str | EdgeType = EDGE_TYPE[1],
    rank: int | None = None,
    force_even: bool = True,
    edge_trainer_ids: Any = None,
) -> Tensor:
    """Return a rank's share of the marked edges, see :func:`node_split`."""
    g = _find_graph(edges, partition_book)
    etype = resolve_edge_type(g, etype)
    if get_edge_ids(g.kvstore, g.to_canonical_etype(etype)) is not None:
        # to_local() returns rows in the order of DGL's ids, and the result has such ids.
        if isinstance(edges, DistTensor):
            edges = edges.to_local()
        if isinstance(edge_trainer_ids, DistTensor):
            edge_trainer_ids = edge_trainer_ids.to_local()

    mask = _mask(edges, g.num_edges(etype), etype)
    trainer_ids = cast("Any", inner_tensor(edge_trainer_ids))
    return split_edges(mask, g.get_partition_book(), etype, rank, force_even, trainer_ids)


def _mask(marked: Any, num_rows: int, type_name: object) -> Any:
    """Return a mask that marks the nonzero values in ``marked``, or all rows if it has all ids."""
    if len(marked) != num_rows:
        raise ConfigError(
            f"the mask has {len(marked)} values for {num_rows} rows of {type_name!r}. Pass one per row."
        )

    if isinstance(marked, DistTensor):
        if marked.dtype == torch.bool:
            return marked.inner
        marked = marked.inner.to_local()
    values = as_array(marked)
    is_integer = values.dtype.kind in "iu"
    if is_integer and num_rows > 1 and np.array_equal(np.sort(values), np.arange(num_rows)):
        warn_user("the mask contains all ids, so all rows are taken (DGL would leave out row 0)")
        return np.ones(num_rows, dtype=np.bool_)
    return values != 0


def _find_graph(marked: Any, partition_book: RangePartitionBook | None) -> DistGraph:
    """Find the open graph that a mask or book belongs to.

    A mask names its graph if it is a DistTensor. ConfigError if the mask and the book belong to different
    graphs.
    """
    if not isinstance(partition_book, RangePartitionBook | None):
        raise ConfigError(f"partition_book is a {type(partition_book).__name__}. Use g.get_partition_book().")
    book = None if partition_book is None else partition_book.inner
    if not isinstance(marked, DistTensor):
        return find_book_graph(book)

    g = find_book_graph(marked.inner.part_policy.partition_book)
    if book is not None and find_book_graph(book) is not g:
        raise ConfigError(f"the mask {marked.name!r} belongs to the graph {g.name!r}, the book to another")
    return g
