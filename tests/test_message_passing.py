"""The torch path against DGL's own kernels: outputs and gradients of every convolution and operator.

On CPU tensors, float64. What DGL's kernels do wrong is compared with a few lines of plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import dgl
import pytest
import torch
from dgl.nn import pytorch as dglnn
from dgl.nn.pytorch import conv
from torch import Tensor, nn

from dglx_dist.message_passing import TorchIndex, place

TOLERANCE = 1e-10


@pytest.fixture(autouse=True)
def _torch_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DGLX_MESSAGE_PASSING", "torch")
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def random_ends(num_src: int, num_dst: int, num_edges: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """In no order, with parallel edges; the last destination has no in-edge."""
    drawn = torch.Generator().manual_seed(seed)
    src = torch.randint(num_src, (num_edges,), generator=drawn)
    return src, torch.randint(max(num_dst - 1, 1), (num_edges,), generator=drawn)


def block_in_csc_order(num_src: int, num_dst: int, num_edges: int) -> Any:
    src, dst = random_ends(num_src, num_dst, num_edges)
    offsets = torch.zeros(num_dst + 1, dtype=torch.int64)
    offsets[1:] = torch.bincount(dst, minlength=num_dst).cumsum(0)
    ids = torch.randperm(num_edges, generator=torch.Generator().manual_seed(5))
    return dgl.create_block(("csc", (offsets, src, ids)), num_src, num_dst)


GRAPHS: dict[str, Callable[[], Any]] = {
    "graph": lambda: dgl.graph(random_ends(14, 14, 60), num_nodes=14),
    "int32 graph": lambda: dgl.graph(random_ends(14, 14, 60), num_nodes=14, idtype=torch.int32),
    "graph with loops": lambda: dgl.add_self_loop(GRAPHS["graph"]()),
    "one node": lambda: dgl.graph(([0], [0])),
    "no edges": lambda: dgl.graph(([], []), num_nodes=5),
    "block": lambda: dgl.create_block(random_ends(30, 12, 80), 30, 12),
    "block with loops": lambda: dgl.create_block(([4, 0, 1, 2, 3, 2], [0, 0, 1, 2, 3, 1]), 5, 4),
    "block in CSC order": lambda: block_in_csc_order(20, 6, 50),
    "block without edges": lambda: dgl.create_block(([], []), 6, 4),
}


def outcome(
    graph: Any, compute: Callable[[Any, list[Tensor]], Any], leaves: list[Tensor]
) -> list[Tensor | None]:
    """Outputs of ``compute`` and gradients of ``leaves`` under a fixed random weighting of the outputs."""
    for leaf in leaves:
        leaf.grad = None
    torch.manual_seed(2)
    found = compute(graph, leaves)
    outputs = (
        [*found.values()] if isinstance(found, dict) else [*found] if isinstance(found, tuple) else [found]
    )
    loss = sum((out * torch.randn_like(out)).sum() for out in outputs)
    if isinstance(loss, Tensor) and loss.requires_grad:
        loss.backward()
    return [*outputs, *(leaf.grad for leaf in leaves)]


def difference(some: list[Tensor | None], others: list[Tensor | None]) -> float:
    def between(a: Tensor | None, b: Tensor | None) -> float:
        if a is None or b is None:  # one path may leave out what the other one sets to zero
            return float(sum(one.abs().sum() for one in (a, b) if one is not None))
        assert a.shape == b.shape
        same = (a == b) | (a.isnan() & b.isnan())
        return float(torch.where(same, 0, (a - b).abs()).max()) if a.numel() else 0.0

    return max(between(a, b) for a, b in zip(some, others, strict=True))


def assert_alike(graph: Any, compute: Callable[[Any, list[Tensor]], Any], leaves: list[Tensor]) -> None:
    """The same on DGL's kernels and on the torch path, used twice, as by two layers on one block."""
    expected, placed = outcome(graph, compute, leaves), place(graph, "cpu")
    assert isinstance(placed._graph, TorchIndex)
    for _ in range(2):
        assert difference(outcome(placed, compute, leaves), expected) <= TOLERANCE


def leaf(*shape: int, ties: bool = False, seed: int = 1) -> Tensor:
    rows = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (rows.round() if ties else rows).requires_grad_()


@dataclass(frozen=True)
class Case:
    """A convolution and its call with (S, 8) source rows and (E, 4) rows of edges."""

    make: Callable[[], nn.Module]
    call: Callable[[Any, Any, Tensor, Tensor], Any]
    blocks: bool = True
    """Whether DGL runs it on blocks."""
    not_on_meta: str = ""
    """Why it cannot run without data."""


