"""DGL's ``partition_graph`` and its files, read and written."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, cast

import dgl
import numpy as np
import torch
from dgl.data.utils import load_tensors
from torch import Tensor

from dglx_dist.compat.dist_tensor import DistTensor, inner_tensor
from dglx_dist.compat.partition_book import RangePartitionBook, edge_type, graph_of_book, node_type
from dglx_dist.data.partition.base import PARTITIONERS, PartitionOptions
from dglx_dist.data.partition.hierarchical import TRAINER_ID, assign_two_levels, with_trainer_ids
from dglx_dist.data.storage.dgl_format import read_part_config, write_dgl_format
from dglx_dist.dataloading.step_loader import whole_number
from dglx_dist.errors import ConfigError, StorageError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.ids import as_array
from dglx_dist.graph.split import edge_split as split_edges
from dglx_dist.graph.split import node_split as split_nodes
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Array, EdgeType, RawGraph

_OF_DGL = (dgl.NID, dgl.EID, "inner_node", "inner_edge")
"""Columns that DGL's partitions have of their own."""


def raw_graph(graph: dgl.DGLGraph, name: str) -> tuple[RawGraph, frozenset[tuple[str | EdgeType, str]]]:
    """Return the graph, and which of its uint16 columns hold bfloat16 bits.

    Nothing is renamed or converted, as ``load_dataset`` would: scripts ask for the names that they gave.

    Raises:
        ConfigError: ``graph`` is no DGLGraph.
    """
    if not isinstance(graph, dgl.DGLGraph):
        raise ConfigError(f"partition_graph takes a DGLGraph, not a {type(graph).__name__}")
    halves: list[tuple[str | EdgeType, str]] = []

    def columns(owner: str | EdgeType, data: Any) -> dict[str, Array]:
        halves.extend((owner, key) for key, rows in data.items() if rows.dtype == torch.bfloat16)
        return {key: _as_array(rows) for key, rows in data.items() if key not in _OF_DGL}

    edges = {}
    for etype in graph.canonical_etypes:
        source, destination = graph.edges(etype=etype, order="eid")
        edges[etype] = _as_array(source.long()), _as_array(destination.long())
    raw = RawGraph(
        name=name,
        num_nodes={ntype: graph.num_nodes(ntype) for ntype in graph.ntypes},
        edges=edges,
        node_data={ntype: columns(ntype, graph.nodes[ntype].data) for ntype in graph.ntypes},
        edge_data={etype: columns(etype, graph.edges[etype].data) for etype in graph.canonical_etypes},
    )
    return raw, frozenset(halves)


