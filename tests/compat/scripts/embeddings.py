"""Trainable rows in place of features, written for ``dgl.distributed``; draws its own neighbours."""

import json

import dgl
import dgl.distributed
import torch as th
from torch.nn.parallel import DistributedDataParallel

from tests.compat.scripts.node_classification import SAGE, arguments, open_graph


def first_rows(shape, dtype):
    rows = th.empty(shape, dtype=dtype)
    # Each row by its columns alone, so that servers need not know which rows they have.
    rows[:] = th.linspace(-1, 1, shape[1])
    return rows


def main(args):
    g = open_graph(args)
    train = dgl.distributed.node_split(g.ndata["train_mask"], g.get_partition_book(), force_even=True)
    th.manual_seed(0)
    policy = g.get_node_partition_policy("_N")
    embedding = dgl.distributed.DistEmbedding(g.num_nodes(), 8, "rows", first_rows, policy)
    classes = int(g.ndata["labels"][th.arange(g.num_nodes())].max()) + 1
    model = DistributedDataParallel(SAGE([8, 8, classes]))
    dense = th.optim.Adam(model.parameters(), lr=0.02)
    sparse = dgl.distributed.optim.SparseAdam([embedding], lr=0.05)

    def sample(seeds):
        seeds = th.tensor(seeds)
        blocks, expected = [], seeds
        for _ in range(2):
            frontier = dgl.distributed.sample_neighbors(g, expected, -1)
            block = dgl.to_block(frontier, expected)
            expected = block.srcdata[dgl.NID]
            blocks.insert(0, block)
        return seeds, blocks

    loader = dgl.distributed.DistDataLoader(train, 1000, shuffle=True, collate_fn=sample)
    losses = []
    for _ in range(3):
        with model.join():
            for seeds, blocks in loader:
                scores = model(blocks, embedding(blocks[0].srcdata[dgl.NID]))
                loss = th.nn.functional.cross_entropy(scores, g.ndata["labels"][seeds].long())
                dense.zero_grad()
                sparse.zero_grad()
                loss.backward()
                dense.step()
                sparse.step()
                losses.append([loss.item(), len(seeds)])
    g.barrier()
    with open(f"{args.out}-{g.rank()}.json", "w") as file:
        json.dump({"losses": losses}, file)
    g.barrier()


if __name__ == "__main__":
    main(arguments())
