"""One graph per rank for ``model(g, x)``, against the whole graph in one process."""

from __future__ import annotations

from typing import Any

import dgl
import dgl.function as fn
import numpy as np
import pytest
import torch
from torch import Tensor

from dglx_dist.errors import ConfigError
from dglx_dist.strategies.full_graph.local_graphs import LocalGraph
from tests.strategies.full_graph.layers_of_dgl import LAYERS, REFUSED, Stack, weights
from tests.strategies.full_graph.threads import TOLERANCE, World, features, whole_graph

ALL = np.arange(12)


def graphs_of(world: World) -> list[LocalGraph]:
    return [LocalGraph(block) for (block,) in world.blocks]


@pytest.mark.parametrize("name", REFUSED)
def test_layers_that_would_see_this_rank_alone_are_refused(name: str) -> None:
    make, reason = REFUSED[name]
    model = make().double()
    graph = graphs_of(world := World(whole_graph(), ALL, 1))[0]
    with pytest.raises(ConfigError, match=reason):
        model(graph, features()[world.plans[0].nodes])


def test_several_hops_of_a_layer_that_dgl_has_in_float32_only() -> None:
    conv = dgl.nn.APPNPConv(3, 0.2)
    expected = conv(whole_graph(), features().float())
    world = World(whole_graph(), ALL, 1)
    graphs = graphs_of(world)
    for rank, out in enumerate(
        world.run(lambda rank: conv(graphs[rank], features()[world.plans[rank].nodes].float()))
    ):
        torch.testing.assert_close(out, expected[world.plans[rank].nodes])


def test_a_value_is_exchanged_once_and_a_kept_one_never() -> None:
    world = World(whole_graph(), ALL, 1)
    graphs = graphs_of(world)

    def work(rank: int) -> None:
        g, ((exchange,), (layer,)) = graphs[rank], (world.exchanges[rank], world.plans[rank].layers)
        g.ndata["x"] = features()[world.plans[rank].nodes]
        g.update_all(fn.copy_u("x", "m"), fn.sum("m", "a"))
        g.update_all(fn.copy_u("x", "m"), fn.max("m", "b"))
        assert len(exchange.given) == 1
        g.ndata["x"] = g.ndata["x"] * 2
        g.update_all(fn.copy_u("x", "m"), fn.sum("m", "c"))
        assert len(exchange.given) == 2
        torch.testing.assert_close(g.ndata["c"], 2 * g.ndata["a"])
        g.ndata["x"].add_(1)
        g.update_all(fn.copy_u("x", "m"), fn.sum("m", "c"))
        assert len(exchange.given) == 3
        g.ndata["feat"] = features()[world.plans[rank].nodes]
        g.keep_halo("feat", features()[layer.halo_nodes])
        with g.local_scope():
            g.srcdata["h"] = g.ndata["feat"]
            g.update_all(fn.copy_u("h", "m"), fn.sum("m", "d"))
            torch.testing.assert_close(g.ndata["d"], g.ndata["a"])
        assert len(exchange.given) == 3
        assert "d" not in g.ndata

    world.run(work)


def test_models_run_in_inference_mode() -> None:
    model = Stack(LAYERS["sage mean"])
    expected = model(whole_graph(), features())
    world = World(whole_graph(), ALL, 1)
    graphs = graphs_of(world)

    @torch.inference_mode()
    def work(rank: int) -> None:
        nodes = torch.from_numpy(world.plans[rank].nodes)
        torch.testing.assert_close(model(graphs[rank], features()[nodes]), expected[nodes], **TOLERANCE)
        graphs[rank].ndata["x"] = features()[nodes] * 1
        for _ in range(2):
            # Changed in place, which nobody counts.
            graphs[rank].ndata["x"].mul_(2)
            graphs[rank].update_all(fn.copy_u("x", "m"), fn.sum("m", "a"))
        g = whole_graph()
        g.ndata["x"] = features() * 4
        g.update_all(fn.copy_u("x", "m"), fn.sum("m", "a"))
        torch.testing.assert_close(graphs[rank].ndata["a"], g.ndata["a"][nodes], **TOLERANCE)

    world.run(work)


