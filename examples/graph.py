"""The graph of the examples as a plain DGLGraph: 5000 nodes with feat, label and the three masks."""

import dgl
import torch

from dglx_dist.data.sources import load_dataset

NODES = 5000
CLASSES = 10


def make_graph():
    """Return the built-in graph; the same at every call."""
    raw = load_dataset(f"synthetic:nodes={NODES},degree=20,seed=0")
    (edges,) = raw.edges.values()
    g = dgl.graph(tuple(torch.as_tensor(ends).long() for ends in edges), num_nodes=NODES)
    for name, values in raw.node_data["_N"].items():
        g.ndata[name] = torch.as_tensor(values)
    return g
