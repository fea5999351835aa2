"""torchrun with one error message and a rendezvous store on one address.

The launcher of ``dglx train --ranks N``, a process of the same command, calls :func:`launch`; ``python -m
dglx_dist.cli.torchrun <torchrun's arguments>`` does so for any program. It differs from torchrun in four
ways. Ranks of ``dglx train`` are forks of the launcher, which has imported once. A failed run ends with the
message of the rank that failed first, instead of a traceback of the launcher. When it is told to end, ranks
have the time that they need for a checkpoint; after 30 s torchrun's agent would kill them. With
``--failure-file FILE`` before torchrun's arguments the message is written to that file as JSON:
scripts/netlab starts one launcher per server and shows the first failure.

The store of the rendezvous listens on one address, with ``--standalone`` on loopback. torchrun's own listens
on every interface, and its rendezvous for ``--standalone`` unpickles whatever is written to it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import logging
import math
import os
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import torch
from torch.distributed import run
from torch.distributed.elastic.multiprocessing import api as agent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from dglx_dist.comm.devices import is_built_for_gpus
from dglx_dist.comm.rendezvous import serve_store
from dglx_dist.comm.stopping import SAME_KEY_S, end_process, end_with_parent
from dglx_dist.comm.topology import mark_as_parent, read_settings, set_rank_variables
from dglx_dist.data.storage.files import replaced_file
from dglx_dist.dataloading.sampler import load_kernels
from dglx_dist.errors import Stopped
from dglx_dist.progress import say

_AGENT_WAITS_S = 30
"""Of torchrun's agent, for ranks to end after one has failed; then it kills them."""
_BACKEND = "dglx-static"
"""Name of the rendezvous backend of :class:`_OneAddressRendezvous`."""
_PR_SET_NAME = 15


def main(arguments: Sequence[str]) -> int:
    """Run torchrun with ``arguments``; return as :func:`launch`."""
    end_with_parent()
    file = None
    if arguments[:1] == ["--failure-file"]:
        file, arguments = Path(arguments[1]), arguments[2:]
    code = launch(arguments, file)
    if code is None:
        runpy.run_module("dglx_dist.cli", run_name="__main__", alter_sys=True)
    return code or 0


def launch(arguments: Sequence[str], file: Path | None = None) -> int | None:
    """Run torchrun with ``arguments`` and return the exit code of the rank that failed first, or 0.

    Returns None in ranks that are forks of this process, with RANK etc. and their ``sys.argv``. A failure is
    written to ``file`` (None: shown).
    """
    mark_as_parent()
    parsed = run.parse_args(arguments)  # type: ignore[no-untyped-call]  # torch leaves it bare
    ranks = _fork(run.determine_local_world_size(parsed.nproc_per_node)) if _can_fork(parsed) else []
    gc.enable()
    if ranks is None:
        # Ranks leave this function at once, so that nothing below concerns them.
        sys.argv[1:] = parsed.training_script_args
        return None
    waiting = dict(enumerate(ranks))
    told, start_process = _Signals(), agent.get_subprocess_handler  # type: ignore[attr-defined]

    def start(**process: Any) -> object:
        # A restart is a process of its own.
        rank = waiting.pop(process["local_rank_id"], None)
        told.of_agent = not waiting
        return rank.start(process["env"]) if rank else start_process(**process)

    agent.get_subprocess_handler = start  # type: ignore[assignment, attr-defined]  # of ours, as signals
    # The agent logs each rank that it ends, which hides the cause.
    logging.disable(logging.ERROR)
    try:
        # torchrun would create such a folder too, and leave it. It is beside FILE, to be removed with it.
        parent = None if file is None else file.parent
        with tempfile.TemporaryDirectory(prefix="dglx-torchrun-", dir=parent) as logs:
            parsed.log_dir = parsed.log_dir or logs
            _use_one_address(parsed)
            run.run(parsed)  # type: ignore[no-untyped-call]
    except agent.SignalException as error:
        return 128 + int(error.sigval)
    except ChildFailedError as error:
        if any(one.exitcode == Stopped.EXIT_CODE for one in error.failures.values()):
            return Stopped.EXIT_CODE
        rank, failure = first_failure(error.failures)
        if told.first and (_lost_a_peer(failure) or not _recorded(failure)):
            return 128 + told.first
        if file is not None:
            write_failure(file, rank, failure)
            return exit_code(failure)
        say(describe(rank, failure), "red")
        return exit_code(failure)
    return 0


