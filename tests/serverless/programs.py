"""Small programs of three models, and a plain single-process way of running any program."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from dglx_dist.layers.dropout import MODULES, Columns, DropDraws, drop_entries
from dglx_dist.records import Array
from dglx_dist.serverless.json_fields import Json
from dglx_dist.serverless.parameter_server import ParameterServer
from dglx_dist.serverless.program import FIXED, Drop, Edge, Gather, Program, Scatter, Slot, Step, Vertex
from dglx_dist.serverless.tasks import Computed, Direction, Item, Role, Work

RELU: Json = {"name": "relu"}
ELU: Json = {"name": "elu", "alpha": 1.0}


def gcn(widths: tuple[int, ...] = (5, 4, 3), num_train: int = 6) -> Program:
    """GraphConv per pair of widths, relu between them."""
    steps: list[Step] = []
    for layer in range(1, len(widths)):
        wide, narrow, last = widths[layer - 1], widths[layer], layer == len(widths) - 1
        config: dict[str, Json] = {"in": wide, "out": narrow, "bias": True}
        steps += [
            Gather(name=f"GA{layer}", source=before(layer), output=Slot(f"a{layer}", wide), edges="fixed:0"),
            Vertex(
                name=f"AV{layer}",
                stage="dense",
                config=config if last else {**config, "activation": RELU},
                inputs=(f"a{layer}",),
                outputs=(Slot(f"h{layer}", narrow),),
                weights=(f"layers.{layer}.weight", f"layers.{layer}.bias"),
            ),
        ]
        steps += [] if last else [Scatter(name=f"SC{layer}", slots=(f"h{layer}",))]
    return Program(
        steps=tuple(steps), features=widths[0], classes=widths[-1], num_train=num_train, dtype="float64"
    )


def sage() -> Program:
    """Two SAGEConv of 5-4-3 columns, relu between them."""
    steps: list[Step] = []
    for layer, (wide, narrow) in enumerate([(5, 4), (4, 3)], start=1):
        names = ("fc_self.weight", "fc_neigh.weight", "fc_self.bias")
        activation: dict[str, Json] = {"activation": RELU} if layer == 1 else {}
        steps += [
            Gather(name=f"GA{layer}", source=before(layer), output=Slot(f"a{layer}", wide), edges="fixed:0"),
            Vertex(
                name=f"AV{layer}",
                stage="sage",
                config={"in": wide, "out": narrow, "bias": True, **activation},
                inputs=(f"a{layer}", before(layer)),
                outputs=(Slot(f"h{layer}", narrow),),
                weights=tuple(f"layers.{layer}.{name}" for name in names),
            ),
        ]
        steps += [Scatter(name="SC1", slots=("h1",))] if layer == 1 else []
    return Program(steps=tuple(steps), features=5, classes=3, num_train=6, dtype="float64")


def gat() -> Program:
    """GATConv(5, 2, 3 heads), elu, flat; GATConv(6, 3, 4 heads, residual), averaged."""
    first: Json = {"heads": 3, "width": 2, "bias": True, "merge": "flatten", "activation": ELU}
    second: Json = {"in": 6, "heads": 4, "width": 3, "residual": "linear", "residual_bias": True}
    stages: list[tuple[str, dict[str, Json]]] = [
        ("attention_project", {"in": 5, "heads": 3, "width": 2}),
        ("sequence", sequence(("attention_finish", first), ("attention_project", second))),
    ]
    own = ["fc.weight", "attn_l", "attn_r"]
    names = [
        tuple(f"layers.1.{name}" for name in own),
        ("layers.1.bias", *(f"layers.2.{name}" for name in [*own, "res_fc.weight", "res_fc.bias"])),
    ]
    steps: list[Step] = []
    for layer, heads, wide in ((1, 3, 6), (2, 4, 12)):
        outputs = [Slot(f"z{layer}", wide), Slot(f"el{layer}", heads), Slot(f"er{layer}", heads)]
        steps += [
            Vertex(
                name=f"AV{layer}",
                stage=stages[layer - 1][0],
                config=stages[layer - 1][1],
                inputs=("x",) if layer == 1 else ("s1",),
                outputs=(*outputs, Slot("r2", 12)) if layer == 2 else tuple(outputs),
                weights=names[layer - 1],
            ),
            Scatter(name=f"SC{layer}", slots=(f"z{layer}", f"el{layer}")),
            Edge(
                name=f"AE{layer}",
                stage="attention_edges",
                config={"heads": heads, "slope": 0.2},
                sources=f"el{layer}",
                targets=f"er{layer}",
                output=Slot(f"att{layer}", heads),
            ),
            Gather(
                name=f"GA{layer}", source=f"z{layer}", output=Slot(f"s{layer}", wide), edges=f"att{layer}"
            ),
        ]
    finish: dict[str, Json] = {"heads": 4, "width": 3, "bias": False, "merge": "mean", "residual": True}
    last = Vertex(
        name="AV3",
        stage="attention_finish",
        config=finish,
        inputs=("s2", "r2"),
        outputs=(Slot("h", 3),),
    )
    return Program(steps=(*steps, last), features=5, classes=3, num_train=6, dtype="float64")


def sequence(*stages: tuple[str, Json]) -> dict[str, Json]:
    return {"stages": [{"stage": name, "config": config} for name, config in stages]}


def dropping() -> Program:
    """GraphConv(5, 4), LayerNorm, relu; GATConv(4, 3, 2 heads), elu, flat; GraphConv(6, 3); all drop."""
    dense: dict[str, Json] = {"in": 5, "out": 4, "bias": True}
    norm: Json = {"width": 4, "eps": 1e-5, "scale": True, "bias": True, "activation": RELU}
    finish: dict[str, Json] = {"heads": 2, "width": 3, "bias": True, "merge": "flatten", "activation": ELU}
    steps: list[Step] = [
        Drop(name="DR1", source="x", output=Slot("d1", 5), probability=0.3, call=0),
        Gather(name="GA1", source="d1", output=Slot("a1", 5), edges="fixed:0"),
        Vertex(
            name="AV1",
            stage="sequence",
            config=sequence(("dense", dense), ("layer_norm", norm)),
            inputs=("a1",),
            outputs=(Slot("h1", 4),),
            weights=("1.weight", "1.bias", "norm.weight", "norm.bias"),
        ),
        Drop(name="DR2", source="h1", output=Slot("d2", 4), probability=0.5, call=1),
        Vertex(
            name="AV2",
            stage="attention_project",
            config={"in": 4, "heads": 2, "width": 3},
            inputs=("d2",),
            outputs=(Slot("z2", 6), Slot("el2", 2), Slot("er2", 2)),
            weights=("2.fc.weight", "2.attn_l", "2.attn_r"),
        ),
        Scatter(name="SC1", slots=("z2", "el2")),
        Edge(
            name="AE1",
            stage="attention_edges",
            config={"heads": 2, "slope": 0.2},
            sources="el2",
            targets="er2",
            output=Slot("att2", 2),
        ),
        Drop(name="DR3", source="att2", output=Slot("d3", 2), probability=0.4, call=2),
        Gather(name="GA2", source="z2", output=Slot("s2", 6), edges="d3"),
        Vertex(
            name="AV3",
            stage="attention_finish",
            config=finish,
            inputs=("s2",),
            outputs=(Slot("h3", 6),),
            weights=("2.bias",),
        ),
        Drop(name="DR4", source="h3", output=Slot("d4", 6), probability=0.5, call=3),
        Scatter(name="SC2", slots=("d4",)),
        Gather(name="GA3", source="d4", output=Slot("a4", 6), edges="fixed:0"),
        Vertex(
            name="AV4",
            stage="dense",
            config={"in": 6, "out": 3, "bias": True},
            inputs=("a4",),
            outputs=(Slot("h4", 3),),
            weights=("3.weight", "3.bias"),
        ),
    ]
    return Program(steps=tuple(steps), features=5, classes=3, num_train=6, dtype="float64")


def linear(dtype: str = "float64") -> Program:
    """Three Vertex steps: 3 to 2 columns with the weights w and b, none, 2 to 2 columns with the weight v."""
    stages: list[tuple[str, dict[str, Json], tuple[str, ...]]] = [
        ("dense", {"in": 3, "out": 2, "bias": True}, ("w", "b")),
        ("rows", {"width": 2, "bias": False}, ()),
        ("dense", {"in": 2, "out": 2, "bias": False}, ("v",)),
    ]
    steps = tuple(
        Vertex(
            name=f"AV{at}",
            stage=stage,
            config=config,
            inputs=(f"h{at - 1}" if at else "x",),
            outputs=(Slot(f"h{at}", 2),),
            weights=weights,
        )
        for at, (stage, config, weights) in enumerate(stages)
    )
    return Program(steps=steps, features=3, classes=2, num_train=6, dtype=dtype)


def before(layer: int) -> str:
    return "x" if layer == 1 else f"h{layer - 1}"


class PlainRun:
    """One epoch of a program in one process: every task by Work, every gather over plain edge lists.

    Args:
        program: What to run.
        weights: By the user's names.
        indptr: (N + 1,) of the in-edges.
        sources: (E,) of the in-edges.
        fixed: Edge values by name, (E, 1).
        labels: (N,) int32.
        bounds: (K + 1,) first node of each interval, and N.
        epoch: Keys the dropout masks; the seed is 0.
    """

    def __init__(
        self,
        program: Program,
        weights: Mapping[str, Array],
        *,
        x: Array,
        indptr: Array,
        sources: Array,
        fixed: Mapping[str, Array],
        labels: Array,
        bounds: list[int],
        epoch: int = 0,
    ) -> None:
        self.epoch = epoch
        self.program, self.weights, self.fixed = program, weights, fixed
        self.indptr, self.sources, self.labels, self.bounds = indptr, sources, labels, bounds
        self.targets = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
        self.rows: dict[str, Array] = {"x": x}
        self.row_gradients: dict[str, Array] = {}
        self.gradients = {name: np.zeros_like(weight) for name, weight in weights.items()}
        self.loss_sum, self.correct = 0.0, 0
        for step in range(program.last):
            self._forward(step)
        self._task(program.last, Direction.FUSED)
        for step in reversed(range(program.last)):
            self._backward(step)

    def _forward(self, index: int) -> None:
        step = self.program.steps[index]
        if isinstance(step, Gather):
            out = np.zeros((len(self.labels), step.output.width))
            np.add.at(out, self.targets, self._spread(step) * self.rows[step.source][self.sources])
            self.rows[step.output.name] = out
        elif isinstance(step, Drop):
            self.rows[step.output.name] = self._dropped(step, self.rows[step.source])
        elif not isinstance(step, Scatter):
            self._task(index, Direction.FORWARD)

    def _backward(self, index: int) -> None:
        step = self.program.steps[index]
        trained = self.program.trained
        if isinstance(step, Gather) and step.output.name in trained:
            slope = self.row_gradients[step.output.name][self.targets]
            if step.source in trained:
                self._add(step.source, self.sources, slope * self._spread(step))
            if step.edges is not None and not step.edges.startswith(FIXED):
                heads = self.rows[step.edges].shape[1]
                products = (slope * self.rows[step.source][self.sources]).reshape(len(slope), heads, -1)
                self.row_gradients[step.edges] = products.sum(-1)
        elif isinstance(step, Edge):
            logits = self._task(index, Direction.BACKWARD)
            self._add(step.sources, self.sources, logits)
            self._add(step.targets, self.targets, logits)
        elif isinstance(step, Drop) and step.source in trained:
            slope = self._dropped(step, self.row_gradients[step.output.name])
            self._add(step.source, np.arange(len(slope)), slope)
        elif isinstance(step, Vertex):
            self._task(index, Direction.BACKWARD)

    def _dropped(self, step: Drop, rows: Array) -> Array:
        draws = DropDraws(
            seed=0,
            number=self.epoch,
            nodes=torch.arange(len(rows)),
            runs=(Columns(first=0, last=rows.shape[1], width=rows.shape[1]),),
        )
        dropped: Array = drop_entries(
            torch.from_numpy(rows), step.probability, draws, MODULES + step.call
        ).numpy()
        return dropped

    def _spread(self, step: Gather) -> Array:
        """(E, width or 1): what each edge weighs, by column."""
        if step.edges is None:
            return np.ones((len(self.sources), 1))
        if step.edges.startswith(FIXED):
            return self.fixed[step.edges]
        values = self.rows[step.edges]
        return np.repeat(values, step.output.width // values.shape[1], axis=1)

    def _add(self, slot: str, where: Array, rows: Array) -> None:
        total = self.row_gradients.setdefault(slot, np.zeros_like(self.rows[slot]))
        np.add.at(total, where, rows)

    def _task(self, index: int, direction: Direction) -> Array:
        """Run one step of every interval; return the last array given for all nodes or edges."""
        work = Work(self.program, index, direction, True)
        found = [self._interval(work, *ends) for ends in itertools.pairwise(self.bounds)]
        joined = [np.concatenate(parts) for parts in zip(*(one.rows for one in found), strict=True)]
        for item, array in zip(work.given, joined, strict=True):
            if item.role is Role.OUTPUT:
                self.rows[item.slot] = array
            elif item.role is Role.GRADIENT and isinstance(self.program.steps[index], Vertex):
                self._add(item.slot, np.arange(len(array)), array)
        for one in found:
            if direction is Direction.FUSED:
                self.loss_sum += float(one.rows[-1][0])
                self.correct += int(one.rows[-1][1])
            for name, slope in zip(work.weights if work.pushes else (), one.gradients, strict=True):
                self.gradients[name] = self.gradients[name] + slope
        return joined[-1] if joined else np.zeros(0)

    def _interval(self, work: Work, first: int, end: int) -> Computed:
        arrays = [self._pulled(item, first, end) for item in work.pulled]
        return work.whole([self.weights[name] for name in work.weights], arrays, end - first)

    def _pulled(self, item: Item, first: int, end: int) -> Array:
        edges = slice(int(self.indptr[first]), int(self.indptr[end]))
        is_edge = item.per.value == "edge"
        if item.role is Role.LABELS:
            return self.labels[first:end]
        if item.role is Role.INDPTR:
            return self.indptr[first : end + 1] - self.indptr[first]
        if item.role is Role.SOURCES:
            return self.rows[item.slot][self.sources[edges]]
        store = self.row_gradients if item.role is Role.GRADIENT else self.rows
        return store[item.slot][edges if is_edge else slice(first, end)]


def exchange(servers: Sequence[ParameterServer]) -> int | None:
    """Exchange sums between the servers of one process and update once; None while gradients are missing."""
    ready = [server.own_sums() for server in servers]
    found = [one for one in ready if one is not None]
    if len(found) < len(servers):
        return None
    for server in servers:
        for other, (epoch, vector) in zip(servers, found, strict=True):
            if other is not server:
                server.receive_sums(other.index, epoch, vector)
    updates = [server.advance() for server in servers]
    return updates[0]
