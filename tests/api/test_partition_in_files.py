"""Partitioning within a limited memory: the same bytes, after kills and full disks too."""

import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from dglx_dist.data import external_memory
from dglx_dist.data.external_memory import LIBRARY_BYTES, Budget, Workspace, open_budget
from dglx_dist.data.partition.base import PARTITIONERS, PartitionOptions, PartitionPlan
from dglx_dist.data.partition.one_pass import Hash
from dglx_dist.data.partition.prepare import load_graph, open_work, partition_to_disk
from dglx_dist.data.storage import writer
from dglx_dist.data.storage.files import partial_name
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.errors import ConfigError, DatasetError, DglxError, StorageError
from dglx_dist.memory import format_bytes, machine_memory, resident_bytes
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Assignment, RawGraph
from tests.data.partition.graphs import communities
from tests.data.storage.graphs import RATES, random_heterogeneous, random_homogeneous
from tests.helpers import refusal

PLENTY = "8GB"
"""More than the process of the tests holds, which counts."""


def one_part(graph: RawGraph, folder: Path) -> Path:
    """A dataset as `dglx ingest` writes it: its edges are in another order than those of the tables."""
    part_of = {ntype: np.zeros(count, np.int32) for ntype, count in graph.num_nodes.items()}
    write_dataset(graph, Assignment(num_parts=1, part_of=part_of, method="", seed=0), folder)
    return folder


def shop() -> RawGraph:
    """Two types, columns of edges of several shapes, ids of users; a relation without edges."""
    graph, random = random_heterogeneous(0), np.random.default_rng(1)
    src, dst = graph.edges[RATES]
    none = (np.empty(0, np.int64), np.empty(0, np.int64))
    # Parallel edges keep the order of the source.
    edges = {**graph.edges, RATES: (np.tile(src, 3), np.tile(dst, 3)), ("item", "near", "item"): none}
    columns = {"stars": random.integers(1, 6, 180), "f": random.random((180, 2, 3), np.float32)}
    ids = {"user": np.array([f"user {number}" for number in range(20)]), "item": np.arange(13) << 40}
    return RawGraph(
        name="shop",
        num_nodes=graph.num_nodes,
        edges=edges,
        node_data=graph.node_data,
        edge_data={RATES: {**columns, "": random.random((180, 0))}},
        user_ids=ids,
    )


def lone() -> RawGraph:
    loop = np.zeros(2, np.int64)
    return RawGraph(name="lone", num_nodes={NODE_TYPE: 1}, edges={EDGE_TYPE: (loop, loop)})


def partition(data: Path, out: Path, **options: Any) -> None:
    plan = PartitionPlan(**({"num_parts": 3, "method": "hash"} | options))
    with open_work(data, out, plan) as work:
        partition_to_disk(load_graph(data, workspace=work), out, plan, workspace=work)


