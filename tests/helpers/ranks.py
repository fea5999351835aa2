"""Starts real ranks for a test: processes with torchrun's environment, gloo over loopback, and a hang guard.

The test process plays torchrun's agent: it hosts the rendezvous store on a port that the system chooses.
Processes are forked from a server that has torch and dgl imported already, so a rank starts in a fraction
of a second.
"""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore

PRELOAD = [
    "dglx_dist",
    "torch",
    "torch.distributed",
    "torch._dynamo",  # the first optimizer imports it
    "numpy",
    "zmq",
    "numba",
    "dgl",
    "dglx_dist.dataloading",
    "tests.helpers.warm",
]
GRACE_S = 30.0
"""How long the others may take to end after the first rank failed."""


class RankError(AssertionError):
    """A rank raised, died or hung; the text holds its error and what it printed."""


@dataclass(frozen=True)
class Outcome:
    rank: int
    result: Any
    error: str
    """Type, text and traceback; "" when it returned."""
    failed_at_ns: int
    exitcode: int | None
    """None: it had to be killed because it hung."""
    output: str
    """The text that it printed."""
    stacks: str
    """The stacks of its threads, if it had to be killed."""


def run_ranks(function: Callable[..., Any], world_size: int, **how: Any) -> list[Any]:
    """Call ``function`` in ``world_size`` ranks as :func:`start_ranks` does; return their results, by rank.

    Raises:
        RankError: a rank raised, died or hung; the earliest failure is shown first.
    """
    outcomes = start_ranks(function, world_size, **how)
    failures = sorted(
        (outcome for outcome in outcomes if outcome.error or outcome.exitcode != 0),
        key=lambda one: (one.exitcode is None, one.failed_at_ns or time.monotonic_ns()),
    )
    if failures:
        raise RankError("\n\n".join(_describe(failure, world_size) for failure in failures))
    return [outcome.result for outcome in outcomes]


def run_each(
    function: Callable[..., Any], cases: Sequence[Sequence[Any]], world_size: int, **how: Any
) -> list[list[Any]]:
    """Call ``function`` for one case after another in the same ranks; return results by case, by rank."""
    by_rank = run_ranks(_call_each, world_size, args=(function, cases), **how)
    return [list(results) for results in zip(*by_rank, strict=True)]


def _call_each(function: Callable[..., Any], cases: Sequence[Sequence[Any]]) -> list[Any]:
    return [function(*case) for case in cases]


