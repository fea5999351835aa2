"""Link prediction: ranking losses, the split of edges, decoders, the model, and exact filtered ranking."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, final
from weakref import WeakKeyDictionary

import dgl
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dglx_dist.comm.collectives import gather_arrays, gather_int64, run_on_all_ranks
from dglx_dist.dataloading.edge_loader import gather_pair_rows, merge_pairs
from dglx_dist.dataloading.negative import Uniform
from dglx_dist.errors import ConfigError
from dglx_dist.graph.analysis import NO_REVERSE, reverse_edge_ids
from dglx_dist.graph.dist_tensor import DistTensor
from dglx_dist.graph.partition_book import resolve_etype
from dglx_dist.graph.split import edge_split
from dglx_dist.keyed_random import hash_ids, splitmix64, stream_key
from dglx_dist.options import list_names
from dglx_dist.records import FEATURE, SPLITS, TEST, TRAIN, VALIDATION, Array, EdgeType, format_type
from dglx_dist.strategies.base import open_strategy
from dglx_dist.training.config import LINK, list_metrics
from dglx_dist.training.inference import evaluating, gather_module, layerwise_inference, split_range
from dglx_dist.training.metrics import (
    AfterRanking,
    KnownEdges,
    average_precision,
    hits_at,
    mrr,
    rank_of_answer,
    roc_auc,
)
from dglx_dist.training.models import SymmetricConv
from dglx_dist.training.relational import EntityInputs

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph

log = logging.getLogger(__name__)

PairLoss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Maps (P,) scores of edges and (P, K) scores of their negatives to the mean loss over the edges."""


def bpr_loss(positive: Tensor, negative: Tensor) -> Tensor:
    """Return the mean of ``-log sigmoid(s - s')`` over edges and their negatives (Rendle et al. 2009)."""
    return F.softplus(negative - positive[:, None]).mean()


def softmax_loss(positive: Tensor, negative: Tensor) -> Tensor:
    """Return the mean cross-entropy of an edge among itself and its negatives (sampled softmax)."""
    scores = torch.cat([positive[:, None], negative], 1)
    return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.int64, device=scores.device))


PAIR_LOSSES: Mapping[str, PairLoss | None] = {"bce": None, "bpr": bpr_loss, "softmax": softmax_loss}
"""Name to the ``pair_loss`` of :class:`dglx_dist.training.tasks.LinkPrediction`."""

_SHARES = (0.8, 0.9)
"""Training edges end at the first share, validation edges at the second."""
_GENERATED_MASKS: WeakKeyDictionary[DistGraph, set[EdgeType]] = WeakKeyDictionary()
"""Edge types with masks from :func:`split_edges`."""
_TYPE_SHIFT = np.int64(44)
"""Number of bits of a node id in the key of a pair."""
_REVERSED = ("{}-rev", "rev-{}", "{}_rev", "rev_{}", "reverse_{}")
"""Names of an edge type in the opposite direction."""


def _has_name_of_reverse(candidate: EdgeType, etype: EdgeType) -> bool:
    swapped = (candidate[0], candidate[2]) == (etype[2], etype[0])
    return swapped and any(form.format(etype[1]) == candidate[1] for form in _REVERSED)


def find_reverse_types(g: DistGraph, targets: Sequence[EdgeType]) -> dict[EdgeType, list[EdgeType]]:
    """Return the types of the reverse edges of each target, whatever their names. Every rank must call this.

    A type between the swapped node types is one if its name says so, such as ``NAME-rev``, or if most edges
    of the smaller of both types are reverse edges of the other. Two targets of one node type are compared by
    name only, because a knowledge graph has too many pairs. A warning names types with fewer such edges.
    """
    reverse_types: dict[EdgeType, list[EdgeType]] = {etype: [] for etype in targets}
    for etype in targets:
        for candidate in g.canonical_etypes:
            if (candidate[0], candidate[2]) != (etype[2], etype[0]) or candidate == etype:
                continue
            if _has_name_of_reverse(candidate, etype) or _has_name_of_reverse(etype, candidate):
                reverse_types[etype].append(candidate)
            elif candidate not in targets or candidate[0] != candidate[2]:
                reverse_ids = reverse_edge_ids(g, etype, reverse_etype=candidate)
                own_ids = reverse_ids[slice(*g.get_edge_partition_policy(etype).owned_range)]
                matched = int(gather_int64([int((own_ids != NO_REVERSE).sum())], g.session).sum())
                if 2 * matched > min(g.num_edges(etype), g.num_edges(candidate)):
                    reverse_types[etype].append(candidate)
                elif matched and g.session.topology.rank == 0:
                    names = map(format_type, (candidate, etype))
                    log.warning(
                        "only %d edges of %s are reverse edges of %s. Batches keep them.", matched, *names
                    )
    return reverse_types