def content(folder: Path) -> dict[str, bytes]:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.mark.parametrize(
    ("graph", "options"),
    [
        (shop(), {"trainers_per_part": 2}),
        (shop(), {"num_parts": 40, "feature_dtype": "bfloat16"}),
        (lone(), {"num_parts": 2}),
        (random_homogeneous(0, width=0), {"method": "random"}),
        (random_homogeneous(1, num_nodes=300), {"method": "kaminpar", "feature_dtype": {"w": "float16"}}),
    ],
    ids=["trainers", "empty parts", "one node", "no features", "one type"],
)
def test_the_same_bytes_within_any_memory(
    tmp_path: Path, graph: RawGraph, options: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = one_part(graph, tmp_path / "data")
    partition(data, tmp_path / "in memory", **options)
    # Buckets of a few edges, and chunks of a few rows.
    monkeypatch.setattr(writer, "sorting_budget", lambda graph, budget: Budget(work=6 * 4000))
    monkeypatch.setattr(writer, "CHUNK_BYTES", 64)
    scratch = tmp_path / "scratch"
    partition(data, tmp_path / "in files", memory=PLENTY, scratch=scratch, **options)
    assert content(tmp_path / "in files") == content(tmp_path / "in memory")
    # The graph itself, whose ids of edges are those that the dataset of one part has kept.
    settings: dict[str, Any] = {"num_parts": 3, "method": "hash", **options}
    partition_to_disk(graph, tmp_path / "given", PartitionPlan(memory=PLENTY, **settings))
    if settings["method"] != "kaminpar":  # which depends on the order of the edges
        assert content(tmp_path / "given") == content(tmp_path / "in memory")
    names = ["data", "given", "in files", "in memory", "scratch"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("method", PARTITIONERS.names())
def test_every_method_gives_the_same_bytes_where_it_fits(method: str, tmp_path: Path) -> None:
    data, inputs = one_part(communities(), tmp_path / "data"), PartitionOptions()
    trainers = 1 if method in ("file", "hierarchical") else 2
    if method == "hierarchical":
        inputs = PartitionOptions(servers=2)
    if method == "file":
        inputs = PartitionOptions(file=tmp_path / "parts.npy")
        np.save(tmp_path / "parts.npy", np.arange(2000) % 4)
    options = {"num_parts": 4, "method": method, "options": inputs, "trainers_per_part": trainers}
    partition(data, tmp_path / "in memory", **options)
    partition(data, tmp_path / "limited", memory=PLENTY, **options)
    assert content(tmp_path / "limited") == content(tmp_path / "in memory")


KILLED = """
import os, signal, sys
import kaminpar
from dglx_dist.data.partition import prepare
from dglx_dist.cli import app, main
from dglx_dist.data import external_memory
from dglx_dist.data.partition import hierarchical, multilevel
from dglx_dist.data.storage import writer

external_memory.open_budget = lambda limit: external_memory.Budget(work=limit)
writer.MIN_WORK_BYTES = 0

def run(out, left, after=False):
    # ``left``: stages that are finished before the kill; negative: no kill.
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    publish, write_array = external_memory.publish, external_memory.write_array
    write_manifest = writer.write_manifest

    def kill():
        os.kill(os.getpid(), signal.SIGKILL)

    def half_write(file, rows):
        if left == 0:
            write_array(file, rows[: len(rows) // 2])
            file.flush()
            kill()
        write_array(file, rows)

    def last_publish(*given):
        nonlocal left
        if left == 0:
            kill()
        published, left = publish(*given), left - 1
        if left == 0 and after:
            kill()
        return published

    external_memory.write_array, external_memory.publish = half_write, last_publish
    writer.write_manifest = lambda *given: write_manifest(*given) if left else kill()
    sys.argv[1:] = ["partition", *given, "--out", out]
    try:
        main()
    finally:
        os._exit(0)

when, whole, out, *given = sys.argv[1:]
print("status", run(whole, -1))
# One more stage is finished by each process; all are children, so that none has state of another.
left, status = int(when == "after"), 9
while status == 9:
    status, left = run(out, left, when == "after"), 1
    print("status", status)
"""


def stages_of(said: str) -> set[str]:
    return {stage for line in re.findall("finished before: (.*)", said) for stage in line.split(", ")}


LEVELS = {f"owners.work/{name}" for name in ("symmetric", "level1", "level2", "parts2", "parts1", "parts0")}
NEIGHBOURS = {"owners.work/neighbours"}
SERVERS = {name.replace("/", "/servers.work/") for name in LEVELS}
PIECES = {f"owners.work/server{number}.work/{name}" for number in (0, 1) for name in ("edges", "parts0")}


@pytest.mark.parametrize(
    ("options", "stages"),
    [
        ("300KB --method kaminpar", LEVELS),
        *[
            pytest.param(options, stages, marks=pytest.mark.wide)
            for options, stages in (
                ("400KB --method kaminpar --trainers-per-server 2", SERVERS | PIECES | {"trainers"}),
                ("300KB --method metis --balance train,degree", LEVELS),
                ("200KB --method hierarchical --parts 4 --servers 2", SERVERS | PIECES),
                ("300KB --method ldg --passes 2", NEIGHBOURS),
                ("300KB --method fennel", NEIGHBOURS),
                ("300KB --method hash --trainers-per-server 2", {"trainers"}),
            )
        ],
    ],
)
@pytest.mark.parametrize("when", ["inside", pytest.param("after", marks=pytest.mark.wide)])
def test_a_kill_in_any_stage_costs_no_bit(options: str, stages: set[str], when: str, tmp_path: Path) -> None:
    """Each process is killed while it writes its second stage, or once it has finished one."""
    data = one_part(communities(inside=0.3), tmp_path / "data")
    command = [when, str(tmp_path / "whole"), str(tmp_path / "out"), str(data), "--memory", *options.split()]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, *command], capture_output=True, text=True, timeout=500
    )
    full, *killed, last = re.findall(r"status (\d+)", done.stdout)
    assert (full, {*killed}, last) == ("0", {"9"}, "0"), done.stderr
    result = stages_of(done.stderr)
    assert stages | {"edges", "owners", "order0"} <= result
    assert len(killed) > len(result) - (when == "after")
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "out", "whole"]


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_work_resumes_after_a_full_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = one_part(random_homogeneous(0, num_edges=20_000), tmp_path / "data"), tmp_path / "out"
    partition(data, tmp_path / "whole")
    with files_of_at_most(90_000):
        message = refusal(lambda: partition(data, out, memory=PLENTY), StorageError)
    assert re.search(r"out.work cannot be written: .*File too large", message)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("out")] == ["out.work"]
    assert "finished stages are kept in" in capsys.readouterr().err
    partition(data, out, memory=PLENTY)
    assert "finished before: edges, owners" in capsys.readouterr().err
    assert content(out) == content(tmp_path / "whole")


