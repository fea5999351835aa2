"""A command on every server of a lab: ranks started by torchrun, their output, and their end together."""

from __future__ import annotations

import json
import os
import random
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TextIO

from dglx_dist.cli.common import LAUNCHED
from dglx_dist.comm.topology import build_rank_environment, copy_environment
from dglx_dist.errors import ConfigError, PeerError
from scripts.netlab import guard
from scripts.netlab.base import Card, Lab, LabError, Server
from scripts.netlab.servers import find_process, wait_until_ended
from scripts.out_files import scratch_folder

_FORMS = (
    "write `dglx train ...`, `python script.py ...`, `python -m module ...`, `script.py ...` "
    "or `-m module ...`"
)


def torchrun_arguments(command: Sequence[str]) -> list[str]:
    """Return what torchrun is to run for ``command``: a script or ``-m`` and a module, and its arguments.

    ``python`` means the Python that runs the lab, whatever stands before or after its name. ConfigError says
    what to write in place of what cannot be started as ranks, or starts ranks itself.
    """
    if not command:
        raise ConfigError(f"there is no command to run; {_FORMS}")
    first, arguments = command[0], list(command[1:])
    program = Path(first).name
    if program == "dglx":
        return _dglx(arguments)
    if re.fullmatch(r"python(\d(\.\d+)?)?", program):
        return _python(command, arguments)
    if first == "-m" or first.endswith(".py") or _is_program(first):
        return _python(command, list(command))
    if program in ("torchrun", "accelerate", "mpirun", "sh", "bash"):
        raise ConfigError(
            f"{' '.join(command)!r}: the lab starts torchrun on each server itself; leave {program} and its "
            f"options out: {_FORMS}"
        )
    raise ConfigError(f"{first!r} is nothing that torchrun can start as ranks; {_FORMS}")


def _dglx(arguments: list[str]) -> list[str]:
    name = next((word for word in arguments if not word.startswith("-")), "")
    if name != "train":
        raise ConfigError(
            f"`dglx {name}` runs in one process and needs no lab; run it by itself, and `dglx train` here"
        )
    return _without_ranks(["-m", "dglx_dist.cli", LAUNCHED, *arguments])


def _python(command: Sequence[str], arguments: list[str]) -> list[str]:
    if arguments[:1] == ["-m"] and len(arguments) > 1:
        return _without_ranks(arguments) if arguments[1] == "dglx_dist.cli" else arguments
    if not arguments or arguments[0].startswith("-"):
        allowed = "torchrun starts a script or a module, without options of Python"
        raise ConfigError(f"{' '.join(command)!r}: {allowed}; {_FORMS}")
    if not Path(arguments[0]).is_file() and not _is_program(arguments[0]):
        raise ConfigError(
            f"the script {arguments[0]!r} does not exist in {Path.cwd()}; give its path from "
            "here, or a whole one"
        )
    return arguments


def _is_program(path: str) -> bool:
    return Path(path, "__main__.py").is_file()


def _without_ranks(arguments: list[str]) -> list[str]:
    if any(word == "--ranks" or word.startswith("--ranks=") for word in arguments):
        raise ConfigError(
            "`dglx train --ranks` would start ranks of its own; leave it out: the lab starts --servers times "
            "--ranks-per-server of them, which are options of the lab and stand before --"
        )
    return arguments


# Below the ports that Linux gives to outgoing connections and to whoever asks for any port.
_PORTS, _TRIES = range(20_000, 32_000), 200


def free_port(lab: Lab) -> int:
    """Return a port at which server 0 can listen on every address; LabError: none was found."""
    # Seeded by nothing: two labs that start at once shall not look at the same ports in the same order.
    for number in random.SystemRandom().sample(_PORTS, min(_TRIES, len(_PORTS))):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # In a network of its own nobody but this package's commands listens.
            if lab.kind == "loopback":
                probe.bind(("", number))
            return number
    raise LabError(
        f"no free port between {_PORTS[0]} and {_PORTS[-1]} after {_TRIES} tries; end other programs of user "
        f"{os.getuid()} that listen there"
    )


