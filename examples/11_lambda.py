"""Tensor work on stateless workers, as in Dorylus: epochs overlap, so `dx.fit` replaces the loop.

    torchrun --nproc-per-node 2 examples/11_lambda.py

Expect, in some fifteen seconds: rank 0 prints every tenth loss, both ranks the same test accuracy, above 0.7,
and rank 0 the cost of the run on functions, at AWS's prices. The ranks sum over edges; two worker processes
per rank, with numpy and pyzmq only, do the rest. With executor="aws" they are functions of AWS Lambda.
Epochs overlap by one until the training accuracy is 0.8, and are exact from then on.

What differs from 04_pick_a_strategy.py: the strategy and its options; every step takes the whole graph, so
there are neither fan-outs nor batches, and evaluation, before which the pipeline empties, comes at the end.
"""

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
    session = dx.init(
        strategy="lambda", mode="async", staleness=1, switch_at=0.8, intervals=3, workers=2, seed=0
    )
    g = dx.distribute(make_graph())

    def show(record):
        if session.topology.rank == 0 and record.epoch % 10 == 9:
            print(f"epoch {record.epoch}: loss {record.loss:.3f}", flush=True)

    model = SAGE(g.ndata["feat"].shape[1], 64, CLASSES)
    config = dx.FitConfig(epochs=40, eval_every=0, show_progress=False)
    _, result = dx.fit(model, g, config=config, callbacks=[show])
    print(f"test accuracy {result.test_accuracy:.3f}")
    if session.topology.rank == 0:
        print(f"synchronous from epoch {result.account['synchronous_from']}")
        print(f"cost {result.account['text']}")


if __name__ == "__main__":
    main()
