"""``dglx ingest`` and ``dglx partition``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from dglx_dist.cli.common import by_name, fractions, literals, names, tolerances, write


def ingest(  # noqa: PLR0913  # one argument per option
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG.json",
            help="Tables of the graph, in the format of GraphStorm's gconstruct (docs/ingest.md).",
        ),
    ],
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder to write; must not hold anything yet.")
    ] = Path("data/ingested"),
    memory: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Memory limit of this process, like 200MB; the rest is spilled.",
        ),
    ] = "2GB",
    add_reverse_edges: Annotated[
        bool,
        typer.Option("--add-reverse-edges", help="Add the reverse of each edge type, named RELATION-rev."),
    ] = False,
    name: Annotated[str | None, typer.Option(help="Of the graph. Default: that of DIR.")] = None,
    seed: Annotated[int, typer.Option(help="Of split_pct: the same seed draws the same nodes.")] = 0,
    output_conf_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write CONFIG with the ranges and categories found, to transform later tables equally.",
        ),
    ] = None,
    workspace: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for spilled data. Default: beside DIR of --out."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is in DIR.")] = False,
) -> None:
    """Build a dataset from CSV and Parquet tables larger than memory; ids may be strings.

    It has one part, ready for `dglx train`; `dglx partition` makes more.

    Example: `dglx ingest shop.json --out data/shop --memory 500MB --add-reverse-edges`
    """
    from dglx_dist.data.ingest.config import read_config
    from dglx_dist.data.ingest.graph import IngestPlan, write_description
    from dglx_dist.data.ingest.graph import ingest as build
    from dglx_dist.data.storage.files import read_size

    plan = IngestPlan(
        out=out,
        memory=read_size(memory),
        name=name,
        seed=seed,
        reverse_edges=add_reverse_edges,
        overwrite=overwrite,
        workspace=workspace,
        output_description=output_conf_file,
    )
    done = build(read_config(config), plan)
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
    write(f"peak memory {done.peak_bytes / 2**20:.0f} MB of {memory}")
    if output_conf_file is not None:
        write_description(done, output_conf_file)
        write(f"settings found are in {output_conf_file}")
    folder = shlex.quote(str(out))
    write(f"written to {out}; next: dglx train {folder}, or dglx partition {folder} --parts 4 --out DIR")


def partition(  # noqa: PLR0913  # one argument per option
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="`synthetic`, `synthetic:nodes=20000,degree=25,seed=0`, a `.npz` file, a `.bin` of "
            "saved DGL graphs, a folder or `.json` of CSV / Parquet tables, `dgl:CoraGraphDataset`, "
            "`ogb:ogbn-arxiv`, a dataset of one part, as `dglx ingest` writes it.",
        ),
    ],
    parts: Annotated[int, typer.Option(help="Number of parts; independent of ranks and servers.")] = 2,
    method: Annotated[
        str | None,
        typer.Option(
            help="random, hash, contiguous, metis, kaminpar, ldg, fennel, hierarchical, feature, file, or "
            "one of another package. Without it: kaminpar for one balance weight, metis for more."
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder to write; must not hold anything yet.")
    ] = Path("data/partitioned"),
    balance: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Weights to balance: nodes, degree, train, val, test, ntype, etype, a column.",
        ),
    ] = None,
    tolerance: Annotated[
        str | None,
        typer.Option(
            metavar="T", help="Allowed excess of the heaviest part: 0.05, or train=0.1,degree=0.02."
        ),
    ] = None,
    target_weights: Annotated[
        str | None, typer.Option(metavar="W,W", help="Share of each part, for unequal machines: 1,1,2.")
    ] = None,
    objective: Annotated[
        str, typer.Option(help="Minimise cut edges (cut) or communicated nodes (vol).")
    ] = "cut",
    fast: Annotated[
        bool, typer.Option("--fast", help="Cheaper: less time (kaminpar) or memory (metis), a worse cut.")
    ] = False,
    servers: Annotated[
        int | None, typer.Option(help="For hierarchical: servers; parts = servers x workers.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="For hierarchical: workers in each server.")] = None,
    trainers_per_server: Annotated[
        int,
        typer.Option(
            metavar="T",
            help="Partition each part once more, by the same method, and store each node's trainer_id.",
        ),
    ] = 1,
    feature_dtype: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="Store features as float16, bfloat16 or float32: all of them, or feat=float16,x=bfloat16.",
        ),
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="For file: one part id per node (.npy, .txt, .csv).")
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads of the partitioner, if it supports them.")] = 1,
    seed: Annotated[int, typer.Option(help="The same seed gives the same parts.")] = 0,
    format: Annotated[str, typer.Option(help="dglx, or dgl: what DGL's own load_partition reads.")] = "dglx",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is in DIR.")] = False,
    option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Option of the dataset source; repeatable.")
    ] = None,
) -> None:
    """Partition a graph into a folder that every strategy trains on.

    Example: `dglx partition ogb:ogbn-arxiv --parts 4 --method metis --balance train,degree --out data/arxiv`
    """
    from dglx_dist.data.partition.base import PartitionOptions
    from dglx_dist.prepare import PartitionPlan, load_graph, partition_to_disk

    plan = PartitionPlan(
        num_parts=parts,
        method=method,
        seed=seed,
        options=PartitionOptions(
            balance=names(balance),
            tolerance=tolerances(tolerance),
            target_weights=fractions(target_weights, "--target-weights"),
            objective=objective,  # type: ignore[arg-type]  # checked by PartitionOptions
            fast=fast,
            servers=servers,
            workers=workers,
            file=file,
            threads=threads,
        ),
        format=format,  # type: ignore[arg-type]  # checked by PartitionPlan
        overwrite=overwrite,
        trainers_per_part=trainers_per_server,
        feature_dtype=by_name(feature_dtype, "--feature-dtype"),
    )
    plan.check_target(out)
    # A wrong name is an error before minutes of loading.
    chosen = plan.partitioner
    graph = load_graph(data, **literals(option or [], "--option"))
    write(
        f"{graph.name}: {graph.total_nodes} nodes, {graph.total_edges} edges; {parts} parts by {chosen}"
        + (f", each for {trainers_per_server} trainers" if trainers_per_server > 1 else "")
    )
    quality = partition_to_disk(graph, out, plan)
    write(
        f"cut {quality.edge_cut:.1%} of the edges; replication factor {quality.replication_factor:.2f}; "
        f"balance {', '.join(f'{name} {ratio:.3f}' for name, ratio in quality.balance.items())}"
    )
    for name, reached in quality.missed.items():
        write(f"warning: {name} reached {reached:.3f}, more than asked for", style="yellow")
    following = f"; next: dglx inspect {shlex.quote(str(out))}" if format == "dglx" else ""
    write(f"written to {out}{following}")
