"""GraphSAGE on one process, with plain DGL: the starting point of the other examples.

    python examples/01_one_process.py

Expect, in a few seconds: the loss falls, and a test accuracy above 0.7 on a graph with ten classes.
"""

import dgl
import torch
import torch.nn.functional as F
from dgl.dataloading import DataLoader
from graph import CLASSES, make_graph
from torch import nn


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
    return right / total


def main():
    torch.manual_seed(0)
    g = make_graph()
    train_nid = g.ndata["train_mask"].nonzero().squeeze(1)
    test_nid = g.ndata["test_mask"].nonzero().squeeze(1)
    sampler = dgl.dataloading.NeighborSampler(
        [10, 5], prefetch_node_feats=["feat"], prefetch_labels=["label"]
    )
    loader = DataLoader(g, train_nid, sampler, batch_size=64, shuffle=True)
    test_loader = DataLoader(g, test_nid, sampler, batch_size=64)
    model = SAGE(g.ndata["feat"].shape[1], 64, CLASSES)
    train(model, loader, epochs=6)
    print(f"test accuracy {accuracy(model, test_loader):.3f}")


if __name__ == "__main__":
    main()
