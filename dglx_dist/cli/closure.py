"""What ``dglx inspect --closure`` shows: how a server's neighbourhood grows with each hop."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from dglx_dist.cli.report_command import draw_or_warn, show
from dglx_dist.errors import ConfigError
from dglx_dist.records import FEATURE

if TYPE_CHECKING:
    from dglx_dist.storage.manifest import Manifest
    from dglx_dist.storage.reader import StoredDataset

HOPS = 4
"""Followed when nobody says how many."""


def check_closure(closure: bool, *, hops: int | None, servers: int | None) -> None:
    """Raise ConfigError for what belongs to ``--closure`` where it is not asked for, or is out of range."""
    for name, value, least in (("hops", hops, 0), ("servers", servers, 1)):
        if value is not None and not closure:
            raise ConfigError(f"--{name} {value} is for --closure; add that")
        if value is not None and value < least:
            raise ConfigError(f"--{name} {value} must be at least {least}")


def show_closure(dataset: StoredDataset, picture: Path, *, hops: int | None, servers: int | None) -> None:
    """Print the table and draw it beside ``picture``.

    Raises:
        ConfigError: the dataset has several types, or fewer parts than ``servers``.
        StorageError: a part is not on this machine, or damaged.
    """
    from dglx_dist.graph.expansion import measure_expansion
    from dglx_dist.report.picture import draw_expansion
    from dglx_dist.report.table import expansion_table

    manifest = dataset.manifest
    found = measure_expansion(
        dataset, manifest.num_parts if servers is None else servers, HOPS if hops is None else hops
    )
    factors, foreign = found.factors.tolist(), found.foreign.max(axis=1).tolist()
    show(expansion_table(factors, foreign, feature_bytes(manifest), found.work.max(axis=1).tolist()))
    target = picture.with_name(f"{picture.stem}-closure.png")

    def draw() -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        draw_expansion(factors, target, title=f"{manifest.name}, {len(factors[0])} servers")

    draw_or_warn(draw, target, remedy="; say where with --picture FILE")


def feature_bytes(manifest: Manifest) -> int:
    """Return the bytes of one node's features; 0 without any."""
    from dglx_dist.storage.columns import numpy_dtype

    info = manifest.node_columns[manifest.node_types[0]].get(FEATURE)
    if info is None:
        return 0
    return numpy_dtype(info.dtype).itemsize * math.prod(info.row_shape)
