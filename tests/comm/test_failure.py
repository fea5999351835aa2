"""Tests of the messages and the end of the other ranks when a rank raises, is killed or never comes."""

import atexit
import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from dglx_dist.comm.collectives import barrier, sum_over_ranks
from dglx_dist.comm.session import current_session, start_session
from dglx_dist.errors import ConfigError, PeerError
from tests.helpers import refusal
from tests.helpers.ranks import RankError, run_ranks, start_ranks
from tests.helpers.scripts import start_script

LIMIT_S = 30.0
SLOW_LOOK_S = 5.0
"""Seconds between torchrun's looks; at 0.1 it may end a survivor before that has said whom it misses."""
REPOSITORY = Path(__file__).resolve().parents[2]


def _reduce_until_killed() -> str:
    session = start_session(timeout_s=100)
    step = 0
    while True:
        if session.topology.rank == 1 and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            sum_over_ranks(torch.ones(1000), session, phase="dense")
        except PeerError as error:
            session.close(failed=True)
            return f"{time.monotonic()} {error}"
        step += 1


def test_all_reduce_with_a_killed_rank_names_it() -> None:
    started = time.monotonic()
    outcomes = start_ranks(_reduce_until_killed, 3)
    assert outcomes[1].exitcode == -signal.SIGKILL
    # Rank 0 and 2 may each see the other leave too, but the dead one is always named.
    for item in (outcomes[0], outcomes[2]):
        at_s, _, text = item.result.partition(" ")
        assert "all-reduce (dense)" in text
        assert re.search(r"rank 1 on \S+", text)
        assert float(at_s) - started < LIMIT_S + 15  # the start of the ranks included


def _outlive_a_killed_rank() -> list[str]:
    """Rank 3 is killed; ranks 1 and 2 notice, fail and end; then rank 0 looks, and ends itself."""
    session = start_session(timeout_s=100)
    rank, store = session.topology.rank, session.store
    assert store is not None
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank:
        session.fail(PeerError("rank 3 did not answer"))
        session.close(failed=True)
        return []
    while not (store.has_ended(1) and store.has_ended(2)):
        time.sleep(0.01)
    message = [session.describe_failure("the sum")]
    session.close(failed=True)
    return [*message, session.describe_failure("the sum")]


def test_only_the_killed_rank_is_accused_not_those_that_ended_because_of_it() -> None:
    message, after = start_ranks(_outlive_a_killed_rank, 4)[0].result
    assert re.fullmatch(
        r"the sum: rank [12] failed first: PeerError: rank 3 did not answer; "
        r"rank 3 on \S+ did not answer within 5 s and is probably dead",
        message,
    )
    # What this rank cannot ask for any more, nobody failed to answer.
    assert re.fullmatch("the sum: rank [12] failed first: PeerError: rank 3 did not answer", after)


def _outlive_a_rank_that_was_told_to_end() -> str:
    session = start_session(timeout_s=100)
    barrier(session, "ready")
    if session.topology.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(60)
    while session.store is not None and not session.store.has_ended(1):
        time.sleep(0.01)
    time.sleep(0.2)
    message = session.describe_failure("the sum")
    session.close(failed=True)
    return message


def test_error_names_a_rank_that_was_ended_alone() -> None:
    message = start_ranks(_outlive_a_rank_that_was_told_to_end, 2)[0].result
    assert re.fullmatch(r"the sum: rank 1 on \S+ has ended", message)


def _part_ways() -> str:
    session = start_session(timeout_s=4)
    if session.topology.rank == 2:
        message = refusal(lambda: barrier(session, "another place"), PeerError)
    else:
        message = refusal(lambda: sum_over_ranks(torch.ones(3), session, phase="dense"), PeerError)
    session.close()
    return message


def test_a_rank_that_lives_but_is_elsewhere_is_named() -> None:
    first, second, third = run_ranks(_part_ways, 3)
    elsewhere = r"rank 2 on \S+ is not in it, but waits at '(another place|the end of the session)'"
    for case in (first, second):
        assert re.search(elsewhere, case)
    # The others gave up the sum and went to the end, or one of them was not there yet.
    assert re.search("rank [01] is at 'the end of the session'|ranks missing: [01]", third)


