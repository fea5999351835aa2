"""An epoch of every way to train on several types, on 2 servers of 2 ranks: predicted bytes were sent."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dglx_dist.api import fit, init
from dglx_dist.cli.plan_job import measure
from dglx_dist.data.partition.base import PartitionPlan
from dglx_dist.data.partition.prepare import partition_to_disk
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.embedding import DistEmbedding
from dglx_dist.graph.optim import SparseAdam
from dglx_dist.planner.config import PlanConfig
from dglx_dist.planner.costs import full_graph
from dglx_dist.planner.records import Prediction
from dglx_dist.strategies.base import STRATEGIES
from dglx_dist.training.fit_config import FitConfig
from dglx_dist.training.relational import HGT, RGCN, EntityInputs
from tests.helpers import wide
from tests.helpers.ranks import run_ranks
from tests.planner.test_bytes_of_runs import EpochBytes, sum_phases
from tests.strategies.full_graph import typed_cases as cases
from tests.training.hetero import CLASSES

BATCH, FANOUTS = 8, (4, 3)
REPEATED = (
    "push_pull structure=push group_size=1",
    "shared_preload external_hops=2 external_fanout=15",
    "cooperative batches=8",
)
"""Candidates whose formula another one has with another number."""
MODELS = {"rgcn": RGCN, "hgt": HGT}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(cases.write_parts(tmp_path_factory.mktemp("planned")))


def predict_each(data: str, model: str, structure: str) -> list[Prediction]:
    config = PlanConfig(
        data=data,
        model=model,
        hidden=cases.HIDDEN,
        fanouts=FANOUTS,
        batch_size=BATCH,
        servers=2,
        ranks_per_server=2,
        dry_batches=0,
        unit="any",
        structure=structure,
    )
    return [prediction for prediction in measure(config)[1] if prediction.feasible]


def train_each(data: str, runs: list[Any], structure: str) -> list[dict[str, dict[str, int]]]:
    """Return what this rank sent in the second epoch of each run, by phase, outside and inside."""
    return [train(data, *run, structure) for run in runs]


def train(
    data: str, model: str, strategy: str, options: dict[str, Any], structure: str
) -> dict[str, dict[str, int]]:
    mini_batches = STRATEGIES.get(strategy).traits.unit == "mini_batch"
    with init(strategy, seed=0, **options) as session:
        g = DistGraph(data, session=session, structure=structure)
        policy = g.get_node_partition_policy("author")
        rows = DistEmbedding(g.num_nodes("author"), cases.HIDDEN, "rows", part_policy=policy)
        inputs = EntityInputs(g, embeddings={"author": rows})
        module = MODELS[model](g, inputs.feature_widths, cases.HIDDEN, CLASSES, layers=2, out_types=["paper"])
        sent = EpochBytes(session)
        fit(
            module,
            g,
            config=FitConfig(epochs=2, eval_every=1, evaluate=lambda _: {}, inputs=inputs, ntype="paper"),
            fanouts=FANOUTS if mini_batches else None,
            batch_size=BATCH if mini_batches else None,
            callbacks=[sent],
            sparse=SparseAdam([rows], lr=0.01),
        )
        g.close()
    return sent.by_phase()


@pytest.mark.parametrize(
    ("model", "structure", "left_out"),
    [
        ("rgcn", "replicated", REPEATED),
        *wide(("rgcn", "replicated", ()), ("rgcn", "partitioned", ()), ("hgt", "replicated", ())),
    ],
)
def test_bytes_by_phase_are_those_of_real_runs(
    data: str, model: str, structure: str, left_out: Collection[str]
) -> None:
    predictions = predict_each(data, model, structure)
    assert {prediction.candidate.name for prediction in predictions} >= set(left_out)
    predictions = [prediction for prediction in predictions if prediction.candidate.name not in left_out]
    strategies = {prediction.candidate.strategy for prediction in predictions}
    assert strategies >= {"data_parallel", "full_graph", "shared_preload", "cooperative"}
    assert ("push_pull" in strategies) == (model == "rgcn")
    runs = [(model, p.candidate.strategy, dict(p.candidate.options)) for p in predictions]
    results = run_ranks(train_each, 4, args=(data, runs, structure), ranks_per_server=2, timeout_s=240)
    for place, prediction in enumerate(predictions):
        outside, inside = (sum_phases(results, place, side) for side in ("outside", "inside"))
        assert outside == dict(prediction.outside), prediction.candidate.name
        assert inside == dict(prediction.inside) or not prediction.bytes_exact, prediction.candidate.name
    exact = {p.candidate.name for p in predictions if p.bytes_exact}
    assert exact >= {"data_parallel", "full_graph", "shared_preload"}


def test_trainable_rows_count(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the rows of authors, the bytes are others. Otherwise the equality would say nothing."""
    by_name = {p.candidate.name: p for p in predict_each(data, "rgcn", "replicated")}
    assert by_name["data_parallel"].outside["embeddings"] > 0
    assert by_name["full_graph"].outside["embeddings"] > 0
    assert by_name["full_graph"].inside["sparse_gradients"] > 0
    counted = by_name["cooperative batches=2"].inside

    def mark_none(run: Any, plan: Any, rank: int) -> Any:
        zeros = 0 * count_rows(run, plan, rank)[0]
        return zeros, zeros

    count_rows = full_graph.find_trained_rows
    monkeypatch.setattr(full_graph, "find_trained_rows", mark_none)
    by_name = {p.candidate.name: p for p in predict_each(data, "rgcn", "replicated")}
    assert by_name["cooperative batches=2"].inside["halo"] > counted["halo"]


def test_a_graph_without_features_is_planned(tmp_path: Path) -> None:
    raw = cases.raw_graph()
    labels = {name: column for name, column in raw.node_data["paper"].items() if name != "feat"}
    folder = tmp_path / "parts"
    partition_to_disk(replace(raw, node_data={"paper": labels}), folder, PartitionPlan(num_parts=1))
    predictions = measure(PlanConfig(data=str(folder), model="rgcn", hidden=4, servers=1))[1]
    assert any(prediction.feasible for prediction in predictions)


def test_a_model_of_one_type_is_refused(data: str) -> None:
    with pytest.raises(ConfigError, match=r"4 node and 7 edge types.*--model rgcn or hgt"):
        measure(PlanConfig(data=data))
