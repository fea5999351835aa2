"""Training from batches that are copied on a stream of their own: the weights of training without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dgl
import pytest
import torch
import torch.nn.functional as F

from dglx_dist.comm.session import start_session
from dglx_dist.comm.transfer import CopyStream
from dglx_dist.dataloading import step_loader
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.strategies.base import STRATEGIES
from dglx_dist.strategies.full_graph import loader as full_graph_loader
from tests.helpers.ranks import run_ranks
from tests.helpers.streams import LateStreams
from tests.strategies.equality import SHARES, cut, model_of, new_ids_of_training, write_parts

CASES: dict[str, dict[str, Any]] = {
    "data_parallel": {},
    "push_pull": {"depth": 2},
    "cooperative": {"batches": 3, "keep": "rebuild"},
}


def trained(folder: str) -> None:
    with start_session(timeout_s=60) as session:
        g = DistGraph(folder)
        topology = session.topology
        mine = cut(new_ids_of_training(g), SHARES["uneven"], topology.rank, topology.world_size)
        sampler = dgl.dataloading.MultiLayerFullNeighborSampler(
            2, prefetch_node_feats=["feat"], prefetch_labels=["label"]
        )
        for name, options in CASES.items():
            weights = []
            for late in (None, LateStreams()):
                with pytest.MonkeyPatch.context() as patch:
                    for module in (step_loader, full_graph_loader) if late else ():
                        patch.setattr(module, "open_copies", lambda _, late=late: CopyStream(late))
                    strategy = STRATEGIES.get(name)(session, options)
                    sizes = {} if strategy.traits.unit == "full_graph" else {"batch_size": 20}
                    loader = strategy.loader(g, mine, sampler, **sizes)
                    model: Any = strategy.wrap(model_of("sage", g), g)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                for _ in range(2):
                    for _, _, blocks in loader:
                        loss = F.cross_entropy(
                            model(blocks, blocks[0].srcdata["feat"]), blocks[-1].dstdata["label"]
                        )
                        optimizer.zero_grad()
                        loss.backward()
                        optimizer.step()
                if late is not None:
                    done = [what for what, _ in late.log]
                    assert done.count("wait") == done.count("event") == 2 * len(loader) > 2
                    assert {thread for what, thread in late.log if what == "wait"} == {"MainThread"}
                    assert "MainThread" not in {thread for what, thread in late.log if what == "copy"}
                weights.append([p.detach().clone() for p in model.whole().parameters()])
            assert all(map(torch.equal, *weights)), name


def test_batches_that_are_copied_late_train_the_same_weights(tmp_path: Path) -> None:
    variables = {"DGLX_MESSAGE_PASSING": "torch"}
    run_ranks(trained, 2, args=(str(write_parts(tmp_path)),), environment=variables)
