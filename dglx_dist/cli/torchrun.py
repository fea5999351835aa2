"""Run torchrun with one error message and a rendezvous store on one address.

The launcher for ``dglx train --ranks N``, which runs the same command, calls :func:`launch`. ``python -m
dglx_dist.cli.torchrun <torchrun's arguments>`` does so for any program. It differs from torchrun in four
ways. ``dglx train`` ranks are forks of the launcher, which has imported everything once. A failed run ends
with the message from the rank that failed first, instead of a traceback from the launcher. After a signal to
stop, ranks have the time that they need for a checkpoint, while torchrun's agent would kill them after 30 s.
With ``--failure-file FILE`` before torchrun's arguments, the message is written to that file as JSON.
scripts/netlab starts one launcher per server and shows the first failure.

The rendezvous store listens on one address, and with ``--standalone`` on loopback. torchrun's own listens on
every interface, and its rendezvous for ``--standalone`` unpickles whatever is written to it.
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
from dglx_dist.comm.stopping import SAME_INTERRUPT_S, end_process, end_with_parent
from dglx_dist.comm.topology import mark_as_parent, read_settings, set_rank_variables
from dglx_dist.data.storage.files import replace_atomically
from dglx_dist.dataloading.sampler import load_kernels
from dglx_dist.errors import Stopped
from dglx_dist.progress import say

_AGENT_TIMEOUT_S = 30
"""Seconds that torchrun's agent waits for ranks to end after one has failed. Then it kills them."""
_BACKEND = "dglx-static"
"""Name under which :class:`_OneAddressRendezvous` is registered as a backend."""
_DEFAULT_PORT = 29500
"""torchrun's rendezvous port."""
_PR_SET_NAME = 15
"""Linux's number for the request that names a process."""


def main(arguments: Sequence[str]) -> int:
    """Run torchrun with ``arguments``. Return what :func:`launch` returns."""
    end_with_parent()
    file = None
    if arguments[:1] == ["--failure-file"]:
        file = Path(arguments[1])
        arguments = arguments[2:]
    code = launch(arguments, file)
    if code is None:
        runpy.run_module("dglx_dist.cli", run_name="__main__", alter_sys=True)
    return code or 0


def launch(arguments: Sequence[str], file: Path | None = None) -> int | None:
    """Run torchrun with ``arguments`` and return the exit code of the rank that failed first, or 0.

    Return None in ranks that are forks of this process, with RANK etc. and their ``sys.argv``. A failure is
    written to ``file``, or shown if it is None.
    """
    mark_as_parent()
    parsed = run.parse_args(arguments)  # type: ignore[no-untyped-call]  # torch does not annotate this
    ranks: list[_ForkedRank] | None = []
    if _can_fork(parsed):
        ranks = _fork(run.determine_local_world_size(parsed.nproc_per_node))
    gc.enable()

    if ranks is None:
        # A rank leaves this function at once. The following code is for the launcher.
        sys.argv[1:] = parsed.training_script_args
        return None

    signals = _Signals()
    _start_forks_with_agent(ranks, signals)
    # The agent logs each rank that it ends, which hides the cause.
    logging.disable(logging.ERROR)
    try:
        # torchrun would also create such a folder, but not remove it. The folder is beside ``file``.
        parent = None if file is None else file.parent
        with tempfile.TemporaryDirectory(prefix="dglx-torchrun-", dir=parent) as logs:
            parsed.log_dir = parsed.log_dir or logs
            _use_one_address(parsed)
            run.run(parsed)  # type: ignore[no-untyped-call]  # torch does not annotate this
    except agent.SignalException as error:
        return 128 + int(error.sigval)
    except ChildFailedError as error:
        return _report_failures(error.failures, signals, file)
    return 0


def _start_forks_with_agent(ranks: Sequence[_ForkedRank], signals: _Signals) -> None:
    """Let torchrun's agent start ``ranks`` where it would start processes, and tell ``signals`` about it."""
    waiting = dict(enumerate(ranks))
    start_process = agent.get_subprocess_handler  # type: ignore[attr-defined]  # the agent imports this name

    def start(**process: Any) -> object:
        rank = waiting.pop(process["local_rank_id"], None)
        signals.has_agent = not waiting
        if rank is None:
            # A restarted rank is a new process, not a fork.
            return start_process(**process)
        return rank.start(process["env"])

    agent.get_subprocess_handler = start  # type: ignore[assignment, attr-defined]  # the agent calls this name with the same arguments


