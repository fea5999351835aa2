"""Graph server for strategy ``lambda``, which has its part's rows and executes the intervals' tasks.

See section 4 in Dorylus. The scheduler decides the task order and carries messages.
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
    """Work that a task does. Graph servers execute all kinds but WORK."""

    GATHER = "gather"
    """Reduce rows over in-edges."""
    SOFTMAX = "softmax"
    """Normalise values on in-edges."""
    APPLY = "apply"
    """Run a tensor program here, forward or backward."""
    SCATTER = "scatter"
    """Send boundary rows to the graph servers where the nodes are halo nodes."""
    WORK = "work"
    """Run a tensor program on a worker, forward, backward or fused."""
    PUBLISH = "publish"
    """Publish a gathered row's gradient to the edges' sources, and compute edge gradients."""
    SOFTMAX_GRADIENT = "softmax_gradient"
    """Compute a softmax's gradient."""
    SEND_BACK = "send_back"
    """Send gradients for halo nodes to their owners."""
    COLLECT = "collect"
    """Add the gradients that arrive over out-edges to the own rows' gradients."""


class Barrier(Enum):
    """Condition that a task in a synchronous epoch waits for."""

    NONE = "none"
    LOCAL = "local"
    """All intervals on this graph server have reached the task."""
    GLOBAL = "global"
    """All intervals on all graph servers have reached the task."""


@final
@dataclass(frozen=True)
class ScheduledTask:
    """One step in an interval's epoch."""

    kind: TaskKind
    step: int
    """Index in the program."""
    direction: Direction = Direction.FORWARD
    barrier: Barrier = Barrier.NONE


def epoch_schedule(program: Program) -> tuple[ScheduledTask, ...]:
    """Return an epoch's tasks in order. One task does the last step forward and backward."""
    tasks: list[ScheduledTask] = []
    barrier_of_next = Barrier.NONE
    for index, step in enumerate(program.steps):
        kind = _kind_of(step)
        if kind is not None:
            tasks.append(ScheduledTask(kind, index, barrier=barrier_of_next))
            barrier_of_next = Barrier.NONE

        # Halo rows may be read only after a Scatter, or once every interval has computed its share of them.
        if isinstance(step, Scatter):
            barrier_of_next = Barrier.GLOBAL
        elif kind is TaskKind.APPLY and program.covers_halo(step):
            barrier_of_next = Barrier.LOCAL

    tasks[-1] = replace(tasks[-1], direction=Direction.FUSED)
    for index in reversed(range(program.last)):
        for kind in _backward_kinds(program, program.steps[index]):
            barrier = _BACKWARD_BARRIERS.get(kind, Barrier.NONE)
            tasks.append(ScheduledTask(kind, index, Direction.BACKWARD, barrier))
    return tuple(tasks)


_BACKWARD_BARRIERS = {TaskKind.SEND_BACK: Barrier.LOCAL, TaskKind.COLLECT: Barrier.GLOBAL}


def _kind_of(step: ProgramStep) -> TaskKind | None:
    """Return the task kind that runs ``step`` forward, or None if it runs once before the epochs."""
    if isinstance(step, Apply):
        return {"worker": TaskKind.WORK, "server": TaskKind.APPLY}.get(step.place)
    kinds = {Gather: TaskKind.GATHER, Softmax: TaskKind.SOFTMAX, Scatter: TaskKind.SCATTER}
    return kinds[type(step)]


def _backward_kinds(program: Program, step: ProgramStep) -> tuple[TaskKind, ...]:
    """Return the task kinds that compute gradients for ``step``, or () if no weight needs them."""
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
    """A worker's task that has not completed."""

    num_rows: int
    arrays: Sequence[Array]
    """The arrays that the worker pulls."""
    results: dict[int, Sequence[Array]]
    """Submitted results by half."""


HaloMessage: TypeAlias = tuple[int, list[Array]]
"""A peer and its arrays: (r,) int32 positions in the list of halo nodes, and (r, width) rows per slot.

Both graph servers have the list in the same order.
"""


class Parameters(Protocol):
    """Access to the parameter servers, for steps with weights that the graph server runs itself."""

    def weights(self, key: TaskKey) -> list[Array]: ...
    def gradients(self, key: TaskKey, arrays: Sequence[Array]) -> object: ...