def _as_array(tensor: torch.Tensor) -> Array:
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return np.asarray(tensor.numpy())


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
    **of_graphbolt: object,
) -> tuple[Ids, Ids] | None:
    """Cut ``g`` and write DGL's files, which DGL and this package read; one process calls it.

    Nodes are numbered as DGL does: part by part, in the order they had. Edges are numbered by part, then
    destination, then source.

    Args:
        g: Homogeneous or heterogeneous.
        graph_name: Of the graph and of the JSON file.
        num_parts: P.
        out_path: Folder; files of an earlier partition there are replaced.
        num_hops: 1: nothing beyond the sources of a part's in-edges is stored.
        part_method: ``metis``, ``random``, or another partitioner of this package.
        balance_ntypes: (N,) integers, or a dict of them by node type; each value is balanced by itself. Of
            several node types each is balanced anyway, where the method can.
        balance_edges: Balance the in-edges too.
        return_mapping: Whether to return the original ids.
        num_trainers_per_machine: Above 1, each part is cut once more, and nodes and edges get ``trainer_id``:
            in the files, and in ``g``, where what it had of that name is replaced.
        objtype: ``cut`` or ``vol``.
        graph_formats: None, or ``coo``, ``csc``, ``csr``: as what structure is stored.
        use_graphbolt: False.
        seed: The same seed gives the same parts.
        of_graphbolt: Refused: what newer versions take for GraphBolt's files.

    Returns:
        With ``return_mapping``: original node and edge ids in the new order, by type if there are several.

    Raises:
        ConfigError: an argument that cannot be honoured.
        StorageError: ``out_path`` cannot be written.
    """
    if num_hops != 1 or use_graphbolt:
        raise ConfigError(
            f"num_hops={num_hops}, use_graphbolt={use_graphbolt}: only 1 and False can be honoured; farther "
            "neighbours are fetched when they are asked for, and there is one format"
        )
    if of_graphbolt:
        raise ConfigError(
            f"{', '.join(of_graphbolt)}: of GraphBolt's files, of which there are none; leave them out"
        )
    whole_number("num_trainers_per_machine", num_trainers_per_machine, least=1)
    raw, bfloat16 = raw_graph(g, graph_name)
    method = PARTITIONERS.resolve(part_method)
    weighed, balance = _with_weights(raw, balance_ntypes)
    balance += (("etype",) if len(raw.edges) > 1 else ("degree",)) if balance_edges else ()
    if not balance and len(raw.num_nodes) > 1 and "balance" in PARTITIONERS.get(method).honours:
        balance = ("ntype",)
    options = PartitionOptions(balance=balance, objective=cast("Any", objtype))
    if num_trainers_per_machine > 1:
        split = assign_two_levels(weighed, method, options, (num_parts, num_trainers_per_machine), seed)
        assignment, raw = split.parts, with_trainer_ids(_without_trainers(raw), split.trainers)
    else:
        assignment = PARTITIONERS.get(method)(options).assign(weighed, num_parts, seed)
    config = _written(
        Path(out_path),
        lambda folder: write_dgl_format(raw, assignment, folder, bfloat16=bfloat16, formats=graph_formats),
    )
    if num_trainers_per_machine > 1:
        _tell_trainers(g, raw)
    return _mapping(config, num_parts) if return_mapping else None


def load_partition(
    part_config: str | Path, part_id: int, load_feats: bool = True, use_graphbolt: bool = False
) -> Loaded:
    """Return (structure, node data, edge data, book, graph name, node types, edge types) of one part.

    Raises:
        ConfigError: ``use_graphbolt``, or there is no such part.
        StorageError: a file is missing or damaged.
    """
    if use_graphbolt:
        raise ConfigError("use_graphbolt=True cannot be honoured: there is one format; leave it out")
    book, name, ntypes, etypes = load_partition_book(part_config, part_id)
    graph = dgl.load_graphs(str(_file(part_config, part_id, "part_graph")))[0][0]
    nodes, edges = load_partition_feats(part_config, part_id) if load_feats else ({}, {})
    return graph, nodes or {}, edges or {}, book, name, list(ntypes), list(etypes)


def load_partition_feats(
    part_config: str | Path, part_id: int, load_nodes: bool = True, load_edges: bool = True
) -> tuple[dict[str, Tensor] | None, dict[str, Tensor] | None]:
    """Return the data of the own nodes by ``type/name`` and of the own edges by ``src:rel:dst/name``.

    None for what is not asked for.

    Raises:
        ConfigError: there is no such part.
        StorageError: a file is missing or damaged.
    """
    nodes = _tensors(part_config, part_id, "node_feats", NODE_TYPE) if load_nodes else None
    edges = _tensors(part_config, part_id, "edge_feats", ":".join(EDGE_TYPE)) if load_edges else None
    return nodes, edges


def load_partition_book(
    part_config: str | Path, part_id: int, part_metadata: None = None
) -> tuple[RangePartitionBook, str, dict[str, int], dict[EdgeType, int]]:
    """Return (book, graph name, node types by number, edge types by number); partitions are the file's.

    Args:
        part_config: DGL's JSON file.
        part_id: Whose book.
        part_metadata: None; newer versions take the content of the file, where it was read already.

    Raises:
        ConfigError: ``part_metadata``, or there is no such part.
        StorageError: the file is missing or damaged.
    """
    if part_metadata is not None:
        raise ConfigError("part_metadata cannot be honoured: part_config is read anew; leave it out")
    config = read_part_config(Path(part_config).absolute())
    ntypes = {ntype: number for number, ntype in enumerate(config.ntypes)}
    etypes = {etype: number for number, etype in enumerate(config.etypes)}
    ends = config.nodes.starts + config.nodes.counts, config.edges.starts + config.edges.counts
    nodes = {t: np.stack([config.nodes.starts[n], ends[0][n]], axis=1) for t, n in ntypes.items()}
    edges = {t: np.stack([config.edges.starts[n], ends[1][n]], axis=1) for t, n in etypes.items()}
    book = RangePartitionBook(part_id, config.num_parts, nodes, edges, ntypes, etypes)
    return book, config.name, ntypes, etypes