def _come_late() -> str:
    if os.environ["RANK"] in "13":
        return "never came"
    return refusal(lambda: start_session(timeout_s=1.5), PeerError)


def test_missing_ranks_are_listed_at_the_start() -> None:
    results = run_ranks(_come_late, 4)
    assert "ranks missing: 1, 3 (of 4) at 'start' after 1.5 s" in results[0]
    assert "ranks missing: 1, 3 (of 4)" in results[2]


def _raise_on_two() -> None:
    session = start_session(timeout_s=60)
    if session.topology.rank == 2:
        raise ZeroDivisionError("the batch was empty")
    sum_over_ranks(torch.ones(10), session, phase="dense")


def test_first_error_is_shown_first_and_repeated_by_the_others() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(_raise_on_two, 3)
    text = str(caught.value)
    assert text.startswith("rank 2 of 3 raised ZeroDivisionError: the batch was empty")
    assert text.count("rank 2 failed first: ZeroDivisionError: the batch was empty") >= 1


def _disagree() -> None:
    start_session(seed=int(os.environ["RANK"]))


def test_ranks_that_disagree_are_refused() -> None:
    with pytest.raises(
        RankError, match="ConfigError: ranks disagree on the seed: rank 0 has 0, rank 1 has 1; pass the same"
    ):
        run_ranks(_disagree, 2)


def test_one_rank_may_end_long_before_another() -> None:
    assert run_ranks(_read_late, 2) == ["done", "read"]


def _read_late() -> str:
    with start_session() as session:
        session.rpc.register("rows", lambda _name, _arrays: [np.arange(5)])
        barrier(session, "registered")
        if session.topology.rank == 0:
            return "done"
        for _ in range(200):
            assert session.rpc.call(0, "rows", "", [], phase="p")[0].tolist() == [0, 1, 2, 3, 4]
        return "read"


SCRIPT = """
import os, sys, threading
import torch
from dglx_dist.comm.session import start_session
from dglx_dist.comm.collectives import sum_over_ranks, barrier

session = start_session(timeout_s=200)
barrier(session, "ready")
rank = session.topology.rank
if rank == {victim}:
    os.kill(os.getpid(), {signal})
print("rank", rank, "waits", flush=True)
{wait}
"""
SUM = 'sum_over_ranks(torch.ones(4), session, phase="dense")'


def _torchrun(script: Path, text: str) -> subprocess.CompletedProcess[str]:
    script.write_text(text)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--monitor-interval", str(SLOW_LOOK_S), str(script)]
    variables = dict(os.environ, PYTHONPATH=str(REPOSITORY), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.wide
@pytest.mark.parametrize(
    "wait", [SUM, "threading.Event().wait()"], ids=["in a collective", "at something else"]
)
def test_torchrun_survivor_ends_in_time_and_names_the_killed(tmp_path: Path, wait: str) -> None:
    started = time.monotonic()
    script = SCRIPT.format(victim=1, signal=int(signal.SIGKILL), wait=wait)
    done = _torchrun(tmp_path / "train.py", script)
    assert done.returncode != 0
    assert time.monotonic() - started < LIMIT_S + 30  # torchrun's own start included
    assert re.search(r"rank 1 on \S+ (did not answer|closed)", done.stderr), done.stderr


ANSWER_AT_EXIT = """
import time
if rank == 1:
    while not session.store.raw.check(["barrier/2/0"]):  # until rank 0 is in its exit handlers
        time.sleep(0.01)
    print("status", session.rpc.get_peer_status([0], 20.0))
print("end of", session.scratch)
"""


def test_rank_whose_script_has_ended_without_close_still_answers_and_ends_cleanly(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(victim=-1, signal=0, wait=ANSWER_AT_EXIT))
    outcomes = start_script(script)
    assert [outcome.exitcode for outcome in outcomes] == [0, 0], outcomes
    assert "status {0: 'the end of the session'}" in outcomes[1].output
    (folder,) = {path for one in outcomes for path in re.findall(r"end of (\S+)\n", one.output)}
    assert not Path(folder).exists()


def _has_default_sigterm() -> bool:
    return signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def _fork() -> list[object]:
    session = start_session(timeout_s=60)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        result = pool.apply(_has_default_sigterm)
    # Leaving the pool sent SIGTERM to its processes, which must have ended them and not this one.
    child = os.fork()
    if child == 0:
        try:
            session.rpc.call(1 - session.topology.rank, "cluster.ping", "", [], phase="p")
        except PeerError:
            session.close()
            with contextlib.suppress(ConfigError):
                current_session()
                os._exit(9)
            atexit._run_exitfuncs()  # as an ordinary end would, which the helper stands in the way of
            os._exit(0 if _has_default_sigterm() else 8)
        os._exit(7)
    _, status = os.waitpid(child, 0)
    barrier(session, "after the child")
    return [result, os.waitstatus_to_exitcode(status), session.scratch.is_dir()]


def _fork_with_early_signal() -> list[object]:
    parent = os.getpid()
    # This handler runs in the forked process before the one of the session, which is registered later.
    os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))
    session = start_session(timeout_s=60)
    child = os.fork()
    if child == 0:
        os._exit(5)
    _, status = os.waitpid(child, 0)
    barrier(session, "after the child")
    return [
        os.waitstatus_to_exitcode(status),
        os.getpid() == parent,
        signal.pthread_sigmask(signal.SIG_BLOCK, []),
    ]


