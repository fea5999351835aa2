"""Link prediction: ranking losses, edge splits, decoders, the model, and exact filtered ranking."""

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
from dglx_dist.strategies.base import OpenedStrategy, open_strategy
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
"""Maps (P,) edge scores and (P, K) scores for their negatives to the mean loss over the edges."""


def bpr_loss(positive: Tensor, negative: Tensor) -> Tensor:
    """Average ``-log sigmoid(s - s')`` over edges and their negatives (Rendle et al. 2009)."""
    return F.softplus(negative - positive[:, None]).mean()


def softmax_loss(positive: Tensor, negative: Tensor) -> Tensor:
    """Return the mean cross-entropy to pick each edge among itself and its negatives (sampled softmax)."""
    scores = torch.cat([positive[:, None], negative], 1)
    # The edge itself is always class 0.
    classes = torch.zeros(len(scores), dtype=torch.int64, device=scores.device)
    return F.cross_entropy(scores, classes)


PAIR_LOSSES: Mapping[str, PairLoss | None] = {"bce": None, "bpr": bpr_loss, "softmax": softmax_loss}
"""By name, the ``pair_loss`` for :class:`dglx_dist.training.tasks.LinkPrediction`."""

_SHARES = (0.8, 0.9)
"""Training edges end at the first share, validation edges at the second."""
_GENERATED_MASKS: WeakKeyDictionary[DistGraph, set[EdgeType]] = WeakKeyDictionary()
"""Edge types with masks from :func:`split_edges`."""
_TYPE_SHIFT = np.int64(44)
"""Bits that a node id takes in a pair's key."""
_REVERSE_NAMES = ("{}-rev", "rev-{}", "{}_rev", "rev_{}", "reverse_{}")
"""Usual names for an edge type in the opposite direction."""


def _has_name_of_reverse(candidate: EdgeType, etype: EdgeType) -> bool:
    """Return whether ``candidate`` swaps the node types of ``etype`` and has a name like ``NAME-rev``."""
    is_swapped = (candidate[0], candidate[2]) == (etype[2], etype[0])
    return is_swapped and candidate[1] in [template.format(etype[1]) for template in _REVERSE_NAMES]


def find_reverse_types(g: DistGraph, targets: Sequence[EdgeType]) -> dict[EdgeType, list[EdgeType]]:
    """Find the types with each target's reverse edges, whatever their names. Every rank must call this.

    A type between the swapped node types is a reverse type if its name says so, such as ``NAME-rev``.
    Otherwise it is one if most edges in the smaller type have a reverse edge in the other type. Two targets
    on one node type are compared by name only, because a knowledge graph has too many pairs. A warning names
    types with fewer such edges.
    """
    reverse_types: dict[EdgeType, list[EdgeType]] = {etype: [] for etype in targets}
    for etype in targets:
        for candidate in g.canonical_etypes:
            if (candidate[0], candidate[2]) != (etype[2], etype[0]) or candidate == etype:
                continue
            if _has_name_of_reverse(candidate, etype) or _has_name_of_reverse(etype, candidate):
                reverse_types[etype].append(candidate)
                continue
            if candidate in targets and candidate[0] == candidate[2]:
                continue

            num_reverse = _count_reverse_edges(g, etype, candidate)
            if 2 * num_reverse > min(g.num_edges(etype), g.num_edges(candidate)):
                reverse_types[etype].append(candidate)
            elif num_reverse and g.session.topology.rank == 0:
                log.warning(
                    "only %d edges of %s are reverse edges of %s. Batches keep them.",
                    num_reverse,
                    format_type(candidate),
                    format_type(etype),
                )
    return reverse_types


def _count_reverse_edges(g: DistGraph, etype: EdgeType, candidate: EdgeType) -> int:
    """Count the ``etype`` edges that have a reverse edge in ``candidate``. All ranks call this."""
    reverse_ids = reverse_edge_ids(g, etype, reverse_etype=candidate)
    first, last = g.get_edge_partition_policy(etype).owned_range
    num_owned = int((reverse_ids[first:last] != NO_REVERSE).sum())
    return int(gather_int64([num_owned], g.session).sum())


