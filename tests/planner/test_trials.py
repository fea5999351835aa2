"""Trials leave the job as it was: a run that ``auto`` chose is the run of the strategy by its name."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from dglx_dist.api import choose_strategy, fit, init
from dglx_dist.comm.ledger import CONTROL, LedgerRow
from dglx_dist.comm.session import Session
from dglx_dist.data.partition.base import PartitionPlan
from dglx_dist.data.partition.prepare import partition_to_disk
from dglx_dist.data.synthetic import SyntheticConfig, generate
from dglx_dist.errors import ConfigError
from dglx_dist.graph import optim
from dglx_dist.graph.cache import PHASE_ROW_CACHE
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.dist_tensor import view_owned_rows
from dglx_dist.graph.embedding import DistEmbedding
from dglx_dist.planner import auto, choose, trials
from dglx_dist.planner.measure import Links
from dglx_dist.planner.records import Choice
from dglx_dist.registry import AUTO
from dglx_dist.strategies.base import STRATEGIES
from dglx_dist.strategies.push_pull.strategy import OpenedPushPull
from dglx_dist.training.fit_config import FitConfig
from dglx_dist.training.models import build_model
from dglx_dist.training.relational import RGCN, EntityInputs
from tests.helpers import wide
from tests.helpers.ranks import RankError, run_ranks
from tests.training import hetero

FEATURES, CLASSES, FANOUTS, BATCH = 12, 3, (3, 3), 40
SIMPLE = ("data_parallel", "full_graph", "cooperative batches=2")
CHOSEN = ("data_parallel cache=vip:0.5", "push_pull structure=push", *SIMPLE)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tried") / "graph"
    graph = generate(SyntheticConfig(nodes=600, degree=6, features=FEATURES, classes=CLASSES, train_rate=0.3))
    partition_to_disk(graph, folder, PartitionPlan(num_parts=2, method="metis"))
    return str(folder)


def model_of() -> nn.Module:
    torch.manual_seed(3)
    return build_model("sage", FEATURES, 8, CLASSES, 2, dropout=0.5)


def files_of(data: str) -> list[tuple[str, int]]:
    return sorted((str(path), path.stat().st_size) for path in Path(data).rglob("*") if path.is_file())


def sent_by(session: Session) -> list[LedgerRow]:
    """Return what was sent, but for what ranks agree by, and seeds and rows of the cache that was chosen."""
    return [row for row in session.ledger.rows() if row.phase not in (CONTROL, PHASE_ROW_CACHE, "masks")]


@contextmanager
def choosing(name: str) -> Iterator[None]:
    """Let the choice be ``name``, after trials of all candidates."""

    def pick(finalists: Any, _: Any) -> Any:
        return next(finalist for finalist in finalists if finalist.candidate.name == name)

    with (
        mock.patch.object(choose, "_pick", pick),
        mock.patch.object(trials._Race, "_drop_slower"),
        # On a busy machine, the time for the choice would be over before all candidates are open.
        mock.patch.multiple(trials, _MAX_ROUNDS=1, MIN_TRIAL_S=1000.0),
    ):
        yield


def choose_by_name(
    model: nn.Module,
    g: DistGraph,
    name: str,
    data: str,
    describe: Callable[[], Any] = lambda: None,
    **options: Any,
) -> tuple[dict[str, Any], Choice]:
    """Choose ``name``. Return what was tried, and what the trials have changed in the job."""
    session = g.session

    def describe_job() -> list[Any]:
        shares = session.step_share, session.model_share
        return [sent_by(session), torch.get_rng_state().tolist(), files_of(data), shares, describe()]

    before, weights = describe_job(), [parameter.detach().clone() for parameter in model.parameters()]
    with choosing(name):
        choice = choose_strategy(model, g, epochs=2, **options)
    changed = [(a, b) for a, b in zip(before, describe_job(), strict=True) if a != b]
    tried = [prediction.candidate.name for prediction in choice.predictions if prediction.trial]
    is_kept = all(map(torch.equal, weights, model.parameters()))
    return {"tried": tried, "changed": changed, "weights kept": is_kept}, choice


def train(data: str, name: str, *, chosen: bool) -> dict[str, Any]:
    """Train with the candidate ``name``, which ``auto`` has chosen or which is named."""
    strategy, *options = name.split()
    inputs: dict[str, Any] = dict(option.split("=") for option in options)
    cache = inputs.pop("cache", None)
    inputs = {key: int(value) if value.isdigit() else value for key, value in inputs.items()}
    full = STRATEGIES.get(strategy).traits.unit == "full_graph"
    model, state = model_of(), {}
    with init(AUTO, unit="any", seed=5) if chosen else init(strategy, seed=5, **inputs) as session:
        g = DistGraph(data, session=session)
        batches: dict[str, Any] = {"fanouts": FANOUTS, "batch_size": BATCH}
        if chosen:
            state, _ = choose_by_name(model, g, name, data, **batches)
        elif cache is not None:
            policy, alpha = cache.split(":")
            g.cache_rows("feat", alpha=float(alpha), policy=policy, fanouts=list(FANOUTS), batch_size=BATCH)
        _, result = fit(
            model,
            g,
            config=FitConfig(epochs=2),
            fanouts=None if full else FANOUTS,
            batch_size=None if full else BATCH,
        )
        g.close()
        sent = [row for row in session.ledger.rows() if row.phase != CONTROL]
        trained = [parameter.tolist() for parameter in model.parameters()]
    losses = [epoch.loss for epoch in result.epochs]
    return state | {"run": [losses, trained, result.accuracy, sent]}


def train_twice(folders: list[str], name: str) -> list[dict[str, Any]]:
    """Train on two copies of a dataset, because runs store beside it what later ones read."""
    return [train(folder, name, chosen=chosen) for folder, chosen in zip(folders, (True, False), strict=True)]


@pytest.mark.parametrize("name", [CHOSEN[0], *wide(CHOSEN[1], *SIMPLE)])
def test_a_run_after_trials_equals_the_named_run(data: str, tmp_path: Path, name: str) -> None:
    folders = [str(shutil.copytree(data, tmp_path / copy)) for copy in ("chosen", "named")]
    for chosen, named in run_ranks(train_twice, 2, args=(folders, name), ranks_per_server=1, timeout_s=200):
        assert set(CHOSEN) <= set(chosen["tried"])
        assert chosen["changed"] == []
        assert chosen["weights kept"]
        assert chosen["run"] == named["run"]


TYPED = ("data_parallel", "push_pull structure=push", "cooperative batches=2", "full_graph")
WAYS = ("chosen", "fitted", "named")


def train_typed(data: str, name: str, way: str) -> dict[str, Any]:
    """Train R-GCN and rows of authors with the candidate ``name``: chosen, chosen by ``fit``, or named."""
    strategy, *options = name.split()
    values: dict[str, Any] = dict(option.split("=") for option in options)
    values = {key: int(value) if value.isdigit() else value for key, value in values.items()}
    full, state = STRATEGIES.get(strategy).traits.unit == "full_graph", dict[str, Any]()
    with init(strategy, seed=5, **values) if way == "named" else init(AUTO, unit="any", seed=5) as session:
        g = DistGraph(data, session=session)
        options_of_rows: dict[str, Any] = {"graph": g, "dtype": torch.float64}
        policy = g.get_node_partition_policy("author")
        authors = DistEmbedding(g.num_nodes("author"), 8, "rows", part_policy=policy, **options_of_rows)
        inputs, sparse = EntityInputs(g, embeddings={"author": authors}), optim.SparseAdam([authors], lr=0.1)
        torch.manual_seed(3)
        widths = inputs.feature_widths
        model = RGCN(g, widths, 8, hetero.CLASSES, out_types=["paper"], dropout=0.5).double()

        def describe_rows() -> list[Any]:
            tensors = [view_owned_rows(tensor).tolist() for tensor in (authors.weight, *authors.optm_state)]
            return [tensors, len(authors._gradients)]

        batches: dict[str, Any] = {"fanouts": (3, 3), "batch_size": 5}
        if way == "chosen":
            state, choice = choose_by_name(model, g, name, data, describe_rows, inputs=inputs, **batches)
            assert all(entry.memory_bytes for entry in choice.predictions if entry.feasible)
        config = FitConfig(epochs=2, inputs=inputs)
        if way != "fitted" and full:
            batches = {}
        with choosing(name):
            _, result = fit(model, g, config=config, sparse=sparse, **batches)
        if way == "fitted":
            assert result.choice is not None
            state["why_not"] = {entry.candidate.name: entry.why_not for entry in result.choice.predictions}
        trained = [parameter.tolist() for parameter in model.parameters()]
        losses = [epoch.loss for epoch in result.epochs]
        state["run"] = [losses, trained, result.accuracy, describe_rows(), sent_by(session)]
        g.close()
    return state


def train_typed_in_all_ways(folders: list[str], name: str) -> list[dict[str, Any]]:
    return [train_typed(folder, name, way) for folder, way in zip(folders, WAYS, strict=True)]


@pytest.mark.parametrize("name", wide(*TYPED))
def test_a_run_on_several_types_after_trials_equals_the_named_run(tmp_path: Path, name: str) -> None:
    folder = hetero.write_parts(tmp_path)
    folders = [str(shutil.copytree(folder, tmp_path / way)) for way in WAYS]
    for chosen, fitted, named in run_ranks(
        train_typed_in_all_ways, 2, args=(folders, name), ranks_per_server=1, timeout_s=200
    ):
        assert set(TYPED) <= set(chosen["tried"])
        assert fitted["why_not"]["lambda"].startswith("lambda does not train models of several")
        assert chosen["changed"] == []
        assert chosen["weights kept"]
        assert chosen["run"] == fitted["run"] == named["run"]


def refuse(*_: Any) -> None:
    raise ConfigError("the sums of layer 1 are too wide; take fewer heads")


def run_out(*_: Any) -> None:
    raise torch.OutOfMemoryError("out of memory: 2 GB are missing")


def choose_beside(data: str, failure: str) -> dict[str, str]:
    with init(AUTO, seed=5) as session:
        g = DistGraph(data, session=session)
        make: Any = OpenedPushPull.make_model
        failing: Any = {"refuse": refuse, "run out": run_out, "die": lambda *_: os._exit(9)}[failure]
        # All ranks refuse a model alike. Memory runs out, and processes end, on one.
        action = failing if failure == "refuse" or session.topology.rank == 1 else make
        with mock.patch.object(OpenedPushPull, "make_model", action):
            choice = choose_strategy(model_of(), g, fanouts=FANOUTS, batch_size=BATCH, epochs=2)
        assert choice.chosen_prediction is not None
        assert choice.chosen_prediction.candidate.strategy != "push_pull"
        fit(model_of(), g, config=FitConfig(epochs=1), fanouts=FANOUTS, batch_size=BATCH)
        g.close()
    return {prediction.candidate.name: prediction.why_not for prediction in choice.predictions}


def test_a_candidate_that_a_strategy_refuses_is_no_choice(data: str) -> None:
    for reasons in run_ranks(choose_beside, 2, args=(data, "refuse"), ranks_per_server=1, timeout_s=100):
        assert reasons["push_pull structure=push"] == "the sums of layer 1 are too wide"
        assert reasons["data_parallel"] == ""


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("run out", "rank 1 .*the trial of push_pull .* failed: OutOfMemoryError: out of memory"),
        ("die", "rank 1"),
    ],
)
def test_a_trial_that_fails_on_one_rank_ends_the_job(data: str, failure: str, message: str) -> None:
    with pytest.raises(RankError, match=message):
        run_ranks(choose_beside, 2, args=(data, failure), ranks_per_server=1, timeout_s=100)


def choose_in_no_time(data: str) -> list[dict[str, str]]:
    reasons = []
    with init(AUTO, seed=5) as session:
        g = DistGraph(data, session=session)
        g.cache_rows("feat", alpha=0.3, policy="degree")
        cached = g.kvstore.has_cache
        # The simplest and another one are tried, however little time there is.
        limits = {"MIN_TRIAL_S": 0.0, "MAX_SHARE": 0.0}
        with mock.patch.multiple(trials, **limits):
            choice = choose_strategy(model_of(), g, fanouts=FANOUTS, batch_size=BATCH, epochs=2)
        reasons.append({prediction.candidate.name: prediction.not_tried for prediction in choice.predictions})
        assert g.kvstore.has_cache == cached
        g.close()
    slow = Links(external_bytes_per_s=1e3, internal_bytes_per_s=1e3)
    with init(AUTO, seed=5) as session, mock.patch.object(auto, "probe", return_value=slow):
        g = DistGraph(data, session=session)
        choice = choose_strategy(model_of(), g, fanouts=FANOUTS, batch_size=BATCH, epochs=2)
        reasons.append({prediction.candidate.name: prediction.not_tried for prediction in choice.predictions})
        g.close()
    return reasons


@pytest.mark.wide
def test_candidates_that_time_or_bytes_rule_out_are_not_tried(data: str) -> None:
    for late, slow in run_ranks(choose_in_no_time, 2, args=(data,), ranks_per_server=1, timeout_s=100):
        assert sorted(set(late.values())) == ["", "the time for the choice is over"]
        assert list(late.values()).count("") == 2
        assert late["data_parallel"] == ""
        assert any(reason.startswith("its bytes alone take") for reason in slow.values())
        assert "" in slow.values()


def choose_with_memory_for_one(data: str) -> list[str]:
    with init(AUTO, seed=5) as session:
        g = DistGraph(data, session=session)
        # Every candidate closes those before it, which stay finalists.
        with mock.patch.object(trials._Race, "_make_room", close_all):
            choice = choose_strategy(model_of(), g, fanouts=FANOUTS, batch_size=BATCH, epochs=2)
        g.close()
    seconds = {
        prediction.candidate.name: prediction.epoch_seconds
        for prediction in choice.predictions
        if prediction.trial
    }
    assert choice.chosen_prediction is not None
    return [
        choice.chosen_prediction.candidate.name,
        *(name for name in seconds if seconds[name] == min(seconds.values())),
    ]


def close_all(race: Any, _: Any) -> None:
    for contestant in [*race.running]:
        race._drop(contestant)
        race._closed_for_memory.append(contestant.index)


@pytest.mark.wide
def test_candidates_that_were_closed_for_memory_may_be_chosen(data: str) -> None:
    (first, second) = run_ranks(
        choose_with_memory_for_one, 2, args=(data,), ranks_per_server=1, timeout_s=100
    )
    assert first == second
    chosen, fastest = first
    assert chosen.split()[0] == fastest.split()[0] or chosen == "data_parallel"


def test_models_that_trials_would_change_are_refused(data: str) -> None:
    with init(AUTO) as session:
        g = DistGraph(data, session=session)
        model = model_of()
        model.rows = DistEmbedding(g.num_nodes(), 4, graph=g)
        with pytest.raises(ConfigError, match=r"DistEmbedding.*Name a strategy"):
            choose_strategy(model, g, fanouts=FANOUTS, batch_size=BATCH)
        g.close()
