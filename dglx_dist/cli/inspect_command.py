"""``dglx inspect``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from dglx_dist.cli.report_command import show
from dglx_dist.errors import ConfigError

if TYPE_CHECKING:
    from dglx_dist.storage.manifest import Manifest

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
) -> None:
    """Show a partitioned dataset: edge cut, balance, halo and replication factors, sizes on disk, a picture.

    Balance is the largest part over the mean; the halo factor is how many foreign nodes a part reads per
    node that it owns; the replication factor is how many copies of a node there would be if all parts
    kept theirs.

    Example: `dglx inspect data/demo --verify full`
    """
    from dglx_dist.report.picture import draw_parts
    from dglx_dist.report.table import parts_table, summary_table
    from dglx_dist.report.units import readable_bytes
    from dglx_dist.storage.reader import open_dataset

    dataset = open_dataset(folder, verify=verify)  # type: ignore[arg-type]  # checked there
    manifest, quality = dataset.manifest, dict(dataset.manifest.quality)
    sizes = part_bytes(manifest)
    console = Console(highlight=False)
    console.print(
        f"{manifest.name}, cut into {manifest.num_parts} parts by {manifest.method}, seed {manifest.seed}"
    )
    console.print(summary_table(overview(manifest)))
    per_part = part_columns(quality)
    shown: dict[str, Any] = {
        name: [value if isinstance(value, int) else f"{value:.4f}" for value in values]
        for name, values in per_part.items()
    }
    shown["on disk"] = [readable_bytes(size) for size in sizes]
    show(parts_table(shown))
    target = picture or folder / "cache" / PICTURE
    title = f"{manifest.name}: {manifest.num_parts} parts by {manifest.method}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draw_parts({**per_part, "MB on disk": [size / 1e6 for size in sizes]}, target, title=title)
    except OSError as error:
        raise ConfigError(f"cannot write the picture: {error}; say where with --picture FILE") from error
    console.print(f"picture: {target}", soft_wrap=True)


def overview(manifest: Manifest) -> dict[str, object]:
    """Return the figures of the whole, in the order in which they are shown."""
    quality = manifest.quality
    found: dict[str, object] = {}
    for ntype, columns in manifest.node_columns.items():
        tensors = ", ".join(f"{name} {info.dtype}{list(info.row_shape)}" for name, info in columns.items())
        found[f"nodes {ntype}"] = f"{manifest.num_nodes(ntype)}: {tensors or 'no tensors'}"
    for etype in manifest.edge_types:
        found["edges " + ".".join(etype)] = f"{manifest.num_edges(etype)}"
    for name in ("edge_cut", "replication_factor"):
        if isinstance(value := quality.get(name), float):
            found[name.replace("_", " ")] = f"{value:.4f}"
    balance = quality.get("balance")
    if isinstance(balance, dict):
        found |= {f"balance {name} (max/mean)": f"{ratio:.4f}" for name, ratio in balance.items()}
    found["bytes on disk"] = sum(info.num_bytes for info in manifest.files.values())
    return found


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
