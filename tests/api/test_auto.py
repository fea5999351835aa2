"""``auto``: the ranks choose together, train as if the strategy had been named, and tell what came of it."""

import json
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from dglx_dist.api import DataLoader, choose_strategy, distribute, fit, init, wrap
from dglx_dist.cli.train_job import train_dataset
from dglx_dist.comm.topology import Topology
from dglx_dist.data.partition.base import PartitionPlan
from dglx_dist.data.partition.prepare import partition_to_disk
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.planner import measure
from dglx_dist.planner.auto import Training, check_equal_servers, read_auto_options, resolve
from dglx_dist.planner.choose import enumerate_candidates
from dglx_dist.planner.measure import PROBE_PHASE, probe
from dglx_dist.records import NODE_TYPE
from dglx_dist.registry import AUTO
from dglx_dist.report.outcome import collect_facts
from dglx_dist.strategies.candidate import Candidate, CandidateContext
from dglx_dist.training import checkpoint
from dglx_dist.training.config import TrainConfig
from dglx_dist.training.fit_config import FitConfig, FitResult
from dglx_dist.training.models import build_model
from dglx_dist.training.resume import TRAINED_WITH
from tests.api.graphs import two_triangles
from tests.helpers.ranks import run_ranks
from tests.strategies import equality


def plan_of(data: str, out: Path, **changes: Any) -> TrainConfig:
    message: dict[str, Any] = {
        "strategy": AUTO,
        "fanouts": (3, 2),
        "batch_size": 20,
        "hidden": 8,
        "epochs": 3,
        "eval_every": 0,
        "strategy_options": {"dry_batches": 0},
    }
    return TrainConfig(data=data, out=str(out), **{**message, **changes})


def out_of_luck(*_: Any) -> None:
    raise RuntimeError("out of luck")


def list_candidates(context: CandidateContext, *, fewer: int) -> list[Candidate]:
    return list(enumerate_candidates(context))[fewer:]


def choose_and_train(data: str, out: str) -> dict[str, Any]:
    """On every rank: what auto came to, stopped and resumed, and the same strategy by its name."""
    train_dataset(plan_of(data, Path(out) / "auto", epochs=2, checkpoint_every=1))
    # What is asked for now would be another strategy.
    full = {"unit": "full_graph"}
    chosen = train_dataset(plan_of(data, Path(out) / "auto", resume=True, strategy_options=full))
    record = json.loads((Path(out) / "auto" / "plan.json").read_text())
    single = next(epoch for epoch in record["predictions"] if epoch["name"] == record["chosen"])["candidate"]
    named = train_dataset(
        plan_of(
            data,
            Path(out) / "named",
            strategy=single["strategy"],
            strategy_options=single["options"],
            cache=single["cache"],
            cache_alpha=single["cache_alpha"],
        )
    )
    with init(AUTO, seed=0) as session:
        links = probe(session, seconds=0.2)
        probed = session.ledger.total(phase=PROBE_PHASE)
        g = DistGraph(data, session=session)
        model = build_model("sage", equality.WIDTH, 8, equality.CLASSES).double()
        with pytest.raises(ConfigError, match=r"Call dx\.choose_strategy"):
            DataLoader(g, [], None)
        message = FitConfig(epochs=1, eval_every=0)
        with pytest.raises(
            ConfigError, match=r"supports node classification by 'feat', but not config\.feature"
        ):
            fit(model, g, config=replace(message, feature="label"))
        with pytest.raises(ConfigError, match=r"rank 0 has batch_size=2\d, rank \d has batch_size=2\d"):
            choose_strategy(model, g, fanouts=(3, 2), batch_size=20 + session.topology.rank)
        model = build_model("sage", equality.WIDTH, 8, equality.CLASSES).double()
        # Rank 1 knows fewer candidates, as if it lacked a plugin.
        known = partial(list_candidates, fewer=session.topology.rank)
        with (
            mock.patch.object(measure, "enumerate_candidates", known),
            pytest.raises(ConfigError, match="load the same plugins on every rank"),
        ):
            choose_strategy(model, g, fanouts=(3, 2), batch_size=20)
        fails = build_model("sage", equality.WIDTH, 8, equality.CLASSES).double()
        if session.topology.rank == 1:
            fails.register_forward_pre_hook(out_of_luck)
        with pytest.raises(ConfigError, match="RuntimeError: out of luck"):
            choose_strategy(fails, g, fanouts=(3, 2), batch_size=20)
        _, result = fit(model, g, config=message, fanouts=(3, 2), batch_size=20)
        by_fit = session.strategy
        with pytest.raises(ConfigError, match="nothing to choose"):
            choose_strategy(model, g)
        g.close()
    return {
        "summary": dict(chosen.summary),
        "losses": [epoch.loss for epoch in chosen.epochs],
        "named": [epoch.loss for epoch in named.epochs],
        "by_fit": [by_fit, result.choice.chosen_prediction.candidate.strategy, result.choice.outcome.epoch],
        "probed": probed,
        "links": [links.external_bytes_per_s, links.internal_bytes_per_s],
        "plan": record,
        "strategy": single["strategy"],
        "cache": single["cache"],
    }


