"""Negative edges, alone and in batches of edges."""

from typing import Any

import numpy as np
import pytest
import torch
from dgl.dataloading import negative_sampler as dgl_negative

from dglx_dist.dataloading import negative
from dglx_dist.dataloading.negative import NegativeSampler, Positives, open_negative, read_negative
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.records import EDGE_TYPE

KINDS = [negative.Uniform(3), negative.PerSourceUniform(3), negative.InBatch(3)]


def positives(g: DistGraph, ids: list[int], *, seed: int = 1, epoch: int = 0) -> Positives:
    edges = np.array(ids, np.int64)
    sources, destinations = (ends.numpy() for ends in g.find_edges(edges))
    return Positives(
        etype=EDGE_TYPE, number=0, ids=edges, ends=(sources, destinations), num_nodes=(g.num_nodes(),) * 2,
        seed=seed, epoch=epoch,
    )  # fmt: skip


def draw(sampler: NegativeSampler, g: DistGraph, edges: Positives) -> tuple[np.ndarray, np.ndarray]:
    return open_negative(g, sampler, [EDGE_TYPE])([edges])[EDGE_TYPE]


@pytest.mark.parametrize("sampler", KINDS, ids=lambda sampler: type(sampler).__name__)
@pytest.mark.parametrize("corrupt", ["tail", "head", "both"])
def test_one_end_of_each_edge_is_kept(graph: DistGraph, sampler: NegativeSampler, corrupt: str) -> None:
    edges = positives(graph, list(range(0, 400, 9)))
    kept = type(sampler)(3, corrupt=corrupt)
    sources, destinations = (ends.reshape(len(edges.ids), -1) for ends in draw(kept, graph, edges))
    assert sources.shape[1] == (6 if corrupt == "both" else 3)
    tails = slice(0, 0) if corrupt == "head" else slice(0, 3)
    heads = slice(0, 0) if corrupt == "tail" else slice(-3, None)
    assert all(len(ends) == 0 for ends in draw(kept, graph, positives(graph, [])))
    assert (sources[:, tails] == edges.ends[0][:, None]).all()
    assert (destinations[:, heads] == edges.ends[1][:, None]).all()
    for drawn in (destinations[:, tails], sources[:, heads]):
        assert ((drawn >= 0) & (drawn < graph.num_nodes())).all()
        assert drawn.size == 0 or len(np.unique(drawn)) > 10


@pytest.mark.parametrize("sampler", KINDS[:2], ids=lambda sampler: type(sampler).__name__)
def test_an_edge_has_its_negatives_in_whatever_batch(graph: DistGraph, sampler: NegativeSampler) -> None:
    all_ends = draw(sampler, graph, positives(graph, [7, 300, 12, 99]))[1].reshape(4, 3)
    piece = draw(sampler, graph, positives(graph, [99, 300]))[1].reshape(2, 3)
    assert piece.tolist() == [all_ends[3].tolist(), all_ends[1].tolist()]
    assert draw(sampler, graph, positives(graph, [7, 300, 12, 99], epoch=1))[1].tolist() != all_ends.tolist()
    assert draw(sampler, graph, positives(graph, [7, 300, 12, 99], seed=2))[1].tolist() != all_ends.tolist()


def test_uniform_reaches_every_node_equally_often(graph: DistGraph) -> None:
    edges = positives(graph, list(range(graph.num_edges())))
    counts = np.bincount(draw(negative.Uniform(200), graph, edges)[1], minlength=60)
    mean = counts.sum() / 60
    chi2 = ((counts - mean) ** 2 / mean).sum()
    assert chi2 < 100  # 59 degrees of freedom: the 99.9 % point is 98.3


