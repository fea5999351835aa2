"""A staged layer with one part's rows of its weights."""

from __future__ import annotations

import copy

import torch
from torch import nn

from dglx_dist.layers.columns import Columns
from dglx_dist.layers.staged import Staged


def part_of(layer: Staged, columns: Columns) -> Staged:
    """Return a copy of ``layer`` whose cut weights have ``columns`` only; the others are copied whole.

    The copy is a leaf of its own: training it does not touch ``layer``.
    """
    part = copy.deepcopy(layer)
    for name, dimension in layer.cut.items():
        whole = layer.get_parameter(name)
        owner, _, last = name.rpartition(".")
        piece = whole.detach().narrow(dimension, columns.first, len(columns)).clone()
        trained = nn.Parameter(piece, requires_grad=whole.requires_grad)
        part.get_submodule(owner).register_parameter(last, trained)
    return part


def join_parts(pieces: list[torch.Tensor], dimension: int) -> torch.Tensor:
    """Return the uncut weight of all parts' ``pieces``, in the order of the parts."""
    return torch.cat(pieces, dim=dimension)
