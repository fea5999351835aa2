"""Trainable rows on a real graph without features, and two ranks: R-GCN on aifb."""

from dataclasses import replace
from pathlib import Path

import pytest

from dglx_dist.cli.train_job import train_dataset
from dglx_dist.data.partition.base import PartitionPlan
from dglx_dist.data.partition.prepare import partition_to_disk
from dglx_dist.data.sources import load_dataset
from dglx_dist.training.config import TrainConfig
from tests.helpers.ranks import run_ranks

AIFB = Path(__file__).parents[3] / "shared" / "data" / "aifb.npz"


def _accuracy(folder: str, out: str) -> float:
    config = TrainConfig(
        data=folder, out=out, model="rgcn", hidden=16, fanouts=(-1, -1), epochs=30, lr=0.01, eval_every=0,
        batch_size=70, weight_decay=5e-4, seed=5,
    )  # fmt: skip
    return float(str(train_dataset(config).summary["test_accuracy"]))


@pytest.mark.real_data
@pytest.mark.timeout(900)
@pytest.mark.skipif(not AIFB.exists(), reason="the real graphs are not here")
def test_rgcn_on_aifb(tmp_path: Path) -> None:
    raw = load_dataset(AIFB)
    reverse = {(v, f"rev_{r}", u): (ends[1], ends[0]) for (u, r, v), ends in raw.edges.items()}
    graph = replace(raw, edges={**raw.edges, **reverse})
    partition_to_disk(graph, tmp_path / "aifb", PartitionPlan(num_parts=2, method="metis"))
    results = run_ranks(_accuracy, 2, args=(str(tmp_path / "aifb"), str(tmp_path / "run")), timeout_s=800.0)
    assert results[0] >= 0.85
