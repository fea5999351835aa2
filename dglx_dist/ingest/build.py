"""From a description to a dataset in one part, within a limit of memory."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dglx_dist.errors import ConfigError
from dglx_dist.ingest.config import EdgeSpec, FeatureSpec, IngestConfig, NodeSpec
from dglx_dist.ingest.edges import IngestedEdges, ingest_edges
from dglx_dist.ingest.files import FileSet
from dglx_dist.ingest.memory import frugal, open_budget
from dglx_dist.ingest.nodes import IngestedNodes, ingest_nodes
from dglx_dist.ingest.tables import Table
from dglx_dist.ingest.tensors import Place
from dglx_dist.ingest.transforms import make_transforms
from dglx_dist.progress import progress
from dglx_dist.records import SPLITS, EdgeType
from dglx_dist.storage.folders import named_failures, partial_folder
from dglx_dist.storage.manifest import Manifest, write_manifest
from dglx_dist.storage.process_memory import peak
from dglx_dist.storage.target import check_target, put_in_place

METHOD = "ingest"
"""What the manifest says in place of a partitioner."""
REVERSE = "-rev"
"""Ends the relation of reverse edges, as in GraphStorm."""


@dataclass(frozen=True, kw_only=True)
class IngestPlan:
    """How and where to.

    Raises:
        ConfigError: the seed is negative.
    """

    out: Path
    memory: int
    """Bytes that the process may hold at most, program and libraries included."""
    name: str | None = None
    """Of the graph; None: that of the folder."""
    seed: int = 0
    """Of the splits."""
    reverse_edges: bool = False
    overwrite: bool = False
    workspace: Path | None = None
    """For what does not fit into memory meanwhile; None: beside ``out``."""
    settled: Path | None = None
    """Where :func:`write_settled` is going to write, to be told beforehand where that cannot be."""

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigError(f"the seed is {self.seed}; it must be at least 0")


@dataclass(frozen=True, kw_only=True)
class Ingested:
    """What came of it."""

    manifest: Manifest
    settled: Mapping[str, Any]
    """The description with what its transforms found out, to treat later tables alike."""
    peak_bytes: int
    """The most that the process has held, since it was started."""


def ingest(config: IngestConfig, plan: IngestPlan) -> Ingested:
    """Read the tables and write a dataset of one part, which appears whole or not at all; one process.

    Holds pieces of tables, buckets of ids and of edges, and no array over all nodes or edges. The disk needs
    room for about the edges three times over, beside the dataset.

    Args:
        config: What is in the tables.
        plan: How and where to.

    Raises:
        ConfigError: the memory does not hold the program, or what must be sorted together; a setting of a
            transform cannot be honoured; a reverse type exists already; or other files were to be in
            the dataset.
        DatasetError: naming file, row and column of what is wrong in a table.
        StorageError: the target holds something else, or the disk refuses.
    """
    out = plan.out.absolute()
    check_target(out, plan.overwrite)
    workspace = (plan.workspace or out.parent).absolute()
    for what, path in (("workspace", workspace), ("output-conf-file", plan.settled)):
        if path is not None and path.resolve().is_relative_to(out.resolve()):
            raise ConfigError(f"the {what} {path} is in {out}, which holds a dataset only; choose another")
    _check_tables(config)
    reverse = _reverse_types(config) if plan.reverse_edges else {}
    is_text = _text_types(config)
    budget = open_budget(plan.memory)
    with (
        frugal(),
        named_failures(out),
        partial_folder(out) as partial,
        partial_folder(workspace / f"{out.name}.work") as work,
        progress("Ingesting", _num_steps(config, len(reverse))) as advance,
    ):
        place = Place(folder=partial, work=work, budget=budget, advance=advance)
        nodes = {}
        for i, node in enumerate(config.nodes):
            own = replace(place, work=work / f"nodes{i}")
            nodes[node.ntype] = ingest_nodes(node, is_text=is_text[node.ntype], seed=plan.seed, place=own)
            advance.say(f"{nodes[node.ntype].ids.num_nodes} nodes {node.ntype!r}")
        edges = {}
        for i, edge in enumerate(config.edges):
            own = replace(place, work=work / f"edges{i}")
            other = reverse.get(edge.etype)
            edges[edge.etype] = ingest_edges(edge, nodes, reverse=other, seed=plan.seed, place=own)
            advance.say(f"{edges[edge.etype].num_edges} edges {':'.join(edge.etype)}")
        settled = _settled(config, nodes, edges)
        manifest = write_manifest(_manifest(config, plan, reverse, place, nodes, edges), partial)
        put_in_place(partial, out, plan.overwrite)
    return Ingested(manifest=manifest, settled=settled, peak_bytes=peak())


def write_settled(ingested: Ingested, path: Path) -> None:
    """Write the description with what the transforms found out.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(ingested.settled, indent=1) + "\n", encoding="utf-8")
    except OSError as problem:
        raise ConfigError(f"{path} cannot be written: {problem.strerror}; choose another place") from problem