_LINE_LIMIT = 1 << 20


def relay(
    source: IO[bytes], screen: threading.Lock | None, stream: TextIO, prefix: str, log: IO[bytes] | None
) -> threading.Thread:
    """Take the lines of a pipe until it closes, on the thread that is returned, so that no writer waits.

    They go to ``stream`` behind ``prefix``, one at a time by ``screen`` (None: not shown), and as they are to
    ``log``. When a disk is full, or nobody reads the stream any more, they are lost.
    """

    def run() -> None:
        with source:
            while line := source.readline(_LINE_LIMIT):
                if log is not None:
                    with suppress(OSError, ValueError):
                        log.write(line)
                if screen is not None:
                    text = line.decode(errors="replace").removesuffix("\n")
                    with screen, suppress(OSError, ValueError):
                        stream.write(f"{prefix}{text}\n")
                        stream.flush()

    thread = threading.Thread(target=run, name="lab output", daemon=True)
    thread.start()
    return thread


GRACE_S = 8.0
"""Seconds that a launcher has to end its ranks before they are killed."""


class Launcher:
    """``command`` on ``server``, which ends with this object's process or when it is told to.

    ``screen``, ``log``: as of :func:`relay`; ``failure_file``: what it writes when a rank of its own failed.
    """

    def __init__(
        self,
        server: Server,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        screen: threading.Lock | None,
        log: Path | None,
        failure_file: Path,
    ) -> None:
        self.server = server
        self._failure_file = failure_file
        self._told_to_end = False
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        # Not buffered: each line is one call of the system, which keeps lines of several threads apart.
        self._log = None if log is None else log.open("wb", buffering=0)
        # Server 0 keeps the terminal, where there is one; a log wants what it writes too. Anywhere else its
        # lines go through the screen as the others' do, which would otherwise come in the middle of them.
        keeps = server.number == 0 and screen is not None and log is None
        self._process = subprocess.Popen(
            server.inside([sys.executable, "-I", "-S", guard.__file__, str(GRACE_S), *command]),
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=None if keeps and sys.stdout.isatty() else subprocess.PIPE,
            stderr=None if keeps and sys.stderr.isatty() else subprocess.PIPE,
            # Ctrl-C is for this process, which ends the command in order.
            start_new_session=True,
        )
        prefix = f"server {server.number} | " if server.number else ""
        pipes = ((self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr))
        self._relays = [relay(pipe, screen, stream, prefix, self._log) for pipe, stream in pipes if pipe]

    def poll(self) -> int | None:
        """Return the exit code once everything on this server has ended."""
        return self._process.poll()

    def end(self) -> None:
        """Let the guard end everything on this server; returns at once. May be called again."""
        if self._process.poll() is None:
            self._told_to_end = True
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()

    def stop(self) -> None:
        """End everything on this server and close the files after the last lines. May be called again."""
        self.end()
        try:
            self._process.wait(GRACE_S + 5.0)
        except subprocess.TimeoutExpired:
            # Ranks are in sessions of their own: with the guard alone they would lose who ends them.
            left = []
            for pid in (self._process.pid, *guard.descendants(self._process.pid)):
                with suppress(ProcessLookupError):
                    left.append(find_process(pid))
            for process in left:
                process.kill()
            wait_until_ended(left)
            self._process.wait()
        for thread in self._relays:
            thread.join(5.0)
        if self._log is not None:
            self._log.close()

    def failed_by_itself(self) -> bool:
        """Whether it has ended with a code that is not 0 and not because of :meth:`end`."""
        return self.poll() not in (None, 0) and (not self._told_to_end or self._failure_file.exists())

    def failure(self, seen: float) -> dict[str, Any]:
        """Return how it failed, once :meth:`failed_by_itself`; ``seen``: in which second of the clock.

        JSON values: message, exit_code, lost_a_peer (whether it failed because another rank had) and second.
        """
        code = self._process.returncode
        report: dict[str, Any] = {
            "message": f"its launcher ended with code {code}; see its output",
            "exit_code": code if code >= 0 else 128 - code,
            "lost_a_peer": False,
            "second": int(seen),
        }
        with suppress(FileNotFoundError):
            report = json.loads(self._failure_file.read_text())
        return report | {"message": f"server {self.server.number}: {report['message']}"}


