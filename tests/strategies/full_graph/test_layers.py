"""Layers of dgl.nn and layers by hand, on blocks and on local graphs: four real ranks against one process."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import dgl
import dgl.function as fn
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode

import dglx_dist as dx
from dglx_dist.comm.session import start_session
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.planner.costs.full_graph import LocalExchange
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Assignment, RawGraph
from dglx_dist.strategies.base import STRATEGIES, count_targets
from dglx_dist.strategies.full_graph.halo_block import (
    EmptyPartition,
    HaloBlock,
    halo_block,
    needs_repeated_row,
)
from dglx_dist.strategies.full_graph.halo_exchange import HaloExchange
from dglx_dist.strategies.full_graph.halo_plan import HaloLayer, RankPlan
from dglx_dist.strategies.full_graph.local_graphs import LocalGraph
from dglx_dist.strategies.full_graph.model import install
from dglx_dist.strategies.full_graph.plan_builder import make_plans
from tests.helpers.ranks import run_ranks
from tests.strategies.full_graph.layers_of_dgl import (
    LAYERS,
    ON_GRAPHS,
    RECOMPUTED,
    REFUSED,
    Jumping,
    Stack,
    flat,
    weights,
)

NUM_NODES, RANKS, TOLERANCE = 40, 4, 1e-10
PART_OF = np.random.default_rng(4).choice(RANKS, size=NUM_NODES, p=[0.4, 0.3, 0.2, 0.1]).astype(np.int32)
MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: lambda make=make: Stack(make) for name, make in {**LAYERS, **ON_GRAPHS, **RECOMPUTED}.items()},  # type: ignore[misc]
    "appnp": lambda: Stack(lambda: dgl.nn.APPNPConv(3, 0.2)),
    "jumping": lambda: Jumping(NUM_NODES),
}
WITHOUT_HOOKS = ("sage mean", "gin max", "functions", "dot gat", "relations")
"""Layers that set the rows they are given on the block, before they combine them with others."""


def raw_graph() -> RawGraph:
    """A directed random graph with self-loops, which are all in-edges of the last part's nodes.

    Its edges are in no order, which the results of an LSTM show.
    """
    random = np.random.default_rng(3)
    random_edges = random.integers(NUM_NODES, size=(2, 120))
    random_edges = random_edges[:, PART_OF[random_edges[1]] < RANKS - 1]
    ends = np.unique(np.concatenate([random_edges, [np.arange(NUM_NODES)] * 2], axis=1), axis=1)
    ends = random.permutation(ends, axis=1)
    return RawGraph(
        name="layers",
        num_nodes={NODE_TYPE: NUM_NODES},
        edges={EDGE_TYPE: (ends[0].copy(), ends[1].copy())},
        node_data={NODE_TYPE: {"x": random.standard_normal((NUM_NODES, 4))}},
        edge_data={EDGE_TYPE: {"w": random.random(ends.shape[1])}},
    )


def whole_graph_of(g: DistGraph) -> dgl.DGLGraph:
    """The graph in one process, with the ids of ``g`` and the source's order of edges."""
    in_source_order = g.orig_edge_ids(torch.arange(g.num_edges())).argsort()
    whole_graph = dgl.graph(g.find_edges(in_source_order), num_nodes=NUM_NODES)
    whole_graph.edata[dgl.EID] = in_source_order
    whole_graph.ndata[dgl.NID], whole_graph.ndata["x"] = (
        torch.arange(NUM_NODES),
        g.ndata["x"][torch.arange(NUM_NODES)],
    )
    return whole_graph


def run(model: nn.Module, graphs: Any, x: Tensor, rows: Any, factors: Tensor) -> list[Tensor]:
    """Go forward, and backward from some rows; return these, and the gradients of x and of weights."""
    x = x.requires_grad_()
    with EmptyPartition():  # as in HaloModel
        out = model(graphs, x)[rows]
    # Reversible layers take the memory of their output in backward.
    results = [out.detach().clone()]
    (out * factors).sum().backward()
    for leaf in (x, *model.parameters()):
        results.append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
    model.zero_grad(set_to_none=True)
    return results


