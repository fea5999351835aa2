"""Datasets and tables are read from an object store through a local copy, also over a broken connection."""

import fcntl
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import fsspec
import numpy as np
import pytest

import dglx_dist as dx
from dglx_dist.cli.partition import PartitionCommand
from dglx_dist.data.ingest.config import IngestPlan
from dglx_dist.data.sources import load_dataset
from dglx_dist.data.storage import object_store, remote
from dglx_dist.data.storage.columns import FileInfo
from dglx_dist.data.storage.files import lock_exclusive
from dglx_dist.data.storage.reader import StoredDataset, open_dataset, open_structure
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.errors import ConfigError, DglxError, StorageError
from dglx_dist.options import find_address, format_location
from dglx_dist.records import EDGE_TYPE, NODE_TYPE
from dglx_dist.training.config import PredictConfig, TrainConfig
from tests.data.storage.graphs import ODD_ONES_OUT, TWO_TRIANGLES, put_value, random_homogeneous
from tests.helpers.object_store import Fault, StandIn, answer, cut_after, wait_before
from tests.stores.conftest import SECRET

FEATURE = "part0/nodes/_N/data/feat.arrow"


@pytest.fixture
def address(store: StandIn, bucket: str, cache: Path, tmp_path: Path) -> str:
    """The address of two triangles in two parts."""
    write_dataset(TWO_TRIANGLES, ODD_ONES_OUT, tmp_path / "local")
    store.put_folder(tmp_path / "local", bucket, "graphs/two")
    return f"s3://{bucket}/graphs/two"


def features(dataset: StoredDataset) -> np.ndarray:
    parts = [dataset.part(part).node_data(NODE_TYPE, "feat") for part in range(dataset.manifest.num_parts)]
    return np.concatenate(parts)


def object_path(address: str, name: str) -> str:
    return f"/{address.removeprefix('s3://')}/{name}"


def test_values_equal_those_of_the_folder(address: str, tmp_path: Path) -> None:
    local, copy = open_dataset(tmp_path / "local"), open_dataset(address)
    assert copy.manifest.checksum == local.manifest.checksum
    assert features(copy).tobytes() == features(local).tobytes()
    for part in range(2):
        assert list(copy.part(part).user_ids(NODE_TYPE)) == list(local.part(part).user_ids(NODE_TYPE))
    for name in ("indptr", "indices"):
        pair = [getattr(open_structure(dataset, EDGE_TYPE), name) for dataset in (local, copy)]
        assert pair[0].tobytes() == pair[1].tobytes()


def test_fetches_each_needed_file_once(address: str, store: StandIn) -> None:
    dataset = open_dataset(address)
    assert not dataset.has_part(0)
    dataset.fetch_parts([1])
    assert dataset.has_part(1)
    assert not dataset.has_part(0)
    infos = dataset.manifest.files
    size_of_part = sum(info.num_bytes for path, info in infos.items() if path.startswith("part1/"))
    assert store.count_bytes("/part") == store.count_bytes("/part1/") == size_of_part
    # Another opening downloads the manifest, and nothing else.
    store.sent.clear()
    open_dataset(address).fetch_parts([1])
    assert store.count_bytes("/part") == 0
    assert store.count_bytes("manifest.json") > 0


def test_paths_lose_a_slash_of_addresses(address: str) -> None:
    assert open_dataset(Path(address)).folder == open_dataset(address).folder
    assert find_address(Path("s3://bucket/a/b")) == find_address("s3://bucket/a/b") == "s3://bucket/a/b"
    assert find_address("S3://bucket/a") == "s3://bucket/a"
    assert find_address(Path("file:///tmp/a")) == "file:///tmp/a"
    for name in ("synthetic:nodes=5", "tables:/data/shop", "data/shop", "ogb:ogbn-arxiv"):
        assert find_address(name) is None
    assert format_location(Path("data/shop")) == "data/shop"