def test_two_processes_do_not_share_one_workspace(tmp_path: Path) -> None:
    data, out = one_part(random_homogeneous(0), tmp_path / "data"), tmp_path / "out"
    with open_work(data, out, PartitionPlan(num_parts=3, method="hash", memory=PLENTY)):
        message = refusal(lambda: partition(data, out, memory=PLENTY), StorageError)
    assert "out.work is in use by another process" in message
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_refuses_unfinished_work_of_other_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, out, work = (
        one_part(random_homogeneous(0), tmp_path / "data"),
        tmp_path / "out",
        tmp_path / "out.work",
    )

    def read_refusal(**options: Any) -> str:
        return refusal(lambda: partition(data, out, **{"memory": PLENTY, **options}), DglxError)

    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_manifest", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            partition(data, out, memory=PLENTY)
    before = content(work)
    assert "other settings (num_parts was '3')" in read_refusal(num_parts=2)
    assert "seed was '0'" in read_refusal(seed=1)
    (work / "key.json").write_text("[")
    assert "key.json is damaged" in read_refusal()
    (work / "key.json").write_bytes(before["key.json"])
    assert content(work) == before
    partition(data, out, memory="7GB")
    assert not work.exists()


@pytest.mark.parametrize("names", [["mine"], ["lock", "mine"], ["edges", "lock"]])
def test_a_folder_of_something_else_is_refused(tmp_path: Path, names: list[str]) -> None:
    data, work = one_part(random_homogeneous(0), tmp_path / "data"), tmp_path / "out.work"
    work.mkdir()
    for name in names:
        (work / name).write_text("")
    message = refusal(lambda: partition(data, tmp_path / "out", memory=PLENTY), StorageError)
    assert "has files of something else" in message
    assert content(work) == dict.fromkeys(names, b"")


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("edges/0.*", "flip"),
        ("owners/parts*", "truncate"),
        ("owners/split.json", "remove"),
        ("order0/indices.*", "flip"),
        ("order0/indptr.*", "[]"),
        ("order0/indptr.*", "{}"),
    ],
)
def test_a_damaged_stage_is_made_again(
    tmp_path: Path,
    file: str,
    damage: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data, out = one_part(random_homogeneous(0), tmp_path / "data"), tmp_path / "out"
    partition(data, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_manifest", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            partition(data, out, memory=PLENTY)
    (path,) = (tmp_path / "out.work").glob(file)
    full = bytearray(path.read_bytes())
    full[-len(full) // 3] ^= 1
    if damage == "flip":
        path.write_bytes(full)
    elif damage == "truncate":
        path.write_bytes(full[:-8])
    elif damage == "remove":
        path.unlink()
    else:
        path.parent.with_suffix(".json").write_text(damage)
    partition(data, out, memory=PLENTY)
    assert re.findall(r"making \S*?(\w+) again", capsys.readouterr().err) == [path.parent.name]
    assert content(out) == content(tmp_path / "whole")


def test_a_corrected_command_is_not_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "g.npz", src=[0, 1, 7], dst=[1, 2, 0], num_nodes=3)
    with pytest.raises(DatasetError, match="node id 7 is outside"):
        partition(tmp_path / "g.npz", tmp_path / "out", memory=PLENTY)
    np.savez(tmp_path / "g.npz", src=[0, 1, 2], dst=[1, 2, 0], num_nodes=3)
    wrong = {"method": "metis", "options": PartitionOptions(balance=("trian",))}
    with pytest.raises(ConfigError, match="cannot balance 'trian'"):
        partition(tmp_path / "g.npz", tmp_path / "out", memory=PLENTY, **wrong)
    partition(tmp_path / "g.npz", tmp_path / "out", memory=PLENTY)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["g.npz", "out"]


def test_a_symbolic_link_is_not_replaced(tmp_path: Path) -> None:
    data, link = one_part(random_homogeneous(0), tmp_path / "data"), tmp_path / "link"
    (tmp_path / "disk").mkdir()
    link.symlink_to(tmp_path / "disk")
    for options in ({}, {"memory": PLENTY}, {"overwrite": True}):
        message = refusal(lambda options=options: partition(data, link, **options), StorageError)
        assert f"link is a symbolic link; give the folder itself, {tmp_path / 'disk'}" in message
    assert link.is_symlink()
    assert not content(tmp_path / "disk")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"memory": "much"}, "'much' is not a size"),
        ({"memory": "1MB"}, "--memory 1MB leaves too little .* grant --memory"),
        ({"scratch": Path("x")}, "scratch x needs a memory limit"),
        ({"memory": PLENTY, "format": "dgl"}, "written from memory"),
        (
            {"memory": PLENTY, "scratch": Path("/dev/shm/dglx")},
            r"out.work is in memory; choose a folder on a disk \(--scratch DIR\)",
        ),
    ],
)
def test_wrong_limits_are_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    data = one_part(random_homogeneous(0), tmp_path / "data")
    with pytest.raises(ConfigError, match=said):
        partition(data, tmp_path / "out", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_scratch_inside_of_the_dataset_is_refused(tmp_path: Path) -> None:
    data, out = one_part(random_homogeneous(0), tmp_path / "data"), tmp_path / "out"
    for scratch in (out, out / "x", tmp_path / "data" / ".." / "out"):
        message = refusal(
            lambda scratch=scratch: partition(data, out, memory=PLENTY, scratch=scratch), ConfigError
        )
        assert f"scratch {scratch} is in {out}, the folder to write" in message
    assert not out.exists()


def test_a_scratch_in_memory_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, mounts = one_part(random_homogeneous(0), tmp_path / "data"), {"/": "ext4", str(tmp_path): "tmpfs"}
    kinds = [SimpleNamespace(mountpoint=place, fstype=kind) for place, kind in mounts.items()]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: kinds)  # mounting takes privileges
    partition(data, tmp_path / "out", memory=PLENTY)
    assert f"{tmp_path / 'out.work'} is in memory (tmpfs)" in capsys.readouterr().err
    mounts = {"/": "tmpfs", str(tmp_path): "xfs"}
    kinds[:] = [SimpleNamespace(mountpoint=place, fstype=kind) for place, kind in mounts.items()]
    partition(data, tmp_path / "other", memory=PLENTY)
    assert "is in memory" not in capsys.readouterr().err