def furthest(model: nn.Module, graphs: Any, nodes: Tensor, whole: dgl.DGLGraph, seeds: Tensor) -> float:
    """Return the largest difference between a rank's rows and gradients and those of one process."""
    own = nodes[: graphs[-1].num_dst_nodes()] if isinstance(graphs, list) else nodes
    factors, x = torch.cos(torch.arange(4.0 * NUM_NODES)).view(NUM_NODES, 4), whole.ndata["x"]
    out, of_x, *of_weights = run(model, graphs, x[nodes], slice(None), factors[own])
    for gradient in of_weights:
        dist.all_reduce(gradient)
    expected, of_all, *expected_weights = run(model, whole, x.clone(), seeds, factors[seeds])
    by_node = torch.zeros(NUM_NODES, 4).index_copy(0, seeds, expected)
    pairs = zip([out, of_x, *of_weights], [by_node[own], of_all[nodes], *expected_weights], strict=True)
    return max(float((left - right).abs().max()) if left.numel() else 0.0 for left, right in pairs)


def blocks_of(g: DistGraph, seeds: Tensor, *, cover: bool) -> tuple[Tensor, list[HaloBlock], RankPlan]:
    plan = make_plans(g, seeds.numpy(), 2, 0, cover=cover)
    nodes = torch.from_numpy(plan.nodes)
    blocks = [
        halo_block(
            layer,
            nodes,
            HaloExchange(g.session, layer, n),
            out_degrees=g.out_degrees,
            edge_order=g.orig_edge_ids,
        )
        for n, layer in enumerate(plan.layers, start=1)
    ]
    return nodes, blocks, plan


def on_rank(folder: str) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)  # APPNPConv makes weights of it
    with start_session(strategy="full_graph", timeout_s=60) as session:
        g = DistGraph(folder)
        with pytest.raises(ConfigError, match="no column 'nope'"):
            dx.local_graph(g, columns=["nope"])
        with pytest.raises(ConfigError, match="disagree on a local graph: rank 0 has use_pp=False, rank 1 "):
            dx.local_graph(g, use_pp=g.rank() > 0)
        whole_graph, lg = whole_graph_of(g), dx.local_graph(g, edge_columns=["w"])
        assert torch.equal(lg.edata["w"], g.edata["w"][lg.edata[dgl.EID]])
        strategy: Any = STRATEGIES.get("full_graph")(session, {}).open(g)
        twice, lg.step_share = (
            strategy.wrap(dgl.nn.SAGEConv(4, 4, "mean")),
            count_targets(1 + g.rank(), session),
        )
        hidden = twice(lg, lg.ndata["x"])
        with pytest.raises(ConfigError, match="put both into one"):
            twice(lg, hidden)
        # None of the last two ranks, and not all of the others.
        seeds = torch.arange(int(g.get_node_partition_policy(NODE_TYPE).bounds[1]))
        seeds = seeds[seeds % 3 > 0]
        nodes, blocks, plan = blocks_of(g, seeds, cover=False)
        session.options["aggregate"] = "cover"
        covered = dx.local_graph(g, columns=[], edge_columns=["w"], targets=None)
        covered.ndata["x"] = lg.ndata["x"]
        _, covers, _ = blocks_of(g, seeds, cover=True)
        results: dict[str, Any] = {"targets": plan.seeds, "halo": lg._block.halo_rows}
        results["repeats"] = [needs_repeated_row(layer) for layer in plan.layers]
        everyone = torch.arange(NUM_NODES)
        for name in WITHOUT_HOOKS:
            results[f"{name}/without hooks"] = furthest(MODELS[name](), blocks, nodes, whole_graph, seeds)
        for name, make in MODELS.items():
            install(model := make())
            if name in LAYERS or name == "jumping":
                results[f"{name}/blocks"] = furthest(model, blocks, nodes, whole_graph, seeds)
                results[f"{name}/blocks, cover"] = furthest(model, covers, nodes, whole_graph, seeds)
            results[f"{name}/graph"] = furthest(model, lg, lg.ndata[dgl.NID], whole_graph, everyone)
            results[f"{name}/graph, cover"] = furthest(
                model, covered, lg.ndata[dgl.NID], whole_graph, everyone
            )
        check_blocks(blocks, [torch.from_numpy(plan.rows(level)) for level in range(3)], whole_graph)
        check_local_graph(lg, whole_graph)
        g.close()
        return results


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0.0, atol=TOLERANCE)


