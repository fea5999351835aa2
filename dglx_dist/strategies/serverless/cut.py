"""Cuts a model's recording at the graph operations into a program's steps."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeAlias, final, get_args

import torch
from torch import Tensor, nn, vmap

from dglx_dist.errors import ConfigError
from dglx_dist.layers.tracer import MODEL_ERRORS
from dglx_dist.strategies.serverless.capture import (
    OTHER_STRATEGY,
    SIZES,
    Node,
    Recording,
    Value,
    find_call,
    list_needed,
)
from dglx_dist.strategies.serverless.program import (
    FEATURES,
    Apply,
    End,
    Gather,
    Input,
    Per,
    Place,
    Program,
    ProgramStep,
    Scatter,
    Slot,
    Softmax,
    covers_halo,
    find_trained,
    outputs_of,
    sources_of,
)
from dglx_dist.strategies.serverless.tensor_program import (
    DTYPES,
    MAX_CONSTANT,
    PRODUCTS,
    Constant,
    Operation,
    TensorProgram,
    find_operation,
)
from dglx_dist.strategies.serverless.verify import check_program

CLASS_LABEL = Slot(name="label", shape=(), per="node", dtype="int64")
"""Label slot for a classification."""
_NAMES_OF_DTYPES = {dtype: name for name, dtype in DTYPES.items()}
_GRAPH_KINDS = ("gather", "softmax")
_TENSOR_KINDS = ("tensor", "drop")
_IGNORED_KEYWORDS = ("device", "layout", "pin_memory", "memory_format", "non_blocking")

_Depth: TypeAlias = int
_MAX_EDGE_COLUMNS = 8
"""Largest width for edge rows that are computed once and kept."""
_CONSTANT_DEPTH: _Depth = -1
"""Depth for pieces that depend on neither weights nor dropout. They run once, before the first epoch."""


@final
@dataclass
class TensorPiece:
    """Operations on node rows or edge rows, with no graph operation between them.

    The dicts are ordered sets.
    """

    per: Per
    inputs: dict[tuple[Value, End], None] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    outputs: dict[Value, None] = field(default_factory=dict)

    @property
    def has_product(self) -> bool:
        return any(node.name.partition(".")[0] in PRODUCTS for node in self.nodes)


@final
class Cutter:
    """Cuts the first of two ``recordings``. The second comes from a graph with another size.

    A number that differs between the recordings depends on the graph's size. An operation runs as late as its
    result allows, so that few rows travel. A piece's depth says how many graph operations come before it.
    """

    def __init__(self, recordings: Sequence[Recording], scores: Value, edges_on_workers: bool | None) -> None:
        self._first, second = recordings
        self._twin_values = pair_values(self._first, second)
        self._twins = dict(zip(self._first.nodes, second.nodes, strict=True))
        needed = set(list_needed(scores))
        self._nodes = [node for node in self._first.nodes if not needed.isdisjoint(node.outputs)]
        self._scores = scores
        self._edges_on_workers = edges_on_workers
        self._depths = self._find_depths()
        self._pieces: dict[tuple[_Depth, Per], TensorPiece] = {}
        self._slots: dict[Value, Slot] = {}
        self._num_names: defaultdict[str, int] = defaultdict(int)
        """Number of names with each prefix."""

    @property
    def inputs(self) -> tuple[Slot, ...]:
        """The inputs that the model reads, and the features."""
        slots = []
        for name, value in self._first.inputs.items():
            if name == FEATURES or value in self._slots:
                slots.append(self._slot_of(value))
        return tuple(slots)

    def cut(self) -> tuple[ProgramStep, ...]:
        """Return the program's steps.

        Raises ConfigError if rows in one step depend on how many rows there are, or if rows that travel are
        neither int64 nor have the features' dtype.
        """
        self._fill_pieces()
        graph_nodes: defaultdict[_Depth, list[Node]] = defaultdict(list)
        for node in self._nodes:
            if node.kind in _GRAPH_KINDS:
                graph_nodes[self._depths[node]].append(node)

        last_depth = self._depth_of(self._scores)
        steps: list[ProgramStep] = []
        for depth in range(_CONSTANT_DEPTH, last_depth + 1):
            steps += [self._make_graph_step(node) for node in graph_nodes[depth]]
            for per in get_args(Per):
                piece = self._pieces.get((depth, per))
                if piece is not None:
                    is_last = depth == last_depth and self._scores in piece.outputs
                    steps.append(self._make_apply(piece, is_once=depth == _CONSTANT_DEPTH, is_last=is_last))

        # The step with the scores comes after other steps at its depth.
        steps.sort(key=lambda step: isinstance(step, Apply) and self._slots[self._scores] in step.outputs)
        return tuple(self._add_scatters(steps))

    # Depths.

    def _is_once(self, value: Value) -> bool:
        """Return whether ``value`` is computed once, before the first epoch, or is an input."""
        if value.per is None or not value.is_constant:
            return False
        if value.per == "node" or value.producer is None:
            return True
        # Wide rows for all edges would take more memory than the graph, so they are computed in each epoch.
        if math.prod(value.tensor.shape[1:]) > _MAX_EDGE_COLUMNS:
            return False
        for source in value.producer.inputs:
            is_scatter = source.producer is not None and source.producer.kind == "scatter"
            if source.per == "edge" and not is_scatter and not self._is_once(source):
                return False
        return True

    def _find_depths(self) -> dict[Node, _Depth]:
        """Return the depth for each node with rows: the greatest depth that its readers allow."""
        earliest: dict[Value, _Depth] = {}
        for node in self._nodes:
            depth = max((earliest.get(value, 0) for value in node.inputs if value.per), default=0)
            # Constant rows are known on all graph servers, so that reading them over edges needs no Scatter.
            needs_scatter = node.kind == "scatter" and not node.outputs[0].is_constant
            if needs_scatter or node.kind in _GRAPH_KINDS:
                depth += 1
            earliest |= dict.fromkeys(node.outputs, depth)

        depths: dict[Node, _Depth] = {}
        latest: dict[Value, _Depth] = {self._scores: earliest.get(self._scores, 0)}
        for node in reversed(self._nodes):
            if all(value.per is None for value in node.outputs):
                continue
            if node.kind in _GRAPH_KINDS:
                depth = earliest[node.outputs[0]]
            else:
                depth = min(latest[value] for value in node.outputs if value in latest)

            depths[node] = depth
            depth_of_inputs = depth - 1 if node.kind in (*_GRAPH_KINDS, "scatter") else depth
            for value in node.inputs:
                latest[value] = min(latest.get(value, depth_of_inputs), depth_of_inputs)
        return depths

    def _depth_of(self, value: Value) -> _Depth:
        # Features have no producer.
        return self._depths[value.producer] if value.producer else 0

    # Pieces.

    def _fill_pieces(self) -> None:
        """Put each operation on rows into its piece, and make slots for the rows that pieces exchange."""
        for node in self._nodes:
            per = node.outputs[0].per
            if node.kind in _TENSOR_KINDS and per is not None:
                depth = _CONSTANT_DEPTH if self._is_once(node.outputs[0]) else self._depths[node]
                piece = self._get_piece(depth, per)
                piece.nodes.append(node)
                for value in node.inputs:
                    if value.per is not None:
                        self._read(piece, value)
            elif node.kind in _GRAPH_KINDS:
                for value in node.inputs:
                    self._materialise(value, self._depths[node] - 1)
        self._materialise(self._scores, self._depth_of(self._scores), is_scores=True)

    def _get_piece(self, depth: _Depth, per: Per) -> TensorPiece:
        return self._pieces.setdefault((depth, per), TensorPiece(per))

    def _find_piece(self, value: Value) -> TensorPiece | None:
        """Return the piece that computes ``value``, or None if no piece does."""
        producer = value.producer
        if producer is None or producer.kind not in _TENSOR_KINDS or value.per is None:
            return None
        depth = _CONSTANT_DEPTH if self._is_once(value) else self._depths[producer]
        return self._pieces.get((depth, value.per))

    def _read(self, piece: TensorPiece, value: Value) -> None:
        """Make ``value`` an input to ``piece``, if the piece does not compute it."""
        if value.producer is not None and value.producer.kind == "scatter":
            source, end = value.producer.inputs[0], value.producer.name
            self._materialise(source, 0)
            piece.inputs[source, end] = None  # type: ignore[index]
        elif self._find_piece(value) is not piece:
            self._materialise(value, 0)
            piece.inputs[value, "row"] = None

    def _materialise(self, value: Value, depth: _Depth, *, is_scores: bool = False) -> None:
        """Make ``value`` a slot. If no piece computes its scattered rows or scores, a piece copies them."""
        piece = self._find_piece(value)
        is_scatter = value.producer is not None and value.producer.kind == "scatter"
        if piece is None and (is_scatter or is_scores):
            piece = self._get_piece(depth, value.per or "node")
            self._read(piece, value)
        if piece is not None:
            piece.outputs[value] = None
        self._slot_of(value)

    def _slot_of(self, value: Value) -> Slot:
        """Return the slot for ``value``, a new one if it has none."""
        if value in self._slots:
            return self._slots[value]

        assert value.per is not None, "only rows travel"
        dtype = value.tensor.dtype
        if dtype not in (torch.int64, self._first.inputs[FEATURES].tensor.dtype):
            module = value.producer.module if value.producer else "the model"
            raise ConfigError(
                f"{module} passes rows of {dtype} over edges; convert them to the dtype of "
                f"the weights, {OTHER_STRATEGY}"
            )
        name = value.name or self._make_name("h" if value.per == "node" else "m")
        shape = tuple(value.tensor.shape[1:])
        slot_dtype: Any = "" if dtype.is_floating_point else "int64"
        self._slots[value] = Slot(name=name, shape=shape, per=value.per, dtype=slot_dtype)
        return self._slots[value]

    def _make_name(self, prefix: str) -> str:
        self._num_names[prefix] += 1
        return f"{prefix}{self._num_names[prefix]}"

    # Steps.

    def _make_graph_step(self, node: Node) -> ProgramStep:
        output = self._slot_of(node.outputs[0])
        if node.kind == "softmax":
            source_slot = self._slots[node.inputs[0]]
            return Softmax(name=self._make_name("SM"), source=source_slot.name, output=output)
        source, edges = (None if value is None else self._slots[value].name for value in node.arguments)
        how: Any = node.name
        return Gather(name=self._make_name("GA"), source=source, edges=edges, how=how, output=output)

    def _make_apply(self, piece: TensorPiece, *, is_once: bool, is_last: bool) -> Apply:
        if not piece.inputs:
            # The piece makes new rows. The features tell how many.
            features = self._first.inputs[FEATURES]
            piece.inputs[features, "row" if piece.per == "node" else "target"] = None
            self._slot_of(features)

        writer = _BodyWriter(self._twin_values, self._twins, piece)
        body = writer.write()
        prefix = "AV" if piece.per == "node" else "AE"
        place: Place = "server"
        if is_once:
            prefix = "ON"
            place = "once"
        elif self._runs_on_workers(piece, has_weights=bool(writer.weights), is_last=is_last):
            place = "worker"
        return Apply(
            name=self._make_name(prefix),
            per=piece.per,
            place=place,
            inputs=tuple(Input(slot=self._slots[value].name, end=end) for value, end in piece.inputs),
            outputs=tuple(self._make_output(value) for value in piece.outputs),
            weights=tuple(writer.weights),
            body=body,
        )

    def _runs_on_workers(self, piece: TensorPiece, *, has_weights: bool, is_last: bool) -> bool:
        if piece.per == "node":
            return is_last or piece.has_product or has_weights
        if self._edges_on_workers is not None:
            return self._edges_on_workers
        return _moves_less_than_it_computes(piece)

    def _make_output(self, value: Value) -> Slot:
        slot = self._slots[value]
        if value.producer is None or value.producer.kind not in _TENSOR_KINDS:
            # The piece copies an input, so the copy gets its own name.
            name = self._make_name("h" if slot.per == "node" else "m")
            slot = Slot(name=name, shape=slot.shape, per=slot.per)
            self._slots[value] = slot
        return slot

    def _add_scatters(self, steps: Sequence[ProgramStep]) -> Iterator[ProgramStep]:
        """Yield ``steps``, and a Scatter after each step whose rows are read at edge sources.

        Rows need no Scatter if graph servers compute or fetch them for halo nodes, too.
        """
        read_slots = {name for step in steps for name in sources_of(step)}
        with_halo = {value.name for value in self._first.inputs.values()}
        trained = find_trained(steps)
        for step in steps:
            yield step
            outputs = outputs_of(step)
            if covers_halo(step, with_halo, trained):
                with_halo.update(slot.name for slot in outputs)
                continue
            slots = tuple(slot.name for slot in outputs if slot.name in read_slots and slot.per == "node")
            if slots:
                yield Scatter(name=self._make_name("SC"), slots=slots)


_EDGE_INTENSITY = 8.0
"""Operations per moved byte from which an edge step is faster on workers.

