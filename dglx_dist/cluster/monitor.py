"""Reads what happens to connections.

pyzmq's own reader does the same, but imports asyncio, for which every start of a worker would pay.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import zmq

_EVENT = struct.Struct("=Hi")


class Event(NamedTuple):
    """One event of a monitored socket."""

    number: int
    """One of ``zmq.EVENT_...``."""
    value: int
    """What it means depends on the event: mostly a file descriptor or an error number."""


def read_event(monitor: zmq.Socket[Any]) -> Event:
    """Wait for the next event at the socket that ``get_monitor_socket`` returned, and read it.

    Raises:
        zmq.Again: nothing came within the socket's own time-out.
    """
    head, _endpoint = monitor.recv_multipart()
    return Event(*_EVENT.unpack(head))