def check_blocks(blocks: list[HaloBlock], rows: list[Tensor], whole: dgl.DGLGraph) -> None:
    """``rows``: ids of this rank's rows of every level."""
    x = whole.ndata["x"]
    for level, block in enumerate(blocks, start=1):
        sources = block.srcdata[dgl.NID]
        assert torch.equal(block.out_degrees(), whole.out_degrees(sources))
        assert block.out_degrees(0) == whole.out_degrees(int(sources[0]))
        assert torch.equal(block.out_degrees([0]), whole.out_degrees(sources[:1]))
        assert torch.equal(block.in_degrees(), whole.in_degrees(rows[level]))
    # Own rows that the loader set are exchanged when messages read them, by functions of both kinds.
    block = blocks[0].local_var()
    block.set_own("h", x[rows[0]])
    block = block.local_var()
    assert torch.equal(block.srcdata["h"], x[rows[0]])
    whole.update_all(fn.copy_u("x", "m"), fn.sum("m", "sum"))
    for message in (lambda edges: {"m": edges.src["h"]}, fn.copy_u("h", "m")):
        with block.local_scope():
            block.update_all(message, fn.sum("m", "o"))
            close(block.dstdata["o"], whole.ndata["sum"][rows[1]])
    # A layer exchanges once, as wide as its input; pairs and named arguments are found.
    conv = dgl.nn.SAGEConv(4, 4, "mean")
    for parameter in conv.parameters():
        dist.broadcast(parameter.data, 0)
    install(conv)
    h, expected = x[rows[0]], conv(whole, x)[rows[1]]
    exchange = blocks[0]._exchange
    with mock.patch.object(exchange, "exchange", wraps=exchange.exchange) as called:
        close(conv(blocks[0], h), expected)
        close(conv(blocks[0], (h, h[: len(expected)])), expected)
        close(conv(feat=h, graph=blocks[0]), expected)
        assert [tuple(call.args[0].shape) for call in called.call_args_list] == [(len(h), 4)] * 3
    # A function of the reduced rows sees them also on a rank without edges.
    (own, targets), second = rows[1:], blocks[1].local_var()
    close(sum_by_function(second, x[own]), sum_by_function(whole, x)[targets])


def sum_by_function(graph: Any, rows: Tensor) -> Tensor:
    with graph.local_scope():
        graph.srcdata["h"], graph.dstdata["b"] = rows, torch.ones(graph.num_dst_nodes(), 4)
        graph.update_all(
            lambda edges: {"m": edges.src["h"]},
            lambda nodes: {"m": nodes.mailbox["m"].sum(1)},
            lambda nodes: {"a": nodes.data["m"] * 2 + nodes.data["b"]},
        )
        return graph.dstdata["a"]


