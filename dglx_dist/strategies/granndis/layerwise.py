"""What a model must be so that its layers can be computed rank by rank: rows meet along edges only."""

from __future__ import annotations

from typing import Any

import torch
from dgl.nn.pytorch import glob
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dglx_dist.errors import ConfigError
from dglx_dist.strategies.granndis.halo_block import HaloBlock


def check_rows_stay_apart(model: nn.Module) -> None:
    """Raise ConfigError if a module of ``model`` mixes rows of nodes that are no neighbours."""
    for name, module in model.named_modules():
        where = (
            f"{name!r} is a {type(module).__name__}" if name else f"the model is a {type(module).__name__}"
        )
        if isinstance(module, _BatchNorm):
            raise ConfigError(
                f"{where}: its statistics would be those of this rank's rows, and rows that several ranks "
                "hold would count twice; use torch.nn.LayerNorm, or strategy='data_parallel'"
            )
        # Compared by where it is defined: the module has no common base class.
        if type(module).__module__ == glob.__name__:
            raise ConfigError(
                f"{where}, which reads all nodes of a graph at once, while a rank has some of them; layers "
                "must compute a node's row from its in-neighbours' alone: leave it out of the wrapped model, "
                "and apply it to the rows of all nodes, as dx.layerwise_inference gives them"
            )


def check_rows_out(output: Any, blocks: list[HaloBlock]) -> None:
    """Raise ConfigError if a model returned the rows of an earlier level than that of the seeds.

    Args:
        output: What the model returned; only a tensor of rows is looked at.
        blocks: Those it was given, input-most first.
    """
    if not torch.is_tensor(output) or output.dim() < 2:
        return
    targets = blocks[-1].num_dst_nodes()
    earlier = {block.own_rows for block in blocks} - {targets}
    if len(output) != targets and len(output) in earlier:
        raise ConfigError(
            f"the model returned {len(output)} rows for {targets} seeds, as if it had fewer layers than the "
            f"{len(blocks)} blocks it was given; it must take one block after the other, and the sampler "
            "must have as many layers as the model has convolutions"
        )
