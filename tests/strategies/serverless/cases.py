"""Graph servers, parameter servers and the plain answer for one small graph, in one process."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import dgl
import numpy as np
import torch
from torch.nn.functional import cross_entropy

from dglx_dist.comm.session import Session
from dglx_dist.internals.interception import InterceptedDropout
from dglx_dist.layers.dropout import MODULES
from dglx_dist.records import Array
from dglx_dist.strategies.serverless.graph_partition import (
    Part,
    ServerGraph,
    cut_intervals,
    exchange_boundaries,
    local_graph,
)
from dglx_dist.strategies.serverless.graph_server import GraphServer
from dglx_dist.strategies.serverless.options import LambdaOptions, read_lambda_options
from dglx_dist.strategies.serverless.parameter_server import ParameterPlan, ParameterServer, assign
from dglx_dist.strategies.serverless.program import Program
from dglx_dist.strategies.serverless.tasks import TaskKey
from dglx_dist.strategies.serverless.tensor_program import RowKeys, drop_rows
from dglx_dist.strategies.serverless.trainer import Engine
from tests.strategies.serverless.programs import (
    CONVOLUTIONS,
    MODELS,
    NUM_TRAIN,
    ON_GRAPHS,
    double_by_default,
    make_model,
    make_program,
    make_update,
)

PROGRAMS = {name: functools.partial(make_program, name) for name in (*MODELS, *CONVOLUTIONS)}
LR = 0.05


@dataclass(frozen=True, eq=False)
class Case:
    indptr: Array
    sources: Array
    x: Array = field(repr=False)
    labels: Array
    weights: Array
    """(E, 1) weights of edges."""

    @property
    def num_nodes(self) -> int:
        return len(self.labels)

    def graphs(self, starts: Sequence[int]) -> list[ServerGraph]:
        results = []
        for rank, (first, end) in enumerate(itertools.pairwise(starts)):
            edges = slice(int(self.indptr[first]), int(self.indptr[end]))
            indptr = self.indptr[first : end + 1] - self.indptr[first]
            results.append(local_graph(rank, starts, indptr, self.sources[edges], edges.start))
        return results

    def part(self, program: Program, graph: ServerGraph, boundary: Sequence[Array], intervals: int) -> Part:
        first, end = graph.starts[graph.rank], graph.starts[graph.rank + 1]
        edges = slice(int(self.indptr[first]), int(self.indptr[end]))
        graphs = self.graphs(graph.starts)
        bounds = [cut_intervals(part.indptr, part.sources, intervals) for part in graphs]
        return Part(
            graph=graph,
            boundary=boundary,
            bounds=bounds[graph.rank],
            interval_sizes=np.concatenate([np.diff(of_part) for of_part in bounds]),
            inputs={
                slot.name: self.weights[edges]
                if slot.per == "edge"
                else self.rows_of(slot.name)[np.concatenate([np.arange(first, end), graph.halo])]
                for slot in program.inputs
            },
            labels=self.labels[first:end],
        )

    def rows_of(self, name: str) -> Array:
        if name == "x":
            return self.x
        ends = np.repeat(np.arange(self.num_nodes), np.diff(self.indptr)), self.sources
        return np.bincount(ends[name == "out_degrees"], minlength=self.num_nodes)[:, None]

    def block(self, name: str) -> Any:
        """The whole graph as one block, or as a graph for models that take only those."""
        targets = np.repeat(np.arange(self.num_nodes), np.diff(self.indptr))
        if name in ON_GRAPHS:
            block = dgl.graph((self.sources, targets), num_nodes=self.num_nodes)
        else:
            block = dgl.create_block((self.sources, targets), self.num_nodes, self.num_nodes)
        block.edata["w"] = torch.from_numpy(self.weights)
        return block

    def parts(self, program: Program, starts: Sequence[int], intervals: int) -> list[Part]:
        graphs = self.graphs(starts)
        boundaries = boundaries_of(graphs)
        return [
            self.part(program, *graph_and_boundary, intervals)
            for graph_and_boundary in zip(graphs, boundaries, strict=True)
        ]


def boundaries_of(graphs: Sequence[ServerGraph]) -> list[list[Array]]:
    return [
        [graph.own_positions(peer.halo_ids(graph.rank), peer.rank) for peer in graphs] for graph in graphs
    ]


@functools.cache
def case(num_nodes: int = 40, num_edges: int = 160, seed: int = 0) -> Case:
    """Directed, with self loops and parallel edges; the last tenth of the nodes has no in-edge."""
    draw = np.random.default_rng(seed)
    sources = draw.integers(0, num_nodes, num_edges)
    targets = draw.integers(0, num_nodes - num_nodes // 10, num_edges)
    sources[:5] = targets[:5]
    order = np.lexsort((sources, targets))
    counts = np.bincount(targets, minlength=num_nodes)
    labels = draw.integers(-1, 3, num_nodes).astype(np.int32)
    labels[: num_nodes // 4] = -1  # whole intervals without training nodes
    return Case(
        indptr=np.concatenate([[0], np.cumsum(counts)]),
        sources=sources[order],
        x=draw.standard_normal((num_nodes, 5)),
        labels=labels,
        weights=draw.random((num_edges, 1)),
    )


def first_weights(program: Program) -> dict[str, Array]:
    draw = np.random.default_rng(1)
    return {name: draw.standard_normal(shape) * 0.5 for name, shape in program.weight_shapes.items()}


class PlainRun(NamedTuple):
    loss_sum: float
    correct: int
    gradients: dict[str, Array]


def plain_run(
    name: str, weights: Mapping[str, Array], graph: Case, epoch: int = 0, num_train: int = NUM_TRAIN
) -> PlainRun:
    """Call the model itself on the whole graph, with the masks of seed 0. DGL and torch differentiate it."""
    model, drops = make_model(name), itertools.count()

    def drop(rows: torch.Tensor, probability: float) -> torch.Tensor:
        return drop_rows(rows, probability, MODULES + next(drops), RowKeys(0, epoch, torch.arange(len(rows))))

    model.load_state_dict({key: torch.tensor(value) for key, value in weights.items()}, strict=False)
    model.zero_grad()
    with double_by_default(), InterceptedDropout(drop):
        scores = model([graph.block(name)] * (3 if name == "dropping" else 2), torch.tensor(graph.x))
    has_label, labels = graph.labels >= 0, torch.from_numpy(graph.labels).long()
    loss = cross_entropy(scores[has_label], labels[has_label], reduction="sum")
    (loss / num_train).backward()
    gradients = {
        key: parameter.grad.numpy().copy()
        for key, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    correct = int((scores.argmax(1) == labels)[has_label].sum())
    return PlainRun(loss.item(), correct, gradients)


@functools.cache
def plain_answer(name: str, epochs: int) -> tuple[dict[str, Array], list[tuple[float, int]]]:
    """Weights after ``epochs`` of SGD in one process, without tasks, intervals or servers; loss of each."""
    graph = case()
    weights, losses = first_weights(make_program(name)), []
    for epoch in range(epochs):
        answer = plain_run(name, weights, graph, epoch)
        losses.append((answer.loss_sum, answer.correct))
        weights = {key: value - LR * answer.gradients[key] for key, value in weights.items()}
    return weights, losses


def plan_of(
    program: Program, parts: Sequence[Part], num_servers: int = 1, staleness: int = 0
) -> ParameterPlan:
    servers = assign(parts[0].interval_sizes, num_servers)
    return ParameterPlan(program=program, server_of_interval=servers, staleness=staleness)


def parameter_server(program: Program, plan: ParameterPlan, index: int) -> ParameterServer:
    weights = first_weights(program)
    names = list(plan.shapes)
    update = make_update("SGD", names, lr=LR)
    return ParameterServer(plan, index, [weights[name] for name in names], update)


def servers(
    program: Program,
    starts: Sequence[int],
    intervals: int,
    *,
    num_parameter_servers: int = 1,
    graph: Case | None = None,
    **given: Any,
) -> tuple[list[GraphServer], list[ParameterServer]]:
    parts, options = (graph or case()).parts(program, starts, intervals), LambdaOptions(**given)
    plan = plan_of(program, parts, num_parameter_servers, options.staleness)
    parameters = [parameter_server(program, plan, index) for index in range(num_parameter_servers)]
    direct = DirectParameters(parameters)
    return [GraphServer(part, program, options, direct) for part in parts], parameters


class DirectParameters:
    """The parameter servers of this process, for steps that graph servers run themselves."""

    def __init__(self, servers: Sequence[ParameterServer]) -> None:
        self._servers = servers

    def weights(self, key: TaskKey) -> list[Array]:
        return self._server(key).weights(key.interval, key.epoch, key.step)

    def gradients(self, key: TaskKey, arrays: Sequence[Array]) -> bool:
        return self._server(key).gradients(key.interval, key.epoch, key.step, arrays)

    def _server(self, key: TaskKey) -> ParameterServer:
        return self._servers[int(self._servers[0].plan.server_of_interval[key.interval])]


def latest(parameters: ParameterServer) -> dict[str, Array]:
    return dict(zip(parameters.plan.shapes, parameters.latest(), strict=True))


STARTS = {1: [0, 40], 2: [0, 17, 40], 3: [0, 13, 24, 40], 4: [0, 9, 9, 24, 40]}
"""First nodes, by graph servers; the second of four has no nodes."""
INTERVALS = 3


def engine(session: Session, name: str, **options: Any) -> Engine:
    program, starts = PROGRAMS[name](), STARTS[session.topology.world_size]
    graph, names = case().graphs(starts)[session.topology.rank], list(program.weight_shapes)
    part = case().part(program, graph, exchange_boundaries(session, graph), INTERVALS)
    weights = [first_weights(program)[name] for name in names]
    update = make_update("SGD", names, lr=LR)
    read = read_lambda_options({"executor": "inline", "workers": 3} | options)
    return Engine(session, program, part, read, weights, update)
