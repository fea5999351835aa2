"""An epoch of every way to train, on 2 servers of 2 ranks: the ledger has what was predicted."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dglx_dist.api import fit, init
from dglx_dist.cli.plan_job import measure
from dglx_dist.comm.session import Session
from dglx_dist.data.partition.base import PartitionPlan
from dglx_dist.data.partition.prepare import partition_to_disk
from dglx_dist.data.synthetic import SyntheticConfig, generate
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.planner.choose import predict
from dglx_dist.planner.config import PlanConfig
from dglx_dist.planner.model_shape import infer_shape
from dglx_dist.planner.records import ModelShape, Prediction
from dglx_dist.strategies.base import STRATEGIES
from dglx_dist.strategies.candidate import CACHE_SIZES
from dglx_dist.training.fit_config import FitConfig
from dglx_dist.training.models import build_model
from tests.helpers import wide
from tests.helpers.ranks import run_ranks

FEATURES, HIDDEN, CLASSES, BATCH, FANOUTS = 13, 5, 3, 32, (4, 3)
BESIDE = ("control", "metrics")
"""How ranks agree is nobody's payload."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("planned") / "graph"
    config = SyntheticConfig(nodes=1200, degree=8, features=FEATURES, classes=CLASSES, train_rate=0.3, seed=1)
    partition_to_disk(generate(config), folder, PartitionPlan(num_parts=2, method="metis"))
    return str(folder)


def shape_on(data: str, kind: str) -> ModelShape:
    """Return the shape of the model as trained, where its weights have other names than without a graph."""
    sizes = FEATURES, HIDDEN, CLASSES, len(FANOUTS)
    with init("data_parallel", seed=0) as session:
        g = DistGraph(data, session=session)
        model = build_model(kind, *sizes, 0.0, graph=g)
        shape = infer_shape(model, FEATURES, CLASSES, len(FANOUTS), kind=kind, hidden=HIDDEN)
        g.close()
    return shape


def predict_each(data: str) -> tuple[list[Prediction], list[Prediction]]:
    """Every way to train a GraphSAGE, by workers a GCN as well, on the same batches and plans."""
    counts, predictions = measure(
        PlanConfig(
            data=data,
            hidden=HIDDEN,
            fanouts=FANOUTS,
            batch_size=BATCH,
            servers=2,
            ranks_per_server=2,
            dry_batches=0,
            unit="any",
        )
    )
    shape = shape_on(data, "gcn")
    (chain,) = (prediction for prediction in predictions if prediction.candidate.name == "lambda")
    by_workers = [predict(chain.candidate, replace(counts, shape=shape)), chain]
    remaining = [
        prediction
        for prediction in predictions
        if STRATEGIES.get(prediction.candidate.strategy).traits.own_loop
    ]
    return remaining, by_workers


def train_each(data: str, cases: list[dict[str, Any]]) -> list[dict[str, dict[str, int]]]:
    """On every rank: what it sent in the second epoch of each case, by phase, outside and inside."""
    return [train(data, **case) for case in cases]


