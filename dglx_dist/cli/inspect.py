"""``dglx inspect``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from dglx_dist.cli.report import HOPS, check_closure, draw_or_warn, show, show_closure
from dglx_dist.errors import ConfigError
from dglx_dist.records import EDGE_TYPE, NODE_TYPE

if TYPE_CHECKING:
    from dglx_dist.data.storage.manifest import Manifest
    from dglx_dist.records import ColumnInfo


PICTURE = "partition.png"


def inspect(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What `dglx partition` wrote.")],
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where the picture goes; default: cache/partition.png in DIR."),
    ] = None,
    verify: Annotated[
        str, typer.Option(help="auto: read files not read before, full: read all, never: trust them.")
    ] = "auto",
    closure: Annotated[
        bool,
        typer.Option(
            "--closure", help="Show how many nodes a server holds that preloads its neighbourhood, by hop."
        ),
    ] = False,
    hops: Annotated[
        int | None, typer.Option(help=f"Of --closure: as many as the model has layers. Default: {HOPS}.")
    ] = None,
    servers: Annotated[
        int | None, typer.Option(help="Of --closure: how many will train. Default: one for each part.")
    ] = None,
) -> None:
    """Show a partitioned dataset: edge cut, balance, halo and replication factors, sizes on disk, a picture.

    Balance is the largest part over the mean; the halo factor is how many foreign nodes a part reads per
    node that it owns; the replication factor is how many copies of a node there would be if all parts
    kept theirs.

    Examples: `dglx inspect data/demo --verify full`, `dglx inspect data/demo --closure --hops 3`
    """
    from dglx_dist.data.storage.reader import open_dataset
    from dglx_dist.report.pictures import draw_parts
    from dglx_dist.report.tables import parts_table, plural, readable_bytes, summary_table

    check_closure(closure, hops=hops, servers=servers)
    dataset = open_dataset(folder, verify=verify)  # type: ignore[arg-type]  # checked there
    manifest, quality = dataset.manifest, dict(dataset.manifest.quality)
    sizes = part_bytes(manifest)
    console = Console(highlight=False, markup=False)
    cut = f"{plural(manifest.num_parts, 'part')} by {manifest.method}"
    console.print(f"{manifest.name}, cut into {cut}, seed {manifest.seed}")
    console.print(summary_table(overview(manifest)))
    per_part = part_columns(quality)
    shown: dict[str, Any] = {
        name: [value if isinstance(value, int) else f"{value:.4f}" for value in values]
        for name, values in per_part.items()
    }
    shown["on disk"] = [readable_bytes(size) for size in sizes]
    show(parts_table(shown))
    target = picture or folder / "cache" / PICTURE
    if closure:
        show_closure(dataset, target, hops=hops, servers=servers)

    def draw() -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        columns = {**per_part, "MB on disk": [size / 1e6 for size in sizes]}
        draw_parts(columns, target, title=f"{manifest.name}: {cut}")

    if picture is None:
        draw_or_warn(draw, target, remedy="; say where with --picture FILE")
        return
    try:
        draw()
    except OSError as error:
        raise ConfigError(f"--picture {picture} cannot be written: {error.strerror}") from error
    console.print(f"picture: {target}", soft_wrap=True)


def overview(manifest: Manifest) -> dict[str, object]:
    """Return the figures of the whole, in the order in which they are shown."""
    quality = manifest.quality
    found: dict[str, object] = {}
    for ntype, columns in manifest.node_columns.items():
        tensors = ", ".join(f"{name} {row_type(info)}" for name, info in columns.items())
        name = "nodes" if ntype == NODE_TYPE else f"nodes {ntype}"
        found[name] = f"{manifest.num_nodes(ntype)}: {tensors or 'no tensors'}"
    for etype in manifest.edge_types:
        found["edges" if etype == EDGE_TYPE else "edges " + ".".join(etype)] = f"{manifest.num_edges(etype)}"
    for name in ("edge_cut", "replication_factor"):
        if isinstance(value := quality.get(name), float):
            found[name.replace("_", " ")] = f"{value:.4f}"
    balance = quality.get("balance")
    if isinstance(balance, dict):
        found |= {f"balance {name} (max/mean)": f"{ratio:.4f}" for name, ratio in balance.items()}
    trainers = quality.get("trainers")
    if isinstance(trainers, dict):
        found["trainers"] = f"{trainers['num_parts']}, edge cut {trainers['edge_cut']:.4f}"
        found |= {f"balance {name} of trainers": f"{r:.4f}" for name, r in trainers["balance"].items()}
    found["bytes on disk"] = sum(info.num_bytes for info in manifest.files.values())
    return found


def row_type(info: ColumnInfo) -> str:
    """Return dtype and shape of one row: ``float32[5]``, and ``int64`` for one number."""
    return f"{info.dtype}{list(info.row_shape) or ''}"


def part_columns(quality: dict[str, Any]) -> dict[str, list[float]]:
    """Return what is known of each part by its heading; empty for a dataset without figures."""
    headings = {
        "nodes": "num_nodes", "edges": "num_edges", "halo nodes": "halo_nodes",
        "halo factor": "halo_factor", "remote in-edges": "remote_fraction",
    }  # fmt: skip
    return {heading: list(quality[name]) for heading, name in headings.items() if name in quality}


def part_bytes(manifest: Manifest) -> list[int]:
    """Return (P,) bytes on disk of each part."""
    sizes = [0] * manifest.num_parts
    for path, info in manifest.files.items():
        part = path.split("/")[0].removeprefix("part")
        if part.isdecimal():
            sizes[int(part)] += info.num_bytes
    return sizes
