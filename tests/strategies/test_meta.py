"""A step of every strategy on torch's meta device, whose tensors have no data, and its books.

What goes through the CPU or NumPy, reads a value, or makes a tensor on a wrong device, fails there.
Structure, sampling, agreements and the ledger are real; torch's fake backend "sends" what has no data.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch import Tensor, nn

from dglx_dist.comm.exchange import DEVICES, DeviceExchange
from dglx_dist.comm.session import start_session
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.strategies.base import STRATEGIES
from dglx_dist.strategies.serverless.cut import capture
from tests.helpers.ranks import run_ranks
from tests.strategies import equality
from tests.strategies.equality import MODELS, Column
from tests.strategies.push_pull import runs

META, EPOCHS, BATCH = torch.device("meta"), 2, 30
DROPPED, TRAINED = "gat, dropped", "sage, trained"
COLUMNS = [
    Column("data_parallel", models=(*MODELS, TRAINED)),
    Column("push_pull", models=(*MODELS, DROPPED, TRAINED)),
    Column("push_pull", (("depth", 2),), models=("sage", DROPPED)),
    Column("push_pull", (("depth", 3), ("weights", "split")), models=("gat",)),
    Column("push_pull", (("group_size", 1),), models=("sage", TRAINED)),
    Column("full_graph", models=(*MODELS, DROPPED)),
    Column("full_graph", (("use_pp", False),), models=("gat",)),
    Column("shared_preload", (("hops", 1),), models=("gcn_symmetric",)),
    Column("cooperative", (("batches", 2),), models=(DROPPED,)),
]


class Model(nn.Module):
    """A model of dgl.nn; "dropped" with norm and dropout before it, "trained" with rows for features."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        base, _, more = kind.partition(", ")
        self.norm = nn.LayerNorm(equality.WIDTH) if more == "dropped" else nn.Identity()
        self.rows = nn.Embedding(equality.NUM_NODES, equality.WIDTH) if more == "trained" else None
        self.inner, self.dropout = equality.PlainModel(base), nn.Dropout(0.5 if more == "dropped" else 0.0)
        if more == "dropped":
            self.inner.convs[0].attn_drop.p = 0.5

    def forward(self, blocks: list[Any], x: Tensor, nodes: Tensor) -> Tensor:
        x = self.norm(x) if self.rows is None else self.rows(nodes)
        scores: Tensor = self.inner(blocks, self.dropout(x))
        return scores


def trained_on(device: str, g: DistGraph, column: Column, kind: str) -> tuple[list[Any], Counter[Any]]:
    """Train two epochs; return shapes, dtypes and devices of all that a step makes, and the bytes moved."""
    session, rank = g.session, g.session.topology.rank
    strategy = STRATEGIES.get(column.strategy)(session, dict(column.options)).open(g)
    # No batch is empty: a rank without a gradient reads from the device whether others have it.
    ids = equality.new_ids_of_training(g)[: 2 * BATCH * 2]
    own_ids = ids[rank :: session.topology.world_size]
    sizes = {} if strategy.strategy.traits.unit == "full_graph" else {"batch_size": BATCH, "shuffle": True}
    equality.forget_kept_batches(g)
    before, seen = session.ledger.snapshot(), list[Any]()
    loader = strategy.loader(own_ids, runs.sampler(), device=device, seed=5, **sizes)
    torch.manual_seed(11)
    model = strategy.wrap(Model(kind).to(device, torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(EPOCHS):
        for input_nodes, output_nodes, blocks in loader:
            x, labels = blocks[0].srcdata["feat"], blocks[-1].dstdata["label"]
            scores = model(blocks, x, input_nodes)
            loss = F.cross_entropy(scores, labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it bare
            norm = model.clip_grad_norm_(1.0)
            optimizer.step()
            tensors = [input_nodes, output_nodes, x, labels, scores, loss, norm]
            tensors += [tensor for p in model.parameters() for tensor in (p, p.grad) if tensor is not None]
            assert {tensor.device.type for tensor in tensors} == {device}, (column, kind)
            seen.append([(tuple(tensor.shape), tensor.dtype) for tensor in tensors])
    state = model.state_dict()
    assert {tensor.device.type for tensor in state.values()} == {device}
    seen.append([(name, tuple(tensor.shape)) for name, tensor in state.items()])
    moved = Counter[Any]()
    for row in session.ledger.since(before):
        # Agreements differ in length, and columns stay after the first opening.
        if row.phase not in ("control", "columns"):
            moved[row.phase, row.layer, row.destination] += row.num_bytes
    return seen, moved


def on_rank(folder: str) -> dict[str, dict[str, Any]]:
    with start_session(timeout_s=60, backend="cpu:gloo,meta:fake") as session:
        session.device = META
        # As on accelerators that every rank has its own of.
        DEVICES.set(session, DeviceExchange(session, META))
        g = DistGraph(folder)
        g.out_degrees()  # else the first of the models asks for them
        results = {
            f"{column}/{kind}": {device: trained_on(device, g, column, kind) for device in ("cpu", "meta")}
            for column in COLUMNS
            for kind in column.models
        }
        g.barrier()
        return results


@pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "Meta"),
    reason="torch 2.4 has no collectives on meta",
)
@pytest.mark.wide
def test_a_step_without_data_is_the_same_in_all_but_the_numbers(folder: Path) -> None:
    for rank, result in enumerate(run_ranks(on_rank, 2, args=(str(folder),), ranks_per_server=1)):
        for name, by_device in result.items():
            (seen, moved), (seen_on_meta, moved_on_meta) = by_device["cpu"], by_device["meta"]
            assert seen == seen_on_meta, (rank, name)
            assert moved == moved_on_meta, (rank, name)
            assert len(seen) > 2
            assert moved


def test_lambda_computes_on_cpus() -> None:
    with pytest.raises(ConfigError, match=r"the model is on meta, .* leave model\.to\(device\) out"):
        capture(Model("sage").to(META), 4)
