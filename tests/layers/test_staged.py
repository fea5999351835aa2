"""Stages of convolutions: alone they are DGL's layer; cut by columns and added up they still are."""

from collections.abc import Callable

import dgl
import pytest
import torch
from dgl.nn import GATConv, GINConv, GraphConv, SAGEConv
from torch import Tensor, nn

from dglx_dist.layers.columns import deal_out_columns
from dglx_dist.layers.gat import GatStages
from dglx_dist.layers.gin import GinStages
from dglx_dist.layers.graph_conv import GraphConvStages
from dglx_dist.layers.parts import part_of
from dglx_dist.layers.sage import SageStages
from dglx_dist.layers.staged import Staged, StageInput, add_up

WIDTHS, PARTS = (1, 3, 100, 101), (1, 2, 3, 4)
H = 5

CONVS: dict[str, tuple[Callable[[int], nn.Module], type[Staged]]] = {
    "sage-mean": (lambda f: SAGEConv(f, H, "mean", activation=torch.tanh), SageStages),
    "sage-gcn": (lambda f: SAGEConv(f, H, "gcn", norm=nn.LayerNorm(H)), SageStages),
    "sage-no-bias": (lambda f: SAGEConv(f, H, "mean", bias=False), SageStages),
    **{
        f"gcn-{norm}": (
            lambda f, norm=norm: GraphConv(f, H, norm=norm, activation=torch.relu),
            GraphConvStages,
        )
        for norm in ("both", "left", "right", "none")
    },
    "gin": (lambda f: GINConv(nn.Linear(f, H), "sum", init_eps=0.3), GinStages),
    "gin-learnt-mean": (
        lambda f: GINConv(
            nn.Sequential(nn.Linear(f, H), nn.ReLU(), nn.Linear(H, 3)), "mean", 0.3, True, torch.tanh
        ),
        GinStages,
    ),
    "gat": (lambda f: GATConv(f, H, 2, activation=torch.tanh), GatStages),
    "gat-residual": (lambda f: GATConv(f, H, 3, residual=True), GatStages),
}
every_conv = pytest.mark.parametrize("name", CONVS)


def block_and_rows(width: int) -> tuple[dgl.DGLGraph, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(width)
    sources = torch.randint(0, 30, (60,), generator=generator)
    targets = torch.cat([torch.arange(12), torch.randint(0, 12, (48,), generator=generator)])
    block = dgl.to_block(dgl.graph((sources, targets), num_nodes=30), torch.arange(12))
    rows = torch.randn(block.num_src_nodes(), width, generator=generator, dtype=torch.float64)
    weight = torch.rand(60, generator=generator, dtype=torch.float64) + 0.1
    return block, rows, weight


def made(name: str, width: int) -> tuple[nn.Module, Staged]:
    make, stages = CONVS[name]
    torch.manual_seed(width)
    conv = make(width).double()
    for parameter in conv.parameters():
        nn.init.uniform_(parameter, -1, 1)  # zeros of a bias would hide a bias added twice
    return conv, stages(conv)


def run_parts(staged: Staged, parts: int, block: dgl.DGLGraph, x: Tensor, **edges: Tensor) -> Tensor:
    """What push-pull does, without a network: every part with its columns, sums between."""
    cuts = deal_out_columns(x.shape[1], parts)
    layers = [part_of(staged, columns) for columns in cuts]
    given = [StageInput(block=block, x=x[:, columns.cut], edges=edges) for columns in cuts]
    transformed = [layer.transform(one) for layer, one in zip(layers, given, strict=True)]
    scattered = add_up(
        [layer.scatter(*pair) for layer, *pair in zip(layers, given, transformed, strict=True)]
    )
    gathered = [
        layer.gather(one, rows, scattered)
        for layer, one, rows in zip(layers, given, transformed, strict=True)
    ]
    return layers[0].apply_nodes(block, add_up(gathered))


@every_conv
@pytest.mark.parametrize("width", WIDTHS)
def test_parts_add_up_to_dgls_layer(name: str, width: int) -> None:
    block, x, weight = block_and_rows(width)
    conv, staged = made(name, width)
    for edges in ({}, {"edge_weight": weight}):
        expected = conv(block, x, **edges)
        torch.testing.assert_close(staged(block, x, **edges), expected, rtol=0, atol=1e-12)
        for parts in PARTS:
            found = run_parts(staged, parts, block, x, **edges)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@every_conv
def test_names_are_those_of_the_layer(name: str) -> None:
    conv, staged = made(name, 7)
    assert {n: p.shape for n, p in staged.named_parameters()} == {
        n: p.shape for n, p in conv.named_parameters()
    }
    for cut, dimension in staged.cut.items():
        assert staged.get_parameter(cut).shape[dimension] == 7


def test_whole_outputs_of_parts_of_gat_do_not_add_up() -> None:
    """The known wrong way: the softmax of a part's logits is no part of the softmax."""
    block, x, _ = block_and_rows(8)
    conv, staged = made("gat", 8)
    conv.activation = staged.activation = None
    cuts = deal_out_columns(8, 2)
    wrong = sum(part_of(staged, columns)(block, x[:, columns.cut]) for columns in cuts)
    assert (wrong - conv(block, x)).abs().max() > 1e-2
