"""Training from batches that are copied on a stream of their own, and on a device that mixes with none."""

from pathlib import Path
from typing import Any

import pytest
import torch
from dgl.dataloading import MultiLayerFullNeighborSampler

from dglx_dist.comm.devices import CopyStream
from dglx_dist.comm.session import start_session
from dglx_dist.dataloading import step_loader
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.strategies.base import STRATEGIES
from dglx_dist.strategies.full_graph import loader as full_graph_loader
from tests.helpers.elsewhere import DEVICE, Elsewhere
from tests.helpers.ranks import run_ranks
from tests.helpers.streams import LateStreams
from tests.strategies.equality import SHARES, cut, loop, model_of, new_ids_of_training, write_parts

CASES: dict[str, dict[str, Any]] = {
    "data_parallel": {},
    "push_pull": {"depth": 2},
    "cooperative": {"batches": 3},
    "full_graph": {},
    "shared_preload": {},
}


def weights_after(name: str, g: DistGraph, device: torch.device | None = None) -> list[torch.Tensor]:
    """Train two epochs; ``device``: of model and batches."""
    session, topology = g.session, g.session.topology
    own_ids = cut(new_ids_of_training(g), SHARES["uneven"], topology.rank, topology.world_size)
    sampler = MultiLayerFullNeighborSampler(2, prefetch_node_feats=["feat"], prefetch_labels=["label"])
    strategy = STRATEGIES.get(name)(session, CASES[name]).open(g)
    sizes = {} if strategy.strategy.traits.unit == "full_graph" else {"batch_size": 20}
    loader = strategy.loader(own_ids, sampler, device=device, **sizes)
    model = strategy.wrap(model_of("sage", g).to(device))
    loop(model, loader, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    return [parameter.detach().cpu().clone() for parameter in model.whole().parameters()]


def train(folder: str) -> None:
    with start_session(timeout_s=60):
        g = DistGraph(folder)
        for name in CASES:
            expected, late = weights_after(name, g), LateStreams()
            with pytest.MonkeyPatch.context() as patch:
                for module in (step_loader, full_graph_loader):
                    patch.setattr(module, "open_copy_stream", lambda _, late=late: CopyStream(late))
                assert all(map(torch.equal, weights_after(name, g), expected)), name
            done = {
                kind: [thread for did, thread in late.log if did == kind]
                for kind in ("copy", "event", "wait")
            }
            assert len(done["wait"]) == len(done["event"])
            # A loader of the whole graph copies once, at its start.
            assert bool(done["wait"]) == (name not in ("full_graph", "shared_preload"))
            assert set(done["wait"]) <= {"MainThread"}
            assert "MainThread" not in done["copy"]
            if name == "push_pull":
                continue  # knows its input by its memory, which these tensors do not show
            with Elsewhere(), pytest.MonkeyPatch.context() as patch:
                # Other threads than this one are not in the mode.
                patch.setattr(
                    step_loader, "run_ahead", lambda make, steps, **_: (make(step) for step in steps)
                )
                assert all(map(torch.equal, weights_after(name, g, DEVICE), expected)), name


@pytest.mark.wide
def test_batches_on_a_stream_or_a_device_of_their_own_train_the_same_weights(tmp_path: Path) -> None:
    variables = {"DGLX_MESSAGE_PASSING": "torch"}
    run_ranks(train, 2, args=(str(write_parts(tmp_path)),), environment=variables)