def test_replaced_dataset_has_a_copy_of_its_own(
    address: str, store: StandIn, bucket: str, tmp_path: Path
) -> None:
    old = open_dataset(address)
    old_rows = features(old)
    write_dataset(random_homogeneous(1), ODD_ONES_OUT_OF_40, tmp_path / "new")
    store.put_folder(tmp_path / "new", bucket, "graphs/two")
    new = open_dataset(address)
    assert new.folder != old.folder
    assert features(new).tobytes() == features(open_dataset(tmp_path / "new")).tobytes()
    assert features(old).tobytes() == old_rows.tobytes()


ODD_ONES_OUT_OF_40 = type(ODD_ONES_OUT)(
    num_parts=2, part_of={NODE_TYPE: np.arange(40, dtype=np.int32) % 2}, method="by hand", seed=7
)


@pytest.fixture
def large(store: StandIn, bucket: str, cache: Path, tmp_path: Path) -> str:
    """The address of one part with a feature file of 3.2 MB, which arrives in several chunks."""
    graph = random_homogeneous(3, num_nodes=40, width=20_000)
    assignment = type(ODD_ONES_OUT)(
        num_parts=1, part_of={NODE_TYPE: np.zeros(40, np.int32)}, method="by hand", seed=7
    )
    write_dataset(graph, assignment, tmp_path / "large")
    store.put_folder(tmp_path / "large", bucket, "large")
    return f"s3://{bucket}/large"


def test_cut_connection_is_resumed_at_the_same_byte(large: str, store: StandIn, tmp_path: Path) -> None:
    store.fail("GET", "feat", cut_after(1_500_000), cut_after(700_000))
    rows = features(open_dataset(large))
    assert rows.tobytes() == features(open_dataset(tmp_path / "large")).tobytes()
    path = object_path(large, FEATURE)
    starts = [span for method, where, span in store.requests if method == "GET" and where == path]
    assert len(starts) == 3
    size = open_dataset(tmp_path / "large").manifest.files[FEATURE].num_bytes
    first, second, third = (int(span.split("=")[1].split("-")[0]) for span in starts)
    assert first == 0 < second < third < size
    # Only bytes that were under way are sent twice.
    assert store.count_bytes("feat") <= 1.05 * size + 2 * object_store._CHUNK_BYTES


def test_killed_download_is_resumed(large: str, store: StandIn, cache: Path, tmp_path: Path) -> None:
    """A process is killed after the first chunk: the next one only asks for the others."""
    code = f"""
import os, sys
from dglx_dist.data.storage import remote
from dglx_dist.data.storage.files import lock_exclusive
from dglx_dist.data.storage.reader import open_dataset
def append(download, file, name, first_byte, end):
    for chunk in download._store.read(name, first_byte, end - first_byte):
        file.write(chunk)
        os.kill(os.getpid(), 9)
remote._Download._append = append
open_dataset({large!r}).part(0).node_data("_N", "feat")
"""
    killed = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": os.getcwd()}, check=False
    )
    assert killed.returncode == -9
    (part,) = cache.rglob("*.parts/**/feat.arrow")
    size_of_part = part.stat().st_size
    assert size_of_part == object_store._CHUNK_BYTES
    store.sent.clear()
    rows = features(open_dataset(large))
    assert rows.tobytes() == features(open_dataset(tmp_path / "large")).tobytes()
    size = open_dataset(tmp_path / "large").manifest.files[FEATURE].num_bytes
    assert store.count_bytes("feat") == size - size_of_part
    assert not [path for path in cache.rglob("*.parts/**/*") if path.is_file()]


def test_wrong_first_bytes_of_a_killed_download_are_fetched_again(
    large: str, cache: Path, tmp_path: Path
) -> None:
    dataset = open_dataset(large)
    part = remote.parts_folder(dataset.folder) / FEATURE
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * 1000)
    assert features(dataset).tobytes() == features(open_dataset(tmp_path / "large")).tobytes()