def _report_failures(failures: dict[Any, ProcessFailure], signals: _Signals, file: Path | None) -> int:
    """Write the first failure to ``file``, or show it if ``file`` is None. Return the run's exit code.

    A run that a signal has stopped needs no message.
    """
    if any(failure.exitcode == Stopped.EXIT_CODE for failure in failures.values()):
        return Stopped.EXIT_CODE

    rank, failure = find_first_failure(failures)
    is_consequence = _has_lost_peer(failure) or not _read_message(failure)
    if signals.first_signal and is_consequence:
        return 128 + signals.first_signal

    if file is None:
        say(describe(rank, failure), "red")
    else:
        write_failure(file, rank, failure)
    return get_exit_code(failure)


def _can_fork(parsed: argparse.Namespace) -> bool:
    """Return whether the ranks run ``dglx train`` with this Python and this process's output on CPUs."""
    if not parsed.module or parsed.training_script != "dglx_dist.cli":
        return False
    words = [word for word in parsed.training_script_args if not word.startswith("-")]
    if words[:1] != ["train"]:
        return False

    if parsed.redirects != "0" or parsed.tee != "0":
        return False
    # Some options do not exist in every torch version.
    for name in ("no_python", "run_path", "local_ranks_filter", "numa_binding", "logs_specs"):
        if getattr(parsed, name, None):
            return False

    # GPU drivers do not survive a fork, and asking torch for GPUs would load them.
    devices = [Path("/dev", name) for name in ("nvidiactl", "kfd", "dxg")]
    return not (is_built_for_gpus() and any(device.exists() for device in devices))


def _fork(num_ranks: int) -> list[_ForkedRank] | None:
    """Import the modules that ranks need and fork ``num_ranks`` ranks. They wait for their environment.

    Return None in a rank. This comes before the rendezvous store and torchrun's agent, which have threads and
    sockets.
    """
    if num_ranks > 1 and read_settings().omp_threads is None:
        torch.set_num_threads(1)  # as torchrun does
    import dglx_dist.cli.train_job  # noqa: F401

    load_kernels(say)
    # A fork would write what these buffers hold, too.
    sys.stdout.flush()
    sys.stderr.flush()

    # A rank's garbage collector then does not touch these objects, so their pages are not copied.
    gc.freeze()
    ranks: list[_ForkedRank] = []
    for local_rank in range(num_ranks):
        rank = _ForkedRank(local_rank, ranks)
        if rank.pid == 0:
            return None
        ranks.append(rank)
    return ranks


class _ForkedRank:
    """A forked rank with the interface that torchrun's agent expects.

    Creating one forks this process, so the constructor returns twice. In the launcher it returns at once, and
    ``pid`` is the rank's process. In the rank it returns when the launcher has called :meth:`start`, and
    ``pid`` is 0. If the launcher ends before that, the rank ends, too.
    """

    def __init__(self, local_rank: int, earlier_ranks: Sequence[_ForkedRank]) -> None:
        read_end, self._pipe = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(read_end)
            self.proc = self
            self._process = psutil.Process(self.pid)
            return

        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_NAME, f"dglx-rank-{local_rank}".encode())

        # A pipe ends when nobody can write to it. So a rank closes the write ends that it has inherited.
        for write_end in (self._pipe, *(rank._pipe for rank in earlier_ranks)):
            os.close(write_end)
        _wait_for_rank_variables(read_end)

        # A rank's output is usually a file or pipe, which Python would buffer in blocks.
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # typeshed: stdout is any TextIO

    def start(self, environment: Mapping[str, str]) -> _ForkedRank:
        # If the rank has ended in the meantime, poll() will report it.
        with suppress(BrokenPipeError), open(self._pipe, "w", encoding="utf-8") as pipe:
            json.dump(dict(environment), pipe)
        return self

    def poll(self) -> int | None:
        """Return the exit code, minus the signal, or None if it is running."""
        return self.wait(0)

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait up to ``timeout`` seconds, or without limit. Return the same as :meth:`poll`."""
        with suppress(psutil.TimeoutExpired):
            return self._process.wait(timeout)
        return None

    def close(self, death_sig: signal.Signals | None = None) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, death_sig or signal.SIGTERM)


def _wait_for_rank_variables(read_end: int) -> None:
    """Wait for this rank's environment, and set it. End the process if the launcher has ended."""
    with open(read_end, encoding="utf-8") as pipe:
        environment = pipe.read()
    if not environment:
        end_process(signal.SIGTERM)
    set_rank_variables(json.loads(environment))


class _OneAddressRendezvous(StaticTCPRendezvous):
    # The base class's store listens on every interface.

    def get_backend(self) -> str:
        return _BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        # With one launcher, each attempt has its own store, because no other launcher knows its port.
        is_alone = self.world_size == 1
        if self.rank == 0 and (is_alone or self._store is None):
            port = 0 if is_alone else self.master_port
            self._store = serve_store(self.master_addr, port, self.world_size, self.timeout)
            self.master_port = self._store.port
        return super().next_rendezvous()


