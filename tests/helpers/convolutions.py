"""Every convolution of dgl.nn, and what it is given."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from dgl.nn import pytorch as dglnn
from torch import Tensor, nn

MakeArguments: TypeAlias = Callable[[Any, Tensor, Tensor], tuple[Any, ...]]
"""Makes the arguments of a layer besides the graph from (S, 8) source rows and (E, 4) rows of edges."""


def pair(g: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x[: g.num_dst_nodes()]


def weights_of(e: Tensor) -> Tensor:
    return e[:, 0].square() + 0.1


def types_of(rows: Tensor, num_types: int) -> Tensor:
    return torch.arange(len(rows), device=rows.device) % num_types


ARGUMENTS: dict[str, MakeArguments] = {
    "rows": lambda g, x, e: (x,),
    "pair": lambda g, x, e: (pair(g, x),),
    "rows, edges": lambda g, x, e: (x, e),
    "pair, edges": lambda g, x, e: (pair(g, x), e),
    "weights": lambda g, x, e: (weights_of(e),),
    "rows, weights": lambda g, x, e: (x, weights_of(e)),
    "rows, types": lambda g, x, e: (x, types_of(e, 3)),
}


@dataclass(frozen=True)
class Case:
    """A convolution and its arguments."""

    make: Callable[[], nn.Module]
    arguments: str | MakeArguments = "rows"
    """A function, or the name of one in ``ARGUMENTS``."""
    blocks: bool = True
    """Whether DGL runs it on blocks."""
    not_on_meta: str = ""
    """Why it cannot run without data."""

    def call(self, layer: Any, g: Any, x: Tensor, e: Tensor) -> Any:
        inputs = ARGUMENTS[self.arguments] if isinstance(self.arguments, str) else self.arguments
        return layer(g, *inputs(g, x, e))


on_graphs = partial(Case, blocks=False)

BY_DEGREE = "DGL groups nodes by degree on the host"
READS = "the layer itself reads a number from the device"
COUNTS = "DGL copies the number of nodes to CPU or CUDA devices only"
CHANGES = "the layer removes edges from the graph"
zero = {"allow_zero_in_degree": True}
statistics = ["mean", "max", "min", "std", "var", "sum", "moment3"]


def each(
    name: str, make: Callable[[str], nn.Module], options: str, given: str | MakeArguments = "rows"
) -> dict[str, Case]:
    return {f"{name} {word}": Case(partial(make, word), given) for word in options.split()}


CASES: dict[str, Case] = {
    **each("SAGEConv", lambda how: dglnn.SAGEConv(8, 5, how), "mean pool gcn"),
    "SAGEConv lstm": Case(lambda: dglnn.SAGEConv(8, 5, "lstm"), not_on_meta=BY_DEGREE),
    "SAGEConv weighted": Case(lambda: dglnn.SAGEConv(8, 5, "mean"), "rows, weights"),
    **each("GraphConv", lambda norm: dglnn.GraphConv(8, 5, norm=norm, **zero), "both right left none"),
    "GraphConv weighted": Case(
        lambda: dglnn.GraphConv(8, 5, norm="none", **zero), lambda g, x, e: (x, None, weights_of(e))
    ),
    "EdgeWeightNorm both": on_graphs(lambda: dglnn.EdgeWeightNorm("both"), "weights", not_on_meta=READS),
    "EdgeWeightNorm right": Case(lambda: dglnn.EdgeWeightNorm("right"), "weights"),
    "GATConv": Case(lambda: dglnn.GATConv(8, 5, 3, **zero), "pair"),
    "GATConv weighted": Case(
        lambda: dglnn.GATConv(8, 5, 12, residual=True, **zero), lambda g, x, e: (pair(g, x), e[:, 0])
    ),
    "GATv2Conv": Case(lambda: dglnn.GATv2Conv(8, 5, 3, **zero), "pair"),
    "EdgeGATConv": Case(lambda: dglnn.EdgeGATConv(8, 4, 5, 3, **zero), "pair, edges"),
    "EGATConv": Case(
        lambda: dglnn.EGATConv(8, 4, 5, 6, 3),
        lambda g, x, e: (pair(g, x) if g.is_block else x, e),
        not_on_meta=READS,
    ),
    "DotGatConv": Case(lambda: dglnn.DotGatConv(8, 5, 2, **zero)),
    "AGNNConv": Case(lambda: dglnn.AGNNConv(**zero), "pair"),
    **each(
        "GINConv", lambda how: dglnn.GINConv(nn.Linear(8, 5), how, learn_eps=True), "sum max mean", "pair"
    ),
    "GINEConv": Case(lambda: dglnn.GINEConv(nn.Linear(8, 5)), lambda g, x, e: (pair(g, x), e.repeat(1, 2))),
    "EdgeConv": Case(lambda: dglnn.EdgeConv(8, 5, **zero), "pair"),
    **each("NNConv", lambda how: dglnn.NNConv(8, 5, nn.Linear(4, 40), how), "sum mean max", "pair, edges"),
    "CFConv": Case(lambda: dglnn.CFConv(8, 4, 6, 5), "pair, edges"),
    **each("GMMConv", lambda how: dglnn.GMMConv(8, 5, 4, 2, how, **zero), "sum mean max", "pair, edges"),
    "RelGraphConv": Case(
        lambda: dglnn.RelGraphConv(8, 5, 3, "basis", 2), lambda g, x, e: (x, types_of(e, 3), e[:, :1])
    ),
    "RelGraphConv bdd": Case(lambda: dglnn.RelGraphConv(8, 6, 3, "bdd", 2, self_loop=False), "rows, types"),
    "HGTConv": Case(
        lambda: dglnn.HGTConv(8, 4, 2, 3, 2, dropout=0.0, use_norm=True),
        lambda g, x, e: (x, types_of(x, 3), types_of(e, 2)),
    ),
    "SGConv": on_graphs(lambda: dglnn.SGConv(8, 5, k=2, **zero)),
    "SGConv weighted": on_graphs(lambda: dglnn.SGConv(8, 5, k=2, **zero), "rows, weights", not_on_meta=READS),
    "TAGConv": on_graphs(lambda: dglnn.TAGConv(8, 5, k=2)),
    "ChebConv": on_graphs(lambda: dglnn.ChebConv(8, 5, 3), lambda g, x, e: (x, [2.0]), not_on_meta=COUNTS),
    "APPNPConv": on_graphs(lambda: dglnn.APPNPConv(3, 0.2)),
    "GCN2Conv": on_graphs(lambda: dglnn.GCN2Conv(8, 1, **zero), lambda g, x, e: (x, x.detach() + 1)),
    "GatedGraphConv": on_graphs(lambda: dglnn.GatedGraphConv(8, 8, 2, 1)),
    "GatedGraphConv typed": on_graphs(
        lambda: dglnn.GatedGraphConv(8, 8, 2, 3), "rows, types", not_on_meta=READS
    ),
    "EGNNConv": on_graphs(lambda: dglnn.EGNNConv(8, 6, 5, 4), lambda g, x, e: (x, x[:, :3], e)),
    "PNAConv": on_graphs(
        lambda: dglnn.PNAConv(8, 8, statistics, ["identity", "amplification", "attenuation"], 2.5),
        not_on_meta=BY_DEGREE,
    ),
    "DGNConv": on_graphs(
        lambda: dglnn.DGNConv(8, 8, ["dir1-av", "dir1-dx", "sum"], ["identity"], 2.5),
        lambda g, x, e: (x, None, x[:, :3].detach()),
        not_on_meta=BY_DEGREE,
    ),
    "TWIRLSConv": on_graphs(
        lambda: dglnn.TWIRLSConv(8, 5, 6, 2, attention=True, T=0.0, attn_bef=True), not_on_meta=CHANGES
    ),
    "TWIRLSUnfoldingAndAttention": on_graphs(lambda: dglnn.TWIRLSUnfoldingAndAttention(8, 0.5, 1.0, 2)),
    "AtomicConv": on_graphs(
        lambda: dglnn.AtomicConv(torch.tensor([12.0, 8.0]), torch.zeros(2), torch.ones(2), torch.arange(3.0)),
        lambda g, x, e: (x[:, :1].detach().round(), e[:, :1].abs()),
        not_on_meta=BY_DEGREE,
    ),
    # It frees its input after forward.
    "GroupRevRes": on_graphs(
        lambda: dglnn.GroupRevRes(dglnn.GraphConv(4, 4, **zero)), lambda g, x, e: (x.clone(),)
    ),
}
if hasattr(dglnn, "GatedGCNConv"):  # from DGL 2 on
    CASES["GatedGCNConv"] = on_graphs(lambda: dglnn.GatedGCNConv(8, 4, 5, batch_norm=False), "rows, edges")