def test_no_more_than_the_machine_has_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    budget, (most, _) = open_budget(10**16), machine_memory()
    assert 0 < budget.work < most
    message = f"--memory 10 PB is more than this machine has; using {format_bytes(most)}\n"
    assert capsys.readouterr().err == message


LIMITED = """
import os, resource, sys, traceback
from dglx_dist.cli.app import app
from dglx_dist.data import external_memory
from dglx_dist.data.storage import writer
from dglx_dist.memory import resident_bytes, return_memory

small, data, out, extra, *methods = sys.argv[1:]

def partition(data, method, name, *limits):
    command = ["partition", data, "--parts", "2", "--out", out + name, *limits, "--method", *method.split()]
    app(command, standalone_mode=False)

# What libraries and compiled code take does not depend on the graph.
open_budget, least = external_memory.open_budget, writer.MIN_WORK_BYTES
external_memory.open_budget = lambda limit: external_memory.Budget(work=limit)
writer.MIN_WORK_BYTES = 0
for number, method in enumerate(methods):
    if method.startswith("file"):
        continue  # is of the other graph
    partition(small, method, f"{number} small")
    partition(small, method, f"{number} small in files", "--memory", "300KB")
external_memory.open_budget, writer.MIN_WORK_BYTES = open_budget, least
return_memory(1 << 17)

def limited(method, name, *memory):
    # A process of its own: libraries keep memory, and KaMinPar ends its process where there is none.
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    held = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (held + int(extra),) * 2)
    granted = resident_bytes() + external_memory.LIBRARY_BYTES + int(extra)
    try:
        partition(data, method, name, *memory, *[str(granted) for _ in memory])
        os._exit(0)
    except MemoryError:
        if memory: traceback.print_exc()
        os._exit(3)

for number, method in enumerate(methods):
    print("\\n>", method, flush=True)
    print("limited", limited(method, str(number), "--memory"), flush=True)
    print("in memory", limited(method, f"{number} in memory"), flush=True)
"""


