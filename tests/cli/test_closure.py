from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dglx_dist.cli.app import app
from dglx_dist.cli.report import check_closure, feature_bytes
from dglx_dist.errors import ConfigError
from dglx_dist.records import NODE_TYPE, ColumnInfo
from dglx_dist.report.pictures import draw_expansion
from dglx_dist.report.tables import expansion_table
from tests.cli.test_inspect_command import TWO_PARTS
from tests.strategies import equality


def test_options_without_closure_are_told_what_they_are_for() -> None:
    with pytest.raises(ConfigError, match="--hops 3 is for --closure"):
        check_closure(False, hops=3, servers=None)
    with pytest.raises(ConfigError, match="--servers 0 must be at least 1"):
        check_closure(True, hops=0, servers=0)
    with pytest.raises(ConfigError, match="--hops -1"):
        check_closure(True, hops=-1, servers=None)
    check_closure(True, hops=0, servers=1)
    check_closure(False, hops=None, servers=None)


def test_bytes_of_features() -> None:
    assert feature_bytes(TWO_PARTS) == 20
    half = {NODE_TYPE: {"feat": ColumnInfo(dtype="bfloat16", row_shape=(6,))}}
    assert feature_bytes(replace(TWO_PARTS, node_columns=half)) == 12
    assert feature_bytes(replace(TWO_PARTS, node_columns={NODE_TYPE: {}})) == 0


def test_many_servers_are_shown_by_least_mean_and_most() -> None:
    few = expansion_table([[1.0, 1.0]], [0], 4, [1.0])
    assert [column.header for column in few.columns][1:3] == ["server 0", "server 1"]
    many = expansion_table([[float(n) for n in range(9)]], [0], 4, [1.0])
    assert [column.header for column in many.columns][1:4] == ["least", "mean", "most"]
    assert [next(iter(column.cells)) for column in many.columns][1:4] == ["0.00", "4.00", "8.00"]


def test_a_picture_of_many_servers(tmp_path: Path) -> None:
    draw_expansion([[1.0] * 9, [2.0] * 9], tmp_path / "many.png", title="nine")
    assert (tmp_path / "many.png").stat().st_size > 1000


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
