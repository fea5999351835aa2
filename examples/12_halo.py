"""Message passing on a mesh with plain PyTorch: no DGL graph, no dataset, and dx.Halo between ranks.

    torchrun --nproc-per-node 2 examples/12_halo.py
    torchrun --nproc-per-node 2 examples/12_halo.py --pyg    # a convolution of PyG, if it is installed

Every rank owns a strip of the mesh and the edges that end there. The network learns the heat after some steps
of diffusion. Expect, in a few seconds: the same error on any number of ranks, below a tenth of the variance.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn

import dglx_dist as dx

NUM_NODES, STEPS, HIDDEN = 600, 3, 32


def make_mesh():
    """Return positions sorted from left to right, edges between near nodes, and the heat before and after."""
    draw = torch.Generator().manual_seed(0)
    positions = torch.rand(NUM_NODES, 2, generator=draw)
    positions = positions[positions[:, 0].argsort()]
    near = (torch.cdist(positions, positions) < 0.08) & ~torch.eye(NUM_NODES, dtype=torch.bool)
    sources, targets = near.nonzero().T
    before = torch.rand(NUM_NODES, 1, generator=draw)
    after = before
    degrees = near.sum(0).clamp(min=1)[:, None]
    for _ in range(STEPS):
        after = 0.5 * after + 0.5 * near.float().T @ after / degrees
    return positions, torch.stack([sources, targets]), before, after


class Layer(nn.Module):
    """Mean of the messages of the neighbours, from their rows and their relative positions."""

    def __init__(self, width):
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * width + 2, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, width))

    def forward(self, halo, x, offsets):
        sources, targets = halo.edge_index
        ends = torch.cat([halo(x)[sources], x[targets], offsets], 1)
        total = torch.zeros_like(x).index_add(0, targets, self.message(ends))
        degrees = torch.bincount(targets, minlength=len(x)).clamp(min=1)
        return x + total / degrees[:, None]


class PygLayer(nn.Module):
    """The same step with a convolution of PyG, which takes the rows of sources and of targets."""

    def __init__(self, width):
        super().__init__()
        from torch_geometric.nn import SAGEConv

        self.conv = SAGEConv((width, width), width)

    def forward(self, halo, x, offsets):
        return x + self.conv((halo(x), x), halo.edge_index).tanh()


class Network(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.encode = nn.Linear(1, HIDDEN)
        self.layers = nn.ModuleList([layer(HIDDEN) for _ in range(STEPS)])
        self.decode = nn.Linear(HIDDEN, 1)

    def forward(self, halo, x, offsets):
        x = self.encode(x)
        for layer in self.layers:
            x = layer(halo, x, offsets)
        return self.decode(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--pyg", action="store_true")
    options = parser.parse_args()
    session = dx.init()
    rank, num_ranks = session.topology.rank, session.topology.world_size

    positions, edges, before, after = make_mesh()
    first, end = (NUM_NODES * bound // num_ranks for bound in (rank, rank + 1))
    own_edges = edges[:, (edges[1] >= first) & (edges[1] < end)]
    halo = dx.Halo(end - first, own_edges)
    offsets = positions[own_edges[0]] - positions[own_edges[1]]

    torch.manual_seed(0)
    model = Network(PygLayer if options.pyg else Layer)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    for _ in range(150):
        # The loss of all ranks is the sum of these parts, so their gradients are added.
        loss = (model(halo, before[first:end], offsets) - after[first:end]).square().sum() / NUM_NODES
        optimizer.zero_grad()
        loss.backward()
        if num_ranks > 1:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
    error = dx.reduce_mean(NUM_NODES / max(end - first, 1) * loss.item(), end - first)
    if rank == 0:
        print(f"mean squared error {error:.6f} of a variance of {after.var().item():.6f}")
    dx.shutdown()


if __name__ == "__main__":
    main()