def start_ranks(
    function: Callable[..., Any],
    world_size: int,
    *,
    args: Sequence[Any] = (),
    ranks_per_server: int | None = None,
    timeout_s: float = 240.0,
    environment: dict[str, str] | None = None,
    after_start: Callable[[list[int]], None] | None = None,
) -> list[Outcome]:
    """Call ``function(*args)`` in ``world_size`` ranks and return how each ended, by rank.

    Args:
        function: Of a module, not a lambda; reads its rank from the environment, as under torchrun.
        world_size: Number of processes.
        args: The same for all.
        ranks_per_server: DGLX_RANKS_PER_SERVER.
        timeout_s: After this all are killed and their stacks shown. Compiling all kernels of a loader takes
            two minutes of a busy machine.
        environment: More variables for the ranks.
        after_start: Called with the process ids once all run.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        processes = []
        for rank in range(world_size):
            variables = _environment(rank, world_size, store.port, ranks_per_server) | (environment or {})
            process = context.Process(target=_rank_main, args=(function, args, variables, rank, folder))
            process.start()
            processes.append(process)
        if after_start is not None:
            after_start([process.pid for process in processes])
        hung = _wait_for(processes, timeout_s)
        stacks = _kill(processes, hung, folder)
        return [_outcome(rank, processes[rank], rank in hung, stacks, folder) for rank in range(world_size)]


def _environment(rank: int, world_size: int, port: int, ranks_per_server: int | None) -> dict[str, str]:
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": 1,
    }
    if ranks_per_server is not None:
        variables["DGLX_RANKS_PER_SERVER"] = ranks_per_server
    return {key: str(value) for key, value in variables.items()}


def _rank_main(
    function: Callable[..., Any], args: Sequence[Any], variables: dict[str, str], rank: int, folder: Path
) -> None:
    os.environ.pop("DGLX_RANKS_PER_SERVER", None)
    os.environ.update(variables)
    output = open(folder / f"{rank}.output", "w", buffering=1)  # noqa: SIM115 - open until the process ends
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    stacks = open(folder / f"{rank}.stacks", "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
    faulthandler.enable(output)
    import torch

    from dglx_dist.comm import session

    torch.set_num_threads(1)
    try:
        result = function(*args)
        while session._CURRENT:
            session.current_session().close()
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        (folder / f"{rank}.error").write_text(
            f"{time.monotonic_ns()} {type(error).__name__}: {error}\n{text}"
        )
        while session._CURRENT:
            session.current_session().fail(error)
            session.current_session().close(failed=True)
        sys.stdout.flush()
        os._exit(1)
    # Plain bytes in a file: a tensor handed over a queue is a handle that dies with this process.
    temporary = folder / f"{rank}.result.part"
    temporary.write_bytes(pickle.dumps(result))
    temporary.rename(folder / f"{rank}.result")
    sys.stdout.flush()


def _wait_for(processes: list[Any], timeout_s: float) -> set[int]:
    deadline = time.monotonic() + timeout_s
    running = dict(enumerate(processes))
    while running and time.monotonic() < deadline:
        wait([process.sentinel for process in running.values()], max(deadline - time.monotonic(), 0.01))
        ended = [rank for rank, process in running.items() if process.exitcode is not None]
        if any(running[rank].exitcode != 0 for rank in ended):
            deadline = min(deadline, time.monotonic() + GRACE_S)
        for rank in ended:
            del running[rank]
    return set(running)


def _kill(processes: list[Any], hung: set[int], folder: Path) -> dict[int, str]:
    """Kill the ranks ``hung`` after asking them where they are."""
    for rank in hung:
        os.kill(processes[rank].pid, signal.SIGUSR2)
    deadline = time.monotonic() + 2.0
    files = {rank: folder / f"{rank}.stacks" for rank in hung}
    while files and time.monotonic() < deadline:
        if all(file.exists() and file.stat().st_size for file in files.values()):
            deadline = min(deadline, time.monotonic() + 0.2)
        wait([processes[rank].sentinel for rank in hung], 0.05)
    for rank in hung:
        processes[rank].kill()
    for process in processes:
        process.join()
    return {rank: file.read_text() if file.exists() else "" for rank, file in files.items()}


def _outcome(rank: int, process: Any, hung: bool, stacks: dict[int, str], folder: Path) -> Outcome:
    result, error = folder / f"{rank}.result", folder / f"{rank}.error"
    output = folder / f"{rank}.output"
    at_ns, _, text = error.read_text().partition(" ") if error.exists() else ("0", "", "")
    return Outcome(
        rank=rank,
        result=pickle.loads(result.read_bytes()) if result.exists() else None,
        error=text,
        failed_at_ns=int(at_ns),
        exitcode=None if hung else process.exitcode,
        output=output.read_text() if output.exists() else "",
        stacks=stacks.get(rank, ""),
    )


def _describe(one: Outcome, world_size: int) -> str:
    if one.exitcode is None:
        head = f"rank {one.rank} of {world_size} hung and was killed; it was here:\n{one.stacks}"
    elif one.error:
        head = f"rank {one.rank} of {world_size} raised {one.error}"
    else:
        head = f"rank {one.rank} of {world_size} died with exit code {one.exitcode}"
    return head + (f"\n--- its output:\n{one.output[-4000:]}" if one.output else "")
