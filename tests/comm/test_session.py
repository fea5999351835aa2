"""Sessions: one at a time, options that all ranks must share, scratch folders, network, clean ends."""

import fcntl
import os
import shutil
import signal
import threading
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from dglx_dist.comm import rendezvous as rendezvous_module
from dglx_dist.comm.collectives import barrier, gather_int64
from dglx_dist.comm.rendezvous import choose_listening_address, find_interface_address, read_link_speed
from dglx_dist.comm.session import (
    Scratch,
    check_hellos,
    check_values_equal,
    collect_shared_facts,
    current_session,
    start_session,
)
from dglx_dist.comm.topology import Topology, format_endpoint, read_rendezvous
from dglx_dist.errors import ConfigError, RemoteError
from dglx_dist.graph import shared_memory
from tests.helpers.ranks import run_ranks, start_ranks


def test_one_process_needs_no_launcher() -> None:
    with start_session(strategy="x", seed=3) as session:
        assert (session.topology.world_size, session.seed, session.strategy) == (1, 3, "x")
        assert session.rpc.get_peer_status([0], 1.0) == {0: ""}
        folder = session.scratch
        assert folder.is_dir()
    assert not folder.exists()
    with pytest.raises(ConfigError, match="init"):
        current_session()


def join_a_group_by_hand(store: Path) -> None:
    rank = int(os.environ["RANK"])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID"):
        os.environ.pop(name, None)
    alone = start_session()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    # A rank that is ready first must not end while the other one connects to it.
    dist.barrier()
    message = (
        "has 2 ranks, but this session has 1, so each process would train alone. Start the ranks with "
        "torchrun"
    )
    with pytest.raises(ConfigError, match=message):
        current_session()
    alone.close()
    with pytest.raises(ConfigError, match=message):
        start_session()
    dist.barrier()
    dist.destroy_process_group()


def test_refuses_a_process_group_of_another_size(tmp_path: Path) -> None:
    run_ranks(join_a_group_by_hand, 2, args=(tmp_path / "store",))


def test_there_is_one_at_a_time() -> None:
    with start_session():
        with pytest.raises(ConfigError, match="already open"):
            start_session()
        assert current_session().topology.world_size == 1
    for timeout_s in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="timeout_s"):
            start_session(timeout_s=timeout_s)
    start_session().close()


def _three_sessions() -> list[list[int]]:
    rank, result = int(os.environ["RANK"]), []
    for number in range(3):
        if rank == 0 and number:
            threading.Event().wait(0.3)  # the other is far ahead and finds what the last session left
        with start_session(timeout_s=20, seed=number) as session:
            session.rpc.register("number", lambda _name, _arrays, number=number: [np.array([number])])
            barrier(session, "registered")
            answer = session.rpc.call(1 - rank, "number", "", [], phase="p")[0]
            result.append([int(answer[0]), int(gather_int64([number], session).sum())])
    return result


def test_sessions_follow_each_other_in_a_process() -> None:
    assert run_ranks(_three_sessions, 2) == [[[0, 0], [1, 2], [2, 4]]] * 2


def _folder_and_endpoint() -> list[Any]:
    with start_session() as session:
        secret = session.rpc.credentials.secret.decode()
        shown = any(secret[at : at + 8] in session.scratch.name for at in range(len(secret) - 7))
        return [str(session.scratch), str(session.rpc._servers[0].endpoint), shown]


def test_ranks_of_a_server_share_a_folder_and_all_listen_on_the_rendezvous_interface_only() -> None:
    paths, endpoints, shown = zip(*run_ranks(_folder_and_endpoint, 3, ranks_per_server=2), strict=True)
    assert paths[0] == paths[1] != paths[2]
    assert not any(map(os.path.exists, paths))
    assert all(endpoint.startswith("tcp://127.0.0.1:") for endpoint in endpoints)
    assert len(set(endpoints)) == 3
    assert not any(shown)  # anything of the secret in the folder's name


def test_work_under_way_is_finished_before_the_end_and_its_error_ends_the_session() -> None:
    done: list[str] = []
    alone = Topology(0, 1, (0,))
    with start_session(topology=alone) as session:
        session.before_close.append(lambda: done.append("finished"))
    assert done == ["finished"]

    def fail() -> None:
        raise RemoteError("a push failed")

    session = start_session(topology=alone)
    session.before_close.append(fail)
    with pytest.raises(RemoteError, match="a push failed"):
        session.close()
    session.close()
    with pytest.raises(ConfigError):
        current_session()

    session = start_session(topology=alone)
    session.before_close.append(fail)
    session.close(failed=True)


def make_hello(
    strategy: str = "push_pull", seed: int = 0, curve: bool = False, **options: Any
) -> dict[str, Any]:
    return {"no_trace": "", **collect_shared_facts(strategy, options, seed, curve)}


