"""The memory that is foretold lies within 15 % of the peak of real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dglx_dist.datasets.synthetic import SyntheticConfig, generate
from dglx_dist.run.plan import TrainPlan
from dglx_dist.run.planning import PlanPlan, make_plan
from dglx_dist.run.prepare import PartitionPlan, partition_to_disk
from dglx_dist.run.train import train_dataset
from tests.helpers.ranks import run_ranks

HIDDEN = 64


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """40,000 nodes of 256 columns: what is trained on weighs about as much as the program."""
    folder = tmp_path_factory.mktemp("heavy") / "graph"
    config = SyntheticConfig(nodes=40_000, degree=12, features=256, train_rate=0.2, seed=1)
    partition_to_disk(generate(config), folder, PartitionPlan(num_parts=2, method="contiguous"))
    return str(folder)


def peak_of(data: str, out: str, strategy: str, options: dict[str, Any]) -> int:
    plan = TrainPlan(
        data=data,
        out=out,
        strategy=strategy,
        strategy_options=options,
        hidden=HIDDEN,
        epochs=2,
        eval_every=0,
        batch_size=512 if strategy == "data_parallel" else None,
    )
    return int(str(train_dataset(plan).summary["peak_memory_bytes"]))


@pytest.mark.parametrize("name", ["data_parallel", "full_graph"])
def test_the_peak_is_near_what_was_foretold(data: str, tmp_path: Path, name: str) -> None:
    choice = make_plan(PlanPlan(data=data, hidden=HIDDEN, servers=2, batch_size=512, unit="any"))
    (foretold,) = (one for one in choice.predictions if one.candidate.name == name)
    candidate = foretold.candidate
    args = (data, str(tmp_path / "run"), candidate.strategy, dict(candidate.options))
    peak = run_ranks(peak_of, 2, args=args, ranks_per_server=1, timeout_s=200)[0]
    assert foretold.memory_bytes == pytest.approx(peak, rel=0.15)
