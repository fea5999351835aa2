"""Launches of one system on the servers of a lab, and what its ranks reported as records of an epoch."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

import psutil

from dglx_dist.comm.topology import build_rank_environment, copy_environment
from dglx_dist.errors import ConfigError
from dglx_dist.records import EpochRecord
from scripts.bench.peers.workload import TOLD, TRAINERS, Launch
from scripts.bench.records import JobError
from scripts.bench.suites import find_versions
from scripts.netlab.base import Lab
from scripts.netlab.launch import Launcher, Started, server_environment, start, with_changes
from scripts.out_files import last_lines


def versions() -> dict[str, str]:
    """Return name to version of what the peers are made of, as far as it is installed."""
    return find_versions(("torch", "dgl", "torch_geometric", "pyg_lib", "torch_sparse"))


PARTS: Mapping[str, tuple[str, ...]] = {
    # Nothing of a stock loop runs ahead of training, so it waits for all of its sampling and reading. PyG's
    # sampler slices features in the same call, in worker processes when there are some.
    **dict.fromkeys(("sample", "sample and slice"), ("sample_s", "wait_s")),
    "pull": ("fetch_s", "wait_s"),  # of ours rows of an embedding: features are read by the loader's thread
    "wait": ("wait_s",),
    # Backward with DDP's exchange, which runs during it and cannot be told apart; ours is.
    **dict.fromkeys(("forward", "backward", "update"), ("compute_s",)),
    **dict.fromkeys(("sparse update", "exchange"), ("exchange_s",)),
    "loader sample": ("sample_s",),
    "loader fetch": ("fetch_s",),
}
"""Name of a part of a loop -> fields that its seconds are added to."""

_TIMES = ("sample_s", "fetch_s", "wait_s", "compute_s", "exchange_s")


def as_record(rows: Sequence[Mapping[str, Any]], wire: int | None) -> EpochRecord:
    """Put the (W,) rows that the ranks reported of one epoch together.

    ``seconds`` are the slowest rank's. Phases are means over ranks, so that those of the loop come to no more
    than it. Counts and bytes are sums; ``bytes_outside`` is what our ledger counted, or, of a system that
    counts nothing itself, ``wire``: what all cards sent, headers included (0 if unknown).
    """
    counts: Counter[str] = Counter()
    times = dict.fromkeys(_TIMES, 0.0)
    for row in rows:
        counts.update(row["counts"])
        totals = dict.fromkeys(_TIMES, 0.0)
        for part, seconds in row["parts"].items():
            for name in PARTS[part]:
                totals[name] += seconds
        # A model's exchange is within its backward: what is told apart is not counted twice.
        totals["compute_s"] = max(totals["compute_s"] - row["parts"].get("exchange", 0.0), 0.0)
        times = {name: times[name] + totals[name] for name in _TIMES}
    targets = max(counts["targets"], 1)
    means: Any = {name: total / len(rows) for name, total in times.items()}
    return EpochRecord(
        epoch=int(rows[0]["epoch"]),
        loss=counts["loss_sum"] / targets,
        train_accuracy=counts["correct"] / targets,
        val_accuracy=None,
        seconds=max(row["seconds"] for row in rows),
        num_samples=int(counts["targets"]),
        **means,
        bytes_inside=int(counts["ledger inside"]),
        bytes_outside=int(counts["ledger outside"]) if "ledger outside" in counts else wire or 0,
    )


_EVERY_S = 1.0


@final
class MemoryWatch:
    """Largest memory of each server so far: all its processes together, shared pages counted once.

    Servers are told apart by their process namespaces, so that plain loopback has none of its own.
    """

    def __init__(self) -> None:
        self._peaks: dict[str, int] = {}
        self._mine = os.readlink("/proc/self/ns/pid")
        self._looked = 0.0

    def look(self) -> None:
        """Note what is used now; does nothing within a second of the last look."""
        if time.monotonic() - self._looked < _EVERY_S:
            return
        self._looked = time.monotonic()
        now: dict[str, int] = {}
        for process in psutil.Process().children(recursive=True):
            try:
                namespace = os.readlink(f"/proc/{process.pid}/ns/pid")
                if namespace != self._mine:
                    now[namespace] = now.get(namespace, 0) + process.memory_full_info().pss
            except (OSError, psutil.Error):
                continue  # just ended, or nobody may look at it
        for namespace, size in now.items():
            self._peaks[namespace] = max(self._peaks.get(namespace, 0), size)

    @property
    def peak_bytes(self) -> int | None:
        """Peak memory in bytes of the server that used most, or None if no server was seen."""
        return max(self._peaks.values(), default=None)


KIND = "program"
"""Kind of the jobs that are done by :func:`run_once` in place of a worker pool."""

PROGRAMS = Path(__file__).parent / "programs"
_SERVER_PORT = 30050
_POLL_S, _LOG_LINES = 0.1, 15
# Settings of the person who runs the bench that would change one of the systems.
_PEER_VARIABLES = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD", "DGL", "OMP_", "MKL_")


def run_once(
    lab: Lab, launch: Launch, folder: Path, *, ranks_per_server: int = 1, timeout_s: float = 900.0
) -> list[dict[str, Any]]:
    """Run the system once, with processes of its own, and return its measured epochs.

    The (W,) reports by rank are as the job "train" makes them. "peak_bytes" is a rank's share of the memory
    of its whole server, graph servers and launchers included, and on plain loopback its own. "extra", per
    epoch: seconds of the parts of the loop (the slowest rank's), counts over all ranks; and the versions, the
    sum of each rank's seeds in the first measured epoch. ConfigError: the lab cannot host the system, or its
    data is not there. JobError: it failed or took too long.
    """
    if launch.system == "stock" and lab.kind != "namespaces":
        raise ConfigError(
            "stock DistDGL needs servers with a network and a /dev/shm of their own, and this lab is plain "
            f"loopback: {lab.missing or 'asked for'}"
        )
    if not Path(launch.data).exists():
        raise ConfigError(f"{launch.data} does not exist; make it with bench.peers.data.copy_of")
    folder.mkdir(parents=True)
    config = {"launch": asdict(launch), "device": lab.servers[0].device, "ip_config": str(_ip_config(folder))}
    (folder / TOLD).write_text(json.dumps(config))
    world_size = len(lab.servers) * ranks_per_server
    watch = MemoryWatch()
    with ExitStack() as stack:
        graph_servers = _start_graph_servers(lab, launch, folder, world_size, stack)
        shared = _environment(launch)
        if launch.system == "stock":
            shared |= {**_dgl_environment(launch, folder, world_size), "DGL_ROLE": "client"}
        started = stack.enter_context(
            start(
                lab,
                [str(PROGRAMS / TRAINERS[launch.system]), str(folder)],
                ranks_per_server=ranks_per_server,
                environment=shared,
                log_folder=folder,
                show=False,
            )
        )
        deadline = time.monotonic() + timeout_s
        while (code := started.poll()) is None:
            if graph_servers and graph_servers.poll():
                raise JobError(
                    f"{launch.system}: a graph server ended: {graph_servers.failure}{_logs(folder)}"
                )
            if time.monotonic() > deadline:
                raise JobError(
                    f"{launch.system} had not ended after {timeout_s:g} s, all of it was ended; "
                    f"allow it more time where the machine is slow{_logs(folder)}"
                )
            watch.look()
            time.sleep(_POLL_S)
        if code:
            raise JobError(f"{launch.system}: {started.failure or f'exit code {code}'}{_logs(folder)}")
    return _reports(launch, folder, world_size, ranks_per_server, watch.peak_bytes)


def _environment(launch: Launch) -> dict[str, str | None]:
    inherited = {name: None for name in copy_environment() if name.startswith(_PEER_VARIABLES)}
    kept = build_rank_environment(1, environment={})
    tuned = launch.allocator == "tuned"
    allocator = {name: value if tuned else None for name, value in kept.items() if name.startswith("MALLOC_")}
    return {
        **inherited,
        **allocator,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[3]),
        "PYTHONWARNINGS": "ignore",
    }


def _dgl_environment(launch: Launch, folder: Path, trainers: int) -> dict[str, str]:
    return {
        "DGL_DIST_MODE": "distributed",
        "DGL_IP_CONFIG": str(_ip_config(folder)),
        "DGL_CONF_PATH": launch.data,
        "DGL_NUM_SERVER": "1",
        "DGL_NUM_CLIENT": str(trainers),
        "DGL_NUM_SAMPLER": "0",
        "DGL_GRAPH_FORMAT": "csc",
        "DGL_KEEP_ALIVE": "0",
    }


def _start_graph_servers(
    lab: Lab, launch: Launch, folder: Path, trainers: int, stack: ExitStack
) -> Started | None:
    if launch.system != "stock":
        return None
    _ip_config(folder).write_text("".join(f"{server.address} {_SERVER_PORT}\n" for server in lab.servers))
    command = [sys.executable, str(PROGRAMS / "stock_server.py"), str(_ip_config(folder))]
    shared = {**_environment(launch), **_dgl_environment(launch, folder, trainers), "DGL_ROLE": "server"}
    launchers: list[Launcher] = []
    started = stack.enter_context(Started(launchers, ExitStack()))
    for server in lab.servers:
        own = {**shared, "DGL_SERVER_ID": str(server.number)}
        name = folder / f"graph-server-{server.number}"
        launchers.append(
            Launcher(
                server,
                command,
                with_changes(server_environment(server, 1), own),
                screen=None,
                log=name.with_suffix(".log"),
                failure_file=name.with_suffix(".json"),
            )
        )
    return started


def _ip_config(folder: Path) -> Path:
    return folder / "ip_config.txt"


def _logs(folder: Path) -> str:
    return last_lines(sorted(folder.glob("*.log")), _LOG_LINES)


def _reports(
    launch: Launch, folder: Path, world_size: int, ranks_per_server: int, server_peak: int | None
) -> list[dict[str, Any]]:
    paths = [folder / f"rank-{rank}.json" for rank in range(world_size)]
    missing = [rank for rank, path in enumerate(paths) if not path.exists()]
    if missing:
        raise JobError(f"{launch.system}: no report of ranks {missing}{_logs(folder)}")
    reports = [json.loads(path.read_text()) for path in paths]
    chosen = range(launch.warmup, launch.warmup + launch.epochs)
    rows = [[rank["epochs"][number] for rank in reports] for number in chosen]
    # Ranks of one server read the same card.
    wire = [_total([rank["card_sent"] for rank in row[::ranks_per_server]]) for row in rows]
    epochs = [as_record(row, sent) for row, sent in zip(rows, wire, strict=True)]
    extra = {
        "system": launch.system,
        "allocator": launch.allocator,
        "versions": versions(),
        "rank_peak_bytes": max(rank["peak_bytes"] for rank in reports),
        "parts_s": _means(rows, "parts", max),
        "counts": _means(rows, "counts", sum),
        "seed_sum_of_rank": [rank["epochs"][launch.warmup]["counts"].get("seed_sum") for rank in reports],
    }
    return [
        {
            "epochs": [asdict(epoch) for epoch in epochs],
            "bytes_outside_wire": _total(wire),
            "peak_bytes": server_peak // ranks_per_server if server_peak else rank["peak_bytes"],
            "accuracy": _curve([rank["epochs"] for rank in reports]),
            "extra": extra,
        }
        for rank in reports
    ]


def _curve(epochs: Sequence[Sequence[Mapping[str, Any]]]) -> list[tuple[float, float]]:
    curve, seconds = [], 0.0
    for row in zip(*epochs, strict=True):
        seconds += max(rank["seconds"] for rank in row)
        counts = [rank["validation"] for rank in row if "validation" in rank]
        if counts:
            correct, of = (sum(column) for column in zip(*counts, strict=True))
            curve.append((seconds, correct / max(of, 1)))
    return curve


def _total(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _means(
    rows: Sequence[Sequence[Mapping[str, Any]]], group: str, over: Callable[[Iterable[float]], float]
) -> dict[str, float]:
    names = sorted({name for row in rows for rank in row for name in rank[group]})
    return {
        name: sum(over(rank[group].get(name, 0.0) for rank in row) for row in rows) / len(rows)
        for name in names
    }
