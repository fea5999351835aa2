"""torchrun in a process of its own, ending with the one message that matters.

``dglx train --ranks N`` starts ``python -m dglx_dist.cli.torchrun <torchrun's arguments>``. It is
torchrun, except that a failed run ends with the message of the rank that failed first, in place of a
traceback of the launcher.
"""

from __future__ import annotations

import ctypes
import logging
import signal
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

_PR_SET_PDEATHSIG = 1


def main(arguments: Sequence[str]) -> int:
    """Run torchrun with ``arguments`` and return the exit code of the rank that failed first, or 0."""
    end_with_parent()
    # The agent logs each rank that it ends; what a user wants to read is why.
    logging.disable(logging.ERROR)
    try:
        # torchrun would make such a folder too, and leave it.
        with tempfile.TemporaryDirectory(prefix="dglx-torchrun-") as logs:
            parsed = run.parse_args(["--log-dir", logs, *arguments])  # type: ignore[no-untyped-call]
            run.run(parsed)  # type: ignore[no-untyped-call]  # torch leaves them bare
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except ChildFailedError as error:
        rank, failure = first_failure(error.failures)
        Console(stderr=True, soft_wrap=True).print(
            describe(rank, failure), style="red", highlight=False, markup=False
        )
        return exit_code(failure)
    return 0


def end_with_parent() -> None:
    """Ask the system for SIGTERM when the process that started this one ends, even if it is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def first_failure(failures: dict[Any, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Return the rank that failed first and how.

    Times have whole seconds, and a rank that lost its peer fails right after the peer: such a failure
    comes last, whatever its time.
    """
    return min(failures.items(), key=lambda item: (_lost_a_peer(item[1]), item[1].timestamp))


def describe(rank: int, failure: ProcessFailure) -> str:
    """Return one message that names the rank and the reason."""
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
    """Return the rank's own code, or what a shell reports for its signal."""
    return failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode


def _recorded(failure: ProcessFailure) -> str:
    # Torch fills in this word when the rank left no file.
    message = failure.error_file_data.get("message", "") if failure.error_file != "<N/A>" else ""
    return str(message["message"] if isinstance(message, dict) else message)


def _lost_a_peer(failure: ProcessFailure) -> bool:
    return _recorded(failure).startswith("PeerError")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
