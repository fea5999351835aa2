"""Find out a model's size and work: each layer's widths, products, parameters and exchanged rows."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from dgl.nn import pytorch as dglnn
from torch import Tensor, nn

from dglx_dist.comm.topology import Topology
from dglx_dist.errors import ConfigError, first_sentence
from dglx_dist.internals.message_passing import place
from dglx_dist.layers.base import LayerWidths, SplittableConv
from dglx_dist.layers.convolutions import CONVOLUTIONS, make_stages, sums_sources
from dglx_dist.layers.tracer import (
    MODEL_ERRORS,
    find_convolutions,
    random_block,
    replace_forwards,
    trace_calls,
)
from dglx_dist.planner.costs.base import COSTS, TypedFeatures
from dglx_dist.planner.records import ModelShape
from dglx_dist.strategies.base import STRATEGIES, find_float_parameter
from dglx_dist.training.models import OwnRows
from dglx_dist.training.relational import RelationalModel


def build_topology(servers: int, ranks_per_server: int) -> Topology:
    """Build the topology that rank 0 sees in a run with equally many ranks on each server."""
    server_of_rank = np.repeat(range(servers), ranks_per_server).tolist()
    return Topology(0, servers * ranks_per_server, tuple(server_of_rank))


def infer_shape(
    module: nn.Module,
    features: int,
    classes: int,
    num_layers: int = 0,
    *,
    kind: str = "",
    hidden: int = 0,
    is_guessed: bool = False,
) -> ModelShape:
    """Describe a model's layers. The model is traced in a call ``module(blocks, x)`` and does not change.

    If the model cannot be called like this, its registered convolutions are taken as its layers. Unknown
    layers count like GraphSAGE layers.

    Args:
        module: The model, on any device.
        features: Number of input columns.
        classes: Number of output columns.
        num_layers: Number of layers. 0: as many as the model has convolutions, or 2.
        kind: Name of a ready-made model. Empty: derived from the model's first convolution.
        hidden: Width between the layers. 0: the first layer's result.
        is_guessed: Whether the model is not a ready-made one.
    """
    convs = [conv for _, conv in find_convolutions(module) if _find_kind(conv)]
    num_layers = num_layers or len(convs) or 2
    try:
        layers, first_learns = _trace_layers(module, features, num_layers)
    except MODEL_ERRORS:
        layers = _list_registered(convs, features, hidden, classes, num_layers)
        first_learns = False

    if not kind:
        kind = "sage"
        if convs:
            kind = _find_kind(convs[0])
        elif not layers[0].summed:
            kind = "mlp"
    inspected, refusals = _inspect(module, features)
    return ModelShape(
        kind=kind,
        layers=layers,
        features=features,
        hidden=hidden or layers[0].outputs,
        classes=classes,
        inspected=inspected,
        refusals=refusals,
        first_learns=first_learns,
        is_guessed=is_guessed,
        **measure_parameters(module),
    )


def measure_parameters(module: nn.Module) -> dict[str, Any]:
    """Return the fields of :class:`ModelShape` that follow from the trained parameters."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return {
        "parameters": sum(parameter.numel() for parameter in parameters),
        "tensors": len(parameters),
        "itemsize": parameters[0].element_size() if parameters else 4,
    }


def describe_relational(
    module: RelationalModel,
    features: TypedFeatures,
    classes: int,
    *,
    kind: str,
    trained_row_bytes: int | None = None,
) -> ModelShape:
    """Describe a ready-made model for several types. Its results have ``classes`` columns.

    ``trained_row_bytes`` is the size of a row for types without features. None: rows have the hidden width.
    """
    # Each relation has its own sum for every destination.
    relations_into = Counter(destination for _, _, destination in features.etypes)
    summed = module.hidden * max(relations_into.values())
    layers = []
    for outputs in [module.hidden] * (module.num_layers - 1) + [classes]:
        layers.append(LayerWidths(inputs=module.hidden, outputs=outputs, summed=summed))

    inspected, refusals = _inspect(module, features)
    sizes = measure_parameters(module)
    if trained_row_bytes is None:
        trained_row_bytes = module.hidden * sizes["itemsize"]
    return ModelShape(
        kind=kind,
        layers=tuple(layers),
        features=max([module.hidden, *features.widths.values()]),
        hidden=module.hidden,
        classes=classes,
        inspected=inspected,
        refusals=refusals,
        # Before layer 1, the rows of all types are mapped to the hidden width.
        first_learns=True,
        feature_widths=features.widths,
        trained_row_bytes=trained_row_bytes,
        **sizes,
    )


_USUAL_WIDTH = 64


def _find_kind(module: nn.Module) -> str:
    """Return the ready-made model with the same convolution as ``module``, or "" if it is no convolution."""
    if isinstance(module, SplittableConv):
        return "gcn"
    convolution = CONVOLUTIONS.get(type(module))
    if convolution is None:
        return ""
    return convolution.like


