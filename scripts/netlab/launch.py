"""A command on every server of a lab, its ranks started by torchrun and ended together."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from dglx_dist.comm.topology import inherited_environment, rank_environment
from dglx_dist.errors import ConfigError, PeerError
from scripts.netlab.alive import scratch_folder
from scripts.netlab.base import Card, Lab, Server
from scripts.netlab.command import torchrun_arguments
from scripts.netlab.output import Screen
from scripts.netlab.ports import Port, claim_port, nobody_listens
from scripts.netlab.process import Failure, Launcher

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
    """What the sessions of the ranks wrote, if it was asked for."""
    failure: str | None
    """What to tell the user; None when all is well."""


class Started:
    """A command that runs; a context manager that ends it. Made by :func:`start`.

    Not for several threads at once.
    """

    def __init__(self, launchers: Sequence[Launcher], closing: ExitStack) -> None:
        self._launchers, self._closing = tuple(launchers), closing
        self._failed: dict[Launcher, float] = {}
        """Those that failed by themselves and when that was seen, in this order."""
        self._stop_at: float | None = None
        self._code: int | None = None
        self._failure: str | None = None

    @property
    def failure(self) -> str | None:
        """Who failed first and how, once :meth:`poll` has returned a code that is not 0."""
        return self._failure

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
        """Wait until all launchers have ended; return the exit code.

        Raises:
            PeerError: some had not ended ``timeout_s`` seconds from now; they are named, and all were ended.
        """
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
        for launcher in self._launchers:
            launcher.wait_for_end()
        if self._code is None:
            self._finish()

    def __enter__(self) -> Started:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _running(self) -> list[Launcher]:
        return [launcher for launcher in self._launchers if launcher.poll() is None]

    def _finish(self) -> int:
        for launcher in self._launchers:
            launcher.close()
        failures = [launcher.failure(seen) for launcher, seen in self._failed.items()]
        self._code = 0 if all(launcher.poll() == 0 for launcher in self._launchers) else 1
        if failures:
            first = min(failures, key=Failure.order)
            self._code, self._failure = first.exit_code, first.message
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
    this process, however that ends.

    Args:
        lab: Must stay open until the command has ended.
        command: As :func:`scripts.netlab.command.torchrun_arguments` reads it.
        ranks_per_server: At least 1.
        environment: Variables beside this process's own, which they override; None unsets one.
        trace: Folder for what each session writes when it closes; made if need be.
        log_folder: Folder for ``server-<i>.log``, all output of each server; None: no files.
        show: Whether output is shown: server 0's as it is, the others' lines behind their server's name.

    Raises:
        ConfigError: the command cannot be started so, or ``ranks_per_server`` is below 1.
        LabError: no port was free.
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
        port = _claim(lab)
        undo.callback(port.close)
        screen = Screen() if show else None
        launchers = []
        for server in lab.servers:
            launcher = Launcher(
                server,
                _launcher_command(lab, server, port.number, ranks_per_server, folder, arguments),
                with_changes(server_environment(server, ranks_per_server), extra),
                screen=screen,
                log=None if log_folder is None else log_folder / f"server-{server.number}.log",
                failure_file=_failure_file(folder, server),
            )
            launchers.append(launcher)
            # Called first when something here goes wrong, and once more, without effect, at the end.
            undo.callback(launcher.abandon)
        return Started(launchers, undo.pop_all())


def run(
    lab: Lab,
    command: Sequence[str],
    *,
    ranks_per_server: int,
    environment: Mapping[str, str | None] | None = None,
    trace: Path | None = None,
    log_folder: Path | None = None,
    show: bool = True,
    timeout_s: float | None = None,
) -> LabRun:
    """Run ``command`` as :func:`start` does and wait for it; cards are read just before and just after.

    Raises:
        ConfigError: as :func:`start`.
        PeerError: it had not ended after ``timeout_s``; the servers are named, and all of it was ended.
    """
    before, begin = lab.cards(), time.monotonic()
    with start(
        lab,
        command,
        ranks_per_server=ranks_per_server,
        environment=environment,
        trace=trace,
        log_folder=log_folder,
        show=show,
    ) as started:
        code = started.wait(timeout_s)
    seconds = time.monotonic() - begin
    return LabRun(
        exit_code=code,
        seconds=seconds,
        cards_before=before,
        cards_after=lab.cards(),
        trace_folder=trace,
        failure=started.failure,
    )


def server_environment(server: Server, ranks: int) -> dict[str, str]:
    """Return the whole environment of the launcher and the ``ranks`` ranks on ``server``.

    Raises:
        ConfigError: this process's environment cuts machines into virtual servers; the lab has its own.
    """
    inherited = inherited_environment()
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
        **rank_environment(ranks, environment={"OMP_NUM_THREADS": str(threads), **inherited}),
        "GLOO_SOCKET_IFNAME": card,
        "NCCL_SOCKET_IFNAME": card,
        # What a failed rank leaves its neighbours for an orderly end; seconds.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5",
    }


def with_changes(environment: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return ``environment`` with ``changes``; None unsets a variable."""
    return {name: value for name, value in {**environment, **changes}.items() if value is not None}


def _claim(lab: Lab) -> Port:
    if lab.kind == "loopback":
        return claim_port("loopback", is_free=nobody_listens)
    # A network of its own: nobody but this package's commands listens there.
    return claim_port(lab.name, is_free=lambda number: True)


def _launcher_command(
    lab: Lab, server: Server, port: int, ranks: int, folder: Path, arguments: Sequence[str]
) -> list[str]:
    return [
        *(sys.executable, "-m", "dglx_dist.cli.torchrun"),
        *("--failure-file", str(_failure_file(folder, server))),
        *("--nnodes", str(len(lab.servers)), "--node-rank", str(server.number)),
        *("--nproc-per-node", str(ranks)),
        *("--master-addr", lab.servers[0].address, "--master-port", str(port)),
        *("--local-addr", server.address),
        *arguments,
    ]


def _failure_file(folder: Path, server: Server) -> Path:
    return folder / f"server-{server.number}.json"
