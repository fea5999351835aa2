"""Graph server of strategy ``lambda``, which has the rows of its part and executes the tasks of intervals.

See section 4 of Dorylus. The scheduler decides the order of tasks and carries messages. The arrays of the
kernels, for n own nodes, m halo nodes, E edges into own nodes and K heads, are:

- ``indptr`` (n + 1,) int64 and ``sources`` (E,) int32 local ids in [0, n + m), in-edges in CSC order. Those
of
  node v are from ``indptr[v]`` to ``indptr[v + 1]``.
- ``out_indptr`` (n + m + 1,) int64, ``out_targets`` (E,) int32 and ``out_edges`` (E,) positions in CSC order,
  the same edges by source. Those of local id u are from ``out_indptr[u]`` to ``out_indptr[u + 1]``.
- ``rows`` (n + m, w) of sources.
- ``values`` (E, K) of edges in CSC order, where K divides w, or None if all are 1.
- ``first`` is the first node of ``out``, and ``nodes`` (k,) int32 are local ids.

Every sum is in the order of the edges, so equal rows give equal bits. Kernels release the interpreter lock.
There is one compiled version for values and one for None.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple, TypeAlias, final

import numpy as np
import torch
from numba import njit

from dglx_dist.errors import ConfigError
from dglx_dist.graph.row_kernels import read_ahead
from dglx_dist.layers.dropout import MODULES, ColumnRange, draw_kept_entries
from dglx_dist.records import Array
from dglx_dist.serverless.program import (
    FEATURES,
    Drop,
    Edge,
    Gather,
    Program,
    ProgramStep,
    Scatter,
    Vertex,
    drops_features,
    inputs_of,
    outputs_of,
)
from dglx_dist.serverless.stages.base import loss_in_halves
from dglx_dist.serverless.tasks import (
    TASK_OVER,
    Direction,
    Item,
    Per,
    Role,
    TaskComputation,
    TaskKey,
    check_payload,
    half_length,
    take_half,
)
from dglx_dist.strategies.serverless.graph_partition import Part
from dglx_dist.strategies.serverless.options import LambdaOptions

_AHEAD = 8
"""Rows are prefetched this many edges ahead, because sources are scattered in memory."""


@njit(cache=True, nogil=True)
def gather(indptr: Array, sources: Array, values: Array | None, rows: Array, first: int, out: Array) -> None:
    """Write to ``out[i]``, (nodes, w), the sum of the source rows of node ``first + i``, times the values."""
    heads = 1 if values is None else values.shape[1]
    width = rows.shape[1] // heads
    last_edge = indptr[first + out.shape[0]]
    for i in range(out.shape[0]):
        out[i, :] = 0
        for edge in range(indptr[first + i], indptr[first + i + 1]):
            if edge + _AHEAD < last_edge:
                read_ahead(rows, sources[edge + _AHEAD])
            for head in range(heads):
                # Slices, because indices that might be negative keep the loop from becoming vector code.
                total = out[i, head * width : (head + 1) * width]
                row = rows[sources[edge], head * width : (head + 1) * width]
                if values is None:
                    for column in range(width):
                        total[column] += row[column]
                else:
                    value = values[edge, head]
                    for column in range(width):
                        total[column] += value * row[column]


@njit(cache=True, nogil=True)
def pull_back(
    out_indptr: Array,
    places: Array,
    out_edges: Array,
    values: Array | None,
    gradients: Array,
    nodes: Array,
    out: Array,
) -> None:
    """Add to ``out[i]``, (k, w), the gradients at the ``places`` of the out-edges of ``nodes[i]``.

    This is Gather transposed. For the gradients of nodes ``places`` are ``out_targets``, and each gradient is
    multiplied by the value of its edge. For gradients of edges they are ``out_edges``.
    """
    heads = 1 if values is None else values.shape[1]
    width = gradients.shape[1] // heads
    for i in range(len(nodes)):
        for at in range(out_indptr[nodes[i]], out_indptr[nodes[i] + 1]):
            for head in range(heads):
                total = out[i, head * width : (head + 1) * width]
                row = gradients[places[at], head * width : (head + 1) * width]
                if values is None:
                    for column in range(width):
                        total[column] += row[column]
                else:
                    value = values[out_edges[at], head]
                    for column in range(width):
                        total[column] += value * row[column]


@njit(cache=True, nogil=True)
def edge_products(
    indptr: Array, sources: Array, gradients: Array, rows: Array, first: int, out: Array
) -> None:
    """Write to ``out``, (edges, K), the product of the target's gradient and the source's row, by head.

    ``gradients`` is (nodes, w), and ``out`` has the in-edges of these nodes.
    """
    width = rows.shape[1] // out.shape[1]
    begin = indptr[first]
    for i in range(gradients.shape[0]):
        for edge in range(indptr[first + i], indptr[first + i + 1]):
            source = sources[edge]
            for head in range(out.shape[1]):
                total = out.dtype.type(0)
                for column in range(head * width, (head + 1) * width):
                    total += gradients[i, column] * rows[source, column]
                out[edge - begin, head] = total


@njit(cache=True, nogil=True)
def segment_sums(indptr: Array, values: Array, first: int, out: Array) -> None:
    """Write to ``out[i]``, (nodes, K), the sum over the in-edges of node ``first + i``.

    ``values`` (edges, K) has only the in-edges of these nodes.
    """
    begin = indptr[first]
    for i in range(out.shape[0]):
        out[i, :] = 0
        for edge in range(indptr[first + i], indptr[first + i + 1]):
            for column in range(values.shape[1]):
                out[i, column] += values[edge - begin, column]


class TaskKind(Enum):
    """Type of a task. Graph servers execute all but WORK."""

    GATHER = "gather"
    """Sum source rows over in-edges."""
    DROP = "drop"
    """Drop entries of rows or of edge values."""
    SCATTER = "scatter"
    """Send boundary rows to halo nodes."""
    WORK = "work"
    """Apply a stage forward, backward or fused."""
    LOSS = "loss"
    """Compute the loss where the last step is not fused."""
    PUBLISH = "publish"
    """Publish the gradient of a gathered sum to its sources, and compute those of its edges."""
    SEND_BACK = "send_back"
    """Send the gradients of halo nodes to their owners."""
    DROP_GRADIENT = "drop_gradient"
    """Drop the same entries of the gradient."""
    COLLECT = "collect"
    """Add gradients from out-edges to those of own rows."""


class Barrier(Enum):
    """Condition that a task of a synchronous epoch waits for."""

    NONE = "none"
    LOCAL = "local"
    """All intervals of this graph server have reached the task."""
    GLOBAL = "global"
    """All intervals of all graph servers have."""


@final
@dataclass(frozen=True)
class ScheduledTask:
    """One step of an interval's epoch."""

    kind: TaskKind
    step: int
    """Index in the program."""
    direction: Direction = Direction.FORWARD
    barrier: Barrier = Barrier.NONE


