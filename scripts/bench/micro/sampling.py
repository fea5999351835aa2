"""Neighbour sampling beside stock DGL, and slicing beside NumPy: one thread, interleaved, medians.

    OMP_NUM_THREADS=1 python scripts/bench sampling --json sampling.json

Both loaders see the built-in graph (200,000 nodes, 5 M edges), batches of 1000 and the same seeds in turn,
and both figures include building the blocks. DGL is used as it comes: int64, its fused sampler. Ours runs in
the calling thread. "hashed" is ours with the numbering of graphs too large for a table of all nodes. The
second table has a graph of 4 node types and 8 edge types; DGL's fused sampler takes several types as well.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

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

FANOUTS = ([15, 10, 5], [25, 10])
BATCH = 1000
RELATIONAL_FANOUTS = ([5, 5], [10, 5, 3])
SPEED_TARGET, RELATIONAL_TARGET, SLICING_TARGET = 1.7, 1.7, 0.8
Row = dict[str, object]


def open_graph(nodes: int, degree: float, folder: Path) -> DistGraph:
    """Generate the built-in graph, store it in one part, and open it."""
    raw = generate(SyntheticConfig(nodes=nodes, degree=degree))
    owner = {NODE_TYPE: np.zeros(nodes, np.int32)}
    write_dataset(raw, Assignment(num_parts=1, part_of=owner, method="file", seed=0), folder / "graph")
    return DistGraph(folder / "graph")


def dgl_graph(g: DistGraph) -> dgl.DGLGraph:
    """The same graph as DGL has it, with int64 ids and the in-edges ready."""
    shard = g.structure(g.canonical_etypes[0]).shards[0]
    indptr, indices = (torch.from_numpy(array.astype(np.int64)) for array in (shard.indptr, shard.indices))
    whole = dgl.graph(("csc", (indptr, indices, torch.empty(0, dtype=torch.int64))), num_nodes=g.num_nodes())
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


def dgl_relational(g: DistGraph) -> dgl.DGLGraph:
    """The same graph as DGL has it, with int64 ids and the in-edges ready."""
    shards = {etype: g.structure(etype).shards[0] for etype in g.canonical_etypes}
    data = {
        etype: ("csc", tuple(torch.from_numpy(array.astype(np.int64)) for array in arrays))
        for etype, arrays in (
            (etype, (shard.indptr, shard.indices, np.empty(0))) for etype, shard in shards.items()
        )
    }
    return dgl.heterograph(data, num_nodes_dict={ntype: g.num_nodes(ntype) for ntype in g.ntypes}).formats(
        "csc"
    )


def compare_relational(g: DistGraph, whole: dgl.DGLGraph, fanouts: list[int], steps: int) -> Row:
    """Both loaders in turn, from seeds of the largest type."""
    seeds = torch.randint(0, g.num_nodes("n3"), (2 * BATCH * steps,)).unique()
    seeds = {"n3": seeds[torch.randperm(len(seeds))][: BATCH * steps]}
    ours = DataLoader(g, seeds, NeighborSampler(fanouts), batch_size=BATCH, num_threads=0)
    theirs = dgl.dataloading.DataLoader(whole, seeds, NeighborSampler(fanouts), batch_size=BATCH)
    contestants = {"dgl": loader_rates(iter(theirs)), "ours": loader_rates(iter(ours))}
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(min(steps, len(ours))):
        for name, contestant in contestants.items():
            rates[name].append(next(contestant))
    medians = {name: statistics.median(values[3:]) for name, values in rates.items()}
    ratio = statistics.median(
        mine / other for mine, other in zip(rates["ours"][3:], rates["dgl"][3:], strict=True)
    )
    return {
        "fanouts": fanouts,
        **{f"{name}_m_edges_s": rate for name, rate in medians.items()},
        "ratio": ratio,
    }


def seconds(work: Callable[[], object]) -> tuple[float, object]:
    """How long ``work`` takes, and what it returns."""
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result


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
        took, (sampled, table) = seconds(lambda: sample_batch(csc, request, workspace.table))  # noqa: B023
        workspace.keep(table)
        yield int(sampled.edge_ends[-1]) / took / 1e6


def loader_rates(loader: Iterator[tuple[object, object, list[dgl.DGLGraph]]]) -> Iterator[float]:
    """Million edges per second of a loader, blocks included, batch by batch."""
    while True:
        took, batch = seconds(lambda: next(loader, None))
        if batch is None:
            return
        yield sum(block.num_edges() for block in batch[2]) / took / 1e6


def compare_sampling(g: DistGraph, whole: dgl.DGLGraph, fanouts: list[int], steps: int) -> Row:
    """Take the contestants' batches in turn, so that a slow moment of the machine hits all of them."""
    seeds = torch.randperm(g.num_nodes(), generator=torch.Generator().manual_seed(0))[: BATCH * steps]
    ours = DataLoader(g, seeds, NeighborSampler(fanouts), batch_size=BATCH, num_threads=0)
    theirs = dgl.dataloading.DataLoader(whole, seeds, NeighborSampler(fanouts), batch_size=BATCH)
    contestants = {
        "dgl": loader_rates(iter(theirs)),
        "ours": loader_rates(iter(ours)),
        "kernel": kernel_rates(g, seeds, fanouts, g.num_nodes()),
        "hashed": kernel_rates(g, seeds, fanouts, 0),
    }
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(steps):
        for name, contestant in contestants.items():
            rates[name].append(next(contestant))
    # The first batches page memory in, and compile.
    medians = {name: statistics.median(values[3:]) for name, values in rates.items()}
    pairs = zip(rates["ours"][3:], rates["dgl"][3:], strict=True)
    ratio = statistics.median(mine / other for mine, other in pairs)
    return {
        "fanouts": fanouts,
        **{f"{name}_m_edges_s": rate for name, rate in medians.items()},
        "ratio": ratio,
    }


