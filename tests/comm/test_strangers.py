"""Strangers who reach a job's ports and its rendezvous store: what they try fails, and training goes on."""

import contextlib
import os
import re
import resource
import socket
import subprocess
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from dglx_dist.comm import session as session_module
from dglx_dist.comm.auth import DescriptorWatch
from dglx_dist.comm.collectives import barrier, gather_json, sum_over_ranks
from dglx_dist.comm.exchange import Incoming, Outgoing, row_exchanges
from dglx_dist.comm.rendezvous import SealedStore, _private_file, _read_private_file
from dglx_dist.comm.session import start_session
from dglx_dist.comm.topology import read_settings
from dglx_dist.errors import ConfigError, DglxError, PeerError
from tests.helpers.ranks import run_ranks, start_ranks

SEAL = "does not carry this job's seal"


def test_a_value_opens_under_its_own_key_alone() -> None:
    raw = HashStore()
    store = SealedStore(raw, b"the job's secret")
    store.set("keys/0", "mine")
    store.set("keys/1", "other")
    assert store.multi_get(["keys/0", "keys/1"]) == [b"mine", b"other"]
    good = raw.get("keys/0")
    for bad in (b"", b"mine", raw.get("keys/1"), good[:-1] + b"!", bytes([good[0] ^ 1]) + good[1:]):
        raw.set("keys/0", bad)
        for read in (store.get, lambda key: store.multi_get([key])):
            with pytest.raises(PeerError, match=f"'keys/0' .*{SEAL}"):
                read("keys/0")
    raw.set("keys/0", good)
    for case in (store.with_new_secret(["fresh"]), SealedStore(raw, b"a guess")):
        with pytest.raises(PeerError, match=SEAL):
            case.get("keys/0")