def test_signal_to_forked_process_does_not_reach_the_parent_before_the_session_is_released() -> None:
    assert run_ranks(_fork_with_early_signal, 2, ranks_per_server=1) == [[-signal.SIGTERM, True, set()]] * 2


def test_forked_processes_end_alone_and_let_go_of_the_session() -> None:
    assert run_ranks(_fork, 2, ranks_per_server=1) == [[True, 0, True]] * 2


def _own_handler_later() -> list[bool]:
    session = start_session(timeout_s=60)
    message = threading.Event()

    def mine(_number: int, _frame: object) -> None:
        message.set()

    signal.signal(signal.SIGTERM, mine)
    os.kill(os.getpid(), signal.SIGTERM)
    assert message.wait(20)
    barrier(session, "after the signal")
    session.close()
    return [message.is_set(), signal.getsignal(signal.SIGTERM) is mine]


def test_handler_that_the_user_sets_later_is_left_alone() -> None:
    assert run_ranks(_own_handler_later, 2) == [[True, True]] * 2


def _sigterm_while_others_compute() -> None:
    session = start_session(timeout_s=60)
    barrier(session, "ready")
    if session.topology.rank == 1:
        threading.Event().wait(8)
    threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    barrier(session, "rank 1 is not here yet")


def test_rank_that_is_told_to_end_does_not_blame_a_rank_that_computes() -> None:
    outcomes = start_ranks(_sigterm_while_others_compute, 2)
    assert outcomes[0].exitcode == 128 + signal.SIGTERM
    assert "rank 0 was told to end (SIGTERM): no rank is known to have ended" in outcomes[0].output
    assert "computes" not in outcomes[0].output


def _taken_wakeup() -> None:
    session = start_session(timeout_s=60)
    barrier(session, "ready")
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)  # as asyncio does
    os.kill(os.getpid(), signal.SIGTERM)
    assert os.read(read, 1)
    threading.Event().wait(60)


def test_sigterm_ends_a_rank_whose_wakeup_descriptor_is_somebody_elses() -> None:
    outcomes = start_ranks(_taken_wakeup, 2)
    assert [outcome.exitcode for outcome in outcomes] == [128 + signal.SIGTERM] * 2


def _wait_for_sigterm(folder: str) -> None:
    session = start_session(timeout_s=60)
    Path(folder, str(session.topology.rank)).write_text(str(session.scratch))
    barrier(session, "ready")
    if session.topology.rank == 0:
        # As torchrun does to a rank whose peer was killed.
        os.kill(os.getpid(), signal.SIGTERM)
    else:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait(60)


def test_a_rank_ended_by_sigterm_leaves_no_folder_behind(tmp_path: Path) -> None:
    outcomes = start_ranks(_wait_for_sigterm, 2, args=(str(tmp_path),))
    assert [outcome.exitcode for outcome in outcomes] == [128 + signal.SIGTERM, -signal.SIGKILL]
    assert not Path((tmp_path / "0").read_text()).exists()
