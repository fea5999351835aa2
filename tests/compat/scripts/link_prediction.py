"""GraphSAGE without labels, written for ``dgl.distributed``: edges against pairs that are none."""

import json

import dgl
import dgl.distributed
import dgl.function as fn
import torch as th
from dgl.dataloading import DistEdgeDataLoader
from torch.nn.parallel import DistributedDataParallel

from tests.compat.scripts.node_classification import SAGE, arguments, open_graph


def score(graph, h):
    with graph.local_scope():
        graph.ndata["h"] = h
        graph.apply_edges(fn.u_dot_v("h", "h", "score"))
        return graph.edata["score"]


def main(args):
    g = open_graph(args)
    every = th.ones(g.num_edges(), dtype=th.bool)
    edges = dgl.distributed.edge_split(every, g.get_partition_book(), force_even=True)
    th.manual_seed(0)
    model = SAGE([g.ndata["features"].shape[1], 16, 16])
    model = DistributedDataParallel(model)
    optimizer = th.optim.Adam(model.parameters(), lr=0.01)
    loader = DistEdgeDataLoader(
        g,
        edges,
        dgl.dataloading.NeighborSampler([5, 5]),
        exclude="reverse_id",
        reverse_eids=th.arange(g.num_edges()),  # the edges themselves, as in DGL's own example
        negative_sampler=dgl.dataloading.negative_sampler.Uniform(1),
        batch_size=400,
        shuffle=True,
    )
    losses, overlaps = [], 0
    for _ in range(3):
        with model.join():
            for inputs, positive, negative, blocks in loader:
                chosen = positive.edata[dgl.EID]
                overlaps += sum(int(th.isin(block.edata[dgl.EID], chosen).sum()) for block in blocks)
                h = model(blocks, g.ndata["features"][inputs])
                scores = th.cat([score(positive, h), score(negative, h)])
                expected = th.cat([th.ones(positive.num_edges(), 1), th.zeros(negative.num_edges(), 1)])
                loss = th.nn.functional.binary_cross_entropy_with_logits(scores, expected)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append([loss.item(), positive.num_edges()])
    with open(f"{args.out}-{g.rank()}.json", "w") as file:
        json.dump({"losses": losses, "overlaps": overlaps}, file)
    g._client.barrier()


if __name__ == "__main__":
    main(arguments())