def _without_trainers(graph: RawGraph) -> RawGraph:
    """Return the graph without the trainers of an earlier cut, which DGL overwrites."""

    def others(data: Mapping[Any, Mapping[str, Any]]) -> dict[Any, dict[str, Any]]:
        return {
            owner: {name: rows for name, rows in columns.items() if name != TRAINER_ID}
            for owner, columns in data.items()
        }

    return replace(graph, node_data=others(graph.node_data), edge_data=others(graph.edge_data))


def _tell_trainers(g: dgl.DGLGraph, cut: RawGraph) -> None:
    """Write into ``g`` the trainer of each node and edge, int64 as DGL does."""
    for ntype in g.ntypes:
        g.nodes[ntype].data[TRAINER_ID] = torch.as_tensor(cut.node_data[ntype][TRAINER_ID]).long()
    for etype in g.canonical_etypes:
        g.edges[etype].data[TRAINER_ID] = torch.as_tensor(cut.edge_data[etype][TRAINER_ID]).long()


def _with_weights(
    graph: RawGraph, given: Tensor | Mapping[str, Tensor] | None
) -> tuple[RawGraph, tuple[str, ...]]:
    """Return the graph with a 0/1 column for each value that is balanced by itself, and their names.

    Raises:
        ConfigError: there is not one value for each node, or a type that the graph does not have.
    """
    if given is None:
        return graph, ()
    if not isinstance(given, Mapping):
        if len(graph.num_nodes) > 1:
            raise ConfigError("balance_ntypes is one tensor, for several node types; give a dict by type")
        given = {next(iter(graph.num_nodes)): given}
    unknown = sorted(given.keys() - graph.num_nodes.keys())
    if unknown:
        raise ConfigError(f"balance_ntypes has {unknown}; the node types are {', '.join(graph.num_nodes)}")
    node_data = {ntype: dict(columns) for ntype, columns in graph.node_data.items()}
    names = []
    for ntype, count in graph.num_nodes.items():
        kinds = torch.as_tensor(given[ntype]).numpy() if ntype in given else np.zeros(count, np.int64)
        if kinds.shape != (count,):
            raise ConfigError(f"balance_ntypes has shape {kinds.shape} for the {count} nodes of {ntype!r}")
        for value in np.unique(kinds):
            names.append(f"balance_ntypes.{ntype}={value}")
            node_data.setdefault(ntype, {})[names[-1]] = (kinds == value).astype(np.int64)
    return replace(graph, node_data=node_data), tuple(names)