_SETTLE_S = 2.0
_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class LabRun:
    """A command that has ended."""

    exit_code: int
    """0, that of the rank that failed first, or 128 + the signal that ended it."""
    seconds: float
    """From the start of the launchers to the end of the last: starting Python and torch included."""
    cards_before: tuple[Card, ...]
    """(S,) read just before; empty on plain loopback."""
    cards_after: tuple[Card, ...]
    """(S,) read just after."""
    trace_folder: Path | None
    """Folder of the traces that sessions wrote, if tracing was requested."""
    failure: str | None
    """Error message for the user, or None on success."""


class Started:
    """A command that runs; a context manager that ends it. Made by :func:`start`.

    Not for several threads at once.
    """

    def __init__(self, launchers: Sequence[Launcher], closing: ExitStack) -> None:
        self._launchers, self._closing = launchers, closing
        self._failed: dict[Launcher, float] = {}
        """Those that failed by themselves and when that was seen, in this order."""
        self._stop_at: float | None = None
        self._code: int | None = None
        self.failure: str | None = None
        """Error message for the user after the end of the command, or None on success."""

    def poll(self) -> int | None:
        """Return the exit code once the launchers of all servers have ended, None before; never waits long.

        When one of them has failed, the others have a moment to end by themselves, so that a cause is not
        ended before it is told; then they are ended. Somebody must therefore poll.
        """
        if self._code is not None:
            return self._code
        for launcher in self._launchers:
            if launcher.failed_by_itself():
                self._failed.setdefault(launcher, time.time())
        running = self._running()
        if running and self._failed:
            self._stop_at = self._stop_at or time.monotonic() + _SETTLE_S
            if time.monotonic() >= self._stop_at:
                for launcher in running:
                    launcher.end()
        if running:
            return None
        return self._finish()

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait until all launchers have ended; return the exit code. PeerError names those that are late."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                late = ", ".join(str(launcher.server.number) for launcher in self._running())
                self.stop()
                raise PeerError(
                    f"the command had not ended after {timeout_s:g} s on server {late}; all of it was ended. "
                    "Allow it more time, or look at its output for what it waits for"
                )
            time.sleep(_POLL_S)
        return code

    def stop(self) -> None:
        """End the command on all servers; returns when nothing of it is left. May be called at any time."""
        for launcher in self._running():
            launcher.end()
        if self._code is None:
            self._finish()

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _running(self) -> list[Launcher]:
        return [launcher for launcher in self._launchers if launcher.poll() is None]

    def _finish(self) -> int:
        for launcher in self._launchers:
            launcher.stop()
        failures = [launcher.failure(seen) for launcher, seen in self._failed.items()]
        self._code = 0 if all(launcher.poll() == 0 for launcher in self._launchers) else 1
        if failures:
            # A cause comes before what it caused.
            first = min(failures, key=lambda one: (one["lost_a_peer"], one["second"]))
            self._code, self.failure = int(first["exit_code"]), str(first["message"])
        self._closing.close()
        return self._code


