"""A graph without features: its nodes get rows that are trained with the model.

    torchrun --nproc-per-node 2 examples/05_trainable_embeddings.py

Expect: a falling loss on each rank, and on both the same test accuracy, above 0.6, without ``feat``. The rows
are on the servers of their nodes; a step sends the gradients of the rows in its batches.

What differs from 02_data_parallel.py:

    -         [10, 5], prefetch_node_feats=["feat"], prefetch_labels=["label"]
    +         [10, 5], prefetch_labels=["label"]
    +     rows = dx.DistEmbedding(g.num_nodes(), WIDTH, "rows")
    +     row_optimizer = dx.optim.SparseAdam([rows], lr=0.02)
    -             scores = model(blocks, blocks[0].srcdata["feat"])
    +             scores = model(blocks, rows(input_nodes))
    +             row_optimizer.zero_grad()
    +             row_optimizer.step()

and the arguments of the functions that need them. With ``dtype=torch.bfloat16`` rows take half the memory.
"""

import dgl
import torch
import torch.nn.functional as F
from graph import CLASSES, make_graph
from torch import nn

import dglx_dist as dx

WIDTH = 32


class SAGE(nn.Module):
    def __init__(self, in_dim, hidden, classes):
        super().__init__()
        self.first = dgl.nn.SAGEConv(in_dim, hidden, "mean")
        self.second = dgl.nn.SAGEConv(hidden, classes, "mean")

    def forward(self, blocks, x):
        return self.second(blocks[1], F.relu(self.first(blocks[0], x)))


def train(model, rows, row_optimizer, loader, epochs):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(epochs):
        for input_nodes, _, blocks in loader:
            scores = model(blocks, rows(input_nodes))
            loss = F.cross_entropy(scores, blocks[-1].dstdata["label"])
            optimizer.zero_grad()
            row_optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            row_optimizer.step()
        print(f"epoch {epoch}: loss of the last batch {loss.item():.3f}", flush=True)


@torch.no_grad()
def accuracy(model, rows, loader):
    right, total = 0, 0
    for input_nodes, _, blocks in loader:
        scores = model(blocks, rows(input_nodes))
        right += (scores.argmax(1) == blocks[-1].dstdata["label"]).sum().item()
        total += len(scores)
    return dx.reduce_mean(right / max(total, 1), total)


def main():
    dx.init(strategy="data_parallel", seed=0)
    g = dx.distribute(make_graph())
    train_nid = dx.node_split(g.ndata["train_mask"])
    test_nid = dx.node_split(g.ndata["test_mask"])
    sampler = dgl.dataloading.NeighborSampler([10, 5], prefetch_labels=["label"])
    loader = dx.DataLoader(g, train_nid, sampler, batch_size=64, shuffle=True)
    test_loader = dx.DataLoader(g, test_nid, sampler, batch_size=64)
    rows = dx.DistEmbedding(g.num_nodes(), WIDTH, "rows")
    row_optimizer = dx.optim.SparseAdam([rows], lr=0.02)
    model = dx.wrap(SAGE(WIDTH, 64, CLASSES), g)
    train(model, rows, row_optimizer, loader, epochs=10)
    print(f"test accuracy {accuracy(model, rows, test_loader):.3f}")


if __name__ == "__main__":
    main()
