"""The model of the equality matrix under mode async, S = 0, in the order of a queue with one worker."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.serverless.parameter_server import ParameterPlan, ParameterServer, assign
from dglx_dist.strategies.serverless.graph_partition import (
    LocalGraph,
    Part,
    cut_intervals,
    local_graph,
    routes_of,
)
from dglx_dist.strategies.serverless.graph_server import GraphServer
from dglx_dist.strategies.serverless.layer_kinds import edge_values
from dglx_dist.strategies.serverless.model_to_program import Chain, chain_of
from dglx_dist.strategies.serverless.options import StalenessPolicy
from dglx_dist.strategies.serverless.trainer import update_of, weights_of, write_back
from tests.strategies import equality

from .cases import boundaries_of
from .serial_scheduler import SerialScheduler

INTERVALS = 3


def weights_after(g: DistGraph, kind: str, graph_servers: int, epochs: int) -> list[Any]:
    """Train on ``graph_servers`` unequal graph servers in this thread; return the weights."""
    model = equality.model_of(kind, g)
    optimizer = torch.optim.SGD(model.parameters(), lr=equality.RATE)
    chain = chain_of(model)
    mask = g.ndata["train_mask"][:].numpy().astype(bool)
    program = chain.program(int(mask.sum()))
    graphs = cut_graph(g, graph_servers)
    parts = [
        part_of(g, chain, graph, boundary, mask)
        for graph, boundary in zip(graphs, boundaries_of(graphs), strict=True)
    ]
    sizes = np.concatenate([np.diff(part.bounds) for part in parts])
    num_servers = min(2, graph_servers)
    plan = ParameterPlan.of(program, assign(sizes, num_servers), num_servers=num_servers)
    names = list(plan.shapes)
    parameters = [
        ParameterServer(plan, index, weights_of(model, names), update_of(optimizer, model, names))
        for index in range(num_servers)
    ]
    SerialScheduler(
        [GraphServer(part, program) for part in parts], parameters, StalenessPolicy(mode="async")
    ).run(epochs)
    write_back(model, optimizer, dict(zip(names, parameters[-1].latest(), strict=True)), {})
    return [parameter.detach().numpy() for parameter in model.parameters()]


def cut_graph(g: DistGraph, graph_servers: int) -> list[LocalGraph]:
    """Contiguous ranges, each larger than the one before it."""
    ends = np.cumsum(np.arange(1, graph_servers + 1)) / sum(range(1, graph_servers + 1))
    starts = [0, *(ends * g.num_nodes()).astype(int).tolist()]
    found = []
    for rank in range(graph_servers):
        edges = g.structure(g.canonical_etypes[0]).ask("in_edges", np.arange(starts[rank], starts[rank + 1]))
        found.append(local_graph(rank, starts, edges.indptr, edges.sources))
    return found


def part_of(g: DistGraph, chain: Chain, graph: LocalGraph, boundary: list[Any], mask: Any) -> Part:
    own = np.arange(graph.starts[graph.rank], graph.starts[graph.rank + 1])
    bounds = cut_intervals(graph.indptr, graph.sources, INTERVALS)
    factors = {name: edge_values(one, g, own, np.dtype(np.float64)) for name, one in chain.factors.items()}
    return Part(
        graph=graph,
        bounds=bounds,
        first_interval=graph.rank * INTERVALS,
        routes=routes_of(graph, bounds, boundary),
        features=g.ndata["feat"][torch.from_numpy(np.concatenate([own, graph.ghosts]))].numpy(),
        labels=np.where(mask[own], g.ndata["label"][torch.from_numpy(own)].numpy(), -1).astype(np.int32),
        fixed={name: values[:, None] for name, values in factors.items()},
    )