def check_local_graph(lg: LocalGraph, whole: dgl.DGLGraph) -> None:
    nodes = lg.ndata[dgl.NID]
    assert lg.is_homogeneous
    assert not lg.is_block
    assert lg.num_nodes() == lg.num_src_nodes() == lg.number_of_dst_nodes() == len(nodes)
    assert lg.nodes().tolist() == lg.srcnodes().tolist() == list(range(len(nodes)))
    assert lg.num_edges() == int(whole.in_degrees(nodes).sum())
    assert torch.equal(lg.in_degrees(), whole.in_degrees(nodes))
    assert torch.equal(lg.out_degrees(), whole.out_degrees(nodes))
    assert lg.in_degrees(0) == whole.in_degrees(int(nodes[0]))
    assert lg.out_degrees(0) == whole.out_degrees(int(nodes[0]))
    lg.ndata["y"] = torch.ones(len(nodes))
    lg.nodes[[0]].data["y"] = torch.zeros(1)
    assert float(lg.ndata.pop("y").sum()) == len(nodes) - 1
    lg.apply_nodes(lambda batch: {"z": batch.data[dgl.NID] * 2})
    assert torch.equal(lg.ndata["z"], nodes * 2)
    assert "num_nodes" in repr(lg)
    assert lg.to("cpu").num_nodes() == lg.local_var().num_nodes() == len(nodes)
    assert lg.has_nodes([0, len(nodes)]).tolist() == [True, False]
    close(sum_by_function(lg, whole.ndata["x"][nodes]), sum_by_function(whole, whole.ndata["x"])[nodes])
    exchange, sums = lg._block._exchange, whole.ndata["sum"][nodes]
    with mock.patch.object(exchange, "exchange", wraps=exchange.exchange) as called:

        def sum_of(name: str) -> Tensor:
            lg.update_all(fn.copy_u(name, "m"), fn.sum("m", "a"))
            return lg.ndata["a"]

        # "x" was fetched when the graph was made.
        close(sum_of("x"), sums)
        with lg.local_scope():
            lg.srcdata["h"] = lg.ndata["x"]
            close(sum_of("h"), sums)
        assert "h" not in lg.ndata
        assert called.call_count == 0
        lg.ndata["h"] = 2 * lg.ndata["x"]
        close(sum_of("h"), 2 * sums)
        lg.update_all(fn.copy_u("h", "m"), fn.max("m", "b"))
        assert called.call_count == 1
        lg.ndata["h"] = lg.ndata["h"] * 2
        close(sum_of("h"), 4 * sums)
        lg.ndata["h"].mul_(2)
        close(sum_of("h"), 8 * sums)
        assert called.call_count == 3
        with torch.inference_mode():
            lg.ndata["h"] = lg.ndata["x"] * 1
            for factor in (2, 4):
                # Changed in place, which nobody counts.
                lg.ndata["h"].mul_(2)
                close(sum_of("h"), factor * sums)
            model = Stack(LAYERS["sage mean"])
            close(model(lg, whole.ndata["x"][nodes]), model(whole, whole.ndata["x"])[nodes])


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("layers") / "parts"
    assignment = Assignment(num_parts=RANKS, part_of={NODE_TYPE: PART_OF}, method="test", seed=4)
    write_dataset(raw_graph(), assignment, folder)
    return run_ranks(on_rank, RANKS, args=(str(folder),), ranks_per_server=2)


@pytest.mark.parametrize("name", MODELS)
def test_layers_compute_on_ranks_what_one_process_does(results: list[dict[str, Any]], name: str) -> None:
    for rank_results in results:
        values = {key: value for key, value in rank_results.items() if key.partition("/")[0] == name}
        assert values
        assert all(value <= TOLERANCE for value in values.values()), values


def test_the_graph_has_the_ranks_that_matter(results: list[dict[str, Any]]) -> None:
    """Two have no target, and one of them has rows of others; the other one sends without receiving."""
    assert [result["targets"] > 0 for result in results] == [True, True, False, False]
    assert [result["halo"] > 0 for result in results] == [True, True, True, False]
    assert results[3]["repeats"][0]


def test_the_table_of_layers_is_whole() -> None:
    made = [make() for make in ({**LAYERS, **ON_GRAPHS, **RECOMPUTED}).values()]
    made += [make() for make, _ in REFUSED.values()]
    named = {type(module).__name__ for model in made for module in model.modules()}
    of_dgl = {
        name
        for name, layer_class in vars(dgl.nn.pytorch.conv).items()
        if isinstance(layer_class, type) and issubclass(layer_class, nn.Module)
    }
    # Dense ones take a matrix, those of cuGraph a GPU and its own library; a norm of weights is no layer.
    elsewhere = {name for name in of_dgl if name.startswith(("Dense", "CuGraph"))} | {"EdgeWeightNorm"}
    assert of_dgl - elsewhere - named <= {"TWIRLSUnfoldingAndAttention"}


def ring(targets: int = 5) -> HaloBlock:
    """Five nodes, each read by itself and by the next one, or none of them."""
    node = np.arange(targets)
    layer = HaloLayer(
        own_rows=5,
        targets=targets,
        indptr=2 * np.arange(targets + 1),
        indices=np.stack([node, (node - 1) % 5], axis=1).reshape(-1),
        edge_ids=np.arange(2 * targets),
        halo_nodes=np.empty(0, np.int64),
        receive=(),
        send=(),
    )
    return halo_block(layer, torch.arange(5), LocalExchange(0))


