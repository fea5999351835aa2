"""One of two machines is killed with all that runs on it, and comes back under torchrun's rendezvous."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from scripts.netlab.labs import NamespaceLab
from scripts.netlab.launch import server_environment
from tests.helpers import wait_for_checkpoints

EPOCHS, LIMIT_S = 40, 240


def start_server(lab: NamespaceLab, number: int, data: Path, out: Path) -> subprocess.Popen[bytes]:
    server = lab.servers[number]
    changes = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "HOME": os.environ["HOME"]}
    command = [sys.executable, "-m", "dglx_dist.cli.torchrun", "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "10.77.0.1:29411", "--rdzv-id", out.name]
    command += ["--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=3", "--max-restarts", "3"]
    command += [
        "--local-addr",
        f"10.77.0.{number + 1}",
        "-m",
        "dglx_dist.cli",
        "train",
        str(data),
        "--resume",
    ]
    command += ["--epochs", str(EPOCHS), "--checkpoint-every", "2", "--out", str(out)]
    with (out.parent / f"{out.name}-{number}.log").open("ab") as log:
        return subprocess.Popen(
            server.inside(command),
            env=server_environment(server, 1) | changes,
            stdout=log,
            stderr=log,
            cwd=Path(__file__).parents[2],
            start_new_session=True,
        )


def kill(process: subprocess.Popen[bytes]) -> None:
    for item in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
        item.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.wide
def test_a_machine_that_comes_back_costs_no_bit(pair: NamespaceLab, tmp_path: Path) -> None:
    data, weights = tmp_path / "data", {}
    source = "synthetic:nodes=3000,degree=5"
    command = [sys.executable, "-m", "dglx_dist.cli", "partition", source, "--parts", "2", "--out", str(data)]
    subprocess.run(command, check=True, capture_output=True, timeout=LIMIT_S)
    for name in ("disturbed", "undisturbed"):
        out = tmp_path / name
        ranks = [start_server(pair, number, data, out) for number in range(2)]
        if name == "disturbed":
            wait_for_checkpoints(out / "checkpoints", 2)
            kill(ranks[1])
            time.sleep(5)
            ranks[1] = start_server(pair, 1, data, out)
        message = [(tmp_path / f"{name}-{number}.log").read_text for number in range(2)]
        assert [rank.wait(LIMIT_S) for rank in ranks] == [0, 0], [read() for read in message]
        last = out / "checkpoints" / f"epoch-{EPOCHS:06d}-step-000000000"
        weights[name] = {
            tensor: (last / saved["file"]).read_bytes()[saved["first_byte"] :][: saved["num_bytes"]]
            for tensor, saved in json.loads((last / "state.json").read_text())["tensors"].items()
        }
    assert weights["disturbed"] == weights["undisturbed"]
