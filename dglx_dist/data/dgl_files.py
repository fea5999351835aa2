"""Load files from ``dgl.save_graphs`` and ``save_tensors``, which a child process reads first.

DGL's library checks neither sizes nor ids, and a damaged file may end the process that reads it. The child
process has limited memory and time, and uses the content like the importers.
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
"""Kind of content, ``graphs`` or ``tensors``, and the file."""

_REMEDY = "copy it again, or write it again with DGL"
_START_TIMEOUT_S = 120.0
_BYTES_PER_S = 10 << 20
_MEMORY = 2 << 30
"""Memory for the child process in addition to four times the largest file."""
_IDLE_TIMEOUT_S = 20.0
"""Time without a request after which the child process ends."""
_LAST = b"\t\n"
"""Marker at the end of the last answer."""
_LOCK = threading.Lock()
_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from dglx_dist.data.dgl_files import read_all
read_all()
"""


def load_graphs(path: Path) -> list[Any]:
    """Load a file's graphs. Call :func:`check_files` before. Raises StorageError if it is damaged."""
    return list(_load("graphs", path))


def load_tensors(path: Path) -> dict[str, Any]:
    """Load a file's tensors. See :func:`load_graphs`."""
    return dict(_load("tensors", path))


def _load(content: str, path: Path) -> Any:
    import dgl
    from dgl.data.utils import load_tensors as read_tensors

    try:
        if content == "graphs":
            return dgl.load_graphs(str(path))[0]
        return read_tensors(str(path))
    except (dgl.DGLError, ValueError, RuntimeError, MemoryError) as problem:
        # DGL's messages are C++ checks with stack traces, so the first line is shown.
        lines = str(problem).splitlines() or [type(problem).__name__]
        reason = lines[0][:200].strip()
        raise StorageError(f"{path} is damaged: {reason}; {_REMEDY}") from problem


def check_files(files: Iterable[DglFile]) -> None:
    """Read the files in a child process, unless they were checked before and have not changed.

    Raises StorageError if a file is missing or cannot be read.
    """
    stamped_files = []
    for content, path in files:
        if not path.is_file():
            raise StorageError(f"{path} is missing; copy it here or partition the graph again")
        status = path.stat()
        stamp = (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        stamped_files.append((content, str(path.absolute()), *stamp))
    if stamped_files:
        _check(tuple(stamped_files))


@lru_cache(maxsize=1024)
def _check(stamped_files: Sequence[tuple[str, str, int, int, int]]) -> None:
    """Read the files in the child process. The cache remembers which files could be read."""
    sizes = [size for _, _, size, *_ in stamped_files]
    files = [(content, path) for content, path, *_ in stamped_files]
    request = json.dumps([_MEMORY + 4 * max(sizes), files])
    limit_s = _START_TIMEOUT_S + sum(sizes) / _BYTES_PER_S
    with _LOCK:
        try:
            reasons = _Child.of(os.getpid()).answers(request, len(files), limit_s)
        except ConnectionError:  # The child waited too long for a request, and ended.
            reasons = _Child.of(os.getpid()).answers(request, len(files), limit_s)

    for (_, path), reason in zip(files, reasons, strict=False):
        if reason == "read":
            continue
        raise StorageError(reason if path in reason else f"{path} is damaged: {reason}; {_REMEDY}")


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
        """Return this process's child. Start it if there is none."""
        return _Child()

    def answers(self, request: str, count: int, limit_s: float) -> list[str]:
        """Return an answer for each file, up to the first one that could not be read.

        Raises ConnectionError if the child ended before it got the request.
        """
        process = self._process
        text = b""
        end_s = time.monotonic() + limit_s

        assert process.stdin is not None
        assert process.stdout is not None
        if process.poll() is None:
            with suppress(BrokenPipeError):
                process.stdin.write(f"{request}\n".encode())

        while text.count(b"\n") <= count and not text.endswith(_LAST):
            left_s = max(0.0, end_s - time.monotonic())
            is_ready = bool(select.select([process.stdout], [], [], left_s)[0])
            data = os.read(process.stdout.fileno(), 1 << 16) if is_ready else b""
            if not data:
                _Child.of.cache_clear()
                process.kill()
                reason = f"DGL ended with status {process.wait()} while it read the file"
                if not is_ready:
                    reason = f"DGL did not finish reading it within {limit_s:.0f} s"
                # The first line says that the child has got the request.
                if b"\n" not in text and is_ready:
                    raise ConnectionError(reason)
                return [*text.decode().split("\n")[1:-1], reason]

            text += data

        return [line.strip() for line in text.decode().split("\n")[1:]]


def read_all(requests: IO[str] = sys.stdin) -> None:
    """Read the files on each line in ``requests``. This is the child process's main function."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Library output must not be read as an answer.
    import dgl  # noqa: F401  # It is imported before the limit is set.

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while select.select([requests], [], [], _IDLE_TIMEOUT_S)[0] and (line := requests.readline()):
        memory, files = json.loads(line)
        answers.write("\n")  # The line tells that the child has started.
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + memory, resource.RLIM_INFINITY))

        for kind, name in files:
            try:
                _check_file(kind, Path(name))
            except StorageError as problem:
                answers.write(f"{problem}{_LAST.decode()}")
                break
            answers.write("read\n")


def _check_file(kind: str, path: Path) -> None:
    """Raise StorageError if a file with "graphs" or another ``kind`` is damaged.

    DGL checks what it loads, except for the node ids in a graph's edges.
    """
    loaded = _load(kind, path)
    if kind != "graphs":
        return
    for graph in loaded:
        for etype in graph.canonical_etypes:
            source_type, _, destination_type = etype
            sources, destinations = graph.edges(order="eid", etype=etype)
            for ids, ntype in ((sources, source_type), (destinations, destination_type)):
                if not len(ids):
                    continue
                if int(ids.min()) < 0 or int(ids.max()) >= graph.num_nodes(ntype):
                    raise StorageError(f"{path} has edges of type {etype} with unknown nodes; {_REMEDY}")
