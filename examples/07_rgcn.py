"""R-GCN on a graph of several types, some without features: these get trainable rows.

    torchrun --nproc-per-node 2 examples/07_rgcn.py --strategy data_parallel

Expect, in half a minute: one line per epoch, and an exact test accuracy above 0.8 over six topics. The
papers' features alone give about 0.4.

What differs from 05_trainable_embeddings.py: ids, features and labels come by node type; `EntityInputs` takes
each type's rows from its features or its embedding; `dx.evaluate` takes the same inputs.
"""

import argparse

import dgl
import torch
import torch.nn.functional as F
from typed_graph import TOPICS, make_typed_graph

import dglx_dist as dx
from dglx_dist.training.relational import RGCN, EntityInputs

HIDDEN = 32


def build_model(g, inputs):
    # RGCN aggregates all relations in one product: many small ones would take most of the time.
    return RGCN(g, inputs.feature_widths, HIDDEN, TOPICS, dropout=0.3, out_types=["paper"])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="data_parallel")
    session = dx.init(strategy=parser.parse_args().strategy, seed=0)
    g = dx.distribute(make_typed_graph())
    papers = dx.node_split(g.nodes["paper"].data["train_mask"], ntype="paper")
    sampler = dgl.dataloading.NeighborSampler(
        [8, 8],
        prefetch_node_feats={"paper": ["feat"], "venue": ["feat"]},
        prefetch_labels={"paper": ["label"]},
    )
    loader = dx.DataLoader(g, {"paper": papers}, sampler, batch_size=32, shuffle=True)
    authors = dx.DistEmbedding(
        g.num_nodes("author"), HIDDEN, "author", graph=g, part_policy=g.get_node_partition_policy("author")
    )
    inputs = EntityInputs(g, embeddings={"author": authors})
    model = dx.wrap(build_model(g, inputs), g)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    sparse = dx.optim.SparseAdam([authors], lr=0.01)
    for epoch in range(8):
        for _, _, blocks in loader:
            scores = model(blocks, inputs(blocks[0]))["paper"]
            loss = F.cross_entropy(scores, blocks[-1].dstnodes["paper"].data["label"])
            optimizer.zero_grad()
            sparse.zero_grad()
            loss.backward()
            optimizer.step()
            sparse.step()
        accuracy = dx.evaluate(model, g, ntype="paper", inputs=inputs.tensors)
        if session.topology.rank == 0:
            print(f"epoch {epoch}: validation accuracy {accuracy['val_mask']:.3f}", flush=True)
    if session.topology.rank == 0:
        print(f"test accuracy {accuracy['test_mask']:.3f}")


if __name__ == "__main__":
    main()
