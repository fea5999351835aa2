"""A staged layer with one part's rows of its weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dglx_dist.layers.columns import Columns
from dglx_dist.layers.staged import Staged


def part_of(layer: Staged, runs: Sequence[Columns]) -> Staged:
    """Return a copy of ``layer`` whose cut weights have the columns ``runs`` only; others are copied whole.

    The copy is a leaf of its own: training it does not touch ``layer``.
    """
    part = copy.deepcopy(layer)
    for name, dimension in layer.cut.items():
        whole = layer.get_parameter(name)
        owner, _, last = name.rpartition(".")
        piece = cut_out(whole.detach(), runs, dimension)
        trained = nn.Parameter(piece, requires_grad=whole.requires_grad)
        part.get_submodule(owner).register_parameter(last, trained)
    return part


def cut_out(whole: Tensor, runs: Sequence[Columns], dimension: int) -> Tensor:
    """Return a copy of the ``runs`` of a tensor along ``dimension``, one after the other."""
    return torch.cat([whole.narrow(dimension, run.first, len(run)) for run in runs], dim=dimension)


def join_parts(pieces: Sequence[Tensor], runs: Sequence[Sequence[Columns]], dimension: int) -> Tensor:
    """Return the uncut tensor of which part p has the columns ``runs[p]``: what :func:`cut_out` undoes."""
    placed = [
        (run.first, piece)
        for part, cuts in zip(pieces, runs, strict=True)
        for run, piece in zip(cuts, torch.split(part, [len(cut) for cut in cuts], dim=dimension), strict=True)
    ]
    return torch.cat([piece for _, piece in sorted(placed, key=lambda pair: pair[0])], dim=dimension)
