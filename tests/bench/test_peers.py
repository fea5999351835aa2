"""Peers: stock DistDGL and ours on one partition, and what is said of a peer that is not installed."""

import json
from pathlib import Path

import pytest

from dglx_dist.data.partition.base import PartitionOptions, PartitionPlan
from dglx_dist.data.storage.reader import open_dataset
from dglx_dist.data.synthetic import SyntheticConfig
from dglx_dist.errors import ConfigError
from scripts.bench.peers import launch
from scripts.bench.peers.data import assignment_of, copy_of, launch_of
from scripts.bench.peers.launch import run_once
from scripts.bench.peers.workload import Launch, Workload
from scripts.bench.records import JobError
from scripts.netlab.base import LabSpec, LoopbackLab
from scripts.netlab.labs import open_lab

GRAPH = SyntheticConfig(nodes=4000, degree=10, features=8, classes=5, train_rate=0.1, seed=0)
CUT = PartitionPlan(num_parts=2, options=PartitionOptions(balance=("train",)))
TRAINING = {"batch_size": 100, "fanouts": (5, 5)}
TINY = Workload(features=8, classes=5, batch_size=100, fanouts=(5, 5))


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


@pytest.mark.wide
def test_stock_and_ours_train_the_same_seeds(needs_lab: None, work: Path, tmp_path: Path) -> None:
    launches = {
        system: launch_of(system, GRAPH, CUT, work, TRAINING, epochs=1, warmup=0)
        for system in ("stock", "ours")
    }
    with open_lab(LabSpec(servers=2)) as lab:
        stock, ours = (
            run_once(lab, item, tmp_path / system, timeout_s=120.0) for system, item in launches.items()
        )
    assert len(stock) == len(ours) == 2
    # Ids in both formats are the same, so equal sums of the seeds' ids are equal shares.
    assert stock[0]["extra"]["seed_sum_of_rank"] == ours[0]["extra"]["seed_sum_of_rank"]
    (record,), (own,) = stock[0]["epochs"], ours[0]["epochs"]
    assert record["num_samples"] == own["num_samples"] == 400
    # Other draws of the same neighbourhoods, from the same weights.
    assert own["loss"] == pytest.approx(record["loss"], rel=0.1)
    counts = [report[0]["extra"]["counts"] for report in (stock, ours)]
    assert counts[1]["input_rows"] == pytest.approx(counts[0]["input_rows"], rel=0.1)
    # What we count goes over the wire, and headers and acknowledgements are all that we do not count.
    assert own["bytes_outside"] < ours[0]["bytes_outside_wire"] < 1.3 * own["bytes_outside"]
    # Nobody counts for stock DGL but the cards.
    assert record["bytes_outside"] == stock[0]["bytes_outside_wire"] > 0
    # A server of stock DGL is more than its trainer.
    assert stock[0]["peak_bytes"] > stock[0]["extra"]["rank_peak_bytes"]


def test_stock_needs_emulated_servers_and_all_need_data_before_anything_starts(tmp_path: Path) -> None:
    with LoopbackLab(LabSpec(servers=2), missing="no tool of that name") as lab:
        for system, message in (("stock", "no tool of that name"), ("ours", "nothing")):
            with pytest.raises(ConfigError, match=message):
                run_once(lab, Launch(system=system, workload=TINY, data="nothing"), tmp_path / system)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.wide
def test_a_graph_server_that_fails_ends_the_launch_and_is_told(needs_lab: None, tmp_path: Path) -> None:
    config = tmp_path / "empty.json"
    config.write_text("{}")
    with (
        open_lab(LabSpec(servers=1)) as lab,
        pytest.raises(JobError, match=r"(?s)a graph server ended.*graph-server-0\.log: .*Error"),
    ):
        run_once(
            lab, Launch(system="stock", workload=TINY, data=str(config)), tmp_path / "stock", timeout_s=60.0
        )


def test_all_formats_are_of_one_cut_and_what_is_written_is_found_again(work: Path) -> None:
    paths = {system: copy_of(system, GRAPH, CUT, work) for system in ("ours", "stock", "pyg")}
    ours, record = open_dataset(paths["ours"]), json.loads(paths["stock"].read_text())
    offsets = ours.manifest.node_offsets["_N"]
    assert record["node_map"]["_N"] == [[int(offsets[part]), int(offsets[part + 1])] for part in (0, 1)]
    part_of = assignment_of(ours).part_of["_N"]
    assert [int((part_of == part).sum()) for part in (0, 1)] == [int(offsets[1]), 4000 - int(offsets[1])]
    assert {path.stem for path in paths["pyg"].iterdir()} == {"edge_index", "feat", "label", "train_mask"}
    before = sorted(path.name for path in work.iterdir())
    assert {system: copy_of(system, GRAPH, CUT, work) for system in paths} == paths
    assert sorted(path.name for path in work.iterdir()) == before


def test_parts_become_phases() -> None:
    rows = [
        {
            "epoch": 1,
            "seconds": 10.0 + rank,
            "parts": {"sample": 1.0, "pull": 2.0 + rank, "forward": 3.0, "backward": 4.0, "update": 0.5},
            "counts": {"targets": 10.0, "loss_sum": 5.0, "correct": 2.0 * rank},
        }
        for rank in range(2)
    ]
    record = launch.as_record(rows, wire=77)
    # Means over ranks, so that what follows one another comes to no more than the epoch.
    assert (record.sample_s, record.fetch_s, record.wait_s, record.compute_s) == (1.0, 2.5, 3.5, 7.5)
    assert (record.seconds, record.loss, record.train_accuracy, record.num_samples) == (11.0, 0.5, 0.1, 20)
    assert (record.bytes_outside, record.bytes_inside) == (77, 0)
    # Ours counts its bytes, and its exchange is no part of its backward.
    parts = {"wait": 1.0, "forward": 2.0, "backward": 5.0, "exchange": 4.0, "loader fetch": 3.0}
    counts = {"targets": 1.0, "ledger inside": 3.0, "ledger outside": 5.0}
    record = launch.as_record([{"epoch": 0, "seconds": 9.0, "parts": parts, "counts": counts}], wire=99)
    assert (record.compute_s, record.exchange_s, record.wait_s, record.fetch_s) == (3.0, 4.0, 1.0, 3.0)
    assert (record.bytes_outside, record.bytes_inside) == (5, 3)
