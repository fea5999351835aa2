"""Graph servers, parameter servers and the plain answer for one small graph, in one process."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import cross_entropy, leaky_relu

from dglx_dist.comm.session import Session
from dglx_dist.layers.dropout import MODULES, ColumnRange, DropDraws, drop_entries
from dglx_dist.records import Array
from dglx_dist.strategies.serverless.parameter_server import ParameterPlan, ParameterServer, Update, assign
from dglx_dist.strategies.serverless.program import Drop, Edge, Gather, Program, Vertex
from dglx_dist.strategies.serverless.stages.base import vertex_stage
from dglx_dist.strategies.serverless.graph_partition import (
    Part,
    ServerGraph,
    cut_intervals,
    exchange_boundaries,
    local_graph,
)
from dglx_dist.strategies.serverless.graph_server import GraphServer
from dglx_dist.strategies.serverless.options import LambdaOptions, read_lambda_options
from dglx_dist.strategies.serverless.trainer import Engine
from tests.serverless.programs import TorchStage, dropping, gat, gcn, sage

PROGRAMS = {"gcn": gcn, "sage": sage, "gat": gat, "dropping": dropping}
LR = 0.05


@dataclass(frozen=True, eq=False)
class Case:
    indptr: Array
    sources: Array
    x: Array = field(repr=False)
    labels: Array
    fixed: Mapping[str, Array]
    """Weights of edges by name, (E, 1)."""

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

    def part(self, graph: ServerGraph, boundary: Sequence[Array], intervals: int) -> Part:
        first, end = graph.starts[graph.rank], graph.starts[graph.rank + 1]
        edges = slice(int(self.indptr[first]), int(self.indptr[end]))
        graphs = self.graphs(graph.starts)
        bounds = [cut_intervals(part.indptr, part.sources, intervals) for part in graphs]
        return Part(
            graph=graph,
            boundary=boundary,
            bounds=bounds[graph.rank],
            interval_sizes=np.concatenate([np.diff(of_part) for of_part in bounds]),
            features=np.concatenate([self.x[first:end], self.x[graph.halo]]),
            labels=self.labels[first:end],
            fixed={name: values[edges] for name, values in self.fixed.items()},
        )

    def parts(self, starts: Sequence[int], intervals: int) -> list[Part]:
        graphs = self.graphs(starts)
        boundaries = boundaries_of(graphs)
        return [
            self.part(*graph_and_boundary, intervals)
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
        fixed={"fixed:0": draw.random((num_edges, 1))},
    )


def first_weights(program: Program) -> dict[str, Array]:
    draw = np.random.default_rng(1)
    return {name: draw.standard_normal(shape) * 0.5 for name, shape in program.weight_shapes.items()}


class PlainRun(NamedTuple):
    loss_sum: float
    correct: int
    gradients: dict[str, Array]


def plain_run(program: Program, weights: Mapping[str, Array], graph: Case, epoch: int = 0) -> PlainRun:
    """Run the steps over plain edge lists; torch differentiates all but stages. Masks are those of seed 0."""
    leaves = {name: torch.tensor(value, requires_grad=True) for name, value in weights.items()}
    degrees, sources = torch.from_numpy(np.diff(graph.indptr)), torch.from_numpy(graph.sources).long()
    targets = torch.arange(graph.num_nodes).repeat_interleave(degrees)
    rows = {name: torch.tensor(value) for name, value in {"x": graph.x, **graph.fixed}.items()}
    for step in program.steps:
        if isinstance(step, Gather):
            values = torch.ones(len(sources), 1) if step.edges is None else rows[step.edges]
            spread = values.repeat_interleave(step.output.width // values.shape[1], 1)
            sums = torch.zeros(graph.num_nodes, step.output.width, dtype=torch.float64)
            rows[step.output.name] = sums.index_add(0, targets, spread * rows[step.source][sources])
        elif isinstance(step, Edge):
            slope: Any = step.config["slope"]
            logits = leaky_relu(rows[step.sources][sources] + rows[step.targets][targets], slope)
            by_target = logits.split(degrees.tolist())
            rows[step.output.name] = torch.cat([logit.softmax(0) for logit in by_target])
        elif isinstance(step, Drop):
            source, width = rows[step.source], step.output.width
            columns = ColumnRange(first=0, last=width, width=width)
            draws = DropDraws(seed=0, number=epoch, nodes=torch.arange(len(source)), runs=(columns,))
            rows[step.output.name] = drop_entries(source, step.probability, draws, MODULES + step.call)
        elif isinstance(step, Vertex):
            arguments = [*(leaves[name] for name in step.weights), *(rows[name] for name in step.inputs)]
            stage = vertex_stage(step.stage, step.config)
            made: Any = TorchStage.apply(stage, len(step.weights), *arguments)  # type: ignore[no-untyped-call]
            rows |= {slot.name: output for slot, output in zip(step.outputs, made, strict=True)}
    labels = torch.from_numpy(graph.labels).long()
    scores, labels = rows[program.steps[-1].outputs[0].name][labels >= 0], labels[labels >= 0]
    loss = cross_entropy(scores, labels, reduction="sum")
    (loss / program.num_train).backward()
    gradients = {name: leaf.grad.numpy() for name, leaf in leaves.items()}
    return PlainRun(loss.item(), int((scores.argmax(1) == labels).sum()), gradients)


@functools.cache
def plain_answer(name: str, epochs: int) -> tuple[dict[str, Array], list[tuple[float, int]]]:
    """Weights after ``epochs`` of SGD in one process, without tasks, intervals or servers; loss of each."""
    program, graph = PROGRAMS[name](), case()
    weights, losses = first_weights(program), []
    for epoch in range(epochs):
        answer = plain_run(program, weights, graph, epoch)
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
    update = Update("SGD", [{"lr": LR, "params": names}], names)
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
    parts, options = (graph or case()).parts(starts, intervals), LambdaOptions(**given)
    plan = plan_of(program, parts, num_parameter_servers, options.staleness)
    return (
        [GraphServer(part, program, options) for part in parts],
        [parameter_server(program, plan, index) for index in range(num_parameter_servers)],
    )


def latest(parameters: ParameterServer) -> dict[str, Array]:
    return dict(zip(parameters.plan.shapes, parameters.latest(), strict=True))


STARTS = {1: [0, 40], 2: [0, 17, 40], 3: [0, 13, 24, 40], 4: [0, 9, 9, 24, 40]}
"""First nodes, by graph servers; the second of four has no nodes."""
INTERVALS = 3


def engine(session: Session, name: str, **options: Any) -> Engine:
    program, starts = PROGRAMS[name](), STARTS[session.topology.world_size]
    graph, names = case().graphs(starts)[session.topology.rank], list(program.weight_shapes)
    part = case().part(graph, exchange_boundaries(session, graph), INTERVALS)
    weights = [first_weights(program)[name] for name in names]
    update = Update("SGD", [{"lr": LR, "params": names}], names)
    read = read_lambda_options({"executor": "inline", "workers": 3} | options)
    return Engine(session, program, part, read, weights, update)
