from typing import Any

import numpy as np
import pytest
import torch
from dgl.dataloading import negative_sampler as dgl_negative

from dglx_dist.dataloading import negative
from dglx_dist.dataloading.negative import open_negative, read_negative
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.records import EDGE_TYPE
from tests.dataloading.test_negative import positives


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
        assert draw is not None
        sources, destinations = draw([edges])[EDGE_TYPE]
        assert sources.tolist() == edges.sources.tolist()
        assert destinations.tolist() == ((edges.destinations + 1) % 60).tolist()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dgl_negative.GlobalUniform(3), "use dx.negative.Uniform"),
        (negative.Uniform, r"e.g. dx.negative.Uniform\(5\)"),
        (5, "negative_sampler=5"),
        (dgl_negative.Uniform(-1), "k=-1"),
    ],
)
def test_what_cannot_be_honoured_is_told(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_negative(given)


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        ((torch.tensor([1, 2]), torch.tensor([3])), ConfigError, "2 sources and 1 destinations"),
        ((torch.tensor([1]), torch.tensor([60])), IndexError, r"id 60 .* \(negative sampler\)"),
        ({"likes": (torch.tensor([1]), torch.tensor([2]))}, ConfigError, "likes"),
    ],
)
def test_wrong_answers_are_told(graph: DistGraph, answer: Any, error: Any, message: str) -> None:
    draw = open_negative(graph, lambda g, eids: answer, [EDGE_TYPE])
    assert draw is not None
    with pytest.raises(error, match=message):
        draw([positives(graph, [1])])


def test_no_pairs_from_a_users_function(graph: DistGraph) -> None:
    draw = open_negative(graph, lambda g, eids: (torch.tensor([]), torch.tensor([])), [EDGE_TYPE])
    assert draw is not None
    sources, destinations = draw([positives(graph, [1])])[EDGE_TYPE]
    assert len(sources) == len(destinations) == 0
    assert sources.dtype == np.int64