def compare_slicing(g: DistGraph, steps: int, rows_of_batch: int) -> Row:
    """Gather random feature rows into a kept buffer: ours, and numpy.take with out= (clip: its fast mode)."""
    ((_, rows),) = g.kvstore.shards(g.ndata["feat"].kvstore_key)
    rng = np.random.default_rng(0)
    out = np.empty((rows_of_batch, rows.shape[1]), rows.dtype)
    source, target = as_words(rows, out)
    rates: dict[str, list[float]] = {"ours": [], "take": []}
    for _ in range(steps):
        ids = rng.integers(0, len(rows), rows_of_batch)
        work = {
            "ours": lambda ids=ids: copy_rows(source, ids, target),
            "take": lambda ids=ids: np.take(rows, ids, axis=0, out=out, mode="clip"),
        }
        for name, call in work.items():
            rates[name].append(out.nbytes / seconds(call)[0] / 1e9)
    ours, take = (statistics.median(values[3:]) for values in rates.values())
    return {"row_bytes": rows[0].nbytes, "ours_gb_s": ours, "take_gb_s": take, "ratio": ours / take}


def table(rows: list[Row], target: float) -> str:
    """Rows as aligned text, with whether each met its target."""
    head = [*rows[0], "target"]
    cells = [
        [f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()]
        + [f"{target} {'met' if float(str(row['ratio'])) >= target else 'MISSED'}"]
        for row in rows
    ]
    widths = [max(len(line[column]) for line in [head, *cells]) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in [head, *cells]
    )


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python scripts/bench sampling",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--nodes", type=int, default=200_000)
    parser.add_argument("--degree", type=float, default=25.0)
    parser.add_argument("--steps", type=int, default=60, help="batches of each contestant and fan-out")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*CPU affinity.*")
    with tempfile.TemporaryDirectory() as folder, start_session():
        g = open_graph(options.nodes, options.degree, Path(folder))
        whole = dgl_graph(g)
        sampling = [compare_sampling(g, whole, fanouts, options.steps) for fanouts in FANOUTS]
        relations = open_relational(options.nodes, options.degree, Path(folder))
        theirs = dgl_relational(relations)
        relational = [
            compare_relational(relations, theirs, fanouts, options.steps) for fanouts in RELATIONAL_FANOUTS
        ]
        slicing = [compare_slicing(g, options.steps, options.nodes // 2)]
    print(
        table(sampling, SPEED_TARGET),
        table(relational, RELATIONAL_TARGET),
        table(slicing, SLICING_TARGET),
        sep="\n\n",
    )
    if options.json:
        options.json.write_text(
            json.dumps({"sampling": sampling, "relational": relational, "slicing": slicing}, indent=1)
        )
