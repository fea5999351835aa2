"""Batches of PyTorch Geometric from the blocks of a loader."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, final

import dgl
import torch
from dgl.dataloading import LaborSampler, NeighborSampler
from dgl.heterograph import DGLBlock
from torch import Tensor

from dglx_dist.dataloading.minibatch import NodeIds
from dglx_dist.dataloading.sampler_spec import Names, read_column_names
from dglx_dist.errors import ConfigError
from dglx_dist.records import FEATURE, LABEL, EdgeType

HopEdges: TypeAlias = list[tuple[Tensor, Tensor]]
"""Edges of each hop: (2, E) rows of their ends, and (E,) edge ids."""


@final
class PygConverter:
    """Turns ``(input_nodes, output_nodes, blocks)`` into a ``Data`` or ``HeteroData`` like NeighborLoader's.

    Every node is expanded once, in the hop after the one that reached it first. Blocks draw the in-edges of a
    node again in every further hop, and these edges are left out. Rows are in the order of the hops, so the
    seeds come first.

    Args:
        sampler: Sampler of the loader.
        seed_types: Node types of the seeds.

    Raises:
        ConfigError: torch_geometric is not installed, or the sampler has no such batches.
    """

    def __init__(self, sampler: Any, seed_types: Iterable[str]) -> None:
        if not isinstance(sampler, NeighborSampler | LaborSampler):
            raise ConfigError(
                f"output='pyg' does not support {type(sampler).__name__}, because its batches are no hops of "
                "neighbours. Use NeighborSampler, MultiLayerFullNeighborSampler or LaborSampler."
            )
        if sampler.prefetch_edge_feats:
            raise ConfigError(
                f"output='pyg' has no edge columns, but prefetch_edge_feats={sampler.prefetch_edge_feats!r}. "
                "Leave it out and read the columns by batch.e_id: g.edata[name][batch.e_id]."
            )
        try:
            from torch_geometric.data import Data, HeteroData
        except ImportError as error:
            raise ConfigError(
                f"output='pyg' needs PyTorch Geometric ({error}). Run `pip install torch_geometric`."
            ) from error
        self._data_type, self._hetero_type = Data, HeteroData
        self._seed_types = tuple(seed_types)
        self._features = read_column_names(sampler.prefetch_node_feats, "prefetch_node_feats")
        self._labels = read_column_names(sampler.prefetch_labels, "prefetch_labels")

    def __call__(self, batch: tuple[NodeIds, NodeIds, Sequence[DGLBlock]]) -> Any:
        """Return the batch of PyTorch Geometric. Its tensors are on the device of the blocks."""
        input_nodes, _, blocks = batch
        rows, edges = merge_hops(blocks)
        is_homogeneous = len(edges) == len(rows) == 1
        data = self._data_type() if is_homogeneous else self._hetero_type()
        for ntype, rows_of_hop in rows.items():
            store = data if is_homogeneous else data[ntype]
            kept = torch.cat(rows_of_hop)
            ids = input_nodes[ntype] if isinstance(input_nodes, Mapping) else input_nodes
            store.n_id = ids[kept]
            store.num_nodes = len(kept)
            store.num_sampled_nodes = [len(rows) for rows in rows_of_hop]
            source, seeds = blocks[0].srcnodes[ntype].data, blocks[-1].dstnodes[ntype].data
            for name, attribute in _name_columns(_select(self._features, ntype), FEATURE, "x").items():
                store[attribute] = source[name][kept]
            for name, attribute in _name_columns(_select(self._labels, ntype), LABEL, "y").items():
                store[attribute] = seeds[name]
            if ntype in self._seed_types:
                store.batch_size = len(rows_of_hop[0])
        for etype, edges_of_hop in edges.items():
            store = data if is_homogeneous else data[etype]
            store.edge_index = torch.cat([ends for ends, _ in edges_of_hop], 1)
            store.e_id = torch.cat([ids for _, ids in edges_of_hop])
            store.num_sampled_edges = [len(ids) for _, ids in edges_of_hop]
        return data


def open_converter(opened: Any, indices: Any, sampler: Any, options: dict[str, Any]) -> PygConverter | None:
    """Return the function that converts batches, or None for blocks. Removes ``output`` from ``options``.

    ``opened`` is the open strategy. Raises ConfigError if it does not train layers of other libraries, or if
    the sampler or the options have no such batches.
    """
    output = options.pop("output", "dgl")
    if output == "dgl":
        return None
    if output != "pyg":
        raise ConfigError(f"output={output!r} must be 'dgl' or 'pyg'")
    if not opened.strategy.traits.any_layers:
        raise ConfigError(
            f"strategy {opened.session.strategy!r} trains layers of DGL, not of PyTorch Geometric. "
            "Leave out output='pyg', or use strategy='data_parallel'."
        )
    if options.get("disjoint"):
        raise ConfigError("output='pyg' has no trees of single seeds. Leave out disjoint=True.")
    return PygConverter(sampler, indices if isinstance(indices, Mapping) else opened.g.ntypes)


def merge_hops(blocks: Sequence[DGLBlock]) -> tuple[dict[str, list[Tensor]], dict[EdgeType, HopEdges]]:
    """Return the rows of the input nodes that each hop reaches first, and the edges of each hop.

    ``blocks`` have the input-most first. The ends of an edge are positions in the joined rows of their type.
    """
    first, device = blocks[0], blocks[0].device
    rows: dict[str, list[Tensor]] = {ntype: [] for ntype in first.srctypes}
    # Position of each row of the input nodes in the batch, or -1 before a hop has reached it.
    positions = {
        ntype: torch.full((first.num_src_nodes(ntype),), -1, dtype=torch.int64, device=device)
        for ntype in rows
    }
    counts = dict.fromkeys(rows, 0)

    def add_rows(ntype: str, new: Tensor) -> None:
        positions[ntype][new] = torch.arange(len(new), device=device) + counts[ntype]
        counts[ntype] += len(new)
        rows[ntype].append(new)

    for ntype in rows:
        add_rows(ntype, torch.arange(blocks[-1].num_dst_nodes(ntype), device=device))
    edges: dict[EdgeType, HopEdges] = {etype: [] for etype in first.canonical_etypes}
    expanded = dict.fromkeys(rows, 0)
    for block in reversed(blocks):
        reached: dict[str, list[Tensor]] = {ntype: [rows[ntype][0][:0]] for ntype in rows}
        kept = {}
        for etype in edges:
            # The destinations of a block are the first of its sources, so both are rows of the input nodes.
            sources, destinations = (ends.long() for ends in block.edges(etype=etype))
            is_kept = positions[etype[2]][destinations] >= expanded[etype[2]]
            kept[etype] = sources[is_kept], destinations[is_kept], block.edges[etype].data[dgl.EID][is_kept]
            reached[etype[0]].append(kept[etype][0])
        expanded = dict(counts)
        for ntype, sources_by_etype in reached.items():
            sources = torch.cat(sources_by_etype)
            add_rows(ntype, torch.unique(sources[positions[ntype][sources] < 0]))
        for etype, (sources, destinations, ids) in kept.items():
            ends = torch.stack([positions[etype[0]][sources], positions[etype[2]][destinations]])
            edges[etype].append((ends, ids))
    return rows, edges


def _select(names: Names, ntype: str) -> tuple[str, ...]:
    """Return the names of the columns of a node type."""
    return names.get(ntype, ()) if isinstance(names, Mapping) else names


def _name_columns(names: Sequence[str], usual: str, attribute: str) -> dict[str, str]:
    """Return the attribute of each column. The only one, or the one with the usual name, is ``attribute``."""
    return {name: attribute if name == usual or len(names) == 1 else name for name in names}
