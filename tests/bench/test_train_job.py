import math
from pathlib import Path
from typing import Any

import pytest

from dglx_dist.errors import ConfigError, UnknownNameError
from scripts.bench import data
from scripts.bench.driver import KEYS, read_measurement
from scripts.bench.jobs import counts, train
from scripts.bench.jobs.params import IntervalParams, TrainParams, read_params
from scripts.bench.records import Job, Shape, Variant
from tests.bench.helpers import HALVES, SMALL, context, params_of
from tests.helpers.ranks import run_ranks

COST = {"forward": {"base_s": 0.0, "per_edge_s": 0.0}, "backward": {"base_s": 0.0, "per_edge_s": 0.0}}


def run_all(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """On every rank: the reports of several jobs, one after another in the same process."""
    return [train.run(params, context()) for params in jobs]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return data.prepare(SMALL, {"halves": HALVES}, tmp_path_factory.mktemp("data"))["halves"]


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> list[list[dict[str, Any]]]:
    jobs = [
        params_of(folder),
        params_of(folder),
        params_of(folder, simulated=COST),
        params_of(folder, seeds="own", structure="replicated", epochs=2),
        params_of(folder, accuracy=True, warmup=0, epochs=3),
        params_of(folder, cache="degree", alpha=1.0),
        params_of(folder, cache="lookahead", alpha=0.5),
    ]
    return run_ranks(run_all, 2, args=(jobs,), ranks_per_server=1)


def test_caches_send_fewer_rows_for_the_same_losses(two_ranks: list[list[dict[str, Any]]]) -> None:
    plain, full, ahead = (two_ranks[0][number] for number in (0, 5, 6))
    assert payload(full, "features") == 0 < payload(ahead, "features") < payload(plain, "features")
    for case in (full, ahead):
        assert [epoch["loss"] for epoch in case["epochs"]] == [epoch["loss"] for epoch in plain["epochs"]]


def payload(report: dict[str, Any], *phases: str) -> int:
    return sum(report["extra"]["bytes_outside_by_phase"].get(phase, 0) for phase in phases)


def count_job(folder: Path, **changed: Any) -> counts.Survey:
    (result,) = run_ranks(run_survey, 1, args=(params_of(folder, **changed),))
    return counts.Survey(**result)


def run_survey(params: dict[str, Any]) -> Any:
    return counts.survey({"one": {"train": params, "servers": 2}}, context())["one"]


def test_bytes_are_those_of_the_same_draws(folder: Path, two_ranks: list[list[dict[str, Any]]]) -> None:
    expected, report = count_job(folder), two_ranks[0][0]
    assert expected.remote_rows > 0
    assert payload(report, "features") == expected.feature_bytes == expected.remote_rows * (8 + 12 * 4)
    assert payload(report, "sampling") == expected.sampling_bytes
    assert payload(report, "labels") == expected.label_bytes
    assert payload(report, "gradients") == expected.gradient_bytes
    assert report["extra"]["remote_rows"] == expected.remote_rows
    assert report["extra"]["seeds_per_server"] == expected.seeds_per_rank == [60, 60]
    assert report["extra"]["steps"] == expected.steps == 4
    assert report["extra"]["edges"] == expected.edges
    # The same ranks do the same job again.
    assert report["epochs"][0]["loss"] == two_ranks[0][1]["epochs"][0]["loss"]
    assert payload(two_ranks[0][1], "features", "sampling") == payload(report, "features", "sampling")


def test_a_replicated_structure_moves_nothing(folder: Path, two_ranks: list[list[dict[str, Any]]]) -> None:
    report = two_ranks[0][3]
    assert payload(report, "sampling", "labels") == 0
    expected = count_job(folder, seeds="own", structure="replicated")
    assert (expected.sampling_bytes, expected.label_bytes) == (0, 0)
    # Two epochs of as many seeds.
    assert report["extra"]["seeds_per_server"] == [2 * seeds for seeds in expected.seeds_per_rank]
    assert len(report["epochs"]) == 2


def test_slept_compute_moves_the_bytes_of_real_compute(two_ranks: list[list[dict[str, Any]]]) -> None:
    real, slept = two_ranks[0][0], two_ranks[0][2]
    for phase in ("features", "sampling", "labels", "gradients"):
        assert payload(real, phase) == payload(slept, phase)
    # What it learned is nothing, and is not shown as a loss.
    assert math.isnan(slept["epochs"][0]["loss"])
    assert math.isnan(slept["epochs"][0]["train_accuracy"])


def test_reports_of_the_ranks_agree_and_can_be_read(two_ranks: list[list[dict[str, Any]]]) -> None:
    for rank, second in zip(*two_ranks, strict=True):
        assert set(rank) == set(KEYS)
        assert rank["bytes_outside_wire"] is None  # plain loopback counts nothing of its own
        message = [
            str({key: report[key] for key in KEYS if key != "peak_bytes"}) for report in (rank, second)
        ]
        assert message[0] == message[1]  # as text: what learned nothing has no number for its loss
        variant = Variant(name="a", shape=Shape(servers=2), job=Job(kind="train"))
        measurement = read_measurement(variant, 0, [rank, second])
        assert measurement.seconds > 0
        assert measurement.peak_bytes > 10**7


def test_a_curve_has_a_point_for_each_epoch(two_ranks: list[list[dict[str, Any]]]) -> None:
    report = two_ranks[0][4]
    seconds = [epoch["seconds"] for epoch in report["epochs"]]
    assert [at for at, _ in report["accuracy"]] == pytest.approx(
        [sum(seconds[: count + 1]) for count in range(3)]
    )
    assert all(0 <= accuracy <= 1 for _, accuracy in report["accuracy"])
    assert two_ranks[0][0]["accuracy"] == []


def test_phases_of_the_loop_come_to_the_epoch(two_ranks: list[list[dict[str, Any]]]) -> None:
    for report in two_ranks[0]:
        for record in report["epochs"]:
            phases = record["wait_s"] + record["compute_s"] + record["exchange_s"]
            assert phases == pytest.approx(record["seconds"])
            assert min(record["wait_s"], record["compute_s"], record["exchange_s"]) > 0


def test_steps_can_be_limited_and_one_process_moves_nothing(folder: Path) -> None:
    ((report,),) = run_ranks(run_all, 1, args=([params_of(folder, max_steps=2)],))
    assert report["extra"]["remote_share"] == report["epochs"][0]["bytes_outside"] == 0
    assert report["extra"]["seeds_max_over_mean"] == 1.0
    assert report["extra"]["steps"] == 2
    assert report["epochs"][0]["num_samples"] == 2 * 16
    assert count_job(folder, max_steps=2).seeds_per_rank == [32, 32]
    # Cards of servers are added once.
    assert train.sum_by_server([(0, 100), (0, 100), (1, 50)]) == 150
    assert train.sum_by_server([(0, 100), (1, -1)]) is None


def test_wrong_parameters_are_told() -> None:
    for params, message in (
        ({"data": "x", "target": 2.0}, r"target=2\.0 of a bounded job must be a fraction"),
        ({"data": "d", "fanout": [3]}, "did you mean 'fanouts'"),
        ({}, "needs the parameter data"),
        ({"data": "d", "epochs": 0}, "epochs=0"),
        ({"data": "d", "fanouts": []}, "one number for each layer"),
        ({"data": "d", "seeds": "all"}, "none of even, own"),
        ({"data": "d", "simulated": {"forward": COST["forward"]}}, "missing .* 'backward'"),
        ({"data": "d", "accuracy": True, "simulated": COST}, "learns nothing"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_params(IntervalParams if "target" in params else TrainParams, params)
    with pytest.raises(UnknownNameError, match="sage"):
        read_params(TrainParams, {"data": "d", "model": "sagee"})