def start(
    lab: Lab,
    command: Sequence[str],
    *,
    ranks_per_server: int,
    environment: Mapping[str, str | None] | None = None,
    trace: Path | None = None,
    log_folder: Path | None = None,
    show: bool = True,
) -> Started:
    """Start ``command`` under torchrun on every server of ``lab``; node i of torchrun is server i.

    Ranks meet at server 0, find their card in GLOO_SOCKET_IFNAME, and have as many threads as their share of
    their server's cores, unless OMP_NUM_THREADS is set. What they start ends with them, and all of it with
    this process, however that ends. ``lab`` must stay open until then.

    Args:
        command: As :func:`torchrun_arguments` reads it.
        environment: Variables beside this process's own, which they override; None unsets one.
        trace: Folder for what each session writes when it closes.
        log_folder: Folder for ``server-<i>.log``, all output of each server; None: no files.
        show: Whether output is shown: server 0's as it is, the others' lines behind their server's name.
    """
    if ranks_per_server < 1:
        raise ConfigError(f"ranks_per_server={ranks_per_server}: each server has at least one rank")
    arguments = torchrun_arguments(command)
    extra = dict(environment or {})
    if trace is not None:
        trace.mkdir(parents=True, exist_ok=True)
        extra["DGLX_TRACE"] = str(trace.absolute())
    with ExitStack() as undo:
        folder = undo.enter_context(scratch_folder())
        port, screen = free_port(lab), threading.Lock() if show else None
        launchers = []
        own = {"DGLX_SECRET": secrets.token_hex(32), **extra}
        for server in lab.servers:
            failure_file = folder / f"server-{server.number}.json"
            meeting = ("--master-addr", lab.servers[0].address, "--master-port", str(port))
            launcher = Launcher(
                server,
                [
                    *(sys.executable, "-m", "dglx_dist.cli.torchrun", "--failure-file", str(failure_file)),
                    *("--nnodes", str(len(lab.servers)), "--node-rank", str(server.number)),
                    *("--nproc-per-node", str(ranks_per_server), *meeting, "--local-addr", server.address),
                    *arguments,
                ],
                with_changes(server_environment(server, ranks_per_server), own),
                screen=screen,
                log=None if log_folder is None else log_folder / f"server-{server.number}.log",
                failure_file=failure_file,
            )
            launchers.append(launcher)
            # Called first when something here goes wrong, and once more, without effect, at the end.
            undo.callback(launcher.stop)
        return Started(launchers, undo.pop_all())


def run(lab: Lab, command: Sequence[str], *, timeout_s: float | None = None, **how: Any) -> LabRun:
    """Run ``command`` as :func:`start` does (``how``), and wait as :meth:`Started.wait`."""
    before, begin = lab.cards(), time.monotonic()
    with start(lab, command, **how) as started:
        code = started.wait(timeout_s)
    return LabRun(
        exit_code=code,
        seconds=time.monotonic() - begin,
        cards_before=before,
        cards_after=lab.cards(),
        trace_folder=how.get("trace"),
        failure=started.failure,
    )


def server_environment(server: Server, ranks: int) -> dict[str, str]:
    """Return the whole environment of the launcher and the ``ranks`` ranks on ``server``."""
    inherited = copy_environment()
    if inherited.get("DGLX_RANKS_PER_SERVER"):
        raise ConfigError(
            f"DGLX_RANKS_PER_SERVER={inherited['DGLX_RANKS_PER_SERVER']!r} would cut the lab's servers "
            "further; unset it and say --servers and --ranks-per-server"
        )
    threads = max(int(min(len(server.cores), server.cpu_share)) // ranks, 1)
    card = server.device or "lo"
    # Torch asks for the name of each address in its IPv6 form, which has none here, and would warn of it.
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"} if server.device else {}
    return {
        # A rank's lines would otherwise come in large pieces, and not at all when it is killed.
        "PYTHONUNBUFFERED": "1",
        **quiet,
        **build_rank_environment(ranks, environment={"OMP_NUM_THREADS": str(threads), **inherited}),
        "GLOO_SOCKET_IFNAME": card,
        "NCCL_SOCKET_IFNAME": card,
        # What a failed rank leaves its neighbours for an orderly end; seconds.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5",
    }


def with_changes(environment: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return ``environment`` with ``changes``; None unsets a variable."""
    return {name: value for name, value in {**environment, **changes}.items() if value is not None}
