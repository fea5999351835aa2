"""Link prediction over time: past edges train, and future edges are ranked."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor, nn

from dglx_dist.comm.collectives import gather_int64, run_on_all_ranks
from dglx_dist.data.times import NEVER, find_moment_before, to_keys
from dglx_dist.dataloading.edge_loader import DistEdgeDataLoader
from dglx_dist.dataloading.negative import Uniform
from dglx_dist.dataloading.temporal import TemporalNeighborSampler
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_tensor import DistTensor
from dglx_dist.graph.row_kernels import view_as_numpy
from dglx_dist.graph.split import edge_split
from dglx_dist.graph.time_order import find_time_columns
from dglx_dist.options import list_names
from dglx_dist.records import FEATURE, SPLITS, TEST, TRAIN, VALIDATION, Array, EdgeType
from dglx_dist.strategies.base import open_strategy
from dglx_dist.training.config import LINK, list_metrics
from dglx_dist.training.inference import evaluating, gather_module
from dglx_dist.training.metrics import average_precision, hits_at, mrr, rank_of_positive, roc_auc
from dglx_dist.training.relational import EntityInputs
from dglx_dist.training.tasks import gather_input_rows

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph

_NUM_CANDIDATES = 50
"""Random destinations that each validation and test edge is ranked among."""


@final
class TemporalLinks:
    """Trains on edges up to a time, and evaluates later edges, for ``evaluate`` in ``FitConfig``.

    Edges up to the first of the two times are for training, later ones up to the second time for validation,
    and the others for testing. Edges without a time are in no split. Every pair is scored from edges before
    its time, so no edge in the future, at that moment, or in the batch is sampled. The destination of a
    validation or test edge is ranked among 50 random nodes, which follow from the edge's id. The results do
    not depend on the number of ranks. Every rank must construct this.

    Args:
        targets: Edge types to predict.
        time: Name of the edge column with times, which all edge types must have.
        split_times: Where the training edges end, and where the validation edges end.
        fanouts: Number of edges per node, with layer 1 first.
        inputs: Input rows that training uses. None: the node data ``feat``.
        metrics: ``mrr``, ``hits@K``, ``auc`` or ``roc_auc``, and ``average_precision``.

    Raises:
        ConfigError: On all ranks, if an edge type has no times, or no target is a training edge.
    """

    def __init__(
        self,
        *,
        g: DistGraph,
        targets: Sequence[EdgeType],
        time: str,
        split_times: Sequence[float],
        fanouts: Sequence[int],
        inputs: EntityInputs | None = None,
        metrics: Sequence[str] = (),
    ) -> None:
        self.g = g
        self.targets = targets
        self.inputs = inputs
        self.metrics = list_names(metrics) or list_metrics(LINK, ())
        self._time = time
        self._dtype = run_on_all_ranks(g.session, self._find_time_dtype, ConfigError)
        columns = {ntype: [FEATURE] for ntype in g.ntypes}
        if inputs is not None:
            columns = {ntype: [inputs.feature] for ntype in inputs.feature_widths}
        self._sampler = TemporalNeighborSampler(list(fanouts), time, prefetch_node_feats=columns)

        self._edges: dict[str, dict[EdgeType, Tensor]] = {}
        for split, (start, end) in zip(SPLITS, pairwise([-np.inf, *split_times, np.inf]), strict=True):
            self._edges[split] = {etype: self._find_edges(etype, split, start, end) for etype in targets}
        num_owned = [sum(map(len, edges.values())) for edges in self._edges.values()]
        num_edges = gather_int64(num_owned, g.session).sum(axis=0)
        self._num_edges = dict(zip(SPLITS, num_edges, strict=True))
        if not self._num_edges[TRAIN]:
            raise ConfigError(
                f"no edge has a time up to {split_times[0]}, so there is none to train on. Choose a later "
                "first time of --split-time."
            )

        self._loaders: dict[str, DistEdgeDataLoader] = {}

    def train_loader(
        self, g: DistGraph, targets: Sequence[EdgeType], *, batch_size: int, negatives: int, **options: Any
    ) -> Any:
        """Return a loader over training edges and their negatives. Every rank must call this.

        Destinations are replaced, and sources too if both ends have one type in all targets. ``g`` and
        ``targets`` are this object's. ``options`` are for :class:`DistEdgeDataLoader`.
        """
        replaces_sources = all(etype[0] == etype[2] for etype in targets)
        sampler = Uniform(negatives, "both" if replaces_sources else "tail")
        options |= {"batch_size": batch_size, "shuffle": True}
        return open_strategy(g).edge_loader(**self._describe_loader(TRAIN, sampler), **options)

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Return ``val_mrr``, ``test_mrr`` and so on. Every rank must call this."""
        module: Any = gather_module(model)
        metrics: dict[str, float] = {}
        for split in (VALIDATION, TEST):
            if not self._num_edges[split]:
                continue
            if split not in self._loaders:
                candidates = Uniform(_NUM_CANDIDATES, "tail")
                options = self._describe_loader(split, candidates)
                self._loaders[split] = DistEdgeDataLoader(self.g, **options, batch_size=256)
            with evaluating(module):
                positive, negative = self._score(module, self._loaders[split])
            for name in self.metrics:
                value = self._compute_metric(name, positive, negative)
                metrics[f"{split.removesuffix('_mask')}_{name}"] = value
        return metrics

    def _find_time_dtype(self) -> str:
        """Return the times' dtype. Raise ConfigError if an edge type has none."""
        columns = find_time_columns(self.g.dataset.manifest, self._time, None)
        missing = [etype for etype in self.g.canonical_etypes if etype not in columns.edges]
        if missing:
            raise ConfigError(
                f"edges of {', '.join(map(str, missing))} have no times {self._time!r}, so models would see "
                "those of the future. Add the column to all edge types, and partition again."
            )
        return columns.dtype

    def _read_times(self, etype: EdgeType, ids: Array) -> Array:
        times = self.g.edges[etype].data[self._time][torch.from_numpy(ids)]
        return view_as_numpy(times).astype(self._dtype)

    def _find_edges(self, etype: EdgeType, split: str, start: float, end: float) -> Tensor:
        """Return the ids for this rank's share of the edges later than ``start``, up to ``end``."""
        policy = self.g.get_edge_partition_policy(etype)

        def mark_rows(_shape: tuple[int, ...], _dtype: torch.dtype) -> Tensor:
            first = int(policy.bounds[policy.part_id])
            last = int(policy.bounds[policy.part_id + 1])
            times = self._read_times(etype, np.arange(first, last))
            is_marked = (to_keys(times) != NEVER) & (times > start) & (times <= end)
            return torch.from_numpy(is_marked)

        name = f"{split} by {self._time}"
        mask = DistTensor((self.g.num_edges(etype),), torch.bool, name, mark_rows, policy, graph=self.g)
        ids = edge_split(mask, self.g.get_partition_book(), etype)
        mask.delete()
        return ids

    def _describe_loader(self, split: str, negatives: Uniform) -> dict[str, Any]:
        """Return the arguments for a split's loader."""
        edges = self._edges[split]
        # With the moment before its time, an edge sees neither itself nor its opposite edge, nor any edge at
        # that moment.
        seed_times = {}
        for etype, ids in edges.items():
            seed_times[etype] = find_moment_before(self._read_times(etype, ids.numpy()))
        return {
            "eids": edges,
            "sampler": self._sampler,
            "seed_time": seed_times,
            "negative_sampler": negatives,
        }

    def _score(self, module: Any, loader: DistEdgeDataLoader) -> tuple[Tensor, Tensor]:
        """Return (Q,) scores for this rank's edges, and (Q, K) scores for their candidates."""
        positives = [torch.empty(0)]
        negatives = [torch.empty(0, _NUM_CANDIDATES)]

        # All evaluations rank the same candidates from the same trees.
        loader.set_epoch(0)
        for _, pairs, negative_pairs, blocks in loader:  # type: ignore[misc]  # there are negatives
            rows = gather_input_rows(module, blocks[0], FEATURE, self.inputs)
            positive, negative = module(blocks, rows, pairs, negative_pairs)
            positives.append(positive.cpu().float())
            negatives.append(negative.cpu().float().view(-1, _NUM_CANDIDATES))
        return torch.cat(positives), torch.cat(negatives)

    def _compute_metric(self, name: str, positive: Tensor, negative: Tensor) -> float:
        """Compute a metric from the edges' (Q,) scores and their candidates' (Q, K) scores."""
        session = self.g.session
        if name in ("auc", "roc_auc", "average_precision"):
            compute_metric = average_precision if name == "average_precision" else roc_auc
            # Each edge is compared with its first candidate.
            scores = torch.cat([positive, negative[:, 0]])
            labels = torch.cat([torch.ones(len(positive)), torch.zeros(len(positive))]).long()
            return compute_metric(scores, labels, session)
        ranks = run_on_all_ranks(session, lambda: rank_of_positive(positive, negative), ConfigError)
        if name == "mrr":
            return mrr(ranks, session)
        return hits_at(int(name.removeprefix("hits@")), ranks, session)
