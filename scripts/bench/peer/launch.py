"""One launch of one system on emulated machines: start it, wait, read what its ranks reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dglx_dist.cluster.launch_env import rank_environment
from peer.cases import Case, Written
from peer.machines import DEVICE, Machine, Machines, wait_for

FOLDER = Path(__file__).resolve().parents[1]
_PORT, _SERVER_PORT = 29500, 30050
_PEER_VARIABLES = ("MALLOC_", "GLIBC_", "DGL", "OMP_", "GLOO_", "LD_PRELOAD")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How every launch runs."""

    case: Case
    written: Written
    epochs: int
    rate: str | None
    allocator: str
    """A key of ``allocators()``."""
    timeout_s: float
    options: Mapping[str, Any]
    """For our ranks alone."""
    scratch: Path


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What one launch gave."""

    system: str
    ranks: list[dict[str, Any]]
    """Report of each rank; see ``training.Report``."""
    machine_bytes: list[int]
    """Peak of each machine, shared pages counted once."""
    process_bytes: list[dict[str, int]]
    """Peak resident size of each process by its module, per machine."""


def launch(system: str, plan: Plan, number: int) -> Launch:
    """Run ``system`` once on fresh machines.

    Raises:
        SystemExit: it failed; the message has the end of its output.
    """
    folder = plan.scratch / f"{number}-{system}"
    folder.mkdir(parents=True)
    outs = [folder / f"rank{rank}.json" for rank in range(2)]
    logs = [folder / f"machine{rank}.log" for rank in range(2)]
    with Machines(plan.rate) as machines:
        processes = _START[system](plan, machines, folder, logs)
        problem = wait_for(processes, machines, plan.timeout_s)
    if problem or not all(out.exists() for out in outs):
        ends = "\n".join(f"--- machine {n}\n{log.read_text()[-3000:]}" for n, log in enumerate(logs))
        raise SystemExit(f"{system}: {problem or 'a rank wrote no report'}\n{ends}")
    return Launch(
        system=system,
        ranks=[json.loads(out.read_text()) for out in outs],
        machine_bytes=[machine.memory.machine for machine in machines],
        process_bytes=[machine.memory.of_process for machine in machines],
    )


def allocators() -> dict[str, Mapping[str, str]]:
    """Return the environment of each choice of allocator, the same for all systems."""
    return {
        # Nothing set: our ranks then tell glibc to keep memory, as for every user of torchrun.
        "unset": {},
        # glibc's own defaults, said so that our ranks leave them alone.
        "glibc": {"MALLOC_PERTURB_": "0"},
        "tuned": rank_environment(1, environment={}),
    }


def _start_stock(
    plan: Plan, machines: Sequence[Machine], folder: Path, logs: Sequence[Path]
) -> list[subprocess.Popen[bytes]]:
    ip_config = folder / "ip_config.txt"
    ip_config.write_text("".join(f"{machine.address} {_SERVER_PORT}\n" for machine in machines))
    shared = {
        **_environment(plan),
        "DGL_DIST_MODE": "distributed",
        "DGL_IP_CONFIG": str(ip_config),
        "DGL_CONF_PATH": plan.written.dgl,
        "DGL_NUM_SERVER": "1",
        "DGL_NUM_CLIENT": str(len(machines)),
        "DGL_NUM_SAMPLER": "0",
        "DGL_GRAPH_FORMAT": "csc",
        "DGL_KEEP_ALIVE": "0",
    }
    processes = [
        machine.start(
            [sys.executable, "-m", "peer.stock_server"],
            {**shared, "DGL_ROLE": "server", "DGL_SERVER_ID": str(number)},
            FOLDER,
            logs[number],
        )
        for number, machine in enumerate(machines)
    ]
    command = _arguments("peer.stock_rank", plan, plan.written.dgl)
    return processes + _torchrun(command, {**shared, "DGL_ROLE": "client"}, machines, folder, logs)


def _start_ours(
    plan: Plan, machines: Sequence[Machine], folder: Path, logs: Sequence[Path]
) -> list[subprocess.Popen[bytes]]:
    command = _arguments("peer.our_rank", plan, plan.written.ours)
    return _torchrun(command, _environment(plan), machines, folder, logs)


def _start_dense(
    plan: Plan, machines: Sequence[Machine], folder: Path, logs: Sequence[Path]
) -> list[subprocess.Popen[bytes]]:
    command = _arguments("peer.dense_rank", plan, plan.written.ours)
    return _torchrun(command, _environment(plan), machines, folder, logs)


_START: dict[
    str, Callable[[Plan, Sequence[Machine], Path, Sequence[Path]], list[subprocess.Popen[bytes]]]
] = {"stock": _start_stock, "ours": _start_ours, "ddp": _start_dense}


def _arguments(module: str, plan: Plan, data: str) -> list[str]:
    told = ["--case", json.dumps(asdict(plan.case)), "--data", data, "--epochs", str(plan.epochs)]
    return ["-m", module, *told, "--options", json.dumps(dict(plan.options))]


def _torchrun(
    command: Sequence[str],
    environment: Mapping[str, str],
    machines: Sequence[Machine],
    folder: Path,
    logs: Sequence[Path],
) -> list[subprocess.Popen[bytes]]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(machines))]
    meeting = ["--master-addr", machines[0].address, "--master-port", str(_PORT)]
    return [
        machine.start(
            [
                *(*launcher, "--node-rank", str(number), "--nproc-per-node", "1", *meeting, *command),
                *("--out", str(folder / f"rank{number}.json")),
            ],
            environment,
            FOLDER,
            logs[number],
        )
        for number, machine in enumerate(machines)
    ]


def _environment(plan: Plan) -> dict[str, str]:
    """Return what both systems run under; this process's own settings of the same things are left out."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_PEER_VARIABLES)}
    return {
        **inherited,
        **allocators()[plan.allocator],
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": DEVICE,
        "PYTHONPATH": os.pathsep.join([str(FOLDER), str(FOLDER.parents[1])]),
        "PYTHONWARNINGS": "ignore",
    }