def _can_fork(parsed: argparse.Namespace) -> bool:
    """Whether the ranks are ``dglx train`` with this Python and this process's output, and without GPUs."""
    words = (word for word in parsed.training_script_args if not word.startswith("-"))
    is_train = parsed.module and parsed.training_script == "dglx_dist.cli" and next(words, "") == "train"
    # Some of these are not in every version of torch.
    others = "no_python", "run_path", "local_ranks_filter", "numa_binding", "logs_specs"
    plain = not any(getattr(parsed, name, None) for name in others) and parsed.redirects == parsed.tee == "0"
    # Drivers do not survive a fork, and asking torch for GPUs would load them.
    has_gpus = is_built_for_gpus() and any(
        Path("/dev", name).exists() for name in ("nvidiactl", "kfd", "dxg")
    )
    return is_train and plain and not has_gpus


def _fork(count: int) -> list[_ForkedRank] | None:
    """Import what ranks need and fork ``count``, which wait for their environment; None: this is a rank.

    Before the store of the rendezvous and torchrun's agent, which have threads and sockets.
    """
    if count > 1 and read_settings().omp_threads is None:
        torch.set_num_threads(1)  # as torchrun does
    import dglx_dist.cli.train_job  # noqa: F401

    load_kernels(say)
    sys.stdout.flush()
    sys.stderr.flush()
    # Nor does a rank copy pages of these objects when it collects its garbage.
    gc.freeze()
    ranks: list[_ForkedRank] = []
    for number in range(count):
        rank = _ForkedRank(number, ranks)
        if rank.pid == 0:
            return None
        ranks.append(rank)
    return ranks


class _ForkedRank:
    """What torchrun's agent calls of a process; in the process itself ``pid`` is 0."""

    def __init__(self, number: int, earlier: Sequence[_ForkedRank]) -> None:
        read, self._told = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(read)
            self.proc, self._process = self, psutil.Process(self.pid)
            return
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_NAME, f"dglx-rank-{number}".encode())
        for descriptor in (self._told, *(one._told for one in earlier)):
            os.close(descriptor)
        with open(read, encoding="utf-8") as pipe:
            environment = pipe.read()
        if not environment:
            end_process(signal.SIGTERM)  # the launcher has ended
        set_rank_variables(json.loads(environment))
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # it is a file

    def start(self, environment: Mapping[str, str]) -> _ForkedRank:
        # A rank that has ended meanwhile is told by poll().
        with suppress(BrokenPipeError), open(self._told, "w", encoding="utf-8") as pipe:
            json.dump(dict(environment), pipe)
        return self

    def poll(self) -> int | None:
        """Return the exit code, or minus the signal; None: it runs."""
        return self.wait(0)

    def wait(self, timeout: float | None = None) -> int | None:
        with suppress(psutil.TimeoutExpired):
            return self._process.wait(timeout)
        return None

    def close(self, death_sig: signal.Signals | None = None) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, death_sig or signal.SIGTERM)


class _OneAddressRendezvous(StaticTCPRendezvous):
    # The store of the base class listens on every interface.

    def get_backend(self) -> str:
        return _BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        # On one machine each attempt has a store of its own.
        single = self.world_size == 1
        if self.rank == 0 and (single or self._store is None):
            port = 0 if single else self.master_port
            self._store = serve_store(self.master_addr, port, self.world_size, self.timeout)
            self.master_port = self._store.port
        return super().next_rendezvous()


