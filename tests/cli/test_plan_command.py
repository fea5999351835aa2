"""``dglx plan``: the table, JSON, and the likeliest mistakes."""

import ctypes
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dglx_dist.cli.app import app
from dglx_dist.cli.common import redirect_libraries_to_stderr
from dglx_dist.errors import ConfigError


def plan(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "200"})


def read_refusal(*arguments: str) -> str:
    shown = plan(*arguments)
    assert isinstance(shown.exception, ConfigError)
    return str(shown.exception)


def test_warns_when_other_programs_disturb_the_timing(dataset: str) -> None:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        shown = plan(dataset, "--hidden", "8", "--fanout", "3,2", "--servers", "1")
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert "plan again on an idle machine" in " ".join(shown.output.split())


def test_a_dataset_has_a_table_and_a_choice(dataset: str, tmp_path: Path) -> None:
    message = (dataset, "--hidden", "8", "--fanout", "3,2", "--batch-size", "20", "--servers", "2")
    shown = plan(*message, "--bandwidth-external", "100mbit")
    assert shown.exit_code == 0, shown.output
    for part in ("data_parallel", "push_pull", "full_graph", "cooperative", "chosen: ", "assumed:", "exact"):
        assert part in shown.output
    assert shown.output.count("->") == 1
    words = shlex.split(shown.output.splitlines()[-1])
    assert words[:8] == ["next:", "dglx", "train", dataset, "--ranks", "2", "--servers", "2"]
    run = [sys.executable, "-m", "dglx_dist.cli", *words[2:], "--epochs", "1", "--out", str(tmp_path / "run")]
    subprocess.run(run, check=True, capture_output=True, timeout=120)
    trained = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (trained["hidden"], trained["fanouts"]) == (8, [3, 2])
    # So deep a model has no mini-batches: whole graphs are compared.
    deep = json.loads(plan(dataset, "--hidden", "8", "--layers", "8", "--json").output)
    assert not deep["chosen"].startswith(("data_parallel", "push_pull"))


@pytest.mark.wide
def test_servers_that_are_not_here_are_described(dataset: str) -> None:
    message = (
        dataset,
        "--hidden",
        "8",
        "--fanout",
        "3,2",
        "--servers",
        "2",
        "--ranks",
        "8",
        "--memory",
        "80GB",
    )
    # What accelerators of a server have between them is more than the lab could emulate.
    value = json.loads(plan(*message, "--bandwidth-internal", "28800gbit", "--json").output)
    assert value["cluster"]["internal_bytes_per_s"] > 3e12
    assert value["cluster"]["memory_bytes"] == 80 * 10**9
    assert value["chosen"] == value["predictions"][value["picked"]]["name"]
    # --ranks counts all of them, as under dglx train.
    assert (value["cluster"]["servers"], value["cluster"]["ranks_per_server"]) == (2, 4)


def test_json_is_alone_on_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    with redirect_libraries_to_stderr():
        ctypes.CDLL(None).puts(b"***Cannot bisect a graph with 0 vertices!")
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "Cannot bisect" in shown.err


def test_mistakes_are_named(dataset: str) -> None:
    assert "the folder DIR of a dataset is missing" in read_refusal("--servers", "2")
    assert f"the dataset is {dataset}, but --data is x. Use one" in read_refusal(dataset, "--data", "x")
    assert "--unit graph must be" in read_refusal("--data", dataset, "--unit", "graph")
    assert "4 part" in read_refusal("--data", dataset, "--servers", "9")
    assert "--ranks 3 cannot be divided among --servers 2" in read_refusal("--data", dataset, "--ranks", "3")
    assert "Use one of the two" in read_refusal("--data", dataset, "--ranks", "4", "--ranks-per-server", "1")
    assert "--structure split must be" in read_refusal("--data", dataset, "--structure", "split")
    message = read_refusal("--data", dataset, "--bandwidth-external", "1 lightyear")
    assert "--bandwidth-external: rate '1 lightyear'" in message
    assert "--memory: 'much' is not a size in bytes" in read_refusal("--data", dataset, "--memory", "much")
    assert "timed on the CPU" in read_refusal(dataset, "--device-memory", "80GB")
    assert "device='cuda:9'" in read_refusal(dataset, "--device", "cuda:9")
    assert "--cores 0.0 must be" in read_refusal("--data", dataset, "--cores", "0")
    message = read_refusal("--data", dataset, "--model", "gat", "--heads", "0")
    assert "--heads 0 must be a divisor of --hidden 64" in message
    assert "--seed -1" in read_refusal("--data", dataset, "--seed", "-1")


def test_options_without_effect_are_refused(dataset: str) -> None:
    assert "Add --unit any" in read_refusal(dataset, "--full-graph-epochs", "2")
    assert "--batch-size is for mini-batches" in read_refusal(
        dataset, "--unit", "full_graph", "--batch-size", "9"
    )
