"""A graph in figures: counted from a partitioned dataset, or told."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from dglx_dist.errors import ConfigError
from dglx_dist.graph.placement import Placement
from dglx_dist.planner.halo_bytes import topology_of
from dglx_dist.planner.records import GraphStats
from dglx_dist.records import FEATURE, NODE_TYPE
from dglx_dist.storage.columns import numpy_dtype
from dglx_dist.storage.manifest import Manifest
from dglx_dist.storage.reader import StoredDataset

TRAIN_MASK = "train_mask"
METIS_CUT, METIS_FLOOR = 0.35, 0.05
"""Of the edges that a random partition cuts, those that METIS still cuts on graphs with communities; and the
least share of all edges. Told graphs only."""
_SCATTERING = ("random", "hash")
_MOST_NODES, _MOST_DEGREE, _MOST_COLUMNS = 10**15, 10**6, 10**6
"""What is above is a slip of the pen."""


def of_dataset(dataset: StoredDataset, servers: int) -> GraphStats:
    """Return the figures of a dataset on so many servers; reads all its edges once.

    Args:
        dataset: With all its parts, of one node and edge type, with ``feat`` and ``train_mask``.
        servers: Each has an equal number of consecutive parts, as far as it goes.

    Raises:
        ConfigError: several types, columns that are missing, or fewer parts than servers.
        StorageError: a part is missing or damaged.
    """
    manifest = dataset.manifest
    check_plannable(manifest, str(dataset.folder))
    etype = manifest.edge_types[0]
    placement = Placement(manifest.num_parts, topology_of(servers, 1))
    bounds = placement.server_offsets(manifest.node_offsets[NODE_TYPE])
    cut, squares, train = 0, 0.0, 0
    for number in range(manifest.num_parts):
        part, server = dataset.part(number), int(placement.server_of_part[number])
        indices = part.indices(etype)
        cut += int(np.count_nonzero((indices < bounds[server]) | (indices >= bounds[server + 1])))
        degrees = np.diff(part.indptr(etype)).astype(np.float64)
        squares += float(degrees @ degrees)
        train += int(np.count_nonzero(part.node_data(NODE_TYPE, TRAIN_MASK)))
    nodes, edges = manifest.num_nodes(NODE_TYPE), manifest.num_edges(etype)
    return replace(
        of_manifest(manifest, servers, train),
        edge_cut=cut / max(edges, 1),
        degree_spread=squares * nodes / max(edges, 1) ** 2,
    )


def of_manifest(manifest: Manifest, servers: int, train_nodes: int) -> GraphStats:
    """Return the figures of a dataset without reading it: the cut is that of its parts, the spread unknown.

    Args:
        manifest: Of one node and edge type, with ``feat``.
        servers: S.
        train_nodes: How many are trained on.
    """
    info, etype = manifest.node_columns[NODE_TYPE][FEATURE], manifest.edge_types[0]
    cut, parts = float(str(manifest.quality.get("edge_cut", 0.0))), manifest.num_parts
    # Of P parts on fewer servers, neighbours on one server are no longer cut.
    fewer = (servers - 1) / servers * parts / max(parts - 1, 1)
    return GraphStats(
        name=manifest.name,
        nodes=manifest.num_nodes(NODE_TYPE),
        edges=manifest.num_edges(etype),
        features=math.prod(info.row_shape),
        feature_bytes=numpy_dtype(info.dtype).itemsize * math.prod(info.row_shape),
        classes=int(manifest.num_classes.get(NODE_TYPE, 0)),
        train_nodes=train_nodes,
        edge_cut=cut * fewer,
        method=manifest.method,
    )


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What somebody tells of a graph that is not here."""

    nodes: float
    edges: float
    features: int
    classes: int = 50
    train_share: float = 0.1
    """Of the nodes, those that are trained on."""
    method: str = "metis"
    """``random`` or ``hash``, or anything that keeps neighbours together."""
    edge_cut: float | None = None
    """Share of edges between servers; None: assumed from the method."""
    degree_spread: float = 4.0
    """E[d^2] / E[d]^2 of the in-degrees."""
    feature_itemsize: int = 4


def told(figures: Figures, servers: int) -> GraphStats:
    """Return a graph that is known by figures alone, on so many servers.

    Raises:
        ConfigError: a figure is out of range.
    """
    for name, value, least, most in (
        ("nodes", figures.nodes, 1, _MOST_NODES),
        ("edges", figures.edges, 0, _MOST_NODES * _MOST_DEGREE),
        ("features", figures.features, 1, _MOST_COLUMNS),
        ("classes", figures.classes, 1, _MOST_COLUMNS),
        ("degree-spread", figures.degree_spread, 1, _MOST_NODES),
    ):
        if not least <= value <= most:
            raise ConfigError(f"--{name} {value} must be from {least} to {most:g}")
    random = (servers - 1) / servers
    kept = max(METIS_CUT * random, METIS_FLOOR * (servers > 1))
    assumed = random if figures.method in _SCATTERING else kept
    # One server has no other, whatever is told.
    cut = assumed if figures.edge_cut is None or servers == 1 else figures.edge_cut
    if not 0 < figures.train_share <= 1:
        raise ConfigError(f"--train-share {figures.train_share:g} must be above 0 and at most 1")
    if not 0 <= cut <= 1:
        raise ConfigError(f"--edge-cut {cut:g} must be from 0 to 1: a share of the edges")
    return GraphStats(
        name="told by figures",
        nodes=int(figures.nodes),
        edges=int(figures.edges),
        features=figures.features,
        feature_bytes=figures.feature_itemsize * figures.features,
        classes=figures.classes,
        train_nodes=max(int(figures.train_share * figures.nodes), 1),
        edge_cut=cut,
        method=figures.method,
        degree_spread=figures.degree_spread,
        counted=False,
    )


def check_plannable(manifest: Manifest, where: str) -> None:
    """Raise ConfigError unless a plan can be made for the dataset."""
    if len(manifest.node_types) != 1 or len(manifest.edge_types) != 1:
        raise ConfigError(
            f"{where} has {len(manifest.node_types)} node and {len(manifest.edge_types)} edge types, and "
            "only data_parallel trains on several: there is nothing to choose; take --strategy data_parallel"
        )
    columns = manifest.node_columns[manifest.node_types[0]]
    for name in (FEATURE, TRAIN_MASK):
        if name not in columns:
            raise ConfigError(
                f"{where} has no node data {name!r} (known: {', '.join(columns) or 'none'}); partition a "
                "graph that has it"
            )


def check_train_nodes(count: int, where: str) -> None:
    """Raise ConfigError where there is nothing to train on."""
    if not count:
        raise ConfigError(
            f"node data {TRAIN_MASK!r} of {where} marks no node: there is nothing to plan for; partition a "
            "graph with training nodes"
        )
