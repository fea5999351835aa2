"""Neighbour sampling beside stock DGL, and slicing beside NumPy: one thread, interleaved, medians.

    OMP_NUM_THREADS=1 python scripts/bench sampling --json sampling.json

Both loaders see the built-in graph (200,000 nodes, 5 M edges), batches of 1000 and the same seeds in turn,
and both figures include building the blocks. DGL is used as it comes: int64, its fused sampler. Ours runs in
the calling thread. "hashed" is ours with the numbering of graphs too large for a table of all nodes. The
second table has a graph of 4 node types and 8 edge types; DGL's fused sampler takes several types as well.
"""

from __future__ import annotations

import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import torch
from dgl.dataloading import NeighborSampler

from dglx_dist.comm.session import start_session
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.data.synthetic import SyntheticConfig, generate
from dglx_dist.dataloading.kernels import Workspace, copy_rows, sample_batch
from dglx_dist.dataloading.loader import DataLoader
from dglx_dist.dataloading.minibatch import Draws
from dglx_dist.dataloading.sampler import csc_of
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.row_kernels import as_words
from dglx_dist.records import NODE_TYPE, Assignment, RawGraph
from scripts.bench.micro.starter import in_turn, parser, text_table, timed, write_json

FANOUTS = ([15, 10, 5], [25, 10])
BATCH = 1000
RELATIONAL_FANOUTS = ([5, 5], [10, 5, 3])
SPEED_TARGET, RELATIONAL_TARGET, SLICING_TARGET = 1.7, 1.7, 0.8
Row = dict[str, Any]
WARM_UP = 3


def open_graph(nodes: int, degree: float, folder: Path) -> DistGraph:
    """Generate the built-in graph, store it in one part, and open it."""
    raw = generate(SyntheticConfig(nodes=nodes, degree=degree))
    owner = {NODE_TYPE: np.zeros(nodes, np.int32)}
    write_dataset(raw, Assignment(num_parts=1, part_of=owner, method="file", seed=0), folder / "graph")
    return DistGraph(folder / "graph")


def dgl_graph(g: DistGraph) -> dgl.DGLGraph:
    """The same graph as DGL has it, with int64 ids and the in-edges ready."""
    data = {}
    for etype in g.canonical_etypes:
        shard = g.structure(etype).shards[0]
        arrays = (shard.indptr, shard.indices, np.empty(0))
        data[etype] = ("csc", tuple(torch.from_numpy(array.astype(np.int64)) for array in arrays))
    whole = dgl.heterograph(data, num_nodes_dict={ntype: g.num_nodes(ntype) for ntype in g.ntypes})
    return whole.formats("csc")


