"""Measures the time from ``dglx train`` to its first step: a table for docs/guides/troubleshooting.md.

    python scripts/startup.py data/demo             the kernels are in Numba's cache
    python scripts/startup.py data/demo --cold      the kernels are compiled

The first rows are processes that only import, each on its own, without garbage collection as the launcher;
the last ones the command itself, with two ranks and one batch, until its first step has ended. Between
imports and "training begins" are the fork of the ranks, their rendezvous, opening the dataset and the
model. Run it on a quiet machine, twice.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time

import psutil

IMPORTS = {
    "import torch": "import torch",
    "import torch._dynamo, which the first step of an optimizer does": "import torch._dynamo",
    "import dgl": "import dglx_dist, dgl",
    "import of the command": "import dglx_dist.cli.app",
    "import of the launcher": "import dglx_dist.cli.torchrun",
    "import of a rank": "import dglx_dist.cli.train_job",
    "import of both, and _dynamo": "import dglx_dist.cli.torchrun, dglx_dist.cli.train_job, torch._dynamo",
}


def show(name: str, wall_s: float, cpu_s: float) -> None:
    print(f"| {name} | {wall_s:.1f} | {cpu_s:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data")
    parser.add_argument("--cold", action="store_true")
    options = parser.parse_args()
    print("| | seconds | processor seconds |\n|---|---|---|")
    for name, code in IMPORTS.items():
        begin, before = time.monotonic(), os.times()
        subprocess.run([sys.executable, "-c", f"import gc; gc.disable(); {code}"], check=True)
        used = os.times()
        cpu_s = used.children_user + used.children_system - before.children_user - before.children_system
        show(name, time.monotonic() - begin, cpu_s)
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | ({"NUMBA_CACHE_DIR": folder} if options.cold else {})
        command = [
            sys.executable,
            "-m",
            "dglx_dist.cli",
            "train",
            options.data,
            "--ranks",
            "2",
            "--epochs",
            "1",
        ]
        command += ["--batch-size", "100000", "--eval-every", "0", "--out", f"{folder}/run"]
        begin = time.monotonic()
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment
        ) as run:
            assert run.stderr is not None
            for line in run.stderr:
                for start, name in (
                    (b"training", "`dglx train`: until training begins"),
                    (b"epoch 0", "until the first step has ended"),
                ):
                    if line.startswith(start):
                        root = psutil.Process(run.pid)
                        times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
                        show(name, time.monotonic() - begin, sum(map(sum, times)))


if __name__ == "__main__":
    main()