def _written(out: Path, write: Callable[[Path], Path]) -> Path:
    """Have DGL's files written into ``out``, in the place of those of an earlier partition."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partition-", dir=out) as scratch:
        config = write(Path(scratch) / "parts")
        # The JSON file goes first and comes last: it names the others.
        (out / config.name).unlink(missing_ok=True)
        for path in sorted(config.parent.iterdir(), key=lambda one: one == config):
            target = out / path.name
            if target.is_dir():
                shutil.rmtree(target)
            path.replace(target)
    return out / config.name


def _mapping(config: Path, num_parts: int) -> tuple[Ids, Ids]:
    read = read_part_config(config.absolute())
    found = [
        [load_tensors(str(_file(config, part, "part_graph").with_name(name))) for part in range(num_parts)]
        for name in ("orig_nids.dgl", "orig_eids.dgl")
    ]
    nodes = {ntype: torch.cat([part[ntype] for part in found[0]]) for ntype in read.ntypes}
    edges = {etype: torch.cat([part[":".join(etype)] for part in found[1]]) for etype in read.etypes}
    if len(nodes) == len(edges) == 1:
        return next(iter(nodes.values())), next(iter(edges.values()))
    return nodes, edges


def _file(part_config: str | Path, part: int, kind: str) -> Path:
    path = Path(part_config).absolute()
    config = read_part_config(path)
    if not 0 <= part < config.num_parts:
        raise ConfigError(f"{path} has the parts 0 to {config.num_parts - 1}, not {part}")
    found = config.file(part, kind)
    if not found.is_file():
        raise StorageError(f"{found} is missing; copy it here or partition the graph again")
    return found


def _tensors(part_config: str | Path, part: int, kind: str, only: str) -> dict[str, Tensor]:
    """Return the tensors of a file; files of old versions leave out the only type."""
    tensors = load_tensors(str(_file(part_config, part, kind)))
    return {name if "/" in name else f"{only}/{name}": tensor for name, tensor in tensors.items()}


def node_split(
    nodes: Any,
    partition_book: RangePartitionBook | None = None,
    ntype: str = NODE_TYPE,
    rank: int | None = None,
    force_even: bool = True,
    node_trainer_ids: Any = None,
) -> Tensor:
    """Return the marked nodes that a rank works on.

    Args:
        nodes: (N,) DistTensor, tensor or array; every value but 0 marks its node.
        partition_book: Of one of the open graphs, also as read from its file; None: that of a DistTensor's
            graph, or of the only graph that is open.
        ntype: Node type.
        rank: Whose share; None: this rank's.
        force_even: Whether shares differ by at most one over all ranks.
        node_trainer_ids: (N,) rank that would like each node.

    Returns:
        (n,) int64 ids, ascending.

    Raises:
        ConfigError: there is not one value for each node, the book is of no open graph or of another than
            ``nodes``, or of several open graphs any could be meant.
    """
    g = _graph(nodes, partition_book)
    kind = node_type(g, ntype)
    mask = _mask(nodes, g, g.num_nodes(kind), kind)
    trainers = cast("Any", inner_tensor(node_trainer_ids))
    return split_nodes(mask, g.get_partition_book(), kind, rank, force_even, trainers)


def edge_split(
    edges: Any,
    partition_book: RangePartitionBook | None = None,
    etype: str | EdgeType = EDGE_TYPE[1],
    rank: int | None = None,
    force_even: bool = True,
    edge_trainer_ids: Any = None,
) -> Tensor:
    """Return the marked edges that a rank works on; as :func:`node_split`."""
    g = _graph(edges, partition_book)
    kind = edge_type(g, etype)
    mask = _mask(edges, g, g.num_edges(kind), kind)
    trainers = cast("Any", inner_tensor(edge_trainer_ids))
    return split_edges(mask, g.get_partition_book(), kind, rank, force_even, trainers)


def _mask(marked: Any, g: DistGraph, count: int, what: object) -> Any:
    """Return what ``marked`` marks, as a mask of bools.

    Raises:
        ConfigError: there is not one value for each row.
    """
    if len(marked) != count:
        raise ConfigError(f"the mask has {len(marked)} values for {count} rows of {what!r}; give one a row")
    if isinstance(marked, DistTensor):
        if marked.dtype == torch.bool:
            return marked.inner
        marked = marked.inner.to_local()
    values = as_array(marked)
    if values.dtype.kind in "iu" and count > 1 and np.array_equal(np.sort(values), np.arange(count)):
        if g.rank() == 0:
            warnings.warn(
                "all ids were given where a mask is expected; all rows are taken (DGL would leave out row 0)",
                stacklevel=3,
            )
        return np.ones(count, dtype=np.bool_)
    return values != 0


def _graph(marked: Any, given: RangePartitionBook | None) -> DistGraph:
    """Return the graph whose rows are split.

    Raises:
        ConfigError: it is not known, or the mask and the book are of different ones.
    """
    if given is not None and not isinstance(given, RangePartitionBook):
        raise ConfigError(f"partition_book is a {type(given).__name__}; give g.get_partition_book()")
    book = None if given is None else given.inner
    if not isinstance(marked, DistTensor):
        return graph_of_book(book)
    g = graph_of_book(marked.inner.part_policy.partition_book)
    if book is not None and graph_of_book(book) is not g:
        raise ConfigError(f"the mask {marked.name!r} is of the graph {g.name!r}, and the book of another")
    return g