def _find_widths(module: nn.Module, inputs: int, outputs: int) -> LayerWidths:
    """Return the widths of a layer that was called with ``inputs`` columns and returned ``outputs``."""
    try:
        widths = replace(_read_widths(module), outputs=outputs)
    except ConfigError:
        # An unknown layer is assumed to sum the narrower rows. An MLP sums nothing.
        summed = min(inputs, outputs)
        if isinstance(module, OwnRows):
            summed = 0
        widths = LayerWidths(inputs=inputs, outputs=outputs, summed=summed)
    return replace(widths, sums_sources=sums_sources(module))


def _read_widths(module: Any) -> LayerWidths:
    """Return a convolution's widths. The convolution has stages, or is GATv2 or SAGE-pool, which have none.

    Raises:
        ConfigError: If ``module`` is anything else.
    """
    if type(module) is dglnn.GATv2Conv:
        heads = module._num_heads
        # As in SplittableConv.widths: the logits, the softmax and the weighted sum process every edge.
        outputs = heads * module._out_feats
        return LayerWidths(inputs=module._in_src_feats, outputs=outputs, summed=outputs + 6 * heads)
    if type(module) is dglnn.SAGEConv and module._aggre_type == "pool":
        inputs = module.fc_pool.in_features
        outputs = module.fc_neigh.out_features
        return LayerWidths(inputs=inputs, outputs=outputs, summed=inputs)
    return make_stages(module).widths()


def _trace_layers(module: nn.Module, features: int, num_layers: int) -> tuple[tuple[LayerWidths, ...], bool]:
    """Return the layers as ``module`` calls them, and whether the rows before the first layer are trained.

    Raises:
        MODEL_ERRORS: If ``module`` cannot be called with ``num_layers`` blocks, or does not use the blocks
            one after another.
    """
    # Levels have different sizes, so the row count identifies the level.
    sizes = [8 + 5 * (num_layers - level) for level in range(num_layers + 1)]
    generator = torch.Generator().manual_seed(0)
    weight = find_float_parameter(module)
    blocks = []
    for num_sources, num_targets in pairwise(sizes):
        block = random_block(num_targets, num_sources, 4 * num_targets, generator)
        blocks.append(place(block, weight.device))
    x = torch.randn(sizes[0], features, generator=generator).to(weight)

    # Layers that read the distributed graph would ask other ranks, so they return zeros here.
    forwards: dict[nn.Module, Callable[..., Any]] = {}
    for conv in module.modules():
        if isinstance(conv, SplittableConv):
            forwards[conv] = partial(_make_zeros, conv.widths().outputs)
    with replace_forwards(forwards):
        calls = trace_calls(module, blocks, x)

    layers = [call for call in calls if call.block is not None and call.inside is None]
    if [call.block for call in layers] != list(range(num_layers)):
        raise ValueError(f"{len(layers)} calls with {num_layers} blocks")
    widths = []
    for call in layers:
        num_inputs = call.rows.shape[1]
        num_outputs = call.result[0].numel()
        widths.append(_find_widths(call.module, num_inputs, num_outputs))
    return tuple(widths), layers[0].rows.requires_grad


def _make_zeros(num_columns: int, block: Any, x: Any, *_edges: Any) -> Tensor:
    """Return zeros for each destination in ``block``, like a layer that is called with ``x``."""
    rows: Tensor = x[0] if isinstance(x, tuple) else x
    return rows.new_zeros(block.num_dst_nodes(), num_columns)


def _list_registered(
    convs: Sequence[nn.Module], features: int, hidden: int, classes: int, num_layers: int
) -> tuple[LayerWidths, ...]:
    """Return the model's registered layers if their number matches, otherwise GraphSAGE layers."""
    layers = []
    try:
        for conv in convs:
            layers.append(replace(_read_widths(conv), sums_sources=sums_sources(conv)))
    except ConfigError:
        layers = []
    if len(layers) == num_layers:
        return tuple(layers)

    hidden_widths = [hidden or _USUAL_WIDTH] * (num_layers - 1)
    layers = []
    for inputs, outputs in pairwise([features, *hidden_widths, classes]):
        # Rows are projected before they are summed if that makes them narrower.
        layers.append(LayerWidths(inputs=inputs, outputs=outputs, summed=min(inputs, outputs)))
    return tuple(layers)


def _inspect(module: nn.Module, features: int | TypedFeatures) -> tuple[dict[str, Any], dict[str, str]]:
    """Ask each strategy's cost model about ``module``.

    Returns:
        By strategy, the results if it can train the module, and by strategy, the reasons why others cannot.
    """
    inspected = {}
    refusals = {}
    for name in sorted({*STRATEGIES.names()} & {*COSTS.names()}):
        try:
            inspected[name] = COSTS.get(name).inspect(module, features)
        except ConfigError as error:
            refusals[name] = first_sentence(error)
        except MODEL_ERRORS as error:
            refusals[name] = f"its inspection of the model failed: {type(error).__name__}: {error}"

    return inspected, refusals
