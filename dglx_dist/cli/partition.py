"""``dglx ingest`` and ``dglx partition``."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
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
from dglx_dist.options import find_flag, named_values, option, parse_fractions, select_common_fields
from dglx_dist.records import FEATURE, LABEL, SPLITS, Array, RawGraph
from dglx_dist.report.tables import plural


@dataclass(frozen=True, kw_only=True)
class IngestCommand(IngestPlan):
    """Options of ``dglx ingest``."""

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

    done = build(read_config(config.config), config)
    for ntype, columns in done.manifest.node_columns.items():
        kind = done.manifest.user_ids.get(ntype, "row numbers")
        write(
            f"{done.manifest.num_nodes(ntype)} nodes {ntype!r}, ids: {kind}; "
            f"{', '.join(columns) or 'no tensors'}"
        )

    for etype, columns in done.manifest.edge_columns.items():
        write(
            f"{done.manifest.num_edges(etype)} edges {':'.join(etype)}; {', '.join(columns) or 'no tensors'}"
        )

    write(f"peak memory {done.peak_bytes / 10**6:.0f} MB of {config.memory}")
    if config.output_description is not None:
        write_description(done, config.output_description)
        write(f"detected settings: {config.output_description}")
    folder = shlex.quote(str(config.out))
    train = suggest_training_command(config.out, done.manifest.node_columns, done.manifest.edge_columns)
    commands = " or ".join(filter(None, [train, f"dglx partition {folder} --parts 4 --out DIR"]))
    write(f"written to {config.out}; next: {commands}")


@dataclass(frozen=True, kw_only=True)
class PartitionCommand(PartitionOptions, PartitionPlan):
    """Options of ``dglx partition``."""

    data: str = option(
        ...,
        "Graph to partition: `synthetic`, `synthetic:nodes=20000,degree=25,seed=0`, "
        f"{FORMATS}, `dgl:CoraGraphDataset`, `ogb:ogbn-arxiv`, or a dataset of one part from `dglx ingest`.",
        metavar="DATA",
    )
    out: Path = option(Path("data/partitioned"), "Output folder. Must be empty or not exist.", metavar="DIR")
    num_parts: int = option(
        2, "Number of parts. It does not depend on the number of ranks and servers.", flag="--parts"
    )
    id: str | None = option(
        None,
        "Name of the id column in node tables, or several names separated by commas if tables differ. '' "
        "numbers all nodes by row, and 'COLUMN,' those of tables without the column. Common names are found.",
        metavar="COLUMN",
    )
    format: Any = option(
        "dglx",
        "Output format: dglx, or dgl for DGL's own load_partition. Or the input format of a text file of "
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
        "Edge column of times, by which the in-edges of each node are sorted for dx.TemporalNeighborSampler: "
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
        if self.add_time and self.time is None:
            raise ConfigError("--add-time sorts edges by a column. Name it with --time COLUMN.")
        unused = sorted(self.given - {"data", "time", "add_time"})
        if self.add_time and unused:
            flags = ", ".join(find_flag(PartitionCommand, name) for name in unused)
            raise ConfigError(
                f"--add-time only sorts the edges of {self.data}, so {flags} would have no effect. Leave it "
                "out, or partition again without --add-time."
            )
        added = {} if self.id is None else {"id": self.id}
        if self.format in LINE_FORMATS:
            added["format"] = self.format
            object.__setattr__(self, "format", "dglx")
        elif self.format == "dgl" and self.time is not None:
            raise ConfigError("DGL's files have no order by time. Leave out --time, or use --format dglx.")
        elif self.format not in ("dglx", "dgl"):
            raise ConfigError(
                f"format is {self.format!r}, but must be 'dglx' or 'dgl', or for a text file of edges one of "
                f"{', '.join(LINE_FORMATS)}"
            )

        object.__setattr__(self, "source_options", {**self.source_options, **added})
        if self.split is not None:
            check_shares(self.split, self.memory)
        super().__post_init__()


def check_shares(shares: Sequence[float], memory: object) -> None:
    """Raise ConfigError unless ``shares`` are three that a split can be drawn of."""
    if len(shares) != len(SPLITS) or min(shares) < 0 or not 0 < sum(shares) <= 1 + 1e-9:
        raise ConfigError(
            f"--split {','.join(map(str, shares))} must be shares of train, validation and test nodes, "
            "together at most 1, such as 0.8,0.1,0.1"
        )
    if memory is not None:
        raise ConfigError("--split draws in memory, so it cannot be used with --memory. Use `dglx ingest`.")


def draw_splits(graph: RawGraph, shares: Sequence[float], seed: int) -> RawGraph:
    """Return ``graph`` with random masks of the labelled nodes of each type that has labels and no split.

    Raises ConfigError if there is no such type, or if a type gets no training node.
    """
    from dglx_dist.data.ingest.tensors import draw_split_codes

    node_data = {ntype: dict(columns) for ntype, columns in graph.node_data.items()}
    labelled = {ntype: columns for ntype, columns in node_data.items() if LABEL in columns}
    without_split = {n: columns for n, columns in labelled.items() if not columns.keys() & {*SPLITS}}

    if not labelled:
        raise ConfigError(
            f"--split draws a split of labelled nodes, but the data has no labels (column {LABEL!r}). Add or "
            "rename a column, or leave --split out."
        )

    if not without_split:
        masks = sorted({name for columns in labelled.values() for name in columns.keys() & {*SPLITS}})
        raise ConfigError(
            f"--split draws a split of labels without one, but the data has {', '.join(masks)}. Leave "
            "--split out to use them, or remove them (column 'split' in tables) to draw another split."
        )

    for ntype, columns in without_split.items():
        labels = np.asarray(columns[LABEL])
        labels = labels.reshape(len(labels), -1)
        has_label: Array = np.all(np.isfinite(labels) if labels.dtype.kind == "f" else labels >= 0, axis=1)
        (codes,) = draw_split_codes([has_label], int(has_label.sum()), shares, seed)
        if not (codes == 0).any():
            raise ConfigError(
                f"--split {','.join(map(str, shares))} selects no training node of {int(has_label.sum())} "
                f"labelled nodes of type {ntype!r}. Give the first share a larger value, or label more nodes."
            )

        columns |= {name: codes == code for code, name in enumerate(SPLITS)}

    return replace(graph, node_data=node_data)


def check_time(graph: RawGraph, time: str) -> None:
    """Raise ConfigError unless an edge type of ``graph`` has the column ``time`` with one number per edge."""
    # This module imports Numba, which is slow.
    from dglx_dist.data.times import find_time_dtype

    columns = {etype: data[time] for etype, data in graph.edge_data.items() if time in data}
    if not columns:
        known = sorted({name for data in graph.edge_data.values() for name in data})
        raise ConfigError(
            f"--time {time}: no edge type has this column (known: {', '.join(known) or 'none'}). Name "
            "another column, or leave --time out."
        )

    for etype, column in columns.items():
        find_time_dtype(column.dtype.name, column.shape[1:], f"the column {time!r} of {etype}")


_LONGEST_WAIT_S = 6 * 3600.0
"""Time-out of waiting for rank 0, which assigns the smallest graph alone. A failed rank is noticed at
once."""


@contextmanager
def _join_ranks(config: PartitionCommand) -> Iterator[Ranks]:
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

    # Ranks may have memory limits of their own, and a set has another order in each process.
    ignored = ("memory", "given")
    options = {name: str(value) for name, value in vars(config).items() if name not in ignored}
    with start_session(
        strategy="partition", options=options, timeout_s=_LONGEST_WAIT_S, device="cpu"
    ) as session:
        yield SessionRanks(session)


def _write_columns(dataset: StoredDataset, num_parts: int) -> None:
    # This module imports torch, which partitioners do not need.
    from dglx_dist.strategies.push_pull.feature_columns import write_slices

    write_slices(dataset, num_parts)


def _sort_by_time(folder: Path, time: str) -> None:
    """Sort the edges of the dataset in ``folder`` by the column ``time``, in its cache."""
    # This module imports torch, which partitioners do not need.
    from dglx_dist.data.storage.reader import open_dataset
    from dglx_dist.graph.time_order import find_time_columns, open_part_order

    dataset = open_dataset(folder)
    columns = find_time_columns(dataset.manifest, time, None)
    for etype, part in product(columns.edges, range(dataset.manifest.num_parts)):
        open_part_order(dataset, columns, etype, part, None)
    names = ", ".join(":".join(etype) for etype in columns.edges)
    write(
        f"sorted the edges {names} by {time!r} ({columns.dtype}): dx.TemporalNeighborSampler(..., {time!r})"
    )


def _note_missing_columns(
    graph: RawGraph, node_columns: Mapping[str, Mapping[str, Any]], tell: Callable[..., None]
) -> None:
    if not any(LABEL in data for data in node_columns.values()):
        names = list_possible_labels(node_columns)
        hint = names and f"; to learn one of {names}, rename it to {LABEL!r}"
        tell(f"note: there are no labels (column {LABEL!r}){hint}")
    for ntype, data in node_columns.items():
        # Models of several types have trainable rows of their own.
        if graph.is_homogeneous and FEATURE not in data:
            names = ", ".join(sorted(data.keys() - {LABEL, *SPLITS})) or "none"
            columns = f"feat_0, feat_1 ... or {FEATURE!r}; other columns: {names}"
            tell(f"note: there are no features ({columns})")
        if LABEL in data and not data.keys() & {*SPLITS}:
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
    from dglx_dist.memory import return_memory

    options = PartitionOptions(**select_common_fields(config, PartitionOptions))
    plan = PartitionPlan(**select_common_fields(config, PartitionPlan) | {"options": options})
    out, trainers = config.out, plan.trainers_per_part
    check_target(out, plan.overwrite)

    # This comes first, so that a wrong name fails before minutes of loading.
    method = plan.partitioner
    with _join_ranks(config) as ranks:
        if plan.memory is not None:
            return_memory()
        with open_work(config.data, out, plan, ranks, **config.source_options) as workspace:
            graph = load_graph(config.data, workspace=workspace, **config.source_options)
            tell: Callable[..., None] = write if ranks.is_first else lambda *_, **_style: None
            tell(
                f"{graph.name}: {graph.total_nodes} nodes, {graph.total_edges} edges; "
                f"{plural(plan.num_parts, 'part')} by {method}"
                + (f", each for {trainers} trainers" if trainers > 1 else "")
            )
            if config.split is not None:
                graph = draw_splits(graph, config.split, plan.seed)
            if config.time is not None:
                check_time(graph, config.time)
            node_columns = {ntype: graph.node_data.get(ntype, {}) for ntype in graph.num_nodes}
            _note_missing_columns(graph, node_columns, tell)
            quality = partition_to_disk(graph, out, plan, workspace=workspace, write_columns=_write_columns)

    tell(
        f"cut {quality.edge_cut:.1%} of the edges ({sum(quality.num_edges)} stored); "
        f"replication factor {quality.replication_factor:.2f}; "
        f"balance {', '.join(f'{name} {ratio:.3f}' for name, ratio in quality.balance.items())}"
    )
    if config.time is not None and ranks.is_first:
        _sort_by_time(out, config.time)
    for name, reached in quality.missed.items():
        tell(f"warning: {name} reached {reached:.3f}, more than requested", style="yellow")
    train = suggest_training_command(out, node_columns, graph.edges, plan.num_parts * trainers)
    commands = ", ".join(filter(None, [f"dglx inspect {shlex.quote(str(out))}", train]))
    tell(f"written to {out}" + (f"; next: {commands}" if plan.format == "dglx" else ""))
