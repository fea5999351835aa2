"""What a step of a model allocates, from one step on a tiny graph."""

from __future__ import annotations

import logging

import torch
from torch import nn

from dglx_dist.cluster.topology import silence_profiler
from dglx_dist.errors import ConfigError
from dglx_dist.planner.model_shape import ModelShape
from dglx_dist.records import EDGE_TYPE
from dglx_dist.strategies.granndis.rehearsal import Rehearsal, rehearse

log = logging.getLogger(__name__)


def rehearsed(module: nn.Module, shape: ModelShape, *, with_halo: bool) -> Rehearsal | None:
    """Return the allocations of a step of ``module``.

    Args:
        module: Called as ``module(blocks, features)``; not changed.
        shape: Of it.
        with_halo: Whether layers exchange rows, as those of whole graphs do.
    """
    kind = next((one.dtype for one in module.parameters() if one.is_floating_point()), torch.float32)
    row = torch.zeros(1, shape.features, dtype=kind)
    silence_profiler()
    try:
        return rehearse(
            module,
            len(shape.layers),
            row,
            with_halo=with_halo,
            etype=EDGE_TYPE,
            out_degrees=lambda ids: torch.ones(len(ids), dtype=torch.int64),
        )
    except ConfigError as problem:
        log.info("memory is estimated from widths: %s", problem)
        return None
