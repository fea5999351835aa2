"""Scores by hand, all against all as one by one, and over pair graphs of several types."""

from __future__ import annotations

import dgl
import numpy as np
import pytest
import torch

from dglx_dist.training.models import Bilinear, Decoder, DistMult, DotProduct, edge_scores

RELATIONS, WIDTH = 3, 4


def decoder_of(kind: str) -> Decoder:
    torch.manual_seed(1)
    made = {
        "dot": DotProduct,
        "distmult": lambda: DistMult(RELATIONS, WIDTH),
        "bilinear": lambda: Bilinear(RELATIONS, WIDTH),
    }[kind]()
    return made.double()


def test_scores_by_hand() -> None:
    subject, relation, objects = torch.tensor([[1.0, 2.0]]), torch.tensor([1]), torch.tensor([[3.0, 5.0]])
    assert DotProduct()(subject, relation, objects).tolist() == [13.0]
    distmult, bilinear = DistMult(2, 2), Bilinear(2, 2)
    with torch.no_grad():
        distmult.relations.copy_(torch.tensor([[9.0, 9.0], [2.0, -1.0]]))
        bilinear.matrices[1] = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    assert distmult(subject, relation, objects).tolist() == [1 * 2 * 3 - 2 * 5]
    # 1 * 1 * 5 and 2 * 2 * 3
    assert bilinear(subject, relation, objects).tolist() == [17.0]


@pytest.mark.parametrize("kind", ["dot", "distmult", "bilinear"])
def test_all_candidates_are_scored_as_one_by_one(kind: str) -> None:
    decoder = decoder_of(kind)
    rows, candidates = torch.randn(5, WIDTH).double(), torch.randn(7, WIDTH).double()
    relation = torch.tensor([0, 2, 2, 1, 0])
    with torch.no_grad():
        objects = decoder.all_objects(rows, relation, candidates)
        subjects = decoder.all_subjects(rows, relation, candidates)
        for b in range(5):
            for c in range(7):
                one, other, number = rows[b : b + 1], candidates[c : c + 1], relation[b : b + 1]
                assert float(objects[b, c]) == pytest.approx(float(decoder(one, number, other)), abs=1e-12)
                assert float(subjects[b, c]) == pytest.approx(float(decoder(other, number, one)), abs=1e-12)


def test_pair_graphs_of_several_types() -> None:
    etypes = [("a", "no", "b"), ("a", "to", "b"), ("b", "in", "b")]
    pairs = dgl.heterograph(
        {etypes[0]: ([], []), etypes[1]: ([0, 2], [1, 0]), etypes[2]: ([1], [1])},
        num_nodes_dict={"a": 3, "b": 2},
    )
    h = {"a": torch.randn(3, WIDTH).double(), "b": torch.randn(2, WIDTH).double()}
    decoder = decoder_of("distmult")
    scores = edge_scores(decoder, pairs, h, etypes)
    assert [len(scores[etype]) for etype in etypes] == [0, 2, 1]
    expected = (h["a"][[0, 2]] * decoder.relations[1] * h["b"][[1, 0]]).sum(1)
    np.testing.assert_allclose(scores[etypes[1]].detach(), expected.detach(), atol=1e-12)
    scores[etypes[0]].sum().backward()


def test_one_type_takes_a_tensor() -> None:
    pairs = dgl.graph(([0, 1], [1, 2]), num_nodes=3)
    h = torch.eye(3)
    (scores,) = edge_scores(DotProduct(), pairs, h, pairs.canonical_etypes).values()
    assert scores.tolist() == [0.0, 0.0]
