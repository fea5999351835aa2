"""What a step of a model allocates, from one step on a tiny graph."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from torch import nn

from dglx_dist.cluster.topology import silence_profiler
from dglx_dist.errors import ConfigError
from dglx_dist.planner.memory import MemoryModel
from dglx_dist.planner.model_shape import ModelShape
from dglx_dist.records import EDGE_TYPE
from dglx_dist.strategies.granndis.rehearsal import Rehearsal, rehearse

log = logging.getLogger(__name__)


def with_rehearsals(model: MemoryModel, module: nn.Module, *, whole: bool) -> MemoryModel:
    """Return ``model`` with what steps of ``module`` allocate, where they can be rehearsed.

    Args:
        model: Of its shape.
        module: Called as ``module(blocks, features)``; not changed.
        whole: Whether steps on whole graphs, whose layers exchange rows, are rehearsed too.
    """
    return replace(
        model,
        of_batches=_rehearsed(module, model.shape, with_halo=False),
        of_graphs=_rehearsed(module, model.shape, with_halo=True) if whole else None,
    )


def _rehearsed(module: nn.Module, shape: ModelShape, *, with_halo: bool) -> Rehearsal | None:
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
