"""Stages of convolutions: alone they are DGL's layer; cut by columns and added up they still are."""

import copy
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import dgl
import pytest
import torch
from dgl.nn import (
    DotGatConv,
    EdgeConv,
    EdgeWeightNorm,
    GATConv,
    GATv2Conv,
    GINConv,
    GraphConv,
    PNAConv,
    RelGraphConv,
    SAGEConv,
    SGConv,
)
from torch import Tensor, nn

from dglx_dist.errors import ConfigError
from dglx_dist.layers.base import PartialSums, SplittableConv, StageInput, cut_in_place
from dglx_dist.layers.convolutions import make_stages
from dglx_dist.layers.dropout import ColumnRange, deal_out_columns

WIDTHS, PARTS = (1, 3, 100, 101), (1, 2, 3, 4)
H = 5

Make = Callable[[int], nn.Module]
CONVS: dict[str, Make] = {
    "sage-mean": lambda f: SAGEConv(f, H, "mean", activation=torch.tanh),
    "sage-gcn": lambda f: SAGEConv(f, H, "gcn", norm=nn.LayerNorm(H)),
    "sage-no-bias": lambda f: SAGEConv(f, H, "mean", bias=False),
    **{
        f"gcn-{norm}": lambda f, norm=norm: GraphConv(f, H, norm=norm, activation=torch.relu)
        for norm in ("both", "left", "right", "none")
    },
    "gin": lambda f: GINConv(nn.Linear(f, H), "sum", init_eps=0.3),
    "gin-learnt-mean": lambda f: GINConv(
        nn.Sequential(nn.Linear(f, H), nn.ReLU(), nn.Linear(H, 3)), "mean", 0.3, True, torch.tanh
    ),
    "rel": lambda f: RelGraphConv(f, H, 3, activation=torch.tanh),
    "rel-basis-norm": lambda f: RelGraphConv(f, H, 3, "basis", 2, layer_norm=True),
    "gat": lambda f: GATConv(f, H, 2, activation=torch.tanh),
    "gat-residual": lambda f: GATConv(f, H, 3, residual=True),
}


