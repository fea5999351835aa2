"""Files of ``dgl.save_graphs`` and ``save_tensors``, read in a child process first.

DGL's library checks neither sizes nor ids, and ends the process that reads a damaged file. The child has a
limit of memory and of time, and uses what it has read as the importers do.
"""

from __future__ import annotations

import json
import os
import resource
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, TypeAlias, final

from dglx_dist.errors import StorageError

DglFile: TypeAlias = tuple[str, Path]
"""``graphs`` or ``tensors``, and the file."""

_REMEDY = "copy it again, or write it again with DGL"
_START_S = 120.0
_BYTES_PER_S = 10 << 20
_MEMORY = 2 << 30
"""Memory of the child beside four times the largest file."""
_IDLE_S = 20.0
_LAST = b"\t\n"
"""End of an answer after which no other comes."""
_LOCK = threading.Lock()
_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from dglx_dist.data.dgl_files import read_all
read_all()
"""


def load_graphs(path: Path) -> list[Any]:
    """Return the graphs of a file; call :func:`check_files` before. StorageError if it cannot be read."""
    return list(_loaded("graphs", path))


def load_tensors(path: Path) -> dict[str, Any]:
    """Return the tensors of a file; as :func:`load_graphs`."""
    return dict(_loaded("tensors", path))


def _loaded(kind: str, path: Path) -> Any:
    import dgl
    from dgl.data.utils import load_tensors as read_tensors

    try:
        return dgl.load_graphs(str(path))[0] if kind == "graphs" else read_tensors(str(path))
    except (dgl.DGLError, ValueError, RuntimeError, MemoryError) as problem:
        # DGL's messages are C++ checks with stack traces.
        reason = (str(problem).splitlines() or [type(problem).__name__])[0][:200].strip()
        raise StorageError(f"{path} is damaged: {reason}; {_REMEDY}") from problem


def check_files(files: Iterable[DglFile]) -> None:
    """Read the files in one child process, unless this process did and they are the same since.

    Raises:
        StorageError: one is missing, or cannot be read; with its name and the reason.
    """
    stamped = []
    for kind, path in files:
        if not path.is_file():
            raise StorageError(f"{path} is missing; copy it here or partition the graph again")
        status = path.stat()
        stamped.append((kind, str(path.absolute()), status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    if stamped:
        _check(tuple(stamped))


@lru_cache(maxsize=1024)
def _check(stamped: Sequence[tuple[str, str, int, int, int]]) -> None:
    sizes = [size for _, _, size, *_ in stamped]
    given = json.dumps([_MEMORY + 4 * max(sizes), [[kind, path] for kind, path, *_ in stamped]])
    limit_s = _START_S + sum(sizes) / _BYTES_PER_S
    with _LOCK:
        try:
            reasons = _Child.of(os.getpid()).answers(given, len(stamped), limit_s)
        except ConnectionError:  # it has waited too long, and ended
            reasons = _Child.of(os.getpid()).answers(given, len(stamped), limit_s)
    for (_, path, *_), reason in zip(stamped, reasons, strict=False):
        if reason != "read":
            raise StorageError(
                reason if reason.startswith(path) else f"{path} is damaged: {reason}; {_REMEDY}"
            )


@final
class _Child:
    def __init__(self) -> None:
        program = [sys.executable, "-c", _PROGRAM, json.dumps(sys.path)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            program, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, bufsize=0
        )
        weakref.finalize(self, self._process.kill)

    @staticmethod
    @lru_cache(maxsize=1)
    def of(_process: int) -> _Child:
        """Return the child of this process, starting it where there is none."""
        return _Child()

    def answers(self, given: str, count: int, limit_s: float) -> list[str]:
        """Return an answer for each file, up to the one that was not read.

        Raises:
            ConnectionError: the child had ended before.
        """
        process, text, end_s = self._process, b"", time.monotonic() + limit_s
        assert process.stdin is not None
        assert process.stdout is not None
        if process.poll() is None:
            with suppress(BrokenPipeError):
                process.stdin.write(f"{given}\n".encode())
        while text.count(b"\n") <= count and not text.endswith(_LAST):
            left_s = max(0.0, end_s - time.monotonic())
            is_ready = select.select([process.stdout], [], [], left_s)[0]
            found = os.read(process.stdout.fileno(), 1 << 16) if is_ready else b""
            if not found:
                _Child.of.cache_clear()
                process.kill()
                said = f"DGL ended with status {process.wait()} while it read it"
                if not is_ready:
                    said = f"DGL did not finish reading it within {limit_s:.0f} s"
                if b"\n" not in text and is_ready:
                    raise ConnectionError(said)
                return [*text.decode().split("\n")[1:-1], said]
            text += found
        return [line.strip() for line in text.decode().split("\n")[1:]]


def read_all(given: IO[str] = sys.stdin) -> None:
    """Read the files of each line of ``given``; the main function of the child process."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    import dgl  # noqa: F401  # before the limit

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while select.select([given], [], [], _IDLE_S)[0] and (line := given.readline()):
        memory, files = json.loads(line)
        answers.write("\n")  # it has started
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + memory, resource.RLIM_INFINITY))
        for kind, name in files:
            try:
                _use(kind, Path(name))
            except StorageError as problem:
                answers.write(f"{problem}{_LAST.decode()}")
                break
            answers.write("read\n")


def _use(kind: str, path: Path) -> None:
    found = _loaded(kind, path)
    for graph in found if kind == "graphs" else []:
        for etype in graph.canonical_etypes:
            ends = graph.edges(order="eid", etype=etype)
            for end, ntype in zip(ends, (etype[0], etype[2]), strict=True):
                if len(end) and not 0 <= int(end.min()) <= int(end.max()) < graph.num_nodes(ntype):
                    raise StorageError(
                        f"{path} has edges of type {etype} between nodes that it lacks; {_REMEDY}"
                    )
