"""The model of the equality matrix under mode async, S = 0, in the order of a queue with one worker."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.strategies.serverless.cut import CLASS_LABEL, capture
from dglx_dist.strategies.serverless.graph_server import GraphServer
from dglx_dist.strategies.serverless.options import LambdaOptions
from dglx_dist.strategies.serverless.parameter_server import ParameterServer, Update
from dglx_dist.strategies.serverless.trainer import weights_of, write_back
from tests.strategies import equality

from .cases import Case, DirectParameters, plan_of
from .serial_scheduler import SerialScheduler

INTERVALS = 3


def weights_after(g: DistGraph, kind: str, graph_servers: int, epochs: int) -> list[Any]:
    model = equality.model_of(kind, g)
    optimizer = torch.optim.SGD(model.parameters(), lr=equality.RATE)
    case = case_of(g)
    captured = capture(model, equality.WIDTH)
    program = captured.with_loss(cross_entropy, CLASS_LABEL, int((case.labels >= 0).sum())).program
    ends = np.cumsum(np.arange(1, graph_servers + 1)) / sum(range(1, graph_servers + 1))
    parts = case.parts(program, [0, *(ends * g.num_nodes()).astype(int).tolist()], INTERVALS)
    plan = plan_of(program, parts, min(2, graph_servers))
    names = list(plan.shapes)
    parameters = [
        ParameterServer(
            plan, index, weights_of(model, names), Update(optimizer, dict(model.named_parameters()), names)
        )
        for index in range(plan.num_servers)
    ]
    options = LambdaOptions(mode="async")
    direct = DirectParameters(parameters)
    servers = [GraphServer(part, program, options, direct) for part in parts]
    SerialScheduler(servers, parameters).run(epochs)
    write_back(model, optimizer, dict(zip(names, parameters[-1].latest(), strict=True)), {})
    return [parameter.detach().numpy() for parameter in model.parameters()]


def case_of(g: DistGraph) -> Case:
    everyone = np.arange(g.num_nodes())
    edges = g.structure(g.canonical_etypes[0]).ask("in_edges", everyone)
    mask = g.ndata["train_mask"][:].numpy().astype(bool)
    return Case(
        indptr=edges.indptr,
        sources=edges.sources,
        x=g.ndata["feat"][:].numpy(),
        labels=np.where(mask, g.ndata["label"][:].numpy(), -1).astype(np.int32),
        weights=np.ones((len(edges.sources), 1)),
    )