def test_order_machines_and_objects_do_not_matter() -> None:
    check_hellos([make_hello(depth=2, order="x", memory="4GB"), make_hello(order="x", depth=2, threads=3)])
    check_hellos([make_hello(make=object()), make_hello(make=object())])


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (
            make_hello(),
            "the options: rank 0 has depth=2, rank 2 has depth=nothing; pass the same options",
        ),
        (make_hello("full_graph", depth=2), "same --strategy on all ranks"),
        (make_hello(seed=1, depth=2), "the seed: rank 0 has 0, rank 2 has 1"),
        (make_hello(curve=True, depth=2), "set DGLX_CURVE to the same value"),
        ({**make_hello(depth=2), "no_trace": "the folder is full"}, "the folder is full"),
    ],
)
def test_ranks_that_differ_are_named(other: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_hellos([make_hello(depth=2), make_hello(depth=2), other])


def test_the_last_one_to_leave_removes_the_folder_and_nobody_elses() -> None:
    job = uuid.uuid4().hex[:12]
    first, second, connection = Scratch(job, 0), Scratch(job, 0), Scratch(uuid.uuid4().hex[:12], 0)
    assert first.path == second.path
    (first.path / "rows").write_text("x")
    first.close()
    first.close()
    assert (second.path / "rows").read_text() == "x"
    second.close()
    assert not second.path.exists()
    assert connection.path.is_dir()
    connection.close()


def test_rows_that_ranks_share_are_in_a_folder_on_disk_where_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DGLX_SCRATCH", str(tmp_path))
    with start_session() as session:
        assert session.scratch.parent == tmp_path
        monkeypatch.setattr(shared_memory, "machine_memory", lambda: (0, 0))
        shared_memory.check_memory(session, np.array([0, 1000]), 8, "a tensor", "")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("DGLX_SCRATCH", str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match=r"DGLX_SCRATCH=\S*missing is no writable folder"):
        start_session()


def _open_and_die(job: str) -> None:
    Scratch(job, 3)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("is_open_before", [True, False])
def test_folder_of_a_killed_process_is_removed_by_who_survives_it_or_comes_next(is_open_before: bool) -> None:
    job = uuid.uuid4().hex[:12]
    connection = Scratch(f"other{job}", 0) if is_open_before else None
    (outcome,) = start_ranks(_open_and_die, 1, args=(job,))
    assert outcome.exitcode == -signal.SIGKILL
    connection = connection or Scratch(f"other{job}", 0)
    connection.close()
    assert list(connection.path.parent.glob(f"*{job}-s3")) == []


def test_a_folder_taken_away_before_it_was_locked_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    job = uuid.uuid4().hex[:12]
    real = fcntl.flock
    chosen: list[Path] = []

    def lock(descriptor: int, kind: int) -> None:
        if kind == fcntl.LOCK_SH and not chosen:
            # What a job does that starts at this moment and finds nobody's lock on the folder.
            chosen.extend(Path("/dev/shm").glob(f"*{job}-s0"))
            shutil.rmtree(chosen[0])
        real(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", lock)
    connection = Scratch(job, 0)
    assert chosen == [connection.path]
    (connection.path / "rows").write_text("x")
    connection.close()
    assert not connection.path.exists()


def rendezvous(**variables: str) -> object:
    common = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    return read_rendezvous(common | variables)


def test_the_address_of_the_interface_or_towards_the_rendezvous_is_taken() -> None:
    assert find_interface_address("lo") == "127.0.0.1"
    for variables in ({"GLOO_SOCKET_IFNAME": "lo"}, {}, {"MASTER_ADDR": "localhost"}):
        assert choose_listening_address(rendezvous(**variables)) in ("127.0.0.1", "::1")
    with pytest.raises(ConfigError, match=r"GLOO_SOCKET_IFNAME='nope0'.*known: .*lo"):
        choose_listening_address(rendezvous(GLOO_SOCKET_IFNAME="nope0"))
    with pytest.raises(ConfigError, match=r"MASTER_ADDR='no\.such\.host\.invalid'"):
        choose_listening_address(rendezvous(MASTER_ADDR="no.such.host.invalid"))
    assert format_endpoint("10.0.0.1", 7) == "tcp://10.0.0.1:7"
    assert format_endpoint("fe80::1", 7) == "tcp://[fe80::1]:7"


def test_card_speed_is_read_from_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    for megabits, speed in ((10000, 1.25e9), (0, None)):
        card = SimpleNamespace(speed=megabits)
        monkeypatch.setattr(rendezvous_module.psutil, "net_if_stats", lambda card=card: {"lo": card})
        assert read_link_speed("127.0.0.1") == speed
    assert read_link_speed("192.0.2.1") is None


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([{"a": 1}, {"a": "1"}], "rank 0 has a=1, rank 1 has a='1'"),
        ([{}, {"depth": 2}], "rank 0 has depth=nothing, rank 1 has depth=2"),
        ([["a", "word"], ["a"]], "rank 0 has word, rank 1 has nothing"),
        ([True, 1], "rank 0 has True, rank 1 has 1"),
    ],
)
def test_the_first_difference_is_shown(values: list[Any], shown: str) -> None:
    with pytest.raises(ConfigError, match=f"^ranks disagree on it: {shown}; mend it$"):
        check_values_equal("it", values, "mend it")
    check_values_equal("it", [float("nan")] * 2, "mend it")
