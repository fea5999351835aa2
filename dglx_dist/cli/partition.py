"""Define the commands ``dglx ingest`` and ``dglx partition``."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dglx_dist.cli.common import command, list_possible_labels, suggest_training_command, write
from dglx_dist.comm.topology import is_launched_by_torchrun, read_topology
from dglx_dist.data.external_memory import Ranks
from dglx_dist.data.ingest.config import IngestPlan, read_config
from dglx_dist.data.partition.base import PartitionOptions, PartitionPlan
from dglx_dist.data.sources import FORMATS, LINE_FORMATS
from dglx_dist.data.storage.reader import StoredDataset
from dglx_dist.errors import ConfigError
from dglx_dist.options import (
    find_address,
    find_flag,
    format_location,
    named_values,
    option,
    parse_fractions,
    refuse_signed,
    select_common_fields,
)
from dglx_dist.records import FEATURE, LABEL, SPLITS, Array, RawGraph
from dglx_dist.report.tables import plural


@dataclass(frozen=True, kw_only=True)
class IngestCommand(IngestPlan):
    """Options for ``dglx ingest``."""

    config: Path = option(
        ...,
        "Configuration of the tables, in the format of GraphStorm's gconstruct (docs/guides/ingest.md).",
        metavar="CONFIG.json",
    )


@command(IngestCommand)
def ingest(config: IngestCommand) -> None:
    """Build a dataset from CSV and Parquet tables larger than memory. Ids may be strings.

    The dataset has one part and is ready for `dglx train`. `dglx partition` makes more parts.

    Example: `dglx ingest shop.json --out data/shop --memory 500MB --add-reverse-edges`
    """
    from dglx_dist.data.ingest.graph import ingest as build
    from dglx_dist.data.ingest.graph import write_description
    from dglx_dist.data.storage.remote import stage_dataset

    out = format_location(config.out)
    with stage_dataset(out, config.overwrite) as target:
        result = build(read_config(config.config), replace(config, out=target))
    manifest = result.manifest
    for ntype, columns in manifest.node_columns.items():
        ids = manifest.user_ids.get(ntype, "row numbers")
        names = ", ".join(columns) or "no tensors"
        write(f"{manifest.num_nodes(ntype)} nodes {ntype!r}, ids: {ids}; {names}")
    for etype, columns in manifest.edge_columns.items():
        names = ", ".join(columns) or "no tensors"
        write(f"{manifest.num_edges(etype)} edges {':'.join(etype)}; {names}")

    write(f"peak memory {result.peak_bytes / 10**6:.0f} MB of {config.memory}")
    if config.output_description is not None:
        write_description(result, config.output_description)
        write(f"detected settings: {config.output_description}")

    commands = f"dglx partition {shlex.quote(out)} --parts 4 --out DIR"
    train = suggest_training_command(out, manifest.node_columns, manifest.edge_columns)
    if train:
        commands = f"{train} or {commands}"
    write(f"written to {out}; next: {commands}")


@dataclass(frozen=True, kw_only=True)
class PartitionCommand(PartitionOptions, PartitionPlan):
    """Options for ``dglx partition``."""

    data: str = option(
        ...,
        "Graph to partition: `synthetic`, `synthetic:nodes=20000,degree=25,seed=0`, "
        f"{FORMATS}, `dgl:CoraGraphDataset`, `ogb:ogbn-arxiv`, or a dataset of one part from `dglx ingest`.",
        metavar="DATA",
    )
    out: Path = option(
        Path("data/partitioned"),
        "Output folder or address (s3://...). Must be empty or not exist.",
        metavar="DIR",
    )
    num_parts: int = option(
        2, "Number of parts. It does not depend on the number of ranks and servers.", flag="--parts"
    )
    id: str | None = option(
        None,
        "Name of the id column in node tables, or several names separated by commas if tables "
        "differ. '' "
        "numbers all nodes by row, and 'COLUMN,' those of tables without the column. Common names are found.",
        metavar="COLUMN",
    )
    format: Any = option(
        "dglx",
        "Output format: dglx, or dgl for DGL's own load_partition. Or the input format of a "
        "text file of "
        "edges: triples, edges or interactions.",
        kind=str,
    )
    source_options: Mapping[str, object] = named_values("Option of the dataset source. Repeatable.")
    split: tuple[float, ...] | None = option(
        None,
        "Draw a split of the labelled nodes: shares of train, validation and test. For data without a split.",
        metavar="T,V,T",
        parse=parse_fractions,
    )

    time: str | None = option(
        None,
        "Edge column of times, by which the in-edges of each node are sorted for "
        "dx.TemporalNeighborSampler: "
        "integers, floats or ISO dates.",
        metavar="COLUMN",
    )
    add_time: bool = option(
        False,
        "DATA is a partitioned dataset. Sort its edges by the column of --time, and write no other one.",
    )
    given: frozenset[str] = frozenset()
    """Fields whose options are on the command line."""

    def __post_init__(self) -> None:
        refuse_signed(self, ("out",))
        if self.add_time:
            self._check_add_time()

        source_options = dict(self.source_options)
        if self.id is not None:
            source_options["id"] = self.id
        if self.format in LINE_FORMATS:
            # Here the format is the source's. The dataset is written in the default format.
            source_options["format"] = self.format
            object.__setattr__(self, "format", "dglx")
        elif self.format == "dgl" and self.time is not None:
            raise ConfigError("DGL's files have no order by time. Leave out --time, or use --format dglx.")
        elif self.format not in ("dglx", "dgl"):
            raise ConfigError(
                f"format is {self.format!r}, but must be 'dglx' or 'dgl', "
                f"or for a text file of edges one of {', '.join(LINE_FORMATS)}"
            )

        object.__setattr__(self, "source_options", source_options)
        if self.split is not None:
            check_shares(self.split, self.memory)
        super().__post_init__()

    def _check_add_time(self) -> None:
        """Raise ConfigError if ``--time`` is missing, or if another option is given that has no effect."""
        if self.time is None:
            raise ConfigError("--add-time sorts edges by a column. Name it with --time COLUMN.")
        unused = sorted(self.given - {"data", "time", "add_time"})
        if unused:
            flags = ", ".join(find_flag(PartitionCommand, name) for name in unused)
            raise ConfigError(
                f"--add-time only sorts the edges of {self.data}, so {flags} would have no "
                "effect. Leave it out, or partition again without --add-time."
            )


def check_shares(shares: Sequence[float], memory: object) -> None:
    """Raise ConfigError unless ``shares`` are three valid split shares, and ``memory`` is None."""
    # The shares are parsed decimals. Their sum may exceed 1 by a rounding error.
    is_sum_valid = 0 < sum(shares) <= 1 + 1e-9
    if len(shares) != len(SPLITS) or min(shares) < 0 or not is_sum_valid:
        raise ConfigError(
            f"--split {','.join(map(str, shares))} must be shares of train, validation and "
            "test nodes, together at most 1, such as 0.8,0.1,0.1"
        )
    if memory is not None:
        raise ConfigError("--split draws in memory, so it cannot be used with --memory. Use `dglx ingest`.")


def draw_splits(graph: RawGraph, shares: Sequence[float], seed: int) -> RawGraph:
    """Draw random train, val and test masks for each node type that has labels and no split.

    Only labelled nodes are drawn. Raises ConfigError if there is no such type, or if a type gets no training
    node.
    """
    from dglx_dist.data.ingest.tensors import draw_split_codes

    node_data = {ntype: dict(columns) for ntype, columns in graph.node_data.items()}
    for ntype in _find_types_without_split(node_data):
        columns = node_data[ntype]
        has_label = _mark_labelled(np.asarray(columns[LABEL]))
        num_labelled = int(has_label.sum())
        (codes,) = draw_split_codes([has_label], num_labelled, shares, seed)
        if not (codes == 0).any():
            raise ConfigError(
                f"--split {','.join(map(str, shares))} selects no training node of "
                f"{num_labelled} labelled nodes of type {ntype!r}. Give the first share a "
                "larger value, or label more nodes."
            )
        columns |= {name: codes == code for code, name in enumerate(SPLITS)}
    return replace(graph, node_data=node_data)


def _find_types_without_split(node_data: Mapping[str, Mapping[str, object]]) -> list[str]:
    """Return the node types that have labels but no mask. Raise ConfigError if there are none."""
    labelled = [ntype for ntype, columns in node_data.items() if LABEL in columns]
    if not labelled:
        raise ConfigError(
            "--split draws a split of labelled nodes, but the data has no labels (column "
            f"{LABEL!r}). Add or rename a column, or leave --split out."
        )

    masks = {ntype: node_data[ntype].keys() & {*SPLITS} for ntype in labelled}
    without_split = [ntype for ntype in labelled if not masks[ntype]]
    if not without_split:
        names = ", ".join(sorted(set().union(*masks.values())))
        raise ConfigError(
            f"--split draws a split of labels without one, but the data has {names}. Leave "
            "--split out to use them, or remove them (column 'split' in tables) to draw "
            "another split."
        )
    return without_split


def _mark_labelled(labels: Array) -> Array:
    """Return whether each node has a label. A node without one has NaN, or a negative class."""
    rows = labels.reshape(len(labels), -1)
    is_valid = np.isfinite(rows) if rows.dtype.kind == "f" else rows >= 0
    has_label: Array = np.all(is_valid, axis=1)
    return has_label


def check_time(graph: RawGraph, time: str) -> None:
    """Raise ConfigError unless an edge type of ``graph`` has the column ``time`` with one number per edge."""
    # This module imports Numba, which is slow.
    from dglx_dist.data.times import find_time_dtype

    columns = {etype: data[time] for etype, data in graph.edge_data.items() if time in data}
    for etype, column in columns.items():
        find_time_dtype(column.dtype.name, column.shape[1:], f"the column {time!r} of {etype}")
    if not columns:
        known = ", ".join(sorted(set().union(*graph.edge_data.values()))) or "none"
        raise ConfigError(
            f"--time {time}: no edge type has this column (known: {known}). "
            "Name another column, or leave --time out."
        )


_LONGEST_WAIT_S = 6 * 3600.0
"""Time that ranks wait for rank 0, which assigns the smallest graph alone. Failures are noticed at once."""


@contextmanager
def _join_ranks(config: PartitionCommand) -> Iterator[Ranks]:
    """Yield the ranks that partition together: all that torchrun started, or this process alone."""
    if not is_launched_by_torchrun() or read_topology().world_size == 1:
        yield Ranks()
        return
    if config.memory is None:
        raise ConfigError(
            "several ranks partition files under a memory limit. Add --memory SIZE, or start one process."
        )

    # These modules import torch, which a single process does not need.
    from dglx_dist.comm.collectives import SessionRanks
    from dglx_dist.comm.session import start_session

    # The session compares options as text. ``given`` is a set, and its text differs between processes.
    options = {name: str(value) for name, value in vars(config).items() if name != "given"}
    # Each rank may have its own memory limit.
    del options["memory"]
    session = start_session(strategy="partition", options=options, timeout_s=_LONGEST_WAIT_S, device="cpu")
    with session:
        yield SessionRanks(session)


def _write_columns(dataset: StoredDataset, num_parts: int) -> None:
    # This module imports torch, which partitioners do not need.
    from dglx_dist.strategies.push_pull.feature_columns import write_slices

    write_slices(dataset, num_parts)


def _sort_by_time(folder: Path, time: str) -> None:
    """Sort a dataset's edges by the column ``time``, and keep the order in the dataset's cache."""
    # This module imports torch, which partitioners do not need.
    from dglx_dist.data.storage.reader import open_dataset
    from dglx_dist.graph.time_order import find_time_columns, open_part_order

    dataset = open_dataset(folder)
    columns = find_time_columns(dataset.manifest, time, None)
    for etype in columns.edges:
        for part in range(dataset.manifest.num_parts):
            open_part_order(dataset, columns, etype, part, None)

    names = ", ".join(":".join(etype) for etype in columns.edges)
    sampler = f"dx.TemporalNeighborSampler(..., {time!r})"
    write(f"sorted the edges {names} by {time!r} ({columns.dtype}): {sampler}")


def _note_missing_columns(
    graph: RawGraph, node_columns: Mapping[str, Mapping[str, Any]], tell: Callable[..., None]
) -> None:
    """Tell the user which columns ``dglx train`` would miss: labels, splits, or features if homogeneous."""
    if not any(LABEL in columns for columns in node_columns.values()):
        candidates = list_possible_labels(node_columns)
        hint = f"; to learn one of {candidates}, rename it to {LABEL!r}" if candidates else ""
        tell(f"note: there are no labels (column {LABEL!r}){hint}")

    for ntype, columns in node_columns.items():
        # Models for several types have their own trainable rows.
        if graph.is_homogeneous and FEATURE not in columns:
            unused = ", ".join(sorted(columns.keys() - {LABEL, *SPLITS})) or "none"
            usual_names = f"feat_0, feat_1 ... or {FEATURE!r}"
            tell(f"note: there are no features ({usual_names}; other columns: {unused})")
        if LABEL in columns and not columns.keys() & {*SPLITS}:
            nodes = "nodes" if graph.is_homogeneous else f"nodes {ntype!r}"
            tell(
                f"note: {nodes} have labels, but not the 'split' that `dglx train` needs. Add "
                "--split 0.8,0.1,0.1 to draw one."
            )


@command(PartitionCommand)
def partition(config: PartitionCommand) -> None:
    """Partition a graph into a folder that every strategy can train on.

    Example: `dglx partition ogb:ogbn-arxiv --parts 4 --method metis --balance train,degree --out data/arxiv`
    """
    if config.add_time:
        _sort_by_time(Path(config.data), str(config.time))
    else:
        _partition(config)


def _partition(config: PartitionCommand) -> None:
    from dglx_dist.data.partition.prepare import load_graph, open_work, partition_to_disk
    from dglx_dist.data.storage.manifest import check_target
    from dglx_dist.data.storage.remote import fetch_objects, stage_dataset
    from dglx_dist.memory import return_memory

    options = PartitionOptions(**select_common_fields(config, PartitionOptions))
    plan = PartitionPlan(**select_common_fields(config, PartitionPlan) | {"options": options})
    out, trainers = format_location(config.out), plan.trainers_per_part
    is_address = find_address(out) is not None
    if not is_address:
        check_target(config.out, plan.overwrite)

    # This comes first, so that a wrong name fails before minutes of loading.
    cut = f"{plural(plan.num_parts, 'part')} by {plan.partitioner}"
    if trainers > 1:
        cut += f", each for {trainers} trainers"

    with (
        _join_ranks(config) as ranks,
        stage_dataset(out, plan.overwrite, format=plan.format, is_first=ranks.is_first) as target,
    ):
        tell: Callable[..., None] = write if ranks.is_first else lambda *_, **_style: None
        if plan.memory is not None:
            return_memory()
        data = fetch_objects(config.data)
        with open_work(data, target, plan, ranks, **config.source_options) as workspace:
            graph = load_graph(data, workspace=workspace, **config.source_options)
            tell(f"{graph.name}: {graph.total_nodes} nodes, {graph.total_edges} edges; {cut}")
            if config.split is not None:
                graph = draw_splits(graph, config.split, plan.seed)
            if config.time is not None:
                check_time(graph, config.time)
            node_columns = {ntype: graph.node_data.get(ntype, {}) for ntype in graph.num_nodes}
            _note_missing_columns(graph, node_columns, tell)
            quality = partition_to_disk(
                graph, target, plan, workspace=workspace, write_columns=None if is_address else _write_columns
            )

    balance = ", ".join(f"{name} {ratio:.3f}" for name, ratio in quality.balance.items())
    tell(
        f"cut {quality.edge_cut:.1%} of the edges ({sum(quality.num_edges)} stored); "
        f"replication factor {quality.replication_factor:.2f}; balance {balance}"
    )
    if config.time is not None and ranks.is_first and not is_address:
        _sort_by_time(config.out, config.time)
    for name, ratio in quality.missed.items():
        tell(f"warning: {name} reached {ratio:.3f}, more than requested", style="yellow")

    train = suggest_training_command(out, node_columns, graph.edges, plan.num_parts * trainers)
    commands = f"; next: dglx inspect {shlex.quote(out)}" + (f", {train}" if train else "")
    tell(f"written to {out}{commands if plan.format == 'dglx' else ''}")
