"""Small graphs, and how the same script is run with DGL's own ``dgl.distributed`` and with ours."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import dgl
import torch

SCRIPTS = Path(__file__).parent / "scripts"


def paper_graph(nodes: int = 60, seed: int = 0) -> dgl.DGLGraph:
    """Communities of 3 classes; features that tell the class, roughly; every node has an in-edge."""
    draw = torch.Generator().manual_seed(seed)
    label = torch.arange(nodes) % 3
    source = torch.randint(nodes // 3, (5 * nodes,), generator=draw) * 3
    destination = torch.arange(nodes).repeat(5)
    # Four edges of five stay in the class.
    stray = torch.randint(nodes, (5 * nodes,), generator=draw)
    keep = torch.rand(5 * nodes, generator=draw) < 0.8
    source = torch.where(keep, source + label[destination], stray)
    pairs = torch.unique(torch.stack([source, destination]), dim=1)
    graph = dgl.graph((pairs[0], pairs[1]), num_nodes=nodes)
    noise = torch.randn(nodes, 6, generator=draw)
    graph.ndata["features"] = torch.nn.functional.one_hot(label, 6).float() + 0.3 * noise
    graph.ndata["labels"] = label
    graph.ndata["train_mask"] = torch.arange(nodes) % 5 < 3
    graph.ndata["test_mask"] = torch.arange(nodes) % 5 == 4
    graph.edata["mark"] = torch.arange(graph.num_edges())
    graph.edata["weight"] = (torch.arange(graph.num_edges()) % 4 > 0).float()
    return graph


def typed_graph(papers: int = 24, authors: int = 15) -> dgl.DGLGraph:
    draw = torch.Generator().manual_seed(1)
    label = torch.arange(papers) % 3
    writers = torch.arange(papers).repeat(3) * 7 % authors
    cited = torch.randint(papers, (2 * papers,), generator=draw)
    written, citing = torch.arange(papers).repeat(3), torch.arange(papers).repeat(2)
    graph = dgl.heterograph(
        {
            ("author", "writes", "paper"): (writers, written),
            ("paper", "cites", "paper"): (citing, cited),
            ("paper", "written_by", "author"): (written, writers),
        }
    )
    graph.nodes["paper"].data["features"] = torch.nn.functional.one_hot(label, 4).float()
    graph.nodes["paper"].data["labels"] = label
    graph.nodes["paper"].data["train_mask"] = torch.arange(papers) % 4 > 0
    for etype in graph.canonical_etypes:
        graph.edges[etype].data["mark"] = torch.arange(graph.num_edges(etype))
    return graph


def play(runs: list[list[str]], ours: bool) -> None:
    """Run scripts in this rank, one after the other, each as a command line of its own would.

    Args:
        runs: Of ours the words behind ``-m dglx_dist.run``, of stock DGL script and arguments.
        ours: Whether ``dgl.distributed`` is this package's.
    """
    import dgl.distributed

    from dglx_dist.run import main

    for words in runs:
        if ours:
            main(words)
        else:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
        dgl.distributed.exit_client()
        # What the command line told, which the next one would add to.
        for name in ("DGLX_STRATEGY", "DGLX_OPTIONS"):
            os.environ.pop(name, None)
        if torch.distributed.is_initialized():
            # It serves the others: a second group would meet the keys of the first.
            torch.distributed.init_process_group = lambda *_, **__: None


def run_under_torchrun(script: str, arguments: list[str]) -> str:
    """Run a script of this folder as users do, in one process; returns what it wrote to standard error."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    # What DGL's own launcher sets, which is nothing to us.
    launcher = {"DGL_DIST_MODE": "distributed", "DGL_ROLE": "client", "DGL_NUM_SERVER": "1"}
    done = subprocess.run(
        # As torch.distributed.launch hands a rank its number.
        [*command, "-m", "dglx_dist.run", "--local-rank=0", "--", str(SCRIPTS / script), *arguments],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **launcher},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr


def read_report(path: Path) -> Any:
    return json.loads(path.read_text())