def _check_tables(config: IngestConfig) -> None:
    """Find out before anything is read in full whether there are all columns, and settings make sense."""
    specs: tuple[NodeSpec | EdgeSpec, ...] = (*config.nodes, *config.edges)
    for spec in specs:
        for feature in spec.features:
            make_transforms(feature)
        if isinstance(spec, EdgeSpec):
            ids: tuple[str | None, ...] = (spec.source_column, spec.destination_column)
        else:
            ids = (spec.id_column,)
        label = spec.label
        others = [column for feature in spec.features for column in feature.columns]
        named = (*ids, *others, None if label is None else label.column)
        Table(spec.files, 1).check([column for column in named if column is not None])
        if label is not None and label.id_column is not None:
            for files in label.files.values():
                Table(files, 1).check([label.id_column])


def _reverse_types(config: IngestConfig) -> dict[EdgeType, EdgeType]:
    own = {edge.etype for edge in config.edges}
    reverse = {etype: (etype[2], f"{etype[1]}{REVERSE}", etype[0]) for etype in own}
    for etype, other in reverse.items():
        if other in own:
            raise ConfigError(
                f"{config.path}: reverse edges of {etype} would be {other}, which is described already; "
                "leave --add-reverse-edges out"
            )
    return reverse


def _text_types(config: IngestConfig) -> dict[str, bool]:
    """Return which node types have texts for ids: all but those that only Parquet whole numbers name."""
    is_text = {}
    for node in config.nodes:
        named = [(node.files, node.id_column)]
        for edge in config.edges:
            named += [(edge.files, edge.source_column)] if edge.etype[0] == node.ntype else []
            named += [(edge.files, edge.destination_column)] if edge.etype[2] == node.ntype else []
        # Row numbers are numbers, also where a CSV file names them.
        is_text[node.ntype] = node.id_column is not None and not all(
            _is_whole_number(files, column) for files, column in named if column is not None
        )
    return is_text


def _is_whole_number(files: FileSet, column: str) -> bool:
    return Table(files, 0).is_whole_number(column)


def _num_steps(config: IngestConfig, num_reverse: int) -> int:
    def tensors(spec: NodeSpec | EdgeSpec) -> int:
        return len({feature.name for feature in spec.features}) + (
            0 if spec.label is None else 1 + len(SPLITS)
        )

    nodes = sum(2 + tensors(spec) for spec in config.nodes)
    return nodes + sum(5 + tensors(spec) for spec in config.edges) + 3 * num_reverse


def _settled(
    config: IngestConfig, nodes: Mapping[str, IngestedNodes], edges: Mapping[EdgeType, IngestedEdges]
) -> Mapping[str, Any]:
    """Return the description with what was found out; the order of types and features is that of the file."""
    told = copy.deepcopy(dict(config.raw))
    for entry, node in zip(told["nodes"], config.nodes, strict=True):
        _settle(entry, node.features, nodes[node.ntype].settled)
    for entry, edge in zip(told["edges"], config.edges, strict=True):
        _settle(entry, edge.features, edges[edge.etype].settled)
    return told


def _settle(
    entry: dict[str, Any], features: Sequence[FeatureSpec], settled: Sequence[Mapping[str, Any]]
) -> None:
    for feature, spec, found in zip(entry.get("features") or [], features, settled, strict=True):
        if found:
            feature["transform"] = {"name": spec.transform, **found}


def _manifest(
    config: IngestConfig,
    plan: IngestPlan,
    reverse: Mapping[EdgeType, EdgeType],
    place: Place,
    nodes: Mapping[str, IngestedNodes],
    edges: Mapping[EdgeType, IngestedEdges],
) -> Manifest:
    columns = {etype: dict(one.columns) for etype, one in edges.items()}
    counts = {etype: one.num_edges for etype, one in edges.items()}
    for etype, other in reverse.items():
        columns[other], counts[other] = {}, counts[etype]
    names = {ntype: list(one.class_names) for ntype, one in nodes.items() if one.class_names}
    names |= {":".join(etype): list(one.class_names) for etype, one in edges.items() if one.class_names}
    return Manifest(
        name=plan.name or plan.out.absolute().name,
        num_parts=1,
        node_offsets={t: np.array([0, one.ids.num_nodes], np.int64) for t, one in nodes.items()},
        edge_offsets={etype: np.array([0, count], np.int64) for etype, count in counts.items()},
        node_columns={ntype: one.columns for ntype, one in nodes.items()},
        edge_columns=columns,
        num_classes={t: one.num_classes for t, one in nodes.items() if one.num_classes is not None},
        user_ids={ntype: one.user_ids for ntype, one in nodes.items() if one.user_ids is not None},
        method=METHOD,
        seed=plan.seed,
        parameters={"description": _settled(config, nodes, edges), "class_names": names},
        files=place.files,
    )