def link_targets(g: DistGraph, names: Sequence[str] = ()) -> list[EdgeType]:
    """Return the edge types to predict, by name or as ``source:name:destination``.

    Without ``names``, all types are returned that are not named like a reverse type, such as ``NAME-rev``.
    Raises ConfigError if ``names`` has an unknown type, or if there are no names and the graph has several
    node types and several edge types to choose from.
    """
    etypes = g.canonical_etypes
    if names:
        return [resolve_etype(name, etypes) for name in names]
    targets = []
    for etype in etypes:
        if not any(_has_name_of_reverse(etype, peer) for peer in etypes):
            targets.append(etype)
    if len(g.ntypes) > 1 and len(targets) > 1:
        names = ", ".join(etype[1] for etype in targets)
        raise ConfigError(
            f"{g.dataset.folder} has the edge types {names}. Choose types, as with --target {targets[0][1]}."
        )
    return targets


def split_edges(g: DistGraph, targets: Sequence[EdgeType]) -> bool:
    """Add training, validation and test masks to the ``targets``, unless they have them. All ranks call this.

    The split is 80 / 10 / 10. An edge's side follows from the original ids at its two ends, so the split does
    not depend on how many parts and ranks there are. All edges between two nodes, in both directions, are on
    one side, including edges in the types that :func:`find_reverse_types` finds. If the dataset has masks,
    reverse edges without a mask get their target's mask. Every other edge type gets a ``train_mask`` that is
    all ones.

    Returns:
        Whether this or an earlier call added the masks. False: they belong to the dataset.

    Raises:
        ConfigError: On all ranks, if only some ``targets`` have a ``train_mask``.
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
    target_of_reverse: dict[EdgeType, EdgeType] = {}
    for etype, reverse_types in find_reverse_types(g, targets).items():
        target_of_reverse |= dict.fromkeys(reverse_types, etype)

    # Edge types that are not predicted only need a mask for training.
    for etype in g.canonical_etypes:
        if TRAIN in g.edges[etype].data:
            continue
        if etype not in target_of_reverse:
            _add_mask(g, etype, TRAIN, lambda ids: np.ones(len(ids), np.bool_))
        elif is_generated:
            _add_mask(g, etype, TRAIN, partial(_is_on_side, g, etype, 0))
        else:
            _add_mask(g, etype, TRAIN, _read_reverse_mask(g, etype, target_of_reverse[etype]))

    return is_generated


def count_marked(g: DistGraph, targets: Sequence[EdgeType], mask: str) -> int:
    """Count the marked edges in ``targets`` on all ranks. Every rank must call this."""
    num_marked = 0
    for etype in targets:
        data = g.edges[etype].data
        if mask in data:
            num_marked += len(edge_split(data[mask], g.get_partition_book(), etype))
    return int(gather_int64([num_marked], g.session).sum())


def _add_mask(g: DistGraph, etype: EdgeType, name: str, compute_mask: Callable[[Array], Array]) -> None:
    """Add a mask to the edge data. Each server computes the values for its edges from their ids."""
    policy = g.get_edge_partition_policy(etype)

    def read_rows(_shape: tuple[int, ...], _dtype: torch.dtype) -> Tensor:
        first = int(policy.bounds[policy.part_id])
        last = int(policy.bounds[policy.part_id + 1])
        return torch.from_numpy(compute_mask(np.arange(first, last)))

    DistTensor((g.num_edges(etype),), torch.bool, name, read_rows, policy, graph=g)


def _is_on_side(g: DistGraph, etype: EdgeType, side: int, ids: Array) -> Array:
    """Return (K,) bool: whether each edge is on ``side``, which is 0 for training, 1 validation, 2 test."""
    # An end's key includes its node type, because two types may have equal ids.
    keys = []
    for ntype, nodes in zip((etype[0], etype[2]), g.find_edges(ids, etype), strict=True):
        keys.append(g.orig_ids(nodes, ntype).numpy() + (g.ntypes.index(ntype) << _TYPE_SHIFT))

    # An edge and its reverse edge have the same pair of keys, because the lower key comes first.
    low_hashes = hash_ids(np.minimum(*keys), stream_key(0, 0, 0))
    high_hashes = hash_ids(np.maximum(*keys), stream_key(0, 0, 1))
    hashes = splitmix64(low_hashes ^ high_hashes)

    # The hashes are uniform below 2**64, so the quotients are uniform in [0, 1).
    return np.asarray(np.searchsorted(_SHARES, hashes / 2.0**64, side="right") == side)


def _read_reverse_mask(g: DistGraph, etype: EdgeType, target: EdgeType) -> Callable[[Array], Array]:
    """Return a function that maps ``etype`` ids to their reverse edges' train mask.

    The mask is True for an edge that has no reverse edge in ``target``.
    """
    target_ids = reverse_edge_ids(g, etype, reverse_etype=target)
    target_mask = g.edges[target].data[TRAIN]

    def read_mask(ids: Array) -> Array:
        reverse_ids = target_ids[ids].numpy()
        has_reverse = reverse_ids != NO_REVERSE
        mask = np.ones(len(ids), np.bool_)
        mask[has_reverse] = target_mask[reverse_ids[has_reverse]].bool().numpy()
        return mask

    return read_mask


class Decoder(nn.Module, ABC):
    """Scores triples (subject, relation, object). Relations are indices, and rows have width d.

    A decoder turns a known end and a relation into a query row. It compares the query with rows for the other
    end by their dot product, unless it overrides :meth:`_score_pairs` and :meth:`_score_candidates`.
    """

    row_scale = 0.02
    """Trainable rows start uniform in [-row_scale, row_scale]. Products of larger rows would be noise."""

    @abstractmethod
    def query(self, rows: Tensor, relation: Tensor, *, of_subjects: bool = False) -> Tensor:
        """Return (E, d) queries for (E, d) known rows under (E,) int64 relations.

        ``rows`` are subjects and the candidates are objects. ``of_subjects`` swaps them.
        """

    def forward(self, subject: Tensor, relation: Tensor, objects: Tensor) -> Tensor:
        """Score (E, d) subjects and objects with (E,) int64 relations. Return (E,)."""
        return self._score_pairs(self.query(subject, relation), objects)

    def all_objects(self, subject: Tensor, relation: Tensor, candidates: Tensor) -> Tensor:
        """Score (B, d) subjects with all (C, d) objects under (B,) int64 relations. Return (B, C)."""
        return self._score_candidates(self.query(subject, relation), candidates)

    def all_subjects(self, objects: Tensor, relation: Tensor, candidates: Tensor) -> Tensor:
        """Score (B, d) objects with all (C, d) subjects under (B,) int64 relations. Return (B, C)."""
        return self._score_candidates(self.query(objects, relation, of_subjects=True), candidates)

    def _score_pairs(self, query: Tensor, rows: Tensor) -> Tensor:
        """Score (E, d) queries and rows, pair by pair. Return (E,)."""
        return (query * rows).sum(-1)

    def _score_candidates(self, query: Tensor, candidates: Tensor) -> Tensor:
        """Score (B, d) queries with all (C, d) candidates. Return (B, C)."""
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
    """``Re(sum_i s_i r_i conj(o_i))`` on complex rows (Trouillon et al. 2016).

    A row's first half has the real parts, the second half the imaginary parts, so ``width`` must be even.
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

    Trainable rows and relations start within (margin + 2) / d, as in the code by RotatE's authors.
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
    """``margin - sum_i |s_i exp(i theta_i) - o_i|`` on complex rows (Sun et al. 2019).

    A row's first half has the real parts, the second half the imaginary parts. A relation has d / 2 angles,
    initially uniform in [-pi, pi). ConfigError if ``width`` is odd.
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
        # At 0, torch's norm has the gradient 0, where sqrt would have NaN.
        moduli = torch.linalg.vector_norm(torch.stack((query - rows).chunk(2, -1)), 2, 0)
        return self.margin - moduli.sum(-1)

    def _score_candidates(self, query: Tensor, candidates: Tensor) -> Tensor:
        # The queries are split, because the differences for all pairs would be d times as large as the
        # scores.
        num_queries = max(1, _MAX_DIFFERENCES // max(1, candidates.numel()))
        batches = torch.split(query, num_queries)
        return torch.cat([self._score_pairs(batch[:, None], candidates) for batch in batches])


_MAX_DIFFERENCES = 2**21
"""Maximum number of differences that :meth:`RotatE.all_objects` holds at once."""

DECODERS: Mapping[str, Callable[[int, int], Decoder]] = {
    "dot": lambda _num_relations, _width: DotProduct(),
    "distmult": DistMult,
    "transe": TransE,
    "complex": ComplEx,
    "rotate": RotatE,
}
"""By name, a function from (number of relations, row width) to a decoder."""


def _check_halves(name: str, width: int) -> None:
    if width % 2:
        raise ConfigError(f"{name} needs rows of real and imaginary halves. Make the width {width} even.")


def _multiply_complex(rows: Tensor, real: Tensor, imaginary: Tensor) -> Tensor:
    """Multiply complex (E, d) rows by complex numbers with (E, d / 2) real and imaginary parts."""
    real_rows, imaginary_rows = rows.chunk(2, -1)
    real_product = real_rows * real - imaginary_rows * imaginary
    imaginary_product = real_rows * imaginary + imaginary_rows * real
    return torch.cat([real_product, imaginary_product], -1)


def edge_scores(
    decoder: Decoder, pair_graph: Any, h: Mapping[str, Tensor] | Tensor, etypes: Sequence[EdgeType]
) -> dict[EdgeType, Tensor]:
    """Score the edges in a pair graph, as {edge type: (E,)}. E may be 0. See :func:`score_pairs`."""
    merged = merge_pairs(pair_graph)
    scores = torch.split(score_pairs(decoder, pair_graph, h, etypes), [*merged.sizes])
    return dict(zip(merged.etypes, scores, strict=True))


def score_pairs(
    decoder: Decoder, pair_graph: Any, h: Mapping[str, Tensor] | Tensor, etypes: Sequence[EdgeType]
) -> Tensor:
    """Score all edges in a pair graph, as (E,) in the order of its edge types.

    The scores are computed even without edges, because every rank must take part in backward.

    Args:
        decoder: Decoder that scores the two ends of each edge.
        pair_graph: Graph with positives or with negatives that an edge loader yields.
        h: (num_nodes, d) rows by node type, or a tensor if the pair graph has one node type.
        etypes: Edge types in the decoder's order: ``g.canonical_etypes``.

    Raises:
        ConfigError: If a type has fewer rows than nodes.
    """
    merged = merge_pairs(pair_graph)
    rows = h if isinstance(h, Tensor) else _concatenate_rows(pair_graph, h)
    indices = {etype: index for index, etype in enumerate(etypes)}
    relations = torch.tensor([indices[etype] for etype in merged.etypes], device=rows.device)
    subjects, objects = (rows.index_select(0, ends) for ends in merged.ends)
    return decoder(subjects, relations[merged.relation], objects)


def _concatenate_rows(pair_graph: Any, h: Mapping[str, Tensor]) -> Tensor:
    """Return the rows for all nodes in a pair graph, type after type. ConfigError if rows are missing."""
    template = next(iter(h.values()))
    rows = []
    for ntype in pair_graph.ntypes:
        num_nodes = pair_graph.num_nodes(ntype)
        # A type without a target may have no rows.
        if ntype not in h:
            rows.append(template.new_zeros(num_nodes, template.shape[1]))
            continue
        if len(h[ntype]) < num_nodes:
            raise ConfigError(
                f"there are {len(h[ntype])} rows for the {num_nodes} nodes of type {ntype!r} of the "
                "pair graph. Return one row per node, in the order of the last block's destinations."
            )
        # A model may return rows for more nodes.
        rows.append(h[ntype][:num_nodes])
    return torch.cat(rows)


@final
class LinkModel(nn.Module):
    """Scores pairs of nodes by rows that an encoder computes or that are trained directly.

    Args:
        encoder: Called with blocks and rows. None: trainable rows with ``scale=decoder.row_scale`` are
            scored.
        decoder: Decoder that scores pairs. The model adds a trained bias.
        etypes: ``g.canonical_etypes``.

    Raises:
        ConfigError: If the encoder divides by degrees in the whole graph, which count validation and test
            edges.
    """

    def __init__(self, encoder: nn.Module | None, decoder: Decoder, etypes: Sequence[EdgeType]) -> None:
        super().__init__()
        if encoder is not None and any(map(_uses_graph_degrees, encoder.modules())):
            raise ConfigError(
                "the encoder (model gcn, or GraphConv with norm 'both' or 'left') divides by degrees of the "
                "whole graph, which count validation and test edges. Use --model sage, sgc or gat."
            )
        self.encoder = encoder
        self.decoder = decoder
        self.etypes = list(etypes)

        # Without the bias, a model with trainable rows and a dot product would have no weight.
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, blocks: Any, h: Any, *pair_graphs: Any) -> list[Tensor]:
        """Return the (E,) scores for each pair graph, ordered like :func:`score_pairs`."""
        if self.encoder is None:
            # Without messages, the edges' ends are the first sources in the only block.
            inputs = {blocks[-1].dsttypes[0]: h} if isinstance(h, Tensor) else h
            rows = {}
            for ntype, values in inputs.items():
                rows[ntype] = values[: blocks[-1].num_dst_nodes(ntype)]
        else:
            rows = self.encoder(blocks, h)
            if pair_graphs:
                rows = gather_pair_rows(pair_graphs[0], rows)
        return [score_pairs(self.decoder, graph, rows, self.etypes) + self.bias for graph in pair_graphs]


def _uses_graph_degrees(module: nn.Module) -> bool:
    divides_by_degrees = isinstance(module, dgl.nn.GraphConv) and module._norm in ("both", "left")
    return divides_by_degrees or isinstance(module, SymmetricConv)


@contextmanager
def compute_rows(
    model: nn.Module, g: DistGraph, inputs: EntityInputs | None, feature: str = FEATURE
) -> Iterator[dict[str, DistTensor]]:
    """Yield the (N, d) rows that a :class:`LinkModel` scores, by node type. Every rank must call this.

    An encoder computes the rows along ``train_mask`` edges. These rows are deleted at the end of the block.
    Without an encoder, the rows are the inputs.
    """
    module: Any = gather_module(model)
    rows: Any = None if inputs is None else inputs.tensors
    if module.encoder is not None:
        rows = layerwise_inference(module.encoder, g, feature=feature, inputs=rows, mask=TRAIN)
    if not isinstance(rows, dict):
        rows = {g.ntypes[0]: rows}
    yield rows
    if module.encoder is not None:
        for tensor in rows.values():
            tensor.delete()


SplitEdges: TypeAlias = dict[tuple[str, str], Array]
"""Maps the node types at both ends to this rank's Q edges in a split. They are (4, Q) int64 with these rows:
index of the edge type in ``g.canonical_etypes``, source, destination, and random destination.
"""
RankedEdges: TypeAlias = Mapping[tuple[str, str], Mapping[str, Tensor]]
"""Maps the node types at both ends to columns for Q edges, see :meth:`LinkEvaluation.test_edges`."""
_NUM_BEST = 10  # maximum number of destinations that are listed for a test edge


@final
class LinkEvaluation:
    """Computes filtered ranks and AUC on validation and test edges, for ``evaluate`` in ``FitConfig``.

    An edge's destination is ranked among all nodes of the type. If both ends have one type, the source is
    ranked, too. True edges with the same relation, in any split, do not count as candidates. ``auc`` compares
    each edge with an edge to a random destination, which follows from the edge's id. The results do not
    depend on the number of ranks. A rank holds the rows for all nodes of the ranked types.

    Args:
        g: The graph, with the masks from :func:`split_edges`.
        inputs: Input rows that training uses.
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
        for mask, edges in self._edges_by_split.items():
            with evaluating(module):
                values = self._measure_split(module.decoder, rows, edges)
            for name, value in values.items():
                metrics[f"{mask.removesuffix('_mask')}_{name}"] = value
        return metrics

    def test_edges(self, model: nn.Module, stored: Mapping[str, DistTensor] | None = None) -> RankedEdges:
        """Rank this rank's test edges, with ``stored`` rows from :func:`compute_rows`. All ranks call this.

        Returns:
            Columns by pair of node types. The pairs are the same on all ranks. The columns are:

            - ``relation`` (index in ``g.canonical_etypes``), ``source``, ``destination``: (Q,) int64.
            - ``score``: (Q,) without the model's bias.
            - ``rank``: (Q,) float64 for the destination. Also ``source_rank``, if sources are ranked.
            - ``best``: (Q, K) at most 10 destinations other than the source that are no known edges.
            - ``best_scores``: (Q, K), -inf for missing destinations.

        Raises:
            ConfigError: On all ranks, if a score is NaN.
        """
        module, rows = self._read(model, stored)

        def rank_edges() -> RankedEdges:
            columns = {}
            for ntypes, edges in self._edges_by_split.get(TEST, {}).items():
                columns[ntypes] = self._find_best_ids(module.decoder, rows, ntypes, edges)
            return columns

        with evaluating(module):
            return run_on_all_ranks(self.g.session, rank_edges, ConfigError)

    def _find_best_ids(
        self, decoder: Decoder, rows: Mapping[str, Tensor], ntypes: tuple[str, str], edges: Array
    ) -> Mapping[str, Tensor]:
        """Build the :meth:`test_edges` columns for the edges between two node types."""
        num_edges = edges.shape[1]
        num_best = min(_NUM_BEST, len(rows[ntypes[1]]))
        # Scores in bfloat16 are kept as float32, and float64 stays.
        dtype = torch.promote_types(torch.float32, rows[ntypes[1]].dtype)
        scores = torch.empty(num_edges, dtype=dtype)
        best_ids = torch.empty(num_edges, num_best, dtype=torch.int64)
        best_scores = torch.empty(num_edges, num_best, dtype=dtype)
        num_scored = 0

        def keep_best(positive: Tensor, candidates: Tensor) -> None:
            nonlocal num_scored
            batch = slice(num_scored, num_scored + len(candidates))
            num_scored = batch.stop

            # Known edges have the score NaN. An edge from a node to itself is no candidate either.
            candidates.masked_fill_(candidates.isnan(), -math.inf)
            if ntypes[0] == ntypes[1]:
                sources = torch.from_numpy(edges[1, batch]).to(candidates.device)
                candidates[torch.arange(len(sources), device=sources.device), sources] = -math.inf
            best = candidates.topk(num_best)
            scores[batch] = positive.cpu()
            best_ids[batch] = best.indices.cpu()
            best_scores[batch] = best.values.cpu()

        queries = self._make_queries(ntypes, edges)
        ranks = list(self._rank(decoder, rows, ntypes, queries, keep_best))
        relation, source, destination, _ = torch.from_numpy(edges)
        columns = {"relation": relation, "source": source, "destination": destination, "rank": ranks[0]}
        if len(ranks) == 2:
            columns["source_rank"] = ranks[1]
        return columns | {"score": scores, "best": best_ids, "best_scores": best_scores}

    def _read(self, model: nn.Module, stored: Any = None) -> tuple[Any, dict[str, Tensor]]:
        """Return the uncut model, and all rows for each ranked node type. Every rank must call this.

        The first call also reads the splits' edges. ``stored`` are rows for all nodes by type that were
        computed before. With None, the rows are computed.
        """
        if self._true_edges is None:
            for mask in (VALIDATION, TEST):
                split_edges = self._read_split(mask)
                num_edges = sum(edges.shape[1] for edges in split_edges.values())
                # A split without edges on any rank is left out.
                if gather_int64([num_edges], self.g.session).any():
                    self._edges_by_split[mask] = split_edges
            self._true_edges = self._find_true_edges(self._edges_by_split.values())
        module: Any = gather_module(model)
        open_rows: Any = nullcontext(stored)
        if stored is None:
            open_rows = compute_rows(module, self.g, self.inputs, self.feature)

        # Read the rows for all nodes, because every node of these types may be an answer.
        ntypes = {etype[0] for etype in self.targets} | {etype[2] for etype in self.targets}
        with open_rows as rows:
            return module, {ntype: rows[ntype][:].to(module.bias) for ntype in ntypes}

    def _read_split(self, split: str) -> SplitEdges:
        """Return this rank's edges in a split. The edges' ids determine the random destinations."""
        g = self.g
        edges_by_ntypes: SplitEdges = {}
        for relation, etype in enumerate(g.canonical_etypes):
            if etype not in self.targets or split not in g.edges[etype].data:
                continue
            ids = edge_split(g.edges[etype].data[split], g.get_partition_book(), etype).numpy()
            source, destination = (ends.numpy() for ends in g.find_edges(ids, etype))
            random_words = hash_ids(ids, stream_key(0, 1, relation))
            random_ids = (random_words % np.uint64(g.num_nodes(etype[2]))).astype(np.int64)
            edges = np.stack([np.full_like(source, relation), source, destination, random_ids])

            # Several edge types may have these node types.
            ntypes = (etype[0], etype[2])
            if ntypes in edges_by_ntypes:
                edges = np.concatenate([edges_by_ntypes[ntypes], edges], 1)
            edges_by_ntypes[ntypes] = edges
        return edges_by_ntypes

    def _make_queries(self, ntypes: tuple[str, str], edges: Array) -> list[Array]:
        """Return (3, Q) subjects, relations and answers for each end that is ranked."""
        relation, source, destination = edges[:3]
        queries = [np.stack([source, relation, destination])]
        # Queries for sources have relations beyond all edge types. So their known answers do not mix with the
        # answers to queries for destinations.
        if ntypes[0] == ntypes[1]:
            source_relation = relation + len(self.g.canonical_etypes)
            queries.append(np.stack([destination, source_relation, source]))
        return queries

    def _find_true_edges(self, splits: Iterable[SplitEdges]) -> KnownEdges:
        """Return the true edges that answer all ranks' queries. Every rank must call this."""
        g = self.g
        id_limit = max(map(self.g.num_nodes, self.g.ntypes))
        empty = np.empty((3, 0), np.int64)

        def make_keys(queries: Array) -> Array:
            return np.asarray(queries[1] * id_limit + queries[0])

        # Gather the subjects and relations that any rank asks for.
        queries = [empty]
        for split in splits:
            for ntypes, edges in split.items():
                queries += self._make_queries(ntypes, edges)
        rank_keys = np.unique(make_keys(np.concatenate(queries, 1)))
        query_keys = np.unique(np.concatenate(gather_arrays(rank_keys, g.session)))

        # Select the owned edges with such a subject and relation.
        answers = [empty]
        for relation, etype in enumerate(g.canonical_etypes):
            if etype not in self.targets:
                continue
            owned_range = g.get_edge_partition_policy(etype).owned_range
            for first, last in split_range(owned_range, _EDGES_AT_ONCE):
                source, destination = g.find_edges(np.arange(first, last), etype)
                edges = torch.stack([torch.full_like(source, relation), source, destination]).numpy()
                for query in self._make_queries((etype[0], etype[2]), edges):
                    answers.append(query[:, np.isin(make_keys(query), query_keys)])

        # The collective concatenates rows, so each edge is sent as a row.
        rank_answers = np.concatenate(answers, 1).T.copy()
        all_answers = np.concatenate(gather_arrays(rank_answers, g.session))
        return KnownEdges(*torch.from_numpy(all_answers.T.copy()))

    def _measure_split(
        self, decoder: Decoder, rows: Mapping[str, Tensor], split_edges: SplitEdges
    ) -> dict[str, float]:
        """Return a split's metrics by name. Every rank must call this."""

        def score_edges() -> tuple[Tensor, Tensor]:
            """Return the ranks for all ends, and (2, Q) scores for the edges and for their random pairs."""
            ranks = [torch.empty(0)]
            scores = [torch.empty(2, 0)]
            for ntypes, edges in split_edges.items():
                ranks += self._rank(decoder, rows, ntypes, self._make_queries(ntypes, edges))
                destination_rows = rows[ntypes[1]]
                relation, source, *destinations = torch.from_numpy(edges).to(destination_rows.device)
                source_rows = rows[ntypes[0]][source]
                pairs = [decoder(source_rows, relation, destination_rows[ids]) for ids in destinations]
                scores.append(torch.stack(pairs).cpu())
            return torch.cat(ranks), torch.cat(scores, 1)

        session = self.g.session
        ranks, scores = run_on_all_ranks(session, score_edges, ConfigError)
        # The edges are positive, and the random pairs are negative.
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
        rows: Mapping[str, Tensor],
        ntypes: tuple[str, str],
        queries: Sequence[Array],
        after: AfterRanking | None = None,
    ) -> Iterator[Tensor]:
        """Yield (Q,) ranks for destinations, then for sources if there are queries for them.

        ``queries`` come from :meth:`_make_queries`. ``after`` is called for destinations only.
        """
        source_rows, destination_rows = (rows[ntype] for ntype in ntypes)

        def score_objects(ids: Tensor, relation: Tensor) -> Tensor:
            relation = relation.to(source_rows.device)
            return decoder.all_objects(source_rows[ids], relation, destination_rows)

        def score_subjects(ids: Tensor, relation: Tensor) -> Tensor:
            relation = relation.to(source_rows.device) - len(self.g.canonical_etypes)
            return decoder.all_subjects(destination_rows[ids], relation, source_rows)

        known = self._true_edges
        yield rank_of_answer(score_objects, *torch.from_numpy(queries[0]), known=known, after=after)
        if len(queries) == 2:
            yield rank_of_answer(score_subjects, *torch.from_numpy(queries[1]), known=known)


