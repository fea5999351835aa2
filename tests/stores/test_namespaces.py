"""Two machines that share nothing but the store: network namespaces, each with a disk of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.records import NODE_TYPE, Assignment
from scripts.netlab.labs import NamespaceLab, what_is_missing
from tests.data.storage.graphs import random_homogeneous
from tests.helpers.commands import dglx
from tests.netlab.helpers import lab_of
from tests.stores.test_training import count_part_bytes

ROOT = Path(__file__).parents[2]
PORT = "9000"
LIMIT_S = 240
# A disk in memory hides the files of the test, so that a process finds nothing but the store.
HIDE = 'mount -t tmpfs none "$1" && shift && exec "$@"'
WORDS = ("--epochs", "2", "--batch-size", "50")


@pytest.fixture
def lab() -> Iterator[NamespaceLab]:
    missing = what_is_missing()
    if missing:
        pytest.skip(f"no servers can be emulated here: {missing}")
    servers = lab_of(3)
    yield servers
    servers.close()


@pytest.mark.wide
def test_machines_share_nothing_but_the_store(lab: NamespaceLab, tmp_path: Path) -> None:
    graph = random_homogeneous(5, num_nodes=400, num_edges=3000, width=512)
    part_of = {NODE_TYPE: np.arange(400, dtype=np.int32) % 4}
    assignment = Assignment(num_parts=4, part_of=part_of, method="by hand", seed=0)
    folder = tmp_path / "data"
    write_dataset(graph, assignment, folder)
    done = dglx(
        "train", str(folder), "--ranks", "2", "--servers", "2", *WORDS, "--out", str(tmp_path / "run")
    )
    assert done.returncode == 0, done.stderr

    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("DGLX_", "AWS_"))
    }
    environment |= {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "key",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    trainers, (store,) = lab.servers[:2], lab.servers[2:]
    with ExitStack() as stack:

        def start(server: Any, *command: str, **variables: str) -> "subprocess.Popen[str]":
            process = subprocess.Popen(
                server.inside(command),
                env={**environment, **variables},
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            stack.callback(process.kill)
            return stack.enter_context(process)

        helper = "tests.helpers.object_store"
        service = start(store, sys.executable, "-m", helper, "0.0.0.0", PORT, "graphs", str(folder))
        assert service.stdout is not None
        assert service.stdout.readline() == "ready\n"

        ranks = []
        for number, server in enumerate(trainers):
            torchrun = f"-m torch.distributed.run --nnodes 2 --node-rank {number} --nproc-per-node 1"
            rendezvous = "--master-addr server-0 --master-port 29511"
            train = "-m dglx_dist.cli train s3://graphs/graph --out s3://graphs/run --checkpoint-every 1"
            hide = ("unshare", "-m", "sh", "-c", HIDE, "hide", str(tmp_path))
            command = (*hide, sys.executable, *f"{torchrun} {rendezvous} {train}".split(), *WORDS)
            variables = {
                "AWS_ENDPOINT_URL": f"http://server-2:{PORT}",
                "AWS_SDK_UA_APP_ID": f"server-{number}",
                "DGLX_DATASET_CACHE": str(tmp_path / "cache"),
                "GLOO_SOCKET_IFNAME": str(server.device),
            }
            ranks.append(start(server, *command, **variables))
        for process in ranks:
            _, errors = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, errors
        output, errors = service.communicate(timeout=60)
    assert service.returncode == 0, errors

    facts = json.loads(output)
    expected = [
        json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [json.loads(line)["loss"] for line in facts["metrics"].splitlines()] == expected
    assert sum(key.endswith("/state.json") for key in facts["keys"]) == 2
    assert "run/final.safetensors" in facts["keys"]
    for number in range(2):
        own = count_part_bytes(folder, range(2 * number, 2 * number + 2))
        assert own <= facts["sent"][f"server-{number}"] <= 1.05 * own