_FORWARD = {Gather: TaskKind.GATHER, Scatter: TaskKind.SCATTER, Drop: TaskKind.DROP}
_BACKWARD = {
    Gather: [TaskKind.PUBLISH],
    Scatter: [TaskKind.SEND_BACK, TaskKind.COLLECT],
    Drop: [TaskKind.DROP_GRADIENT],
}
"""Tasks of a step. Workers execute those of other steps."""
_BARRIERS = {TaskKind.SEND_BACK: Barrier.LOCAL, TaskKind.COLLECT: Barrier.GLOBAL}


def epoch_schedule(program: Program, fused: bool) -> tuple[ScheduledTask, ...]:
    """Return the tasks of an epoch in order.

    Args:
        fused: Whether one task does the last step forward and backward.
    """
    steps, last = program.steps, program.last
    tasks = [
        ScheduledTask(_FORWARD.get(type(step), TaskKind.WORK), index, barrier=_barrier_before(program, index))
        for index, step in enumerate(steps)
    ]
    if fused:
        tasks[last] = replace(tasks[last], direction=Direction.FUSED)
    else:
        both = (TaskKind.LOSS, TaskKind.WORK)
        tasks += [ScheduledTask(kind, last, Direction.BACKWARD) for kind in both]
    for index in reversed(range(last)):
        if _has_gradient(program, steps[index]):
            tasks += [
                ScheduledTask(kind, index, Direction.BACKWARD, _BARRIERS.get(kind, Barrier.NONE))
                for kind in _BACKWARD.get(type(steps[index]), [TaskKind.WORK])
            ]
    return tuple(tasks)


