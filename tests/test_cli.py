"""`dglx` as a user starts it: real processes on a tiny graph, and the likeliest mistakes."""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import pytest

from dglx_dist.cli import main
from dglx_dist.cli.partition import draw_splits
from dglx_dist.data.storage.reader import open_dataset
from dglx_dist.errors import ConfigError
from dglx_dist.records import RawGraph
from tests.data.raw_graphs import write
from tests.data.storage.graphs import put_value
from tests.helpers.commands import dglx

DGLX = (sys.executable, "-m", "dglx_dist.cli")
GRAPH = "synthetic:nodes=1000,degree=10,classes=4,features=16,signal=0.5,seed=1"
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("DGLX_")}


def run_dglx(*arguments: str) -> str:
    done = dglx(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def read_refusal(*arguments: str) -> str:
    done = dglx(*arguments)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done.stderr


def refused_here(*arguments: str, folder: Path) -> str:
    """The same of what no process is started for: in this one, which has imported everything."""
    message = io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["dglx", *arguments]),
        mock.patch.object(subprocess, "Popen", side_effect=AssertionError("a process was started")),
        contextlib.chdir(folder),
        contextlib.redirect_stderr(message),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    assert ended.value.code == 2, message.getvalue()
    assert "Traceback" not in message.getvalue()
    return message.getvalue()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "tiny"
    how = ("--parts", "2", "--method", "metis", "--balance", "train,degree")
    run_dglx("partition", GRAPH, *how, "--out", str(folder))
    return folder


