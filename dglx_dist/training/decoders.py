"""From the rows of two nodes to the score of the edge between them, and to those of all possible edges."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from dglx_dist.records import EdgeType


class Decoder(nn.Module, ABC):
    """Scores (subject, relation, object); relations are numbers, rows are d wide."""

    @abstractmethod
    def forward(self, subject: Tensor, relation: Tensor, objects: Tensor) -> Tensor:
        """Return the (E,) scores of (E, d) subjects and objects with (E,) int64 relations."""

    @abstractmethod
    def all_objects(self, subject: Tensor, relation: Tensor, candidates: Tensor) -> Tensor:
        """Return the (B, C) scores of (B, d) subjects with (C, d) objects under (B,) int64 relations."""

    @abstractmethod
    def all_subjects(self, objects: Tensor, relation: Tensor, candidates: Tensor) -> Tensor:
        """Return the (B, C) scores of (C, d) subjects with (B, d) objects under (B,) int64 relations."""


@final
class DotProduct(Decoder):
    """``sum_i s_i o_i``; takes no notice of the relation."""

    def forward(self, subject: Tensor, relation: Tensor, objects: Tensor) -> Tensor:
        """See :meth:`Decoder.forward`."""
        return (subject * objects).sum(-1)

    def all_objects(self, subject: Tensor, relation: Tensor, candidates: Tensor) -> Tensor:
        """See :meth:`Decoder.all_objects`."""
        return subject @ candidates.T

    def all_subjects(self, objects: Tensor, relation: Tensor, candidates: Tensor) -> Tensor:
        """See :meth:`Decoder.all_subjects`."""
        return objects @ candidates.T


@final
class DistMult(Decoder):
    """``sum_i s_i r_i o_i`` with a row r per relation (Yang et al. 2015); the same in both directions.

    Args:
        num_relations: R.
        width: d.
    """

    def __init__(self, num_relations: int, width: int) -> None:
        super().__init__()
        self.relations = nn.Parameter(torch.empty(num_relations, width))
        nn.init.xavier_uniform_(self.relations)

    def forward(self, subject: Tensor, relation: Tensor, objects: Tensor) -> Tensor:
        """See :meth:`Decoder.forward`."""
        return (subject * self.relations[relation] * objects).sum(-1)

    def all_objects(self, subject: Tensor, relation: Tensor, candidates: Tensor) -> Tensor:
        """See :meth:`Decoder.all_objects`."""
        return (subject * self.relations[relation]) @ candidates.T

    def all_subjects(self, objects: Tensor, relation: Tensor, candidates: Tensor) -> Tensor:
        """See :meth:`Decoder.all_subjects`."""
        return (objects * self.relations[relation]) @ candidates.T


@final
class Bilinear(Decoder):
    """``s' W_r o`` with a matrix per relation (RESCAL, Nickel et al. 2011).

    Args:
        num_relations: R.
        width: d.
    """

    def __init__(self, num_relations: int, width: int) -> None:
        super().__init__()
        self.matrices = nn.Parameter(torch.empty(num_relations, width, width))
        for matrix in self.matrices:
            nn.init.xavier_uniform_(matrix)

    def forward(self, subject: Tensor, relation: Tensor, objects: Tensor) -> Tensor:
        """See :meth:`Decoder.forward`."""
        return (self._times(subject, relation) * objects).sum(-1)

    def all_objects(self, subject: Tensor, relation: Tensor, candidates: Tensor) -> Tensor:
        """See :meth:`Decoder.all_objects`."""
        return self._times(subject, relation) @ candidates.T

    def all_subjects(self, objects: Tensor, relation: Tensor, candidates: Tensor) -> Tensor:
        """See :meth:`Decoder.all_subjects`."""
        out = objects.new_empty(len(objects), self.matrices.shape[1])
        for number in _distinct(relation):
            out[relation == number] = objects[relation == number] @ self.matrices[number].T
        return out @ candidates.T

    def _times(self, subject: Tensor, relation: Tensor) -> Tensor:
        # One product per relation: a (d, d) matrix per edge would not fit.
        out = subject.new_empty(len(subject), self.matrices.shape[2])
        for number in _distinct(relation):
            out[relation == number] = subject[relation == number] @ self.matrices[number]
        return out


def _distinct(relation: Tensor) -> list[int]:
    counts = torch.bincount(relation)
    return [int(number) for number in counts.nonzero()]


def edge_scores(
    decoder: Decoder, pair_graph: Any, h: Mapping[str, Tensor] | Tensor, etypes: Sequence[EdgeType]
) -> dict[EdgeType, Tensor]:
    """Return {edge type: (E,) scores} of the edges of a pair graph; E may be 0.

    Args:
        decoder: Scores the ends.
        pair_graph: As an edge loader yields it, for positives or for negatives.
        h: (num_nodes, d) rows of its nodes per node type, or a tensor when there is one node type.
        etypes: Edge types in the order in which the decoder numbers them: ``g.canonical_etypes``.
    """
    rows = dict.fromkeys(pair_graph.ntypes, h) if isinstance(h, Tensor) else h
    scores = {}
    for number, etype in enumerate(etypes):
        # A type without edges is scored too: a rank without any must still take part in backward.
        if etype not in pair_graph.canonical_etypes:
            continue
        u, v = (ends.long() for ends in pair_graph.edges(etype=etype))
        relation = torch.full_like(u, number)
        scores[etype] = decoder(rows[etype[0]][u], relation, rows[etype[2]][v])
    return scores
