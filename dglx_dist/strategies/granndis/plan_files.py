"""A rank's plan in a folder: one file of numbers and one that says where each array stands in it.

Numbers are mapped, not read, so that ranks of a server may have a plan before it is used. A folder is written
under another name and renamed; see :mod:`dglx_dist.storage.folders`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from dglx_dist.records import Array
from dglx_dist.storage.folders import damaged, seal, unseal
from dglx_dist.strategies.granndis.plan import HaloLayer, RankPlan

VERSION = 3
NUMBERS = "numbers.npy"

_ARRAYS = ("indptr", "indices", "edge_ids", "halo_nodes")
_COUNTS = ("own_rows", "targets")


def write_plan(folder: Path, plan: RankPlan) -> None:
    """Write ``plan`` into ``folder``, which exists and is empty.

    Args:
        folder: Where to.
        plan: All of its arrays are int64.

    Raises:
        OSError: the system refuses; see ``named_failures``.
    """
    arrays = [np.ascontiguousarray(array, np.int64) for array in _arrays(plan)]
    flat = np.concatenate(arrays)
    np.save(folder / NUMBERS, flat, allow_pickle=False)
    head = {
        "lengths": [len(array) for array in arrays],
        "scalars": {name: getattr(plan, name) for name in _scalars()},
        "layers": [
            {name: getattr(layer, name) for name in _COUNTS}
            | {"receive": layer.receive, "send": [rank for rank, _ in layer.send]}
            for layer in _distinct(plan)
        ],
        "same_as_before": [bool(n) and layer is plan.layers[n - 1] for n, layer in enumerate(plan.layers)],
    }
    seal(folder, head)


def read_plan(folder: Path) -> RankPlan:
    """Return the plan in ``folder``, with arrays that are mapped; what is written to them stays in memory.

    Reads them once, to compare their checksum.

    Raises:
        StorageError: there is none, or it is damaged.
    """
    head = unseal(folder)
    try:
        flat = np.load(folder / NUMBERS, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError) as problem:
        raise damaged(folder, problem) from problem
    ends = np.cumsum([0, *head["lengths"]])
    pieces = iter([np.asarray(flat[first:last]) for first, last in pairwise(ends)])
    nodes = next(pieces)
    distinct = iter([_layer(told, pieces) for told in head["layers"]])
    layers: list[HaloLayer] = []
    for is_same in head["same_as_before"]:
        layers.append(layers[-1] if is_same else next(distinct))
    return RankPlan(nodes=nodes, layers=tuple(layers), **head["scalars"])


def _scalars() -> tuple[str, ...]:
    return tuple(field.name for field in fields(RankPlan) if field.name not in ("nodes", "layers"))


def _distinct(plan: RankPlan) -> list[HaloLayer]:
    """Return the layers that are not the one before: deep models have many on one structure."""
    return [one for n, one in enumerate(plan.layers) if not n or one is not plan.layers[n - 1]]


def _arrays(plan: RankPlan) -> Iterator[Array]:
    yield plan.nodes
    for layer in _distinct(plan):
        for name in _ARRAYS:
            yield getattr(layer, name)
        for _, rows in layer.send:
            yield rows


def _layer(told: Mapping[str, Any], pieces: Iterator[Array]) -> HaloLayer:
    scalars: dict[str, Any] = {name: int(told[name]) for name in _COUNTS}
    arrays: dict[str, Any] = {name: next(pieces) for name in _ARRAYS}
    return HaloLayer(
        **scalars,
        **arrays,
        receive=tuple((int(rank), int(count)) for rank, count in told["receive"]),
        send=tuple((int(rank), next(pieces)) for rank in told["send"]),
    )
