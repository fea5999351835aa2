"""Small graphs, and how the same script is run with DGL's own ``dgl.distributed`` and with ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import dgl
import torch

SCRIPTS = Path(__file__).parent / "scripts"
STOCK = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
}


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
    """Papers with features and labels, authors without."""
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


def run_script(name: str, arguments: list[str], *, ours: bool, torchrun: bool = False) -> str:
    """Run a script of this folder in a process of its own; returns what it wrote to standard error."""
    command, launcher = [sys.executable], {}
    if torchrun:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
        # What DGL's own launcher sets, which is nothing to us.
        launcher = {"DGL_DIST_MODE": "distributed", "DGL_ROLE": "client", "DGL_NUM_SERVER": "1"}
    if ours:
        command += ["-m", "dglx_dist.run", "--"]
    command.append(str(SCRIPTS / name))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("DGL")}
    done = subprocess.run(
        [*command, *arguments],
        env={**environment, **STOCK, **launcher, "MASTER_PORT": str(_free_port())},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr


def told(path: Path) -> Any:
    """What a script wrote."""
    return json.loads(path.read_text())


def _free_port() -> int:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