def block_and_rows(width: int) -> tuple[dgl.DGLGraph, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(width)
    sources = torch.randint(0, 30, (60,), generator=generator)
    targets = torch.cat([torch.arange(12), torch.randint(0, 12, (48,), generator=generator)])
    block = dgl.to_block(dgl.graph((sources, targets), num_nodes=30), torch.arange(12))
    rows = torch.randn(block.num_src_nodes(), width, generator=generator, dtype=torch.float64)
    weight = torch.rand(60, generator=generator, dtype=torch.float64) + 0.1
    return block, rows, weight


def make(name: str, width: int) -> tuple[nn.Module, SplittableConv]:
    torch.manual_seed(width)
    conv = CONVS[name](width).double()
    for parameter in conv.parameters():
        nn.init.uniform_(parameter, -1, 1)  # zeros of a bias would hide a bias added twice
    return conv, make_stages(conv)


def edge_choices(name: str, weight: Tensor) -> list[dict[str, Tensor]]:
    if name.startswith("rel"):
        relation = torch.arange(len(weight)) % 3
        return [{"etypes": relation}, {"etypes": relation, "norm": weight.view(-1, 1)}]
    return [{}, {"edge_weight": weight}]


def part_of(layer: SplittableConv, runs: Sequence[ColumnRange]) -> SplittableConv:
    part = copy.deepcopy(layer)
    cut_in_place(part, layer.cut, runs)
    return part


def add_up(parts: list[PartialSums]) -> PartialSums:
    return tuple(sum(remaining, first) for first, *remaining in zip(*parts, strict=True))


def run_parts(
    layers: list[SplittableConv], block: dgl.DGLGraph, x: Tensor, drops: Any = None, **edges: Tensor
) -> Tensor:
    """Return the output of push-pull without a network: every part has its columns, and sums are between.

    ``drops`` gives the draws of a part's columns.
    """
    inputs = [
        StageInput(
            block=block,
            x=x[:, deal_out_column.cut],
            edges=edges,
            draws=None if drops is None else drops(deal_out_column),
        )
        for deal_out_column in deal_out_columns(x.shape[1], len(layers))
    ]
    transformed = [layer.transform(item) for layer, item in zip(layers, inputs, strict=True)]
    scattered = add_up(
        [layer.scatter(*pair) for layer, *pair in zip(layers, inputs, transformed, strict=True)]
    )
    gathered = [
        layer.gather(item, rows, scattered)
        for layer, item, rows in zip(layers, inputs, transformed, strict=True)
    ]
    return layers[0].apply_nodes(block, add_up(gathered))


def summed_gradient(layers: list[SplittableConv], name: str) -> Tensor | None:
    results = [layer.get_parameter(name).grad for layer in layers]
    if name in layers[0].cut:
        return torch.cat([grad for grad in results if grad is not None], dim=layers[0].cut[name])
    if name in layers[0].shared:
        return torch.stack([grad for grad in results if grad is not None]).sum(0)
    assert all(grad is None for grad in results[1:]), f"{name} is used before the sum and not declared"
    return results[0]


@pytest.mark.parametrize("name", list(CONVS))
@pytest.mark.parametrize("width", WIDTHS)
def test_parts_add_up_to_dgls_layer(name: str, width: int) -> None:
    block, x, weight = block_and_rows(width)
    conv, staged = make(name, width)
    for edges in edge_choices(name, weight):
        conv.zero_grad()
        expected = conv(block, x, **edges)
        expected.cos().sum().backward()
        close(staged(block, x, **edges), expected)
        for parts in PARTS:
            layers = [part_of(staged, [columns]) for columns in deal_out_columns(width, parts)]
            result = run_parts(layers, block, x, **edges)
            close(result, expected)
            result.cos().sum().backward()
            for parameter, values in conv.named_parameters():
                close(summed_gradient(layers, parameter), values.grad)


def close(found: Tensor | None, expected: Tensor | None) -> None:
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (SAGEConv(4, 3, "pool"), "aggregator 'pool'"),
        (SAGEConv(4, 3, "lstm"), "aggregator 'lstm'"),
        (GATv2Conv(4, 3, 2), "GATv2Conv cannot be cut .* nonlinear"),
        (GraphConv(4, 4, weight=False, bias=False), "weight=False"),
        (GINConv(nn.Linear(4, 3), "max"), "'max'"),
        (GINConv(nn.ReLU(), "sum"), "begins with ReLU"),
        (GATConv(3, 3, 1, residual=True), "residual=True"),
        (GATConv((3, 4), 3, 1), "separate widths"),
        (RelGraphConv(4, 4, 2, "bdd", 2), "bdd"),
        (SGConv(4, 3, k=2), "2 hops, but a block has one"),
        (SGConv(4, 3, norm=nn.LayerNorm(4)), "normalizes complete rows"),
        (SGConv(4, 3, cached=True), "caches the first batch's result"),
        (EdgeConv(4, 3), "EdgeConv cannot be cut .* maximum"),
        (PNAConv(4, 3, ["max"], ["identity"], 1.0), "PNAConv cannot be cut .* maximum"),
        (DotGatConv(4, 3, 1), "DotGatConv cannot be cut .* complete rows"),
        (nn.Linear(3, 3), "Linear cannot be cut .* its stages are not defined"),
    ],
)
def test_refuses_to_split_other_layers_with_a_reason(module: nn.Module, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make_stages(module)
    assert "data_parallel" in str(caught.value)


def test_relations_that_are_not_passed_are_named() -> None:
    block, x, _ = block_and_rows(3)
    _, staged = make("rel", 3)
    with pytest.raises(ConfigError, match="Pass etypes"):
        staged(block, x)


def test_pairs_have_the_first_sources_as_destinations() -> None:
    block, x, _ = block_and_rows(3)
    conv, staged = make("sage-mean", 3)
    for targets in (x[:12], x[:12].clone()):
        close(staged(block, (x, targets)), conv(block, (x, targets)))
    for targets in (2 * x[:12], x[1:13], x):
        with pytest.raises(ConfigError, match=r"not the first 12 of the source rows.*Pass only the rows"):
            staged(block, (x, targets))


@pytest.mark.parametrize("out", [3, 9])
@pytest.mark.parametrize("weighted", [False, True])
def test_one_hop_of_sgc_equals_dgls_on_a_graph(out: int, weighted: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    ends = torch.cat([torch.randint(0, 8, (2, 20), generator=generator), torch.arange(8).repeat(2, 1)], 1)
    graph = dgl.graph((ends[0], ends[1]))
    x = torch.randn(8, 5, generator=generator, dtype=torch.float64)
    edges = (torch.rand(28, generator=generator, dtype=torch.float64) + 0.1,) if weighted else ()
    conv = SGConv(5, out).double()
    nn.init.uniform_(conv.fc.bias)
    staged = make_stages(conv)
    expected = conv(graph, x, *edges)
    close(staged(graph, x, *edges), expected)
    parts = [part_of(staged, [columns]) for columns in deal_out_columns(5, 3)]
    result = run_parts(parts, graph, x, **({"edge_weight": edges[0]} if weighted else {}))
    close(result, expected)
    for output in (expected, result):
        output.cos().sum().backward()
    close(summed_gradient(parts, "fc.weight"), conv.fc.weight.grad)
    close(summed_gradient(parts, "fc.bias"), conv.fc.bias.grad)


def test_one_hop_of_sgc_on_a_block_weighs_as_dgls_norm_of_edges_does() -> None:
    """DGL's own SGConv runs on no block; its EdgeWeightNorm does."""
    block, x, weight = block_and_rows(7)
    conv = SGConv(7, 4).double()
    staged = make_stages(conv)
    with pytest.raises((dgl.DGLError, RuntimeError, AssertionError)):
        conv(block, x)
    plain = GraphConv(7, 4, norm="none", bias=False).double()
    plain.weight = nn.Parameter(conv.fc.weight.detach().T)
    for case in (weight, torch.ones_like(weight)):
        close(staged(block, x, case), plain(block, x, edge_weight=EdgeWeightNorm("both")(block, case)))
    close(staged(block, x), staged(block, x, torch.ones_like(weight)))


PAGE = Path(__file__).parents[2] / "docs/guides/own_model.md"


def test_the_layer_of_the_page_adds_up() -> None:
    (code,) = re.findall(
        r"```python\n((?:(?!```).)*?class HalfSelf.*?)```", PAGE.read_text(), flags=re.DOTALL
    )
    results: dict[str, Any] = {}
    exec(code, results)
    torch.manual_seed(0)
    layer = results["HalfSelf"](7, 4).double()
    torch.nn.init.uniform_(layer.bias)
    block, x, weight = block_and_rows(7)
    expected = layer(block, x, weight)
    expected.cos().sum().backward()
    assert (layer(block, x) - expected).abs().max() > 1e-3
    for parts in (2, 3):
        layers = [part_of(layer, [columns]) for columns in deal_out_columns(7, parts)]
        total = run_parts(layers, block, x, edge_weight=weight)
        close(total, expected)
        total.cos().sum().backward()
        for name in ("weight", "bias"):
            close(summed_gradient(layers, name), layer.get_parameter(name).grad)
