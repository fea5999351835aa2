"""A process that holds namespaces open, and the kernel's promise to end all that is in them with it."""

from __future__ import annotations

import os
import re
import select
import shlex
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from typing import IO

from dglx_dist.errors import LabError
from scripts.netlab import hold
from scripts.netlab.pids import Process, find

_START_S = 30.0
_END_S = 10.0
# The shell is the first process of its own process namespace and must say which number it has outside;
# /proc is still the one of outside here.
_WHO = "read outside rest < /proc/self/stat"


class Holder:
    """Namespaces that are held open by one end of a pipe, of which this process has the other.

    When this process ends, however it ends, the kernel ends all that runs in the namespaces, and the
    namespaces with it.

    Args:
        what: Whom it holds, for messages.
        namespaces: Options of ``unshare``, e.g. ``--net``; a process namespace is always among them.
        setup: Commands to run inside first.

    Raises:
        LabError: the namespaces were refused or a command failed.
    """

    def __init__(self, what: str, namespaces: Sequence[str], setup: Sequence[Sequence[str]]) -> None:
        wait = f'exec {shlex.join([sys.executable, "-I", "-S", hold.__file__])} "$outside"'
        lines = [_WHO, *(shlex.join(command) for command in setup), wait]
        enter = ["unshare", *namespaces, "--pid", "--fork", "--kill-child", "sh", "-ec", "\n".join(lines)]
        self._pipe = subprocess.Popen(
            enter,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            # Ctrl-C is for the process that owns the lab; it takes the servers down in order.
            start_new_session=True,
            cwd="/",  # it may outlive the folder of its maker
        )
        # A child made by fork would keep the pipe, and with it all of this, beyond the end of this process.
        os.register_at_fork(after_in_child=_Forget(self))
        try:
            self.init = self._wait_until_ready(what)
            self.outer = find(self._pipe.pid)
        except BaseException:
            self._let_go()
            raise

    def stay(self) -> None:
        """Let it outlive this process; only killing ``init`` ends it then.

        Raises:
            LabError: it has ended.
        """
        if self._pipe.stdin is None or self._pipe.stdout is None:
            raise LabError("a holder without pipes cannot be told to stay")
        try:
            self._pipe.stdin.write(hold.STAY)
        except BrokenPipeError as error:
            raise LabError(f"process {self.init.pid}, which holds a server, has ended already") from error
        finally:
            self.forget()
        self._pipe.stdout.close()

    def close(self) -> None:
        """End all that runs inside; returns when it has ended."""
        self.init.kill()
        self._let_go()
        wait_until_ended((self.init, self.outer))

    def forget(self) -> None:
        """Close this process's end of the pipe and no more."""
        if self._pipe.stdin is not None:
            self._pipe.stdin.close()

    def _let_go(self) -> None:
        self.forget()
        if self._pipe.poll() is None:
            try:
                self._pipe.wait(timeout=_END_S)
            except subprocess.TimeoutExpired:
                self._pipe.kill()  # --kill-child ends the inside with it
                self._pipe.wait(timeout=_END_S)
        if self._pipe.stdout is not None:
            self._pipe.stdout.close()

    def _wait_until_ready(self, what: str) -> Process:
        stream = self._pipe.stdout
        if stream is None:
            raise LabError(f"{what}: no answer was asked for")
        said = _read_until_ready(stream)
        found = re.search(r"^ready (\d+)$", said, flags=re.MULTILINE)
        if not found:
            raise LabError(f"{what} could not be made: {' '.join(said.split()) or 'no answer'}")
        return find(int(found[1]))


class _Forget:
    """Makes a holder forget its pipe, if it is there still: hooks of fork stay for good, it need not."""

    def __init__(self, holder: Holder) -> None:
        self._holder = weakref.ref(holder)

    def __call__(self) -> None:
        holder = self._holder()
        if holder is not None:
            holder.forget()


def wait_until_ended(processes: Sequence[Process]) -> None:
    """Wait until all have ended.

    Raises:
        LabError: some have not within 10 s; the message names them.
    """
    deadline = time.monotonic() + _END_S
    while left := [process.pid for process in processes if process.alive()]:
        if time.monotonic() > deadline:
            raise LabError(f"processes {left} were killed and have not ended after {_END_S:.0f} s")
        time.sleep(0.005)


def _read_until_ready(stream: IO[bytes]) -> str:
    deadline = time.monotonic() + _START_S
    said = b""
    while not re.search(rb"^ready \d+\n", said, flags=re.MULTILINE):
        readable, _, _ = select.select([stream], [], [], max(deadline - time.monotonic(), 0))
        if not readable:
            return f"{said.decode(errors='replace')} no answer within {_START_S:.0f} s"
        piece = stream.read(4096)  # not buffered: what there is
        if not piece:
            break
        said += piece
    return said.decode(errors="replace")