def _use_one_address(parsed: argparse.Namespace) -> None:
    """Select :class:`_OneAddressRendezvous` instead of torchrun's static backend and --standalone."""
    if parsed.standalone:
        parsed.standalone = False
        parsed.nnodes = "1"
        parsed.node_rank = 0
        parsed.rdzv_backend = "static"
        parsed.rdzv_endpoint = "127.0.0.1:0"

    if parsed.rdzv_backend != "static":
        return
    parsed.rdzv_backend = _BACKEND
    if not parsed.rdzv_endpoint:
        parsed.rdzv_endpoint = f"{parsed.master_addr}:{parsed.master_port or _DEFAULT_PORT}"

    def create(settings: RendezvousParameters) -> StaticTCPRendezvous:
        host, port = parse_rendezvous_endpoint(settings.endpoint, default_port=_DEFAULT_PORT)
        nodes = settings.max_nodes
        limit_s = int(settings.get("timeout", 600))
        return _OneAddressRendezvous(host, port, parsed.node_rank, nodes, settings.run_id, limit_s)

    rendezvous_handler_registry.register(_BACKEND, create)


class _Signals:
    """Passes signals to the ranks as SIGTERM and lets the agent wait for them. A second Ctrl-C kills them."""

    has_agent = False
    """Whether the agent has started the ranks, so that it notices when they end."""

    def __init__(self) -> None:
        self.first_signal = 0
        """First signal, or 0."""
        self._first_signal_s = 0.0
        # The agent installs this function for SIGTERM and SIGINT, and torch before 2.9 has no other way.
        agent._terminate_process_handler = self._pass_on  # type: ignore[assignment]  # the agent calls it with the same arguments
        for signal_number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(signal_number, self._pass_on)

    def _pass_on(self, signal_number: int, _frame: FrameType | None) -> None:
        is_repeated = False
        if not self.first_signal:
            self.first_signal = signal_number
            self._first_signal_s = time.monotonic()
        elif signal_number == signal.SIGINT:
            # One Ctrl-C may arrive twice within a moment.
            is_repeated = time.monotonic() - self._first_signal_s > SAME_INTERRUPT_S

        for rank in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):
                rank.send_signal(signal.SIGKILL if is_repeated else signal.SIGTERM)
        if not self.has_agent:
            message = "a signal came before ranks were started"
            raise agent.SignalException(message, signal.Signals(signal_number))


def find_first_failure(failures: dict[Any, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Find the rank that failed first, and its failure.

    Ranks that lost a peer rank after it, as they fail within the same second. Ranks that did not end, so that
    the agent killed them, come last, because the others' messages name them.
    """
    message_times = [failure.timestamp for failure in failures.values() if _read_message(failure)]
    first_message = min(message_times, default=math.inf)

    def get_order(item: tuple[int, ProcessFailure]) -> tuple[bool, bool, int]:
        failure = item[1]
        delay = failure.timestamp - first_message
        # The agent waits that long before it kills ranks. Times are whole seconds, hence the 1.
        was_stuck = failure.exitcode == -signal.SIGKILL and delay >= _AGENT_TIMEOUT_S - 1
        return was_stuck, _has_lost_peer(failure), failure.timestamp

    return min(failures.items(), key=get_order)


def describe(rank: int, failure: ProcessFailure) -> str:
    """Return a failed rank's message, or without one, how its process ended."""
    if message := _read_message(failure):
        return f"rank {rank} failed: {message}"

    process = f"rank {rank} (process {failure.pid})"
    if failure.exitcode >= 0:
        return f"{process} ended with exit code {failure.exitcode}; see its output above"
    return (
        f"{process} was ended by {failure.signal_name()}; the other ranks were stopped. "
        "SIGKILL often means that the machine ran out of memory. Use fewer ranks or a smaller "
        "--batch-size or --fanout."
    )


def get_exit_code(failure: ProcessFailure) -> int:
    """Return the rank's exit code, or 128 + its signal, like a shell."""
    return failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode


def write_failure(file: Path, rank: int, failure: ProcessFailure) -> None:
    """Write rank, message, exit_code, lost_a_peer and second to ``file`` as JSON."""
    record = {
        "rank": rank,
        "message": describe(rank, failure),
        "exit_code": get_exit_code(failure),
        "lost_a_peer": _has_lost_peer(failure),
        "second": failure.timestamp,
    }
    with replace_atomically(file) as partial:
        partial.write_text(json.dumps(record))


def _read_message(failure: ProcessFailure) -> str:
    """Return the message that the rank has recorded, or an empty text."""
    # "<N/A>" is torch's placeholder for a rank that left no file.
    if failure.error_file == "<N/A>":
        return ""
    message = failure.error_file_data.get("message", "")
    if isinstance(message, dict):
        message = message["message"]
    return str(message)


def _has_lost_peer(failure: ProcessFailure) -> bool:
    return _read_message(failure).startswith("PeerError")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
