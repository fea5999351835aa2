"""Features stored in half precision, from the partitioned dataset to the blocks."""

from pathlib import Path
from typing import Any

import dgl
import pytest
import torch

import dglx_dist as dx
from dglx_dist.training.fit_config import FitConfig
from dglx_dist.training.models import Stack
from tests.api.graphs import as_dgl
from tests.helpers.ranks import run_ranks

F16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
DTYPES = {None: (F32, F64, F32), F64: (F64, F64, F64), F16: (F16, F16, F16)}
"""From the dtype given to the loader to the dtypes of the three columns."""


def _batches(folder: str, structure: Any) -> None:
    with dx.init():
        g = dx.DistGraph(folder, structure=structure)
        stored = g.ndata["feat"][torch.arange(6)]
        assert stored.dtype == F16
        sampler = dgl.dataloading.NeighborSampler(
            [-1], prefetch_node_feats=["feat", "wide"], prefetch_edge_feats=["e"]
        )
        for name, value in DTYPES.items():
            loader = dx.DataLoader(g, g.local_nodes()[:2], sampler, batch_size=1, feature_dtype=name)
            for inputs, _, (block,) in loader:
                feat, wide = block.srcdata["feat"], block.srcdata["wide"]
                assert (feat.dtype, wide.dtype, block.edata["e"].dtype) == value
                assert torch.equal(feat, stored[inputs].to(feat.dtype))
                assert torch.equal(feat, wide[:, :2].to(feat.dtype))


class Seen(Stack):
    """Notes in which dtype input rows come to training."""

    def forward(self, blocks: Any, h: Any) -> Any:
        self.seen = h.dtype
        return super().forward(blocks, h)


def _check_fit(folder: str) -> None:
    for strategy in ("data_parallel", "push_pull", "full_graph", "cooperative"):
        with dx.init(strategy, timeout=30):
            g = dx.DistGraph(folder)
            for precision, inputs in (("bf16", F16), ("float32", F32)):
                model = Seen([dgl.nn.SAGEConv(2, 4, "mean"), dgl.nn.SAGEConv(4, 2, "mean")], torch.relu, 0.0)
                config = FitConfig(epochs=2, eval_every=0, show_progress=False)
                wrapped, _ = dx.fit(model, g, config=config, precision=precision)
                assert wrapped.module.seen == inputs, strategy


@pytest.mark.wide
def test_rows_stored_in_bfloat16_are_trained_on_as_they_are(tmp_path: Path) -> None:
    g = as_dgl()
    g.ndata["feat"] = torch.rand(g.num_nodes(), 2)
    g.ndata["label"], g.ndata["train_mask"] = (g.nodes() > 2).long(), g.nodes() < 4
    dx.partition_graph(g, "t", 2, tmp_path, feature_dtype=F16)
    run_ranks(_check_fit, 2, args=(str(tmp_path / "t"),))


def make_numbered_graph() -> Any:
    g = as_dgl()
    g.ndata["feat"] = g.ndata["feat"].float() / 3
    # Rounded beforehand, so that both columns hold the same numbers.
    g.ndata["feat"] = g.ndata["feat"].to(torch.bfloat16).float()
    g.ndata["wide"] = torch.cat([g.ndata["feat"].double()] * 2, 1)
    g.edata["e"] = torch.rand(g.num_edges(), 3)
    return g


def test_blocks_get_the_asked_precision_whether_rows_are_here_or_elsewhere(tmp_path: Path) -> None:
    halves = {"feat": F16, "e": torch.float16}
    for parts, structure in ((1, "replicated"), (2, "partitioned")):
        dx.partition_graph(make_numbered_graph(), f"t{parts}", parts, tmp_path, feature_dtype=halves)
        run_ranks(_batches, parts, args=(str(tmp_path / f"t{parts}"), structure), ranks_per_server=1)