def link_targets(g: DistGraph, names: Sequence[str] = ()) -> list[EdgeType]:
    """Return the edge types to predict, by name or as ``source:name:destination``.

    Without names, these are the types that do not have the name of a reverse type, such as ``NAME-rev``. A
    graph with several node types must have exactly one such type. Raises ConfigError if there is no such edge
    type, or the graph has several node types and several such edge types.
    """
    etypes = g.canonical_etypes
    if names:
        return [resolve_etype(name, etypes) for name in names]
    targets = [etype for etype in etypes if not any(_has_name_of_reverse(etype, peer) for peer in etypes)]
    if len(g.ntypes) > 1 and len(targets) > 1:
        names = ", ".join(etype[1] for etype in targets)
        raise ConfigError(
            f"{g.dataset.folder} has the edge types {names}. Choose types, as with --target {targets[0][1]}."
        )

    return targets


def split_edges(g: DistGraph, targets: Sequence[EdgeType]) -> bool:
    """Add training, validation and test masks to the ``targets``, unless they have them. All ranks call this.

    The split is 80 / 10 / 10. It is keyed by the original ids of the two ends of an edge, so it does not
    depend on the number of parts and ranks. All edges between two nodes of one type, in both directions, are
    on one side. This includes edges of the types of :func:`find_reverse_types`. If the dataset has masks,
    reverse edges without a mask get the mask of their target. Every other edge type gets a ``train_mask`` of
    ones.

    Returns:
        Whether this or an earlier call added the masks. False: they belong to the dataset.

    Raises:
        ConfigError: on all ranks, if only some of the targets have a ``train_mask``.
    """

    def find_unmasked() -> list[EdgeType]:
        unmasked = [etype for etype in targets if TRAIN not in g.edges[etype].data]
        if unmasked and len(unmasked) < len(targets):
            raise ConfigError(
                f"edges of {unmasked[0]} have no {TRAIN!r}, but edges of other targets have it. Add masks to "
                "all of them or to none, or name fewer edge types with --target."
            )
        return unmasked

    unmasked = run_on_all_ranks(g.session, find_unmasked, ConfigError)
    for etype in unmasked:
        for side, name in enumerate(SPLITS):
            _add_mask(g, etype, name, partial(_is_on_side, g, etype, side))
    if not count_marked(g, targets, TRAIN):
        raise ConfigError(
            f"no edge of {', '.join(etype[1] for etype in targets[:3])} in {g.dataset.folder} is marked by "
            f"{TRAIN!r}. Mark edges in this mask, or name other edge types with --target."
        )

    _GENERATED_MASKS.setdefault(g, set()).update(unmasked)
    is_generated = _GENERATED_MASKS[g].issuperset(targets)
    reverse = {
        reverse_type: etype
        for etype, reverse_types in find_reverse_types(g, targets).items()
        for reverse_type in reverse_types
    }
    for etype in g.canonical_etypes:
        if TRAIN in g.edges[etype].data:
            continue
        if etype not in reverse:
            _add_mask(g, etype, TRAIN, lambda ids: np.ones(len(ids), np.bool_))
        elif is_generated:
            _add_mask(g, etype, TRAIN, partial(_is_on_side, g, etype, 0))
        else:
            _add_mask(g, etype, TRAIN, _read_reverse_mask(g, etype, reverse[etype]))

    return is_generated


def count_marked(g: DistGraph, targets: Sequence[EdgeType], mask: str) -> int:
    """Return the number of marked edges of ``targets`` on all ranks. Every rank must call this."""
    book = g.get_partition_book()
    columns = [(g.edges[etype].data, etype) for etype in targets]
    marked = sum(len(edge_split(data[mask], book, etype)) for data, etype in columns if mask in data)
    return int(gather_int64([marked], g.session).sum())


def _add_mask(g: DistGraph, etype: EdgeType, name: str, compute_mask: Callable[[Array], Array]) -> None:
    policy = g.get_edge_partition_policy(etype)

    def read_rows(_shape: tuple[int, ...], _dtype: torch.dtype) -> Tensor:
        first, last = (int(bound) for bound in policy.bounds[policy.part_id : policy.part_id + 2])
        return torch.from_numpy(compute_mask(np.arange(first, last)))

    DistTensor((g.num_edges(etype),), torch.bool, name, read_rows, policy, graph=g)