class EpochBytes:
    """Callback of two epochs that notes what this rank sends in the second one."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._snapshots: list[Any] = []
        self._sent: dict[str, Counter[str]] = {"outside": Counter(), "inside": Counter()}

    def __call__(self, _: Any) -> None:
        ledger = self._session.ledger
        if len(self._snapshots) == 1:
            for row in ledger.since(self._snapshots[0]):
                if row.phase not in BESIDE:
                    self._sent["inside" if row.inside else "outside"][row.phase] += row.num_bytes
        self._snapshots.append(ledger.snapshot())

    def by_phase(self) -> dict[str, dict[str, int]]:
        """Return bytes by phase, outside and inside of the server."""
        return {side: dict(counts) for side, counts in self._sent.items()}


def train(
    data: str, model: str, strategy: str, options: Mapping[str, Any], cache: str | None, alpha: float
) -> dict[str, dict[str, int]]:
    mini_batches = STRATEGIES.get(strategy).traits.unit == "mini_batch"
    with init(strategy, seed=0, **options) as session:
        g = DistGraph(data, session=session)
        if cache is not None:
            more: dict[str, Any] = {"fanouts": list(FANOUTS), "batch_size": BATCH} if cache == "vip" else {}
            g.cache_rows("feat", alpha=alpha, policy=cache, **more)
        module = build_model(model, FEATURES, HIDDEN, CLASSES, len(FANOUTS), 0.0, graph=g)
        sent = EpochBytes(session)
        # Every epoch ends by itself, and nothing is sent for an evaluation.
        fit(
            module,
            g,
            config=FitConfig(epochs=2, eval_every=1, evaluate=lambda _: {}),
            fanouts=FANOUTS if mini_batches else None,
            batch_size=BATCH if mini_batches else None,
            callbacks=[sent],
        )
        g.close()
    return sent.by_phase()


def sum_phases(ranks: list[Any], place: int, side: str) -> dict[str, int]:
    total: Counter[str] = Counter()
    for rank in ranks:
        total.update(rank[place][side])
    return dict(total)


def as_cases(model: str, compared: list[Prediction], **options: Any) -> list[dict[str, Any]]:
    return [
        {
            "model": model,
            "strategy": prediction.candidate.strategy,
            "options": {**prediction.candidate.options, **options},
            "cache": prediction.candidate.cache,
            "alpha": prediction.candidate.cache_alpha,
        }
        for prediction in compared
    ]


REPEATED = {
    "data_parallel cache=vip:0.1",
    "data_parallel cache=lookahead:0.1",
    "push_pull structure=push group_size=1",
    "push_pull structure=push depth=3",
    "shared_preload external_hops=2 external_fanout=15",
    "cooperative batches=8",
    "cooperative batches=32",
}
"""Candidates whose formula another one has with another number."""


@pytest.mark.parametrize("left_out", [REPEATED, *wide(set[str]())])
def test_bytes_by_phase_are_those_of_real_runs(data: str, left_out: set[str]) -> None:
    compared, chains = predict_each(data)
    # All but cooperative batches on several ranks of a server, whose features are sent inside anew.
    assert {prediction.candidate.strategy for prediction in compared if not prediction.bytes_exact} == {
        "cooperative"
    }
    caches = {(None, 0.0), *((policy, size) for policy in ("vip", "lookahead") for size in CACHE_SIZES)}
    assert {
        (prediction.candidate.cache, prediction.candidate.cache_alpha) for prediction in compared
    } == caches
    # By covers fewer rows, and columns: layer 2 projects before its sum.
    bytes_of = {
        prediction.candidate.name: prediction.inter_server_bytes
        for prediction in compared
        if prediction.feasible
    }
    for name in ("full_graph", "shared_preload hops=1"):
        assert bytes_of[f"{name} aggregate=cover"] < bytes_of[name]
    # What workers are sent is counted for convolutions that map sums, alone or beside own rows.
    assert [chain.bytes_exact for chain in chains] == [True, True]
    # One worker: on a slow machine another may fetch its program in the second epoch only.
    of_workers = [*as_cases("gcn", chains[:1], workers=1), *as_cases("sage", chains[1:], workers=1)]
    assert left_out <= {prediction.candidate.name for prediction in compared}
    compared = [prediction for prediction in compared if prediction.candidate.name not in left_out]
    cases = [*as_cases("sage", compared), *of_workers]
    ranks = run_ranks(train_each, 4, args=(data, cases), ranks_per_server=2, timeout_s=240)
    for place, prediction in enumerate([*compared, *chains]):
        outside, inside = (sum_phases(ranks, place, side) for side in ("outside", "inside"))
        # Between servers, cooperative batches are counted to the byte as well.
        assert outside == dict(prediction.outside), prediction.candidate.name
        assert inside == dict(prediction.inside) or not prediction.bytes_exact, prediction.candidate.name


def epochs_of_workers(data: str) -> dict[str, tuple[int, int]]:
    """Bytes outside and inside of the second epoch in the records of a run."""
    results = {}
    for kind in ("sage", "gcn"):
        with init("lambda", seed=0, workers=1) as session:
            g = DistGraph(data, session=session)
            module = build_model(kind, FEATURES, HIDDEN, CLASSES, len(FANOUTS), 0.0, graph=g)
            result = fit(module, g, config=FitConfig(epochs=3))[1]
            g.close()
        sent = sum(row[-1] for rows in result.traffic.values() for row in rows)
        assert sent == sum(epoch.bytes_outside + epoch.bytes_inside for epoch in result.epochs)
        results[kind] = result.epochs[1].bytes_outside, result.epochs[1].bytes_inside
    return results


@pytest.mark.wide
@pytest.mark.parametrize("servers", [*wide(1), 2])
def test_records_of_workers_have_the_bytes_of_the_plan(tmp_path: Path, servers: int) -> None:
    config = SyntheticConfig(nodes=600, degree=8, features=FEATURES, classes=CLASSES, train_rate=0.3, seed=1)
    partition_to_disk(generate(config), tmp_path / "graph", PartitionPlan(num_parts=servers, method="metis"))
    data, ranks = str(tmp_path / "graph"), servers * 2
    plan = PlanConfig(
        data=data, hidden=HIDDEN, servers=servers, ranks_per_server=2, dry_batches=0, unit="full_graph"
    )
    counts, predictions = measure(plan)
    (workers,) = (prediction.candidate for prediction in predictions if prediction.candidate.name == "lambda")
    (result, *_) = run_ranks(epochs_of_workers, ranks, args=(data,), ranks_per_server=2)
    for kind, moved in result.items():
        single = predict(workers, replace(counts, shape=shape_on(data, kind)))
        assert single.bytes_exact
        assert moved == (single.inter_server_bytes, sum(single.inside.values()))
        assert single.inside["weights_read"] > 0
