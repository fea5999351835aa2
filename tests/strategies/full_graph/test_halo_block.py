"""Blocks over several ranks against one graph in one process; see threads.py for the ownership."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import dgl
import dgl.function as fn
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode

from dglx_dist.errors import ConfigError
from dglx_dist.strategies.full_graph.halo_block import EmptyPartition, needs_repeated_row
from dglx_dist.strategies.full_graph.model import install
from tests.strategies.full_graph.layers_of_dgl import (
    LAYERS,
    ON_GRAPHS,
    RECOMPUTED,
    REFUSED,
    Stack,
    flat,
    make_by_hand,
    make_functions,
)
from tests.strategies.full_graph.threads import (
    OWNER,
    SEEDS,
    TOLERANCE,
    World,
    features,
    gradients_of,
    whole_graph,
)


def loss_weights() -> Tensor:
    return torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def on_one_process(model: nn.Module, seeds: np.ndarray) -> tuple[Tensor, list[Tensor]]:
    """Return the output of ``seeds``, and the gradients of input and parameters."""
    x = features().requires_grad_()
    out = model(whole_graph(), x)[seeds]
    (out * loss_weights()[seeds]).sum().backward()
    return out.detach(), gradients_of([x, *model.parameters()])


def on_ranks(model: nn.Module, world: World) -> tuple[dict[int, Tensor], list[Tensor]]:
    """Return the output by node, and the same gradients."""
    x = features().requires_grad_()

    def work(rank: int) -> tuple[np.ndarray, Tensor]:
        plan = world.plans[rank]
        return plan.rows(len(plan.layers)), model(world.blocks[rank], x[torch.from_numpy(plan.nodes)])

    done = world.run(work)
    sum((out * loss_weights()[nodes]).sum() for nodes, out in done).backward()
    rows = {int(node): row for nodes, out in done for node, row in zip(nodes, out.detach(), strict=True)}
    return rows, gradients_of([x, *model.parameters()])


WITHOUT_HOOKS = ("sage mean", "gin max", "functions", "dot gat", "relations")
"""Layers that set the rows they are given on the block, before they combine them with others."""


@pytest.mark.parametrize("name", [*WITHOUT_HOOKS, "sage lstm"])
@pytest.mark.filterwarnings("ignore:The input graph for the user-defined edge function")
def test_layers_compute_what_they_compute_on_the_whole_graph(name: str) -> None:
    """All others, with hooks, are compared on real ranks; edges have an order that LSTM needs only here."""
    model = Stack(LAYERS[name])
    expected, gradients = on_one_process(model, SEEDS)
    if name not in WITHOUT_HOOKS:
        install(model)
    found, found_gradients = on_ranks(model, World(whole_graph(), SEEDS, 2))
    assert sorted(found) == sorted(SEEDS.tolist())
    torch.testing.assert_close(torch.stack([found[node] for node in SEEDS.tolist()]), expected, **TOLERANCE)
    for one, other in zip(found_gradients, gradients, strict=True):
        torch.testing.assert_close(one, other, **TOLERANCE)


@pytest.mark.parametrize("name", [*ON_GRAPHS, *RECOMPUTED, *REFUSED])
def test_layers_that_dgl_runs_on_no_block_are_refused(name: str) -> None:
    model = {**ON_GRAPHS, **RECOMPUTED, **{n: make for n, (make, _) in REFUSED.items()}}[name]().double()
    install(model)
    world = World(whole_graph(), SEEDS, 1, np.zeros(12, np.int64))
    # EGATConv takes blocks, but pairs of rows alone, and DGL says so by their number.
    error, reason = (
        (dgl.DGLError, "number of nodes") if name == "egat alone" else (ConfigError, "local_graph|out-edges")
    )
    with pytest.raises(error, match=reason):
        model(world.blocks[0][0], features()[world.plans[0].nodes])


def test_the_table_of_layers_is_whole() -> None:
    made = [make() for make in ({**LAYERS, **ON_GRAPHS, **RECOMPUTED}).values()]
    made += [make() for make, _ in REFUSED.values()]
    named = {type(module).__name__ for model in made for module in model.modules()}
    of_dgl = {
        name
        for name, found in vars(dgl.nn.pytorch.conv).items()
        if isinstance(found, type) and issubclass(found, nn.Module)
    }
    # Dense ones take a matrix, those of cuGraph a GPU and its own library; a norm of weights is no layer.
    elsewhere = {name for name in of_dgl if name.startswith(("Dense", "CuGraph"))} | {"EdgeWeightNorm"}
    assert of_dgl - elsewhere - named <= {"TWIRLSUnfoldingAndAttention"}


def test_a_rank_without_targets_may_reshape() -> None:
    world = World(whole_graph(), SEEDS, 2)
    model = flat(dgl.nn.GATConv(4, 2, 2, residual=True))
    install(model)
    block = world.blocks[2][1]
    out = model(block, torch.zeros(block.num_src_nodes(), 4))
    assert out.shape == (0, 4)
    with EmptyPartition():
        assert torch.zeros(0, 6).view(0, -1, 2).shape == (0, 3, 2)
        assert torch.zeros(0, 3, 2).reshape(0, -1).shape == (0, 6)
        assert torch.zeros(2, 3).view(-1).shape == (6,)
        with pytest.raises(RuntimeError):
            torch.zeros(0, 6).view(2, -1, 0)
    # Off again, also where forward raised.
    with pytest.raises(RuntimeError):
        model(block, torch.zeros(block.num_src_nodes(), 3))
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


def interrupted(*_: Any) -> Any:
    raise KeyboardInterrupt


def test_errors_inside_of_a_layer_turn_off_what_it_turned_on_and_no_more() -> None:
    block = World(whole_graph(), SEEDS, 2).blocks[2][1]
    rows = torch.zeros(block.num_src_nodes(), 4)
    # What DGL runs on no block is refused before anything is turned on; the outer one's stays on.
    refused = Calling(dgl.nn.SGConv(4, 2))
    install(refused)
    assert refused(block, rows).shape == (0, 3, 2)
    with EmptyPartition() as outermost, pytest.raises(ConfigError):  # as in HaloModel
        refused.inner(block, rows)
    assert outermost is not _get_current_function_mode()
    # Torch calls no hooks on an interrupt.
    stopped = Calling(interrupted)
    install(stopped)
    with pytest.raises(KeyboardInterrupt), EmptyPartition():
        stopped(block, rows)
    assert _get_current_function_mode() is None


def test_the_graph_has_the_ranks_that_matter() -> None:
    # Rank 2 sends without receiving at both layers, and has no target and no edge at the second.
    first, second = World(whole_graph(), SEEDS, 2).plans[2].layers
    assert (first.targets, second.targets, len(second.edge_ids)) == (1, 0, 0)
    assert needs_repeated_row(first)
    assert needs_repeated_row(second)


def test_every_layer_exchanges_once_and_as_wide_as_its_input() -> None:
    world = World(whole_graph(), SEEDS, 2)
    model = Stack(LAYERS["gat"])
    install(model)
    on_ranks(model, world)
    for plan, exchanges in zip(world.plans, world.exchanges, strict=True):
        assert [one.given for one in exchanges] == [[(layer.own_rows, 4)] for layer in plan.layers]


def test_own_rows_that_the_loader_set_are_exchanged_when_messages_read_them() -> None:
    g = whole_graph()
    g.ndata["h"] = features()
    g.update_all(fn.copy_u("h", "m"), fn.sum("m", "o"))
    world = World(g, np.arange(12), 1)

    def work(rank: int) -> tuple[np.ndarray, Tensor]:
        (block,), plan = world.blocks[rank], world.plans[rank]
        block.set_own("h", features()[plan.nodes])
        block = block.fresh()
        assert torch.equal(block.srcdata["h"], features()[plan.nodes])
        with block.local_scope():
            block.update_all(lambda edges: {"m": edges.src["h"]}, fn.sum("m", "o"))
            by_function = block.dstdata["o"]
        block.update_all(fn.copy_u("h", "m"), fn.sum("m", "o"))
        assert torch.equal(block.dstdata["o"], by_function)
        return plan.nodes, block.dstdata["o"]

    for nodes, out in world.run(work):
        torch.testing.assert_close(out, g.ndata["o"][nodes], **TOLERANCE)


@pytest.mark.parametrize("make", [make_by_hand, make_functions])
@pytest.mark.filterwarnings("ignore:The input graph for the user-defined edge function")
def test_a_rank_without_edges_takes_the_gradients_of_the_rows_it_sent(make: Any) -> None:
    world = World(whole_graph(), SEEDS, 2)
    model = Stack(make)
    install(model)
    outputs = world.run(
        lambda rank: model(world.blocks[rank], features()[world.plans[rank].nodes].requires_grad_())
    )
    assert outputs[2].shape == (0, 4)
    # Backward of this rank alone, as in a process of its own.
    outputs[2].sum().backward()
    assert [one.backwards for one in world.exchanges[2]] == [1, 1]


@pytest.mark.filterwarnings("ignore:The input graph for the user-defined edge function")
def test_apply_node_func_sees_what_was_reduced_also_without_edges() -> None:
    def apply(nodes: Any) -> dict[str, Tensor]:
        return {"a": nodes.data["m"] * 2 + nodes.data["b"]}

    def run(graph: Any, rows: Tensor) -> Tensor:
        graph.srcdata["h"] = rows
        graph.dstdata["b"] = torch.ones(graph.num_dst_nodes(), 4, dtype=torch.float64)
        send = lambda edges: {"m": edges.src["h"]}  # noqa: E731
        graph.update_all(send, lambda nodes: {"m": nodes.mailbox["m"].sum(1)}, apply)
        return graph.dstdata["a"]

    expected = run(whole_graph(), features())
    world = World(whole_graph(), SEEDS, 1)
    assert not world.blocks[2][0].num_edges()
    done = world.run(lambda rank: run(world.blocks[rank][0], features()[world.plans[rank].nodes]))
    for plan, out in zip(world.plans, done, strict=True):
        torch.testing.assert_close(out, expected[torch.from_numpy(plan.rows(1))], **TOLERANCE)


def test_degrees_are_those_of_the_whole_graph() -> None:
    g = whole_graph()
    for blocks, plan in zip((w := World(g, SEEDS, 2)).blocks, w.plans, strict=True):
        for level, block in enumerate(blocks, start=1):
            sources = block.srcdata[dgl.NID]
            assert torch.equal(block.out_degrees(), g.out_degrees(sources))
            if len(sources):
                assert block.out_degrees(0) == g.out_degrees(int(sources[0]))
                assert torch.equal(block.out_degrees([0]), g.out_degrees(sources[:1]))
            assert torch.equal(block.in_degrees(), g.in_degrees(torch.from_numpy(plan.rows(level))))


def test_pairs_named_arguments_and_kept_rows() -> None:
    world = World(whole_graph(), np.arange(12), 1)
    conv = dgl.nn.SAGEConv(4, 4, "mean").double()
    expected = conv(whole_graph(), features())
    install(conv)

    def work(rank: int) -> tuple[np.ndarray, list[Tensor]]:
        (block,), plan = world.blocks[rank], world.plans[rank]
        h = features()[plan.nodes]
        outputs = [conv(block, h), conv(block, (h, h[: block.num_dst_nodes()])), conv(feat=h, graph=block)]
        rows = block.all_rows(h)
        assert torch.equal(block.all_rows(h, kept=rows[len(h) :]), rows)
        return plan.nodes, outputs

    for nodes, outputs in world.run(work):
        for out in outputs:
            torch.testing.assert_close(out, expected[nodes], **TOLERANCE)


def test_hooks_are_installed_once_and_do_not_affect_other_graphs() -> None:
    conv = dgl.nn.SAGEConv(4, 4, "mean").double()
    expected = conv(whole_graph(), features())
    install(conv)
    assert torch.equal(conv(whole_graph(), features()), expected)
    install(conv)
    assert (len(conv._forward_pre_hooks), len(conv._forward_hooks)) == (1, 2)


def test_what_cannot_be_is_refused_with_the_reason() -> None:
    (block,) = World(whole_graph(), np.arange(12), 1).blocks[0]
    with pytest.raises(ConfigError, match=r"shape \(3, 4\) for a block of 5 own rows"):
        block.srcdata["h"] = torch.zeros(3, 4)
    with pytest.raises(ConfigError, match="3 rows of 'h'"):
        block.set_own("h", torch.zeros(3, 4))
    with pytest.raises(ConfigError, match="own and halo rows"):
        block.set_all("h", torch.zeros(5, 4))
    with pytest.raises(ConfigError, match="the block's only one"):
        block["likes"]
    norm = dgl.nn.EdgeWeightNorm("both")
    install(norm)
    with pytest.raises(ConfigError, match="out-edges of each source"):
        norm(block, torch.ones(block.num_edges()))
    typed = dgl.nn.HeteroGraphConv({"_E": dgl.nn.SAGEConv(4, 4, "mean")})
    install(typed)
    with pytest.raises(ConfigError, match="dict of rows"):
        typed(block, {"_N": features()[OWNER == 0]})