def _use_one_address(parsed: argparse.Namespace) -> None:
    """Select :class:`_OneAddressRendezvous` in place of torchrun's static backend, and of --standalone."""
    if parsed.standalone:
        parsed.standalone, parsed.nnodes, parsed.node_rank = False, "1", 0
        parsed.rdzv_backend, parsed.rdzv_endpoint = "static", "127.0.0.1:0"
    if parsed.rdzv_backend != "static":
        return
    parsed.rdzv_backend = _BACKEND
    parsed.rdzv_endpoint = parsed.rdzv_endpoint or f"{parsed.master_addr}:{parsed.master_port or 29500}"

    def make(found: RendezvousParameters) -> StaticTCPRendezvous:
        host, port = parse_rendezvous_endpoint(found.endpoint, default_port=29500)
        limit_s = int(found.get("timeout", 600))
        return _OneAddressRendezvous(host, port, parsed.node_rank, found.max_nodes, found.run_id, limit_s)

    rendezvous_handler_registry.register(_BACKEND, make)


class _Signals:
    """Passes signals to the ranks as SIGTERM and lets the agent wait for them; a second Ctrl-C kills them."""

    of_agent = False
    """Whether the agent has started the ranks, and so learns of their end."""

    def __init__(self) -> None:
        self.first = 0
        """The first signal, or 0."""
        self._first_s = 0.0
        # The agent installs this function for SIGTERM and SIGINT, and torch before 2.9 has no other way.
        agent._terminate_process_handler = self._pass_on  # type: ignore[assignment]  # same call
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._pass_on)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        ranks = psutil.Process().children()
        again = number == signal.SIGINT and self.first and time.monotonic() - self._first_s > SAME_KEY_S
        if not self.first:
            self.first, self._first_s = number, time.monotonic()
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.send_signal(signal.SIGKILL if again else signal.SIGTERM)
        if not self.of_agent:
            raise agent.SignalException("told to end before ranks were started", signal.Signals(number))


def first_failure(failures: dict[Any, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Return the rank that failed first, and its failure.

    Failures of ranks that lost a peer come later: they follow the peer's within the resolution of a second.
    Last come ranks that did not end, so that the agent killed them: the others' messages name them.
    """
    told = min((one.timestamp for one in failures.values() if _recorded(one)), default=math.inf)

    def order(item: tuple[int, ProcessFailure]) -> tuple[bool, bool, int]:
        failure = item[1]
        was_stuck = failure.exitcode == -signal.SIGKILL and failure.timestamp - told >= _AGENT_WAITS_S - 1
        return was_stuck, _lost_a_peer(failure), failure.timestamp

    return min(failures.items(), key=order)


def describe(rank: int, failure: ProcessFailure) -> str:
    recorded = _recorded(failure)
    if recorded:
        return f"rank {rank} failed: {recorded}"
    if failure.exitcode < 0:
        return (
            f"rank {rank} (process {failure.pid}) was ended by {failure.signal_name()}; the other ranks were "
            "stopped. SIGKILL often means that the machine ran out of memory: fewer ranks, a smaller "
            "--batch-size or --fanout need less"
        )
    return (
        f"rank {rank} (process {failure.pid}) ended with exit code {failure.exitcode}; see its output above"
    )


def exit_code(failure: ProcessFailure) -> int:
    """Return the rank's exit code, or 128 + its signal, as a shell does."""
    return failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode


def write_failure(file: Path, rank: int, failure: ProcessFailure) -> None:
    """Write rank, message, exit_code, lost_a_peer and second of ``failure`` to ``file``, as JSON."""
    record = {
        "rank": rank,
        "message": describe(rank, failure),
        "exit_code": exit_code(failure),
        "lost_a_peer": _lost_a_peer(failure),
        "second": failure.timestamp,
    }
    with replaced_file(file) as partial:
        partial.write_text(json.dumps(record))


def _recorded(failure: ProcessFailure) -> str:
    # Torch's placeholder for a rank that left no file.
    message = failure.error_file_data.get("message", "") if failure.error_file != "<N/A>" else ""
    return str(message["message"] if isinstance(message, dict) else message)


def _lost_a_peer(failure: ProcessFailure) -> bool:
    return _recorded(failure).startswith("PeerError")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
