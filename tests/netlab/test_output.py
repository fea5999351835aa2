import io
import os
import threading
from pathlib import Path

from scripts.netlab.launch import LogFile, Relay, Screen


class Closed(io.StringIO):
    """A screen that nobody reads any more."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def pipe() -> tuple[io.BufferedReader, int]:
    read, write = os.pipe()
    return os.fdopen(read, "rb"), write


def test_every_line_comes_whole_behind_its_prefix_and_as_it_was_in_the_file(tmp_path: Path) -> None:
    shown, log, screen = io.StringIO(), LogFile(tmp_path / "new" / "server-1.log"), Screen()
    pipes = [pipe() for _ in range(3)]
    relays = [Relay(source, screen, shown, f"server {n} | ", log) for n, (source, _) in enumerate(pipes)]
    lines = 500

    def fill(number: int, end: int) -> None:
        with os.fdopen(end, "wb") as target:
            for line in range(lines):
                target.write(f"{number} {line}\n".encode())
            # More than a pipe holds, and no end of the line.
            target.write(b"x" * 200_000)

    writers = [threading.Thread(target=fill, args=(n, end)) for n, (_, end) in enumerate(pipes)]
    for thread in writers:
        thread.start()
    for thread in writers:
        thread.join(30)
    for relay in relays:
        relay.join(30)
    log.close()
    found = shown.getvalue().splitlines()
    for number in range(3):
        own = [line for line in found if line.startswith(f"server {number} | ")]
        assert own == [
            *(f"server {number} | {number} {line}" for line in range(lines)),
            f"server {number} | " + "x" * 200_000,
        ]
    assert len(found) == 3 * (lines + 1)
    logged = (tmp_path / "new" / "server-1.log").read_bytes()
    assert len(logged) == sum(len(f"{n} {line}\n") for n in range(3) for line in range(lines)) + 600_000


def test_bytes_that_are_no_text_are_shown_as_such() -> None:
    shown = io.StringIO()
    source, end = pipe()
    relay = Relay(source, Screen(), shown, "", None)
    os.write(end, b"\xff\xfe ok\n\n")
    os.close(end)
    relay.join(30)
    assert shown.getvalue() == "\ufffd\ufffd ok\n\n"


def test_a_screen_that_is_gone_and_a_full_disk_stop_nobody() -> None:
    source, end = pipe()
    full = LogFile(Path("/dev/full"))
    relay = Relay(source, Screen(), Closed(), "", full)
    # Writing returns only because the relay goes on reading.
    for _ in range(50):
        os.write(end, b"line\n" * 10_000)
    os.close(end)
    relay.join(30)
    full.close()
