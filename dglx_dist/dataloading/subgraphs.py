"""Batches that are induced subgraphs: around sampled neighborhoods (ShaDow), or on clusters (Cluster-GCN)."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, cast, final

import dgl
import numpy as np
import torch
from dgl.dataloading import ShaDowKHopSampler

from dglx_dist.comm.collectives import gather_arrays, run_on_all_ranks
from dglx_dist.dataloading.clusters import ClusterGCNSampler
from dglx_dist.dataloading.feature_fetch import NO_ROWS, Columns, get_edge_ids, submit_columns
from dglx_dist.dataloading.kernels import RawBatch
from dglx_dist.dataloading.loader import (
    open_columns,
    open_maker,
    open_neighborhood_maker,
    read_excluded_edges,
)
from dglx_dist.dataloading.minibatch import (
    Excluded,
    MiniBatch,
    NodeMaker,
    Seeds,
    seeds_to_node_ids,
    wait_for_columns,
)
from dglx_dist.dataloading.sampler_spec import SamplePlan, read_column_names, read_sampler_fanouts
from dglx_dist.dataloading.step_loader import (
    Items,
    LoaderOptions,
    StepLoader,
    read_items,
    read_loader_options,
    resolve_seed,
)
from dglx_dist.errors import ConfigError
from dglx_dist.graph.partition_book import Ids
from dglx_dist.records import StepShare

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


_CLUSTER = "cluster"
"""Type that the items of a cluster loader have."""


class _SubgraphMaker(NodeMaker):
    """Stages for batches that are induced subgraphs. A subclass finds the nodes for a batch."""

    def __init__(self, g: DistGraph, columns: Columns, exclude: Excluded) -> None:
        super().__init__(g, columns)
        self._in_edges = open_neighborhood_maker(g, 1, exclude=exclude)

    @abstractmethod
    def find_nodes(self, batch: MiniBatch, epoch: int, step: int) -> Seeds:
        """Return the distinct nodes in ``batch`` by type."""

    def sample_blocks(self, batch: MiniBatch, epoch: int, exclude: Excluded, *, step: int) -> None:
        begin = time.perf_counter()
        batch.sources = self.find_nodes(batch, epoch, step)

        neighborhood = self._in_edges.sample_items(batch.sources, epoch, step=step)
        assert neighborhood.raw is not None
        batch.blocks = [self._build_graph(neighborhood.raw, batch.sources)]
        batch.input_nodes = seeds_to_node_ids(batch.sources, self._g.ntypes)
        batch.output_nodes = seeds_to_node_ids(batch.seeds, self._g.ntypes)
        batch.sample_s = time.perf_counter() - begin

    def _build_graph(self, raw: RawBatch, nodes: Seeds) -> dgl.DGLGraph:
        """Build the graph with all edges in ``raw`` between ``nodes``, with their ids as columns."""
        counts = {ntype: len(nodes.get(ntype, ())) for ntype in self._g.ntypes}
        edges = {}
        edge_ids = {}
        first_offset = 0
        for etype, (first, last) in zip(self._g.canonical_etypes, pairwise(raw.edge_ends), strict=True):
            num_destinations = counts[etype[2]]
            indptr = raw.indptr[first_offset : first_offset + num_destinations + 1]
            destinations = np.repeat(np.arange(num_destinations), np.diff(indptr))
            sources = raw.sources[first:last]
            # The kernels number the given nodes first, so larger numbers are nodes from outside.
            is_inside = sources < counts[etype[0]]
            edges[etype] = torch.from_numpy(sources[is_inside]), torch.from_numpy(destinations[is_inside])
            edge_ids[etype] = torch.from_numpy(raw.edge_ids[first:last][is_inside])
            first_offset += num_destinations + 1

        graph = dgl.heterograph(edges, num_nodes_dict=counts)
        for ntype in counts:
            graph.nodes[ntype].data[dgl.NID] = torch.from_numpy(nodes.get(ntype, NO_ROWS))
        for etype, ids in edge_ids.items():
            graph.edges[etype].data[dgl.EID] = ids
        graph.has_layer_rows = True
        return graph

    def fetch(self, batch: MiniBatch) -> None:
        begin = time.perf_counter()
        edges = [get_edge_ids(block) for block in batch.blocks]
        batch.finish_pull = submit_columns(self._g.kvstore, self._columns, batch.sources, {}, edges)
        batch.fetch_s = time.perf_counter() - begin

    def build(self, batch: MiniBatch) -> None:
        wait_for_columns(batch)

    def offline(self) -> NoReturn:
        raise ConfigError(
            "subgraphs are made by their own rank only. Use dgl.dataloading.NeighborSampler with strategy "
            "'auto'."
        )

    def deliver(self, batch: MiniBatch, share: StepShare) -> Any:
        self.finish(batch, share)
        return batch.input_nodes, batch.output_nodes, batch.blocks[0]


@final
class _ShaDowMaker(_SubgraphMaker):
    """Stages for batches from :class:`dgl.dataloading.ShaDowKHopSampler`."""

    def __init__(self, g: DistGraph, columns: Columns, exclude: Excluded, neighborhoods: NodeMaker) -> None:
        super().__init__(g, columns, exclude)
        self._neighborhoods = neighborhoods

    def find_nodes(self, batch: MiniBatch, epoch: int, step: int) -> Seeds:
        return self._neighborhoods.sample_items(batch.seeds, epoch, step=step).sources


@final
class _ClusterMaker(_SubgraphMaker):
    """Stages for batches from :class:`ClusterGCNSampler`."""

    def __init__(
        self, g: DistGraph, columns: Columns, exclude: Excluded, sampler: ClusterGCNSampler, items: Items[str]
    ) -> None:
        super().__init__(g, columns, exclude)
        self._sampler = sampler
        self._items_by_rank = gather_arrays(items.ids[_CLUSTER], g.session)
        self._count_of_step: Any = None

    def begin(self, loader: StepLoader[str, MiniBatch, Any], epoch: int, steps: Any) -> _ClusterMaker:
        stages = cast("_ClusterMaker", super().begin(loader, epoch, steps))
        orders = []
        for rank, ids in enumerate(self._items_by_rank):
            orders.append(loader.order_items(epoch, Items(ids={_CLUSTER: ids}), rank))

        def count(step: int) -> list[int]:
            return [int(self._sampler.num_targets[order(step)[_CLUSTER]].sum()) for order in orders]

        stages._count_of_step = count
        return stages

    def find_nodes(self, batch: MiniBatch, epoch: int, step: int) -> Seeds:
        counts = self._count_of_step(step)
        batch.target_counts = counts[self._g.session.topology.rank], sum(counts)
        ntype = self._g.ntypes[0]
        nodes = self._sampler.nodes(batch.seeds[_CLUSTER])
        batch.seeds = {ntype: nodes}
        return batch.seeds

    def deliver(self, batch: MiniBatch, share: StepShare) -> Any:
        num_local, num_global = batch.target_counts
        share = replace(share, num_local=num_local, num_global=num_global)
        self._g.session.step_share = share
        self.finish(batch, share)
        return batch.blocks[0]


SubgraphSampler: TypeAlias = ShaDowKHopSampler | ClusterGCNSampler


@final
class SubgraphLoader(StepLoader[str, MiniBatch, Any]):
    """Iterates over subgraphs that node sets induce in a distributed graph, with one type or several.

    The constructor is collective, and iteration is not. With ``ShaDowKHopSampler`` it yields ``(input_nodes,
    output_nodes, graph)``. The output nodes are the first nodes of ``graph``. A batch's nodes depend only on
    the random seed, the epoch and its seed nodes, and not on the number of ranks. With
    :class:`ClusterGCNSampler` it yields ``graph``. A rank that has run out of seeds gets a graph without
    nodes.

    Every batch fetches all in-edges of its nodes, 24 bytes per in-edge of a remote node. It then drops
    in-edges from nodes outside the batch.

    Args:
        indices: This rank's seeds, see :class:`dglx_dist.dataloading.loader.DataLoader`, or (K,) clusters.
        options: Fields of :class:`LoaderOptions`, except ``disjoint`` and ``seed_time``.

    Raises:
        ConfigError: on all ranks, if an option is unsupported or a seed is repeated on one rank, or if the
            ranks differ in ``batch_size`` or ``drop_last``.
        IndexError: a seed does not exist. The other ranks raise ConfigError.
    """

    def __init__(
        self, g: DistGraph, indices: Ids | Mapping[str, Ids], sampler: SubgraphSampler, **options: Any
    ) -> None:
        def read_arguments() -> tuple[LoaderOptions, SamplePlan, Columns, Items[str], Excluded]:
            loader_options = read_loader_options(options)
            if loader_options.disjoint or loader_options.seed_time is not None:
                raise ConfigError(
                    "disjoint= and seed_time= are for neighbor samplers. Leave them out with "
                    f"{type(sampler).__name__}."
                )
            _check_sampler(sampler, g)
            plan = _read_plan(sampler)
            counts = {ntype: g.num_nodes(ntype) for ntype in g.ntypes}
            item = "node"
            if isinstance(sampler, ClusterGCNSampler):
                counts = {_CLUSTER: len(sampler)}
                item = _CLUSTER
            columns = open_columns(g, plan, loader_options)
            items = read_items(indices, counts, item)
            return loader_options, plan, columns, items, read_excluded_edges(g, loader_options.exclude)

        arguments = run_on_all_ranks(g.session, read_arguments, ConfigError)
        loader_options, plan, columns, items, exclude = arguments
        maker: NodeMaker
        if isinstance(sampler, ClusterGCNSampler):
            maker = _ClusterMaker(g, columns, exclude, sampler, items)
        else:
            random_seed = resolve_seed(loader_options, g.session)
            draws = replace(plan, node_feats=(), edge_feats=())
            neighborhoods = open_maker(g, sampler, draws, loader_options, random_seed)
            maker = _ShaDowMaker(g, columns, exclude, neighborhoods)
        super().__init__(g.session, items, loader_options, maker)


def _check_sampler(sampler: SubgraphSampler, g: DistGraph) -> None:
    """Raise ConfigError if clusters belong to another graph, or a subclass overrides the sampling."""
    if isinstance(sampler, ClusterGCNSampler):
        if sampler.folder != g.dataset.folder:
            raise ConfigError(
                f"the clusters belong to the graph {sampler.folder}, but the loader has {g.dataset.folder}. "
                "Make the sampler from the loader's graph."
            )
    elif type(sampler).sample is not ShaDowKHopSampler.sample:
        raise ConfigError(
            f"{type(sampler).__qualname__} overrides sample(), and its own code works on graphs of one "
            "process only. Pass ShaDowKHopSampler itself."
        )


def _read_plan(sampler: SubgraphSampler) -> SamplePlan:
    """Return how ``sampler`` draws, and the columns that it attaches."""
    if isinstance(sampler, ClusterGCNSampler):
        return SamplePlan(fanouts=None, node_feats=sampler.prefetch_ndata, edge_feats=sampler.prefetch_edata)
    return SamplePlan(
        fanouts=read_sampler_fanouts(sampler.fanouts),
        replace=bool(sampler.replace),
        weights=sampler.prob,
        node_feats=read_column_names(sampler.prefetch_node_feats, "prefetch_node_feats"),
        edge_feats=read_column_names(sampler.prefetch_edge_feats, "prefetch_edge_feats"),
    )
