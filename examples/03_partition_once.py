"""Partition the graph once; train on the folder, evaluate exactly, and resume from a checkpoint.

    python examples/03_partition_once.py --partition          once, on one machine
    torchrun --nproc-per-node 2 examples/03_partition_once.py   as often as you like

Expect: the first prints how the original ids map to the new ones. The second prints one line per epoch and
an exact test accuracy above 0.75; a second start resumes from its checkpoint for five more epochs.

What differs from 02_data_parallel.py: `dx.partition_graph` in place of `dx.distribute`, `dx.DistGraph` on
the folder, `inference_layers` for exact evaluation, and `dx.checkpoints`: two lines.
"""

import sys
from pathlib import Path

import dgl
import torch
import torch.nn.functional as F
from graph import CLASSES, make_graph
from torch import nn

import dglx_dist as dx

FOLDER = Path("data/example")
CHECKPOINTS = Path("runs/example/checkpoints")
EPOCHS = 5


class SAGE(nn.Module):
    def __init__(self, in_dim, hidden, classes):
        super().__init__()
        self.first = dgl.nn.SAGEConv(in_dim, hidden, "mean")
        self.second = dgl.nn.SAGEConv(hidden, classes, "mean")

    def inference_layers(self):
        """One (block, rows) -> rows per layer: all that exact evaluation needs to know."""
        return [lambda block, x: F.relu(self.first(block, x)), self.second]

    def forward(self, blocks, x):
        for layer, block in zip(self.inference_layers(), blocks, strict=True):
            x = layer(block, x)
        return x


def partition():
    nodes, _ = dx.partition_graph(
        make_graph(), FOLDER.name, 4, FOLDER.parent, balance=["train"], return_mapping=True, overwrite=True
    )
    print(f"new node 0 was node {nodes[0].item()}, new node 1 was node {nodes[1].item()}")


def main():
    session = dx.init(strategy="data_parallel", seed=0)
    # Four parts, any number of ranks: the two are independent.
    g = dx.DistGraph(FOLDER)
    sampler = dgl.dataloading.NeighborSampler(
        [10, 5], prefetch_node_feats=["feat"], prefetch_labels=["label"]
    )
    loader = dx.DataLoader(g, dx.node_split(g.ndata["train_mask"]), sampler, batch_size=64, shuffle=True)
    model = dx.wrap(SAGE(g.ndata["feat"].shape[1], 64, CLASSES), g)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    # Goes on from the newest checkpoint, if there is one.
    saved = dx.checkpoints(CHECKPOINTS, model, optimizer, loader, every=1, keep=2)
    for epoch in range(saved.epoch, saved.epoch + EPOCHS):
        for _, _, blocks in loader:
            scores = model(blocks, blocks[0].srcdata["feat"])
            loss = F.cross_entropy(scores, blocks[-1].dstdata["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            saved.step()
        accuracy = dx.evaluate(model, g)
        if session.topology.rank == 0:
            print(f"epoch {epoch}: validation accuracy {accuracy['val_mask']:.3f}", flush=True)
    if session.topology.rank == 0:
        print(f"test accuracy {accuracy['test_mask']:.3f}")


if __name__ == "__main__":
    partition() if "--partition" in sys.argv else main()