def test_auto_trains_as_the_strategy_that_it_chose(dataset: str, tmp_path: Path) -> None:
    ranks = run_ranks(choose_and_train, 2, args=(dataset, str(tmp_path)), ranks_per_server=1, timeout_s=200)
    first = ranks[0]
    assert first["losses"] == first["named"]
    assert len(first["losses"]) == 3
    for name in ("losses", "by_fit", "links"):
        assert [rank[name] for rank in ranks] == [first[name]] * 2
    assert all(value > 0 for value in first["links"])
    # Each rank sends the rounds of the probe to the other, 256 KiB at least, and they are counted.
    assert first["probed"] == ranks[1]["probed"] > 2**18
    record = first["summary"][AUTO]
    assert record["chosen"] == first["plan"]["chosen"]
    assert record["bytes_are_counted"]
    assert record["bytes_outside"] == record["predicted_bytes_outside"] > 0
    assert record["bytes_inside"] == record["predicted_bytes_inside"] == 0
    assert record["predicted_epoch_seconds"] > 0
    assert first["plan"]["outcome"]["bytes_outside"] == record["bytes_outside"]
    assert first["by_fit"][0] == first["by_fit"][1]
    config = json.loads((tmp_path / "auto" / "config.json").read_text())
    assert (config["strategy"], config["cache"]) == (first["strategy"], first["cache"])
    # Nothing that trains another estimator, and no whole graphs, unless they are asked for.
    assert {record["candidate"]["unit"] for record in first["plan"]["predictions"]} == {"mini_batch"}
    assert all(record["candidate"]["exact"] for record in first["plan"]["predictions"])


def test_the_device_is_that_of_the_model_not_of_the_session(dataset: str) -> None:
    model = build_model("sage", equality.WIDTH, 8, equality.CLASSES).double()
    with init(AUTO) as session:
        g = DistGraph(dataset, session=session)
        session.device = torch.device("cuda", 0)
        choice = choose_strategy(model, g, fanouts=(3, 2), batch_size=20)
        message = [collect_facts(model, session, FitResult())]
        session.device = torch.device("cpu")
        message.append(collect_facts(model.to("meta"), session, FitResult()))
        g.close()
    assert choice.cluster.device_memory_bytes == 0
    assert [message["device"] for message in message] == ["cpu", "meta"]
    assert [message["peak_device_memory_bytes"] for message in message] == [None, None]


def test_servers_of_unequal_size_are_not_counted_for() -> None:
    check_equal_servers(Topology(0, 4, (0, 0, 1, 1)))
    with pytest.raises(ConfigError, match="servers have 1 or 2 ranks"):
        check_equal_servers(Topology(0, 3, (0, 0, 1)))


def test_a_graph_needs_training_nodes_and_no_labels(tmp_path: Path) -> None:
    raw = two_triangles()
    partition_to_disk(raw, tmp_path / "some", PartitionPlan(num_parts=2, method="contiguous"))
    raw.node_data[NODE_TYPE]["train_mask"][:] = False
    partition_to_disk(raw, tmp_path / "none", PartitionPlan(num_parts=2, method="contiguous"))
    model = build_model("gcn", 2, 4, 2)
    with init(AUTO, unit="full_graph") as session:
        g = DistGraph(tmp_path / "some", session=session)
        # No loop can own a step of lambda.
        assert {prediction.candidate.strategy for prediction in choose_strategy(model, g).predictions} == {
            "full_graph"
        }
        g.close()
    with init(AUTO, allow_estimators=True) as session:
        g = DistGraph(tmp_path / "none", session=session)
        with pytest.raises(ConfigError, match=r"'train_mask' of .* marks no node"):
            choose_strategy(model, g)
        g.close()
        g = DistGraph(tmp_path / "some", session=session)
        choice = choose_strategy(model, g, fanouts=[2, 2], batch_size=1)
        g.close()
    assert choice.chosen_prediction.candidate.name == "data_parallel"
    assert choice.trained == "gcn of 2 layers, hidden width 4; mini-batches of 1 a rank, fan-outs 2,2"