def open_relational(nodes: int, degree: float, folder: Path) -> DistGraph:
    """Store a random graph of 4 node types and 8 edge types in one part, and open it."""
    rng, counts = np.random.default_rng(0), {f"n{t}": nodes * (t + 1) // 10 for t in range(4)}
    edges, num_edges = {}, int(nodes * degree / 8)
    for number in range(8):
        source, target = f"n{number % 4}", f"n{(number * 3 + number // 4) % 4}"
        ends = (rng.integers(0, counts[ntype], num_edges) for ntype in (source, target))
        edges[source, f"r{number}", target] = next(ends), next(ends)
    raw = RawGraph(name="relational", num_nodes=counts, edges=edges)
    owner = {ntype: np.zeros(count, np.int32) for ntype, count in counts.items()}
    write_dataset(raw, Assignment(num_parts=1, part_of=owner, method="file", seed=0), folder / "relational")
    return DistGraph(folder / "relational")


def compare_relational(g: DistGraph, whole: dgl.DGLGraph, fanouts: list[int], steps: int) -> Row:
    """Both loaders in turn, from seeds of the largest type."""
    seeds = torch.randint(0, g.num_nodes("n3"), (2 * BATCH * steps,)).unique()
    seeds = {"n3": seeds[torch.randperm(len(seeds))][: BATCH * steps]}
    ours = DataLoader(g, seeds, NeighborSampler(fanouts), batch_size=BATCH, num_threads=0)
    theirs = dgl.dataloading.DataLoader(whole, seeds, NeighborSampler(fanouts), batch_size=BATCH)
    contestants = {"dgl": loader_rates(iter(theirs)), "ours": loader_rates(iter(ours))}
    return compared(contestants, fanouts, min(steps, len(ours)))


def compared(contestants: dict[str, Iterator[float]], fanouts: list[int], steps: int) -> Row:
    """Medians of the contestants' batches, taken in turn, and of the ratio of ours to DGL's."""
    rates = in_turn({name: rates.__next__ for name, rates in contestants.items()}, steps, WARM_UP)
    medians = {f"{name}_m_edges_s": statistics.median(values) for name, values in rates.items()}
    pairs = zip(rates["ours"], rates["dgl"], strict=True)
    return {"fanouts": fanouts, **medians, "ratio": statistics.median(mine / other for mine, other in pairs)}


def kernel_rates(g: DistGraph, seeds: torch.Tensor, fanouts: list[int], direct_limit: int) -> Iterator[float]:
    """Million edges per second of the compiled call alone, batch by batch."""
    structure = g.structure(g.canonical_etypes[0])
    csc, workspace = csc_of(structure.shards[0]), Workspace(g.num_nodes(), direct_limit=direct_limit)
    draws = Draws(
        fanouts=tuple(fanouts),
        replace=False,
        exclude=np.empty(0, np.int64),
        seed=0,
        idtype=np.dtype(np.int64),
    )
    for batch in seeds.numpy().reshape(-1, BATCH):
        request = draws.request(batch, 0)
        took, (sampled, table) = timed(lambda: sample_batch(csc, request, workspace.table))  # noqa: B023
        workspace.keep(table)
        yield int(sampled.edge_ends[-1]) / took / 1e6


def loader_rates(loader: Iterator[tuple[object, object, list[dgl.DGLGraph]]]) -> Iterator[float]:
    """Million edges per second of a loader, blocks included, batch by batch."""
    while True:
        took, batch = timed(lambda: next(loader, None))
        if batch is None:
            return
        yield sum(block.num_edges() for block in batch[2]) / took / 1e6


def compare_sampling(g: DistGraph, whole: dgl.DGLGraph, fanouts: list[int], steps: int) -> Row:
    """Both loaders, and the compiled call alone, with and without a table of all nodes."""
    seeds = torch.randperm(g.num_nodes(), generator=torch.Generator().manual_seed(0))[: BATCH * steps]
    ours = DataLoader(g, seeds, NeighborSampler(fanouts), batch_size=BATCH, num_threads=0)
    theirs = dgl.dataloading.DataLoader(whole, seeds, NeighborSampler(fanouts), batch_size=BATCH)
    contestants = {
        "dgl": loader_rates(iter(theirs)),
        "ours": loader_rates(iter(ours)),
        "kernel": kernel_rates(g, seeds, fanouts, g.num_nodes()),
        "hashed": kernel_rates(g, seeds, fanouts, 0),
    }
    return compared(contestants, fanouts, steps)


def compare_slicing(g: DistGraph, steps: int, rows_of_batch: int) -> Row:
    """Gather random feature rows into a kept buffer: ours, and numpy.take with out= (clip: its fast mode)."""
    ((_, rows),) = g.kvstore.shards(g.ndata["feat"].kvstore_key)
    rng = np.random.default_rng(0)
    out = np.empty((rows_of_batch, rows.shape[1]), rows.dtype)
    source, target = as_words(rows, out)

    def rate(copy: Callable[[np.ndarray], object]) -> float:
        ids = rng.integers(0, len(rows), rows_of_batch)
        return out.nbytes / timed(lambda: copy(ids))[0] / 1e9

    contestants = {
        "ours": lambda: rate(lambda ids: copy_rows(source, ids, target)),
        "take": lambda: rate(lambda ids: np.take(rows, ids, axis=0, out=out, mode="clip")),
    }
    rates = in_turn(contestants, steps, WARM_UP)
    ours, take = (statistics.median(values) for values in rates.values())
    return {"row_bytes": rows[0].nbytes, "ours_gb_s": ours, "take_gb_s": take, "ratio": ours / take}


def judged(rows: list[Row], target: float) -> str:
    """Rows as aligned text, with whether each met its target."""
    return text_table(
        [{**row, "target": f"{target} {'met' if row['ratio'] >= target else 'MISSED'}"} for row in rows]
    )


def main(argv: list[str]) -> None:
    made = parser("sampling", __doc__)
    made.add_argument("--nodes", type=int, default=200_000)
    made.add_argument("--degree", type=float, default=25.0)
    made.add_argument("--steps", type=int, default=60, help="batches of each contestant and fan-out")
    options = made.parse_args(argv)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*CPU affinity.*")
    with tempfile.TemporaryDirectory() as folder, start_session():
        g = open_graph(options.nodes, options.degree, Path(folder))
        whole = dgl_graph(g)
        sampling = [compare_sampling(g, whole, fanouts, options.steps) for fanouts in FANOUTS]
        relations = open_relational(options.nodes, options.degree, Path(folder))
        theirs = dgl_graph(relations)
        relational = [
            compare_relational(relations, theirs, fanouts, options.steps) for fanouts in RELATIONAL_FANOUTS
        ]
        slicing = [compare_slicing(g, options.steps, options.nodes // 2)]
    tables = (
        judged(sampling, SPEED_TARGET),
        judged(relational, RELATIONAL_TARGET),
        judged(slicing, SLICING_TARGET),
    )
    print(*tables, sep="\n\n")
    write_json(options, {"sampling": sampling, "relational": relational, "slicing": slicing})