A graph server like the paper's c5.2xlarge makes some 20 G operations a second in such steps, and 100
functions move 2.5 GB a second, 200 Mbit/s each (Dorylus, section 6).
"""


def _moves_less_than_it_computes(piece: TensorPiece) -> bool:
    """Return whether ``piece`` makes at least ``_EDGE_INTENSITY`` operations for each byte that it moves."""
    num_operations = 0
    for node in piece.nodes:
        operations_per_number = 1
        if node.name.partition(".")[0] in PRODUCTS:
            # A product between (n, k) and (k, m) multiplies and adds k times for each number.
            operations_per_number = 2 * node.inputs[-2].tensor.shape[-1]
        for result in node.outputs:
            if isinstance(result.tensor, Tensor):
                num_operations += operations_per_number * result.tensor.numel()

    bytes_per_row = 0
    for value in (*(value for value, _ in piece.inputs), *piece.outputs):
        bytes_per_row += math.prod(value.tensor.shape[1:]) * value.tensor.element_size()
    num_rows = next(iter(piece.outputs)).tensor.shape[0]
    return num_operations / num_rows >= _EDGE_INTENSITY * bytes_per_row


@final
class _BodyWriter:
    """Writes a piece's tensor program.

    ``twin_values`` and ``twins`` have the second recording's values and operations.
    """

    def __init__(
        self, twin_values: Mapping[Value, Value], twins: Mapping[Node, Node], piece: TensorPiece
    ) -> None:
        self._twin_values = twin_values
        self._twins = twins
        self._piece = piece
        self.weights: dict[str, Value] = {}
        """Weights that the piece reads, by the user's name."""
        self._constants: list[Value] = []
        value, _ = next(iter(piece.inputs))
        self._num_rows = [len(value.tensor), len(twin_values[value].tensor)]
        """The piece's row counts in the two recordings."""
        if piece.per == "edge":
            self._num_rows = [num_edges for _, num_edges in SIZES]

    def write(self) -> TensorProgram:
        nodes = set(self._piece.nodes)
        for node in self._piece.nodes:
            for value in node.inputs:
                self._collect(value, nodes)

        inputs = [self._read_value(value, end) for value, end in self._piece.inputs]
        numbers: dict[Value, int] = {}
        for value in (*inputs, *self.weights.values(), *self._constants):
            numbers[value] = len(numbers)

        # Values are numbered one after another, in recording order.
        next_number = len(numbers)
        operations = []
        for node in self._twins:
            if node in nodes:
                results = range(next_number, next_number + len(node.outputs))
                next_number = results.stop
                operations.append(self._write_operation(node, numbers, tuple(results)))
                numbers |= zip(node.outputs, results, strict=True)
        return TensorProgram(
            inputs=tuple(tuple(value.tensor.shape[1:]) for value in inputs),
            weights=tuple(tuple(value.tensor.shape) for value in self.weights.values()),
            constants=tuple(map(self._write_constant, self._constants)),
            operations=tuple(operations),
            outputs=tuple(numbers[value] for value in self._piece.outputs),
        )

    def _collect(self, value: Value, nodes: set[Node]) -> None:
        """Add the operations, weights and constants on which ``value`` depends, if it has no rows.

        A value without rows is computed in every piece that reads it.
        """
        if value.per is not None:
            return
        if value.name:
            self.weights[value.name] = value
        elif value.producer is None:
            if value not in self._constants:
                self._constants.append(value)
        elif value.producer not in nodes:
            for source in value.producer.inputs:
                self._collect(source, nodes)
            nodes.add(value.producer)

    def _read_value(self, value: Value, end: End) -> Value:
        """Return the rows of ``value`` at edge ``end``, or ``value`` if no operation scatters it."""
        for node in self._twins:
            if node.kind == "scatter" and node.name == end and node.inputs[0] is value:
                return node.outputs[0]
        return value

    def _write_operation(
        self, node: Node, numbers: Mapping[Value, int], results: tuple[int, ...]
    ) -> Operation:
        twin = self._twins[node]
        if node.kind == "tensor":
            try:
                find_operation(node.name)
            except ConfigError as error:
                raise ConfigError(f"{node.module}: {error}; {OTHER_STRATEGY}") from None

        def write(argument: Any, twin_argument: Any) -> Any:
            return self._write_argument(node, argument, twin_argument, numbers)

        # Arguments that only describe a result's memory have no meaning on a worker.
        keywords = {}
        for name, value in node.keywords.items():
            if name not in _IGNORED_KEYWORDS:
                keywords[name] = write(value, twin.keywords[name])
        arguments = tuple(map(write, node.arguments, twin.arguments))
        if node.name in ("view.default", "_unsafe_view.default"):
            # The shape is written in full, because -1 would be ambiguous without rows.
            shape = list(node.outputs[0].tensor.shape)
            twin_shape = list(twin.outputs[0].tensor.shape)
            arguments = (arguments[0], write(shape, twin_shape))
        return Operation(name=node.name, arguments=arguments, keywords=keywords, results=results)

    def _write_argument(
        self, node: Node, argument: Any, twin_argument: Any, numbers: Mapping[Value, int]
    ) -> Any:
        """Return an argument as JSON. A multiple of the row count becomes ``{"rows": multiple}``."""
        if isinstance(argument, list | tuple):
            pairs = zip(argument, twin_argument, strict=True)
            return [self._write_argument(node, item, twin, numbers) for item, twin in pairs]
        if isinstance(argument, Value):
            return {"value": numbers[argument]}
        if isinstance(argument, torch.dtype) and argument in _NAMES_OF_DTYPES:
            return {"dtype": _NAMES_OF_DTYPES[argument]}
        if isinstance(argument, float) and not math.isfinite(argument):
            return {"number": str(argument)}
        if argument == twin_argument and (argument is None or isinstance(argument, bool | int | float | str)):
            return argument

        if isinstance(argument, int) and isinstance(twin_argument, int):
            num_rows, twin_num_rows = self._num_rows
            multiple = argument // num_rows
            if argument == multiple * num_rows and twin_argument == multiple * twin_num_rows:
                return {"rows": multiple}

        raise ConfigError(
            f"{node.module} computes with a number of the graph ({node.name}: {argument} on one graph, "
            f"{twin_argument} on another), but a task has only some of the rows; remove it, {OTHER_STRATEGY}"
        )

    def _write_constant(self, value: Value) -> Constant:
        tensor = value.tensor
        twin_tensor = self._twin_values[value].tensor
        is_equal = tensor.shape == twin_tensor.shape and torch.equal(tensor, twin_tensor)
        is_finite = not tensor.is_floating_point() or bool(tensor.isfinite().all())
        fits = tensor.numel() <= MAX_CONSTANT and tensor.dtype in _NAMES_OF_DTYPES
        if not (is_equal and is_finite and fits):
            raise ConfigError(
                f"the model reads a tensor of shape {tuple(tensor.shape)} and {tensor.dtype} "
                "that is neither features, data of edges nor a parameter, or is not finite; "
                f"make it a parameter without gradient, {OTHER_STRATEGY}"
            )

        numbers = tuple(map(float, tensor.detach().flatten().tolist()))
        dtype = _NAMES_OF_DTYPES[tensor.dtype]
        return Constant(dtype=dtype, shape=tuple(tensor.shape), numbers=numbers)


Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Maps (B, ...) scores and (B, ...) labels to the mean loss over the B rows."""


@final
@dataclass(frozen=True, kw_only=True)
class Captured:
    """A captured model."""

    program: Program
    """The program, with a provisional loss until :meth:`with_loss`."""
    needs_in_edges: str
    """Layer that refuses nodes without in-edges, or ""."""

    def with_loss(self, loss: Loss, label: Slot, num_train: int = 1) -> Captured:
        """Return the program with ``loss``. Raises ConfigError if ``loss`` is no mean over its rows."""
        body = capture_loss(loss, self.program.scores.shape, label, DTYPES[self.program.dtype])
        program = replace(self.program, loss=body, label=label, num_train=num_train)
        return replace(self, program=program)


def capture(
    model: nn.Module,
    features: int,
    edge_columns: Mapping[str, Slot] = MappingProxyType({}),
    edges_on_workers: bool | None = None,
) -> Captured:
    """Return the program that computes ``model``.

    Args:
        features: Number of feature columns.
        edge_columns: Edge data by name, which the model may read.
        edges_on_workers: Where edge steps run. None: where they are cheaper.

    Raises:
        ConfigError: a part of the model cannot be a step. The message names it and a remedy.
    """
    _check_parameters(model)
    call, (recording, scores) = find_call(model, features, edge_columns)
    second, _ = call.record(1)
    cutter = Cutter([recording, second], scores, edges_on_workers)
    steps = cutter.cut()
    shape = outputs_of(steps[-1])[0].shape
    label = Slot(name="label", shape=shape, per="node")
    program = Program(
        inputs=cutter.inputs,
        steps=steps,
        loss=capture_loss(_add_up, shape, label, call.dtype),
        label=label,
        dtype=_NAMES_OF_DTYPES[call.dtype],
    )
    check_program(program, call)
    return Captured(program=program, needs_in_edges=recording.needs_in_edges)


def _add_up(scores: Tensor, labels: Tensor) -> Tensor:
    return (scores + labels).flatten(1).sum(1).mean()


def capture_loss(loss: Loss, shape: tuple[int, ...], label: Slot, dtype: torch.dtype) -> TensorProgram:
    """Return the program from (n, ...) scores and labels to (n,) losses.

    Raises ConfigError if ``loss`` is not the mean over single rows' losses.
    """
    # There are at least as many rows as classes, so that each class has a row with its weight.
    num_classes = math.prod(shape) if label.dtype else 1
    recordings = []
    results = []
    for size, _ in SIZES:
        num_rows = max(size, num_classes)
        generator = torch.Generator().manual_seed(num_rows)
        scores = torch.randn(num_rows, *shape, dtype=dtype, generator=generator)
        labels = torch.arange(num_rows) % num_classes
        if not label.dtype:
            labels = torch.rand(num_rows, *label.shape, dtype=dtype, generator=generator)
        recording = Recording({})
        recording.add_input("scores", scores, "node")
        recording.add_input("labels", labels, "node")
        results.append(_record_loss(recording, loss, scores, labels))
        recordings.append(recording)

    first, second = recordings
    needed = set(list_needed(results[0]))
    piece = TensorPiece("node", outputs={results[0]: None})
    for value in first.inputs.values():
        piece.inputs[value, "row"] = None
    for node in first.nodes:
        if node.outputs[0].per == "node" and not needed.isdisjoint(node.outputs):
            piece.nodes.append(node)
    twins = dict(zip(first.nodes, second.nodes, strict=True))
    return _BodyWriter(pair_values(first, second), twins, piece).write()


def _record_loss(recording: Recording, loss: Loss, scores: Tensor, labels: Tensor) -> Value:
    """Record single rows' losses and return their value. Raises ConfigError as :func:`capture_loss`."""

    def compute_row_loss(row: Tensor, label: Tensor) -> Tensor:
        return loss(row[None], label[None]).reshape(())

    # vmap calls the loss for single rows, and the recording has operations on all rows.
    try:
        with torch.no_grad(), recording:
            row_losses: Tensor = vmap(compute_row_loss)(scores, labels)
        mean = loss(scores, labels).detach()
    except MODEL_ERRORS as error:
        raise ConfigError(
            f"the loss could not be called for one row of scores: {type(error).__name__}: {error}; give "
            f"a function of tensors that returns the mean over rows, {OTHER_STRATEGY}"
        ) from error

    if not torch.allclose(row_losses.mean(), mean, rtol=1e-4, atol=1e-6):
        raise ConfigError(
            f"the loss of {len(scores)} rows is {float(mean):.6g}, but the mean over single "
            f"rows is {float(row_losses.mean()):.6g}. Strategy 'lambda' needs a mean over "
            "rows: divide a weighted loss by the number of rows"
        )
    return recording.value_of(row_losses)