def test_options_of_auto() -> None:
    assert read_auto_options({"full_graph_epochs": 3, "memory": 1000}).memory == "1000"
    for wrong, message in (
        ({"dept": 1}, "'auto' has no option 'dept'"),
        ({"unit": "batch"}, "unit='batch'"),
        ({"dry_batches": -1}, "dry_batches=-1 must be at least 0"),
        ({"full_graph_epochs": float("inf")}, "full_graph_epochs=inf must be a number above 0"),
        ({"full_graph_epochs": float("nan")}, "full_graph_epochs=nan"),
        ({"memory": "much"}, "option memory: 'much' is not a size in bytes"),
        ({"memory": 0}, "option memory: the size '0'"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_auto_options(wrong)


def test_what_is_told_of_training_is_checked_when_it_arrives() -> None:
    for wrong, message in (
        ({"fanouts": []}, r"fanouts=\[\] must be a list"),
        ({"fanouts": 10}, "fanouts=10 must be a list"),
        ({"fanouts": [10, -2]}, r"fanouts\[1\]=-2"),
        ({"fanouts": [2.5]}, r"fanouts\[0\]=2.5"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": float("nan")}, "batch_size=nan"),
        ({"epochs": 0}, "epochs=0"),
    ):
        with pytest.raises(ConfigError, match=message):
            Training(**wrong)


def test_what_is_distributed_under_auto_is_chosen_for_once(dataset: str) -> None:
    g = distribute(dataset, strategy=AUTO)
    with g.session:
        model = build_model("sage", equality.WIDTH, 8, equality.CLASSES).double()
        with pytest.raises(ConfigError, match=r"Call dx\.choose_strategy"):
            wrap(model, g)
        choice = choose_strategy(model, g, fanouts=(3, 2), batch_size=20)
        assert g.session.strategy == choice.chosen_prediction.candidate.strategy == "data_parallel"
        wrap(model, g)


@pytest.mark.wide
def test_one_process_has_a_choice_too(dataset: str, tmp_path: Path) -> None:
    trained = train_dataset(plan_of(dataset, tmp_path / "alone", epochs=1))
    assert trained.summary["strategy"] == "data_parallel"
    # Fan-outs are of the mini-batches that whole graphs are weighed against; nothing warns of them.
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        full = plan_of(dataset, tmp_path / "whole", epochs=1, strategy_options={"unit": "full_graph"})
        assert train_dataset(full).summary["strategy"] == "full_graph"
    record, *_, workers = json.loads((tmp_path / "whole" / "plan.json").read_text())["predictions"]
    assert (record["name"], record["candidate"]["unit"]) == ("full_graph", "full_graph")
    assert (workers["name"], workers["feasible"], workers["trial"]["steps"] > 0) == ("lambda", True, True)
    with pytest.raises(ConfigError, match="--cache vip must be left out with --strategy auto"):
        plan_of(dataset, tmp_path / "alone", cache="vip")


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({}, "found: None"),
        ({TRAINED_WITH: {"name": "mine", "options": {}}}, "found: 'mine'"),
        ({TRAINED_WITH: {"name": "push_pull", "options": None}}, "found: 'push_pull'"),
        ({TRAINED_WITH: {"name": "lambda", "options": {"executor": "http"}}}, "found: 'lambda'"),
        ({TRAINED_WITH: {"name": "data_parallel", "options": {}, "cache": {"policy": "x"}}}, "policy='x'"),
        ({TRAINED_WITH: {"name": "shared_preload", "options": {"hops": "two"}}}, "hops='two'"),
    ],
)
def test_a_checkpoint_that_auto_could_not_have_made_is_not_gone_on_with(
    dataset: str, tmp_path: Path, told: dict[str, Any], said: str
) -> None:
    with init(AUTO) as session:
        g = DistGraph(dataset, session=session)
        checkpoint.save(tmp_path, model=torch.nn.Linear(1, 1), extra=told)
        with pytest.raises(ConfigError, match=said):
            resolve(torch.nn.Linear(1, 1), g, Training(), tmp_path)
        g.close()


def test_refuses_a_train_mask_without_nodes_before_a_file_is_written(tmp_path: Path) -> None:
    raw = replace(two_triangles(), num_classes={NODE_TYPE: 2})
    raw.node_data[NODE_TYPE]["label"] = np.arange(6) % 2
    raw.node_data[NODE_TYPE]["train_mask"][:] = False
    partition_to_disk(raw, tmp_path / "none", PartitionPlan(num_parts=2, method="contiguous"))
    model = build_model("gcn", 2, 4, 2)
    config = FitConfig(epochs=1, checkpoint_folder=tmp_path / "saved", weights_folder=tmp_path / "weights")
    with init("data_parallel") as session:
        g = DistGraph(tmp_path / "none", session=session)
        with pytest.raises(ConfigError, match=r"train_mask of .* marks no node of type '_N'"):
            fit(model, g, config=config)
    run = TrainConfig(data=str(tmp_path / "none"), out=str(tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"train_mask of .* marks no node of type '_N'"):
        train_dataset(run)
    # Only the locks of the checkpoints remain.
    files = {path.name for path in tmp_path.rglob("*") if path.is_file() and "none" not in path.parts}
    assert files <= {".saved.lock", ".checkpoints.lock"}
