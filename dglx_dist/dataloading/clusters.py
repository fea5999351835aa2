"""A sampler that batches clusters of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn, final

import numpy as np
import torch
from dgl.dataloading import Sampler

from dglx_dist.comm.collectives import check_equal, gather_arrays, gather_int64, run_on_all_ranks
from dglx_dist.data.partition.base import PARTITIONERS, Partitioner, PartitionOptions, default_partitioner
from dglx_dist.dataloading.sampler_spec import read_column_names
from dglx_dist.errors import ConfigError
from dglx_dist.graph.row_kernels import view_as_numpy
from dglx_dist.graph.structure import Structure, all_in_edges
from dglx_dist.options import check_integer
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Array, RawGraph

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


@final
class ClusterGCNSampler(Sampler):
    """Clusters in a graph. Batches are the subgraphs that clusters induce (Chiang et al., KDD 2019).

    This is ``dgl.dataloading.ClusterGCNSampler`` for a distributed graph with one node and one edge type. The
    constructor is collective. Every part is cut into clusters with about the same number of nodes. So a
    cluster's nodes are on one server, and clusters do not depend on the number of ranks. Pass a loader its
    rank's cluster ids: ``dx.DataLoader(g, sampler.split(), sampler)``. It yields one DGLGraph for
    ``batch_size`` clusters, with the edges between them. Edges to other nodes are missing, so training is not
    exact.

    Args:
        k: Number of clusters, at least one for each part of the dataset.
        train_mask: Name of the bool column that marks the nodes which the loop's loss is a mean over. Their
            counts weight the ranks' gradients. None: the loss is over all nodes in a batch.
        method: Partitioner name, as for ``dglx partition``.
        seed: Random seed for the partitioner.
        prefetch_ndata, prefetch_edata: Names of the columns to attach to a batch.

    Raises:
        ConfigError: the graph has several types, ``k`` is too small, or a column does not exist.
    """

    def __init__(
        self,
        g: DistGraph,
        k: int,
        *,
        train_mask: str | None = "train_mask",
        method: str | None = None,
        seed: int = 0,
        prefetch_ndata: Sequence[str] = (),
        prefetch_edata: Sequence[str] = (),
    ) -> None:
        super().__init__()

        def cut() -> tuple[Array, Array, Array]:
            self.prefetch_ndata = read_column_names(prefetch_ndata, "prefetch_ndata")
            self.prefetch_edata = read_column_names(prefetch_edata, "prefetch_edata")
            options = PartitionOptions()
            partitioner = PARTITIONERS.get(method or default_partitioner(options))(options)
            num_clusters = check_integer("k", k, least=1)
            return _cut_parts(g, num_clusters, train_mask, partitioner, check_integer("seed", seed, least=0))

        own_clusters, own_targets, servers = run_on_all_ranks(g.session, cut, ConfigError)
        check_equal(g.session, "the clusters", f"k={k}, {train_mask=}, {method=}, {seed=}")
        self.folder = g.dataset.folder
        """The dataset's folder."""

        # Every part is cut by one rank, and the other ranks have zeros there.
        clusters = np.zeros(g.num_nodes(), np.int32)
        for part_clusters in gather_arrays(own_clusters, g.session):
            clusters[part_clusters[:, 0]] = part_clusters[:, 1]
        self.num_targets = gather_int64(own_targets, g.session).sum(axis=0)
        """(k,) int64 target count in each cluster."""
        self._server_of_cluster = servers
        self._topology = g.session.topology

        # Cluster c has nodes[starts[c]:starts[c + 1]], in ascending order.
        self._nodes = np.argsort(clusters, kind="stable")
        self._starts = np.concatenate([[0], np.cumsum(np.bincount(clusters, minlength=k))])

    def __len__(self) -> int:
        return len(self._starts) - 1

    def split(self) -> torch.Tensor:
        """Return this rank's int64 cluster ids, which are its share of the server's clusters."""
        of_server = np.flatnonzero(self._server_of_cluster == self._topology.server)
        num_ranks = len(self._topology.ranks_of_server(self._topology.server))
        return torch.from_numpy(of_server[self._topology.local_rank :: num_ranks])

    def nodes(self, clusters: Array) -> Array:
        """Return the int64 node ids in ``clusters``."""
        pieces = [self._nodes[self._starts[c] : self._starts[c + 1]] for c in clusters.tolist()]
        return np.concatenate([np.empty(0, np.int64), *pieces])

    def sample(self, g: Any, indices: Any) -> NoReturn:
        """Raise ConfigError, because only this package's loaders sample clusters."""
        raise ConfigError(
            f"ClusterGCNSampler does not sample {type(g).__name__} itself. Pass it to dx.DataLoader."
        )