def test_edges_of_one_source_share_their_negatives(graph: DistGraph) -> None:
    edges = positives(graph, list(range(0, 200)))
    rows = draw(negative.PerSourceUniform(4), graph, edges)[1].reshape(-1, 4)
    by_source = {
        source: {tuple(row) for row in rows[edges.ends[0] == source]} for source in set(edges.ends[0])
    }
    assert len(by_source) < 200
    assert all(len(sets) == 1 for sets in by_source.values())
    assert len(set.union(*by_source.values())) == len(by_source)


def test_in_batch_negatives_are_other_edges_ends(graph: DistGraph) -> None:
    ids = [3, 50, 77, 200, 310]
    edges = positives(graph, ids)
    all_others = draw(negative.InBatch(), graph, edges)[1].reshape(5, 4)
    for row, own in enumerate(range(5)):
        other_ends = np.delete(edges.ends[1], own)
        assert sorted(all_others[row]) == sorted(other_ends)
    few = draw(negative.InBatch(2), graph, edges)[1].reshape(5, 2)
    assert few.tolist() == all_others[:, :2].tolist()
    turned = draw(negative.InBatch(2), graph, positives(graph, ids[::-1]))[1].reshape(5, 2)
    assert turned[::-1].tolist() == few.tolist()
    assert len(draw(negative.InBatch(2), graph, positives(graph, [3]))[0]) == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: negative.Uniform(-1), "k=-1"),
        (lambda: negative.PerSourceUniform(0), "k=0"),
        (lambda: negative.InBatch(True), "k=True"),
        (lambda: negative.Uniform(2, corrupt="middle"), "corrupt='middle'"),  # type: ignore[arg-type]
        (lambda: read_negative(dgl_negative.GlobalUniform(3)), "Use dx.negative.Uniform"),
        (lambda: read_negative(negative.Uniform), r"e.g. dx.negative.Uniform\(5\)"),
        (lambda: read_negative(5), "negative_sampler=5"),
        (lambda: read_negative(dgl_negative.Uniform(-1)), "k=-1"),
    ],
)
def test_unsupported_options_are_refused(make, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_dgls_samplers_are_read() -> None:
    assert read_negative(dgl_negative.Uniform(4)) == negative.Uniform(4)
    assert read_negative(dgl_negative.PerSourceUniform(2)) == negative.Uniform(2)
    assert read_negative(None) is None
    ours = negative.InBatch(3)
    assert read_negative(ours) is ours


def test_a_users_own_code_is_run(graph: DistGraph) -> None:
    class Next(dgl_negative.PerSourceUniform):
        def _generate(self, g: Any, eids: torch.Tensor, canonical_etype: Any) -> Any:
            source, destination = g.find_edges(eids, etype=canonical_etype)
            return source, (destination + 1) % g.num_nodes(canonical_etype[2])

    edges = positives(graph, [5, 100])
    for sampler in (Next(1), lambda g, eids: {EDGE_TYPE: Next(1)(g, eids)}):
        draw = open_negative(graph, read_negative(sampler), [EDGE_TYPE])
        sources, destinations = draw([edges])[EDGE_TYPE]
        assert sources.tolist() == edges.ends[0].tolist()
        assert destinations.tolist() == ((edges.ends[1] + 1) % 60).tolist()
    none = open_negative(graph, lambda g, eids: (torch.tensor([]), torch.tensor([])), [EDGE_TYPE])
    assert [(len(ends), ends.dtype) for ends in none([edges])[EDGE_TYPE]] == [(0, np.int64)] * 2


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        ((torch.tensor([1, 2]), torch.tensor([3])), ConfigError, "2 sources and 1 destinations"),
        ((torch.tensor([1]), torch.tensor([60])), IndexError, r"id 60 .* \(negative sampler\)"),
        ({"likes": (torch.tensor([1]), torch.tensor([2]))}, ConfigError, "likes"),
    ],
)
def test_refuses_wrong_results_of_samplers(graph: DistGraph, answer: Any, error: Any, message: str) -> None:
    draw = open_negative(graph, lambda g, eids: answer, [EDGE_TYPE])
    with pytest.raises(error, match=message):
        draw([positives(graph, [1])])
