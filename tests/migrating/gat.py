"""GAT on one machine: the whole graph in every step."""

import argparse

import dgl.nn as dglnn
import torch
import torch.nn as nn
import torch.nn.functional as F
from graphs import CLASSES, citations


class GAT(nn.Module):
    def __init__(self, in_size, hidden, out_size, heads):
        super().__init__()
        self.first = dglnn.GATConv(in_size, hidden, heads, feat_drop=0.2, attn_drop=0.2, activation=F.elu)
        self.second = dglnn.GATConv(hidden * heads, out_size, 1, feat_drop=0.2, attn_drop=0.2)

    def forward(self, g, x):
        return self.second(g, self.first(g, x).flatten(1)).mean(1)


@torch.no_grad()
def evaluate(g, features, labels, mask, model):
    model.eval()
    scores = model(g, features)[mask]
    correct = (scores.argmax(1) == labels[mask]).sum()
    return correct.item() / len(scores)


def train(args, g, features, labels, masks, model):
    train_mask, val_mask, _ = masks
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
    for epoch in range(args.epochs):
        model.train()
        scores = model(g, features)
        loss = F.cross_entropy(scores[train_mask], labels[train_mask])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        accuracy = evaluate(g, features, labels, val_mask, model)
        print(f"epoch {epoch}: loss {loss.item():.4f}, accuracy {accuracy:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=30)
    args = parser.parse_args()
    g = citations()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    g = g.int().to(device)
    features = g.ndata["feat"]
    labels = g.ndata["label"]
    masks = g.ndata["train_mask"], g.ndata["val_mask"], g.ndata["test_mask"]
    model = GAT(features.shape[1], 8, CLASSES, heads=4).to(device)
    train(args, g, features, labels, masks, model)
    print(f"test accuracy {evaluate(g, features, labels, masks[2], model):.4f}")