def pair_values(first: Recording, second: Recording) -> dict[Value, Value]:
    """Map each value in ``first`` to its value in ``second``.

    Raises ConfigError if the recordings have different operations.
    """
    operations = [(node.kind, node.name) for node in first.nodes]
    if operations != [(node.kind, node.name) for node in second.nodes]:
        raise ConfigError(
            "the model runs other operations on a graph of another size; remove the "
            f"condition, {OTHER_STRATEGY}"
        )

    twin_values: dict[Value, Value] = {}
    for node, twin in zip(first.nodes, second.nodes, strict=True):
        twin_values |= zip(node.inputs, twin.inputs, strict=True)
        twin_values |= zip(node.outputs, twin.outputs, strict=True)
    return twin_values


def _check_parameters(model: nn.Module) -> None:
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if len(dtypes) != 1 or not dtypes <= {torch.float32, torch.float64}:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)) or "none"
        raise ConfigError(
            f"the model's parameters are {names}; strategy 'lambda' trains float32 or "
            "float64, all of one dtype: call model.float()"
        )

    device = next(model.parameters()).device
    if device.type != "cpu":
        raise ConfigError(
            f"the model is on {device}, but graph servers and workers of strategy 'lambda' compute on CPUs; "
            "leave model.to(device) out, or take device='cpu' in dx.init (dglx train --device cpu)"
        )
