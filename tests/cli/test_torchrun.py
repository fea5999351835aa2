"""The failure that is reported to a user; test_cli.py has the processes that fail."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from dglx_dist.cli import torchrun
from dglx_dist.cli.torchrun import (
    _can_fork,
    _ForkedRank,
    _Signals,
    describe,
    find_first_failure,
    get_exit_code,
    write_failure,
)


def make_failure(folder: Path, rank: int, message: str, second: int, code: int = 2) -> ProcessFailure:
    file = folder / f"{rank}.json"
    extra = {"timestamp": str(second), "py_callstack": ""}
    file.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
    return ProcessFailure(local_rank=rank, pid=100 + rank, exitcode=code, error_file=str(file))


def make_killed(rank: int) -> ProcessFailure:
    return ProcessFailure(local_rank=rank, pid=100 + rank, exitcode=-signal.SIGKILL, error_file="none")


PEER = "PeerError: rank 1 is gone"


def test_the_earliest_failure_that_is_no_consequence_is_told(tmp_path: Path) -> None:
    late, early = (
        make_failure(tmp_path, 0, "DatasetError: late", 20),
        make_failure(tmp_path, 1, "ConfigError: early", 10),
    )
    rank, failure = find_first_failure({0: late, 1: early})
    assert describe(rank, failure) == "rank 1 failed: ConfigError: early"
    assert get_exit_code(failure) == 2
    lost = make_failure(tmp_path, 0, PEER, int(time.time()))
    bad = make_failure(tmp_path, 1, "ValueError: bad", int(time.time()))
    assert find_first_failure({0: lost, 1: bad})[0] == 1
    assert describe(*find_first_failure({0: lost})) == f"rank 0 failed: {PEER}"
    rank, failure = find_first_failure({0: lost, 1: make_killed(1)})
    assert rank == 1
    assert "SIGKILL" in describe(rank, failure)
    assert get_exit_code(failure) == 137
    stuck_since = make_failure(tmp_path, 0, PEER, int(time.time()) - 31)
    assert describe(*find_first_failure({0: stuck_since, 1: make_killed(1)})) == f"rank 0 failed: {PEER}"


def test_a_rank_that_left_no_message_is_named_with_its_code() -> None:
    silent = ProcessFailure(local_rank=0, pid=100, exitcode=3, error_file="none")
    assert "rank 4 (process 100) ended with exit code 3" in describe(4, silent)


def test_a_failure_that_is_written_down_can_be_compared_with_those_of_other_launchers(tmp_path: Path) -> None:
    file = tmp_path / "failure.json"
    write_failure(file, 3, make_failure(tmp_path, 3, "PeerError: rank 1 is gone", 17, code=4))
    assert json.loads(file.read_text()) == {
        "rank": 3,
        "message": "rank 3 failed: PeerError: rank 1 is gone",
        "exit_code": 4,
        "lost_a_peer": True,
        "second": 17,
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3.json", "failure.json"]


def test_a_forked_rank_waits_for_its_environment_and_ends_with_its_launcher() -> None:
    ranks: list[_ForkedRank] = []
    for number in range(2):
        rank = _ForkedRank(number, ranks)
        if rank.pid == 0:
            os._exit(int(os.environ.get("CODE", "1")))
        ranks.append(rank)
    assert ranks[0].wait(0.05) is None
    # As when the launcher is killed: no other rank holds the pipe open.
    os.close(ranks[0]._pipe)
    assert ranks[0].wait(20) == 128 + signal.SIGTERM
    assert ranks[1].poll() is None
    ranks[1].start({"CODE": "7"})
    assert (ranks[1].wait(20), ranks[1].poll()) == (7, 7)


def test_a_rank_that_ends_before_it_is_started_is_told() -> None:
    rank = _ForkedRank(0, [])
    if rank.pid == 0:
        os._exit(0)
    os.kill(rank.pid, signal.SIGKILL)
    assert rank.start({"RANK": "0"}).wait(20) == -signal.SIGKILL
    with pytest.raises(SignalException):
        _Signals()._pass_on(signal.SIGTERM, None)


@pytest.mark.parametrize(
    ("words", "forks"),
    [
        ("-m dglx_dist.cli --launched train data", True),
        ("--nnodes 2 --node-rank 1 --master-addr a --max-restarts 3 -m dglx_dist.cli train data", True),
        ("-m dglx_dist.cli partition train", False),
        ("-m other train", False),
        ("script.py train", False),
        ("--redirects 3 -m dglx_dist.cli train data", False),
        ("--no-python dglx train data", False),
        ("--local-ranks-filter 0 -m dglx_dist.cli train data", False),
    ],
)
def test_only_our_own_command_forks_ranks(words: str, forks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "is_built_for_gpus", lambda: False)
    assert _can_fork(run.parse_args(["--nproc-per-node", "2", *words.split()])) == forks
