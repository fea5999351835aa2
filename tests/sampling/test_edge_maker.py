from typing import Any

import dgl
import numpy as np
import pytest
import torch

from dglx_dist import negative
from dglx_dist.errors import ConfigError
from dglx_dist.graph import DistGraph
from dglx_dist.records import EDGE_TYPE, NODE_TYPE
from dglx_dist.sampling.edge_maker import EdgeMaker, EdgePlan
from dglx_dist.sampling.edge_negatives import open_negative
from dglx_dist.sampling.maker import BatchMaker, MiniBatch

EDGES = {EDGE_TYPE: np.array([40, 7, 200])}


class Notes(BatchMaker):
    """Makes no blocks, but remembers what was asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def make(self, seeds: Any, epoch: int, exclude: Any = ()) -> MiniBatch:
        self.asked.append((seeds, epoch, exclude))
        nodes = torch.from_numpy(seeds[NODE_TYPE])
        return MiniBatch(input_nodes=nodes, output_nodes=nodes, blocks=[], sample_s=1.0, fetch_s=2.0)


def maker(g: DistGraph, **options: Any) -> tuple[EdgeMaker, Notes]:
    notes = Notes()
    fields: dict[str, Any] = {
        "seed": 1,
        "exclude": lambda edges: edges,
        "negative": None,
        "columns": {},
    } | options
    return EdgeMaker(g, notes, EdgePlan(**fields)), notes


def test_blocks_are_asked_around_the_ends_without_what_is_excluded(graph: DistGraph) -> None:
    make, notes = maker(graph, columns={EDGE_TYPE: {"origin": graph.edata["source"].kvstore_key}})
    batch = make.make(EDGES, 5)
    ((seeds, epoch, exclude),) = notes.asked
    sources, destinations = graph.find_edges(EDGES[EDGE_TYPE])
    assert seeds[NODE_TYPE].tolist() == torch.cat([sources, destinations]).unique().tolist()
    assert epoch == 5
    assert exclude[EDGE_TYPE].tolist() == [40, 7, 200]
    assert batch.negative is None
    assert torch.equal(batch.positive.edata["origin"], graph.orig_ids(sources).float())
    assert batch.positive.edata[dgl.EID].tolist() == [40, 7, 200]
    assert batch.sample_s > 1.0
    assert batch.fetch_s > 2.0


def test_ends_of_negatives_are_seeds_too(graph: DistGraph) -> None:
    make, notes = maker(graph, negative=open_negative(graph, negative.Uniform(4), [EDGE_TYPE]))
    batch = make.make(EDGES, 0)
    assert batch.negative is not None
    assert batch.negative.num_edges() == 12
    assert notes.asked[0][0][NODE_TYPE].tolist() == batch.negative.ndata[dgl.NID].tolist()
    assert len(notes.asked[0][0][NODE_TYPE]) > 6


def test_no_edges_ask_for_no_negatives(graph: DistGraph) -> None:
    def never(g: Any, ids: Any) -> Any:
        raise AssertionError("asked for negatives of no edges")

    make, notes = maker(graph, negative=open_negative(graph, never, [EDGE_TYPE]))
    batch = make.make({EDGE_TYPE: np.empty(0, np.int64)}, 0)
    assert batch.negative is not None
    assert batch.positive.num_nodes() == batch.negative.num_edges() == 0
    assert notes.asked[0][0][NODE_TYPE].shape == (0,)


def test_a_wrong_answer_of_the_users_function_comes_out(graph: DistGraph) -> None:
    make, _ = maker(graph, negative=open_negative(graph, lambda g, ids: ([1], []), [EDGE_TYPE]))
    with pytest.raises(ConfigError, match="1 sources and 0 destinations"):
        make.make(EDGES, 0)
