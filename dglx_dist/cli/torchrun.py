"""torchrun with one error message and a rendezvous store on one address.

``dglx train --ranks N`` starts ``python -m dglx_dist.cli.torchrun <torchrun's arguments>``. It differs from
torchrun in three ways. A failed run ends with the message of the rank that failed first, instead of a
traceback of the launcher. When it is told to end, ranks have the time that they need for a checkpoint; after
30 s torchrun's agent would kill them. With ``--failure-file FILE`` before torchrun's arguments the message is
written to that file as JSON: scripts/netlab starts one launcher per server and shows the first failure.

The store of the rendezvous listens on one address, with ``--standalone`` on loopback. torchrun's own listens
on every interface, and its rendezvous for ``--standalone`` unpickles whatever is written to it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
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

from dglx_dist.cli.common import say
from dglx_dist.comm.rendezvous import serve_store
from dglx_dist.comm.stopping import SAME_KEY_S, end_with_parent
from dglx_dist.comm.topology import be_parent
from dglx_dist.data.storage.files import replaced_file
from dglx_dist.errors import Stopped

_AGENT_WAITS_S = 30
"""Of torchrun's agent, for ranks to end after one has failed; then it kills them."""
_BACKEND = "dglx-static"
"""Name of the rendezvous backend of :class:`_OneAddressRendezvous`."""


def main(arguments: Sequence[str]) -> int:
    """Run torchrun with ``arguments`` and return the exit code of the rank that failed first, or 0."""
    end_with_parent()
    be_parent()
    told = _Signals()
    file = None
    if arguments[:1] == ["--failure-file"]:
        file, arguments = Path(arguments[1]), arguments[2:]
    # The agent logs each rank that it ends, which hides the cause.
    logging.disable(logging.ERROR)
    try:
        # torchrun would create such a folder too, and leave it. It is beside FILE, to be removed with it.
        parent = None if file is None else file.parent
        with tempfile.TemporaryDirectory(prefix="dglx-torchrun-", dir=parent) as logs:
            parsed = run.parse_args(["--log-dir", logs, *arguments])  # type: ignore[no-untyped-call]
            _use_one_address(parsed)
            run.run(parsed)  # type: ignore[no-untyped-call]  # torch leaves them bare
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
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.send_signal(signal.SIGKILL if again else signal.SIGTERM)
        if not ranks:
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