_EDGES_AT_ONCE = 1 << 22  # edges whose ends are read at a time


def link_loader(
    g: DistGraph,
    targets: Sequence[EdgeType],
    *,
    fanouts: Sequence[int] | None,
    batch_size: int,
    negatives: int = 4,
    inputs: EntityInputs | None = None,
    opened: OpenedStrategy | None = None,
    **options: Any,
) -> Any:
    """Return a loader over training edges and their negatives. Every rank must call this.

    Messages run along ``train_mask`` edges (:func:`split_edges`). Three kinds of edges are left out: those in
    the batch, their opposite edges in the same type, and those in the types from :func:`find_reverse_types`.
    Full-graph strategies cannot leave them out, and log that on rank 0.

    Args:
        g: The graph.
        targets: Edge types to predict.
        fanouts: Neighbours per layer. None: no messages, for a model without encoder.
        batch_size: Edges per rank and step.
        negatives: Negatives per edge and replaced end. The destination is replaced, and the source too if
            both ends have one type in all targets.
        inputs: Input rows that training uses.
        opened: Strategy that makes the loader in a trial. None: the session's strategy.
        options: Options for :class:`DistEdgeDataLoader`.

    Raises:
        ConfigError: If ``fanouts`` is None, but the strategy passes messages over the graph in each step.
    """
    is_trial = opened is not None
    opened = opened or open_strategy(g)
    book = g.get_partition_book()
    eids = {etype: edge_split(g.edges[etype].data[TRAIN], book, etype) for etype in targets}
    replaces_sources = all(etype[0] == etype[2] for etype in targets)
    options["negative_sampler"] = Uniform(negatives, "both" if replaces_sources else "tail")

    excludes_edges = opened.strategy.traits.excludes_edges
    if fanouts is None and not excludes_edges:
        raise ConfigError(
            "a model without encoder passes no messages, but strategies of whole graphs compute rows of all "
            "nodes in each step. Use --strategy data_parallel, or a --model other than none."
        )

    options |= {"batch_size": batch_size, "shuffle": True}
    if fanouts is None:
        one_empty_block = dgl.dataloading.NeighborSampler([0])
        return opened.edge_loader(eids, one_empty_block, **options)

    if excludes_edges:
        options |= {"exclude": "reverse_id", "reverse_eids": _find_opposite_edges(g, targets)}
    elif g.session.topology.rank == 0 and not is_trial:
        log.warning(
            "strategy %s passes messages along all training edges, even those of the batch. "
            "Strategy data_parallel leaves the edges of each batch out.",
            g.session.strategy,
        )

    columns = {ntype: [FEATURE] for ntype in g.ntypes}
    if inputs is not None:
        columns = {ntype: [inputs.feature] for ntype in inputs.feature_widths}
    sampler = dgl.dataloading.NeighborSampler(list(fanouts), mask=TRAIN, prefetch_node_feats=columns)
    return opened.edge_loader(eids, sampler, **options)


def _find_opposite_edges(
    g: DistGraph, targets: Sequence[EdgeType]
) -> dict[EdgeType, dict[EdgeType, DistTensor]]:
    """Return the opposite edges' ids for each target, by their type. Every rank must call this."""
    opposite_edges = {}
    for etype, reverse_types in find_reverse_types(g, targets).items():
        # An edge between two nodes of one type may have its opposite edge in the same edge type.
        opposite_types = [etype, *reverse_types] if etype[0] == etype[2] else reverse_types
        opposite_edges[etype] = {
            opposite_type: reverse_edge_ids(g, etype, reverse_etype=opposite_type)
            for opposite_type in opposite_types
        }
    return opposite_edges
