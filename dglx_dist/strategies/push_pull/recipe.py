"""What the model gives its first layer, read from one batch so that others can begin without the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from dgl.heterograph import DGLBlock
from torch import Tensor

from dglx_dist.errors import ConfigError
from dglx_dist.layers.staged import Staged, StageInput
from dglx_dist.strategies.push_pull.origins import Origin, Origins


@final
@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Where the first layer's arguments come from."""

    origin: Origin
    """Of the input rows."""
    keys: Mapping[str, str | None]
    """Edge argument to the block's edge data of which it is; None: something else."""

    def edges(self, layer: Staged, block: DGLBlock) -> dict[str, Tensor]:
        """Return the per-edge values of a block of which the model has not been called yet.

        Raises:
            ConfigError: one of them is no edge data.
        """
        if layer.edges_after_sync:
            return {}
        for name, key in self.keys.items():
            if key is None:
                raise ConfigError(
                    f"the model computes {name!r} of its first layer itself, so no batch can begin before "
                    "the model is called; use depth=1, or store the values as edge data and let the sampler "
                    "prefetch them (prefetch_edge_feats), or give the layer own_edges()"
                )
        found = {name: block.edata[key] for name, key in self.keys.items()}
        return {**layer.own_edges(block), **found}


def read_recipe(layer: Staged, given: StageInput, origins: Origins) -> Recipe:
    """Return where ``given`` comes from.

    Raises:
        ConfigError: the input rows are none that parts could make for other owners, or an edge argument is
            trained.
    """
    origin = origins.find(given.x)
    if origin is None:
        raise ConfigError(
            f"the first layer ({type(layer).__name__}) was given rows of shape {tuple(given.x.shape)} that "
            "are not the loader's features as they came, so the other ranks cannot do the same with their "
            "columns. Between the features and the first layer may stand torch.nn.LayerNorm, "
            "torch.nn.Dropout, or torch.nn.Embedding of the node ids in their place; anything else trains "
            "under strategy='data_parallel'"
        )
    own = layer.own_edges(given.block).keys()
    for name, values in given.edges.items():
        if values.requires_grad:
            raise ConfigError(
                f"the first layer's {name!r} is trained, and its gradient would need every part's rows; "
                "use strategy='data_parallel'"
            )
    keys = {name: _key_of(values, given.block) for name, values in given.edges.items() if name not in own}
    return Recipe(origin=origin, keys=keys)


def _key_of(values: Tensor, block: DGLBlock) -> str | None:
    for key, stored in block.edata.items():
        same = stored.shape == values.shape and stored.dtype == values.dtype
        if same and stored.data_ptr() == values.data_ptr():
            return str(key)
    return None
