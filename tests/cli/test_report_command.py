"""``dglx inspect`` and ``dglx report``."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from dglx_dist.cli.app import app
from dglx_dist.cli.common import draw_or_warn, show
from dglx_dist.cli.report import InspectCommand, overview, part_bytes, read_batches, report
from dglx_dist.comm.trace import write_trace
from dglx_dist.data.storage.columns import FileInfo
from dglx_dist.data.storage.manifest import Manifest
from dglx_dist.errors import ConfigError, StorageError
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, ColumnInfo
from dglx_dist.report.tables import summary_table
from tests.report.traces import span, trace_of
from tests.strategies import equality

TWO_PARTS = Manifest(
    name="drawn",
    num_parts=2,
    node_offsets={NODE_TYPE: np.array([0, 3, 6])},
    edge_offsets={EDGE_TYPE: np.array([0, 4, 7])},
    node_columns={
        NODE_TYPE: {
            "feat": ColumnInfo(dtype="float32", row_shape=(5,)),
            "label": ColumnInfo(dtype="int64", row_shape=()),
        }
    },
    edge_columns={EDGE_TYPE: {"weight": ColumnInfo(dtype="float32", row_shape=())}},
    num_classes={},
    user_ids={},
    method="metis",
    seed=0,
    quality={"edge_cut": 0.25, "balance": {"nodes": 1.0, "train": 1.5}, "num_nodes": [3, 3]},
    files={
        "part0/a.arrow": FileInfo(num_bytes=10, checksum="00000000"),
        "part1/a.arrow": FileInfo(num_bytes=1, checksum="00000000"),
        "part1/b.arrow": FileInfo(num_bytes=2, checksum="00000000"),
    },
)


def test_overview_has_counts_and_figures() -> None:
    shown = overview(TWO_PARTS)
    assert shown["nodes"] == "6: feat float32[5], label int64"
    assert shown["edges"] == "7: weight float32"
    assert shown["edge cut"] == "0.2500"
    assert shown["balance train (max/mean)"] == "1.5000"
    assert shown["bytes on disk"] == 13
    assert "trainers" not in shown
    assert part_bytes(TWO_PARTS) == [10, 3]


def test_several_types_are_named_and_trainers_have_figures_of_their_own() -> None:
    rates, offsets = ("user", "rates", "film"), np.array([0, 1, 2])
    trainers = {"num_parts": 4, "edge_cut": 0.5, "balance": {"train": 1.25}}
    typed = replace(
        TWO_PARTS,
        node_offsets={"user": offsets, "film": offsets},
        node_columns={"user": {}, "film": {}},
        edge_offsets={rates: offsets},
        edge_columns={rates: {}},
        quality={**TWO_PARTS.quality, "trainers": trainers},
    )
    shown = overview(typed)
    assert {"nodes user", "nodes film", "edges user.rates.film"} < shown.keys()
    assert shown["trainers"] == "4, edge cut 0.5000"
    assert shown["balance train of trainers"] == "1.2500"


def test_options_without_closure_are_told_what_they_are_for() -> None:
    for options, said in (
        ({"hops": 3}, "--hops 3 is for --closure"),
        ({"closure": True, "servers": 0}, "--servers 0 must be at least 1"),
        ({"closure": True, "hops": -1}, "--hops -1"),
        ({"verify": "some"}, "--verify some must be auto, full or never"),
    ):
        with pytest.raises(ConfigError, match=said):
            InspectCommand(folder=Path("d"), **options)  # type: ignore[arg-type]


def test_inspect_shows_and_draws_it(tmp_path: Path) -> None:
    folder = equality.write_parts(tmp_path)
    shown = CliRunner().invoke(app, ["inspect", str(folder), "--closure", "--hops", "2", "--servers", "2"])
    assert shown.exit_code == 0, shown.output
    assert "server 1" in shown.output
    assert "server 2" not in shown.output
    # The equality graph has 7 float64 features.
    rows = [line.split() for line in shown.output.splitlines() if line.split()[:1] in (["0"], ["1"], ["2"])]
    assert rows[-3][1:3] == ["1.00", "1.00"]
    assert float(rows[-1][1]) > float(rows[-2][1]) > 1
    assert (folder / "cache" / "partition-closure.png").stat().st_size > 1000


def test_brackets_of_a_folder_or_a_column_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    draw_or_warn(lambda: None, Path("runs/[/red]/picture.png"))
    show(summary_table({"nodes": "3: [bold] float32[5]"}))
    shown = capsys.readouterr().out
    assert "runs/[/red]/picture.png" in shown
    assert "[bold] float32[5]" in shown


def test_a_trace_is_drawn_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, trace_of([span("forward", "compute", 0, 2, 0), span("pull", "network", 1, 3, 0)]))
    report(path)
    shown = capsys.readouterr().out
    assert "push_pull depth=3: 50.0 % of the network's time beside compute" in shown
    assert str(tmp_path / "trace.png") in shown.replace("\n", "")
    assert (tmp_path / "trace.png").stat().st_size > 1000


def test_batches_are_two_numbers_and_of_a_trace(tmp_path: Path) -> None:
    assert read_batches("3:12") == (3, 12)
    for wrong in ("3", "4:3", "a:b", "-1:2", ""):
        with pytest.raises(ConfigError, match="must be two numbers"):
            read_batches(wrong)
    with pytest.raises(ConfigError, match="--batches 1:2 is for a trace"):
        report(tmp_path, "1:2")


def test_another_file_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(StorageError, match=r"other\.json.*otherData"):
        report(tmp_path / "other.json")
