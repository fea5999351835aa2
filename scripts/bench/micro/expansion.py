"""What preloading costs on real graphs and on the built-in one: expansion and work by hop, for two cuts.

    python scripts/bench expansion --data ../shared/data --out docs/strategies

Cuts every graph into so many servers by METIS and at random, follows the in-edges of what each server owns,
and prints a Markdown table: nodes held by nodes owned (mean over servers), and work by that of full_graph
(largest server). Draws shared_preload_metis.png and shared_preload_random.png, a line for each graph. Takes
two minutes. ``dglx inspect DIR --closure`` says the same of one partitioned dataset.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dglx_dist.data.sources import load_dataset
from dglx_dist.data.storage.reader import open_dataset
from dglx_dist.graph.analysis import Expansion, measure_expansion
from dglx_dist.prepare import PartitionPlan, partition_to_disk
from dglx_dist.records import RawGraph
from scripts.bench.micro.timing import parser
from scripts.out_files import markdown_table

REAL = ("cora", "dblp_full", "coauthor_physics")
BUILT_IN = {
    "built-in": "synthetic:nodes=20000,degree=25",
    "100 communities": "synthetic:nodes=20000,degree=6,communities=100,homophily=0.99,locality=0.99",
}
METHODS = ("metis", "random")


def expansion_of(graph: RawGraph, method: str, servers: int, hops: int) -> Expansion:
    """Cut ``graph`` into a part for each server, in a folder that goes again, and follow its in-edges."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "parts"
        partition_to_disk(graph, target, PartitionPlan(num_parts=servers, method=method))
        return measure_expansion(open_dataset(target, verify="never"), servers, hops)


def row(name: str, method: str, found: Expansion) -> list[str]:
    """Return a line of the table: ``expansion (work)`` for each hop from 1 on."""
    factors, work = found.factors.mean(axis=1), found.work.max(axis=1)
    return [name, method, *(f"{factors[hop]:.2f} ({work[hop]:.2f})" for hop in range(1, found.hops + 1))]


def draw(curves: dict[str, Sequence[float]], servers: int, path: Path, title: str) -> None:
    """Draw the expansion by hop, a line for each graph."""
    figure = Figure(figsize=(5, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for (name, factors), marker in zip(curves.items(), "osD^v", strict=False):
        axes.plot(range(len(factors)), factors, marker=marker, markersize=5, label=name)
    axes.axhline(servers, color="#444444", linestyle="--", linewidth=1, label="the whole graph")
    axes.set(title=title, xlabel="hops", ylabel="nodes held / own nodes", ylim=(0, servers + 0.3))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=100)


def main(argv: list[str]) -> None:
    """Print the table and draw the pictures."""
    options = parser("expansion", __doc__)
    options.add_argument(
        "--data", type=Path, default=Path("../shared/data"), help="folder of the .npz graphs"
    )
    options.add_argument("--out", type=Path, default=Path("docs/strategies"), help="where pictures go")
    options.add_argument("--servers", type=int, default=4)
    options.add_argument("--hops", type=int, default=6)
    chosen = options.parse_args(argv)
    sources = {name: str(chosen.data / f"{name}.npz") for name in REAL} | BUILT_IN
    graphs = {name: load_dataset(source) for name, source in sources.items()}
    headings = [f"{hop} hop{'s' * (hop > 1)}" for hop in range(1, chosen.hops + 1)]
    rows = []
    for method in METHODS:
        curves: dict[str, Sequence[float]] = {}
        for name, graph in graphs.items():
            found = expansion_of(graph, method, chosen.servers, chosen.hops)
            curves[name] = found.factors.mean(axis=1).tolist()
            rows.append(row(name, method, found))
        title = f"{chosen.servers} parts {'by METIS' if method == 'metis' else 'at random'}"
        draw(curves, chosen.servers, chosen.out / f"shared_preload_{method}.png", title)
    print(markdown_table(["graph", "cut", *headings], rows))
