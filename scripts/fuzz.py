"""Damaged files and messages for every reader, each in a process that may die: what does each case end in?

    python scripts/fuzz.py --cases 10000 --seed 0 [--only dataset] [--workers 2]

A case is named by its reader and its number, and repeated by ``--only READER --first NUMBER --cases 1``.
It ends in *refused*: an error of this package; *equal*: read as before the damage, or made again; *other*:
read as other values, where there is no checksum, or the mutation has computed it anew; *silent*: read as
other values against a checksum; *foreign*: another exception; *crash*: the process died; *hang*: no end
within 30 s. The exit status is 1 unless all are of the first three.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import itertools
import json
import logging
import multiprocessing
import os
import random
import resource
import shutil
import socket
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import zmq

sys.path.insert(0, str(Path(__file__).parent.parent))

LIMIT_S, MEMORY = 30.0, 8 << 30
Mutation: TypeAlias = Callable[[Path, random.Random], None]
GOOD = ("refused", "equal", "other")
OUTCOMES = (*GOOD, "silent", "foreign", "crash", "hang")
EXTREMES: Sequence[Any] = (
    *(None, True, False, -1, 0, 1, 7, 1 << 31, 1 << 53, (1 << 63) - 1, 1 << 64, 10**400, 1e308, float("nan")),
    *("", "x", "../../etc/passwd", "\x00", "é" * 300, [], {}, [[]], {"a": {}}, [1, "2"]),
)


# Mutations. Each takes the folder and draws; what they return says whether checksums were computed anew.


def files_below(folder: Path, suffixes: str | tuple[str, ...] = "") -> list[Path]:
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size)
    return [
        path for path in paths if not path.name.endswith((".lock", ".png")) and path.name.endswith(suffixes)
    ]


def damage(content: bytes, draw: random.Random) -> bytes:
    """Flip bits, cut, put an extreme number or a block of others, repeat, or append."""
    at, way = draw.randrange(len(content)), draw.randrange(7)
    if way <= 1:
        flips = bytearray(content)
        for _ in range(draw.choice((1, 1, 2, 8))):
            flips[draw.randrange(len(flips))] ^= 1 << draw.randrange(8)
        return bytes(flips)
    if way == 2:
        return content[:at]
    if way == 3:
        size = draw.choice((1, 4, 8))
        at -= at % size
        number = draw.choice((0, 1, -1, 2**7, 2**31 - 1, -(2**31), 2**40, 2**63 - 1, -(2**63)))
        return content[:at] + (number & (1 << 8 * size) - 1).to_bytes(size, "little") + content[at + size :]
    if way == 4:
        return content[:at] + draw.randbytes(draw.choice((1, 16, 300))) + content[at + draw.choice((0, 16)) :]
    if way == 5:
        return content[:at] + content[draw.randrange(len(content)) :]
    return content + draw.choice((b"\0", b"\n", content))


def change_bytes(folder: Path, draw: random.Random) -> None:
    path = draw.choice(files_below(folder))
    status = path.stat()
    path.write_bytes(damage(path.read_bytes(), draw))
    if draw.random() < 0.5:  # as a disk does that fails
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def change_files(folder: Path, draw: random.Random) -> None:
    """Swap two files, or put a folder, a pipe, a link to a device or nothing in the place of one."""
    files = files_below(folder)
    path, way = draw.choice(files), draw.randrange(6)
    if way <= 1:
        siblings = [file for file in files if file.suffix == path.suffix]
        sibling = draw.choice(siblings)
        content, sibling_content = path.read_bytes(), sibling.read_bytes()
        path.write_bytes(sibling_content)
        sibling.write_bytes(content)
        return
    path.unlink()
    if way == 2:
        path.mkdir()
    elif way == 3:
        os.mkfifo(path)
    elif way == 4:
        path.symlink_to("/dev/zero")


def changed_json(value: Any, draw: random.Random) -> Any:
    """Replace, remove or repeat one value somewhere inside."""
    if isinstance(value, (dict, list)) and value and draw.random() < 0.9:
        copy = dict(value) if isinstance(value, dict) else list(value)
        key = draw.choice(list(value)) if isinstance(value, dict) else draw.randrange(len(value))
        way = draw.random()
        if way < 0.08:
            del copy[key]
        elif way < 0.12 and isinstance(copy, dict):
            copy[draw.choice(("x", "", *map(str, copy)))] = copy.pop(key)
        else:
            copy[key] = changed_json(value[key], draw)
        return copy
    if isinstance(value, int) and draw.random() < 0.4:
        return value + draw.choice((-1, 1, 2, 1 << 20, -(1 << 40)))
    return draw.choice(EXTREMES)


def change_json(folder: Path, draw: random.Random) -> None:
    path = draw.choice(files_below(folder, (".json", ".jsonl")))
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    at = draw.randrange(len(lines))
    with contextlib.suppress(ValueError):
        lines[at] = json.dumps(changed_json(json.loads(lines[at]), draw))
    if draw.random() < 0.03:
        lines[at] = '{"name": ' + draw.choice(("[", '{"a":')) * 100_000
    path.write_text("\n".join(lines) + "\n")


def change_numbers(path: Path, draw: random.Random) -> None:
    """Put an extreme number into the body of an Arrow or NumPy file, whose head stays."""
    content = path.read_bytes()
    body = len(content) // 2 if path.suffix == ".arrow" else 128
    size = draw.choice((1, 4, 8))
    at = min(draw.randrange(body // 2, len(content) - 8), len(content) - 8) // size * size
    number = draw.choice((-1, -(2**63), 2**31 - 1, 2**40, 255, 7, 2**63 - 1)) & (1 << 8 * size) - 1
    path.write_bytes(content[:at] + number.to_bytes(size, "little") + content[at + size :])


# Readers. ``make`` writes what is whole, ``read`` returns a text that is the same for the same values.


def digest(*values: Any) -> str:
    total = hashlib.blake2b()
    for value in values:
        is_numbers = isinstance(value, np.ndarray) and value.dtype.kind != "U"
        total.update(value.tobytes() if is_numbers else repr(value).encode(errors="surrogatepass"))
    return total.hexdigest()


@dataclass(frozen=True, kw_only=True)
class Reader:
    make: Callable[[Path], None]
    read: Callable[[Path], str]
    mutations: Sequence[Mutation] = (change_bytes, change_files)
    renewing: Sequence[Mutation] = ()
    """Mutations after which checksums are right."""
    share: int = 10
    """Cases of it among those of all readers: drawing pictures, or starting a child, takes longer."""
    is_checked: bool = True
    """Whether it has checksums, against which nothing may be read as other values."""


def raw_graph() -> Any:
    from dglx_dist.records import EDGE_TYPE, NODE_TYPE, RawGraph

    draw = np.random.default_rng(0)
    ends, mask = draw.integers(0, 60, (2, 240)), np.arange(60) % 3 == 0
    feat = draw.random((60, 4), dtype=np.float32)
    return RawGraph(
        name="fuzz",
        num_nodes={NODE_TYPE: 60},
        edges={EDGE_TYPE: (ends[0], ends[1])},
        node_data={NODE_TYPE: {"feat": feat, "label": draw.integers(0, 3, 60), "train_mask": mask}},
        edge_data={EDGE_TYPE: {"weight": draw.random(240)}},
        num_classes={NODE_TYPE: 3},
        user_ids={NODE_TYPE: np.array([f"user {number}" for number in range(60)])},
    )


def partition(folder: Path) -> None:
    from dglx_dist.data.partition.base import PartitionPlan
    from dglx_dist.data.partition.prepare import partition_to_disk

    partition_to_disk(raw_graph(), folder, PartitionPlan(num_parts=2, method="random"))


def read_dataset(folder: Path) -> str:
    from dglx_dist.data.storage.manifest import part_arrays, to_json
    from dglx_dist.data.storage.reader import open_dataset

    dataset = open_dataset(folder, verify="full")
    manifest, arrays = dataset.manifest, list[Any]()
    for number in range(manifest.num_parts):
        part = dataset.part(number)
        for etype in manifest.edge_types:
            arrays += [part.indptr(etype), part.indices(etype), part.original_edge_ids(etype)]
            arrays += [part.edge_data(etype, name) for name in manifest.edge_columns[etype]]
        for ntype in manifest.node_types:
            arrays += [part.original_node_ids(ntype), part.user_ids(ntype)]
            arrays += [part.node_data(ntype, name) for name in manifest.node_columns[ntype]]
        assert part_arrays(manifest, number)
    return digest(json.dumps(to_json(manifest), sort_keys=True), *arrays, use(dataset))


def use(dataset: Any) -> str:
    """Run compiled code on the structure of the graph, and return a digest of its results."""
    from dglx_dist.data.storage.reader import open_structure
    from dglx_dist.graph.analysis import measure_expansion

    structures = [open_structure(dataset, etype) for etype in dataset.manifest.edge_types]
    factors = (
        measure_expansion(dataset, dataset.manifest.num_parts, 2).factors
        if len(structures) == 1
        else np.zeros(1)
    )
    return digest(*(array for csc in structures for array in (csc.indptr, csc.indices)), factors)


def renew_dataset(folder: Path, draw: random.Random) -> None:
    from dglx_dist.data.storage.columns import checksum

    path = folder / "manifest.json"
    value = json.loads(path.read_text())
    if draw.random() < 0.5:
        file = draw.choice(files_below(folder, ".arrow"))
        if draw.random() < 0.3:
            file.write_bytes(damage(file.read_bytes(), draw))
        else:
            change_numbers(file, draw)
        info = checksum(file)
        value["files"][str(file.relative_to(folder))] = {"bytes": info.num_bytes, "crc32": info.checksum}
    else:
        value = changed_json(value, draw)
    if isinstance(value, dict):
        value["checksum"] = "00000000"
        text = json.dumps(value, indent=1)
        head, _, tail = text.rpartition("00000000")
        path.write_text(f"{head}{zlib.crc32(text.encode()):08x}{tail}")


def make_cache(folder: Path) -> None:
    partition(folder)
    read_cache(folder)


def read_cache(folder: Path) -> str:
    from dglx_dist.data.storage.reader import open_dataset

    return use(open_dataset(folder))


def below(name: str, *mutations: Mutation) -> tuple[Mutation, ...]:
    def inside(mutation: Mutation) -> Mutation:
        return lambda folder, draw: mutation(folder / name, draw)

    return tuple(map(inside, mutations))


def renew_cache(folder: Path, draw: random.Random) -> None:
    from dglx_dist.data.storage.arrays import checksum_of
    from dglx_dist.data.storage.columns import checksum

    file = draw.choice(files_below(folder / "cache", ".npy"))
    change_numbers(file, draw)
    stamp = file.with_name("stamp.json")
    head = json.loads(stamp.read_text())["head"]
    info = checksum(file)
    head["files"][file.name] = [info.num_bytes, info.checksum]
    stamp.write_text(json.dumps({"crc32": checksum_of(head), "head": head}))


def make_rows(folder: Path) -> None:
    from dglx_dist.data.storage.row_files import write_index, write_rows

    folder.mkdir()
    rows = np.arange(80, dtype=np.float32).reshape(20, 4)
    files = [write_rows(folder, "emb", first, rows[first : first + 10]) for first in (0, 10)]
    write_index(folder, [*files, write_rows(folder, "step", 0, np.arange(20))], {"what": "rows"})


def read_rows_of(folder: Path) -> str:
    from dglx_dist.data.storage.columns import numpy_dtype
    from dglx_dist.data.storage.row_files import check_rows, read_index, read_rows

    index, rows = read_index(folder), []
    for name in ("emb", "step"):
        saved = index.tensor(name, folder)
        check_rows(folder, saved, 0, saved.num_rows)
        rows.append(np.zeros((20, *((4,) if name == "emb" else ())), numpy_dtype(saved.info.dtype)))
        read_rows(folder, saved, 0, 20, rows[-1])
    return digest(*rows, sorted(index.facts.items()))


def renew_rows(folder: Path, draw: random.Random) -> None:
    from dglx_dist.data.storage.arrays import checksum_of

    path = folder / "index.json"
    value = changed_json(json.loads(path.read_text()), draw)
    if isinstance(value, dict):
        value.pop("checksum", None)
        value["checksum"] = f"{checksum_of(value):08x}"
        path.write_text(json.dumps(value))


def model() -> tuple[Any, Any]:
    import torch

    torch.manual_seed(0)
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return net, optimizer


def make_checkpoint(folder: Path) -> None:
    from dglx_dist.comm.session import start_session
    from dglx_dist.training import checkpoint

    net, optimizer = model()
    with start_session():
        checkpoint.save(folder, model=net, optimizer=optimizer, epoch=1, extra={"note": [1, "two"]})


def read_checkpoint(folder: Path) -> str:
    import torch

    from dglx_dist.comm.session import start_session
    from dglx_dist.training import checkpoint

    net, optimizer = model()
    for parameter in net.parameters():
        parameter.data.zero_()
    with start_session():
        state = checkpoint.load(folder, model=net, optimizer=optimizer)
    # Their bytes: a text of tensors has few digits.
    states = chain.from_iterable(tensor.values() for tensor in optimizer.state.values())
    tensors = [*net.state_dict().values(), *states, torch.get_rng_state()]
    settings = optimizer.state_dict()["param_groups"]
    values = (tensor.numpy() for tensor in tensors)
    return digest(state.epoch, state.step, dict(state.extra), settings, *values)


def make_run(folder: Path) -> None:
    from dglx_dist.records import EpochRecord
    from dglx_dist.report.run_folder import write_run
    from tests.report.test_page import PLAN

    counts = dict.fromkeys(("num_samples", "bytes_inside", "bytes_outside", "cache_hits", "cache_misses"), 7)
    times = dict.fromkeys(("seconds", "sample_s", "fetch_s", "wait_s", "compute_s", "exchange_s"), 0.5)
    rates = {"loss": 1.0, "train_accuracy": 0.5, "val_accuracy": None}
    epochs = [EpochRecord(epoch=number, **counts, **times, **rates) for number in range(3)]  # type: ignore[arg-type]
    config = {"data": "d", "launch": "x", "fanout": [10, 5]}
    summary = {"ranks": 2, "epoch_seconds": 0.5, "test_accuracy": 0.5, "phase_seconds": {"wait": 0.1}}
    write_run(folder, config, epochs, summary, plan=PLAN)


def read_run_folder(folder: Path) -> str:
    from dglx_dist.cli.report import _explain_damage, report
    from dglx_dist.report.page import render_page
    from dglx_dist.report.run_folder import read_plan, read_run

    with contextlib.redirect_stdout(io.StringIO()) as shown:
        report([folder])
    with _explain_damage(folder):
        page = render_page({"run": read_run(folder)}, "")
    return digest(shown.getvalue(), read_plan(folder), page)


def make_trace(folder: Path) -> None:
    from dglx_dist.comm.trace import write_trace
    from tests.report.traces import span, trace_of

    folder.mkdir()
    spans = [span("forward", "compute", 0, 2, 0), span("pull", "network", 1, 3, 0)]
    write_trace(folder / "trace.json", trace_of(spans))


def read_trace_of(folder: Path) -> str:
    from dglx_dist.cli.report import report

    with contextlib.redirect_stdout(io.StringIO()) as shown:
        report([folder / "trace.json"])
    return digest(shown.getvalue())


def make_dgl(folder: Path) -> None:
    from dglx_dist.data.partition.base import PARTITIONERS, PartitionOptions
    from dglx_dist.data.storage.dgl_format import write_dgl_format

    graph = replace(raw_graph(), user_ids={})
    write_dgl_format(graph, PARTITIONERS.get("random")(PartitionOptions()).assign(graph, 2, 0), folder)


def read_dgl(folder: Path) -> str:
    from dglx_dist.data.storage.dgl_format import import_dgl_format

    ours = folder.with_name("ours")
    try:
        import_dgl_format(folder / "fuzz.json", ours)
        return read_dataset(ours)
    finally:
        shutil.rmtree(ours, ignore_errors=True)


def make_sources(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for name in ("csv", "parquet", "npz", "ingest"):
        (folder / name).mkdir(parents=True)
    nodes: dict[str, list[Any]] = {
        "id": list("abcdef"),
        "label": [0, 1, 2, 0, 1, 2],
        "split": ["train", "val", "test"] * 2,
    }
    nodes |= {f"feat_{number}": [0.5 * row for row in range(6)] for number in range(2)}
    edges: dict[str, list[Any]] = {"src": list("abcdefa"), "dst": list("bcdefad"), "w": [1.0] * 7}
    for name in ("csv", "ingest"):
        for table, columns in (("nodes", nodes), ("edges", edges)):
            rows = zip(*columns.values(), strict=True)
            text = "\n".join(",".join(map(str, row)) for row in [tuple(columns), *rows])
            (folder / name / f"{table}.csv").write_text(text + "\n")
    for table, columns in (("nodes", nodes), ("edges", edges)):
        pq.write_table(pa.table(columns), folder / "parquet" / f"{table}.parquet")
    graph = raw_graph()
    (ends,) = graph.edges.values()
    np.savez(folder / "npz" / "g.npz", src=ends[0], dst=ends[1], **graph.node_data["_N"])
    feature: Any = {"feature_col": ["feat_0"], "feature_name": "feat"}
    node: Any = {"node_type": "user", "files": ["nodes.csv"], "format": {"name": "csv"}, "node_id_col": "id"}
    node |= {"features": [feature]}
    edge: Any = {"relation": ["user", "knows", "user"], "files": ["edges.csv"], "format": {"name": "csv"}}
    edge |= {"source_id_col": "src", "dest_id_col": "dst"}
    (folder / "ingest" / "description.json").write_text(json.dumps({"nodes": [node], "edges": [edge]}))


def read_source(name: str) -> Callable[[Path], str]:
    def read(folder: Path) -> str:
        from dglx_dist.data.ingest.config import IngestPlan, read_config
        from dglx_dist.data.ingest.graph import ingest
        from dglx_dist.data.partition.prepare import load_graph

        if name == "ingest":
            out = folder.with_name("ours")
            try:
                ingest(read_config(folder / name / "description.json"), IngestPlan(out=out))
                return read_dataset(out)
            finally:
                shutil.rmtree(out, ignore_errors=True)
        graph = load_graph(str(folder / name / "g.npz" if name == "npz" else folder / name))
        data = [*graph.node_data.values(), *graph.edge_data.values(), graph.user_ids]
        ends = [end for both in graph.edges.values() for end in both]
        return digest(graph.num_nodes, *ends, *(values for columns in data for values in columns.values()))

    return read


def source(name: str, *mutations: Mutation) -> Reader:
    used = below(name, change_bytes, change_files, *mutations)
    share = 2 if name == "ingest" else 10
    return Reader(make=make_sources, read=read_source(name), mutations=used, is_checked=False, share=share)


def change_cell(folder: Path, draw: random.Random) -> None:
    path = draw.choice(files_below(folder, ".csv"))
    rows = [line.split(",") for line in path.read_text().splitlines()]
    row = draw.choice(rows)
    cells = ("nan", "", "inf", "-1", str(2**63), "1e999", '"', "a", "ä", "\0", "null", "0x10", "a,b", "1_0")
    row[draw.randrange(len(row))] = draw.choice(cells)
    encoding = draw.choice(("utf-8", "utf-8", "latin-1", "utf-16"))
    path.write_text("\n".join(map(",".join, rows)) + "\n", encoding=encoding)


def read_wire(folder: Path) -> str:
    """Send what is in the folder to a live server and to a socket of streams, then ask both a question."""
    from dglx_dist.comm import wire
    from dglx_dist.comm.auth import Credentials
    from dglx_dist.comm.endpoints import authenticate
    from dglx_dist.comm.ledger import Ledger
    from dglx_dist.comm.rpc import PeerAddress, Rpc
    from dglx_dist.comm.topology import Topology

    credentials = Credentials(secret=b"s")
    caller, server = (Rpc(rank, Ledger(Topology(rank, 2, (0, 1))), 20.0) for rank in range(2))
    caller.listen("127.0.0.1", credentials)
    server.register("echo", lambda _name, arrays: arrays)
    endpoint = server.listen("127.0.0.1", credentials)
    caller.connect({1: PeerAddress(rank=1, host="there", endpoint=endpoint, public_key=None)})
    frames = [
        path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file() and not path.is_symlink()
    ]
    raw, context = b"".join(frames), zmq.Context()
    stranger = context.socket(zmq.DEALER)
    credentials.present(stranger, 1, None)
    try:
        stranger.connect(endpoint)
        stranger.send_multipart(frames or [b""])
        with socket.create_connection(("127.0.0.1", int(endpoint.rsplit(":", 1)[1]))) as connection:
            connection.sendall(raw)
        sender, receiver = socket.socketpair()
        with sender, receiver:
            sender.settimeout(5)
            receiver.sendall(raw[: 1 << 16])
            receiver.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError, TimeoutError):
                authenticate(sender, {0: b"s"})
                return "a stranger was admitted"
        with contextlib.suppress(wire.WireError):
            wire.decode(raw)
        stranger.poll(20)
        (answer,) = caller.call(1, "echo", "x", [np.arange(700)], phase="p")
        return digest(answer)
    finally:
        stranger.close(0)
        context.term()
        caller.close()
        server.close()


def make_wire(folder: Path) -> None:
    from dglx_dist.comm.wire import Head, Kind, encode

    folder.mkdir()
    arrays: Any = [np.arange(5), np.zeros((60, 7), np.float32), np.array([True])]
    for number, frame in enumerate(encode(Head(Kind.REQUEST, 1, "echo", "x"), arrays)):
        (folder / str(number)).write_bytes(bytes(frame))


TEXTS = (change_bytes, change_files, change_json)
READERS = {
    "dataset": Reader(make=partition, read=read_dataset, renewing=(renew_dataset,) * 3),
    "cache": Reader(
        make=make_cache,
        read=read_cache,
        mutations=below("cache", change_bytes, change_files, change_json),
        renewing=(renew_cache,),
    ),
    "rows": Reader(make=make_rows, read=read_rows_of, renewing=(renew_rows,)),
    "checkpoint": Reader(make=make_checkpoint, read=read_checkpoint, mutations=TEXTS),
    "run": Reader(
        make=make_run, read=read_run_folder, mutations=(*TEXTS, change_json), is_checked=False, share=2
    ),
    "trace": Reader(
        make=make_trace, read=read_trace_of, mutations=(*TEXTS, change_json), is_checked=False, share=2
    ),
    "dgl": Reader(make=make_dgl, read=read_dgl, mutations=TEXTS, is_checked=False, share=1),
    "csv": source("csv", change_cell, change_cell),
    "parquet": source("parquet"),
    "npz": source("npz"),
    "ingest": source("ingest", change_cell, change_json),
    "wire": Reader(make=make_wire, read=read_wire, mutations=(change_bytes, change_bytes)),
}


# Cases, each in a process of a pool.


def outcome(name: str, number: int, whole: Path, expected: str, work: Path) -> tuple[str, str]:
    from dglx_dist.errors import DglxError

    reader, draw, folder = READERS[name], random.Random(f"{name} {number}"), work / "case"
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(whole, folder)
    mutation = draw.choice((*reader.mutations, *reader.renewing))
    try:
        mutation(folder, draw)
        if reader.read(folder) == expected:
            return "equal", ""
        is_free = mutation in reader.renewing or not reader.is_checked
        return ("other", "") if is_free else ("silent", getattr(mutation, "__name__", ""))
    except DglxError as problem:
        return "refused", str(problem)
    except BaseException as problem:  # noqa: BLE001  # what it counts
        return "foreign", f"{type(problem).__name__}: {problem}"


def serve(pipe: Connection, home: Path, number: int) -> None:
    """Answer cases until the pipe ends."""
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    expected: dict[str, str] = {}
    with contextlib.suppress(EOFError):
        while True:
            name, case = pipe.recv()
            work = home / f"work-{number}"
            if name not in expected:
                shutil.rmtree(work, ignore_errors=True)
                shutil.copytree(home / name, work / "case")
                expected[name] = READERS[name].read(work / "case")
                pipe.send(None)  # the reader is warm
            pipe.send(outcome(name, case, home / name, expected[name], work))


class Worker:
    def __init__(self, home: Path, number: int) -> None:
        context = multiprocessing.get_context("forkserver")
        self.pipe, worker_end = context.Pipe()
        self.process = context.Process(target=serve, args=(worker_end, home, number), daemon=True)
        self.process.start()
        worker_end.close()
        self.case: tuple[str, int] | None = None
        self.deadline = 0.0

    def give(self, case: tuple[str, int]) -> None:
        self.case, self.deadline = case, time.monotonic() + 10 * LIMIT_S  # the first of a reader compiles
        self.pipe.send(case)

    def answer(self) -> tuple[str, str] | None:
        """Return what the case ended in, if it has."""
        try:
            if self.pipe.poll():
                message: tuple[str, str] | None = self.pipe.recv()
                if message is None:
                    self.deadline = time.monotonic() + LIMIT_S
                return message
        except (EOFError, ConnectionError):
            self.process.join()
            return "crash", f"the process ended with {self.process.exitcode}"
        if time.monotonic() > self.deadline:
            self.process.kill()
            self.process.join()
            return "hang", f"no end within {LIMIT_S:.0f} s"
        return None


def run(
    home: Path, cases: Iterator[tuple[str, int]], num_workers: int
) -> Iterator[tuple[str, int, str, str]]:
    """Yield reader, number, outcome and reason of each case."""
    workers = [Worker(home, number) for number in range(num_workers)]
    while True:
        for at, worker in enumerate(workers):
            if worker.case is None and (case := next(cases, None)) is not None:
                if not worker.process.is_alive():
                    workers[at] = worker = Worker(home, at)
                worker.give(case)
        busy = [worker for worker in workers if worker.case is not None]
        if not busy:
            return
        wait([worker.pipe for worker in busy], timeout=1.0)
        for worker in busy:
            if (answer := worker.answer()) is not None and worker.case is not None:
                yield (*worker.case, *answer)
                worker.case = None


def table(counts: Counter[tuple[str, str]]) -> str:
    lines = [f"| reader | cases | {' | '.join(OUTCOMES)} |", "|---|" + "---:|" * (len(OUTCOMES) + 1)]
    for name in (*READERS, "all"):
        ends = Counter(
            {
                outcome: sum(counts[of, outcome] for of in READERS if name in (of, "all"))
                for outcome in OUTCOMES
            }
        )
        if ends.total():
            lines.append(
                f"| {name} | {ends.total()} | {' | '.join(str(ends[outcome]) for outcome in OUTCOMES)} |"
            )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="cases of one seed are those of no other")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", choices=list(READERS), action="append")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--show", action="store_true", help="print every case")
    options = parser.parse_args()
    names, counts = options.only or list(READERS), Counter[tuple[str, str]]()
    cycle = [name for name in names for _ in range(READERS[name].share)]
    number = {name: itertools.count(options.seed * 10**9 + options.first) for name in names}
    cases = ((name, next(number[name])) for name in itertools.islice(itertools.cycle(cycle), options.cases))
    with tempfile.TemporaryDirectory(prefix="fuzz-") as home:
        for name in names:
            READERS[name].make(Path(home, name))
        with contextlib.suppress(KeyboardInterrupt):  # the table is of those so far
            for name, case, end, reason in run(Path(home), cases, options.workers):
                counts[name, end] += 1
                if options.show or end not in GOOD:
                    print(f"{end}: --only {name} --first {case}: {reason[:300]!r}", flush=True)
    print(table(counts))
    return int(any(count for (_, end), count in counts.items() if end not in GOOD))


if __name__ == "__main__":
    sys.exit(main())
