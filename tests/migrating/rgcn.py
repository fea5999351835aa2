"""R-GCN on one machine: mini-batches of a graph with typed edges, whose nodes have trainable rows only."""

import argparse

import dgl
import torch
import torch.nn as nn
import torch.nn.functional as F
from dgl.dataloading import DataLoader, MultiLayerNeighborSampler
from dgl.nn import RelGraphConv
from graphs import CLASSES, relations


class RGCN(nn.Module):
    def __init__(self, num_nodes, hidden, out_size, num_rels):
        super().__init__()
        self.emb = nn.Embedding(num_nodes, hidden)
        self.first = RelGraphConv(hidden, hidden, num_rels, regularizer="basis", num_bases=num_rels)
        self.second = RelGraphConv(hidden, out_size, num_rels, regularizer="basis", num_bases=num_rels)

    def forward(self, blocks):
        x = self.emb(blocks[0].srcdata[dgl.NID])
        x = F.relu(self.first(blocks[0], x, blocks[0].edata["rel"], blocks[0].edata["norm"]))
        return self.second(blocks[1], x, blocks[1].edata["rel"], blocks[1].edata["norm"])


def scores_of(model, blocks):
    for block in blocks:
        block.edata["norm"] = dgl.norm_by_dst(block).unsqueeze(1)
    return model(blocks)


@torch.no_grad()
def evaluate(model, labels, loader):
    model.eval()
    correct, total = 0, 0
    for _, output_nodes, blocks in loader:
        correct += (scores_of(model, blocks).argmax(1) == labels[output_nodes]).sum().item()
        total += len(output_nodes)
    return correct / total


def train(args, device, g, labels, model):
    train_idx = g.ndata["train_mask"].nonzero().squeeze(1)
    val_idx = g.ndata["val_mask"].nonzero().squeeze(1)
    sampler = MultiLayerNeighborSampler([4, 4], prefetch_edge_feats=["rel"])
    train_loader = DataLoader(g, train_idx, sampler, device=device, batch_size=50, shuffle=True)
    val_loader = DataLoader(g, val_idx, sampler, device=device, batch_size=50, shuffle=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-2)
    for epoch in range(args.epochs):
        model.train()
        total = 0
        for _, output_nodes, blocks in train_loader:
            loss = F.cross_entropy(scores_of(model, blocks), labels[output_nodes])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        accuracy = evaluate(model, labels, val_loader)
        print(f"epoch {epoch}: loss {total / len(train_loader):.4f}, accuracy {accuracy:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    args = parser.parse_args()
    g = relations()
    num_rels = int(g.edata["rel"].max()) + 1
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = RGCN(g.num_nodes(), 16, CLASSES, num_rels).to(device)
    labels = g.ndata["label"].to(device)
    train(args, device, g, labels, model)
    test_idx = g.ndata["test_mask"].nonzero().squeeze(1)
    sampler = MultiLayerNeighborSampler([-1, -1], prefetch_edge_feats=["rel"])
    loader = DataLoader(g, test_idx, sampler, device=device, batch_size=50)
    print(f"test accuracy {evaluate(model, labels, loader):.4f}")