def _cut_parts(
    g: DistGraph, k: int, train_mask: str | None, partitioner: Partitioner, seed: int
) -> tuple[Array, Array, Array]:
    """Cut this rank's parts into clusters. This function calls no other rank.

    Returns:
        (n, 2) int64 nodes and their clusters, (k,) target counts in this rank's clusters, and the (k,)
        servers of all clusters.
    """
    if not g.is_homogeneous:
        raise ConfigError("ClusterGCNSampler supports one node type and one edge type, as in DGL.")
    if train_mask is not None and train_mask not in g.ndata:
        raise ConfigError(
            f"train_mask={train_mask!r} is no column of g.ndata ({', '.join(g.ndata)}). Pass the name of the "
            "mask of the loss, or None if the loss is over all nodes."
        )

    bounds = g.dataset.manifest.node_offsets[g.ntypes[0]]
    first_clusters = _share_clusters(k, np.diff(bounds))
    topology = g.session.topology
    pieces = [np.empty((0, 2), np.int64)]
    targets = np.zeros(k, np.int64)
    servers = np.zeros(k, np.int64)
    for part, (first, end) in enumerate(pairwise(bounds.tolist())):
        first_cluster, end_cluster = first_clusters[part : part + 2].tolist()
        server = int(g.placement.server_of_part[part])
        servers[first_cluster:end_cluster] = server
        ranks = topology.ranks_of_server(server)
        if topology.rank != ranks[part % len(ranks)] or first == end:
            continue

        graph = _read_part(g.structure(), first, end)
        assignment = partitioner.assign(graph, end_cluster - first_cluster, seed)
        clusters = first_cluster + assignment.part_of[NODE_TYPE].astype(np.int64)
        nodes = np.arange(first, end)
        pieces.append(np.stack([nodes, clusters], axis=1))
        if train_mask is not None:
            clusters = clusters[_read_mask(g, train_mask, nodes)]
        targets += np.bincount(clusters, minlength=k)

    return np.concatenate(pieces), targets, servers


def _read_mask(g: DistGraph, name: str, nodes: Array) -> Array:
    """Return a mask's (n,) bool values at ``nodes``. Raise ConfigError if the column is not a mask."""
    values = view_as_numpy(g.ndata[name][torch.from_numpy(nodes)])
    if values.ndim != 1 or not np.isin(values, [0, 1]).all():
        raise ConfigError(
            f"train_mask={name!r} has the dtype {values.dtype} and rows of shape {values.shape[1:]}, but a "
            "mask has one value per node, True or False. Name another column."
        )
    return values.astype(bool)


def _share_clusters(k: int, part_sizes: Array) -> Array:
    """Divide k clusters among the parts by node count. Return the parts' (P + 1,) int64 first clusters."""
    is_used = part_sizes > 0
    num_used = int(is_used.sum())
    if k < num_used:
        raise ConfigError(
            f"k={k}, but the dataset has {num_used} parts, and a cluster is within a part. Use more clusters."
        )

    # Each part with nodes gets one cluster. The remaining clusters are shared by rounding the running total.
    ends = np.cumsum(part_sizes) * (k - num_used) // max(int(part_sizes.sum()), 1)
    return np.concatenate([[0], ends + np.cumsum(is_used)])


def _read_part(structure: Structure, first: int, end: int) -> RawGraph:
    """Return one part's nodes ``first`` to ``end`` and the edges between them, renumbered from 0."""
    shard = next(s for s in structure.shards if s.first_node <= first and end <= s.last_node)
    edges = all_in_edges(shard, np.arange(first, end))
    destinations = np.repeat(np.arange(end - first), np.diff(edges.indptr))
    is_inside = (edges.sources >= first) & (edges.sources < end)
    ends = edges.sources[is_inside] - first, destinations[is_inside]
    return RawGraph(name="part", num_nodes={NODE_TYPE: end - first}, edges={EDGE_TYPE: ends})
