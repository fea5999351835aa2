"""The lock of shared rows: many readers or one writer, and a writer is not starved."""

import threading

import numpy as np

from dglx_dist.strategies.serverless.graph_rows import SharedRows


def test_rows_are_never_seen_half_written() -> None:
    shared = SharedRows(np.zeros((4, 1000)))
    torn: list[int] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            with shared.reading() as rows:
                torn.extend(int(row.min() != row.max()) for row in rows)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for number in range(60):
        with shared.writing() as rows:
            for column in range(0, 1000, 100):
                rows[number % 4, column : column + 100] = number
    stop.set()
    for reader in readers:
        reader.join()
    assert torn
    assert not any(torn)


def test_readers_share_and_a_waiting_writer_goes_before_new_readers() -> None:
    shared = SharedRows(np.zeros((1, 1)))
    order: list[str] = []

    def write() -> None:
        with shared.writing():
            order.append("writer")

    def read() -> None:
        with shared.reading():
            order.append("late reader")

    with shared.reading(), shared.reading():
        writer = threading.Thread(target=write)
        writer.start()
        while not shared._writers_waiting:
            pass
        reader = threading.Thread(target=read)
        reader.start()
        assert order == []
    writer.join()
    reader.join()
    assert order == ["writer", "late reader"]


def test_a_failure_inside_frees_the_rows() -> None:
    shared = SharedRows(np.zeros((1, 1)))
    for enter in (shared.reading, shared.writing):
        try:
            with enter():
                raise KeyError
        except KeyError:
            pass
    with shared.writing() as rows:
        rows[0] = 1
    assert shared.array[0, 0] == 1
