"""From a module to its stages."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType

from torch import nn

from dglx_dist.errors import ConfigError
from dglx_dist.layers.staged import Staged

_ADAPTERS: Mapping[str, str] = MappingProxyType(
    {
        "SAGEConv": "dglx_dist.layers.sage:SageStages",
        "GraphConv": "dglx_dist.layers.graph_conv:GraphConvStages",
        "GINConv": "dglx_dist.layers.gin:GinStages",
        "GATConv": "dglx_dist.layers.gat:GatStages",
        "RelGraphConv": "dglx_dist.layers.relational:RelationalStages",
    }
)
"""Class of ``dgl.nn`` to "module:Class" of its stages."""

_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "GATv2Conv": "its logits are nonlinear in the sum of both ends, so an edge needs all columns of both",
        "EdgeConv": "it takes the largest of nonlinear messages",
        "PNAConv": "it takes the largest, the smallest and the spread of messages",
        "DotGatConv": "its logits are products of whole rows",
    }
)


def stages_of(module: nn.Module) -> Staged:
    """Return ``module`` as stages; its parameters are shared, not copied.

    Raises:
        ConfigError: nobody says how it splits; the message has the reason and what to do.
    """
    if isinstance(module, Staged):
        return module
    kind = type(module)
    if kind.__module__.startswith("dgl.") and kind.__name__ in _ADAPTERS:
        place, name = _ADAPTERS[kind.__name__].split(":")
        made: Staged = getattr(importlib.import_module(place), name)(module)
        return made
    why = _REFUSED.get(kind.__name__, "nothing says how it splits")
    raise ConfigError(
        f"{kind.__name__} cannot be cut by input columns: {why}. These can: {', '.join(_ADAPTERS)}, and what "
        "is written as dglx_dist.layers.Staged; any module trains under strategy='data_parallel'"
    )