def test_it_looks_like_a_graph_of_the_ranks_nodes() -> None:
    g, world = whole_graph(), World(whole_graph(), ALL, 1)
    for rank, graph in enumerate(graphs_of(world)):
        nodes = torch.from_numpy(world.plans[rank].nodes)
        assert graph.is_homogeneous
        assert not graph.is_block
        assert graph.num_nodes() == graph.num_src_nodes() == graph.number_of_dst_nodes() == len(nodes)
        assert graph.nodes().tolist() == graph.srcnodes().tolist() == list(range(len(nodes)))
        assert graph.num_edges() == int(g.in_degrees(nodes).sum())
        assert torch.equal(graph.in_degrees(), g.in_degrees(nodes))
        assert torch.equal(graph.out_degrees(), g.out_degrees(nodes))
        assert graph.in_degrees(0) == g.in_degrees(int(nodes[0]))
        assert graph.out_degrees(0) == g.out_degrees(int(nodes[0]))
        graph.ndata["y"] = torch.ones(len(nodes))
        graph.nodes[[0]].data["y"] = torch.zeros(1)
        assert float(graph.ndata.pop("y").sum()) == len(nodes) - 1
        graph.apply_nodes(lambda batch: {"z": batch.data[dgl.NID] * 2})
        assert torch.equal(graph.ndata["z"], nodes * 2)
        assert "num_nodes" in repr(graph)
        assert graph.to("cpu").num_nodes() == graph.local_var().num_nodes() == len(nodes)
        assert graph.has_nodes([0, len(nodes)]).tolist() == [True, False]


def test_apply_node_func_sees_what_was_reduced() -> None:
    world = World(whole_graph(), ALL, 1)
    graphs = graphs_of(world)
    g = whole_graph()
    g.ndata["x"] = features()

    def double(nodes: Any) -> dict[str, Tensor]:
        return {"a": nodes.data["a"] * 2}

    g.update_all(fn.copy_u("x", "m"), fn.sum("m", "a"), double)

    def work(rank: int) -> None:
        graph = graphs[rank]
        graph.ndata["x"] = features()[world.plans[rank].nodes]
        graph.update_all(fn.copy_u("x", "m"), fn.sum("m", "a"), double)
        torch.testing.assert_close(graph.ndata["a"], g.ndata["a"][world.plans[rank].nodes], **TOLERANCE)

    world.run(work)


def test_what_cannot_be_is_refused_with_the_reason() -> None:
    world = World(whole_graph(), ALL, 1)
    graph = graphs_of(world)[0]
    with pytest.raises(ConfigError, match="3 rows of 'h' for a local graph of 5 nodes"):
        graph.ndata["h"] = torch.zeros(3, 4)
    with pytest.raises(ConfigError, match="sources of its edges lie on several ranks"):
        graph.edges()
    with pytest.raises(ConfigError, match="planned with all ranks"):
        graph.add_edges([0], [1])
    with pytest.raises(ConfigError, match="at once"):
        graph.apply_edges(fn.copy_u("x", "e"), edges=torch.tensor([0]))
    norm = dgl.nn.EdgeWeightNorm("both")
    for moved in (graph, graph.to("cpu"), graph.formats("csc"), graph.local_var()):
        with pytest.raises(ConfigError, match="out-edges of each source"):
            norm(moved, weights(graph))
        with pytest.raises(ConfigError, match="out-edges of each source"):
            dgl.reverse(moved)
    for changed in (dgl.add_self_loop, dgl.remove_self_loop, dgl.transforms.AddSelfLoop()):
        with pytest.raises(ConfigError, match="local graph"):
            changed(graph)
    graph.ndata["x"] = torch.ones(5, 2)
    with pytest.raises(ConfigError, match="only those of this rank"):
        dgl.mean_nodes(graph, "x")
    with pytest.raises(ConfigError, match="adj of a local graph"):
        graph.adj()
    with pytest.raises(ConfigError, match="'likes'"):
        graph["likes"]
