"""Link prediction: ranking losses, the split of edges, the model, and exact filtered ranking."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dglx_dist.comm.collectives import gather_arrays, run_on_all_ranks
from dglx_dist.errors import ConfigError
from dglx_dist.graph.analysis import NO_REVERSE, reverse_edge_ids
from dglx_dist.graph.dist_tensor import DistTensor
from dglx_dist.graph.split import edge_split
from dglx_dist.keyed_random import hash_ids, splitmix64, stream_key
from dglx_dist.records import FEATURE, SPLITS, Array, EdgeType
from dglx_dist.training.inference import batches, evaluating, layerwise_inference, whole_of
from dglx_dist.training.metrics import KnownEdges, hits_at, mrr, rank_of_answer, roc_auc
from dglx_dist.training.models import Decoder, pair_scores
from dglx_dist.training.relational import EntityInputs

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


PairLoss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(P,) scores of edges and (P, K) of their negatives to the mean loss over the edges."""


def bpr_loss(positive: Tensor, negative: Tensor) -> Tensor:
    """Mean of ``-log sigmoid(s - s')`` over an edge and each of its negatives (Rendle et al. 2009)."""
    return F.softplus(negative - positive[:, None]).mean()


def softmax_loss(positive: Tensor, negative: Tensor) -> Tensor:
    """Mean cross-entropy of an edge among itself and its negatives (sampled softmax)."""
    scores = torch.cat([positive[:, None], negative], 1)
    return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.int64, device=scores.device))


PAIR_LOSSES: Mapping[str, PairLoss | None] = {"bce": None, "bpr": bpr_loss, "softmax": softmax_loss}
"""Name to the ``pair_loss`` of :class:`dglx_dist.training.tasks.LinkPrediction`."""

TRAIN, VALIDATION, TEST = SPLITS
_SHARES = (0.8, 0.9)
"""Training edges end at the first, validation edges at the second."""
_TYPE_SHIFT = np.int64(44)
"""Bits of a node id in the key of a pair."""
_REVERSED = ("{}-rev", "rev-{}", "{}_rev", "rev_{}", "reverse_{}")
"""Names of the edge type that goes the other way."""


def reverse_type(g: DistGraph, etype: EdgeType) -> EdgeType | None:
    """Return the type of the reverse edges of ``etype`` by its name, such as ``NAME-rev``; None: none."""
    names = ((etype[2], form.format(etype[1]), etype[0]) for form in _REVERSED)
    return next((one for one in names if one in g.canonical_etypes), None)


def split_edges(g: DistGraph, targets: Sequence[EdgeType]) -> bool:
    """Give the ``targets`` edge masks of training, validation and test, unless they have them. Collective.

    The split is 80 / 10 / 10, keyed by the original ids of the two ends of an edge: it is the same for any
    number of parts and ranks, and all edges between two nodes of one type, in both directions, are on one
    side. Every other edge type gets a ``train_mask`` of ones, but edges that are the reverse of a target
    (:func:`reverse_type`) that of their target.

    Returns:
        Whether masks were made; False: those of the dataset.

    Raises:
        ConfigError: on all ranks: some targets have a ``train_mask`` and others not.
    """

    def check() -> list[EdgeType]:
        without = [etype for etype in targets if TRAIN not in g.edges[etype].data]
        if without and len(without) < len(targets):
            raise ConfigError(
                f"edges of {without[0]} have no {TRAIN!r}, but those of other targets have; give all of them "
                "masks or none, or name fewer edge types with --target"
            )
        return without

    without = run_on_all_ranks(g.session, check, ConfigError)
    for etype in without:
        for place, name in enumerate(SPLITS):
            _add_mask(g, etype, name, partial(_is_on_side, g, etype, place))
    reverse = {reverse_type(g, etype): etype for etype in targets}
    for etype in g.canonical_etypes:
        if TRAIN in g.edges[etype].data:
            continue
        if etype in reverse:
            _add_mask(g, etype, TRAIN, _mask_of_reverse(g, etype, reverse[etype]))
        else:
            _add_mask(g, etype, TRAIN, lambda ids: np.ones(len(ids), np.bool_))
    return bool(without)


