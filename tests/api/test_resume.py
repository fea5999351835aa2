"""Resuming ``dx.fit`` under ``auto``: the strategy is the checkpoint's."""

from pathlib import Path

from dglx_dist.api import fit, init
from dglx_dist.data.partition.base import PartitionPlan
from dglx_dist.data.partition.prepare import partition_to_disk
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.registry import AUTO
from dglx_dist.training.fit_config import FitConfig, FitResult
from dglx_dist.training.models import build_model
from tests.strategies import equality


def train(data: Path, config: FitConfig, unit: str) -> tuple[str, FitResult]:
    with init(AUTO, seed=0, unit=unit) as session:
        g = DistGraph(data, session=session)
        model = build_model("sage", equality.WIDTH, 4, equality.CLASSES).double()
        _, result = fit(model, g, config=config, fanouts=(3, 2), batch_size=50)
        g.close()
        return session.strategy, result


def test_fit_goes_on_with_what_its_checkpoint_was_trained_with(tmp_path: Path) -> None:
    partition_to_disk(
        equality.raw_graph(), tmp_path / "data", PartitionPlan(num_parts=2, method="contiguous")
    )
    message = {"checkpoint_folder": tmp_path / "saved", "eval_every": 0, "show_progress": False}
    strategy, first = train(tmp_path / "data", FitConfig(epochs=1, **message), "mini_batch")
    assert strategy == "data_parallel"
    assert first.choice.outcome.epoch == 0
    # Nothing but whole graphs may be chosen now, and nothing is chosen.
    strategy, second = train(tmp_path / "data", FitConfig(epochs=2, resume=True, **message), "full_graph")
    assert (strategy, second.choice, second.first_epoch) == ("data_parallel", None, 1)
