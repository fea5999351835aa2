"""The predicted memory lies within 15 % of the peak of ranks that torchrun starts.

Ranks of ``dglx train --ranks`` and of other tests are forks of a process that has imported everything, and
have less.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dglx_dist.cli.plan_job import make_plan
from dglx_dist.comm.topology import copy_environment
from dglx_dist.data.partition.base import PartitionPlan
from dglx_dist.data.partition.prepare import partition_to_disk
from dglx_dist.data.synthetic import SyntheticConfig, generate
from dglx_dist.planner.config import PlanConfig
from dglx_dist.planner.records import Choice

HIDDEN = 64


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """40,000 nodes of 256 columns: what is trained on is not lost beside the program."""
    folder = tmp_path_factory.mktemp("heavy") / "graph"
    config = SyntheticConfig(nodes=40_000, degree=12, features=256, train_rate=0.2, seed=1)
    partition_to_disk(generate(config), folder, PartitionPlan(num_parts=2, method="contiguous"))
    return str(folder)


@pytest.fixture(scope="module")
def choice(data: str) -> Choice:
    # What else the process holds that plans is not what ranks will hold.
    held = bytearray(b"x" * (1 << 30))
    choice = make_plan(PlanConfig(data=data, hidden=HIDDEN, servers=2, batch_size=512, unit="any"))
    assert len(held) == 1 << 30
    return choice


def peak_of(data: str, out: Path, strategy: str, *options: str) -> int:
    command = ["--standalone", "--nproc-per-node", "2", "-m", "dglx_dist.cli", "train", data]
    command += ["--strategy", strategy, *options]
    command += ["--hidden", str(HIDDEN), "--epochs", "1", "--eval-every", "0", "--out", str(out)]
    environment = copy_environment() | {"OMP_NUM_THREADS": "1", "DGLX_RANKS_PER_SERVER": "1"}
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command], env=environment, check=True, timeout=200
    )
    return int(json.loads((out / "summary.json").read_text())["peak_memory_bytes"])


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "options"),
    [("push_pull structure=push", ("--option", "structure=push", "--batch-size", "512")), ("full_graph", ())],
)
def test_the_peak_is_near_what_was_foretold(
    data: str, choice: Choice, tmp_path: Path, name: str, options: tuple[str, ...]
) -> None:
    (predicted,) = (prediction for prediction in choice.predictions if prediction.candidate.name == name)
    peak = peak_of(data, tmp_path / "run", predicted.candidate.strategy, *options)
    assert predicted.memory_bytes == pytest.approx(peak, rel=0.15)