def _is_on_side(g: DistGraph, etype: EdgeType, side: int, ids: Array) -> Array:
    """Return (K,) bool: whether each edge is on ``side``, which is 0 for training, 1 validation, 2 test."""
    ends = []
    for ntype, nodes in zip((etype[0], etype[2]), g.find_edges(ids, etype), strict=True):
        ends.append(g.orig_ids(nodes, ntype).numpy() + (g.ntypes.index(ntype) << _TYPE_SHIFT))
    low = np.minimum(*ends)
    high = np.maximum(*ends)
    words = splitmix64(hash_ids(low, stream_key(0, 0, 0)) ^ hash_ids(high, stream_key(0, 0, 1)))
    # The words are uniform below 2**64, so the quotients are uniform in [0, 1).
    return np.asarray(np.searchsorted(_SHARES, words / 2.0**64, side="right") == side)


def _read_reverse_mask(g: DistGraph, etype: EdgeType, target: EdgeType) -> Callable[[Array], Array]:
    """Return a function from ids to the train mask of the edges that they reverse, or True without any."""
    target_ids = reverse_edge_ids(g, etype, reverse_etype=target)
    mask = g.edges[target].data[TRAIN]

    def read_mask(ids: Array) -> Array:
        targets = target_ids[ids].numpy()
        is_reverse = targets != NO_REVERSE
        marked = np.ones(len(ids), np.bool_)
        marked[is_reverse] = mask[targets[is_reverse]].bool().numpy()
        return marked

    return read_mask


class Decoder(nn.Module, ABC):
    """Scores of (subject, relation, object). Relations are indices, and rows have width d.

    A decoder turns a known end and a relation into a query row. It compares the query with rows of the other
    end by their dot product, unless it overrides :meth:`_score_pairs` and :meth:`_score_candidates`.
    """

    row_scale = 0.02
    """Trainable rows start uniform in [-row_scale, row_scale]. Products of larger rows would be noise."""

    @abstractmethod
    def query(self, rows: Tensor, relation: Tensor, *, of_subjects: bool = False) -> Tensor:
        """Return the (E, d) queries of (E, d) known rows under (E,) int64 relations.

        ``rows`` are subjects and the candidates are objects. ``of_subjects`` swaps them.
        """

    def forward(self, subject: Tensor, relation: Tensor, objects: Tensor) -> Tensor:
        """Return the (E,) scores of (E, d) subjects and objects with (E,) int64 relations."""
        return self._score_pairs(self.query(subject, relation), objects)

    def all_objects(self, subject: Tensor, relation: Tensor, candidates: Tensor) -> Tensor:
        """Return the (B, C) scores of (B, d) subjects with (C, d) objects under (B,) int64 relations."""
        return self._score_candidates(self.query(subject, relation), candidates)

    def all_subjects(self, objects: Tensor, relation: Tensor, candidates: Tensor) -> Tensor:
        """Return the (B, C) scores of (B, d) objects with (C, d) subjects under (B,) int64 relations."""
        return self._score_candidates(self.query(objects, relation, of_subjects=True), candidates)

    def _score_pairs(self, query: Tensor, rows: Tensor) -> Tensor:
        """Return the (E,) scores of (E, d) queries and rows, pair by pair."""
        return (query * rows).sum(-1)

    def _score_candidates(self, query: Tensor, candidates: Tensor) -> Tensor:
        """Return the (B, C) scores of (B, d) queries with (C, d) candidates."""
        return query @ candidates.T


@final
class DotProduct(Decoder):
    """``sum_i s_i o_i``, whatever the relation."""

    def query(self, rows: Tensor, relation: Tensor, *, of_subjects: bool = False) -> Tensor:
        return rows


@final
class DistMult(Decoder):
    """``sum_i s_i r_i o_i`` with a row r per relation, the same in both directions (Yang et al. 2015)."""

    def __init__(self, num_relations: int, width: int) -> None:
        super().__init__()
        self.relations = nn.Parameter(torch.empty(num_relations, width))
        nn.init.xavier_uniform_(self.relations)

    def query(self, rows: Tensor, relation: Tensor, *, of_subjects: bool = False) -> Tensor:
        return rows * self.relations.index_select(0, relation)


@final
class ComplEx(Decoder):
    """``Re(sum_i s_i r_i conj(o_i))`` of complex rows (Trouillon et al. 2016).

    The first half of a row has the real parts, the second half the imaginary parts. ConfigError if ``width``
    is odd.
    """

    def __init__(self, num_relations: int, width: int) -> None:
        super().__init__()
        _check_halves("ComplEx", width)
        self.relations = nn.Parameter(torch.empty(num_relations, width))
        nn.init.xavier_uniform_(self.relations)

    def query(self, rows: Tensor, relation: Tensor, *, of_subjects: bool = False) -> Tensor:
        # Re(q conj(o)) is the dot product of (re, im). For subjects, q = conj(r) o.
        real, imaginary = self.relations.index_select(0, relation).chunk(2, -1)
        return _multiply_complex(rows, real, -imaginary if of_subjects else imaginary)


