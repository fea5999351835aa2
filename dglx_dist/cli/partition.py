"""``dglx ingest`` and ``dglx partition``."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dglx_dist.cli.common import command, write
from dglx_dist.data.partition.base import PARTITIONERS
from dglx_dist.options import by_name, common_fields, fractions, literals, names, option, tolerances


@dataclass(frozen=True, kw_only=True)
class IngestCommand:
    """Options of ``dglx ingest``; those of :class:`IngestPlan` have its names."""

    config: Path = option(
        ...,
        "Tables of the graph, in the format of GraphStorm's gconstruct (docs/ingest.md).",
        metavar="CONFIG.json",
    )
    out: Path = option(Path("data/ingested"), "Folder to write; must not hold anything yet.", metavar="DIR")
    memory: str = option(
        "2GB", "Memory limit of this process, like 200MB; the rest is spilled.", metavar="SIZE"
    )
    reverse_edges: bool = option(
        False, "Add the reverse of each edge type, named RELATION-rev.", flag="--add-reverse-edges"
    )
    name: str | None = option(None, "Of the graph. Default: that of DIR.")
    seed: int = option(0, "Of split_pct: the same seed draws the same nodes.")
    output_description: Path | None = option(
        None,
        "Write CONFIG with the ranges and categories found, to transform later tables equally.",
        flag="--output-conf-file",
        metavar="FILE",
    )
    workspace: Path | None = option(
        None, "Folder for spilled data. Default: beside DIR of --out.", metavar="DIR"
    )
    overwrite: bool = option(False, "Replace what is in DIR.")


@command(IngestCommand)
def ingest(config: IngestCommand) -> None:
    """Build a dataset from CSV and Parquet tables larger than memory; ids may be strings.

    It has one part, ready for `dglx train`; `dglx partition` makes more.

    Example: `dglx ingest shop.json --out data/shop --memory 500MB --add-reverse-edges`
    """
    from dglx_dist.data.ingest.config import read_config
    from dglx_dist.data.ingest.graph import IngestPlan, write_description
    from dglx_dist.data.ingest.graph import ingest as build
    from dglx_dist.data.storage.files import read_size

    plan = IngestPlan(**common_fields(config, IngestPlan) | {"memory": read_size(config.memory)})
    out = config.out
    done = build(read_config(config.config), plan)
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
    write(f"peak memory {done.peak_bytes / 2**20:.0f} MB of {config.memory}")
    if config.output_description is not None:
        write_description(done, config.output_description)
        write(f"settings found are in {config.output_description}")
    folder = shlex.quote(str(out))
    write(f"written to {out}; next: dglx train {folder}, or dglx partition {folder} --parts 4 --out DIR")


@dataclass(frozen=True, kw_only=True)
class PartitionCommand:
    """Options of ``dglx partition``; those of PartitionPlan and PartitionOptions have their names."""

    data: str = option(
        ...,
        "`synthetic`, `synthetic:nodes=20000,degree=25,seed=0`, a `.npz` file, a `.bin` of "
        "saved DGL graphs, a folder of CSV / Parquet tables, `dgl:CoraGraphDataset`, "
        "`ogb:ogbn-arxiv`, a dataset of one part, as `dglx ingest` writes it.",
        metavar="DATA",
    )
    num_parts: int = option(2, "Number of parts; independent of ranks and servers.", flag="--parts")
    method: str | None = option(
        None,
        f"How to place nodes: {', '.join(PARTITIONERS.names())}. Without it: kaminpar for one balance "
        "weight, metis for more.",
    )
    out: Path = option(
        Path("data/partitioned"), "Folder to write; must not hold anything yet.", metavar="DIR"
    )
    balance: tuple[str, ...] = option(
        tuple,
        "Weights to balance: nodes, degree, train, val, test, ntype, etype, a column.",
        metavar="A,B",
        parse=names,
    )
    tolerance: float | Mapping[str, float] = option(
        dict,
        "Allowed excess of the heaviest part: 0.05, or train=0.1,degree=0.02.",
        metavar="T",
        parse=tolerances,
    )
    target_weights: tuple[float, ...] | None = option(
        None, "Share of each part, for unequal machines: 1,1,2.", metavar="W,W", parse=fractions
    )
    objective: str = option("cut", "Minimise cut edges (cut) or communicated nodes (vol).")
    fast: bool = option(False, "Cheaper: less time (kaminpar) or memory (metis), a worse cut.")
    servers: int | None = option(None, "For hierarchical: servers; parts = servers x workers.")
    workers: int | None = option(None, "For hierarchical: workers in each server.")
    trainers_per_part: int = option(
        1,
        "Partition each part once more, by the same method, and store each node's trainer_id.",
        flag="--trainers-per-server",
        metavar="T",
    )
    feature_dtype: str | dict[str, str] | None = option(
        None,
        "Store features as float16, bfloat16 or float32: all of them, or feat=float16,x=bfloat16.",
        metavar="TYPE",
        parse=by_name,
    )
    file: Path | None = option(None, "For file: a .npy with one part id per node.")
    threads: int = option(1, "Threads of the partitioner, if it supports them.")
    seed: int = option(0, "The same seed gives the same parts.")
    format: str = option("dglx", "dglx, or dgl: what DGL's own load_partition reads.")
    overwrite: bool = option(False, "Replace what is in DIR.")
    source_options: Mapping[str, object] = option(
        dict,
        "Option of the dataset source; repeatable.",
        flag="--option",
        metavar="NAME=VALUE",
        kind=list[str],
        parse=literals,
    )


@command(PartitionCommand)
def partition(config: PartitionCommand) -> None:
    """Partition a graph into a folder that every strategy trains on.

    Example: `dglx partition ogb:ogbn-arxiv --parts 4 --method metis --balance train,degree --out data/arxiv`
    """
    from dglx_dist.data.partition.base import PartitionOptions
    from dglx_dist.data.storage.manifest import check_target
    from dglx_dist.prepare import PartitionPlan, load_graph, partition_to_disk

    options = PartitionOptions(**common_fields(config, PartitionOptions))
    plan = PartitionPlan(**common_fields(config, PartitionPlan), options=options)
    out, trainers = config.out, plan.trainers_per_part
    check_target(out, plan.overwrite)
    # A wrong name is an error before minutes of loading.
    chosen = plan.partitioner
    graph = load_graph(config.data, **config.source_options)
    write(
        f"{graph.name}: {graph.total_nodes} nodes, {graph.total_edges} edges; "
        f"{plan.num_parts} parts by {chosen}" + (f", each for {trainers} trainers" if trainers > 1 else "")
    )
    quality = partition_to_disk(graph, out, plan)
    write(
        f"cut {quality.edge_cut:.1%} of the edges; replication factor {quality.replication_factor:.2f}; "
        f"balance {', '.join(f'{name} {ratio:.3f}' for name, ratio in quality.balance.items())}"
    )
    for name, reached in quality.missed.items():
        write(f"warning: {name} reached {reached:.3f}, more than asked for", style="yellow")
    following = f"; next: dglx inspect {shlex.quote(str(out))}" if plan.format == "dglx" else ""
    write(f"written to {out}{following}")