@final
class GraphServer:
    """Executes tasks in order within an interval, and concurrently across intervals.

    Only :meth:`compute` blocks, while it waits for ``parameters``.

    Args:
        run: Run number within its session, which task keys contain. Workers from other runs are rejected.
        seed: Random seed for dropout.
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
        """The tasks in each epoch."""
        self._rows = dict(part.inputs)
        """The latest rows by slot.

        A node slot has (n, width), or (n + m, width) with halo rows. An edge slot has (E, width). Each row
        for an own node or edge is written by its own interval only.
        """

        # The rows have no lock, because barriers separate readers and writers in synchronous epochs. In
        # asynchronous epochs a row may be read while it is written. Then its columns come from two epochs,
        # both within the bound.
        self._best_edges: dict[int, Array] = {}
        """(n, width) int64 edges from which each Gather with a maximum or minimum took its values."""
        self._published: dict[tuple[str, int, int], Array] = {}
        """Gradients that nodes in a slot get over their out-edges, by slot, step and input.

        They are (n, width) for a Gather's results, or (E, width) for an Apply on edges.
        """
        self._received: dict[tuple[str, int], Array] = {}
        """The last gradients for boundary rows, by slot and sending peer: (b, width)."""
        self._allocate()

        intervals = range(part.num_intervals)
        self._gradients: list[dict[str, Array]] = [{} for _ in intervals]
        """For each interval, gradients by slot."""
        self._sources: list[dict[tuple[int, str], Array]] = [{} for _ in intervals]
        """For each interval, source rows by step and slot, which forward keeps for backward."""
        self._statistics: dict[int, dict[int, Array]] = {}
        self._lock = threading.Lock()
        self.works = {
            (task.step, task.direction): TaskComputation(program, task.step, task.direction)
            for task in self.schedule
            if task.kind in (TaskKind.WORK, TaskKind.APPLY)
        }
        """Tensor tasks by step and direction, in epoch order."""
        self._order = {step_and_direction: index for index, step_and_direction in enumerate(self.works)}
        self._open_tasks: dict[TaskKey, _OpenTask] = {}
        self._completed: dict[int, tuple[int, int]] = {}
        """Epoch and ``_order`` for the worker task that completed last, by interval."""
        self._compute_constants()

    def _allocate(self) -> None:
        """Allocate rows, published gradients and received gradients for all steps."""
        graph = self.part.graph
        for index, step in enumerate(self.program.steps):
            for slot in outputs_of(step):
                length = len(graph.sources) if slot.per == "edge" else graph.num_own
                if slot.name in self.program.slots_with_halo:
                    length = graph.num_local
                self._rows[slot.name] = self._make_zeros(length, slot.name)

            self._allocate_published(index, step)
            if isinstance(step, Gather) and step.how != "sum":
                self._best_edges[index] = np.full((graph.num_own, step.output.width), -1)
            elif isinstance(step, Scatter):
                for name in self._list_trained_slots(step):
                    for peer, nodes in enumerate(self.part.boundary):
                        self._received[name, peer] = self._make_zeros(len(nodes), name)

    def _allocate_published(self, index: int, step: ProgramStep) -> None:
        graph = self.part.graph
        trained_slots = self.program.trained_slots
        if isinstance(step, Gather) and step.source in trained_slots:
            gradients = self._make_zeros(graph.num_own, step.output.name)
            self._published[step.source, index, 0] = gradients
        elif isinstance(step, Apply):
            for position, item in enumerate(step.inputs):
                if item.end == "source" and item.slot in trained_slots:
                    gradients = self._make_zeros(len(graph.sources), item.slot)
                    self._published[item.slot, index, position] = gradients

    def _compute_constants(self) -> None:
        """Compute the steps that run once before the first epoch."""
        graph = self.part.graph
        for index, step in enumerate(self.program.steps):
            if isinstance(step, Apply) and step.place == "once":
                num_rows = graph.num_local if step.per == "node" else len(graph.sources)
                work = TaskComputation(self.program, index, Direction.FORWARD)
                self._compute_rows(step, work, slice(0, num_rows), None)

    def _compute_rows(
        self, step: Apply, work: TaskComputation, selection: slice, keys: RowKeys | None
    ) -> None:
        """Compute and store the rows ``selection`` in a step without weights."""
        own_nodes = slice(0, self.part.graph.num_own)
        inputs = [self._read_rows(item.slot, item.end, own_nodes, selection) for item in step.inputs]
        result = work.half([], inputs, selection.stop - selection.start, keys)
        for slot, rows in zip(step.outputs, result.rows, strict=True):
            self._rows[slot.name][selection] = rows

    def _make_zeros(self, length: int, slot: str) -> Array:
        # Torch's memory is aligned, so that tasks in this process need not copy rows.
        shape = (length, self.program.slots[slot].width)
        rows: Array = torch.zeros(shape, dtype=DTYPES[self.program.dtype_of(slot)]).numpy()
        return rows

    @property
    def rank(self) -> int:
        return self.part.graph.rank

    def key_of(self, interval: int, epoch: int, task: ScheduledTask) -> TaskKey:
        return TaskKey(epoch, task.step, self.part.first_interval + interval, task.direction, self.run)

    def rows_of(self, interval: int, step: int) -> slice:
        """Return the own nodes, or the in-edges, on which ``step`` runs for ``interval``."""
        runs_on_edges = self._runs_on_edges(step)
        return self.part.edges_of(interval) if runs_on_edges else self.part.nodes_of(interval)

    def first_id(self, step: int) -> int:
        """Return the global id of the first own row in ``step``."""
        graph = self.part.graph
        return graph.first_edge if self._runs_on_edges(step) else int(graph.starts[graph.rank])

    def _runs_on_edges(self, step: int) -> bool:
        apply = self.program.steps[step]
        return isinstance(apply, Apply) and apply.per == "edge"

    def compute(self, interval: int, epoch: int, task: ScheduledTask) -> None:
        """Execute a task that involves neither workers nor other graph servers."""
        step = self.program.steps[task.step]
        match task.kind, step:
            case TaskKind.GATHER, Gather():
                self._gather(interval, task.step, step)
            case TaskKind.SOFTMAX, Softmax():
                self._compute_softmax(interval, step)
            case TaskKind.SOFTMAX_GRADIENT, Softmax():
                self._compute_softmax_gradient(interval, step)
            case TaskKind.APPLY, Apply():
                self._apply(interval, epoch, task, step)
            case TaskKind.PUBLISH, Gather():
                self._publish(interval, task.step, step)
            case TaskKind.COLLECT, Scatter():
                self._collect(interval, step)
            case _:
                raise AssertionError(f"{task} is not computed here")

    def _compute_softmax(self, interval: int, step: Softmax) -> None:
        edges = self.part.edges_of(interval)
        first_node = self.part.nodes_of(interval).start
        scores = self._rows[step.source][edges]
        softmax(self.part.graph.indptr, scores, first_node, self._rows[step.output.name][edges])

    def _compute_softmax_gradient(self, interval: int, step: Softmax) -> None:
        edges = self.part.edges_of(interval)
        first_node = self.part.nodes_of(interval).start
        shares = self._rows[step.output.name][edges]
        gradient = self._take_gradient(interval, step.output.name, edges)
        score_gradient = self._make_zeros(len(gradient), step.source)
        softmax_gradient(self.part.graph.indptr, shares, gradient, first_node, score_gradient)
        self._add_gradient(interval, step.source, score_gradient)

    def _apply(self, interval: int, epoch: int, task: ScheduledTask, step: Apply) -> None:
        """Run a tensor task here, with weights from and gradients to the parameter servers if it has any."""
        work = self.works[task.step, task.direction]
        key = self.key_of(interval, epoch, task)
        weights = []
        if step.weights:
            assert self._parameters is not None, "a step with weights needs the parameter servers"
            weights = self._parameters.weights(key)

        selection = self.rows_of(interval, task.step)
        keys = None
        if work.drops:
            ids = np.arange(selection.start, selection.stop) + self.first_id(task.step)
            keys = self._make_keys(epoch, ids)
        arrays = self._take_inputs(interval, task)
        result = work.compute_halves(weights, arrays, selection.stop - selection.start, keys)

        if step.weights and work.pushes:
            assert self._parameters is not None
            self._parameters.gradients(key, result.gradients)
        self._store_results(interval, key, work.given, result.rows)
        if task.direction is Direction.FORWARD and self.program.covers_halo(step):
            self._compute_halo_share(interval, epoch, step, work)

    def _compute_halo_share(self, interval: int, epoch: int, step: Apply, work: TaskComputation) -> None:
        """Compute ``step`` for the halo nodes that fall to ``interval``. Each interval has an even share."""
        graph = self.part.graph
        num_intervals = self.part.num_intervals
        first = graph.num_halo * interval // num_intervals
        end = graph.num_halo * (interval + 1) // num_intervals
        # Halo rows come after own rows.
        selection = slice(graph.num_own + first, graph.num_own + end)
        keys = self._make_keys(epoch, graph.halo[first:end])
        self._compute_rows(step, work, selection, keys)

    def _make_keys(self, epoch: int, ids: Array) -> RowKeys:
        return RowKeys(self.seed, epoch, torch.from_numpy(np.ascontiguousarray(ids, np.int64)))

    def open(self, interval: int, epoch: int, task: ScheduledTask) -> None:
        """Let workers pull the inputs for ``task``."""
        arrays = self._take_inputs(interval, task)
        selection = self.rows_of(interval, task.step)
        open_task = _OpenTask(selection.stop - selection.start, arrays, {})
        with self._lock:
            self._open_tasks[self.key_of(interval, epoch, task)] = open_task

    @property
    def open_tasks(self) -> list[TaskKey]:
        """Tasks that workers have not completed."""
        with self._lock:
            return sorted(self._open_tasks)

    def pull(self, key: TaskKey, half: int) -> list[Array]:
        """Return the arrays for half 0 or 1 of a task, TASK_OVER if it is done, or [] before it is open."""
        self._find_work(key)
        with self._lock:
            task = self._open_tasks.get(key)
            if task is None:
                return [TASK_OVER] if self._is_complete(key) else []
            return [array[half_rows(task.num_rows, half)] for array in task.arrays]

    def submit(self, key: TaskKey, half: int, arrays: Sequence[Array]) -> SubmitResult:
        """Accept a worker's results for half 0 or 1 of a task. The second half completes the task.

        Raises ConfigError if the task is not open yet, or if ``arrays`` do not fit it.
        """
        work = self._find_work(key)
        with self._lock:
            task = self._open_tasks.get(key)
            if task is None:
                if self._is_complete(key):
                    return SubmitResult.LATE
                raise ConfigError(f"rows of task {key} came before it began")
            if half in task.results:
                return SubmitResult.AGAIN

            num_rows = half_length(task.num_rows, half)
            check_payload(work.given, arrays, num_rows, f"what came of {key}")
            task.results[half] = arrays
            if len(task.results) < 2:
                return SubmitResult.TAKEN
            del self._open_tasks[key]
            self._completed[key.interval] = (key.epoch, self._order[key.step, key.direction])

        # The lock is free while the rows are copied. No other call has these rows.
        joined_arrays = join_halves(work.given, task.results[0], task.results[1])
        interval = key.interval - self.part.first_interval
        self._store_results(interval, key, work.given, joined_arrays)
        return SubmitResult.LAST

    def _find_work(self, key: TaskKey) -> TaskComputation:
        """Return the computation for ``key``. Raises ConfigError if workers have no such task here."""
        key.check_run(self.run)
        first = self.part.first_interval
        end = self.part.first_interval + self.part.num_intervals
        if not first <= key.interval < end:
            raise ConfigError(
                f"task {key} is of no interval from {first} to {end - 1}, those of this graph server"
            )

        work = self.works.get((key.step, key.direction))
        if work is not None:
            step = self.program.steps[key.step]
            if isinstance(step, Apply) and step.place == "worker":
                return work
        raise ConfigError(f"task {key}: no worker does step {key.step} in this direction here")

    def _is_complete(self, key: TaskKey) -> bool:
        # An interval's tasks complete in order, so all tasks up to the last completed one are over.
        last_completed = self._completed.get(key.interval)
        if last_completed is None:
            return False
        return (key.epoch, self._order[key.step, key.direction]) <= last_completed

    def halo_messages(self, interval: int, task: ScheduledTask) -> list[HaloMessage]:
        """Return the messages for a SCATTER or SEND_BACK task, one per graph server that needs rows."""
        step = self.program.steps[task.step]
        assert isinstance(step, Scatter)
        if task.kind is TaskKind.SEND_BACK:
            return list(self._list_halo_gradients(interval, step))

        messages = []
        for peer, selection, nodes in self._list_boundaries(interval):
            positions = np.arange(selection.start, selection.stop, dtype=np.int32)
            rows = [self._rows[name][nodes] for name in step.slots]
            messages.append((peer, [positions, *rows]))
        return messages

    def receive(self, peer: int, kind: TaskKind, index: int, arrays: Sequence[Array]) -> None:
        """Store the positions and rows from a message that :meth:`halo_messages` made on ``peer``.

        ``kind`` is SCATTER or SEND_BACK, and ``index`` is the step. Raises ConfigError if the step is no
        Scatter, or does not send such arrays.
        """
        step = self.program.steps[index] if 0 <= index < len(self.program.steps) else None
        if not isinstance(step, Scatter) or not 0 <= peer < self.part.graph.num_servers:
            raise ConfigError(
                f"rows came from graph server {peer} for step {index}, but there is no such Scatter"
            )

        if kind is TaskKind.SEND_BACK:
            slots = self._list_trained_slots(step)
            self._check_message(peer, step, slots, arrays, len(self.part.boundary[peer]))
            for name, gradients in zip(slots, arrays[1:], strict=True):
                self._received[name, peer][arrays[0]] = gradients
            return

        graph = self.part.graph
        self._check_message(peer, step, step.slots, arrays, len(graph.halo_ids(peer)))
        local_ids = graph.num_own + int(graph.halo_starts[peer]) + arrays[0]
        for name, rows in zip(step.slots, arrays[1:], strict=True):
            self._rows[name][local_ids] = rows

    def _check_message(
        self, peer: int, step: Scatter, slots: Sequence[str], arrays: Sequence[Array], num_nodes: int
    ) -> None:
        """Raise ConfigError if ``arrays`` are not positions below ``num_nodes`` and rows for ``slots``."""
        positions = arrays[0] if arrays else np.empty(0)
        expected: list[tuple[tuple[int, ...], str]] = [((positions.size,), "int32")]
        for name in slots:
            shape = (positions.size, self.program.slots[name].width)
            expected.append((shape, self.program.dtype_of(name)))

        actual = [(array.shape, array.dtype.name) for array in arrays]
        is_valid = actual == expected
        # Positions can only be compared with their bound if the arrays have the right shapes.
        if is_valid and positions.size:
            is_valid = 0 <= positions.min() <= positions.max() < num_nodes
        if not is_valid:
            raise ConfigError(
                f"graph server {peer} sent {actual} for step {step.name!r}, not {expected} "
                f"with positions below {num_nodes}; run the same version everywhere"
            )

    def statistics(self, epoch: int) -> tuple[float, int]:
        """Remove the statistics for ``epoch``.

        Returns:
            The summed losses, and how many own nodes are predicted correctly.
        """
        with self._lock:
            by_interval = self._statistics.pop(epoch, {})
        # The interval order decides the sum's bits.
        total = sum((by_interval[interval] for interval in sorted(by_interval)), np.zeros(2))
        return float(total[0]), int(total[1])

    def correct(self, epoch: int) -> int:
        """Count the own nodes that are predicted correctly in ``epoch`` so far."""
        with self._lock:
            by_interval = self._statistics.get(epoch, {})
            return int(sum(num_correct for _, num_correct in by_interval.values()))

    # Rows and gradients in an interval.

    def _take_inputs(self, interval: int, task: ScheduledTask) -> list[Array]:
        """Return the arrays that a tensor task reads, in item order.

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
        """Return source rows for the edges ``selection``, the same in forward and backward.

        Halo rows may change in between. So forward keeps the rows, and backward takes them.
        """
        step_and_slot = (task.step, item.slot)
        if task.direction is not Direction.FORWARD:
            return self._sources[interval].pop(step_and_slot)
        rows = self._read_rows(item.slot, item.end, nodes, selection)
        self._sources[interval][step_and_slot] = rows
        return rows

    def _read_rows(self, slot: str, end: str, nodes: slice, selection: slice) -> Array:
        """Return the rows in ``slot`` for the nodes or edges ``selection``, or for one end of these edges.

        ``end`` is "row", "source" or "target". ``nodes`` are the edges' destinations.
        """
        if end == "row":
            return self._rows[slot][selection]
        if end == "target":
            return np.repeat(self._rows[slot][nodes], self._count_in_edges(nodes), axis=0)

        rows = torch.from_numpy(self._rows[slot])
        sources = torch.from_numpy(self.part.graph.sources[selection])
        source_rows: Array = rows.index_select(0, sources).numpy()
        return source_rows

    def _count_in_edges(self, nodes: slice) -> Array:
        return np.diff(self.part.graph.indptr[nodes.start : nodes.stop + 1])

    def _store_results(self, interval: int, key: TaskKey, items: Sequence[Item], arrays: Arrays) -> None:
        """Store the results of a tensor task, where ``items`` describe ``arrays``."""
        selection = self.rows_of(interval, key.step)
        step = self.program.steps[key.step]
        assert isinstance(step, Apply)
        trained_inputs = [
            position for position, item in enumerate(step.inputs) if item.slot in self.program.trained_slots
        ]
        # Gradients come in the same order as these inputs, and a slot may be more than one input.
        input_positions = iter(trained_inputs)
        for item, array in zip(items, arrays, strict=True):
            if item.role is Role.OUTPUT:
                self._rows[item.slot][selection] = array
            elif item.role is Role.STATISTICS:
                with self._lock:
                    self._statistics.setdefault(key.epoch, {})[interval] = array
            else:
                position = next(input_positions)
                if item.end == "source":
                    self._published[item.slot, key.step, position][selection] = array
                elif item.end == "target":
                    self._add_gradient(interval, item.slot, self._sum_edges(interval, array))
                else:
                    self._add_gradient(interval, item.slot, array)

    def _sum_edges(self, interval: int, rows: Array) -> Array:
        """Sum an interval's (edges, width) ``rows`` over each node's in-edges."""
        nodes = self.part.nodes_of(interval)
        sums = np.zeros((nodes.stop - nodes.start, rows.shape[1]), rows.dtype)
        gather(self.part.graph.indptr, None, None, rows, nodes.start, sums)
        return sums

    def _take_gradient(self, interval: int, slot: str, selection: slice) -> Array:
        """Return and remove the gradient for ``slot``. It is zero if no later step reads the slot."""
        gradient = self._gradients[interval].pop(slot, None)
        if gradient is None:
            gradient = self._make_zeros(selection.stop - selection.start, slot)
        return gradient

    def _add_gradient(self, interval: int, slot: str, gradient: Array) -> None:
        gradients = self._gradients[interval]
        gradients[slot] = gradients[slot] + gradient if slot in gradients else gradient

    def _gather(self, interval: int, index: int, step: Gather) -> None:
        """Reduce source rows or edge rows for the nodes in ``interval``."""
        graph = self.part.graph
        nodes = self.part.nodes_of(interval)
        sources: Array | None = graph.sources
        if step.source is not None:
            rows = self._rows[step.source]
        else:
            # Without sources, the kernels read the edges' own rows.
            assert step.edges is not None
            rows = self._rows[step.edges][self.part.edges_of(interval)]
            sources = None

        # The result is not written in place, because other intervals may read the rows meanwhile.
        result = self._make_zeros(nodes.stop - nodes.start, step.output.name)
        if step.how != "sum":
            best_edges = self._best_edges[index][nodes]
            gather_extreme(graph.indptr, sources, rows, nodes.start, step.how == "max", result, best_edges)
        else:
            factors = None
            if step.source is not None and step.edges is not None:
                factors = self._rows[step.edges]
            gather(graph.indptr, sources, factors, rows, nodes.start, result)
        self._rows[step.output.name][nodes] = result

    def _publish(self, interval: int, index: int, step: Gather) -> None:
        """Compute the gradients for the source rows and edge rows that ``step`` gathered."""
        nodes = self.part.nodes_of(interval)
        gradients = self._take_gradient(interval, step.output.name, nodes)
        trained_slots = self.program.trained_slots
        if step.source is not None and step.source in trained_slots:
            # Nodes in all intervals read these gradients over their out-edges.
            self._published[step.source, index, 0][nodes] = gradients
        if step.edges is None or step.edges not in trained_slots:
            return

        edges = self.part.edges_of(interval)
        if step.source is not None:
            graph = self.part.graph
            edge_gradients = self._make_zeros(edges.stop - edges.start, step.edges)
            rows = self._rows[step.source]
            edge_products(graph.indptr, graph.sources, gradients, rows, nodes.start, edge_gradients)
        else:
            num_in_edges = self._count_in_edges(nodes)
            edge_gradients = np.repeat(gradients, num_in_edges, axis=0)
            if step.how != "sum":
                # Only the edge that a maximum or minimum was taken from gets a gradient.
                best_edges = np.repeat(self._best_edges[index][nodes], num_in_edges, axis=0)
                edge_gradients *= best_edges == np.arange(edges.start, edges.stop)[:, None]
        self._add_gradient(interval, step.edges, edge_gradients)

    def _collect(self, interval: int, step: Scatter) -> None:
        """Add gradients that arrive over out-edges, from own nodes and peers, to those for ``interval``."""
        nodes = self.part.nodes_of(interval)
        own_ids = np.arange(nodes.start, nodes.stop, dtype=np.int32)
        for name in self._list_trained_slots(step):
            gradient = self._take_gradient(interval, name, nodes)
            self._pull_back(name, own_ids, gradient)
            # All peers have sent their gradients, because the task has a global barrier.
            for peer, selection, boundary_nodes in self._list_boundaries(interval):
                gradient[boundary_nodes - nodes.start] += self._received[name, peer][selection]
            self._gradients[interval][name] = gradient

    def _list_boundaries(self, interval: int) -> Iterator[tuple[int, slice, Array]]:
        """Yield each peer that has halo nodes in ``interval``, their positions in its list, and local ids."""
        boundaries = zip(self.part.boundary, self.part.boundary_bounds, strict=True)
        for peer, (nodes, bounds) in enumerate(boundaries):
            selection = slice(int(bounds[interval]), int(bounds[interval + 1]))
            if selection.start < selection.stop:
                yield peer, selection, nodes[selection]

    def _list_halo_gradients(self, interval: int, step: Scatter) -> Iterator[HaloMessage]:
        """Yield the gradients for halo nodes that ``interval`` returns to their owners."""
        graph = self.part.graph
        for peer in range(graph.num_servers):
            positions = self.part.returned_positions[peer][interval]
            if not len(positions):
                continue

            halo_ids = positions + np.int32(graph.num_own + graph.halo_starts[peer])
            gradients = []
            for name in self._list_trained_slots(step):
                gradient = self._make_zeros(len(positions), name)
                self._pull_back(name, halo_ids, gradient)
                gradients.append(gradient)
            yield peer, [positions, *gradients]

    def _pull_back(self, slot: str, nodes: Array, out: Array) -> None:
        """Add the gradients that the (k,) ``nodes`` get for ``slot`` over out-edges to ``out`` (k, width)."""
        graph = self.part.graph
        out_indptr, out_edges = graph.out_indptr, graph.out_edges
        for (published_slot, index, _), gradients in self._published.items():
            if published_slot != slot:
                continue

            step = self.program.steps[index]
            if not isinstance(step, Gather):
                # An Apply on edges has a gradient for each edge.
                pull_back(out_indptr, out_edges, out_edges, None, gradients, nodes, out)
            elif step.how == "sum":
                factors = None if step.edges is None else self._rows[step.edges]
                pull_back(out_indptr, graph.out_targets, out_edges, factors, gradients, nodes, out)
            else:
                best_edges = self._best_edges[index]
                targets = graph.out_targets
                pull_back_extreme(out_indptr, targets, out_edges, best_edges, gradients, nodes, out)

    def _list_trained_slots(self, step: Scatter) -> list[str]:
        return [name for name in step.slots if name in self.program.trained_slots]