ROWS = torch.randn(5, 4, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", [*ON_GRAPHS, *RECOMPUTED, *REFUSED])
def test_layers_that_dgl_runs_on_no_block_are_refused(name: str) -> None:
    model = {**ON_GRAPHS, **RECOMPUTED, **{n: make for n, (make, _) in REFUSED.items()}}[name]().double()
    install(model)
    # EGATConv takes blocks, but pairs of rows alone, and DGL says so by their number.
    error, reason = (
        (dgl.DGLError, "number of nodes") if name == "egat alone" else (ConfigError, "local_graph|out-edges")
    )
    with pytest.raises(error, match=reason):
        model(ring(4), ROWS.double())


@pytest.mark.parametrize("name", REFUSED)
def test_layers_that_would_see_this_rank_alone_are_refused(name: str) -> None:
    make, reason = REFUSED[name]
    with pytest.raises(ConfigError, match=reason):
        make().double()(LocalGraph(ring()), ROWS.double())


def test_a_rank_without_targets_may_reshape() -> None:
    model = flat(dgl.nn.GATConv(4, 2, 2, residual=True))
    install(model)
    assert model(ring(0), torch.zeros(5, 4)).shape == (0, 4)
    with EmptyPartition():
        assert torch.zeros(0, 6).view(0, -1, 2).shape == (0, 3, 2)
        assert torch.zeros(0, 3, 2).reshape(0, -1).shape == (0, 6)
        assert torch.zeros(2, 3).view(-1).shape == (6,)
        with pytest.raises(RuntimeError):
            torch.zeros(0, 6).view(2, -1, 0)
    # Off again, also where forward raised.
    with pytest.raises(RuntimeError):
        model(ring(0), torch.zeros(5, 3))
    with pytest.raises(RuntimeError, match="ambiguous"):
        torch.zeros(0, 6).view(0, -1, 2)


class Calling(nn.Module):
    """Calls ``inner`` with a block, as users' modules do; then reshapes nothing."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, block: Any, h: Tensor) -> Tensor:
        with contextlib.suppress(ConfigError):
            self.inner(block, h)
        return h.new_zeros(0, 6).view(0, -1, 2)


def raise_interrupt(*_: Any) -> Any:
    raise KeyboardInterrupt


def test_errors_inside_of_a_layer_turn_off_what_it_turned_on_and_no_more() -> None:
    # What DGL runs on no block is refused before anything is turned on; the outer one's stays on.
    refused = Calling(dgl.nn.SGConv(4, 2))
    install(refused)
    assert refused(ring(0), ROWS).shape == (0, 3, 2)
    with EmptyPartition() as outermost, pytest.raises(ConfigError):  # as in HaloModel
        refused.inner(ring(0), ROWS)
    assert outermost is not _get_current_function_mode()
    # Torch calls no hooks on an interrupt.
    stopped = Calling(raise_interrupt)
    install(stopped)
    with pytest.raises(KeyboardInterrupt), EmptyPartition():
        stopped(ring(0), ROWS)
    assert _get_current_function_mode() is None


def test_what_a_block_cannot_do_is_refused_with_the_reason() -> None:
    block = ring()
    with pytest.raises(ConfigError, match=r"shape \(3, 4\) for a block of 5 own rows"):
        block.srcdata["h"] = torch.zeros(3, 4)
    with pytest.raises(ConfigError, match="3 rows of 'h'"):
        block.set_own("h", torch.zeros(3, 4))
    with pytest.raises(ConfigError, match="own and halo rows"):
        block.set_all("h", torch.zeros(4, 4))
    with pytest.raises(ConfigError, match="the block's only one"):
        block["likes"]
    norm = dgl.nn.EdgeWeightNorm("both")
    install(norm)
    with pytest.raises(ConfigError, match="out-edges of each source"):
        norm(block, torch.ones(block.num_edges()))
    typed = dgl.nn.HeteroGraphConv({"_E": dgl.nn.SAGEConv(4, 4, "mean")})
    install(typed)
    with pytest.raises(ConfigError, match="dict of rows"):
        typed(block, {"_N": ROWS})


def test_what_a_local_graph_cannot_do_is_refused_with_the_reason() -> None:
    graph = LocalGraph(ring())
    with pytest.raises(ConfigError, match="3 rows of 'h' for a local graph of 5 nodes"):
        graph.ndata["h"] = torch.zeros(3, 4)
    with pytest.raises(ConfigError, match="sources of its edges are on several ranks"):
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
