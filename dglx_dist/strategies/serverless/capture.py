"""Records the operations that a model runs, so that ``cut`` can write them as a program.

The model runs on two small random graphs with different sizes. The recording has the graph operations, and
the ATen operations between them. It is cut at the graph operations. Each piece must be row-wise, which
``verify`` checks by running the piece on some of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn, TypeAlias, final
from unittest.mock import patch

import dgl
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.internals.interception import InterceptedDropout, intercept
from dglx_dist.internals.pytorch import tree_leaves, tree_map_only
from dglx_dist.layers.dropout import MODULES
from dglx_dist.layers.tracer import MODEL_ERRORS, find_convolutions, preserve_state, random_block
from dglx_dist.strategies.serverless.program import EDGE_DATA, FEATURES, Per, Slot
from dglx_dist.strategies.serverless.tensor_program import RowKeys, drop_rows

SIZES = (37, 149), (41, 163)
"""Node and edge counts for the two graphs. A model is unlikely to have such sizes itself."""
_SEED = 17
"""Random seed for the first graph. Each further graph has the next seed."""
_MAX_BLOCKS = 64
OTHER_STRATEGY = "or use strategy='data_parallel'"

_RANDOM = (
    "bernoulli",
    "rand",
    "randn",
    "randint",
    "normal",
    "uniform",
    "exponential",
    "multinomial",
    "rrelu",
)
_READS_NUMBERS = ("_local_scalar_dense", "is_nonzero", "equal")
_UNINITIALISED = {"empty": "zeros", "empty_like": "zeros_like", "new_empty": "new_zeros"}
"""Replacements for operations that allocate without a value. Workers must not send old memory contents."""
_OPERATIONS_OVER_ROWS = ("batch_norm", "instance_norm")


@dataclass(eq=False, repr=False)
class Value:
    """A tensor in the recording."""

    tensor: Tensor
    per: Per | None = None
    """Node or edge, whichever the rows belong to. None if the value has no rows, such as a weight."""
    producer: Node | None = None
    """The operation that computed the value, or None for inputs, weights and constants."""
    name: str = ""
    """Name, if the value is an input or weight."""
    is_constant: bool = True
    """Whether the value depends on neither weights nor dropout."""


@dataclass(eq=False)
class Node:
    """A recorded operation."""

    kind: str
    """"tensor", "drop", "scatter" (node rows to their edges), "gather" or "softmax"."""
    name: str
    """ATen operation, the edge end for "scatter", or the reduction for "gather"."""
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    inputs: list[Value]
    outputs: list[Value] = field(default_factory=list)
    module: str = ""
    """Module that called the operation, such as ``Linear 'layers.0.fc'``."""


@final
class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate this
    """Records the operations in one model call. ``intercept`` calls it for graph operations."""

    def __init__(self, weights: Mapping[int, str], block: Any = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate this
        self.nodes: list[Node] = []
        self.inputs: dict[str, Value] = {}
        self.modules: list[str] = []
        """Modules that are being called, outermost first."""
        self.needs_in_edges = ""
        """Module that refuses nodes without in-edges, or ""."""
        self._weights = weights
        self._block = block
        self._values: dict[int, Value] = {}
        """Values by their tensor's id."""
        self._scattered_rows: dict[tuple[Value, str], Tensor] = {}
        self._constants: dict[str, Value] = {}
        """Constant values, by a text that describes the operation that computes them."""
        self._kept_tensors: list[Tensor] = []
        """Tensors that stay alive, because a new tensor could get a deleted tensor's id."""
        self._is_paused = False
        self._num_drops = 0

        if block is not None:
            self._pers: dict[int, Per] = {block.num_dst_nodes(): "node", block.num_edges(): "edge"}
            self._ends = dict(zip(("source", "target"), block.edges(), strict=True))
            self._degrees = {"in_degrees": block.in_degrees(), "out_degrees": block.out_degrees()}

    def add_input(self, name: str, tensor: Tensor, per: Per) -> Tensor:
        self.inputs[name] = self._values[id(tensor)] = Value(tensor, per, name=name)
        return tensor

    def value_of(self, tensor: Tensor) -> Value:
        """Return the value for ``tensor``, which is a constant or a weight if it is not known yet."""
        if id(tensor) not in self._values:
            name = self._weights.get(id(tensor), "")
            self._values[id(tensor)] = Value(tensor, name=name, is_constant=not name)
        return self._values[id(tensor)]

    # Torch operations.

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if self._is_paused:
            return operation(*args, **keywords)
        name = operation._schema.name.removeprefix("aten::")
        if name in _READS_NUMBERS:
            self._note_read(name, args[0])
            return operation(*args, **keywords)
        self._check_allowed(name)
        if operation._schema.is_mutable:
            self._check_write(name, args[0] if args else None)
        result = operation(*args, **keywords)
        if not _has_tensor(result):
            return result  # The result is a number, such as an element count.
        edge_rows = self._match_scatter(name, args)
        if edge_rows is not None:
            return edge_rows
        if self._is_all_rows(name, args, result):
            self._values[id(result)] = self.value_of(args[0])
            self._kept_tensors.append(result)
            return result

        if name == "clamp" and self._block is not None and args[2:3] == (self._block.num_edges(),):
            # DGL's mean bounds degrees by the edge count. No degree exceeds this number.
            args = (*args[:2], None)
        if operation._schema.is_mutable:
            name = self._name_without_write(operation, name)
        overload = operation._overloadname
        if name in _UNINITIALISED:
            name, overload = _UNINITIALISED[name], "default"
        if not _has_tensor([args, keywords]):
            # The dtype is recorded, because a worker may have another default dtype.
            keywords = {**keywords, "dtype": result.dtype}
        self._add("tensor", f"{name}.{overload}", args, keywords, result)
        return result

    def _check_allowed(self, name: str) -> None:
        """Refuse an ATen operation that draws random numbers or that mixes rows from different nodes."""
        # In-place and internal variants have underscores around the name.
        if name.strip("_").startswith(_RANDOM) or "dropout" in name:
            self.refuse(f"random numbers ({name})", "use torch.nn.Dropout, whose masks are the same anywhere")
        if any(word in name for word in _OPERATIONS_OVER_ROWS):
            self.refuse(
                "statistics over all nodes", "use nn.LayerNorm or nn.GroupNorm, which normalise each row"
            )

    def _note_read(self, name: str, tensor: Tensor) -> None:
        """Refuse to read a number from ``tensor`` in Python, except for the checks in DGL's layers."""
        value = self.value_of(tensor)
        sources = {source.name for source in list_needed(value)}
        input_names = sources - {"", "in_degrees", "out_degrees"}

        # DGL's layers test whether edge weights are positive, and whether a node has no in-edge.
        is_test = tensor.dtype is torch.bool
        is_test_of_edges = is_test and all(self._is_edge_number(source) for source in input_names)
        if not value.is_constant or (input_names and not is_test_of_edges):
            self.refuse(f"a value of a tensor in Python ({name})", "compute with tensors instead")
        if "in_degrees" in sources and is_test:
            self.needs_in_edges = self.needs_in_edges or self._module

    def read_in_python(self, tensor: Tensor) -> None:
        """Refuse ``tensor.tolist()`` and similar calls, which are no torch operations."""
        value = self.value_of(tensor)
        if not value.is_constant or any(source.name for source in list_needed(value)):
            self.refuse("a value of a tensor in Python", "compute with tensors instead")

    def _is_edge_number(self, name: str) -> bool:
        return name.startswith(EDGE_DATA) and self.inputs[name].tensor.is_floating_point()

    def _check_write(self, name: str, target: Any) -> None:
        """Refuse an operation that writes to ``target`` if that is a buffer or a weight."""
        # BatchNorm counts its batches. It is refused for its statistics, with a better message.
        if not isinstance(target, Tensor) or self._module.startswith(("BatchNorm", "SyncBatchNorm")):
            return
        value = self.value_of(target)
        if value.producer is None and value.per is None:
            self.refuse(f"a buffer or weight that it changes ({name})", "leave it as it is")

    def _name_without_write(self, operation: Any, name: str) -> str:
        """Return the name of the operation that returns the same result without writing it."""
        new_name = name.rstrip("_")
        packet = getattr(torch.ops.aten, new_name, None)
        if new_name == name or packet is None or operation._overloadname not in packet.overloads():
            self.refuse(
                f"an operation that writes to its arguments ({name})", "use one that returns its result"
            )
        return new_name

    def _match_scatter(self, name: str, args: Any) -> Tensor | None:
        """Return the rows at one end of all edges if the operation reads them, or None.

        Messages that are computed in Python read source and target rows by their ids.
        """
        if name == "index_select" and args[1] == 0:
            rows, index = args[0], args[2]
        elif name == "index" and len(args[1]) == 1:
            rows, (index,) = args
        else:
            return None

        if self.value_of(rows).per != "node" or self.value_of(index).per is not None:
            return None
        for end, ids in self._ends.items():
            if index.shape == ids.shape and bool((index == ids).all()):
                return self._scatter(rows, end)
        return self.refuse("rows of other nodes than the ends of edges", "pass messages along edges instead")

    def _is_all_rows(self, name: str, args: Any, result: Any) -> bool:
        """Return whether the operation takes a slice that has all rows.

        Sources and targets are the same nodes here, so slicing rows down to the target nodes keeps all rows.
        """
        if name != "slice" or not isinstance(result, Tensor) or self.value_of(args[0]).per is None:
            return False
        dimension = args[1] if len(args) > 1 else 0
        return dimension == 0 and result.shape == args[0].shape

    def _add(
        self,
        kind: str,
        name: str,
        args: Any,
        keywords: Mapping[str, Any],
        result: Any,
        per: Per | None = None,
    ) -> None:
        """Record an operation with its ``result``. ``per`` is None if the rows are of the inputs' kind."""
        leaves = tree_leaves([args, dict(keywords)])
        inputs = [self.value_of(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        pers = {value.per for value in inputs} - {None}
        if kind == "tensor" and len(pers) > 1:
            self.refuse(f"rows of nodes and of edges in one operation ({name})", "pass messages along edges")

        to_value = partial(tree_map_only, Tensor, self.value_of)
        arguments = tuple(to_value(list(args)))
        node = Node(kind, name, arguments, to_value(dict(keywords)), inputs, module=self._module)
        is_constant = kind in ("tensor", "scatter") and all(value.is_constant for value in inputs)

        # Constant rows are computed once, because every layer uses the same powers of degrees.
        constant_key = ""
        if is_constant and kind == "tensor" and pers:
            constant_key = f"{name} {node.arguments} {node.keywords}"
        if constant_key in self._constants and isinstance(result, Tensor):
            self._values[id(result)] = self._constants[constant_key]
            self._kept_tensors.append(result)
            return

        for tensor in result if isinstance(result, tuple | list) else (result,):
            per_of_result = per or next(iter(pers), None)
            if not inputs and self._block is not None and tensor.dim():
                # The operation makes new rows, such as torch.ones(graph.num_edges(), 1).
                per_of_result = self._pers.get(len(tensor))
            value = Value(tensor, per_of_result, node, is_constant=is_constant)
            node.outputs.append(value)
            if constant_key:
                self._constants[constant_key] = value
            if isinstance(tensor, Tensor):
                self._values[id(tensor)] = value
        self.nodes.append(node)

    @property
    def _module(self) -> str:
        return self.modules[-1] if self.modules else "the model"

    # Graph operations.

    def reduce(self, stock: Any, index: Any, operator: str, how: str, rows: Any, edges: Any) -> Tensor:
        """Reduce rows over in-edges like DGL's function ``stock``, which has the same arguments."""
        self._check_graph(index)
        if operator == "copy_lhs":
            return self._gather(stock, index, operator, how, rows, None)
        if operator == "copy_rhs":
            return self._gather(stock, index, operator, how, None, edges)
        if operator == "mul" and how == "sum" and _has_factor_per_head(rows, edges):
            return self._gather(stock, index, operator, how, rows, edges)
        messages = self.combine(index, operator, rows, edges, ("u", "e"))
        return self._gather(stock, index, "copy_rhs", how, None, messages)

    def _gather(self, stock: Any, index: Any, operator: str, how: str, rows: Any, edges: Any) -> Tensor:
        for operand in (rows, edges):
            if operand is not None and self.value_of(operand).per is None:
                self.refuse("messages of weights alone", "multiply rows by them")
        if operator == "copy_lhs" and how == "sum":
            factors = self._find_projection(rows)
            if factors is not None:
                # Summing rows first and multiplying by the matrix afterwards gives the same result. For
                # constant features, the sum needs neither a Scatter nor a gradient.
                features, weight = factors
                return torch.mm(self._gather(stock, index, operator, how, features, None), weight)

        result: Tensor = self._run(stock, index, operator, how, rows, edges)
        self._add("gather", how, (rows, edges), {}, result, "node")
        return result

    def _find_projection(self, rows: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return constant features and the matrix whose product is ``rows``.

        Return None if ``rows`` are no such product, or if the features are more than twice as wide.
        """
        producer = self.value_of(rows).producer
        if producer is None or producer.name != "mm.default":
            return None
        features, matrix = producer.arguments
        is_wide = features.tensor.shape[1] > 2 * rows.shape[1]
        if features.per != "node" or not features.is_constant or matrix.per is not None or is_wide:
            return None
        return features.tensor, matrix.tensor

    def combine(self, index: Any, operator: str, left: Any, right: Any, ends: tuple[str, str]) -> Tensor:
        """Return edge rows, computed from the rows at two ends of the edges: "u", "v" or "e"."""
        self._check_graph(index)
        operands = []
        for rows, end in zip((left, right), ends, strict=True):
            if rows is not None:
                operands.append(self._to_edges(rows, end))

        if len(operands) == 1 or operator == "copy_lhs":
            return operands[0]
        if operator == "copy_rhs":
            return operands[1]
        if operator == "add":
            return operands[0] + operands[1]
        product = operands[0] * operands[1]
        return product.sum(-1, keepdim=True) if operator == "dot" else product

    def softmax(self, stock: Any, index: Any, scores: Tensor, norm_by: str) -> Tensor:
        self._check_graph(index)
        if norm_by != "dst":
            self.refuse("a softmax over the out-edges of nodes", "normalise over in-edges")
        result: Tensor = self._run(stock, index, scores, torch.arange(len(scores)), norm_by)
        self._add("softmax", "softmax", (scores,), {}, result)
        return result

    def degrees(self, graph: Any, name: str) -> Tensor:
        self._check_graph(graph._graph)
        return self.read_degrees(name)

    def read_degrees(self, name: str) -> Tensor:
        if name not in self.inputs:
            self.add_input(name, self._degrees[name], "node")
        return self._degrees[name]

    def drop(self, rows: Tensor, probability: float) -> Tensor:
        if self.value_of(rows).per is None:
            self.refuse("dropout of weights", "drop entries of rows")
        stream = MODULES + self._num_drops
        self._num_drops += 1
        keys = RowKeys(0, 0, torch.arange(len(rows)))
        result = self._run(drop_rows, rows, probability, stream, keys)
        self._add("drop", "drop", (rows, probability, stream), {}, result)
        return result

    def refuse(self, description: str, remedy: str = "") -> NoReturn:
        remedies = f"{remedy}, {OTHER_STRATEGY}" if remedy else OTHER_STRATEGY
        raise ConfigError(
            f"{self._module} uses {description}, but strategy 'lambda' computes rows of nodes "
            f"and edges in separate tasks; {remedies}"
        )

    def _to_edges(self, rows: Tensor, end: str) -> Tensor:
        return rows if end == "e" else self._scatter(rows, {"u": "source", "v": "target"}[end])

    def _scatter(self, rows: Tensor, end: str) -> Tensor:
        key = (self.value_of(rows), end)
        if key not in self._scattered_rows:
            self._scattered_rows[key] = self._run(torch.index_select, rows, 0, self._ends[end])
            self._add("scatter", end, (rows,), {}, self._scattered_rows[key], "edge")
        return self._scattered_rows[key]

    def _check_graph(self, index: Any) -> None:
        """Refuse a graph whose edges differ from the block's."""
        # The third tensor in ``index.edges``, the edges' ids, is not compared.
        for nodes, ids in zip(index.edges(0, "eid"), self._ends.values(), strict=False):
            if nodes.shape != ids.shape or not self._run(torch.equal, nodes, ids):
                self.refuse("another graph than its blocks", "pass messages along the blocks it is given")

    def _run(self, function: Any, *arguments: Any) -> Any:
        """Call ``function`` without recording its operations."""
        self._is_paused = True
        try:
            return function(*arguments)
        finally:
            self._is_paused = False


def _has_tensor(tree: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(tree))


def _has_factor_per_head(rows: Tensor, edges: Tensor) -> bool:
    """Return whether edge rows have one factor for each leading dimension in ``rows``."""
    edge_shape = tuple(edges.shape[1:])
    while edge_shape and edge_shape[-1] == 1:
        edge_shape = edge_shape[:-1]
    return tuple(rows.shape[1 : 1 + len(edge_shape)]) == edge_shape


# Model calls.


@dataclass(frozen=True, kw_only=True)
class ModelCall:
    """A way to call a model: ``model(blocks, x)``, where all blocks are the same graph."""

    model: nn.Module
    features: int
    edge_columns: Mapping[str, Slot]
    """Edge data by name."""
    num_blocks: int = 1
    on_blocks: bool = True
    """Whether the model gets blocks. Some DGL layers refuse them, and only take graphs."""

    @property
    def dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.model.parameters() if p.is_floating_point())

    def make_graph(self, index: int) -> tuple[Any, Tensor]:
        """Return a random graph to call the model on, and features for its nodes.

        Calls with the same index give equal graphs. Rows in node and edge data have the same shape as in the
        dataset. Integers are 0, because 0 is a valid index into any embedding. Other values are random.

        Args:
            index: 0 or 1. ``SIZES[index]`` has the node count and the edge count.
        """
        num_nodes, num_edges = SIZES[index]
        generator = torch.Generator().manual_seed(_SEED + index)
        block = random_block(num_nodes, num_nodes, num_edges - num_nodes, generator)
        if not self.on_blocks:
            block = dgl.graph(block.edges(), num_nodes=num_nodes)
        for name, slot in self.edge_columns.items():
            shape = (num_edges, *slot.shape)
            if slot.dtype:  # A slot only has a dtype if it holds integers.
                block.edata[name] = torch.zeros(shape, dtype=torch.int64)
            else:
                block.edata[name] = torch.rand(shape, dtype=self.dtype, generator=generator)

        return block, torch.randn(num_nodes, self.features, dtype=self.dtype, generator=generator)

    def run(self, block: Any, x: Tensor, degrees: Callable[[str], Tensor] | None = None) -> Any:
        """Call the model. ``degrees`` maps "in_degrees" or "out_degrees" to the degrees.

        Ready-made models read degrees from the distributed graph, so its methods are replaced meanwhile.
        """

        def read_degrees(name: str, *_: Any) -> Tensor:
            return getattr(block, name)() if degrees is None else degrees(name)

        with ExitStack() as patches:
            for name in ("in_degrees", "out_degrees"):
                patches.enter_context(patch.object(DistGraph, name, partial(read_degrees, name)))
            return self.model([block] * self.num_blocks, x)

    def record(self, index: int) -> tuple[Recording, Value]:
        """Call the model on ``make_graph(index)``. Return the recording and the scores' value."""
        block, x = self.make_graph(index)
        weights = {id(p): name for name, p in self.model.named_parameters()}
        recording = Recording(weights, block)
        recording.add_input(FEATURES, x, "node")
        for name in self.edge_columns:
            recording.add_input(f"{EDGE_DATA}{name}", block.edata[name], "edge")

        # The call must change neither the model's buffers nor the random generators' state.
        with (
            preserve_state(self.model, training=True),
            torch.random.fork_rng(devices=[]),
            _name_modules(self.model, recording.modules),
            torch.no_grad(),
        ):
            try:
                with (
                    intercept(recording),
                    InterceptedDropout(recording.drop, recording.read_in_python),
                    recording,
                ):
                    result = self.run(block, x, recording.read_degrees)
            except ConfigError:
                raise
            except MODEL_ERRORS as error:
                raise ConfigError(
                    f"the model could not be called as model(blocks, x) with {self.num_blocks} "
                    f"blocks and x of {self.features} columns: {type(error).__name__}: {error}; "
                    f"make it support this call, {OTHER_STRATEGY}"
                ) from error

        if not isinstance(result, Tensor) or recording.value_of(result).per != "node":
            summary = "rows of edges or no rows" if isinstance(result, Tensor) else type(result).__name__
            raise ConfigError(
                f"the model returns {summary}; strategy 'lambda' needs one tensor with a row for each node"
            )
        return recording, recording.value_of(result)


@contextmanager
def _name_modules(model: nn.Module, active_modules: list[str]) -> Iterator[None]:
    """Keep the modules that are being called in ``active_modules`` while the context lasts."""
    hooks = []
    for name, module in model.named_modules():
        description = f"{type(module).__name__} {name!r}" if name else type(module).__name__

        def enter(_module: nn.Module, _args: Any, description: str = description) -> None:
            active_modules.append(description)

        def leave(_module: nn.Module, _args: Any, _result: Any) -> None:
            active_modules.pop()

        hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


ScoredRecording: TypeAlias = tuple[Recording, Value]
"""A recording, and the scores' value."""


def find_call(
    model: nn.Module, features: int, edge_columns: Mapping[str, Slot]
) -> tuple[ModelCall, ScoredRecording]:
    """Find out how ``model`` is called: with a list of blocks or with one graph, and with how many blocks.

    If several block counts work, the smallest with which the model uses the most weights is taken.

    Returns:
        The call, and its recording on the first random graph.

    Raises:
        ConfigError: the model can be called in neither way.
    """
    with_blocks = ModelCall(model=model, features=features, edge_columns=edge_columns, on_blocks=True)
    try:
        return _find_number_of_blocks(with_blocks)
    except ConfigError as error:
        error_with_blocks = error

    try:
        return _find_number_of_blocks(replace(with_blocks, on_blocks=False))
    except ConfigError as error_with_graph:
        # If DGL itself refused a block, a layer does not accept blocks, so the other error tells more.
        if isinstance(error_with_blocks.__cause__, AssertionError | dgl.DGLError):
            raise
        raise error_with_blocks from error_with_graph


def _find_number_of_blocks(call: ModelCall) -> tuple[ModelCall, ScoredRecording]:
    """Try several block counts, the layer count first. Return the best call and its recording."""
    num_layers = max(1, sum(1 for _ in find_convolutions(call.model)))
    trained = {name for name, parameter in call.model.named_parameters() if parameter.requires_grad}
    best: tuple[ModelCall, ScoredRecording] | None = None
    least_unused = len(trained)
    first_error: ConfigError | None = None
    for num_blocks in dict.fromkeys((num_layers, *range(1, _MAX_BLOCKS))):
        candidate = replace(call, num_blocks=num_blocks)
        try:
            recording, scores = candidate.record(0)
        except ConfigError as error:
            first_error = first_error or error
            continue

        num_unused = len(trained - {value.name for value in list_needed(scores)})
        if best is None or num_unused < least_unused:
            best = candidate, (recording, scores)
            least_unused = num_unused
        elif num_blocks > best[0].num_blocks:
            break  # More blocks use no more weights.
        if num_unused == 0:
            break

    if best is None:
        assert first_error is not None
        raise first_error
    return best


def list_needed(scores: Value) -> Iterator[Value]:
    """Yield ``scores`` and all values from which they are computed."""
    seen = {scores}
    pending = [scores]
    while pending:
        value = pending.pop()
        yield value
        sources = [] if value.producer is None else value.producer.inputs
        for source in sources:
            if source not in seen:
                seen.add(source)
                pending.append(source)
