"""R-GCN on a graph of three types, authors without features: on any ranks as in one process.

Ten steps of SGD in float64 with every in-neighbour, dense weights and embedding rows, against plain DGL and
``torch.nn.Embedding``. Without bases by a loop as a user writes it, with bases by ``fit.train``.
"""

from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dglx_dist.comm.session import start_session
from dglx_dist.graph import optim
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.embedding import DistEmbedding
from dglx_dist.strategies.base import STRATEGIES
from dglx_dist.training.fit import train
from dglx_dist.training.fit_config import FitConfig
from dglx_dist.training.relational import RGCN, EntityInputs
from tests.helpers import wide
from tests.helpers.ranks import run_ranks
from tests.strategies import equality
from tests.training import hetero
from tests.training.hetero import fill_authors, take_step, weights_of

HIDDEN, STEPS, RATE = 8, 10, 0.3
PLACEMENTS = [(1, 1), (2, 1), *wide((2, 2), (3, 3), (3, 2))]
TOLERANCE = 1e-10


def first_rows() -> Tensor:
    """(40, HIDDEN) embedding rows of the authors by original id."""
    return torch.randn(
        hetero.NUM_NODES["author"], HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bases": {"num_bases": 2},
    "deep": {"layers": 3, "norm": "layer", "residual": True},
}


def model_of(graph: Any, case: str) -> RGCN:
    torch.manual_seed(11)
    return RGCN(graph, hetero.WIDTHS, HIDDEN, hetero.CLASSES, out_types=["paper"], **CASES[case]).double()


def one_process(case: str) -> tuple[dict[str, Any], Any]:
    graph, block = hetero.plain_graph(), hetero.whole_block()
    table = nn.Embedding.from_pretrained(first_rows(), freeze=False)
    model = model_of(graph, case)
    optimizer = torch.optim.SGD([*model.parameters(), *table.parameters()], lr=RATE)
    papers = graph.nodes["paper"].data
    x = {ntype: graph.nodes[ntype].data["feat"] for ntype in hetero.WIDTHS}
    for _ in range(STEPS):
        scores = model([block] * model.num_layers, x | {"author": table.weight})["paper"][
            papers["train_mask"]
        ]
        optimizer.zero_grad()
        F.cross_entropy(scores, papers["label"][papers["train_mask"]]).backward()
        optimizer.step()
    return weights_of(model), table.weight.detach().numpy().copy()


def _train(folder: str, share: str) -> dict[str, Any]:
    session = start_session(timeout_s=60)
    g = DistGraph(folder)
    topology, policy = session.topology, g.get_node_partition_policy("author")
    ids = g.nodes["paper"].data["train_mask"][:].nonzero()[:, 0]
    own_ids = equality.cut(ids, equality.SHARES[share], topology.rank, topology.world_size)
    results = {}
    for case, options in CASES.items():
        sampler = dgl.dataloading.MultiLayerFullNeighborSampler(
            options.get("layers", 2),
            prefetch_node_feats={ntype: ["feat"] for ntype in hetero.WIDTHS},
            prefetch_labels={"paper": ["label"]},
        )
        authors = DistEmbedding(40, HIDDEN, f"rows-{case}", part_policy=policy, dtype=torch.float64)
        fill_authors(authors.weight, g, first_rows())
        strategy = STRATEGIES.get("data_parallel")(session, {}).open(g)
        loader = strategy.loader({"paper": own_ids}, sampler, batch_size=len(ids))
        inputs = EntityInputs(g, embeddings={"author": authors})
        assert inputs.feature_widths == hetero.WIDTHS
        model = strategy.wrap(model_of(g, case))
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        sparse = optim.SparseSGD([authors], lr=RATE)
        if case == "bases":
            config = FitConfig(epochs=STEPS, eval_every=0, ntype="paper", inputs=inputs, show_progress=False)
            fitted = train(model, loader, optimizer, g, config, sparse=sparse)
            assert set(fitted.accuracy) == {"train_mask", "val_mask", "test_mask"}
        for _ in range(0 if case == "bases" else STEPS):
            for _, _, blocks in loader:
                take_step(model, inputs, blocks, optimizer, sparse)
        g.barrier()
        results[case] = (
            weights_of(model.module),
            equality.in_original_order(authors.weight, g, "author").numpy(),
        )
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hetero.write_parts(tmp_path_factory.mktemp("hetero"))


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return {case: one_process(case) for case in CASES}


def differences(found: tuple[dict[str, Any], Any], expected: tuple[dict[str, Any], Any]) -> dict[str, float]:
    assert set(found[0]) == set(expected[0])
    worst = {name: float(np.abs(value - expected[0][name]).max()) for name, value in found[0].items()}
    return worst | {"rows": float(np.abs(found[1] - expected[1]).max())}


@pytest.mark.parametrize("share", ["empty", *wide("uneven")])
@pytest.mark.parametrize(("ranks", "ranks_per_server"), PLACEMENTS)
def test_weights_and_rows_are_those_of_one_process(
    folder: Path, plain: dict[str, Any], ranks: int, ranks_per_server: int, share: str
) -> None:
    results = run_ranks(_train, ranks, args=(str(folder), share), ranks_per_server=ranks_per_server)
    for result in results:
        for case, weights_or_rows in result.items():
            wrong = {k: v for k, v in differences(weights_or_rows, plain[case]).items() if not v <= TOLERANCE}
            assert not wrong


def test_ten_steps_move_weights_and_rows(plain: dict[str, Any]) -> None:
    """Else equality would be no news; weights of the last layer that lead to no paper stay."""
    for case, options in CASES.items():
        start = weights_of(model_of(hetero.plain_graph(), case)), first_rows().numpy()
        moved = differences(plain[case], start)
        assert moved["rows"] > 1e-4
        kept = {name for name, value in moved.items() if value == 0}
        assert all(name.startswith(f"own.{options.get('layers', 2) - 1}") for name in kept)
        assert min(value for value in moved.values() if value) > 1e-6