def test_two_threads_download_a_file_once(large: str, store: StandIn) -> None:
    """The second waits for the lock of the first, which gets its answer late."""
    store.fail("GET", "feat", wait_before(0.5))
    datasets = [open_dataset(large) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(features, datasets)
    assert first.tobytes() == second.tobytes()
    assert store.count_bytes("feat") == datasets[0].manifest.files[FEATURE].num_bytes


def test_waiting_for_another_process_ends(
    large: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = open_dataset(large)
    part = remote.parts_folder(dataset.folder) / FEATURE
    lock = lock_exclusive(part, 0.0)
    monkeypatch.setattr(remote, "_LOCK_LIMIT_S", 0.1)
    with pytest.raises(StorageError, match=f"another process has not finished {large}/{FEATURE}: "):
        dataset.fetch_parts([0])
    assert caplog.text.count("waiting for another process that downloads") == 1
    os.close(lock)
    dataset.fetch_parts([0])


def test_waiting_continues_while_the_other_process_downloads(
    large: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = open_dataset(large)
    part = remote.parts_folder(dataset.folder) / FEATURE
    lock = lock_exclusive(part, 0.0)
    monkeypatch.setattr(remote, "_POLL_S", 0.01)
    monkeypatch.setattr(remote, "_LOCK_LIMIT_S", 2.0)
    with ThreadPoolExecutor(1) as pool:
        task = pool.submit(dataset.fetch_parts, [0])
        for _ in range(10):
            time.sleep(0.4)
            os.write(lock, b"x")
        assert not task.done()
        os.close(lock)
        task.result()


@pytest.mark.parametrize("change", ["unlink", "rename"])
def test_waiter_does_not_lock_a_file_that_is_gone(change: str, tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = lock_exclusive(path, 0.0)
    with ThreadPoolExecutor(1) as pool:
        task = pool.submit(lock_exclusive, path, 30.0)
        time.sleep(0.5)
        path.unlink() if change == "unlink" else path.rename(tmp_path / "published")
        os.close(first)
        second = task.result()
    assert os.path.samestat(os.fstat(second), path.stat())
    with pytest.raises(StorageError, match="another job uses"):
        lock_exclusive(path, 0.0)
    os.close(second)


def test_file_that_is_renamed_before_it_is_locked_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock"
    flock = fcntl.flock

    def rename_first(descriptor: int, operation: int) -> None:
        if not (tmp_path / "published").exists():
            path.rename(tmp_path / "published")
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", rename_first)
    lock = lock_exclusive(path, 0.0)
    assert os.path.samestat(os.fstat(lock), path.stat())
    os.close(lock)


def test_throttled_requests_are_repeated(address: str, store: StandIn, tmp_path: Path) -> None:
    store.fail("GET", "feat", *[answer("503 Slow Down", "SlowDown")] * 3)
    assert features(open_dataset(address)).tobytes() == features(open_dataset(tmp_path / "local")).tobytes()


def corrupt(*, keep_checksum: bool) -> Fault:
    """Change the last byte of a body, with or without the checksum of the store in the head."""

    def apply(application: Any, environ: Any, start_response: Any) -> list[bytes]:
        def start(status: str, headers: list[tuple[str, str]]) -> Any:
            kept = [item for item in headers if keep_checksum or "checksum" not in item[0].lower()]
            return start_response(status, kept)

        body = bytearray(b"".join(application(environ, start)))
        body[-1] ^= 1
        return [bytes(body)]

    return apply


@pytest.mark.parametrize(
    ("keep_checksum", "message"),
    [
        (False, "is damaged: its checksum is .*Upload the dataset"),
        (True, "differs from the checksum .*upload it"),
    ],
)
def test_wrong_checksum_names_object_and_remedy(
    keep_checksum: bool, message: str, address: str, store: StandIn
) -> None:
    dataset = open_dataset(address)
    store.fail("GET", "feat", corrupt(keep_checksum=keep_checksum))
    with pytest.raises(StorageError, match=f"^{address}/{FEATURE} {message}"):
        dataset.part(0).node_data(NODE_TYPE, "feat")
    # The damaged bytes are not kept.
    assert not list(dataset.folder.rglob("feat*"))
    assert len(dataset.part(0).node_data(NODE_TYPE, "feat")) == 3


def test_values_out_of_range_are_refused(address: str, store: StandIn, bucket: str, tmp_path: Path) -> None:
    """A dataset that was damaged before its checksums were made: compiled code would read outside arrays."""
    path = "part0/edges/_N._E._N/indices.arrow"
    put_value(tmp_path / "local", path, 2, 99)
    store.put_folder(tmp_path / "local", bucket, "graphs/two")
    with pytest.raises(DglxError, match=r"indices\[2\] is 99"):
        open_dataset(address).part(0).indices(EDGE_TYPE)


ERRORS: dict[str, tuple[Fault, str]] = {
    "forbidden": (
        answer("403 Forbidden", "AccessDenied"),
        r"no permission for .*feat.arrow \(AccessDenied\); log in",
    ),
    "expired": (
        answer("400 Bad Request", "ExpiredToken"),
        r"no permission for .*feat.arrow \(ExpiredToken\); log in",
    ),
    "missing": (answer("404 Not Found", "NoSuchKey"), r"there is no object .*feat.arrow; check"),
    "unknown": (answer("400 Bad Request", "Strange"), r".*feat.arrow cannot be used \(Strange\)"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_refusals_name_object_and_remedy(name: str, address: str, store: StandIn) -> None:
    fault, message = ERRORS[name]
    dataset = open_dataset(address)
    store.fail("GET", "feat", fault)
    with pytest.raises(StorageError, match=message) as error:
        dataset.part(0).node_data(NODE_TYPE, "feat")
    assert f"{address}/{FEATURE}" in str(error.value)
    assert "secret" not in str(error.value)


def test_object_that_is_gone_is_named(address: str, store: StandIn, bucket: str) -> None:
    dataset = open_dataset(address)
    store.client().delete_object(Bucket=bucket, Key=f"graphs/two/{FEATURE}")
    with pytest.raises(StorageError, match=f"there is no object {address}/{FEATURE}; check the address"):
        dataset.fetch_parts([0, 1])


def test_missing_bucket_and_dataset(store: StandIn, bucket: str, cache: Path) -> None:
    with pytest.raises(
        StorageError, match=r"no bucket 'no-such-bucket' for s3://no-such-bucket/a.*create it"
    ):
        open_dataset("s3://no-such-bucket/a")
    with pytest.raises(StorageError, match=f"s3://{bucket}/a is not a partitioned dataset: .*dglx partition"):
        open_dataset(f"s3://{bucket}/a")
    with pytest.raises(ConfigError, match="names no bucket; write s3://BUCKET/NAME"):
        open_dataset("s3://")


def test_store_that_is_down_is_named_after_a_few_attempts(
    address: str, store: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = open_dataset(address)
    # The number of requests is that of the message.
    store.fail("GET", "feat", *[answer("503 Slow Down", "SlowDown")] * object_store.MAX_TRIES)
    with pytest.raises(StorageError, match=r"cannot be reached \(SlowDown, 5 attempts\); check the network"):
        dataset.part(0).node_data(NODE_TYPE, "feat")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(
        StorageError, match=r"two/manifest.json cannot be reached \(EndpointConnectionError at http"
    ):
        open_dataset(address)


def test_silent_store_ends_in_a_time_out(
    address: str, store: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "READ_TIMEOUT_S", 0.2)
    monkeypatch.setattr(object_store, "MAX_TRIES", 2)
    store.fail("GET", "manifest", *[wait_before(0.5)] * 2)
    with pytest.raises(
        StorageError, match=rf"{address}/manifest.json cannot be reached \(ReadTimeoutError at http"
    ):
        open_dataset(address)


@pytest.fixture
def blocked_modules(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda name: monkeypatch.setitem(sys.modules, name, None)


def test_missing_packages_give_the_command(blocked_modules: Callable[[str], None], cache: Path) -> None:
    blocked_modules("boto3")
    with pytest.raises(
        ConfigError, match=r"s3://a/b needs boto3; install it: pip install 'dglx_dist\[cloud\]'$"
    ):
        open_dataset("s3://a/b")
    blocked_modules("gcsfs")
    with pytest.raises(ConfigError, match=r"gs://a/b needs a package .*: pip install 'dglx_dist\[cloud\]'"):
        open_dataset("gs://a/b")
    with pytest.raises(ConfigError, match="zzz://a/b is no address"):
        open_dataset("zzz://a/b")


def test_credentials_in_addresses_are_refused_and_not_shown(cache: Path) -> None:
    with pytest.raises(ConfigError, match="leave them out, and set AWS_ACCESS_KEY_ID") as error:
        open_dataset(f"s3://id:{SECRET}@bucket/name")
    assert SECRET not in str(error.value)
    with pytest.raises(ConfigError, match="cannot be a signed URL") as error:
        open_dataset(f"https://host/name?X-Amz-Signature={SECRET}")
    assert SECRET not in str(error.value)


def test_signed_urls_are_refused_for_files_of_a_run() -> None:
    signed = f"https://host/name.csv?X-Amz-Signature={SECRET}"
    refused: tuple[tuple[Callable[..., Any], dict[str, Any]], ...] = (
        *(
            (partial(TrainConfig, data="d"), {name: signed})
            for name in ("out", "predictions", "save_embeddings")
        ),
        (TrainConfig, {"data": signed}),
        (partial(TrainConfig, data="d"), {"trace": signed}),
        (dx.FitConfig, {"checkpoint_folder": signed}),
        (partial(PredictConfig, out=Path("a.csv")), {"run": signed}),
        (partial(PredictConfig, run="r", out=Path("a.csv")), {"data": signed}),
        (partial(PredictConfig, run="r"), {"out": Path(f"{signed}&a.csv")}),
        (IngestPlan, {"out": Path(signed)}),
        (partial(PartitionCommand, data="d", num_parts=2), {"out": Path(signed)}),
    )
    for record, values in refused:
        with pytest.raises(ConfigError, match=r"https://host/name.csv is (a signed URL|an address)") as error:
            record(**values)
        assert SECRET not in str(error.value)
    with (
        pytest.raises(ConfigError, match="format='dgl' is written to a folder") as error,
        remote.stage_dataset(signed, overwrite=False, format="dgl"),
    ):
        raise AssertionError("it must not begin")
    assert SECRET not in str(error.value)


def test_container_of_azure_is_no_credential() -> None:
    address = "abfs://container@account.dfs.core.windows.net/name"
    # The package for Azure is not installed here, so the message is that of fsspec.
    with pytest.raises(ConfigError, match=rf"^{address} needs a package"):
        object_store.open_store(address)
    for scheme in ("abfs", "https", "s3"):
        with pytest.raises(ConfigError, match=f"{scheme}://...* has credentials") as error:
            object_store.open_store(f"{scheme}://user:{SECRET}@host/name")
        assert SECRET not in str(error.value)
        assert ("AWS_ACCESS_KEY_ID" in str(error.value)) == (scheme == "s3")


EDGES = "src,dst\n0,1\n1,2\n2,0\n"
NODES = "id,label\n0,1\n1,0\n2,1\n"


@pytest.fixture
def tables(store: StandIn, bucket: str, cache: Path) -> str:
    for name, text in (("edges.csv", EDGES), ("nodes.csv", NODES)):
        store.client().put_object(Bucket=bucket, Key=f"shop/{name}", Body=text.encode())
    # The prefix of the folder is also that of another one.
    store.client().put_object(Bucket=bucket, Key="shop-2/edges.csv", Body=b"src,dst\n5,6\n")
    return f"s3://{bucket}/shop"


def test_tables_are_read(tables: str, store: StandIn, bucket: str) -> None:
    graph = load_dataset(tables)
    assert graph.name == "shop"
    src, dst = graph.edges[EDGE_TYPE]
    assert (src.tolist(), dst.tolist()) == ([0, 1, 2], [1, 2, 0])
    assert graph.node_data[NODE_TYPE]["label"].tolist() == [1, 0, 1]
    store.sent.clear()
    load_dataset(tables)
    assert store.count_bytes("csv") == 0
    # Changed tables are fetched again.
    store.client().put_object(Bucket=bucket, Key="shop/nodes.csv", Body=NODES.replace("2,1", "2,0").encode())
    assert load_dataset(tables).node_data[NODE_TYPE]["label"].tolist() == [1, 0, 0]
    with pytest.raises(
        StorageError, match=r"there is no object at or below s3://.*/shops; check the address"
    ):
        load_dataset(f"{tables}s")


def test_damaged_tables_are_not_kept(tables: str, store: StandIn, cache: Path) -> None:
    store.fail("GET", "edges.csv", corrupt(keep_checksum=True))
    with pytest.raises(StorageError, match=f"^{tables}/edges.csv differs from the checksum"):
        load_dataset(tables)
    assert load_dataset(tables).edges[EDGE_TYPE][1].tolist() == [1, 2, 0]


def test_tables_that_change_meanwhile_are_refused(tables: str, store: StandIn, bucket: str) -> None:
    def change(application: object, environ: object, start_response: object) -> object:
        store.client().put_object(Bucket=bucket, Key="shop/nodes.csv", Body=b"id,label\n0,9\n")
        return application(environ, start_response)  # type: ignore[operator]

    store.fail("GET", "edges.csv", change)
    with pytest.raises(StorageError, match=r"shop/nodes.csv .*(too short|changed while it was read)"):
        load_dataset(tables)


def test_names_of_objects_do_not_collide(tables: str, store: StandIn, bucket: str) -> None:
    """An object may be called like the unfinished file of another one."""
    for name in ("edges.csv.part", "edges.csv.parts", "edges.csv.partial"):
        store.client().put_object(Bucket=bucket, Key=f"shop/{name}", Body=b"x" * 9)
    assert Path(remote.fetch_objects(tables), "edges.csv").read_text() == EDGES
    for name in ("a/../b", "./a", "../a", "/a", "nodes.csv/a"):
        store.client().put_object(Bucket=bucket, Key=f"shop/{name}", Body=b"x")
        with pytest.raises(StorageError, match=r"is no path; rename it|is an object and the folder of"):
            remote.fetch_objects(tables)
        store.client().delete_object(Bucket=bucket, Key=f"shop/{name}")
    store.client().put_object(Bucket=bucket, Key="shop/..a", Body=b"x")
    assert Path(remote.fetch_objects(tables), "..a").read_text() == "x"


def test_copy_of_changed_objects_is_not_published(
    tables: str, store: StandIn, bucket: str, cache: Path
) -> None:
    """A kill between download and check must not leave new bytes where the old version belongs."""

    def change(application: object, environ: object, start_response: object) -> object:
        store.client().put_object(
            Bucket=bucket, Key="shop/edges.csv", Body=EDGES.replace("2,0", "2,1").encode()
        )
        return application(environ, start_response)  # type: ignore[operator]

    before = Path(remote.fetch_objects(f"{tables}/nodes.csv"))
    store.fail("GET", "shop/edges.csv", change)
    with pytest.raises(StorageError, match="changed while it was read"):
        remote.fetch_objects(tables)
    assert before.read_text() == NODES
    store.client().put_object(Bucket=bucket, Key="shop/edges.csv", Body=EDGES.encode())
    assert Path(remote.fetch_objects(tables), "edges.csv").read_text() == EDGES
    assert not list(cache.rglob("*.new"))


def test_first_error_stops_other_downloads(large: str, store: StandIn) -> None:
    dataset = open_dataset(large)
    # Its chunks arrive slowly, until the error of another file stops it.
    store.fail("GET", "feat", send_slowly(0.2))
    store.fail("GET", "indptr", answer("403 Forbidden", "AccessDenied"))
    begin = time.monotonic()
    with pytest.raises(StorageError, match=r"no permission for .*indptr"):
        dataset.fetch_parts([0])
    assert time.monotonic() - begin < 8.0
    assert (remote.parts_folder(dataset.folder) / FEATURE).stat().st_size < 3_200_000


def send_slowly(pause_s: float) -> Fault:
    """Send a body in 100 pieces, with a pause after each."""

    def apply(application: Any, environ: Any, start_response: Any) -> Iterator[bytes]:
        body = b"".join(application(environ, start_response))
        step = len(body) // 100 + 1

        def chunks() -> Iterator[bytes]:
            for first in range(0, len(body), step):
                yield body[first : first + step]
                time.sleep(pause_s)

        return chunks()

    return apply


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    """The address of a server of HTTP that ignores ranges, for the folder ``web``."""
    (tmp_path / "web").mkdir()
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "web"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_resume_from_a_server_without_ranges_is_exact(web: str, cache: Path, tmp_path: Path) -> None:
    content = os.urandom(3 << 20)
    (tmp_path / "web" / "table.bin").write_bytes(content)
    address = f"{web}/table.bin"
    files = {"": FileInfo(num_bytes=len(content), checksum="")}
    target = tmp_path / "copy" / "table.bin"
    remote.parts_folder(target).parent.mkdir()
    remote.parts_folder(target).write_bytes(content[: 1 << 20])
    remote.fetch_files(object_store.open_store(address), target, files)
    assert target.read_bytes() == content
    assert Path(remote.fetch_objects(address)).read_bytes() == content
    with pytest.raises(StorageError, match=r"table.bin than were requested; it must support range requests"):
        list(object_store.open_store(address).read("", 1 << 20, 1 << 20))


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (403, r"^no permission for http://[^?]*table.csv \(status 403. A signed URL may have expired\)"),
        (404, r"^there is no object at or below http://[^?]*table.csv; check the address"),
        (503, r"^http://[^?]*table.csv cannot be reached \(status 503, 5 attempts\)"),
    ],
)
def test_refusals_of_a_web_server(status: int, message: str, store: StandIn, cache: Path) -> None:
    class Refusing(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(status)

        do_HEAD = do_GET

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(StorageError, match=message) as error:
            load_dataset(f"http://127.0.0.1:{server.server_port}/table.csv?Signature={SECRET}")
        server.shutdown()
    assert SECRET not in str(error.value)


def test_large_object_of_a_server_without_ranges(
    web: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "_FSSPEC_CHUNK_BYTES", 1000)
    (tmp_path / "web" / "table.bin").write_bytes(bytes(range(250)) * 20)
    assert Path(remote.fetch_objects(f"{web}/table.bin")).read_bytes() == bytes(range(250)) * 20


def test_addresses_of_fsspec_are_read(tmp_path: Path, cache: Path) -> None:
    """file:// stands for any implementation of fsspec."""
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "edges.csv").write_text(EDGES)
    assert load_dataset(f"file://{tmp_path}/shop").total_edges == 3
    write_dataset(TWO_TRIANGLES, ODD_ONES_OUT, tmp_path / "local")
    copy = open_dataset(f"file://{tmp_path}/local")
    assert copy.folder.is_relative_to(cache)
    assert features(copy).tobytes() == features(open_dataset(tmp_path / "local")).tobytes()
    (tmp_path / "local" / FEATURE.replace("part0", "part1")).unlink()
    (cache / copy.folder / FEATURE.replace("part0", "part1")).unlink()
    with pytest.raises(StorageError, match=f"there is no object file://{tmp_path}/local/part1/nodes"):
        open_dataset(f"file://{tmp_path}/local").part(1).node_data(NODE_TYPE, "feat")


def test_signed_urls_do_not_appear_in_messages(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of HTTP libraries hold the complete address."""

    class Failing(fsspec.AbstractFileSystem):
        protocol = "https"
        cachable = False  # codespell:ignore cachable

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return path

        def info(self, path: str, **_options: Any) -> Any:
            raise OSError(f"403, url={path!r}")

    monkeypatch.setitem(vars(sys.modules["fsspec.registry"])["_registry"], "https", Failing)
    with pytest.raises(StorageError, match=r"^https://host/a/edges.csv cannot be reached \(OSError") as error:
        load_dataset(f"https://host/a/edges.csv?X-Amz-Signature={SECRET}")
    text = "".join(traceback.format_exception(error.value))
    assert SECRET not in text
