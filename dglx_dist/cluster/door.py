"""Lets ranks of the job in, keeps strangers out and logs them: a thread beside the one that serves."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from typing import final

import zmq

from dglx_dist.cluster.auth import Credentials, answer_door, open_door
from dglx_dist.cluster.monitor import read_event

log = logging.getLogger(__name__)

_END, _EVENTS = "inproc://door-end", "inproc://door-events"


@final
class Door:
    """Answers ZeroMQ's question whether a connection is welcome, for all sockets of ``context``.

    Args:
        context: The context of the guarded socket; has one door.
        credentials: What a connection must show.
        guarded: The socket whose connections are watched, not yet bound.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        credentials: Credentials,
        guarded: zmq.Socket[bytes],
    ) -> None:
        self._credentials = credentials
        self._questions = open_door(context)
        self._events = guarded.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED, _EVENTS)
        self._end = context.socket(zmq.PAIR)
        self._end.bind(_END)
        self._ender = context.socket(zmq.PAIR)
        self._ender.connect(_END)
        self._names: dict[int, str] = {}
        self._welcome: set[int] = set()
        self._thread = threading.Thread(target=self._watch, name="dglx-door", daemon=True)
        self._thread.start()

    def passed(self, handle: int) -> None:
        """Note that a message came through the connection of file descriptor ``handle``; any thread."""
        self._welcome.add(handle)

    def close(self) -> None:
        """Close; the guarded socket must be closed already."""
        self._ender.send(b"")
        self._thread.join()
        self._ender.close(0)

    def _watch(self) -> None:
        poller = zmq.Poller()
        for source in (self._questions, self._events, self._end):
            poller.register(source, zmq.POLLIN)
        ready: dict[object, int] = {}
        while self._end not in ready:
            ready = dict(poller.poll())
            if self._questions in ready:
                answer_door(self._questions, self._credentials)
            if self._events in ready:
                self._note()
        for source in (self._questions, self._events, self._end):
            source.close(0)

    def _note(self) -> None:
        event = read_event(self._events)
        handle = int(event.value)
        if event.number == zmq.EVENT_ACCEPTED:
            self._names[handle] = _peer_name(handle)
        elif event.number == zmq.EVENT_DISCONNECTED:
            name = self._names.pop(handle, "")
            # Only who passed the handshake can get a message through, and no rank connects without one.
            if handle in self._welcome:
                self._welcome.discard(handle)
            else:
                log.warning("refused a connection from %s: it does not speak this job's protocol", name)


def _peer_name(handle: int) -> str:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(handle)) as copy:
        host, port, *_ = copy.getpeername()
        return f"{host}:{port}"
    return "an address that is gone"