def _add_mask(g: DistGraph, etype: EdgeType, name: str, mask_of: Callable[[Array], Array]) -> None:
    policy = g.get_edge_partition_policy(etype)

    def rows(_shape: tuple[int, ...], _dtype: torch.dtype) -> Tensor:
        first, last = (int(at) for at in policy.bounds[policy.part_id : policy.part_id + 2])
        return torch.from_numpy(mask_of(np.arange(first, last)))

    DistTensor((g.num_edges(etype),), torch.bool, name, rows, policy, graph=g)


def _is_on_side(g: DistGraph, etype: EdgeType, side: int, ids: Array) -> Array:
    """Return (K,) whether edges are on a side: 0 training, 1 validation, 2 test."""
    ends = []
    for ntype, nodes in zip((etype[0], etype[2]), g.find_edges(ids, etype), strict=True):
        ends.append(g.orig_ids(nodes, ntype).numpy() + (g.ntypes.index(ntype) << _TYPE_SHIFT))
    low, high = np.minimum(*ends), np.maximum(*ends)
    words = splitmix64(hash_ids(low, stream_key(0, 0, 0)) ^ hash_ids(high, stream_key(0, 0, 1)))
    return np.asarray(np.searchsorted(_SHARES, words / 2.0**64, side="right") == side)


def _mask_of_reverse(g: DistGraph, etype: EdgeType, target: EdgeType) -> Callable[[Array], Array]:
    table, mask = reverse_edge_ids(g, etype, reverse_etype=target), g.edges[target].data[TRAIN]

    def mask_of(ids: Array) -> Array:
        targets = table[ids].numpy()
        found = targets != NO_REVERSE
        known = np.ones(len(ids), np.bool_)
        known[found] = mask[targets[found]].bool().numpy()
        return known

    return mask_of


@final
class LinkModel(nn.Module):
    """Rows of nodes, from an encoder or trainable ones as they are, and the scores of pairs of them.

    Args:
        encoder: Called with blocks and rows; None: scores trainable rows times ``decoder.row_scale``.
        decoder: Scores pairs; a bias that is trained is added.
        etypes: ``g.canonical_etypes``.
    """

    def __init__(self, encoder: nn.Module | None, decoder: Decoder, etypes: Sequence[EdgeType]) -> None:
        super().__init__()
        self.encoder, self.decoder, self.etypes = encoder, decoder, list(etypes)
        # A dot product of trainable rows has no other weight.
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, blocks: Any, h: Any, *pair_graphs: Any) -> list[Tensor]:
        """Return the (E,) scores of each pair graph as :func:`pair_scores` orders them."""
        if self.encoder is not None:
            rows = self.encoder(blocks, h)
        else:
            by_type = {blocks[-1].dsttypes[0]: h} if isinstance(h, Tensor) else h
            rows = {
                ntype: of_type[: blocks[-1].num_dst_nodes(ntype)] * self.decoder.row_scale
                for ntype, of_type in by_type.items()
            }
        return [pair_scores(self.decoder, graph, rows, self.etypes) + self.bias for graph in pair_graphs]


LINK_METRICS = ("mrr", "hits@1", "hits@3", "hits@10", "auc")
_HITS = re.compile(r"hits@([1-9][0-9]{0,8})")


def check_link_metric(name: str) -> int | None:
    """Return K of ``hits@K``, None for ``mrr`` and ``auc``; ConfigError for another name."""
    match = _HITS.fullmatch(name)
    if match is None and name not in ("mrr", "auc"):
        raise ConfigError(f"metric {name!r} of link prediction must be mrr, auc or hits@K, like hits@10")
    return None if match is None else int(match[1])


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """This rank's share of the edges of a split whose ends are of the same two node types."""

    ntypes: tuple[str, str]
    relation: Array
    """(Q,) int64 places in ``g.canonical_etypes``; like the others."""
    ends: tuple[Array, Array]
    random: Array
    """A keyed random destination for each edge."""


