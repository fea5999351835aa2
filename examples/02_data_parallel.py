"""The same GraphSAGE on any number of processes: 01_one_process.py and the lines below, nothing else.

    torchrun --nproc-per-node 2 examples/02_data_parallel.py

Expect, in some ten seconds: each rank prints its losses, and both the same test accuracy, above 0.7.
The first run partitions the graph into a folder under data/; later runs reuse it.

What differs from 01_one_process.py:

    - from dgl.dataloading import DataLoader
    + import dglx_dist as dx
    -     return right / total
    +     return dx.reduce_mean(right / max(total, 1), total)
    -     torch.manual_seed(0)
    -     g = make_graph()
    -     train_nid = g.ndata["train_mask"].nonzero().squeeze(1)
    -     test_nid = g.ndata["test_mask"].nonzero().squeeze(1)
    +     dx.init(strategy="data_parallel", seed=0)
    +     g = dx.distribute(make_graph())
    +     train_nid = dx.node_split(g.ndata["train_mask"])
    +     test_nid = dx.node_split(g.ndata["test_mask"])
    -     loader = DataLoader(g, train_nid, sampler, batch_size=64, shuffle=True)
    +     loader = dx.DataLoader(g, train_nid, sampler, batch_size=64, shuffle=True)
    -     test_loader = DataLoader(g, test_nid, sampler, batch_size=64)
    +     test_loader = dx.DataLoader(g, test_nid, sampler, batch_size=64)
    -     model = SAGE(g.ndata["feat"].shape[1], 64, CLASSES)
    +     model = dx.wrap(SAGE(g.ndata["feat"].shape[1], 64, CLASSES), g)
"""

import dgl
import torch
import torch.nn.functional as F
from graph import CLASSES, make_graph
from torch import nn

import dglx_dist as dx


class SAGE(nn.Module):
    def __init__(self, in_dim, hidden, classes):
        super().__init__()
        self.first = dgl.nn.SAGEConv(in_dim, hidden, "mean")
        self.second = dgl.nn.SAGEConv(hidden, classes, "mean")

    def forward(self, blocks, x):
        return self.second(blocks[1], F.relu(self.first(blocks[0], x)))


def train(model, loader, epochs):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(epochs):
        for _, _, blocks in loader:
            scores = model(blocks, blocks[0].srcdata["feat"])
            loss = F.cross_entropy(scores, blocks[-1].dstdata["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss of the last batch {loss.item():.3f}", flush=True)


@torch.no_grad()
def accuracy(model, loader):
    right, total = 0, 0
    for _, _, blocks in loader:
        scores = model(blocks, blocks[0].srcdata["feat"])
        right += (scores.argmax(1) == blocks[-1].dstdata["label"]).sum().item()
        total += len(scores)
    return dx.reduce_mean(right / max(total, 1), total)


def main():
    dx.init(strategy="data_parallel", seed=0)
    g = dx.distribute(make_graph())
    train_nid = dx.node_split(g.ndata["train_mask"])
    test_nid = dx.node_split(g.ndata["test_mask"])
    sampler = dgl.dataloading.NeighborSampler(
        [10, 5], prefetch_node_feats=["feat"], prefetch_labels=["label"]
    )
    loader = dx.DataLoader(g, train_nid, sampler, batch_size=64, shuffle=True)
    test_loader = dx.DataLoader(g, test_nid, sampler, batch_size=64)
    model = dx.wrap(SAGE(g.ndata["feat"].shape[1], 64, CLASSES), g)
    train(model, loader, epochs=6)
    print(f"test accuracy {accuracy(model, test_loader):.3f}")


if __name__ == "__main__":
    main()
