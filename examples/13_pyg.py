"""02_data_parallel.py with layers and batches of PyTorch Geometric.

    torchrun --nproc-per-node 2 examples/13_pyg.py

Expect, in some ten seconds: both ranks print the same test accuracy, above 0.7.
It needs PyTorch Geometric: pip install torch_geometric
"""

import dgl
import torch
import torch.nn.functional as F
from graph import CLASSES, make_graph
from torch import nn
from torch_geometric.nn import SAGEConv

import dglx_dist as dx


class SAGE(nn.Module):
    def __init__(self, in_dim, hidden, classes):
        super().__init__()
        self.first = SAGEConv(in_dim, hidden)
        self.second = SAGEConv(hidden, classes)

    def forward(self, x, edge_index):
        return self.second(F.relu(self.first(x, edge_index)), edge_index)


def train(model, loader, epochs):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(epochs):
        for batch in loader:
            scores = model(batch.x, batch.edge_index)[: batch.batch_size]
            loss = F.cross_entropy(scores, batch.y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@torch.no_grad()
def accuracy(model, loader):
    right, total = 0, 0
    for batch in loader:
        scores = model(batch.x, batch.edge_index)[: batch.batch_size]
        right += (scores.argmax(1) == batch.y).sum().item()
        total += batch.batch_size
    return dx.reduce_mean(right / max(total, 1), total)


def main():
    dx.init(strategy="data_parallel", seed=0)
    g = dx.distribute(make_graph())
    train_nid = dx.node_split(g.ndata["train_mask"])
    test_nid = dx.node_split(g.ndata["test_mask"])
    sampler = dgl.dataloading.NeighborSampler(
        [10, 5], prefetch_node_feats=["feat"], prefetch_labels=["label"]
    )
    loader = dx.DataLoader(g, train_nid, sampler, batch_size=64, shuffle=True, output="pyg")
    test_loader = dx.DataLoader(g, test_nid, sampler, batch_size=64, output="pyg")
    model = dx.wrap(SAGE(g.ndata["feat"].shape[1], 64, CLASSES), g)
    train(model, loader, epochs=6)
    print(f"test accuracy {accuracy(model, test_loader):.3f}")


if __name__ == "__main__":
    main()
