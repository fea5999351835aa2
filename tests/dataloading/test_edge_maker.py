from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pytest
import torch

from dglx_dist.comm.session import start_session
from dglx_dist.dataloading.edge_loader import EdgeMaker
from dglx_dist.dataloading.minibatch import MiniBatch
from dglx_dist.dataloading.negative import open_negative
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.records import EDGE_TYPE, NODE_TYPE
from tests.dataloading import bonds
from tests.helpers.ranks import run_ranks


class Notes:
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
    return EdgeMaker(g=g, blocks=notes, **fields), notes


def test_no_edges_ask_for_no_negatives(graph: DistGraph) -> None:
    def never(g: Any, ids: Any) -> Any:
        raise AssertionError("asked for negatives of no edges")

    make, notes = maker(graph, negative=open_negative(graph, never, [EDGE_TYPE]))
    batch = make.make({EDGE_TYPE: np.empty(0, np.int64)}, 0)
    assert batch.positive.num_nodes() == batch.negative.num_edges() == 0
    assert notes.asked[0][0][NODE_TYPE].shape == (0,)


class Answer:
    """An answer under way; notes when it is waited for."""

    def __init__(self, pending: Any, events: list[str]) -> None:
        self._pending, self._events = pending, events

    def result(self) -> Any:
        self._events.append("wait")
        return self._pending.result()


class NotedNodes(Notes):
    """As above, for several types."""

    def make(self, seeds: Any, epoch: int, exclude: Any = ()) -> MiniBatch:
        return MiniBatch(input_nodes={}, output_nodes={}, blocks=[], sample_s=1.0, fetch_s=2.0)


def note_requests(shop: str) -> tuple[list[str], bool]:
    with start_session(timeout_s=30) as session:
        g = DistGraph(shop, structure="partitioned")
        edges = {etype: np.arange(g.num_edges(etype)) for etype in g.canonical_etypes}
        maker = EdgeMaker(
            g=g, blocks=NotedNodes(), seed=1, exclude=lambda edges: edges, negative=None, columns={}
        )
        events: list[str] = []
        submit = session.rpc.submit

        def noted(rank: int, op: str, *args: Any, **options: Any) -> Any:
            events.append("ask")
            return Answer(submit(rank, op, *args, **options), events)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(session.rpc, "submit", noted)
            batch = maker.make(edges, 0)
        right = True
        for etype, ids in edges.items():
            found = batch.positive.edges(etype=etype)
            nodes = [batch.positive.nodes[ntype].data[dgl.NID] for ntype in (etype[0], etype[2])]
            ends = g.find_edges(ids, etype)
            right &= all(torch.equal(n[f], e) for n, f, e in zip(nodes, found, ends, strict=True))
        g.barrier()
        return events, right


def test_ends_of_all_types_are_asked_for_before_any_is_waited_for(tmp_path: Path) -> None:
    shop = bonds.write(bonds.shop(), tmp_path / "shop", 2)
    found = run_ranks(note_requests, 2, args=(str(shop),), ranks_per_server=1)
    assert found == [(["ask"] * 3 + ["wait"] * 3, True)] * 2