def job_of_strangers() -> Store:
    """A client of its own to the store of the job."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return PrefixStore("dglx/test/0", TCPStore(host, port, timeout=timedelta(seconds=20)))


def stranger_at(session: int) -> Store:
    return PrefixStore(str(session), job_of_strangers())


def overwrite(key: str, value: Callable[[], bytes | str], session: int) -> None:
    """Replace what rank 0 wrote, before this rank reads it."""
    stranger = stranger_at(session)
    stranger.wait([key])
    stranger.set(key, value())


def with_forged_keys(*args: object, **options: object) -> object:
    overwrite("keys of ranks/0", lambda: '["a stranger\'s key", null]', 4)
    return open_endpoints(*args, **options)


open_endpoints = session_module.open_endpoints


def meet_beside_a_stranger() -> list[str]:
    rank, messages = int(os.environ["RANK"]), []
    with start_session(timeout_s=20) as session:
        barrier(session, "all is written")
        first = stranger_at(1)
        shown = first.multi_get(["secret", *(f"{name}/{rank}" for name in ("start", "settings"))])
        assert session.store is not None
        for secret in (
            os.environ["DGLX_SECRET"].encode(),
            session.store.key,
            session.store.raw._secret,
            session.rpc.credentials.secret,
        ):
            assert not any(secret in result for result in shown)
    attacks = [
        lambda: overwrite("start/0", lambda: '"ab"', 2),
        lambda: overwrite("start/0", lambda: stranger_at(1).get("start/0"), 3),
        lambda: setattr(session_module, "open_endpoints", with_forged_keys),
    ]
    for attack in attacks:
        if rank == 1:
            attack()
        with pytest.raises(PeerError) as caught:
            start_session(timeout_s=20)
        messages.append(str(caught.value))
    return messages


def test_stranger_who_writes_to_the_store_ends_the_start_and_gets_no_rank() -> None:
    zero, item = run_ranks(
        meet_beside_a_stranger, 2, environment={"DGLX_CURVE": "1", "DGLX_SECRET": "s" * 32}
    )
    for message, key in zip([*zero, *item], 2 * ["start/0", "settings/", "keys of ranks/0"], strict=True):
        assert SEAL in message
        assert key in message


def spoil_the_store() -> list[str]:
    """A stranger who writes and deletes beside training changes nothing, or causes one error."""
    rank, messages = int(os.environ["RANK"]), []
    with start_session(timeout_s=20) as session:
        total = torch.zeros(3)
        for step in range(4):
            if (step, rank) == (2, 0):
                stranger = stranger_at(1)
                for key, value in (("ended/1", ""), ("ended/0", b"\xff"), ("first_error", '{"rank": 1}')):
                    stranger.set(key, value)
                for key in ("start/0", "start/1", "settings/1", "secret"):
                    stranger.delete_key(key)
            total += sum_over_ranks(torch.full((3,), step + 0.1), session, phase="p")
            barrier(session, f"step {step}")
        messages.append(str(total.tolist()))
    if rank == 1:
        job_of_strangers().set("sessions/1", "no number")
    with pytest.raises(PeerError) as caught:
        start_session(timeout_s=2)
    return [*messages, str(caught.value)]


def test_values_of_strangers_change_nothing_or_cause_one_error() -> None:
    zero, item = run_ranks(spoil_the_store, 2)
    sums = torch.zeros(3)
    for step in range(4):
        sums += 2 * torch.full((3,), step + 0.1)
    assert zero[0] == item[0] == str(sums.tolist())
    assert "ranks missing: 1 (of 2) at 'start' after 2 s" in zero[1]
    assert "the rendezvous store does not answer" in item[1]


def test_a_value_that_is_deleted_while_it_is_read_is_an_error() -> None:
    store = SealedStore(TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=0.1)), b"s")
    for read in (store.get, lambda key: store.multi_get([key])):
        with pytest.raises(PeerError, match="the rendezvous store does not answer"):
            read("keys/0")


def meet_with(secrets: list[dict[str, str]]) -> str:
    os.environ.update(secrets[int(os.environ["RANK"])])
    try:
        with start_session(timeout_s=60) as session:
            return f"met {sum_over_ranks(torch.ones(1), session, phase='p')}"
    except DglxError as error:
        return f"{type(error).__name__} {error}"


@pytest.mark.parametrize(
    ("of_rank_0", "of_rank_1", "message"),
    [("a" * 32, "a" * 32, "met"), ("a" * 32, "b" * 32, SEAL), ("a" * 32, "", SEAL), ("", "b" * 32, SEAL)],
)
def test_ranks_meet_with_one_secret(of_rank_0: str, of_rank_1: str, message: str) -> None:
    results = run_ranks(meet_with, 2, args=[[{"DGLX_SECRET": of_rank_0}, {"DGLX_SECRET": of_rank_1}]])
    assert message in results[0]
    assert "rank 0 has a secret and rank 1 has none" in results[1] if not of_rank_1 else message in results[1]
    assert not any(secret and secret in result for result in results for secret in (of_rank_0, of_rank_1))


def test_without_a_secret_several_machines_are_warned_or_refused() -> None:
    several = {"GROUP_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.2"}
    outcomes = start_ranks(meet_with, 2, args=[[{}, {}]], environment=several)
    assert all(outcome.result.startswith("met") for outcome in outcomes)
    assert "act as a rank. Write a secret" in outcomes[0].output
    refused = run_ranks(meet_with, 2, args=[[{}, {}]], environment={**several, "DGLX_REQUIRE_SECRET": "1"})
    assert all(line.startswith("ConfigError DGLX_REQUIRE_SECRET is set") for line in refused)


def test_a_secret_is_long_and_its_file_private(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("x" * 40 + "\n")
    file.chmod(0o600)
    assert read_settings({"DGLX_SECRET_FILE": str(file), "DGLX_SECRET": "short"}).secret == b"x" * 40
    assert read_settings({"DGLX_SECRET": ""}).secret is None
    assert "y" * 40 not in repr(read_settings({"DGLX_SECRET": "y" * 40}))
    file.chmod(0o640)
    for variables, message in (
        ({"DGLX_SECRET": "short"}, r"DGLX_SECRET has 5 characters, outside \[32, 4096\]"),
        ({"DGLX_SECRET_FILE": str(file)}, "nobody else can read. Run `chmod 600"),
        ({"DGLX_SECRET_FILE": "/dev/zero"}, "must be a file of yours"),
        ({"DGLX_SECRET_FILE": "/nowhere"}, "'/nowhere' cannot be read: No such file"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_settings(variables)


def test_few_free_descriptors_are_noticed_once(caplog: pytest.LogCaptureFixture) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as undo:
        undo.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[1] // 2, before[1]))
        watch = DescriptorWatch()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
        resource.setrlimit(resource.RLIMIT_NOFILE, (2 * len(os.listdir("/proc/self/fd")), before[1]))
        watch.look()
        assert not caplog.text
        listening = undo.enter_context(socket.create_server(("127.0.0.1", 0)))
        for _ in range(len(os.listdir("/proc/self/fd")) // 3):
            undo.enter_context(socket.create_connection(listening.getsockname()))
            undo.enter_context(listening.accept()[0])
        for _ in range(2):
            watch._look_at_s = 0.0
            watch.look()
    assert caplog.text.count("file descriptors are in use") == 1
    assert re.search(r"\d+ sockets of 127\.0\.0\.1", caplog.text)


def test_the_watch_raises_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Its thread admits connections. Sockets of other families have names of other forms, or none."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as undo:
        undo.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        for _ in range(8):
            for item in socket.socketpair():
                undo.enter_context(item)
        watch = DescriptorWatch()
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
        watch.look()  # no descriptor is left to look with
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        monkeypatch.setattr("dglx_dist.comm.auth._FEW_SHARE", 1.0)
        watch._look_at_s = 0.0
        watch.look()
    assert caplog.text.count("file descriptors are in use") == 1
    assert "sockets of this machine" in caplog.text


def test_only_secret_files_of_this_users_processes_are_read(tmp_path: Path) -> None:
    with _private_file(b"s" * 64) as path:
        assert _read_private_file(path) == b"s" * 64
        number = int(path.rpartition("/")[2])
        with contextlib.ExitStack() as undo:
            pipe = os.pipe()
            for item in pipe:
                undo.callback(os.close, item)
            second = os.memfd_create("other")
            undo.callback(os.close, second)
            held = f"/proc/{os.getpid()}/fd"
            bad = ["/etc/hostname", f"{path}/", f"{held}/{pipe[0]}", f"{held}/{second}", f"{held}/999999", ""]
            for item in [*bad, f"/proc/self/fd/{number}"]:
                with pytest.raises(PeerError, match="the secret of rank 0 cannot be read"):
                    _read_private_file(item)
            if os.geteuid() == 0:  # who else could read it
                nobody = subprocess.Popen(["sleep", "60"], user=65534, pass_fds=[number])
                undo.callback(nobody.wait)
                undo.callback(nobody.kill)
                with pytest.raises(PeerError, match="no such file of this user"):
                    _read_private_file(f"/proc/{nobody.pid}/fd/{number}")


GARBAGE = (
    b"",
    b"\x00" * 64,
    b"GET / HTTP/1.1\r\n\r\n",
    b"\xff" * 9,
    os.urandom(300),
    b"dglxstr1" + bytes(36),
)
NUM_STRANGERS = 400


def attack(ports: list[int]) -> list[socket.socket]:
    """Connect to each port again and again; return the connections that stay open."""
    kept = []
    for port in ports:
        for number in range(NUM_STRANGERS):
            with contextlib.suppress(OSError):
                single = socket.create_connection(("127.0.0.1", port), timeout=20)
                single.sendall(GARBAGE[number % len(GARBAGE)])
                kept.append(single) if number % 20 == 0 else single.close()
    return kept


def train(folder: Path) -> bytes:
    """Steps with sums, calls and rows of the other rank; half of them after ``attacked`` is there."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with start_session(timeout_s=60) as session:
        rank = session.topology.rank
        assert stranger_at(1).get("secret").startswith(b"/proc/")  # where only this user reads it
        weight = torch.linspace(0, 1, 64, dtype=torch.float64)
        session.rpc.register("rows", lambda _name, arrays: [np.sin(arrays[0] + rank)])
        streams = row_exchanges(session).streams
        barrier(session, "registered")
        for step in range(40):
            if step == 20:
                own = [
                    net_connection
                    for net_connection in psutil.net_connections("tcp")
                    if net_connection.pid == os.getpid()
                ]
                ports = [outcome.laddr.port for outcome in own if outcome.status == psutil.CONN_LISTEN]
                assert len(ports) >= 2  # calls, gloo
                every = gather_json(ports, session)
                if rank == 0:
                    (folder / "ports.part").write_text(
                        " ".join(str(port) for outcome in every for port in outcome)
                    )
                    (folder / "ports.part").rename(folder / "ports")
                while not all(gather_json((folder / "attacked").exists(), session)):
                    threading.Event().wait(0.01)
            (rows,) = session.rpc.call(1 - rank, "rows", "", [weight.numpy()], phase="p")
            due = Incoming(rank=1 - rank, rows=torch.empty(64, dtype=torch.float64))
            streams.post([Outgoing(rank=1 - rank, rows=weight * 0.5)], [due], "halo", phase=None)()
            weight = weight + 0.1 * sum_over_ranks(torch.from_numpy(rows) + due.rows, session, phase="dense")
        return weight.numpy().tobytes()


def test_training_under_attack_on_all_ports_ends_with_the_same_bits(tmp_path: Path) -> None:
    quiet, loud = tmp_path / "quiet", tmp_path / "loud"
    for folder in (quiet, loud):
        folder.mkdir()
    (quiet / "attacked").touch()
    expected = run_ranks(train, 2, args=[quiet])

    def come(_pids: list[int]) -> None:
        threading.Thread(target=strangers, daemon=True).start()

    kept: list[socket.socket] = []

    def strangers() -> None:
        while not (loud / "ports").exists():
            threading.Event().wait(0.01)
        kept.extend(attack([int(port) for port in (loud / "ports").read_text().split()]))
        (loud / "attacked").touch()

    try:
        assert run_ranks(train, 2, args=[loud], after_start=come) == expected
    finally:
        for tensor in kept:
            tensor.close()
    assert len(kept) >= 4 * NUM_STRANGERS // 20