def _barrier_before(program: Program, index: int) -> Barrier:
    before = program.steps[index - 1] if index else None
    # Halo rows may be read only after a Scatter, or once every interval has dropped its share of features.
    if isinstance(before, Scatter):
        return Barrier.GLOBAL
    return Barrier.LOCAL if before is not None and drops_features(before) else Barrier.NONE


def _has_gradient(program: Program, step: ProgramStep) -> bool:
    # Whether a trained weight gets a gradient from the backward step.
    if isinstance(step, Vertex) and step.weights:
        return True
    if isinstance(step, Vertex | Scatter):
        return not program.trained_slots.isdisjoint(inputs_of(step))
    return step.output.name in program.trained_slots


class SubmitResult(Enum):
    """Outcome of submitting one half of a task, which is accepted or dropped."""

    TAKEN = "taken"
    LAST = "last"
    AGAIN = "this half was submitted before"
    LATE = "the task is complete"


class _OpenTask(NamedTuple):
    rows: int
    halves: tuple[list[Array], list[Array]]
    submitted: dict[int, Sequence[Array]]


HaloMessage: TypeAlias = tuple[int, list[Array]]
"""A peer, and (r,) int32 positions in the list of halo nodes, which both sides have in the same order, and
(r, width) rows of each slot."""


