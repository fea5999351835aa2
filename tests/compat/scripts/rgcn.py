"""R-GCN on a graph of several types, written for ``dgl.distributed``: features here, trainable rows there."""

import json

import dgl
import dgl.distributed
import torch as th
from dgl.dataloading import DistNodeDataLoader
from dgl.nn import GraphConv, HeteroGraphConv
from torch.nn.parallel import DistributedDataParallel

from tests.compat.scripts.node_classification import arguments, open_graph


class Inputs(th.nn.Module):
    """Rows of every type in one width: projected features, or an embedding outside of the module."""

    def __init__(self, g, width):
        super().__init__()
        self.g = g
        self.projected = th.nn.ModuleDict()
        self.rows = {}
        for ntype in g.ntypes:
            if "features" in g.nodes[ntype].data:
                self.projected[ntype] = th.nn.Linear(g.nodes[ntype].data["features"].shape[1], width)
            else:
                policy = g.get_node_partition_policy(ntype)
                name = f"rows of {ntype}"
                self.rows[ntype] = dgl.distributed.DistEmbedding(
                    g.num_nodes(ntype), width, name, first_rows, policy
                )

    def forward(self, nodes):
        return {
            ntype: self.projected[ntype](self.g.nodes[ntype].data["features"][ids])
            if ntype in self.projected
            else self.rows[ntype](ids)
            for ntype, ids in nodes.items()
        }


def first_rows(shape, dtype):
    return th.linspace(-1, 1, shape[1], dtype=dtype).repeat(shape[0], 1)


class RGCN(th.nn.Module):
    def __init__(self, relations, width, classes):
        super().__init__()
        self.near, self.far = (
            HeteroGraphConv(
                {name: GraphConv(width, out, norm="right") for name in relations}, aggregate="sum"
            )
            for out in (width, classes)
        )

    def forward(self, blocks, h):
        h = self.near(blocks[0], h)
        return self.far(blocks[1], {ntype: th.relu(rows) for ntype, rows in h.items()})


def main(args):
    g = open_graph(args)
    book, data = g.get_partition_book(), g.nodes["paper"].data
    train = dgl.distributed.node_split(data["train_mask"], book, ntype="paper", force_even=True)
    th.manual_seed(0)
    classes = int(data["labels"][th.arange(g.num_nodes("paper"))].max()) + 1
    inputs = Inputs(g, 8)
    model = RGCN(g.etypes, 8, classes)
    inputs = DistributedDataParallel(inputs)
    model = DistributedDataParallel(model, find_unused_parameters=True)
    dense = th.optim.Adam([*model.parameters(), *inputs.parameters()], lr=0.02)
    sparse = dgl.distributed.optim.SparseAdam(list(inputs.module.rows.values()), lr=0.05)
    loader = DistNodeDataLoader(
        g,
        {"paper": train},
        dgl.dataloading.MultiLayerFullNeighborSampler(2),
        batch_size=1000,
        shuffle=True,
    )
    losses = []
    for _ in range(3):
        for nodes, seeds, blocks in loader:
            # Of the types of the seeds alone: DGL leaves out edge types of which nothing was drawn.
            (scores,) = model(blocks, inputs(nodes)).values()
            loss = th.nn.functional.cross_entropy(scores, data["labels"][seeds["paper"]].long())
            dense.zero_grad()
            sparse.zero_grad()
            loss.backward()
            dense.step()
            sparse.step()
            losses.append([loss.item(), len(seeds["paper"])])
    with open(f"{args.out}-{g.rank()}.json", "w") as file:
        json.dump({"losses": losses}, file)
    g.barrier()


if __name__ == "__main__":
    main(arguments())
