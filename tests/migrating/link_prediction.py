"""Link prediction on one machine: edges against random pairs, no edge of a batch in its own blocks."""

import argparse

import dgl.nn as dglnn
import torch
import torch.nn as nn
import torch.nn.functional as F
from dgl.dataloading import DataLoader, NeighborSampler, as_edge_prediction_sampler, negative_sampler
from graphs import links


class SAGE(nn.Module):
    def __init__(self, in_size, hidden):
        super().__init__()
        self.first = dglnn.SAGEConv(in_size, hidden, "mean")
        self.second = dglnn.SAGEConv(hidden, hidden, "mean")

    def forward(self, blocks, x):
        return 3 * F.normalize(self.second(blocks[1], F.relu(self.first(blocks[0], x))))


def scores_of(pairs, h):
    u, v = pairs.edges()
    return (h[u] * h[v]).sum(1)


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    right = total = 0
    for _, pairs, negative_pairs, blocks in loader:
        h = model(blocks, blocks[0].srcdata["feat"])
        right += (scores_of(pairs, h) > scores_of(negative_pairs, h)).sum().item()
        total += pairs.num_edges()
    return right / total


def train(args, loader, model):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(args.epochs):
        model.train()
        for _, pairs, negative_pairs, blocks in loader:
            h = model(blocks, blocks[0].srcdata["feat"])
            positive, negative = scores_of(pairs, h), scores_of(negative_pairs, h)
            truth = torch.cat([torch.ones_like(positive), torch.zeros_like(negative)])
            loss = F.binary_cross_entropy_with_logits(torch.cat([positive, negative]), truth)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    g = links()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    half = g.num_edges() // 2
    reverse = torch.cat([torch.arange(half, 2 * half), torch.arange(half)])
    train_edges = g.edata["train_mask"].nonzero().squeeze(1)
    test_edges = g.edata["test_mask"].nonzero().squeeze(1)
    sampler = as_edge_prediction_sampler(
        NeighborSampler([10, 10], mask="train_mask", prefetch_node_feats=["feat"]),
        exclude="reverse_id",
        reverse_eids=reverse,
        negative_sampler=negative_sampler.Uniform(1),
    )
    loader = DataLoader(g, train_edges, sampler, device=device, batch_size=128, shuffle=True)
    model = SAGE(g.ndata["feat"].shape[1], 32).to(device)
    train(args, loader, model)
    test_loader = DataLoader(g, test_edges, sampler, device=device, batch_size=128)
    print(f"test accuracy {evaluate(model, test_loader):.4f}")