@final
class GraphServer:
    """Executes the tasks of intervals, in order within an interval and concurrently across intervals.

    No method blocks.

    Args:
        run: Number of the run in its session, a part of task keys. Workers of other runs are rejected.
        seed: Seed of dropout.
    """

    def __init__(
        self, part: Part, program: Program, options: LambdaOptions, *, run: int = 0, seed: int = 0
    ) -> None:
        self.part, self.program, self.options, self.run, self._seed = part, program, options, run, seed
        self.schedule = epoch_schedule(program, options.fusion)
        """The tasks of each epoch."""
        self._rows = {**part.fixed, FEATURES: part.features}
        """The latest rows. A slot of nodes has (n, width), or (n + m, width) with halo rows. A slot of
        edges or fixed values has (E, width). Only its interval writes an own row."""
        # There is no lock, because in synchronous epochs barriers separate readers and writers. In
        # asynchronous ones a row may be read while it is written. Then its columns are of two epochs, both
        # within the bound.
        self._published: dict[tuple[str, int], Array] = {}
        """(slot, step) -> gradient that sources in the slot read, (n, width) of the sums of a Gather, or
        (E, width) of the logits of an Edge step."""
        self._received: dict[tuple[str, int], Array] = {}
        """(slot, peer) -> (b, width), the last gradient of boundary rows from the peer."""
        self._allocate()
        each = range(part.num_intervals)
        # By interval: gradients by slot, what stages saved by step, rows of sources by Edge step.
        self._gradients: list[dict[str, Array]] = [{} for _ in each]
        self._saved: list[dict[int, list[Array]]] = [{} for _ in each]
        self._sources: list[dict[int, Array]] = [{} for _ in each]
        self._statistics: dict[int, dict[int, Array]] = {}
        self._lock = threading.Lock()
        self.works = {
            (task.step, task.direction): TaskComputation(
                program, task.step, task.direction, options.rematerialise
            )
            for task in self.schedule
            if task.kind is TaskKind.WORK
        }
        """Worker tasks by step and direction."""
        self._order = {kind: at for at, kind in enumerate(self.works)}
        self._open: dict[TaskKey, _OpenTask] = {}
        self._completed: dict[int, tuple[int, int]] = {}
        """Interval -> epoch and order of the last worker task that is done."""

    def _allocate(self) -> None:
        graph, program = self.part.graph, self.program
        scattered = {name for step in program.steps if isinstance(step, Scatter) for name in step.slots}
        for index, step in enumerate(program.steps):
            source = (
                step.source if isinstance(step, Gather) else step.sources if isinstance(step, Edge) else ""
            )
            for slot in outputs_of(step):
                length = len(graph.sources) if slot.name in program.edge_slots else graph.num_own
                has_halo = slot.name in scattered or drops_features(step)
                self._rows[slot.name] = self._zeros(graph.num_local if has_halo else length, slot.name)
                if {source, slot.name} <= program.trained_slots:
                    self._published[source, index] = self._zeros(length, slot.name)
        for name in scattered & program.trained_slots:
            for peer, nodes in enumerate(self.part.boundary):
                self._received[name, peer] = self._zeros(len(nodes), name)

    def _zeros(self, length: int, slot: str) -> Array:
        return np.zeros((length, self.program.slots[slot].width), dtype=self.program.dtype)

    @property
    def rank(self) -> int:
        return self.part.graph.rank

    def key_of(self, interval: int, epoch: int, task: ScheduledTask) -> TaskKey:
        return TaskKey(epoch, task.step, self.part.first_interval + interval, task.direction, self.run)

    def rows_of(self, interval: int) -> int:
        nodes = self.part.nodes_of(interval)
        return nodes.stop - nodes.start

    def compute(self, interval: int, epoch: int, task: ScheduledTask) -> None:
        """Execute a task that involves neither workers nor other graph servers."""
        match task.kind, self.program.steps[task.step]:
            case TaskKind.GATHER, Gather() as step:
                nodes, graph = self.part.nodes_of(interval), self.part.graph
                values = None if step.edges is None else self._rows[step.edges]
                # Not in place, because other intervals may read the rows meanwhile.
                sums = self._zeros(nodes.stop - nodes.start, step.output.name)
                gather(graph.indptr, graph.sources, values, self._rows[step.source], nodes.start, sums)
                self._rows[step.output.name][nodes] = sums
            case TaskKind.PUBLISH, Gather() as step:
                self._publish(interval, task.step, step)
            case TaskKind.DROP, Drop() as step:
                self._drop(interval, epoch, step)
            case TaskKind.DROP_GRADIENT, Drop() as step:
                where, ids = self._rows_of_slot(interval, step.source)
                gradient = self._take_gradient(interval, step.output.name, where)
                self._add_gradient(interval, step.source, self._apply_dropout(step, epoch, ids, gradient))
            case TaskKind.COLLECT, Scatter() as step:
                self._collect(interval, step)
            case TaskKind.LOSS, Vertex() as step:
                self._loss(interval, epoch, step)
            case _:
                raise AssertionError(f"{task} is not computed here")

    def open(self, interval: int, epoch: int, task: ScheduledTask) -> None:
        work = self.works[task.step, task.direction]
        step = self.program.steps[task.step]
        if isinstance(step, Edge) and task.direction is Direction.FORWARD:
            # Kept for backward, whose gradient must match the forward pass. Halo rows may change before it.
            sources = self.part.graph.sources[self.part.edges_of(interval)]
            self._sources[interval][task.step] = self._rows[step.sources].take(sources, axis=0)
        saved = iter(self._saved[interval].pop(task.step, []))
        arrays = [
            next(saved) if item.role is Role.SAVED else self._get_input(interval, task.step, item)
            for item in work.pulled
        ]
        rows = self.rows_of(interval)
        halves = take_half(work.pulled, arrays, rows, 0), take_half(work.pulled, arrays, rows, 1)
        with self._lock:
            self._open[self.key_of(interval, epoch, task)] = _OpenTask(rows, halves, {})

    @property
    def open_tasks(self) -> list[TaskKey]:
        """Tasks that workers have not completed."""
        with self._lock:
            return sorted(self._open)

    def pull(self, key: TaskKey, half: int) -> list[Array]:
        """Return the arrays of half 0 or 1 of a task, TASK_OVER if it is done, or [] before it is open."""
        self._work_of(key)
        with self._lock:
            if (task := self._open.get(key)) is not None:
                return task.halves[half]
            return [TASK_OVER] if self._is_complete(key) else []

    def submit(self, key: TaskKey, half: int, arrays: Sequence[Array]) -> SubmitResult:
        """Accept a worker's results for half 0 or 1 of a task."""
        work = self._work_of(key)
        with self._lock:
            task = self._open.get(key)
            if task is None and not self._is_complete(key):
                raise ConfigError(f"rows of task {key} came before it began")
            if task is None or half in task.submitted:
                return SubmitResult.LATE if task is None else SubmitResult.AGAIN
            rows, edges = half_length(task.rows, half), len(task.halves[half][0])
            check_payload(work.given, arrays, rows, f"what came of {key}", num_edges=edges)
            task.submitted[half] = arrays
            if len(task.submitted) < 2:
                return SubmitResult.TAKEN
            del self._open[key]
            self._completed[key.interval] = key.epoch, self._order[key.step, key.direction]
        interval, step = key.interval - self.part.first_interval, self.program.steps[key.step]
        for item, *halves in zip(work.given, task.submitted[0], task.submitted[1], strict=True):
            if isinstance(step, Edge) and item.role is Role.GRADIENT:
                self._take_edge_gradients(interval, key.step, step, halves)
            else:
                self._take(interval, key, item, halves)
        return SubmitResult.LAST

    def _work_of(self, key: TaskKey) -> TaskComputation:
        key.check_run(self.run)
        first, end = self.part.first_interval, self.part.first_interval + self.part.num_intervals
        if not first <= key.interval < end:
            raise ConfigError(
                f"task {key} is of no interval from {first} to {end - 1}, those of this graph server"
            )
        work = self.works.get((key.step, key.direction))
        if work is None:
            raise ConfigError(f"task {key}: no worker does step {key.step} in this direction here")
        return work

    def _is_complete(self, key: TaskKey) -> bool:
        last = self._completed.get(key.interval)
        return last is not None and (key.epoch, self._order[key.step, key.direction]) <= last

    def halo_messages(self, interval: int, task: ScheduledTask) -> list[HaloMessage]:
        """Return the messages of a SCATTER or SEND_BACK task, one per graph server that needs rows."""
        step = self.program.steps[task.step]
        assert isinstance(step, Scatter)
        if task.kind is TaskKind.SEND_BACK:
            return list(self._halo_gradients(interval, step))
        messages = []
        for peer, selected, nodes in self._boundary(interval):
            rows = [self._rows[name][nodes] for name in step.slots]
            messages.append((peer, [np.arange(selected.start, selected.stop, dtype=np.int32), *rows]))
        return messages

    def receive(self, peer: int, kind: TaskKind, index: int, arrays: Sequence[Array]) -> None:
        """Accept the positions and rows of a message.

        Raises:
            ConfigError: a Scatter does not send such arrays.
        """
        step = self.program.steps[index] if 0 <= index < len(self.program.steps) else None
        if not isinstance(step, Scatter) or not 0 <= peer < self.part.graph.num_servers:
            raise ConfigError(
                f"rows came from graph server {peer} for step {index}, but there is no such Scatter"
            )
        graph, is_gradient = self.part.graph, kind is TaskKind.SEND_BACK
        slots = self._trained_slots(step) if is_gradient else step.slots
        first = 0 if is_gradient else graph.num_own + int(graph.halo_starts[peer])
        size = len(self.part.boundary[peer]) if is_gradient else len(graph.halo_ids(peer))
        positions = arrays[0] if arrays else np.empty(0)
        shapes = [(positions.size, self.program.slots[name].width) for name in slots]
        expected = [((positions.size,), "int32"), *((shape, self.program.dtype) for shape in shapes)]
        actual = [(array.shape, array.dtype.name) for array in arrays]
        if actual != expected or (positions.size and not 0 <= positions.min() <= positions.max() < size):
            raise ConfigError(
                f"graph server {peer} sent {actual} for step {step.name!r}, not {expected} with positions "
                f"below {size}; run the same version everywhere"
            )
        for name, rows in zip(slots, arrays[1:], strict=True):
            stored = self._received[name, peer] if is_gradient else self._rows[name]
            stored[first + positions] = rows

    def statistics(self, epoch: int) -> tuple[float, int]:
        """Return and remove the sum of losses and the number of correct own nodes of ``epoch``."""
        with self._lock:
            by_interval = self._statistics.pop(epoch, {})
        total = sum((by_interval[interval] for interval in sorted(by_interval)), np.zeros(2))
        return float(total[0]), int(total[1])

    def correct(self, epoch: int) -> int:
        """Return the number of correct own nodes of ``epoch`` so far."""
        with self._lock:
            return int(sum(statistics[1] for statistics in self._statistics.get(epoch, {}).values()))

    def _get_input(self, interval: int, index: int, item: Item) -> Array:
        nodes, edges = self.part.nodes_of(interval), self.part.edges_of(interval)
        if item.role is Role.LABELS:
            return self.part.labels[nodes]
        if item.role is Role.INDPTR:
            bounds = self.part.graph.indptr[nodes.start : nodes.stop + 1]
            return bounds - bounds[0]
        if item.role is Role.SOURCES:
            return self._sources[interval][index]
        where = edges if item.per is Per.EDGE else nodes
        if item.role is Role.GRADIENT:
            return self._take_gradient(interval, item.slot, where)
        return self._rows[item.slot][where]

    def _take_gradient(self, interval: int, slot: str, where: slice) -> Array:
        gradient = self._gradients[interval].pop(slot, None)
        if gradient is not None:
            return gradient
        # No later step reads the slot.
        return self._zeros(where.stop - where.start, slot)

    def _add_gradient(self, interval: int, slot: str, *parts: Array) -> None:
        gradients = self._gradients[interval]
        gradient = np.concatenate(parts)
        if slot in gradients:
            gradients[slot] += gradient
        else:
            gradients[slot] = gradient

    def _take(self, interval: int, key: TaskKey, item: Item, halves: Sequence[Array]) -> None:
        if item.role is Role.OUTPUT:
            of_edges = item.per is Per.EDGE
            where = self.part.edges_of(interval) if of_edges else self.part.nodes_of(interval)
            np.concatenate(halves, out=self._rows[item.slot][where])
        elif item.role is Role.GRADIENT:
            self._add_gradient(interval, item.slot, *halves)
        elif item.role is Role.SAVED:
            saved = self._saved[interval].setdefault(key.step, [])
            saved.append(np.concatenate(halves))
        else:
            self._note(interval, key.epoch, halves[0] + halves[1])

    def _take_edge_gradients(self, interval: int, index: int, step: Edge, halves: Sequence[Array]) -> None:
        del self._sources[interval][index]
        gradients = np.concatenate(halves)
        if step.sources in self.program.trained_slots:
            self._published[step.sources, index][self.part.edges_of(interval)] = gradients
        if step.targets in self.program.trained_slots:
            nodes = self.part.nodes_of(interval)
            sums = self._zeros(nodes.stop - nodes.start, step.output.name)
            segment_sums(self.part.graph.indptr, gradients, nodes.start, sums)
            self._add_gradient(interval, step.targets, sums)

    def _publish(self, interval: int, index: int, step: Gather) -> None:
        nodes = self.part.nodes_of(interval)
        gradients = self._take_gradient(interval, step.output.name, nodes)
        if step.source in self.program.trained_slots:
            self._published[step.source, index][nodes] = gradients
        if step.edges is not None and step.edges in self.program.trained_slots:
            edges, graph = self.part.edges_of(interval), self.part.graph
            products = self._zeros(edges.stop - edges.start, step.edges)
            rows = self._rows[step.source]
            edge_products(graph.indptr, graph.sources, gradients, rows, nodes.start, products)
            self._add_gradient(interval, step.edges, products)

    def _drop(self, interval: int, epoch: int, step: Drop) -> None:
        graph = self.part.graph
        source, output = self._rows[step.source], self._rows[step.output.name]
        where, ids = self._rows_of_slot(interval, step.source)
        output[where] = self._apply_dropout(step, epoch, ids, source[where])
        if drops_features(step):
            count, number = self.part.num_intervals, graph.num_halo
            share = slice(number * interval // count, number * (interval + 1) // count)
            halo = slice(graph.num_own + share.start, graph.num_own + share.stop)
            output[halo] = self._apply_dropout(step, epoch, graph.halo[share], source[halo])

    def _rows_of_slot(self, interval: int, slot: str) -> tuple[slice, Array]:
        of_edges, graph = slot in self.program.edge_slots, self.part.graph
        where = self.part.edges_of(interval) if of_edges else self.part.nodes_of(interval)
        first = graph.first_edge if of_edges else int(graph.starts[graph.rank])
        return where, np.arange(first + where.start, first + where.stop)

    def _apply_dropout(self, step: Drop, epoch: int, ids: Array, rows: Array) -> Array:
        columns = ColumnRange(first=0, last=rows.shape[1], width=rows.shape[1])
        stream, p = MODULES + step.call, step.probability
        kept = draw_kept_entries(self._seed, epoch, stream, torch.from_numpy(ids), (columns,), p).numpy()
        return kept.astype(rows.dtype) * (1 / (1 - p) if p < 1 else 0.0) * rows

    def _collect(self, interval: int, step: Scatter) -> None:
        nodes = self.part.nodes_of(interval)
        own = np.arange(nodes.start, nodes.stop, dtype=np.int32)
        for name in self._trained_slots(step):
            gradient = self._take_gradient(interval, name, nodes)
            self._pull_back(name, own, gradient)
            for peer, selected, of_peer in self._boundary(interval):
                gradient[of_peer - nodes.start] += self._received[name, peer][selected]
            self._gradients[interval][name] = gradient

    def _loss(self, interval: int, epoch: int, step: Vertex) -> None:
        nodes, name = self.part.nodes_of(interval), step.outputs[0].name
        labels, scale = self.part.labels[nodes], 1 / self.program.num_train
        loss = loss_in_halves(self._rows[name][nodes], labels, scale)
        self._add_gradient(interval, name, loss.gradient)
        self._note(interval, epoch, np.array([loss.loss_sum, loss.correct]))

    def _note(self, interval: int, epoch: int, statistics: Array) -> None:
        with self._lock:
            self._statistics.setdefault(epoch, {})[interval] = statistics

    def _boundary(self, interval: int) -> Iterator[tuple[int, slice, Array]]:
        """Yield each peer with halo in ``interval``, the positions in its list, and the local ids."""
        for peer, (nodes, bounds) in enumerate(
            zip(self.part.boundary, self.part.boundary_bounds, strict=True)
        ):
            selected = slice(int(bounds[interval]), int(bounds[interval + 1]))
            if selected.start < selected.stop:
                yield peer, selected, nodes[selected]

    def _halo_gradients(self, interval: int, step: Scatter) -> Iterator[HaloMessage]:
        graph = self.part.graph
        for peer in range(graph.num_servers):
            positions = self.part.returned_positions[peer][interval]
            if len(positions):
                halo = positions + np.int32(graph.num_own + graph.halo_starts[peer])
                rows = []
                for name in self._trained_slots(step):
                    rows.append(self._zeros(len(positions), name))
                    self._pull_back(name, halo, rows[-1])
                yield peer, [positions, *rows]

    def _pull_back(self, slot: str, nodes: Array, out: Array) -> None:
        """Add to ``out``, (k, width), the gradients of ``slot`` over the out-edges of the (k,) ``nodes``."""
        graph = self.part.graph
        for (source, index), gradients in self._published.items():
            step, places, values = self.program.steps[index], graph.out_edges, None
            if isinstance(step, Gather):
                places, values = graph.out_targets, None if step.edges is None else self._rows[step.edges]
            if source == slot:
                pull_back(graph.out_indptr, places, graph.out_edges, values, gradients, nodes, out)

    def _trained_slots(self, step: Scatter) -> list[str]:
        return [name for name in step.slots if name in self.program.trained_slots]
