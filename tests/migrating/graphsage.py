"""GraphSAGE on one machine: mini-batches, then every node exactly, layer by layer."""

import argparse

import dgl.nn as dglnn
import torch
import torch.nn as nn
import torch.nn.functional as F
from dgl.dataloading import DataLoader, MultiLayerFullNeighborSampler, NeighborSampler
from graphs import Citations


class SAGE(nn.Module):
    def __init__(self, in_size, hidden, out_size):
        super().__init__()
        self.widths = [hidden, out_size]
        first, second = dglnn.SAGEConv(in_size, hidden, "mean"), dglnn.SAGEConv(hidden, out_size, "mean")
        self.layers = nn.ModuleList([first, second])
        self.dropout = nn.Dropout(0.3)

    def forward(self, blocks, x):
        for depth, (layer, block) in enumerate(zip(self.layers, blocks, strict=True)):
            x = layer(block, x)
            if depth + 1 < len(self.layers):
                x = self.dropout(F.relu(x))
        return x

    def inference(self, g, device, batch_size):
        x = g.ndata["feat"]
        sampler = MultiLayerFullNeighborSampler(1)
        loader = DataLoader(g, torch.arange(g.num_nodes()), sampler, device=device, batch_size=batch_size)
        for depth, layer in enumerate(self.layers):
            y = torch.empty(g.num_nodes(), self.widths[depth])
            for input_nodes, output_nodes, blocks in loader:
                h = layer(blocks[0], x[input_nodes])
                y[output_nodes[0] : output_nodes[-1] + 1] = F.relu(h) if depth + 1 < len(self.layers) else h
            x = y
        return x


def accuracy(scores, labels):
    return (scores.argmax(1) == labels).float().mean().item()


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    scores, labels = [], []
    for _, _, blocks in loader:
        scores.append(model(blocks, blocks[0].srcdata["feat"]))
        labels.append(blocks[-1].dstdata["label"])
    return accuracy(torch.cat(scores), torch.cat(labels))


@torch.no_grad()
def layerwise_infer(model, g, nid, device):
    model.eval()
    scores = model.inference(g, device, batch_size=256)
    return accuracy(scores[nid], g.ndata["label"][nid])


def train(args, device, g, dataset, model):
    sampler = NeighborSampler([10, 10], prefetch_node_feats=["feat"], prefetch_labels=["label"])
    options = {"device": device, "batch_size": 32, "num_workers": 0, "use_uva": args.mode == "mixed"}
    train_loader = DataLoader(g, dataset.train_idx, sampler, shuffle=True, **options)
    val_loader = DataLoader(g, dataset.val_idx, sampler, shuffle=False, **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
    for epoch in range(args.epochs):
        model.train()
        total = 0
        for _, _, blocks in train_loader:
            scores = model(blocks, blocks[0].srcdata["feat"])
            loss = F.cross_entropy(scores, blocks[-1].dstdata["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        result = evaluate(model, val_loader)
        print(f"epoch {epoch}: loss {total / len(train_loader):.4f}, accuracy {result:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="cpu", choices=["cpu", "mixed"])
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    dataset = Citations()
    g = dataset[0]
    device = torch.device("cpu" if args.mode == "cpu" else "cuda")
    model = SAGE(g.ndata["feat"].shape[1], 32, dataset.num_classes).to(device)
    train(args, device, g, dataset, model)
    print(f"test accuracy {layerwise_infer(model, g, dataset.test_idx, device):.4f}")
