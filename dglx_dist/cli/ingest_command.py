"""``dglx ingest``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def ingest(  # noqa: PLR0913  # one argument per option
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG.json",
            help="Which tables make the graph, in the words of GraphStorm's gconstruct (docs/ingest.md).",
        ),
    ],
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder to write; must not hold anything yet.")
    ] = Path("data/ingested"),
    memory: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="What this process may hold at most, like 200MB; the rest is spilled.",
        ),
    ] = "2GB",
    add_reverse_edges: Annotated[
        bool,
        typer.Option(
            "--add-reverse-edges", help="Write each edge type the other way, too, named RELATION-rev."
        ),
    ] = False,
    name: Annotated[str | None, typer.Option(help="Of the graph. Default: that of DIR.")] = None,
    seed: Annotated[int, typer.Option(help="Of split_pct: the same seed draws the same nodes.")] = 0,
    output_conf_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write CONFIG with the ranges and categories found, to transform later tables alike.",
        ),
    ] = None,
    workspace: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to spill. Default: beside the folder written.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is in DIR.")] = False,
) -> None:
    """Build a dataset from CSV and Parquet tables larger than memory; ids may be texts.

    It is in one part, ready for `dglx train`; `dglx partition` cuts it into more.

    Example: `dglx ingest shop.json --out data/shop --memory 500MB --add-reverse-edges`
    """
    from dglx_dist.ingest.build import IngestPlan, write_settled
    from dglx_dist.ingest.build import ingest as build
    from dglx_dist.ingest.config import read_config
    from dglx_dist.storage.sizes import read_size

    plan = IngestPlan(
        out=out,
        memory=read_size(memory),
        name=name,
        seed=seed,
        reverse_edges=add_reverse_edges,
        overwrite=overwrite,
        workspace=workspace,
        settled=output_conf_file,
    )
    done = build(read_config(config), plan)
    console = Console(highlight=False, soft_wrap=True, markup=False)
    for ntype, columns in done.manifest.node_columns.items():
        kind = done.manifest.user_ids.get(ntype, "row numbers")
        console.print(
            f"{done.manifest.num_nodes(ntype)} nodes {ntype!r}, ids: {kind}; "
            f"{', '.join(columns) or 'no tensors'}"
        )
    for etype, columns in done.manifest.edge_columns.items():
        console.print(
            f"{done.manifest.num_edges(etype)} edges {':'.join(etype)}; {', '.join(columns) or 'no tensors'}"
        )
    console.print(f"peak memory {done.peak_bytes / 2**20:.0f} MB of {memory}")
    if output_conf_file is not None:
        write_settled(done, output_conf_file)
        console.print(f"settings found are in {output_conf_file}")
    console.print(f"written to {out}; next: dglx train {out}, or dglx partition {out} --parts 4 --out DIR")
