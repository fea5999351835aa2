"""From a module to its stages."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, TypeAlias

from torch import nn

from dglx_dist.errors import ConfigError
from dglx_dist.layers.staged import Staged

Sync: TypeAlias = Literal["columns", "inputs"]
"""What the parts add up: sums over in-edges, or, where need be, projected source rows."""

_ADAPTERS: Mapping[str, str] = MappingProxyType(
    {
        "SAGEConv": "dglx_dist.layers.sage:SageStages",
        "GraphConv": "dglx_dist.layers.graph_conv:GraphConvStages",
        "SGConv": "dglx_dist.layers.sgc:SgcStages",
        "GINConv": "dglx_dist.layers.gin:GinStages",
        "GATConv": "dglx_dist.layers.gat:GatStages",
        "RelGraphConv": "dglx_dist.layers.relational:RelationalStages",
    }
)
"""Class of ``dgl.nn`` to "module:Class" of its stages."""

_BY_ROWS: Mapping[str, str] = MappingProxyType(
    {
        "SAGEConv": "dglx_dist.layers.row_sums:sage_of_rows",
        "GATConv": "dglx_dist.layers.row_sums:GatRowStages",
        "GATv2Conv": "dglx_dist.layers.row_sums:GatV2Stages",
        "EdgeConv": "dglx_dist.layers.row_sums:EdgeConvStages",
    }
)
"""The same under ``sync="inputs"``; others are as in :data:`_ADAPTERS`."""

_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "GATv2Conv": "its logits are nonlinear in the sum of both ends, so an edge needs all columns of both",
        "EdgeConv": "it takes the largest of its messages, and the largest of sums is no sum of the largest",
        "PNAConv": "it takes the largest, the smallest and the spread of messages of whole rows",
        "DGNConv": "it takes the largest, the smallest and the spread of messages of whole rows",
        "DotGatConv": "its logits are products of whole rows",
        "AGNNConv": "its logits are angles between whole rows",
        "GatedGraphConv": "it passes whole rows through a gated unit",
    }
)


def stages_of(module: nn.Module, sync: Sync = "columns") -> Staged:
    """Return ``module`` as stages; its parameters are shared, not copied.

    Args:
        module: A convolution.
        sync: "columns": the parts add up sums over in-edges. "inputs": also layers that are no such sum, but
            begin with a linear map of each source row; the parts add up those rows, (L0, width) of them.

    Raises:
        ConfigError: nobody says how it splits; the message has the reason and what to do.
    """
    if isinstance(module, Staged):
        return module
    kind = type(module)
    known = {**_ADAPTERS, **_BY_ROWS} if sync == "inputs" else _ADAPTERS
    if kind.__module__.startswith("dgl.") and kind.__name__ in known:
        place, name = known[kind.__name__].split(":")
        made: Staged = getattr(importlib.import_module(place), name)(module)
        return made
    why = _REFUSED.get(kind.__name__, "nothing says how it splits")
    other = "With sync='inputs' its projected rows are sent. " if kind.__name__ in _BY_ROWS else ""
    raise ConfigError(
        f"{kind.__name__} cannot be cut by input columns: {why}. {other}These can be cut: "
        f"{', '.join(known)}, and what is written as dglx_dist.layers.Staged; any module trains under "
        "strategy='data_parallel'"
    )