@final
class TransE(Decoder):
    """``margin - |s + r - o|``, with the sum of absolute values (Bordes et al. 2013).

    Trainable rows and relations start within (margin + 2) / d, as in the code of RotatE's authors.
    """

    def __init__(self, num_relations: int, width: int, margin: float = 12.0) -> None:
        super().__init__()
        self.margin = margin
        self.row_scale = (margin + 2) / width
        self.relations = nn.Parameter(torch.empty(num_relations, width))
        nn.init.uniform_(self.relations, -self.row_scale, self.row_scale)

    def query(self, rows: Tensor, relation: Tensor, *, of_subjects: bool = False) -> Tensor:
        translation = self.relations.index_select(0, relation)
        return rows - translation if of_subjects else rows + translation

    def _score_pairs(self, query: Tensor, rows: Tensor) -> Tensor:
        return self.margin - torch.linalg.vector_norm(query - rows, 1, -1)

    def _score_candidates(self, query: Tensor, candidates: Tensor) -> Tensor:
        return self.margin - torch.cdist(query, candidates, 1)


@final
class RotatE(Decoder):
    """``margin - sum_i |s_i exp(i theta_i) - o_i|`` of complex rows (Sun et al. 2019).

    The first half of a row has the real parts, the second half the imaginary parts. A relation has d / 2
    angles, initially uniform in [-pi, pi). ConfigError if ``width`` is odd.
    """

    def __init__(self, num_relations: int, width: int, margin: float = 12.0) -> None:
        super().__init__()
        _check_halves("RotatE", width)
        self.margin = margin
        self.row_scale = 2 * (margin + 2) / width
        self.angles = nn.Parameter(torch.empty(num_relations, width // 2).uniform_(-math.pi, math.pi))

    def query(self, rows: Tensor, relation: Tensor, *, of_subjects: bool = False) -> Tensor:
        angle = self.angles.index_select(0, relation)
        # |s r - o| = |s - o conj(r)|, since |r| = 1.
        return _multiply_complex(rows, angle.cos(), -angle.sin() if of_subjects else angle.sin())

    def _score_pairs(self, query: Tensor, rows: Tensor) -> Tensor:
        # The gradient of torch's norm at 0 is 0, where that of sqrt would be NaN.
        moduli = torch.linalg.vector_norm(torch.stack((query - rows).chunk(2, -1)), 2, 0)
        return self.margin - moduli.sum(-1)

    def _score_candidates(self, query: Tensor, candidates: Tensor) -> Tensor:
        # The queries are split, because the differences of all pairs would be d times as large as the scores.
        size = max(1, _MAX_DIFFERENCES // max(1, candidates.numel()))
        scores = [self._score_pairs(piece[:, None], candidates) for piece in torch.split(query, size)]
        return torch.cat(scores) if scores else query @ candidates.T


_MAX_DIFFERENCES = 2**21
"""Maximum number of differences that :meth:`RotatE.all_objects` holds at once."""

DECODERS: Mapping[str, Callable[[int, int], Decoder]] = {
    "dot": lambda _num_relations, _width: DotProduct(),
    "distmult": DistMult,
    "transe": TransE,
    "complex": ComplEx,
    "rotate": RotatE,
}
"""Name to a function of (number of relations, width of rows) that returns a decoder."""


def _check_halves(name: str, width: int) -> None:
    if width % 2:
        raise ConfigError(f"{name} needs rows of real and imaginary halves. Make the width {width} even.")


def _multiply_complex(rows: Tensor, real: Tensor, imaginary: Tensor) -> Tensor:
    """Return the (E, d) complex products of (E, d) rows with the (E, d / 2) parts of complex numbers."""
    a, b = rows.chunk(2, -1)
    return torch.cat([a * real - b * imaginary, a * imaginary + b * real], -1)


def edge_scores(
    decoder: Decoder, pair_graph: Any, h: Mapping[str, Tensor] | Tensor, etypes: Sequence[EdgeType]
) -> dict[EdgeType, Tensor]:
    """Return {edge type: (E,) scores} of the edges of a pair graph. E may be 0. See :func:`score_pairs`."""
    merged = merge_pairs(pair_graph)
    scores = torch.split(score_pairs(decoder, pair_graph, h, etypes), [*merged.sizes])
    return dict(zip(merged.etypes, scores, strict=True))


def score_pairs(
    decoder: Decoder, pair_graph: Any, h: Mapping[str, Tensor] | Tensor, etypes: Sequence[EdgeType]
) -> Tensor:
    """Return the (E,) scores of all edges of a pair graph, in the order of its edge types.

    The scores are computed even without edges, because every rank must take part in backward.

    Args:
        decoder: Decoder that scores the ends of each edge.
        pair_graph: Graph of positives or of negatives that an edge loader yields.
        h: (num_nodes, d) rows of the pair graph's nodes per node type, or a tensor if there is one node type.
        etypes: Edge types in the decoder's order: ``g.canonical_etypes``.

    Raises:
        ConfigError: a type has fewer rows than nodes.
    """
    merged = merge_pairs(pair_graph)
    if not isinstance(h, Tensor):
        template = next(iter(h.values()))
        pieces = []
        for ntype in pair_graph.ntypes:
            count = pair_graph.num_nodes(ntype)
            # A type without a target may have no rows. A model may return rows of more nodes.
            pieces.append(h[ntype][:count] if ntype in h else template.new_zeros(count, template.shape[1]))
            if len(pieces[-1]) < count:
                raise ConfigError(
                    f"there are {len(pieces[-1])} rows for the {count} nodes of type {ntype!r} of the "
                    "pair graph. Return one row per node, in the order of the last block's destinations."
                )
        h = torch.cat(pieces)

    indices = {etype: index for index, etype in enumerate(etypes)}
    relations = torch.tensor([indices[etype] for etype in merged.etypes], device=h.device)
    subject, objects = (h.index_select(0, ends) for ends in merged.ends)
    return decoder(subject, relations[merged.relation], objects)


@final
class LinkModel(nn.Module):
    """Scores of pairs of nodes from rows that an encoder computes or that are trained directly.

    Args:
        encoder: Called with blocks and rows. None: trainable rows with ``scale=decoder.row_scale`` are
            scored.
        decoder: Decoder that scores pairs. The model adds a trained bias.
        etypes: ``g.canonical_etypes``.

    Raises:
        ConfigError: the encoder divides by degrees of the whole graph, which count validation and test edges.
    """

    def __init__(self, encoder: nn.Module | None, decoder: Decoder, etypes: Sequence[EdgeType]) -> None:
        super().__init__()
        if any(map(_uses_graph_degrees, encoder.modules() if encoder else ())):
            raise ConfigError(
                "the encoder (model gcn, or GraphConv with norm 'both' or 'left') divides by degrees of the "
                "whole graph, which count validation and test edges. Use --model sage, sgc or gat."
            )

        self.encoder = encoder
        self.decoder = decoder
        self.etypes = list(etypes)

        # Without the bias, a dot product of trainable rows would have no weight.
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, blocks: Any, h: Any, *pair_graphs: Any) -> list[Tensor]:
        """Return the (E,) scores of each pair graph, ordered like :func:`score_pairs`."""
        if self.encoder is not None:
            rows = self.encoder(blocks, h)
            rows = gather_pair_rows(pair_graphs[0], rows) if pair_graphs else rows
        else:
            by_type = {blocks[-1].dsttypes[0]: h} if isinstance(h, Tensor) else h
            rows = {ntype: h[: blocks[-1].num_dst_nodes(ntype)] for ntype, h in by_type.items()}
        return [score_pairs(self.decoder, graph, rows, self.etypes) + self.bias for graph in pair_graphs]


def _uses_graph_degrees(module: nn.Module) -> bool:
    is_normed = isinstance(module, dgl.nn.GraphConv) and module._norm in ("both", "left")
    return is_normed or isinstance(module, SymmetricConv)


@contextmanager
def compute_rows(
    model: nn.Module, g: DistGraph, inputs: EntityInputs | None, feature: str = FEATURE
) -> Iterator[dict[str, DistTensor]]:
    """Yield the (N, d) rows that a :class:`LinkModel` scores, by node type. Every rank must call this.

    An encoder computes them along edges of ``train_mask``. Its rows are deleted at the end of the block.
    """
    module: Any = gather_module(model)
    results: Any = None if inputs is None else inputs.tensors
    if module.encoder is not None:
        results = layerwise_inference(module.encoder, g, feature=feature, inputs=results, mask=TRAIN)
    rows = results if isinstance(results, dict) else {g.ntypes[0]: results}
    yield rows
    for tensor in rows.values() if module.encoder is not None else ():
        tensor.delete()


SplitEdges: TypeAlias = dict[tuple[str, str], Array]
"""Maps the node types of both ends to this rank's Q edges of a split: (4, Q) int64 with the rows index of the
edge type in ``g.canonical_etypes``, source, destination, and random destination.
"""
RankedEdges: TypeAlias = Mapping[tuple[str, str], Mapping[str, Tensor]]
"""Maps the node types of both ends to columns of Q edges, see :meth:`LinkEvaluation.test_edges`."""
_NUM_BEST = 10  # maximum number of destinations that are listed for a test edge


@final
class LinkEvaluation:
    """Filtered ranks and AUC of validation and test edges, for ``evaluate`` of ``FitConfig``.

    Every candidate is ranked: the destinations of an edge among all nodes of the type, and if both ends have
    one type, the sources too. True edges of the same relation, of any split, do not count as candidates.
    ``auc`` compares each edge with one that has a random destination, keyed by the edge. The results do not
    depend on the number of ranks. A rank holds the rows of all nodes of the ranked types.

    Args:
        g: The graph, with the masks of :func:`split_edges`.
        inputs: Input rows of the training.
        metrics: ``mrr``, ``hits@K``, ``auc`` (or ``roc_auc``), ``average_precision``. Empty: the defaults.
        feature: Node data, used without ``inputs``.
    """

    def __init__(
        self,
        *,
        g: DistGraph,
        targets: Sequence[EdgeType],
        inputs: EntityInputs | None = None,
        metrics: Sequence[str] = (),
        feature: str = FEATURE,
    ) -> None:
        self.g = g
        self.targets = targets
        self.inputs = inputs
        self.metrics = list_names(metrics) or list_metrics(LINK, ())
        self.feature = feature
        self._edges_by_split: dict[str, SplitEdges] = {}
        self._true_edges: KnownEdges | None = None

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Return ``val_mrr``, ``test_mrr`` and so on. Every rank must call this.

        Raises ConfigError on all ranks, if a score is NaN.
        """
        module, rows = self._read(model)
        metrics: dict[str, float] = {}
        for name, edges in self._edges_by_split.items():
            with evaluating(module):
                scores = self._measure_split(module.decoder, rows, edges)
            metrics |= {f"{name.removesuffix('_mask')}_{key}": value for key, value in scores.items()}
        return metrics

    def test_edges(self, model: nn.Module, stored: Mapping[str, DistTensor] | None = None) -> RankedEdges:
        """Rank this rank's test edges, with ``stored`` rows of :func:`compute_rows`. All ranks call this.

        Returns:
            By pair of node types, which are the same on all ranks: (Q,) int64 ``relation`` (index in
                ``g.canonical_etypes``), ``source``, ``destination``; (Q,) ``score`` without the model's bias;
                (Q,) float64 ``rank`` of the destination, and ``source_rank`` if sources are ranked; (Q, K)
                ``best``, at most 10 destinations other than the source that are no known edges, and
                ``best_scores``, which are -inf for missing destinations.

        Raises:
            ConfigError: on all ranks, if a score is NaN.
        """
        module, rows = self._read(model, stored)

        def rank_edges() -> RankedEdges:
            test_edges = self._edges_by_split.get(TEST, {}).items()
            decoder = module.decoder
            return {ntypes: self._find_best_ids(decoder, rows, ntypes, edges) for ntypes, edges in test_edges}

        with evaluating(module):
            return run_on_all_ranks(self.g.session, rank_edges, ConfigError)

    def _find_best_ids(
        self, decoder: Decoder, rows: Mapping[str, Tensor], ntypes: tuple[str, str], edges: Array
    ) -> Mapping[str, Tensor]:
        """Return the columns of :meth:`test_edges` for the edges of a pair of node types."""
        source, destination = (rows[ntype] for ntype in ntypes)
        num_best = min(_NUM_BEST, len(destination))
        batches = [(torch.empty(0), torch.empty(0, num_best, dtype=torch.int64), torch.empty(0, num_best))]

        def keep_best(positive: Tensor, candidates: Tensor) -> None:
            candidates.masked_fill_(candidates.isnan(), -math.inf)
            if ntypes[0] == ntypes[1]:  # edges from a node to itself are no candidates
                offset = sum(len(scores) for scores, *_ in batches)
                sources = torch.from_numpy(edges[1, offset : offset + len(candidates)]).to(candidates.device)
                candidates[torch.arange(len(sources), device=sources.device), sources] = -math.inf
            best = candidates.topk(num_best)
            batches.append((positive.cpu(), best.indices.cpu(), best.values.cpu()))

        ranks = self._rank(decoder, source, destination, self._make_queries(ntypes, edges), keep_best)
        columns = dict(zip(("relation", "source", "destination"), torch.from_numpy(edges), strict=False))
        columns |= dict(zip(("rank", "source_rank"), ranks, strict=False))
        best_columns = map(torch.cat, zip(*batches, strict=True))
        return columns | dict(zip(("score", "best", "best_scores"), best_columns, strict=True))

    def _read(self, model: nn.Module, stored: Any = None) -> tuple[Any, dict[str, Tensor]]:
        """Return the uncut model, and all rows of each ranked node type. Every rank must call this.

        The first call also reads the edges of the splits. ``stored`` are rows of all nodes by type that were
        computed before. With None, they are computed.
        """
        if self._true_edges is None:
            splits = {name: self._read_split(name) for name in (VALIDATION, TEST)}
            num_local = [sum(edges.shape[1] for edges in split.values()) for split in splits.values()]
            num_global = gather_int64(num_local, self.g.session).sum(axis=0)
            # A split without edges on any rank is left out.
            sizes = zip(splits, num_global, strict=True)
            self._edges_by_split = {name: splits[name] for name, num_edges in sizes if num_edges}
            self._true_edges = self._find_true_edges(self._edges_by_split.values())

        module: Any = gather_module(model)
        ntypes = {ntype for etype in self.targets for ntype in (etype[0], etype[2])}
        open_rows: Any = nullcontext(stored)
        if stored is None:
            open_rows = compute_rows(module, self.g, self.inputs, self.feature)
        with open_rows as rows:
            return module, {ntype: rows[ntype][:].to(module.bias) for ntype in ntypes}

    def _read_split(self, split: str) -> SplitEdges:
        """Return this rank's edges of a split. The ids of the edges determine the random destinations."""
        g = self.g
        columns_by_ntypes = dict[tuple[str, str], list[Array]]()
        for relation, etype in enumerate(g.canonical_etypes):
            if etype in self.targets and split in g.edges[etype].data:
                ids = edge_split(g.edges[etype].data[split], g.get_partition_book(), etype).numpy()
                u, v = (ends.numpy() for ends in g.find_edges(ids, etype))
                random_ids = hash_ids(ids, stream_key(0, 1, relation)) % np.uint64(g.num_nodes(etype[2]))
                columns = [np.full_like(u, relation), u, v, random_ids.astype(np.int64)]
                columns_by_ntypes.setdefault((etype[0], etype[2]), []).append(np.stack(columns))

        return {ntypes: np.concatenate(columns, 1) for ntypes, columns in columns_by_ntypes.items()}

    def _make_queries(self, ntypes: tuple[str, str], edges: Array) -> list[Array]:
        """Return (3, Q) subjects, relations and answers for each end that is ranked."""
        # Queries for sources have relations after all edge types, to keep them apart from queries for
        # destinations.
        relation, u, v = edges[:3]
        queries = [np.stack([u, relation, v])]
        if ntypes[0] == ntypes[1]:
            queries.append(np.stack([v, relation + len(self.g.canonical_etypes), u]))
        return queries

    def _find_true_edges(self, splits: Iterable[SplitEdges]) -> KnownEdges:
        """Return the true edges that answer the queries of all ranks. Every rank must call this."""
        g = self.g
        id_limit = max(map(self.g.num_nodes, self.g.ntypes))
        empty = np.empty((3, 0), np.int64)

        def make_keys(queries: Array) -> Array:
            return np.asarray(queries[1] * id_limit + queries[0])

        queries = [empty]
        for split in splits:
            for ntypes, edges in split.items():
                queries += self._make_queries(ntypes, edges)
        keys = np.unique(make_keys(np.concatenate(queries, 1)))
        query_keys = np.unique(np.concatenate(gather_arrays(keys, g.session)))
        answers = [empty]
        for relation, etype in enumerate(g.canonical_etypes):
            owned = g.get_edge_partition_policy(etype).owned_range if etype in self.targets else (0, 0)
            for first, last in split_range(owned, _EDGES_AT_ONCE):
                u, v = (ends.numpy() for ends in g.find_edges(np.arange(first, last), etype))
                own_edges = np.stack([np.full_like(u, relation), u, v])
                for query in self._make_queries((etype[0], etype[2]), own_edges):
                    answers.append(query[:, np.isin(make_keys(query), query_keys)])

        edges_of_all = np.concatenate(gather_arrays(np.concatenate(answers, 1).T.copy(), g.session))
        return KnownEdges(*torch.from_numpy(edges_of_all.T.copy()))

    def _measure_split(
        self, decoder: Decoder, rows: Mapping[str, Tensor], split_edges: SplitEdges
    ) -> dict[str, float]:
        """Return the metrics of a split by name. Every rank must call this."""

        def score_edges() -> tuple[Tensor, Tensor]:
            ranks = [torch.empty(0)]
            scores = [torch.empty(2, 0)]
            for ntypes, edges in split_edges.items():
                source, destination = (rows[ntype] for ntype in ntypes)
                ranks += self._rank(decoder, source, destination, self._make_queries(ntypes, edges))
                relation, u, *destinations = torch.from_numpy(edges).to(source.device)
                pairs = [decoder(source[u], relation, destination[v]).cpu() for v in destinations]
                scores.append(torch.stack(pairs))

            return torch.cat(ranks), torch.cat(scores, 1)

        session = self.g.session
        ranks, scores = run_on_all_ranks(session, score_edges, ConfigError)
        labels = torch.tensor([[1], [0]]).expand_as(scores).flatten()
        pair_metrics = {"auc": roc_auc, "roc_auc": roc_auc, "average_precision": average_precision}

        def compute_metric(name: str) -> float:
            if name in pair_metrics:
                return pair_metrics[name](scores.flatten(), labels, session)
            if name == "mrr":
                return mrr(ranks, session)
            return hits_at(int(name.removeprefix("hits@")), ranks, session)

        return {name: compute_metric(name) for name in self.metrics}

    def _rank(
        self,
        decoder: Decoder,
        source: Tensor,
        destination: Tensor,
        queries: Sequence[Array],
        after: AfterRanking | None = None,
    ) -> Iterator[Tensor]:
        """Yield the (Q,) ranks of destinations, then of sources if there are queries for them."""

        def score_objects(ids: Tensor, relation: Tensor) -> Tensor:
            return decoder.all_objects(source[ids], relation.to(source.device), destination)

        def score_subjects(ids: Tensor, relation: Tensor) -> Tensor:
            relation = relation.to(source.device) - len(self.g.canonical_etypes)
            return decoder.all_subjects(destination[ids], relation, source)

        ends = zip((score_objects, score_subjects), queries, (after, None), strict=False)
        for score_all, query, hook in ends:
            yield rank_of_answer(score_all, *map(torch.from_numpy, query), known=self._true_edges, after=hook)


_EDGES_AT_ONCE = 1 << 22  # edges whose ends are read at a time


def link_loader(
    g: DistGraph,
    targets: Sequence[EdgeType],
    *,
    fanouts: Sequence[int] | None,
    batch_size: int,
    negatives: int = 4,
    inputs: EntityInputs | None = None,
    **options: Any,
) -> Any:
    """Return the loader of training edges and their negatives. Every rank must call this.

    Messages run along edges of ``train_mask`` (:func:`split_edges`). Edges of the batch, their opposite edges
    of the same type and those of :func:`find_reverse_types` are left out. Full-graph strategies cannot leave
    them out, and log that on rank 0.

    Args:
        fanouts: Neighbours per layer. None: no messages, for a model without encoder.
        negatives: Number of negatives per edge and replaced end. The destination is replaced, and the source
            too if both ends of all targets are of one type.
        inputs: Input rows of the training.
        options: Options of :class:`DistEdgeDataLoader`.

    Raises:
        ConfigError: ``fanouts`` is None, but the strategy passes messages over the graph in each step.
    """
    opened = open_strategy(g)
    book = g.get_partition_book()
    eids = {etype: edge_split(g.edges[etype].data[TRAIN], book, etype) for etype in targets}
    replaces_sources = all(etype[0] == etype[2] for etype in targets)
    options["negative_sampler"] = Uniform(negatives, "both" if replaces_sources else "tail")
    excludes_edges = opened.strategy.traits.excludes_edges
    if fanouts is None and not excludes_edges:
        raise ConfigError(
            f"a model without encoder passes no messages, but strategy {g.session.strategy!r} computes rows "
            "of all nodes in each step. Use --strategy data_parallel, or a --model other than none."
        )

    if fanouts is None:
        sampler = dgl.dataloading.NeighborSampler([0])  # one block without edges
    else:
        types = g.ntypes if inputs is None else inputs.feature_widths
        columns = {ntype: [FEATURE if inputs is None else inputs.feature] for ntype in types}
        sampler = dgl.dataloading.NeighborSampler(list(fanouts), mask=TRAIN, prefetch_node_feats=columns)

    if fanouts is not None and excludes_edges:
        options |= {"exclude": "reverse_id", "reverse_eids": _find_opposite_edges(g, targets)}
    elif fanouts is not None and g.session.topology.rank == 0:
        log.warning(
            "strategy %s passes messages along all training edges, even those of the batch. "
            "Strategy data_parallel leaves the edges of each batch out.",
            g.session.strategy,
        )

    return opened.edge_loader(eids, sampler, batch_size=batch_size, shuffle=True, **options)


def _find_opposite_edges(
    g: DistGraph, targets: Sequence[EdgeType]
) -> dict[EdgeType, dict[EdgeType, DistTensor]]:
    """Return the ids of the opposite edges of each target, by their type. Every rank must call this."""
    reverse_types = find_reverse_types(g, targets)
    return {
        etype: {
            reverse_type: reverse_edge_ids(g, etype, reverse_etype=reverse_type)
            for reverse_type in [*([etype] if etype[0] == etype[2] else []), *reverse_types[etype]]
        }
        for etype in targets
    }