IN_GATE = ("hash", "kaminpar --trainers-per-server 2")


@pytest.mark.parametrize("gate", [True, pytest.param(False, marks=pytest.mark.wide)])
def test_no_method_exceeds_the_memory(gate: bool, tmp_path: Path) -> None:
    """The limit of the process is what is granted, which is less than the command takes without it."""
    graph, parts = communities(num_nodes=20_000, degree=150), tmp_path / "parts.npy"
    data = one_part(graph, tmp_path / "data")
    small = one_part(communities(), tmp_path / "small")
    np.save(parts, np.arange(20_000) % 2)
    inputs = {"file": f"--file {parts}", "hierarchical": "--servers 2", "ldg": "--passes 2"}
    methods = [f"{name} {inputs.get(name, '')}".strip() for name in PARTITIONERS.names()]
    methods += [IN_GATE[1], "metis --balance train,degree", "ldg --balance train"]
    methods = [method for method in methods if (method in IN_GATE) == gate]
    command = [sys.executable, "-c", LIMITED, str(small), str(data), f"{tmp_path}/", str(40 << 20), *methods]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for method, message in zip(methods, done.stdout.split("> ")[1:], strict=True):
        assert re.findall(r"limited (\d+)", message) == ["0"], (message, done.stderr)
        # An error of this package, or the end of KaMinPar.
        assert re.findall(r"in memory (\d+)", message)[0] in (str(3 << 8), str(signal.SIGABRT.value)), message
        cut = float(re.findall(r"cut ([\d.]+)% of the edges", message)[0])
        name = method.split()[0]
        assert cut < (48 if name == "ldg" else 30) or name in (
            "file",
            "hash",
            "feature",
            "random",
            "contiguous",
        ), (method, cut)
    if gate:
        partition(data, tmp_path / "in memory", num_parts=2)
        assert content(tmp_path / str(methods.index("hash"))) == content(tmp_path / "in memory")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_of_a_npz_are_unpacked_into_files(tmp_path: Path, save: Any) -> None:
    random, path = np.random.default_rng(0), tmp_path / "g.npz"
    src, dst = random.integers(0, 50, (2, 400))
    arrays = {"src": src, "dst": dst, "w": random.random(400), "feat": random.random((50, 3), np.float32)}
    save(path, **arrays, num_nodes=50, label=random.integers(0, 4, 50), empty=np.empty((50, 0)))
    partition(path, tmp_path / "in memory")
    partition(path, tmp_path / "in files", memory=PLENTY)
    assert content(tmp_path / "in files") == content(tmp_path / "in memory")
    full = path.read_bytes()
    for damaged in (full[: len(full) // 2], full.replace(src.tobytes()[:64], bytes(64))):
        if damaged == full:  # compressed
            continue
        path.write_bytes(damaged)
        with pytest.raises(DatasetError, match=r"g.npz: not a readable .npz file"):
            partition(path, tmp_path / "other", memory=PLENTY)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["g.npz", "in files", "in memory"]


def test_sources_that_are_read_at_once_say_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "edges.csv").write_text("src,dst\n" + "0,1\n1,0\n" * 50)
    np.savez(tmp_path / "g.npz", head=[0, 1], rel=[0, 0], tail=[1, 0])
    few = Workspace(folder=tmp_path / "work", budget=Budget(work=300))
    enough = Workspace(folder=tmp_path / "work", budget=Budget(work=10**6))
    for name, message in (("tables", "first `dglx ingest` them"), ("g.npz", "rel are converted in memory")):
        with pytest.raises(ConfigError, match=f"{name}.* {message}.* or grant more --memory"):
            load_graph(tmp_path / name, workspace=few)
        assert load_graph(tmp_path / name, workspace=enough).total_nodes == 2


@pytest.mark.parametrize("wrong", [-1, 10**9])
def test_ids_of_a_given_graph_are_checked_before_compiled_code_uses_them(tmp_path: Path, wrong: int) -> None:
    ends = (np.array([0, 1]), np.array([1, wrong]))
    graph = RawGraph(name="g", num_nodes={NODE_TYPE: 3}, edges={EDGE_TYPE: ends})
    with pytest.raises(DatasetError, match=rf"column 'dst', row 1: node id {wrong} is outside 0\.\.2"):
        partition_to_disk(graph, tmp_path / "out", PartitionPlan(num_parts=2, method="ldg"))


def test_what_a_refusal_asks_for_suffices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The arrays of nodes, then the edges of one node: each refusal is followed, and the last one is enough.
    # What this process has stays the same: libraries and freed memory are not the plan's to foresee.
    num_nodes, hub, held = 700_000, np.zeros(1_000_000, np.int32), resident_bytes()
    monkeypatch.setattr(external_memory, "resident_bytes", lambda: held)
    graph = RawGraph(name="g", num_nodes={NODE_TYPE: num_nodes}, edges={EDGE_TYPE: (hub, hub)})
    memory, refusals = f"{(held + LIBRARY_BYTES + (25 << 20)) // 10**6}MB", []
    while len(refusals) < 5:
        plan = PartitionPlan(num_parts=2, method="hash", memory=memory)
        try:
            partition_to_disk(graph, tmp_path / "out", plan)
            break
        except ConfigError as problem:
            refusals.append(str(problem))
            memory = re.findall(r"grant --memory (\d+MB)", refusals[-1])[0]
    of_nodes, of_hub = refusals
    assert "nodes take" in of_nodes
    assert "sorted together" in of_hub


def test_what_a_killed_removal_has_left_is_removed(tmp_path: Path) -> None:
    data = one_part(random_homogeneous(0), tmp_path / "data")
    ended = subprocess.Popen(["true"])
    ended.wait()
    left = partial_name(tmp_path / "out.work")
    left = left.with_name(left.name.replace(f"-{os.getpid()}-", f"-{ended.pid}-"))
    (left / "owners").mkdir(parents=True)
    partition(data, tmp_path / "out", memory=PLENTY)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "out"]


def test_owners_are_kept_by_type_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, place = shop(), Hash.assign

    def reverse_order(self: Hash, graph: RawGraph, num_parts: int, seed: int) -> Assignment:
        result = place(self, graph, num_parts, seed)
        return replace(result, part_of=dict(reversed(result.part_of.items())))

    partition_to_disk(graph, tmp_path / "expected", PartitionPlan(num_parts=3, method="hash"))
    monkeypatch.setattr(Hash, "assign", reverse_order)
    partition_to_disk(graph, tmp_path / "out", PartitionPlan(num_parts=3, method="hash", memory=PLENTY))
    assert content(tmp_path / "out") == content(tmp_path / "expected")
