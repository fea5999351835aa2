"""GraphSAGE, written for ``dgl.distributed``: mini-batches, then layer-wise inference."""

import argparse
import itertools
import json

import dgl
import dgl.distributed
import torch as th
from dgl.dataloading import DistNodeDataLoader
from dgl.nn import SAGEConv
from torch.nn.parallel import DistributedDataParallel


class SAGE(th.nn.Module):
    def __init__(self, widths):
        super().__init__()
        self.widths = widths
        self.layers = th.nn.ModuleList(
            SAGEConv(here, there, "mean") for here, there in itertools.pairwise(widths)
        )

    def forward(self, blocks, h):
        for depth, (layer, block) in enumerate(zip(self.layers, blocks, strict=True)):
            h = layer(block, h)
            if depth + 1 < len(self.layers):
                h = th.relu(h)
        return h

    def infer(self, g, x, batch_size):
        every = th.ones(g.num_nodes(), dtype=th.bool)
        own = dgl.distributed.node_split(every, g.get_partition_book(), force_even=True)
        sampler = dgl.dataloading.MultiLayerFullNeighborSampler(1)
        for depth, layer in enumerate(self.layers):
            y = dgl.distributed.DistTensor(
                (g.num_nodes(), self.widths[depth + 1]), th.float32, f"h{depth}", persistent=True
            )
            for inputs, outputs, blocks in DistNodeDataLoader(g, own, sampler, batch_size=batch_size):
                rows = x[inputs]
                h = layer(blocks[0], (rows, rows[: blocks[0].num_dst_nodes()]))
                y[outputs] = th.relu(h) if depth + 1 < len(self.layers) else h
            g.barrier()
            x = y
        return x


def split(g, mask):
    book = g.get_partition_book()
    if "trainer_id" in g.ndata:
        wishes = g.ndata["trainer_id"]
        return dgl.distributed.node_split(g.ndata[mask], book, force_even=True, node_trainer_ids=wishes)
    return dgl.distributed.node_split(g.ndata[mask], book, force_even=True)


def main(args):
    g = open_graph(args)
    book = g.get_partition_book()
    train, test = split(g, "train_mask"), split(g, "test_mask")
    print(f"rank {g.rank()}: {len(train)} nodes, {len(book.partid2nids(book.partid))} in the partition")
    classes = int(g.ndata["labels"][th.arange(g.num_nodes())].max()) + 1
    th.manual_seed(0)
    model = SAGE([g.ndata["features"].shape[1], 16, classes])
    model = DistributedDataParallel(model)
    optimizer = th.optim.Adam(model.parameters(), lr=0.02)
    sampler = dgl.dataloading.NeighborSampler([-1, -1])
    loader = DistNodeDataLoader(
        g, train, sampler, batch_size=1000, shuffle=True, drop_last=False, num_workers=0
    )
    losses = []
    for _ in range(3):
        with model.join():
            for inputs, seeds, blocks in loader:
                scores = model(blocks, g.ndata["features"][inputs])
                loss = th.nn.functional.cross_entropy(scores, g.ndata["labels"][seeds].long())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append([loss.item(), len(seeds)])
    with th.no_grad():
        rows = model.module.infer(g, g.ndata["features"], 64)
    right = (rows[test].argmax(1) == g.ndata["labels"][test]).sum().item()
    with open(f"{args.out}-{g.rank()}.json", "w") as file:
        first = rows[[0]][0].tolist()
        json.dump({"losses": losses, "right": right, "tested": len(test), "first": first}, file)
    g.barrier()


def arguments():
    parser = argparse.ArgumentParser()
    for name in ("graph_name", "ip_config", "part_config", "out"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--local_rank", type=int)
    return parser.parse_args()


def open_graph(args):
    dgl.distributed.initialize(args.ip_config)
    th.distributed.init_process_group(backend="gloo")
    return dgl.distributed.DistGraph(args.graph_name, part_config=args.part_config)


if __name__ == "__main__":
    main(arguments())
