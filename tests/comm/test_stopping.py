"""Ranks agree on the point at which all of them stop, however far apart they are."""

import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from dglx_dist.comm.collectives import barrier, gather_int64
from dglx_dist.comm.session import start_session
from dglx_dist.comm.stopping import SAME_INTERRUPT_S
from tests.helpers.ranks import run_ranks

ROUNDS, MAX_POINTS = 10, 10_000


def stop_again_and_again() -> list[list[int]]:
    """By round: the points that each rank has passed, none of which waits for another rank."""
    results = []
    with start_session(timeout_s=60) as session:
        stop, rank = session.stop_point, session.topology.rank
        for number in range(ROUNDS):
            shared, own = np.random.default_rng(number), np.random.default_rng([number, rank])
            asks = shared.integers(0, 2, size=3)
            stop.open()
            barrier(session, "all are open")
            if number == 0:
                # Training that failed on the ranks at different points, and is tried again.
                for _ in range(30 * rank):
                    stop.should_stop()
                stop.close(failed=True)
                barrier(session, "failed")
                stop.open()
                barrier(session, "all are open again")
            before = stop._num_passed
            asking = threading.Thread(target=stop.ask)
            at = int(own.integers(1, 20)) if asks[rank] or (not asks.any() and rank == 2) else 0
            for point in range(1, MAX_POINTS):
                if point == at:
                    asking.start()
                time.sleep(float(own.uniform(0, 0.002)))
                if stop.should_stop():
                    break
            stop.close()
            results.append(gather_int64([stop._num_passed - before, stop.is_over], session).ravel().tolist())
            if at and asking.ident is not None:
                asking.join()
        # Rank 1 is not in training: nobody stops, and who asks is told so.
        if rank != 1:
            stop.open()
        barrier(session, "not all are open")
        request = stop.ask() if rank == 2 else False
        barrier(session, "asked")
        assert not request
        assert not stop.should_stop()
        stop.close()
    return results


SECOND = """
import os, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
from dglx_dist.comm.session import start_session
with start_session() as session, session.stoppable() as stop:
    os.kill(os.getpid(), signal.SIGINT)
    while not stop.should_stop():
        time.sleep(0.01)
    stop.close()
    time.sleep(SAME_INTERRUPT_S + 0.2)  # saves
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
"""


LATE = """
import os, signal
from dglx_dist.comm import session as module
with module.start_session() as session:
    with session.stoppable() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        while not stop.should_stop():
            pass
    session._on_signal(signal.SIGTERM)  # a launcher's copy
    print("goes on", flush=True)
    module._IGNORE_SIGNALS_S = 0.0
    session._on_signal(signal.SIGTERM)
    print("not reached")
"""


@pytest.mark.wide
def test_a_signal_long_after_the_stop_ends_a_rank_that_has_gone_on() -> None:
    command = [sys.executable, "-c", LATE]
    done = subprocess.run(command, timeout=50, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "goes on\n"), done.stderr


def test_a_second_interrupt_ends_a_rank_that_is_saving() -> None:
    command = SECOND.replace("SAME_INTERRUPT_S", str(SAME_INTERRUPT_S))
    done = subprocess.run([sys.executable, "-c", command], timeout=50, check=False)
    assert done.returncode == 128 + signal.SIGINT


def test_all_stop_at_one_point() -> None:
    first, second, third = run_ranks(stop_again_and_again, 3)
    assert first == second == third
    counts = np.array(first).reshape(ROUNDS, 3, 2)
    assert (counts[:, :, 0] == counts[:, :1, 0]).all(), counts[:, :, 0]
    assert (counts[:, :, 0] < MAX_POINTS - 1).all()
    assert counts[:, :, 1].all()
