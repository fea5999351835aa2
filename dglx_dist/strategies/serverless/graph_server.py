"""Graph server of strategy ``lambda``, which has the rows of its part and executes the tasks of intervals.

See section 4 of Dorylus. The scheduler decides the order of tasks and carries messages.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple, Protocol, TypeAlias, final

import numpy as np
import torch

from dglx_dist.errors import ConfigError
from dglx_dist.records import Array
from dglx_dist.strategies.serverless.edge_kernels import (
    edge_products,
    gather,
    gather_extreme,
    pull_back,
    pull_back_extreme,
    softmax,
    softmax_gradient,
)
from dglx_dist.strategies.serverless.graph_partition import Part
from dglx_dist.strategies.serverless.options import LambdaOptions
from dglx_dist.strategies.serverless.program import (
    Apply,
    Gather,
    Program,
    ProgramStep,
    Scatter,
    Softmax,
    inputs_of,
    outputs_of,
)
from dglx_dist.strategies.serverless.tasks import (
    TASK_OVER,
    Arrays,
    Direction,
    Item,
    Role,
    TaskComputation,
    TaskKey,
    check_payload,
    half_length,
    half_rows,
    join_halves,
)
from dglx_dist.strategies.serverless.tensor_program import DTYPES, RowKeys


class TaskKind(Enum):
    """Type of a task. Graph servers execute all but WORK."""

    GATHER = "gather"
    """Reduce rows over in-edges."""
    SOFTMAX = "softmax"
    """Normalise values of in-edges."""
    APPLY = "apply"
    """Run a tensor program here, forward or backward."""
    SCATTER = "scatter"
    """Send boundary rows to halo nodes."""
    WORK = "work"
    """Run a tensor program on a worker, forward, backward or fused."""
    PUBLISH = "publish"
    """Publish the gradient of a gathered row to its sources, and compute those of its edges."""
    SOFTMAX_GRADIENT = "softmax_gradient"
    """Compute the gradient of a softmax."""
    SEND_BACK = "send_back"
    """Send the gradients of halo nodes to their owners."""
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


def epoch_schedule(program: Program) -> tuple[ScheduledTask, ...]:
    """Return the tasks of an epoch in order. One task does the last step forward and backward."""
    tasks: list[ScheduledTask] = []
    barrier = Barrier.NONE
    for index, step in enumerate(program.steps):
        if (kind := _kind_of(step)) is not None:
            tasks.append(ScheduledTask(kind, index, barrier=barrier))
            barrier = Barrier.NONE
        # Halo rows may be read only after a Scatter, or once every interval has computed its share of them.
        if isinstance(step, Scatter):
            barrier = Barrier.GLOBAL
        elif kind is TaskKind.APPLY and program.covers_halo(step):
            barrier = Barrier.LOCAL

    tasks[-1] = replace(tasks[-1], direction=Direction.FUSED)
    for index in reversed(range(program.last)):
        tasks += [
            ScheduledTask(kind, index, Direction.BACKWARD, _BARRIERS.get(kind, Barrier.NONE))
            for kind in _backward_kinds(program, program.steps[index])
        ]

    return tuple(tasks)


_BARRIERS = {TaskKind.SEND_BACK: Barrier.LOCAL, TaskKind.COLLECT: Barrier.GLOBAL}


def _kind_of(step: ProgramStep) -> TaskKind | None:
    """Return the kind of the task that runs ``step`` forward, or None if it runs once before the epochs."""
    if isinstance(step, Apply):
        return {"worker": TaskKind.WORK, "server": TaskKind.APPLY}.get(step.place)
    kinds = {Gather: TaskKind.GATHER, Softmax: TaskKind.SOFTMAX, Scatter: TaskKind.SCATTER}
    return kinds[type(step)]


def _backward_kinds(program: Program, step: ProgramStep) -> tuple[TaskKind, ...]:
    """Return the kinds of tasks that compute gradients of ``step``, if a trained weight gets one from it."""
    has_weights = isinstance(step, Apply) and bool(step.weights)
    if not has_weights and program.trained_slots.isdisjoint(inputs_of(step)):
        return ()
    if isinstance(step, Apply):
        kind = _kind_of(step)
        return () if kind is None else (kind,)
    kinds = {
        Gather: (TaskKind.PUBLISH,),
        Softmax: (TaskKind.SOFTMAX_GRADIENT,),
        Scatter: (TaskKind.SEND_BACK, TaskKind.COLLECT),
    }
    return kinds[type(step)]


class SubmitResult(Enum):
    """Outcome of submitting one half of a task, which is accepted or dropped."""

    TAKEN = "taken"
    LAST = "last"
    AGAIN = "this half was submitted before"
    LATE = "the task is complete"


class _OpenTask(NamedTuple):
    rows: int
    arrays: Sequence[Array]
    submitted: dict[int, Sequence[Array]]


HaloMessage: TypeAlias = tuple[int, list[Array]]
"""A peer, and (r,) int32 positions in the list of halo nodes, which both sides have in the same order, and
(r, width) rows of each slot."""


class Parameters(Protocol):
    """The parameter servers, for steps with weights that the graph server runs itself."""

    def weights(self, key: TaskKey) -> list[Array]: ...
    def gradients(self, key: TaskKey, arrays: Sequence[Array]) -> object: ...


@final
class GraphServer:
    """Executes the tasks of intervals, in order within an interval and concurrently across intervals.

    No method but :meth:`compute` blocks, and that one only to call ``parameters``.

    Args:
        run: Number of the run in its session, a part of task keys. Workers of other runs are rejected.
        seed: Seed of dropout.
    """

    def __init__(
        self,
        part: Part,
        program: Program,
        options: LambdaOptions,
        parameters: Parameters | None = None,
        *,
        run: int = 0,
        seed: int = 0,
    ) -> None:
        self.part = part
        self.program = program
        self.options = options
        self.run = run
        self.seed = seed
        self._parameters = parameters
        self.schedule = epoch_schedule(program)
        """The tasks of each epoch."""
        self._rows = dict(part.inputs)
        """The latest rows. A slot of nodes has (n, width), or (n + m, width) with halo rows. A slot of
        edges has (E, width). Only its interval writes an own row."""

        # There is no lock, because in synchronous epochs barriers separate readers and writers. In
        # asynchronous ones a row may be read while it is written. Then its columns are of two epochs, both
        # within the bound.
        self._best: dict[int, Array] = {}
        """(n, width) int64 edges from which each Gather of a maximum or minimum took its values."""
        self._published: dict[tuple[str, int, int], Array] = {}
        """(slot, step, input) -> gradient that sources in the slot read: (n, width) of the results of a
        Gather, or (E, width) of an Apply on edges."""
        self._received: dict[tuple[str, int], Array] = {}
        """(slot, peer) -> (b, width), the last gradient of boundary rows from the peer."""
        self._allocate()
        each = range(part.num_intervals)

        # By interval: gradients by slot, and rows of sources by step and input.
        self._gradients: list[dict[str, Array]] = [{} for _ in each]
        self._sources: list[dict[tuple[int, str], Array]] = [{} for _ in each]
        self._statistics: dict[int, dict[int, Array]] = {}
        self._lock = threading.Lock()
        kinds = TaskKind.WORK, TaskKind.APPLY
        self.works = {
            (task.step, task.direction): TaskComputation(program, task.step, task.direction)
            for task in self.schedule
            if task.kind in kinds
        }
        """Tensor tasks by step and direction."""
        self._order = {kind: at for at, kind in enumerate(self.works)}
        self._open: dict[TaskKey, _OpenTask] = {}
        self._completed: dict[int, tuple[int, int]] = {}
        """Interval -> epoch and order of the last worker task that is done."""
        self._compute_constants()

    def _allocate(self) -> None:
        graph, program = self.part.graph, self.program
        for index, step in enumerate(program.steps):
            for slot in outputs_of(step):
                length = len(graph.sources) if slot.per == "edge" else graph.num_own
                has_halo = slot.name in program.slots_with_halo
                self._rows[slot.name] = self._zeros(graph.num_local if has_halo else length, slot.name)
            if isinstance(step, Gather):
                if step.how != "sum":
                    self._best[index] = np.full((graph.num_own, step.output.width), -1)
                if step.source in program.trained_slots:
                    self._published[step.source, index, 0] = self._zeros(graph.num_own, step.output.name)
            elif isinstance(step, Apply):
                for at, item in enumerate(step.inputs):
                    if item.end == "source" and item.slot in program.trained_slots:
                        self._published[item.slot, index, at] = self._zeros(len(graph.sources), item.slot)
            elif isinstance(step, Scatter):
                for name in self._trained_slots(step):
                    for peer, nodes in enumerate(self.part.boundary):
                        self._received[name, peer] = self._zeros(len(nodes), name)

    def _compute_constants(self) -> None:
        for index, step in enumerate(self.program.steps):
            if isinstance(step, Apply) and step.place == "once":
                graph = self.part.graph
                all_rows = slice(0, graph.num_local if step.per == "node" else len(graph.sources))
                work = TaskComputation(self.program, index, Direction.FORWARD)
                self._compute_rows(step, work, all_rows, None)

    def _compute_rows(
        self, step: Apply, work: TaskComputation, selection: slice, keys: RowKeys | None
    ) -> None:
        """Compute the rows ``selection`` of a step without weights."""
        own = slice(0, self.part.graph.num_own)
        inputs = [self._read_rows(item.slot, item.end, own, selection) for item in step.inputs]
        computed = work.half([], inputs, selection.stop - selection.start, keys)
        for slot, rows in zip(step.outputs, computed.rows, strict=True):
            self._rows[slot.name][selection] = rows

    def _zeros(self, length: int, slot: str) -> Array:
        # Memory of torch is aligned, so that tasks of this process need not copy rows.
        shape = length, self.program.slots[slot].width
        rows: Array = torch.zeros(shape, dtype=DTYPES[self.program.dtype_of(slot)]).numpy()
        return rows

    @property
    def rank(self) -> int:
        return self.part.graph.rank

    def key_of(self, interval: int, epoch: int, task: ScheduledTask) -> TaskKey:
        return TaskKey(epoch, task.step, self.part.first_interval + interval, task.direction, self.run)

    def rows_of(self, interval: int, step: int) -> slice:
        """Return the own nodes, or the in-edges, on which ``step`` runs for ``interval``."""
        of_edges = self._is_of_edges(step)
        return self.part.edges_of(interval) if of_edges else self.part.nodes_of(interval)

    def first_id(self, step: int) -> int:
        """Return the global id of the first own row of ``step``."""
        graph = self.part.graph
        return graph.first_edge if self._is_of_edges(step) else int(graph.starts[graph.rank])

    def _is_of_edges(self, step: int) -> bool:
        apply = self.program.steps[step]
        return isinstance(apply, Apply) and apply.per == "edge"

    def compute(self, interval: int, epoch: int, task: ScheduledTask) -> None:
        """Execute a task that involves neither workers nor other graph servers."""
        step = self.program.steps[task.step]
        match task.kind, step:
            case TaskKind.GATHER, Gather():
                self._gather(interval, task.step, step)
            case TaskKind.SOFTMAX, Softmax():
                edges = self.part.edges_of(interval)
                first = self.part.nodes_of(interval).start
                scores = self._rows[step.source][edges]
                softmax(self.part.graph.indptr, scores, first, self._rows[step.output.name][edges])
            case TaskKind.SOFTMAX_GRADIENT, Softmax():
                edges = self.part.edges_of(interval)
                first = self.part.nodes_of(interval).start
                gradient = self._take_gradient(interval, step.output.name, edges)
                result = self._zeros(len(gradient), step.source)
                shares = self._rows[step.output.name][edges]
                softmax_gradient(self.part.graph.indptr, shares, gradient, first, result)
                self._add_gradient(interval, step.source, result)
            case TaskKind.APPLY, Apply():
                self._apply(interval, epoch, task, step)
            case TaskKind.PUBLISH, Gather():
                self._publish(interval, task.step, step)
            case TaskKind.COLLECT, Scatter():
                self._collect(interval, step)
            case _:
                raise AssertionError(f"{task} is not computed here")

    def _apply(self, interval: int, epoch: int, task: ScheduledTask, step: Apply) -> None:
        work = self.works[task.step, task.direction]
        key = self.key_of(interval, epoch, task)
        weights = []
        if step.weights:
            assert self._parameters is not None, "a step with weights needs the parameter servers"
            weights = self._parameters.weights(key)
        selection = self.rows_of(interval, task.step)
        keys = None
        if work.drops:
            keys = self._keys(epoch, np.arange(selection.start, selection.stop) + self.first_id(task.step))
        arrays = self._take_inputs(interval, task)
        computed = work.compute_halves(weights, arrays, selection.stop - selection.start, keys)
        if step.weights and work.pushes:
            assert self._parameters is not None
            self._parameters.gradients(key, computed.gradients)
        self._take_results(interval, key, work.given, computed.rows)

        if task.direction is Direction.FORWARD and self.program.covers_halo(step):
            # Each interval computes a share of the halo nodes.
            graph, count = self.part.graph, self.part.num_intervals
            share = slice(graph.num_halo * interval // count, graph.num_halo * (interval + 1) // count)
            halo = slice(graph.num_own + share.start, graph.num_own + share.stop)
            self._compute_rows(step, work, halo, self._keys(epoch, graph.halo[share]))

    def _keys(self, epoch: int, ids: Array) -> RowKeys:
        return RowKeys(self.seed, epoch, torch.from_numpy(np.ascontiguousarray(ids, np.int64)))

    def open(self, interval: int, epoch: int, task: ScheduledTask) -> None:
        arrays = self._take_inputs(interval, task)
        selection = self.rows_of(interval, task.step)
        with self._lock:
            opened = _OpenTask(selection.stop - selection.start, arrays, {})
            self._open[self.key_of(interval, epoch, task)] = opened

    @property
    def open_tasks(self) -> list[TaskKey]:
        """Tasks that workers have not completed."""
        with self._lock:
            return sorted(self._open)

    def pull(self, key: TaskKey, half: int) -> list[Array]:
        """Return the arrays of half 0 or 1 of a task, TASK_OVER if it is done, or [] before it is open."""
        self._find_work(key)
        with self._lock:
            if (task := self._open.get(key)) is not None:
                return [array[half_rows(task.rows, half)] for array in task.arrays]
            return [TASK_OVER] if self._is_complete(key) else []

    def submit(self, key: TaskKey, half: int, arrays: Sequence[Array]) -> SubmitResult:
        """Accept a worker's results for half 0 or 1 of a task."""
        work = self._find_work(key)
        with self._lock:
            task = self._open.get(key)
            if task is None and not self._is_complete(key):
                raise ConfigError(f"rows of task {key} came before it began")
            if task is None or half in task.submitted:
                return SubmitResult.LATE if task is None else SubmitResult.AGAIN
            check_payload(work.given, arrays, half_length(task.rows, half), f"what came of {key}")
            task.submitted[half] = arrays
            if len(task.submitted) < 2:
                return SubmitResult.TAKEN
            del self._open[key]
            self._completed[key.interval] = key.epoch, self._order[key.step, key.direction]

        joined = join_halves(work.given, task.submitted[0], task.submitted[1])
        self._take_results(key.interval - self.part.first_interval, key, work.given, joined)
        return SubmitResult.LAST

    def _find_work(self, key: TaskKey) -> TaskComputation:
        key.check_run(self.run)
        first = self.part.first_interval
        end = self.part.first_interval + self.part.num_intervals
        if not first <= key.interval < end:
            raise ConfigError(
                f"task {key} is of no interval from {first} to {end - 1}, those of this graph server"
            )

        work = self.works.get((key.step, key.direction))
        step = self.program.steps[key.step] if work is not None else None
        if work is None or not isinstance(step, Apply) or step.place != "worker":
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
        """Accept the positions and rows of a message of :meth:`halo_messages` of ``peer``.

        Raises:
            ConfigError: a Scatter does not send such arrays.
        """
        step = self.program.steps[index] if 0 <= index < len(self.program.steps) else None
        if not isinstance(step, Scatter) or not 0 <= peer < self.part.graph.num_servers:
            raise ConfigError(
                f"rows came from graph server {peer} for step {index}, but there is no such Scatter"
            )

        graph = self.part.graph
        is_gradient = kind is TaskKind.SEND_BACK
        slots = self._trained_slots(step) if is_gradient else step.slots
        first = 0 if is_gradient else graph.num_own + int(graph.halo_starts[peer])
        size = len(self.part.boundary[peer]) if is_gradient else len(graph.halo_ids(peer))
        positions = arrays[0] if arrays else np.empty(0)
        shapes = [(positions.size, self.program.slots[name].width) for name in slots]
        dtypes = [self.program.dtype_of(name) for name in slots]
        expected = [((positions.size,), "int32"), *zip(shapes, dtypes, strict=True)]
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

    # Rows and gradients of an interval.

    def _take_inputs(self, interval: int, task: ScheduledTask) -> list[Array]:
        """Return the arrays that a tensor task reads, in the order of its items.

        Each gradient is returned once: reading it removes it from this graph server.
        """
        nodes = self.part.nodes_of(interval)
        selection = self.rows_of(interval, task.step)
        arrays = []
        for item in self.works[task.step, task.direction].pulled:
            if item.role is Role.LABELS:
                arrays.append(self.part.labels[nodes])
            elif item.role is Role.GRADIENT:
                arrays.append(self._take_gradient(interval, item.slot, selection))
            elif item.end != "source" or self.options.mode != "async":
                arrays.append(self._read_rows(item.slot, item.end, nodes, selection))
            else:
                arrays.append(self._read_sources(interval, task, item, nodes, selection))

        return arrays

    def _read_sources(
        self, interval: int, task: ScheduledTask, item: Item, nodes: slice, selection: slice
    ) -> Array:
        """Return the rows of the sources of the edges ``selection``, the same in forward and backward.

        Halo rows may change in between. So forward keeps the rows, and backward takes them.
        """
        key = task.step, item.slot
        if task.direction is Direction.FORWARD:
            self._sources[interval][key] = self._read_rows(item.slot, item.end, nodes, selection)
            return self._sources[interval][key]
        return self._sources[interval].pop(key)

    def _read_rows(self, slot: str, end: str, nodes: slice, selection: slice) -> Array:
        """Return the rows of ``slot`` of the nodes or edges ``selection``, or of one end of these edges.

        ``end`` is "row", "source" or "target". ``nodes`` are the destinations of the edges.
        """
        if end == "row":
            return self._rows[slot][selection]
        graph = self.part.graph
        if end == "source":
            rows = torch.from_numpy(self._rows[slot])
            sources: Array = rows.index_select(0, torch.from_numpy(graph.sources[selection])).numpy()
            return sources

        degrees = np.diff(graph.indptr[nodes.start : nodes.stop + 1])
        return np.repeat(self._rows[slot][nodes], degrees, axis=0)

    def _take_results(self, interval: int, key: TaskKey, items: Sequence[Item], arrays: Arrays) -> None:
        selection = self.rows_of(interval, key.step)
        step = self.program.steps[key.step]
        assert isinstance(step, Apply)
        places = iter(at for at, item in enumerate(step.inputs) if item.slot in self.program.trained_slots)
        for item, array in zip(items, arrays, strict=True):
            if item.role is Role.OUTPUT:
                self._rows[item.slot][selection] = array
            elif item.role is Role.STATISTICS:
                self._note(interval, key.epoch, array)
            else:
                place = next(places)
                if item.end == "source":
                    self._published[item.slot, key.step, place][selection] = array
                    continue
                gradient = self._sum_edges(interval, array) if item.end == "target" else array
                self._add_gradient(interval, item.slot, gradient)

    def _sum_edges(self, interval: int, rows: Array) -> Array:
        """Return the sums of (edges, width) ``rows`` of the interval over the in-edges of its nodes."""
        nodes = self.part.nodes_of(interval)
        sums = np.zeros((nodes.stop - nodes.start, rows.shape[1]), rows.dtype)
        gather(self.part.graph.indptr, None, None, rows, nodes.start, sums)
        return sums

    def _take_gradient(self, interval: int, slot: str, selection: slice) -> Array:
        gradient = self._gradients[interval].pop(slot, None)
        if gradient is not None:
            return gradient
        # No later step reads the slot.
        return self._zeros(selection.stop - selection.start, slot)

    def _add_gradient(self, interval: int, slot: str, gradient: Array) -> None:
        gradients = self._gradients[interval]
        gradients[slot] = gradients[slot] + gradient if slot in gradients else gradient

    def _gather(self, interval: int, index: int, step: Gather) -> None:
        nodes = self.part.nodes_of(interval)
        edges = self.part.edges_of(interval)
        graph = self.part.graph

        # Not in place, because other intervals may read the rows meanwhile.
        result = self._zeros(nodes.stop - nodes.start, step.output.name)
        of_edges = None if step.edges is None else self._rows[step.edges]
        if step.how != "sum":
            sources = None if step.source is None else graph.sources
            rows = self._rows[step.edges or ""][edges] if step.source is None else self._rows[step.source]
            best = self._best[index][nodes]
            gather_extreme(graph.indptr, sources, rows, nodes.start, step.how == "max", result, best)
        elif step.source is None:
            result = self._sum_edges(interval, self._rows[step.edges or ""][edges])
        else:
            gather(graph.indptr, graph.sources, of_edges, self._rows[step.source], nodes.start, result)

        self._rows[step.output.name][nodes] = result

    def _publish(self, interval: int, index: int, step: Gather) -> None:
        nodes = self.part.nodes_of(interval)
        edges = self.part.edges_of(interval)
        graph = self.part.graph
        gradients = self._take_gradient(interval, step.output.name, nodes)
        trained = self.program.trained_slots
        if step.source is not None and step.source in trained:
            self._published[step.source, index, 0][nodes] = gradients
        if step.edges is None or step.edges not in trained:
            return
        of_edges = self._zeros(edges.stop - edges.start, step.edges)
        if step.source is not None:
            rows = self._rows[step.source]
            edge_products(graph.indptr, graph.sources, gradients, rows, nodes.start, of_edges)
        else:
            degrees = np.diff(graph.indptr[nodes.start : nodes.stop + 1])
            of_edges = np.repeat(gradients, degrees, axis=0)
            if step.how != "sum":
                best_edges = np.repeat(self._best[index][nodes], degrees, axis=0)
                of_edges *= best_edges == np.arange(edges.start, edges.stop)[:, None]

        self._add_gradient(interval, step.edges, of_edges)

    def _collect(self, interval: int, step: Scatter) -> None:
        nodes = self.part.nodes_of(interval)
        own = np.arange(nodes.start, nodes.stop, dtype=np.int32)
        for name in self._trained_slots(step):
            gradient = self._take_gradient(interval, name, nodes)
            self._pull_back(name, own, gradient)
            for peer, selected, of_peer in self._boundary(interval):
                gradient[of_peer - nodes.start] += self._received[name, peer][selected]
            self._gradients[interval][name] = gradient

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
        for (source, index, _), gradients in self._published.items():
            if source != slot:
                continue
            step = self.program.steps[index]
            places = graph.out_edges
            values = None
            if isinstance(step, Gather):
                if step.how != "sum":
                    best = self._best[index]
                    pull_back_extreme(
                        graph.out_indptr, graph.out_targets, graph.out_edges, best, gradients, nodes, out
                    )
                    continue
                places = graph.out_targets
                values = None if step.edges is None else self._rows[step.edges]

            pull_back(graph.out_indptr, places, graph.out_edges, values, gradients, nodes, out)

    def _trained_slots(self, step: Scatter) -> list[str]:
        return [name for name in step.slots if name in self.program.trained_slots]