def pair(g: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x[: g.num_dst_nodes()]


def plain(layer: Any, g: Any, x: Tensor, e: Tensor) -> Any:
    return layer(g, x)


def of_pair(layer: Any, g: Any, x: Tensor, e: Tensor) -> Any:
    return layer(g, pair(g, x))


def with_edges(layer: Any, g: Any, x: Tensor, e: Tensor) -> Any:
    return layer(g, pair(g, x), e)


def weighted(layer: Any, g: Any, x: Tensor, e: Tensor) -> Any:
    return layer(g, x, edge_weight=e[:, 0].square() + 0.1)


def types_of(count: int, num_types: int, device: Any) -> Tensor:
    return torch.arange(count, device=device) % num_types


BY_DEGREE = "DGL groups nodes by degree on the host"
READS = "the layer itself reads a number from the device"
zero = {"allow_zero_in_degree": True}
statistics = ["mean", "max", "min", "std", "var", "sum", "moment3"]

CASES: dict[str, Case] = {
    **{
        f"SAGEConv {how}": Case(lambda how=how: dglnn.SAGEConv(8, 5, how), plain)
        for how in ("mean", "pool", "gcn")
    },
    "SAGEConv lstm": Case(lambda: dglnn.SAGEConv(8, 5, "lstm"), plain, not_on_meta=BY_DEGREE),
    "SAGEConv weighted": Case(lambda: dglnn.SAGEConv(8, 5, "mean"), weighted),
    **{
        f"GraphConv {norm}": Case(lambda norm=norm: dglnn.GraphConv(8, 5, norm=norm, **zero), plain)
        for norm in ("both", "right", "left", "none")
    },
    "GraphConv weighted": Case(lambda: dglnn.GraphConv(8, 5, norm="none", **zero), weighted),
    "EdgeWeightNorm both": Case(
        lambda: dglnn.EdgeWeightNorm("both"),
        lambda layer, g, x, e: layer(g, e[:, 0].square() + 0.1),
        blocks=False,
        not_on_meta=READS,
    ),
    "EdgeWeightNorm right": Case(
        lambda: dglnn.EdgeWeightNorm("right"),
        lambda layer, g, x, e: layer(g, e[:, 0].square() + 0.1),
        not_on_meta=READS,
    ),
    "GATConv": Case(lambda: dglnn.GATConv(8, 5, 3, **zero), of_pair),
    "GATConv weighted": Case(
        lambda: dglnn.GATConv(8, 5, 12, residual=True, **zero),
        lambda layer, g, x, e: layer(g, pair(g, x), edge_weight=e[:, 0]),
    ),
    "GATv2Conv": Case(lambda: dglnn.GATv2Conv(8, 5, 3, **zero), of_pair),
    "EdgeGATConv": Case(lambda: dglnn.EdgeGATConv(8, 4, 5, 3, **zero), with_edges),
    "EGATConv": Case(
        lambda: dglnn.EGATConv(8, 4, 5, 6, 3),
        lambda layer, g, x, e: layer(g, pair(g, x) if g.is_block else x, e),
    ),
    "DotGatConv": Case(lambda: dglnn.DotGatConv(8, 5, 2, **zero), plain),
    "AGNNConv": Case(lambda: dglnn.AGNNConv(**zero), of_pair),
    **{
        f"GINConv {how}": Case(lambda how=how: dglnn.GINConv(nn.Linear(8, 5), how, learn_eps=True), of_pair)
        for how in ("sum", "max", "mean")
    },
    "GINEConv": Case(
        lambda: dglnn.GINEConv(nn.Linear(8, 5)),
        lambda layer, g, x, e: layer(g, pair(g, x), e.repeat(1, 2)),
    ),
    "EdgeConv": Case(lambda: dglnn.EdgeConv(8, 5, **zero), of_pair),
    **{
        f"NNConv {how}": Case(lambda how=how: dglnn.NNConv(8, 5, nn.Linear(4, 40), how), with_edges)
        for how in ("sum", "mean", "max")
    },
    "CFConv": Case(lambda: dglnn.CFConv(8, 4, 6, 5), with_edges),
    **{
        f"GMMConv {how}": Case(
            lambda how=how: dglnn.GMMConv(8, 5, 4, 2, how, **zero), with_edges, not_on_meta=""
        )
        for how in ("sum", "mean", "max")
    },
    "RelGraphConv": Case(
        lambda: dglnn.RelGraphConv(8, 5, 3, "basis", 2),
        lambda layer, g, x, e: layer(g, x, types_of(g.num_edges(), 3, x.device), e[:, :1]),
    ),
    "RelGraphConv bdd": Case(
        lambda: dglnn.RelGraphConv(8, 6, 3, "bdd", 2, self_loop=False),
        lambda layer, g, x, e: layer(g, x, types_of(g.num_edges(), 3, x.device)),
    ),
    "HGTConv": Case(
        lambda: dglnn.HGTConv(8, 4, 2, 3, 2, dropout=0.0, use_norm=True),
        lambda layer, g, x, e: layer(
            g, x, types_of(len(x), 3, x.device), types_of(g.num_edges(), 2, x.device)
        ),
    ),
    "SGConv": Case(lambda: dglnn.SGConv(8, 5, k=2, **zero), plain, blocks=False),
    "SGConv weighted": Case(
        lambda: dglnn.SGConv(8, 5, k=2, **zero), weighted, blocks=False, not_on_meta=READS
    ),
    "TAGConv": Case(lambda: dglnn.TAGConv(8, 5, k=2), plain, blocks=False),
    "ChebConv": Case(
        lambda: dglnn.ChebConv(8, 5, 3), lambda layer, g, x, e: layer(g, x, [2.0]), blocks=False
    ),
    "APPNPConv": Case(lambda: dglnn.APPNPConv(3, 0.2), plain, blocks=False),
    "GCN2Conv": Case(
        lambda: dglnn.GCN2Conv(8, 1, **zero), lambda layer, g, x, e: layer(g, x, x.detach() + 1), blocks=False
    ),
    "GatedGraphConv": Case(lambda: dglnn.GatedGraphConv(8, 8, 2, 1), plain, blocks=False),
    "GatedGraphConv typed": Case(
        lambda: dglnn.GatedGraphConv(8, 8, 2, 3),
        lambda layer, g, x, e: layer(g, x, types_of(g.num_edges(), 3, x.device)),
        blocks=False,
        not_on_meta=READS,
    ),
    "EGNNConv": Case(
        lambda: dglnn.EGNNConv(8, 6, 5, 4), lambda layer, g, x, e: layer(g, x, x[:, :3], e), blocks=False
    ),
    "PNAConv": Case(
        lambda: dglnn.PNAConv(8, 8, statistics, ["identity", "amplification", "attenuation"], 2.5),
        plain,
        blocks=False,
        not_on_meta=BY_DEGREE,
    ),
    "DGNConv": Case(
        lambda: dglnn.DGNConv(8, 8, ["dir1-av", "dir1-dx", "sum"], ["identity"], 2.5),
        lambda layer, g, x, e: layer(g, x, eig_vec=x[:, :3].detach()),
        blocks=False,
        not_on_meta=BY_DEGREE,
    ),
    "TWIRLSConv": Case(
        lambda: dglnn.TWIRLSConv(8, 5, 6, 2, attention=True, T=0.0, attn_bef=True), plain, blocks=False
    ),
    "TWIRLSUnfoldingAndAttention": Case(
        lambda: dglnn.TWIRLSUnfoldingAndAttention(8, 0.5, 1.0, 2), plain, blocks=False
    ),
    "AtomicConv": Case(
        lambda: dglnn.AtomicConv(torch.tensor([12.0, 8.0]), torch.zeros(2), torch.ones(2), torch.arange(3.0)),
        lambda layer, g, x, e: layer(g, x[:, :1].detach().round(), e[:, :1].abs()),
        blocks=False,
    ),
    # It frees its input after forward and its output after backward.
    "GroupRevRes": Case(
        lambda: dglnn.GroupRevRes(dglnn.GraphConv(4, 4, **zero)),
        lambda layer, g, x, e: layer(g, x.clone()) + 0,
        blocks=False,
    ),
}
if hasattr(dglnn, "GatedGCNConv"):  # from DGL 2 on
    CASES["GatedGCNConv"] = Case(
        lambda: dglnn.GatedGCNConv(8, 4, 5, batch_norm=False),
        lambda layer, g, x, e: layer(g, x, e),
        blocks=False,
    )

WITHOUT_GRAPH = {"DenseChebConv", "DenseGraphConv", "DenseSAGEConv"}
CUGRAPH = {"CuGraphGATConv", "CuGraphRelGraphConv", "CuGraphSAGEConv"}
"""Need the package pylibcugraphops."""


def test_every_convolution_of_dgl_is_in_the_table() -> None:
    classes = {name for name in dir(conv) if isinstance(getattr(conv, name), type)}
    assert classes - {name.split()[0] for name in CASES} == WITHOUT_GRAPH | CUGRAPH


@pytest.mark.parametrize("name", CASES)
def test_convolution(name: str) -> None:
    case, done = CASES[name], []
    for kind, make in GRAPHS.items():
        graph = make()
        if graph.is_block and not case.blocks:
            continue
        torch.manual_seed(1)
        layer = case.make()
        leaves = [leaf(graph.num_src_nodes(), 8), leaf(graph.num_edges(), 4), *layer.parameters()]

        def compute(g: Any, given: list[Tensor], layer: Any = layer) -> Any:
            return case.call(layer, g, given[0], given[1])

        if not graph.num_edges() and ("max" in name or "pool" in name):
            continue  # DGL gives the gradient of these zeros to node 0
        try:
            outcome(graph, compute, leaves)
        except (dgl.DGLError, RuntimeError, IndexError, ValueError, KeyError):
            continue  # on this graph DGL's own path has none
        assert_alike(graph, compute, leaves)
        done.append(kind)
    assert "graph with loops" in done
    assert not case.blocks or "block with loops" in done
    assert len(done) >= 3