@pytest.fixture(scope="module")
def run(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    shown = run_dglx(
        "train", str(dataset), "--strategy", "data_parallel", "--ranks", "2", "--servers", "2",
        "--epochs", "5", "--model", "sage", "--layers", "2", "--hidden", "16", "--fanout", "5,5",
        "--batch-size", "32", "--lr", "0.01", "--dropout", "0.5", "--seed", "0", "--out", str(folder),
    )  # fmt: skip
    assert "samples/s" in shown
    assert "test_accuracy" in shown
    return folder


def test_a_run_folder_holds_what_was_promised(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert {
        "strategy", "ranks", "servers", "test_accuracy", "val_accuracy", "epoch_seconds",
        "samples_per_second", "bytes_inside", "bytes_outside", "peak_memory_bytes", "phase_seconds",
    } <= summary.keys()  # fmt: skip
    assert (summary["strategy"], summary["ranks"], summary["servers"]) == ("data_parallel", 2, 2)
    # Four classes: better than guessing. Two servers of one rank each: all traffic is between them.
    assert summary["test_accuracy"] > 0.3
    assert summary["bytes_inside"] == 0
    assert summary["bytes_outside"] > 0
    assert summary["peak_memory_bytes"] == max(summary["rank_memory_bytes"]) > 50e6
    assert len(summary["rank_memory_bytes"]) == 2
    assert (summary["device"], summary["peak_device_memory_bytes"]) == ("cpu", None)
    epochs = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [epoch["epoch"] for epoch in epochs] == [0, 1, 2, 3, 4]
    assert all(epoch["num_samples"] == 100 for epoch in epochs)
    moved = sum(row[2] for rows in summary["traffic"].values() for row in rows)
    assert moved == sum(epoch["bytes_inside"] + epoch["bytes_outside"] for epoch in epochs)
    config = json.loads((run / "config.json").read_text())
    assert set(config["environment"]) == {"python", "system", "hosts", "cores", "memory_bytes"}
    assert (config["model"], config["fanouts"], config["ranks"]) == ("sage", [5, 5], 2)
    assert (run / "picture.png").stat().st_size > 10_000


def test_report_prints_again_and_redraws_or_shows_what_there_is(run: Path, tmp_path: Path) -> None:
    before = (run / "summary.json").read_bytes()
    (run / "picture.png").unlink()
    assert "samples/s" in run_dglx("report", str(run))
    assert (run / "picture.png").is_file()
    assert (run / "summary.json").read_bytes() == before
    for name in ("config.json", "metrics.jsonl"):
        shutil.copy(run / name, tmp_path)
    done = dglx("report", str(tmp_path))
    assert (done.returncode, "samples/s" in done.stdout) == (0, True), done.stderr
    data = json.loads((run / "config.json").read_text())["data"]
    assert "did not finish" in done.stderr
    assert f"`dglx train {data} --out {tmp_path}`" in done.stderr


def test_inspect_shows_cut_balance_and_draws(dataset: Path, tmp_path: Path) -> None:
    shown = run_dglx("inspect", str(dataset), "--picture", str(tmp_path / "parts.png"))
    words = ("edge cut", "replication factor", "balance train", "balance degree", "halo factor", "on disk")
    assert [word for word in words if word not in shown] == []
    assert (tmp_path / "parts.png").is_file()
    # A picture of its own is not asked for: the tables are shown where it cannot be drawn.
    folder = tmp_path / "data"
    shutil.copytree(dataset, folder, ignore=shutil.ignore_patterns("cache"))
    # Root may write into any folder, but nobody below a file.
    (folder / "cache").write_text("")
    done = dglx("inspect", str(folder))
    assert (done.returncode, "edge cut" in done.stdout) == (0, True), done.stderr
    assert "warning: the picture could not be written" in done.stderr
    assert "--picture FILE" in done.stderr
    assert "--picture" in read_refusal("inspect", str(folder), "--picture", str(folder / "cache" / "x.png"))


@pytest.mark.wide
def test_ids_out_of_range_are_one_error(dataset: Path, tmp_path: Path) -> None:
    """Compiled kernels index with them; the process would be killed by a signal."""
    wrong, path = tmp_path / "wrong", "part1/edges/_N._E._N/indptr.arrow"
    shutil.copytree(dataset, wrong)
    put_value(wrong, path, 3, 2**50)
    message = f"part 1 is wrong: in {path}, indptr[3] is {2**50}, expected numbers that never fall"
    assert message in read_refusal("inspect", str(wrong), "--verify", "full")
    few = ("--ranks", "2", "--epochs", "1", "--fanout", "5,5")
    done = dglx("train", str(wrong), *few, "--out", str(tmp_path / "out"))
    assert done.returncode > 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_one_process_needs_no_launcher_and_resumes(dataset: Path, tmp_path: Path) -> None:
    common = ("train", str(dataset), "--hidden", "8", "--fanout", "3,3", "--out", str(tmp_path))
    started = dglx(*common, "--epochs", "1", "--checkpoint-every", "1")
    assert "training epoch 0 ..." in started.stderr
    assert re.search(r"^learning classification, \d+ classes$", started.stderr, re.MULTILINE)
    resumed = dglx(*common, "--epochs", "3")
    assert "training epochs 1 to 2 ..." in resumed.stderr
    # One line as each ends, though nobody looks at a terminal.
    lines = [line[:14] for line in resumed.stderr.splitlines() if line.startswith("epoch")]
    assert lines == ["epoch 1: loss ", "epoch 2: loss "]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [0, 1, 2]


def test_help_reads_like_documentation() -> None:
    assert "dglx train data/demo" in run_dglx("--help")
    for command in ("partition", "inspect", "train", "report"):
        assert "Example" in run_dglx(command, "--help") or "dglx train" in run_dglx(command, "--help")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("partition nowhere.npz --out x", "nowhere.npz"),
        (f"partition {GRAPH} --method metiss --out x", "'metis'"),
        (f"partition {GRAPH} --tolerance much --out x", "--tolerance 'much'"),
        (f"partition {GRAPH} --parts 0 --out x", "at least 1"),
        ("inspect nowhere", "nowhere"),
        ("train nowhere --fanout 5 --layers 2", "one fan-out per layer"),
        ("train nowhere --servers 2", "--ranks"),
        ("train nowhere --epochs 0", "--epochs 0"),
        ("train nowhere --model sag", "error: there is no model 'sag'; did you mean 'sage'"),
        ("train nowhere --precision half", "--precision half must be float32 or bf16"),
        ("report nowhere", "nowhere"),
    ],
)
def test_a_mistake_gets_one_message_and_starts_no_process(tmp_path: Path, arguments: str, said: str) -> None:
    assert said in refused_here(*arguments.split(), folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_that_the_launcher_finds_gets_one_message_too(tmp_path: Path) -> None:
    (line,) = read_refusal("train", "nowhere", "--ranks", "2", "--out", str(tmp_path / "run")).splitlines()
    assert line.startswith("error: nowhere")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_something_is_not_replaced(dataset: Path, tmp_path: Path) -> None:
    before = (dataset / "manifest.json").read_bytes()
    assert "--overwrite" in refused_here("partition", GRAPH, "--out", str(dataset), folder=tmp_path)
    assert (dataset / "manifest.json").read_bytes() == before


def test_partition_names_what_tables_lack(tmp_path: Path) -> None:
    write(tmp_path, {"nodes.csv": "id,label,age\n0,0,30\n1,1,40\n", "edges.csv": "src,dst\n0,1\n"})
    arguments = [str(tmp_path), "--parts", "1", "--add-reverse-edges", "--out", str(tmp_path / "out")]
    text = " ".join(run_dglx("partition", *arguments).split())
    assert "no features (feat_0, feat_1 ... or 'feat'; other columns: age)" in text
    assert "labels, but not the 'split' that `dglx train` needs" in text
    assert "0.0% of the edges (2 stored)" in text
    assert text.endswith(f"next: dglx inspect {tmp_path / 'out'}")


@pytest.mark.parametrize(
    ("tables", "said", "options"),
    [
        ({"nodes.csv": "id,label,split\n0,0,train\n1,1,val\n"}, "no features", "--embeddings 64"),
        ({"nodes.csv": "id,feat_0,label,split\n0,0,0,train\n1,1,1,val\n"}, "", ""),
        (
            {"nodes.csv": "id,feat_0,visits\n0,0,0\n1,1,1\n"},
            "no labels (column 'label'); to learn one of visits, rename it to 'label'",
            "--task link",
        ),
        ({"edges.csv": "src,dst\n0,1\n"}, "no labels", "--task link --model none --embeddings 64"),
        (
            {"edges/u__a__v.csv": "src,dst\n0,1\n", "edges/u__b__v.csv": "src,dst\n0,1\n"},
            "no labels",
            "--task link --model none --embeddings 64 --target u:a:v",
        ),
    ],
)
def test_partition_names_the_command(tables: dict[str, str], said: str, options: str, tmp_path: Path) -> None:
    (tmp_path / "edges").mkdir()
    write(tmp_path, tables if "nodes.csv" not in tables else tables | {"edges.csv": "src,dst\n0,1\n"})
    printed = " ".join(
        run_dglx("partition", str(tmp_path), "--parts", "1", "--out", str(tmp_path / "o")).split()
    )
    assert said in printed
    assert "; 1 part by " in printed
    assert printed.endswith(
        f"next: dglx inspect {tmp_path / 'o'}, dglx train {tmp_path / 'o'} {options}".strip()
    )


def test_partition_takes_the_column_of_ids(tmp_path: Path) -> None:
    write(tmp_path, {"nodes.csv": "uid,feat_0\n2,1\n0,2\n1,3\n", "edges.csv": "src,dst\n0,1\n1,2\n"})
    arguments = ["partition", str(tmp_path), "--parts", "1", "--out", str(tmp_path / "o")]
    assert "looks like the ids that edges use; add --id uid" in read_refusal(*arguments)
    assert "3 nodes, 2 edges" in run_dglx(*arguments, "--id", "uid")
    assert "other columns: uid" in run_dglx(
        *arguments, "--id", "", "--overwrite", "--option", "ignore=feat_0"
    )


def test_partition_draws_the_split_of_labelled_nodes(tmp_path: Path) -> None:
    rows = [f"{number},{number},{'' if number % 5 == 4 else number % 2}" for number in range(100)]
    edges = [f"{number},{(number + 1) % 100}" for number in range(100)]
    write(
        tmp_path,
        {"nodes.csv": "\n".join(["id,feat_0,label", *rows]), "edges.csv": "\n".join(["src,dst", *edges])},
    )
    arguments = ["partition", str(tmp_path), "--parts", "2", "--out", str(tmp_path / "o")]
    assert "Add --split 0.8,0.1,0.1 to draw one" in run_dglx(*arguments)
    message = "must be shares of train, validation and test nodes, together at most 1"
    for shares in ("0.5,0.5", "0.8,0.2,0.2", "1.2,-0.1,-0.1"):
        assert message in read_refusal(*arguments, "--split", shares)
    assert "--split draws in memory" in read_refusal(*arguments, "--split", "0.8,0.1,0.1", "--memory", "1GB")
    masks = []
    for _ in range(2):
        assert "; next: " in run_dglx(*arguments, "--overwrite", "--split", "0.5,0.25,0.25")
        dataset = open_dataset(tmp_path / "o")
        columns = [dataset.part(part) for part in range(2)]
        names = ("train_mask", "val_mask", "test_mask")
        masks.append(
            np.concatenate([np.stack([part.node_data("_N", n) for n in names]) for part in columns], 1)
        )
    assert masks[0].sum(1).tolist() == [40, 20, 20]
    assert masks[0].sum(0).max() == 1
    assert (masks[0] == masks[1]).all()
    assert "but the data has test_mask, train_mask, val_mask. Leave --split out" in read_refusal(
        "partition", "synthetic:nodes=200,degree=3", *arguments[2:], "--split", "0.8,0.1,0.1", "--overwrite"
    )


@pytest.mark.parametrize(
    ("column", "shares", "message"),
    [
        ("label", "0.001,0,0", "--split 0.001,0.0,0.0 selects no training node of 3 labelled nodes"),
        ("label", "0,0.5,0.5", "selects no training node of 3 labelled nodes of type '_N'"),
        ("label,unlabelled", "0.8,0.1,0.1", "selects no training node of 0 labelled nodes"),
        ("label,train_mask", "0.8,0.1,0.1", "but the data has train_mask. Leave --split out"),
        ("year", "0.8,0.1,0.1", "but the data has no labels (column 'label')"),
    ],
)
def test_refuses_to_draw_a_split_without_training_nodes(column: str, shares: str, message: str) -> None:
    name, _, state = column.partition(",")
    labels = np.full(3, -1) if state == "unlabelled" else np.arange(3)
    columns = {name: labels} | ({state: np.ones(3, bool)} if state == "train_mask" else {})
    graph = RawGraph(
        name="g", num_nodes={"_N": 3}, edges={}, node_data={"_N": columns}, edge_data={}, num_classes={}
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        draw_splits(graph, [float(share) for share in shares.split(",")], seed=0)


def test_partition_takes_how_lines_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("0 1 2\n1 1 0\n")
    arguments = ["partition", str(tmp_path / "a.txt"), "--parts", "1", "--out", str(tmp_path / "o")]
    assert "give --format edges, triples or interactions" in read_refusal(*arguments)
    assert "a: 3 nodes, 2 edges" in run_dglx(*arguments, "--format", "triples")
    message = "format is 'nothing', but must be 'dglx' or 'dgl', or for a text file of edges one of triples"
    assert message in read_refusal(*arguments, "--format", "nothing")


@pytest.mark.wide
def test_a_regression_of_classes_is_warned_of(tmp_path: Path) -> None:
    nodes = "id,feat_0,label,split\n0,0,0,train\n1,1,1,val\n2,1,1,test\n"
    write(tmp_path, {"nodes.csv": nodes, "edges.csv": "src,dst\n0,1\n1,0\n"})
    run_dglx("partition", str(tmp_path), "--parts", "1", "--out", str(tmp_path / "o"))
    run = ("--task", "regression", "--hidden", "4", "--epochs", "1", "--out", str(tmp_path / "run"))
    done = dglx("train", str(tmp_path / "o"), *run)
    assert done.stderr.count("warning: all labels are 0 or 1. Leave --task out to classify") == 1


def test_ingest_names_the_command_for_several_types(tmp_path: Path) -> None:
    ends = {"source_id_col": "src", "dest_id_col": "dst", "files": "edges.csv", "relation": ["n", "e", "n"]}
    nodes = {"node_type": "n", "node_id_col": "id", "files": "nodes.csv"}
    description = {"version": "gconstruct-v0.1", "nodes": [nodes], "edges": [ends]}
    write(tmp_path, {"nodes.csv": "id\n0\n1\n", "edges.csv": "src,dst\n0,1\n"})
    (tmp_path / "g.json").write_text(json.dumps(description))
    line = run_dglx("ingest", f"{tmp_path}/g.json", "--add-reverse-edges", "--out", str(tmp_path / "out"))
    command = (
        f"next: dglx train {tmp_path / 'out'} --task link --model none --embeddings 64 or dglx partition"
    )
    assert command in " ".join(line.split())


def test_the_traceback_is_there_for_who_asks() -> None:
    assert "Traceback" in dglx("inspect", "nowhere", "--debug").stderr


def rank_processes(launcher: int) -> dict[int, int]:
    results = {}
    for process in (child for agent in psutil.Process(launcher).children() for child in agent.children()):
        # Or it has just ended.
        with contextlib.suppress(psutil.Error, ValueError):
            results[int(process.name().removeprefix("dglx-rank-"))] = process.pid
    return results


@contextlib.contextmanager
def training(dataset: Path, out: Path, *more: str, **how: Any) -> Iterator["subprocess.Popen[str]"]:
    """Two ranks that train for long, from their first epoch on; killed at the end."""
    command = ("train", str(dataset), "--ranks", "2", "--epochs", "100000", "--fanout", "3,3", *more)
    process = subprocess.Popen(
        [*DGLX, *command, "--out", str(out)],
        stderr=subprocess.PIPE,
        text=True,
        **({"env": ENVIRONMENT} | how),
    )
    try:
        assert process.stderr.readline().startswith("learning ")
        # The line comes when both ranks have met and training starts.
        assert "training" in process.stderr.readline()
        yield process
    finally:
        process.kill()
        # All that could write to it have ended when it ends.
        process.communicate(timeout=60)


def test_a_killed_rank_ends_the_other_and_is_named(dataset: Path, tmp_path: Path) -> None:
    with training(dataset, tmp_path) as process:
        ranks = rank_processes(process.pid)
        assert set(ranks) == {0, 1}
        os.kill(ranks[1], signal.SIGKILL)
        _, message = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGKILL
    assert "rank 1" in message
    assert "SIGKILL" in message
    assert not psutil.pid_exists(ranks[0])


def test_a_job_of_one_machine_listens_on_loopback_only(dataset: Path, tmp_path: Path) -> None:
    # A rank left to itself takes the interface of the machine's name.
    environment = {name: value for name, value in ENVIRONMENT.items() if "SOCKET_IFNAME" not in name}
    with training(dataset, tmp_path, "--servers", "2", env=environment) as process:
        job = {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
        assert set(rank_processes(process.pid).values()) < job
        listening = [
            (net_connection.pid, net_connection.laddr.ip)
            for net_connection in psutil.net_connections("tcp")
            if net_connection.status == psutil.CONN_LISTEN and net_connection.pid in job
        ]
    # The launcher's store, and of each rank what serves its rows and gloo.
    assert {pid for pid, _ in listening} == job
    assert {address for _, address in listening} == {"127.0.0.1"}


@pytest.mark.wide
def test_a_killed_command_takes_its_ranks_along(dataset: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tmp"
    folder.mkdir()
    with training(dataset, tmp_path / "run", env={**ENVIRONMENT, "TMPDIR": str(folder)}) as process:
        ranks = rank_processes(process.pid)
        assert set(ranks) == {0, 1}
    assert [psutil.pid_exists(rank) for rank in ranks.values()] == [False, False]
    assert [path.name for path in folder.iterdir() if path.name.startswith(("torchelastic", "dglx"))] == []


def killed_within(pids: Iterable[int], seconds: float) -> bool:
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], seconds)
    return not alive


@pytest.mark.wide
def test_a_command_that_is_told_to_end_saves_what_it_has(dataset: Path, tmp_path: Path) -> None:
    """With the code and the line that users look for."""
    with training(dataset, tmp_path) as process:
        process.send_signal(signal.SIGUSR1)
        _, message = process.communicate(timeout=60)
    (line,) = [line for line in message.splitlines() if not line.startswith(("epoch ", "training "))]
    assert (process.returncode, line[:14]) == (75, "stopped after ")
    assert line.endswith(f" is saved in {tmp_path}/checkpoints. Run the same command again to resume.")


@pytest.mark.wide
def test_a_killed_torchrun_takes_its_ranks_along(dataset: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "dglx_dist.cli", "train", str(dataset), "--epochs", "100000", "--fanout", "3,3"]
    with subprocess.Popen(
        [*command, "--out", str(tmp_path)], stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as torchrun:
        while not (message := torchrun.stderr.readline()).startswith("epoch "):
            assert message, "it ended"
        ranks = {child.pid for child in psutil.Process(torchrun.pid).children()}
        assert len(ranks) == 2
        torchrun.kill()
        assert killed_within(ranks, 15)
        message = torchrun.stderr.read()
    # Whichever notices first: the signal, a collective at the step where they stop, the lost store.
    ended = ("the process that started it has ended", "stopped after", "The launcher or rank 0 has ended")
    assert any(words in message for words in ended), message
    assert "Traceback" not in message


@pytest.mark.wide
@pytest.mark.parametrize("ignored", [False, True], ids=["in-a-terminal", "in-the-background"])
def test_an_interrupt_is_told_once(dataset: Path, tmp_path: Path, ignored: bool) -> None:
    # Shells have what they start in the background ignore the interrupt, and so may who runs the tests.
    handler = signal.SIG_IGN if ignored else signal.SIG_DFL
    group = {"start_new_session": True, "preexec_fn": lambda: signal.signal(signal.SIGINT, handler)}
    with training(dataset, tmp_path, **group) as process:
        # As a terminal does: to the command, its launcher and all ranks.
        os.killpg(process.pid, signal.SIGINT)
        _, message = process.communicate(timeout=60)
    assert process.returncode == 75
    (line,) = [line for line in message.splitlines() if not line.startswith("epoch ")]
    assert line.startswith("stopped after ")
