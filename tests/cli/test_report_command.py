"""``dglx inspect`` and ``dglx report``."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dglx_dist.cli.app import app
from dglx_dist.cli.common import draw_or_warn, show
from dglx_dist.cli.report import InspectCommand, count_part_bytes, read_batches, report
from dglx_dist.comm.trace import write_trace
from dglx_dist.data.partition.base import PartitionPlan
from dglx_dist.data.partition.prepare import partition_to_disk
from dglx_dist.data.storage.manifest import read_manifest
from dglx_dist.data.storage.reader import open_dataset
from dglx_dist.errors import ConfigError, DglxError, StorageError
from dglx_dist.report.tables import build_summary_table
from dglx_dist.strategies.full_graph.plan_builder import border_rows
from tests.report.traces import span, trace_of
from tests.training import hetero


def test_types_columns_balance_and_trainers_are_shown(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    partition_to_disk(
        hetero.raw_graph(), folder, PartitionPlan(num_parts=2, method="random", trainers_per_part=2)
    )
    shown = CliRunner().invoke(app, ["inspect", str(folder)], env={"COLUMNS": "200"}).output
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    manifest = read_manifest(folder)
    quality: Any = manifest.quality
    trainers = quality["trainers"]
    for message in (
        "nodes paper 60: feat float64[6], label int64, ",
        "nodes author 40: trainer_id int32",
        "edges author:writes:paper 120: trainer_id int32",
        f"edge cut {quality['edge_cut']:.4f}",
        f"balance train (max/mean) {quality['balance']['train']:.4f}",
        f"trainers 4, edge cut {trainers['edge_cut']:.4f}",
        f"balance train of trainers {trainers['balance']['train']:.4f}",
    ):
        assert any(line.startswith(message) for line in lines), message
    sizes = [(path.split("/")[0], info.num_bytes) for path, info in manifest.files.items()]
    assert count_part_bytes(manifest) == [
        sum(size for part, size in sizes if part == f"part{n}") for n in (0, 1)
    ]


def test_options_without_closure_are_told_what_they_are_for() -> None:
    for options, message in (
        ({"hops": 3}, "--hops 3 needs --closure"),
        ({"closure": True, "servers": 0}, "--servers 0 must be at least 1"),
        ({"closure": True, "hops": -1}, "--hops -1"),
        ({"verify": "some"}, "--verify some must be auto, full or never"),
    ):
        with pytest.raises(ConfigError, match=message):
            InspectCommand(folder=Path("d"), **options)  # type: ignore[arg-type]


def test_inspect_shows_and_draws_it(folder: Path) -> None:
    shown = CliRunner().invoke(app, ["inspect", str(folder), "--closure", "--hops", "2", "--servers", "2"])
    assert shown.exit_code == 0, shown.output
    assert "server 1" in shown.output
    assert "server 2" not in shown.output
    assert "trainers" not in shown.output
    by_type, rows = border_rows(open_dataset(folder), 2)
    (sources,) = by_type.values()
    assert f"a layer of all nodes: {sources}; {rows} with aggregate=cover" in shown.output
    # The equality graph has 7 float64 features.
    rows = [line.split() for line in shown.output.splitlines() if line.split()[:1] in (["0"], ["1"], ["2"])]
    assert rows[-3][1:3] == ["1.00", "1.00"]
    assert float(rows[-1][1]) > float(rows[-2][1]) > 1
    assert (folder / "cache" / "partition-closure.png").stat().st_size > 1000


def test_brackets_of_a_folder_or_a_column_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    draw_or_warn(lambda: None, Path("runs/[/red]/picture.png"))
    show(build_summary_table({"nodes": "3: [bold] float32[5]"}))
    shown = capsys.readouterr().out
    assert "runs/[/red]/picture.png" in shown
    assert "[bold] float32[5]" in shown


def test_a_trace_is_drawn_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, trace_of([span("forward", "compute", 0, 2, 0), span("pull", "network", 1, 3, 0)]))
    report([path])
    shown = capsys.readouterr().out
    assert "push_pull depth=3: 50.0 % of the network's time beside compute" in shown
    assert str(tmp_path / "trace.png") in shown.replace("\n", "")
    assert (tmp_path / "trace.png").stat().st_size > 1000


def test_batches_are_two_numbers_and_of_a_trace(tmp_path: Path) -> None:
    assert read_batches("3:12") == (3, 12)
    for wrong in ("3", "4:3", "a:b", "-1:2", ""):
        with pytest.raises(ConfigError, match="must be two batch numbers"):
            read_batches(wrong)
    with pytest.raises(ConfigError, match="--batches 1:2 is for a trace"):
        report([tmp_path], "1:2")


def test_another_file_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(StorageError, match=r"other\.json.*otherData"):
        report([tmp_path / "other.json"])


def deep(key: str) -> str:
    return f'{{"{key}": ' + "[" * 100_000


LINE = (
    '{"epoch": 0, "loss": 1, "train_accuracy": 1, "val_accuracy": 1, "seconds": 1, "num_samples": 1, '
    '"sample_s": 0, "fetch_s": 0, "wait_s": 0, "compute_s": 0, "exchange_s": 0, "bytes_inside": 0, '
    '"bytes_outside": 0, "cache_hits": 0, "cache_misses": 0}\n'
)
DAMAGE = [
    ("config.json", "[]"),
    ("config.json", deep("data")),
    ("summary.json", deep("ranks")),
    ("summary.json", "\xff{"),
    ("summary.json", f'{{"bytes_inside": 1{"0" * 4000}}}'),
    ("summary.json", '{"epoch_seconds": Infinity, "x_bytes": NaN}'),
    ("summary.json", '{"accuracy": {"a": {"b": [1, {}]}}, "ranks": [1], "servers": {}}'),
    ("metrics.jsonl", deep("epoch") + "\n"),
    ("metrics.jsonl", "7\n"),
    ("metrics.jsonl", LINE.replace('"epoch": 0', '"epoch": "0"')),
    ("metrics.jsonl", LINE.replace('"loss": 1', '"loss": {}')),
    ("metrics.jsonl", LINE.replace('"loss": 1', f'"loss": 1{"0" * 400}')),
    ("metrics.jsonl", LINE.replace('"seconds": 1', '"seconds": 5e-324')),
    ("metrics.jsonl", LINE.replace('"bytes_inside": 0', f'"bytes_inside": 1{"0" * 4000}')),
    ("trace.json", '{"otherData": {"format": 1}}'),
    ("trace.json", deep("otherData")),
    ("picture.png", None),
    ("plan.json", "{}"),
    ("plan.json", deep("predictions")),
    ("plan.json", '{"predictions": [{"name": 1}], "chosen": null, "outcome": 7, "why": 1}'),
    ("summary.json", '{"traffic": {"features": [[0, 1], [0, 1, "many"]]}}'),
    ("summary.json", '{"traffic": [1], "rank_memory_bytes": "all"}'),
    ("summary.json", '{"rank_memory_bytes": [Infinity, NaN]}'),
]


@pytest.mark.parametrize(("name", "text"), DAMAGE)
def test_a_damaged_run_is_one_message_or_shown(tmp_path: Path, name: str, text: str | None) -> None:
    for file, full in (("config.json", "{}"), ("metrics.jsonl", LINE), ("summary.json", "{}")):
        (tmp_path / file).write_text(full)
    path = tmp_path / name
    if text is None:
        path.mkdir()
    else:
        path.write_text(text)
    shown_or_refused(path if name == "trace.json" else tmp_path)


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "summary.json"])
@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "huge"])
def test_what_is_no_file_of_a_run_is_not_read(tmp_path: Path, name: str, kind: str) -> None:
    for file, full in (("config.json", "{}"), ("metrics.jsonl", LINE), ("summary.json", "{}")):
        (tmp_path / file).write_text(full)
    path = tmp_path / name
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as file:
            file.truncate(1 << 40)
    shown_or_refused(tmp_path)


def shown_or_refused(path: Path) -> None:
    page = [] if path.is_file() or find_spec("plotly") is None else ["--html", str(path / "page.html")]
    result = CliRunner().invoke(app, ["report", str(path), *page])
    if result.exit_code:
        assert isinstance(result.exception, DglxError), result.exception
        assert str(path) in str(result.exception)
    assert not page or result.exit_code or (path / "page.html").is_file()