@final
@dataclass(frozen=True, kw_only=True)
class LinkEvaluation:
    """Filtered ranks and AUC of validation and test edges, as ``evaluate`` of ``FitConfig``.

    Every candidate is ranked: the destinations of an edge among all nodes of the type, and if both ends are
    of one type, the sources too. True edges of the same relation, of any split, do not count as candidates.
    ``auc`` compares each edge with one whose destination is drawn at random, keyed by the edge. Equal on any
    number of ranks. A rank holds the rows of all nodes of the ranked types.

    Args:
        g: The graph, with the masks of :func:`split_edges`.
        targets: Edge types.
        inputs: As those of the training.
        metrics: ``mrr``, ``auc``, ``hits@K``; the first decides which epoch is the best.
        feature: Node data, without ``inputs``.
    """

    g: DistGraph
    targets: Sequence[EdgeType]
    inputs: EntityInputs | None = None
    metrics: Sequence[str] = LINK_METRICS
    feature: str = FEATURE
    _known: dict[str, Any] = field(default_factory=dict, repr=False)

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Return ``val_mrr`` and so on, the first metric also as ``val_mask``, ``test_mask``. Collective."""
        if not self._known:
            asked = {name: list(self._share(name)) for name in (VALIDATION, TEST)}
            self._known.update(asked=asked, edges=self._true_edges([*asked[VALIDATION], *asked[TEST]]))
        module: Any = whole_of(model)
        rows = self._rows(module)
        found: dict[str, float] = {}
        for name, asked in self._known["asked"].items():
            if any(name in self.g.edges[etype].data for etype in self.targets):
                scores = self._evaluated(module, rows, asked)
                found |= {name: scores[self.metrics[0]]}
                found |= {f"{name.removesuffix('_mask')}_{key}": value for key, value in scores.items()}
        return found

    def _share(self, split: str) -> Iterator[_Asked]:
        pairs: dict[tuple[str, str], list[Array]] = {}
        g = self.g
        for number, etype in enumerate(g.canonical_etypes):
            columns = pairs.setdefault((etype[0], etype[2]), [])
            if etype in self.targets and split in g.edges[etype].data:
                ids = edge_split(g.edges[etype].data[split], g.get_partition_book(), etype).numpy()
                u, v = (ends.numpy() for ends in g.find_edges(ids, etype))
                words = hash_ids(ids, stream_key(0, 1, number))
                random = (words % np.uint64(g.num_nodes(etype[2]))).astype(np.int64)
                columns.append(np.stack([np.full_like(u, number), u, v, random]))
        for ntypes, columns in pairs.items():
            if columns:
                relation, u, v, random = np.concatenate(columns, 1)
                yield _Asked(ntypes=ntypes, relation=relation, ends=(u, v), random=random)

    def _queries(self, ntypes: tuple[str, str], relation: Array, u: Array, v: Array) -> list[Array]:
        """Return (3, Q) subjects, relations and answers for each end that is asked for."""
        # The relation tells the types of the ids, and which end is asked for.
        asked = [np.stack([u, relation, v])]
        if ntypes[0] == ntypes[1]:
            asked.append(np.stack([v, relation + len(self.g.canonical_etypes), u]))
        return asked

    def _true_edges(self, asked: Sequence[_Asked]) -> KnownEdges:
        """Return the answers of all ranks' queries. Collective."""
        g, width = self.g, max(map(self.g.num_nodes, self.g.ntypes))

        def keys_of(queries: Array) -> Array:
            return np.asarray(queries[1] * width + queries[0])

        local = [
            keys_of(query) for one in asked for query in self._queries(one.ntypes, one.relation, *one.ends)
        ]
        keys = np.unique(np.concatenate([np.empty(0, np.int64), *local]))
        wanted, kept = np.unique(np.concatenate(gather_arrays(keys, g.session))), [np.empty((3, 0), np.int64)]
        for number, etype in enumerate(g.canonical_etypes):
            edges = g.get_edge_partition_policy(etype).owned_range if etype in self.targets else (0, 0)
            for first, last in batches(edges, _EDGES_AT_ONCE):
                u, v = (ends.numpy() for ends in g.find_edges(np.arange(first, last), etype))
                for query in self._queries((etype[0], etype[2]), np.full_like(u, number), u, v):
                    kept.append(query[:, np.isin(keys_of(query), wanted)])
        edges_of_all = np.concatenate(gather_arrays(np.concatenate(kept, 1).T.copy(), g.session))
        return KnownEdges(*torch.from_numpy(edges_of_all.T.copy()))

    def _rows(self, module: Any) -> dict[str, Tensor]:
        """Return the (N, d) rows of all nodes of the types of the targets. Collective."""
        ntypes = list(dict.fromkeys(ntype for etype in self.targets for ntype in (etype[0], etype[2])))
        given: Any = None if self.inputs is None else self.inputs.tensors
        device, scale = module.bias.device, 1.0
        if module.encoder is None:
            made, scale = given, module.decoder.row_scale
        else:
            made = layerwise_inference(
                module.encoder, self.g, feature=self.feature, inputs=given, ntypes=ntypes, mask=TRAIN
            )
        of_type: dict[str, DistTensor] = made if isinstance(made, dict) else {ntypes[0]: made}
        rows = {ntype: of_type[ntype][:].to(device, module.bias.dtype) * scale for ntype in ntypes}
        if module.encoder is not None:
            for tensor in of_type.values():
                tensor.delete()
        return rows

    def _evaluated(
        self, module: Any, rows: Mapping[str, Tensor], asked: Sequence[_Asked]
    ) -> dict[str, float]:
        ranks, scores = [torch.empty(0)], [torch.empty(2, 0)]
        with evaluating(module):
            for one in asked:
                candidates = [rows[ntype] for ntype in one.ntypes]
                ranks += self._ranks(module.decoder, candidates, one)
                ends = [torch.from_numpy(ids).to(module.bias.device) for ids in (*one.ends, one.random)]
                source, *others = (candidates[place][ids] for place, ids in zip((0, 1, 1), ends, strict=True))
                relation = torch.from_numpy(one.relation).to(module.bias.device)
                scores.append(
                    torch.stack([module.decoder(source, relation, other) for other in others]).cpu()
                )
        of_all, pairs, session = torch.cat(ranks), torch.cat(scores, 1), self.g.session
        label = torch.ones_like(pairs)
        label[1] = 0
        found = {}
        for name in self.metrics:
            if name == "auc":
                found[name] = roc_auc(pairs.flatten(), label.flatten(), session)
            else:
                k = check_link_metric(name)
                found[name] = mrr(of_all, session) if k is None else hits_at(k, of_all, session)
        return found

    def _ranks(self, decoder: Decoder, candidates: Sequence[Tensor], one: _Asked) -> Iterator[Tensor]:
        device = candidates[0].device
        num_relations = len(self.g.canonical_etypes)

        def objects(subject: Tensor, relation: Tensor) -> Tensor:
            rows = candidates[0][subject.to(device)]
            return decoder.all_objects(rows, relation.to(device), candidates[1])

        def subjects(given: Tensor, relation: Tensor) -> Tensor:
            rows = candidates[1][given.to(device)]
            return decoder.all_subjects(rows, relation.to(device) - num_relations, candidates[0])

        queries = self._queries(one.ntypes, one.relation, *one.ends)
        for score_all, query in zip((objects, subjects), queries, strict=False):
            yield rank_of_answer(score_all, *map(torch.from_numpy, query), known=self._known["edges"])


_EDGES_AT_ONCE = 1 << 22
