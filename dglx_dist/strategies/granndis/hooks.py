"""Exchanges the halo where a layer begins, so that modules written for whole blocks need not know of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import torch
from dgl.nn import pytorch as dglnn
from dgl.nn.pytorch.conv.graphconv import EdgeWeightNorm
from dgl.nn.pytorch.conv.hgtconv import HGTConv
from torch import Tensor, nn

from dglx_dist.errors import ConfigError
from dglx_dist.strategies.granndis.empty_share import NoRows, tie
from dglx_dist.strategies.granndis.halo_block import HaloBlock
from dglx_dist.strategies.granndis.local_graph import LocalGraph
from dglx_dist.strategies.granndis.one_way import refuse_reversed

NO_BLOCKS: tuple[type[nn.Module], ...] = (
    dglnn.APPNPConv,
    dglnn.AtomicConv,
    dglnn.ChebConv,
    dglnn.DGNConv,
    dglnn.EGNNConv,
    dglnn.GatedGraphConv,
    dglnn.GCN2Conv,
    dglnn.GroupRevRes,
    dglnn.PNAConv,
    dglnn.SGConv,
    dglnn.TAGConv,
    dglnn.TWIRLSConv,
    dglnn.TWIRLSUnfoldingAndAttention,
)
"""Layers of DGL that run on whole graphs and on no block."""

_OF_EDGES = ("efeat", "efeats", "e", "w")


@final
class Hooks:
    """What :func:`install` put on a model."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Take it off again."""
        for handle in self._handles:
            handle.remove()


def install(model: nn.Module) -> Hooks:
    """Make the modules of ``model`` that are called with a ``HaloBlock`` and rows exchange these first.

    The rows are the argument behind the block, or else the one before it: a tensor of two dimensions or more,
    or a pair of sources and destinations. It is exchanged in the outermost module that gets it, thus once,
    and as wide as that module's input (algorithms 3.1); what has a row for each source already stays. Other
    tensors of own rows, also those of one dimension, are exchanged when they are set on the block's sources.
    An argument whose name begins with "edge" or is "efeat", "efeats", "e" or "w" is never taken for rows of
    nodes; nor should another be one of edges, for it would be exchanged where there are as many as own rows.

    Modules that are called without such a block do what they did; copies of the model keep the hooks. Modules
    that have them already get no more.

    Args:
        model: Of the user. Hooks go on all its modules, those inside other modules included.

    Returns:
        To take the hooks off that this call put on.
    """
    handles: list[Any] = []
    for module in model.modules():
        # One argument is no block and rows; scripted modules take no such hooks.
        if isinstance(module, torch.jit.ScriptModule) or not _takes_two(module.forward):
            continue
        if _enter in module._forward_pre_hooks.values():
            continue
        handles.append(module.register_forward_pre_hook(_enter, with_kwargs=True))
        handles.append(module.register_forward_hook(_leave, with_kwargs=True))
        handles.append(module.register_forward_hook(_release, with_kwargs=True, always_call=True))
    return Hooks(handles)


class _Place(NamedTuple):
    """Where a call has its block and its rows."""

    block: HaloBlock
    key: int | str
    """Position or name of the argument with the rows."""
    rows: Any
    """A tensor, or a pair whose first tensor it is."""

    @property
    def sources(self) -> Tensor:
        """Rows of the sources."""
        found: Tensor = self.rows if torch.is_tensor(self.rows) else self.rows[0]
        return found


def _enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Exchange the rows among the arguments; torch's forward pre-hook."""
    if isinstance(module, EdgeWeightNorm):
        _check_norm(module, args, kwargs)
    if not _has_block(args, kwargs):
        return None
    if isinstance(module, NO_BLOCKS):
        raise ConfigError(
            f"{type(module).__name__} got a block, and DGL runs it on whole graphs alone (it writes rows "
            "where it reads them, as layers of several hops do); call the model as model(g, x) with "
            "g = dx.local_graph(...)"
        )
    place = _find(module, args, kwargs)
    if place is not None and len(place.sources) == place.block.own_rows:
        whole = place.block.all_rows(place.sources)
        given = whole if torch.is_tensor(place.rows) else (whole, place.rows[1])
        args, kwargs = _with(args, kwargs, place.key, given)
        for key, name, value in _named(module.forward, args, kwargs):
            if name == "ntype" and isinstance(module, HGTConv) and len(value) == place.block.own_rows:
                args, kwargs = _with(args, kwargs, key, place.block.all_rows(value))
    if _has_no_targets(args, kwargs):
        NoRows(module).turn_on()
    return args, kwargs


def _with(
    args: tuple[Any, ...], kwargs: dict[str, Any], key: int | str, value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(key, str):
        return args, {**kwargs, key: value}
    return (*args[:key], value, *args[key + 1 :]), kwargs


def _release(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Turn off what ``_enter`` turned on, also where forward raised; torch's forward hook."""
    if _has_no_targets(args, kwargs):
        # Where the exchange raised, it was not turned on, and one that is on belongs to an outer module.
        NoRows.turn_off(module)


def _leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Tie the output of a rank without edges to what it exchanged; torch's forward hook."""
    place = _find(module, args, kwargs) if _has_block(args, kwargs) else None
    if place is None or place.block.num_edges():
        return None
    return tie(output, place.sources)


def _find(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Place | None:
    """Find a block and its rows, by what does not depend on how many rows this rank has."""
    named = _named(module.forward, args, kwargs)
    at = next(n for n, (_, _, value) in enumerate(named) if isinstance(value, HaloBlock))
    block = named[at][2]
    for key, name, value in (*named[at + 1 : at + 2], *(named[at - 1 : at] if at else ())):
        if isinstance(value, dict):
            raise ConfigError(
                f"{type(module).__name__} got a dict of rows for a block of one node type; full-graph "
                "strategies train on graphs of one node and one edge type: use strategy='data_parallel'"
            )
        if not name.startswith("edge") and name not in _OF_EDGES and _is_rows(value):
            return _Place(block, key, value)
    return None


def _named(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[int | str, str, Any]]:
    """Return (position or name, name, value) of the arguments, in the order of the function's parameters."""
    names = list(inspect.signature(forward).parameters)
    found: list[tuple[int | str, str, Any]] = [
        (n, names[n] if n < len(names) else "", value) for n, value in enumerate(args)
    ]
    order = {name: n for n, name in enumerate(names)}
    for name in sorted(kwargs, key=lambda name: order.get(name, len(order))):
        found.append((name, name, kwargs[name]))
    return found


def _has_no_targets(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    blocks = (one for one in (*args, *kwargs.values()) if isinstance(one, HaloBlock))
    return any(not block.num_dst_nodes() for block in blocks)


def _has_block(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(isinstance(value, HaloBlock) for value in (*args, *kwargs.values()))


def _is_rows(value: Any) -> bool:
    if torch.is_tensor(value):
        return value.dim() > 1
    # DGL's convolutions take a pair as a tuple, and so do not mistake a list for one.
    pair = isinstance(value, tuple) and len(value) == 2
    return pair and all(torch.is_tensor(one) and one.dim() for one in value)


def _check_norm(module: EdgeWeightNorm, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    several = any(isinstance(value, HaloBlock | LocalGraph) for value in (*args, *kwargs.values()))
    if module._norm == "both" and several:
        refuse_reversed("EdgeWeightNorm('both')")


def _takes_two(forward: Callable[..., Any]) -> bool:
    kinds = [parameter.kind for parameter in inspect.signature(forward).parameters.values()]
    many = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return len(kinds) > 1 or any(kind in many for kind in kinds)
