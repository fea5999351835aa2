"""No loop at all: name a strategy and fit.

    torchrun --nproc-per-node 2 examples/04_pick_a_strategy.py --strategy data_parallel

Expect: the names of the strategies, one line per epoch with loss, accuracy and network traffic, and an exact
test accuracy above 0.75. An unknown strategy is an error with the nearest name.

What differs from 03_partition_once.py: `dx.fit` in place of the loop; the strategy is an argument.
"""

import argparse

import dgl
import torch.nn.functional as F
from graph import CLASSES, make_graph
from torch import nn

import dglx_dist as dx


class SAGE(nn.Module):
    def __init__(self, in_dim, hidden, classes):
        super().__init__()
        self.first = dgl.nn.SAGEConv(in_dim, hidden, "mean")
        self.second = dgl.nn.SAGEConv(hidden, classes, "mean")

    def inference_layers(self):
        return [lambda block, x: F.relu(self.first(block, x)), self.second]

    def forward(self, blocks, x):
        for layer, block in zip(self.inference_layers(), blocks, strict=True):
            x = layer(block, x)
        return x


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="data_parallel")
    strategy = parser.parse_args().strategy
    session = dx.init(strategy=strategy, seed=0)
    g = dx.distribute(make_graph())

    def show(record):
        if session.topology.rank == 0:
            moved = record.bytes_inside + record.bytes_outside
            print(
                f"epoch {record.epoch}: loss {record.loss:.3f}, val accuracy {record.val_accuracy:.3f}, "
                f"{moved / 1e6:.2f} MB between ranks",
                flush=True,
            )

    if session.topology.rank == 0:
        print(f"strategies: {', '.join(dx.strategy_names())}")
    model = SAGE(g.ndata["feat"].shape[1], 64, CLASSES)
    config = dx.FitConfig(epochs=6, show_progress=False)
    _, result = dx.fit(model, g, config=config, fanouts=[10, 5], batch_size=64, callbacks=[show])
    if session.topology.rank == 0:
        print(f"test accuracy {result.test_accuracy:.3f}")


if __name__ == "__main__":
    main()
