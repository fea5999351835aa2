"""DistMult on a generated knowledge graph: the same figures on one process and on two servers."""

from typing import Any

import dgl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dglx_dist as dx
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.records import Assignment, RawGraph
from dglx_dist.training.fit_config import FitConfig
from dglx_dist.training.link import DistMult, edge_scores
from dglx_dist.training.metrics import KnownEdges, hits_at, mrr, rank_of_answer
from dglx_dist.training.relational import EntityInputs
from dglx_dist.training.tasks import LinkPrediction
from tests.helpers.ranks import run_ranks

NUM_ENTITIES, NUM_CLUSTERS, NUM_RELATIONS, WIDTH = 48, 4, 3, 8
EPOCHS = 30


def raw_graph() -> RawGraph:
    """Relation r joins i to j of the same cluster where i + j leaves r when divided by 3."""
    ids = np.arange(NUM_ENTITIES)
    u, v = (ends.reshape(-1) for ends in np.meshgrid(ids, ids))
    together = (u % NUM_CLUSTERS == v % NUM_CLUSTERS) & (u != v)
    edges, masks = {}, {}
    for relation in range(NUM_RELATIONS):
        etype = ("_N", f"r{relation}", "_N")
        kept = together & ((u + v) % NUM_RELATIONS == relation)
        edges[etype] = (u[kept], v[kept])
        # Both directions of an edge are for training, or neither.
        masks[etype] = {"train_mask": (np.minimum(u, v) * 7 + np.maximum(u, v))[kept] % 5 != 0}
    return RawGraph(name="kg", num_nodes={"_N": NUM_ENTITIES}, edges=edges, edge_data=masks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("kg") / "parts"
    part_of = {"_N": np.random.default_rng(0).integers(2, size=NUM_ENTITIES).astype(np.int32)}
    write_dataset(raw_graph(), Assignment(num_parts=2, part_of=part_of, method="test", seed=0), folder)
    return str(folder)


class Pairs(nn.Module):
    def __init__(self, etypes: Any) -> None:
        super().__init__()
        self.etypes = etypes
        self.decoder = DistMult(len(etypes), WIDTH)

    def forward(self, blocks: Any, h: dict[str, Tensor], *graphs: Any) -> list[Tensor]:
        rows = h["_N"][: blocks[-1].num_dst_nodes()]
        return [torch.cat(list(edge_scores(self.decoder, g, rows, self.etypes).values())) for g in graphs]


def loader_of(g: dx.DistGraph) -> Any:
    eids = {
        etype: dx.edge_split(g.edges[etype].data["train_mask"], etype=etype) for etype in g.canonical_etypes
    }
    return dx.DistEdgeDataLoader(
        g,
        eids,
        dgl.dataloading.NeighborSampler([0]),
        negative_sampler=dx.negative.Uniform(3),
        batch_size=1000,
        shuffle=True,
    )


def triples_of(g: dx.DistGraph) -> tuple[Tensor, Tensor]:
    columns, masks = [], []
    for number, etype in enumerate(g.canonical_etypes):
        u, v = g.find_edges(torch.arange(g.num_edges(etype)), etype)
        columns.append(torch.stack([u, torch.full_like(u, number), v]))
        masks.append(g.edges[etype].data["train_mask"][:].bool())
    return torch.cat(columns, 1), torch.cat(masks)


def figures(g: dx.DistGraph, rows: Any, decoder: DistMult) -> list[float]:
    """Filtered MRR and Hits@3 of what was held out, each rank its share."""
    topology = g.session.topology
    triples, train = triples_of(g)
    request = triples[:, ~train][:, topology.rank :: topology.world_size]
    everyone = rows.weight[:]
    ranks = rank_of_answer(
        lambda s, r: decoder.all_objects(everyone[s], r, everyone), *request, known=KnownEdges(*triples)
    )
    return [mrr(ranks, g.session), hits_at(3, ranks, g.session)]


def train_link(folder: str, kind: str) -> dict[str, Any]:
    with dx.init(seed=5, timeout=60) as session:
        g = dx.DistGraph(folder)
        rows = dx.DistEmbedding(g.num_nodes(), WIDTH, "rows", dtype=torch.float64, graph=g)
        model = Pairs(g.canonical_etypes).double()
        sparse = dx.optim.SparseAdagrad([rows], lr=0.1)
        before = figures(g, rows, model.decoder)
        inputs = EntityInputs(g, embeddings={"_N": rows})
        task = LinkPrediction(inputs=inputs)
        if kind == "fit":
            config = FitConfig(epochs=EPOCHS, task=task, show_progress=False)
            _, result = dx.fit(model, g, config=config, loader=loader_of(g), sparse=sparse, lr=0.02)
            losses = [record.loss for record in result.epochs]
        else:
            losses = loop(dx.wrap(model, g), g, inputs, sparse)
        after = figures(g, rows, model.decoder)
        return {"before": before, "after": after, "losses": losses, "rank": session.topology.rank}


def loop(model: Any, g: dx.DistGraph, inputs: Any, sparse: Any) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    loader, losses = loader_of(g), []
    for _ in range(EPOCHS):
        for _, pairs, negatives, blocks in loader:
            positive, negative = model(blocks, inputs(blocks[0]), pairs, negatives)
            truth = torch.cat([torch.ones_like(positive), torch.zeros_like(negative)])
            loss = F.binary_cross_entropy_with_logits(torch.cat([positive, negative]), truth)
            optimizer.zero_grad()
            sparse.zero_grad()
            loss.backward()
            optimizer.step()
            sparse.step()
            losses.append(dx.reduce_mean(loss.detach(), len(positive)))
    return losses


@pytest.mark.wide
def test_figures_are_those_of_one_process_and_of_a_fit(folder: str) -> None:
    """The last through ``dx.fit`` with a loader of edges, a task and the optimizer of the rows."""
    (alone,) = run_ranks(train_link, 1, args=(folder, "loop"))
    assert alone["after"][0] > 2 * alone["before"][0]
    for ranks, per_server, kind in ((2, 2, "loop"), (3, 2, "loop"), (2, 1, "fit")):
        for rank in run_ranks(train_link, ranks, args=(folder, kind), ranks_per_server=per_server):
            assert rank["before"] == pytest.approx(alone["before"], abs=1e-12)
            assert rank["losses"] == pytest.approx(alone["losses"], abs=1e-9)
            assert rank["after"] == pytest.approx(alone["after"], abs=1e-6)
