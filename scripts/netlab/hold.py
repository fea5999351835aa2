"""The first process of an emulated server; a program, run by its path.

    python -I -S hold.py NUMBER

Says ``ready NUMBER`` and stays while the other end of its standard input is open, or for good once it has
read ``stay``. A shell would not do: it takes the end of an orphan for the end of its input. Needs the
standard library alone, so that it costs milliseconds.
"""

from __future__ import annotations

import os
import signal
import sys

STAY = b"stay\n"


def main(number: str) -> None:
    """Announce ``number``, then wait as said above."""
    # Orphans come to the first process; ignored children leave no zombies.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.write(1, f"ready {number}\n".encode())
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    command = os.read(0, len(STAY))
    while command == STAY:
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1])
