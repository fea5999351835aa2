"""Datasets are uploaded so that a reader sees the old one, none, or the complete new one."""

from pathlib import Path
from typing import Any

import dgl
import pytest

from dglx_dist.api import partition_graph
from dglx_dist.data.ingest.config import IngestPlan, read_config
from dglx_dist.data.partition.base import PartitionPlan
from dglx_dist.data.storage import object_store, remote
from dglx_dist.data.storage.reader import open_dataset
from dglx_dist.errors import ConfigError, StorageError
from dglx_dist.records import NODE_TYPE
from dglx_dist.training.config import TrainConfig
from tests.data.storage.graphs import assert_same_graph, read_back
from tests.helpers.commands import dglx
from tests.helpers.object_store import StandIn, answer

TABLES = {
    "edges.csv": "src,dst\n" + "".join(f"{i},{(i + 1) % 10}\n" for i in range(10)),
    "nodes.csv": "id,label,split,feat_0\n" + "".join(f"{i},{i % 2},train,{i / 4}\n" for i in range(10)),
}
CONFIG = """{"version": "gconstruct-v0.1",
 "nodes": [{"node_type": "n", "node_id_col": "id", "format": {"name": "csv"}, "files": "no*.csv"}],
 "edges": [{"relation": ["n", "to", "n"], "source_id_col": "src", "dest_id_col": "dst",
            "format": {"name": "csv"}, "files": ["edges.csv"]}]}"""


@pytest.fixture
def shop(store: StandIn, bucket: str, cache: Path) -> str:
    for name, text in {**TABLES, "shop.json": CONFIG, "other.csv": "x\n1\n"}.items():
        folder = "shop" if name.endswith("es.csv") else "described"
        store.client().put_object(Bucket=bucket, Key=f"{folder}/{name}", Body=text.encode())
    for name, text in TABLES.items():
        store.client().put_object(Bucket=bucket, Key=f"described/{name}", Body=text.encode())
    return f"s3://{bucket}/shop"


def keys(store: StandIn, bucket: str, prefix: str) -> list[str]:
    entries = store.client().list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", [])
    return [entry["Key"].removeprefix(prefix) for entry in entries]


def run(*words: str) -> str:
    done = dglx(*words)
    assert done.returncode == 0, done.stderr
    return " ".join(done.stdout.split())


def local_shop(folder: Path) -> Path:
    folder.mkdir()
    for name, text in TABLES.items():
        (folder / name).write_text(text)
    return folder


def test_partition_reads_and_writes_addresses(shop: str, store: StandIn, bucket: str, tmp_path: Path) -> None:
    out = f"s3://{bucket}/parts"
    output = run("partition", shop, "--parts", "2", "--method", "random", "--out", out)
    assert f"written to {out}; next: dglx inspect {out}, dglx train {out}" in output
    local = local_shop(tmp_path / "shop")
    run("partition", str(local), "--parts", "2", "--method", "random", "--out", str(tmp_path / "parts"))

    expected, copy = open_dataset(tmp_path / "parts"), open_dataset(out)
    assert copy.manifest.files == expected.manifest.files
    assert_same_graph(read_back(copy), read_back(expected))
    assert sorted(keys(store, bucket, "parts/")) == sorted([*expected.manifest.files, "manifest.json"])
    # The manifest came last, and nothing is left of the upload.
    puts = [path for method, path, _ in store.requests if method == "PUT" and "/parts/" in path]
    assert puts[-1].endswith("/parts/manifest.json")
    assert not list((tmp_path / "cache").rglob("upload/parts"))


def test_datasets_of_one_part_are_partitioned_again(shop: str, bucket: str) -> None:
    run("ingest", f"s3://{bucket}/described/shop.json", "--out", f"s3://{bucket}/one", "--memory", "2GB")
    manifest = open_dataset(f"s3://{bucket}/one").manifest
    assert (manifest.name, manifest.num_parts, manifest.num_nodes("n")) == ("one", 1, 10)
    run("partition", f"s3://{bucket}/one", "--parts", "2", "--out", f"s3://{bucket}/two", "--memory", "2GB")
    assert open_dataset(f"s3://{bucket}/two").manifest.num_parts == 2
    done = dglx("partition", f"s3://{bucket}/two", "--parts", "2", "--out", f"s3://{bucket}/three")
    assert f"error: s3://{bucket}/two already has 2 parts" in " ".join(done.stderr.split())


def test_description_takes_only_the_files_that_it_names(shop: str, store: StandIn, bucket: str) -> None:
    run("ingest", f"s3://{bucket}/described/shop.json", "--out", f"s3://{bucket}/one")
    assert store.count_bytes("described/other.csv") == 0
    assert store.count_bytes("described/edges.csv") == len(TABLES["edges.csv"])


def test_description_beside_a_dataset_names_files_in_folders(
    shop: str, store: StandIn, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ** stands for any number of folders, also none. Only files of the store count."""
    bodies = {
        "manifest.json": "{}",
        "shop.json": CONFIG.replace("no*.csv", "**/nodes.csv").replace("edges.csv", "a/*.csv"),
        "nodes.csv": TABLES["nodes.csv"],
        "a/edges.csv": TABLES["edges.csv"],
        "a/b/edges.csv": TABLES["edges.csv"],
    }
    for name, text in bodies.items():
        store.client().put_object(Bucket=bucket, Key=f"beside/{name}", Body=text.encode())
    run("ingest", f"s3://{bucket}/beside/shop.json", "--out", f"s3://{bucket}/one")
    assert open_dataset(f"s3://{bucket}/one").manifest.num_edges(("n", "to", "n")) == 10
    assert store.count_bytes("beside/a/b/edges.csv") == 0

    monkeypatch.chdir(local_shop(tmp_path / "shop"))
    store.client().delete_object(Bucket=bucket, Key="beside/nodes.csv")
    with pytest.raises(ConfigError, match=r"there is no file '\*\*/nodes.csv' beside the description"):
        read_config(Path(f"s3://{bucket}/beside/shop.json"))


def ring() -> dgl.DGLGraph:
    return dgl.graph((list(range(6)), [1, 2, 3, 4, 5, 0]))


def test_partition_graph_writes_an_address(store: StandIn, bucket: str, cache: Path) -> None:
    mapping = partition_graph(
        ring(), "ring", 2, f"s3://{bucket}/graphs", part_method="random", return_mapping=True
    )
    assert mapping is not None
    nodes, _ = mapping
    assert sorted(nodes.tolist()) == list(range(6))  # type: ignore[union-attr]  # one node type
    assert open_dataset(f"s3://{bucket}/graphs/ring").manifest.num_nodes(NODE_TYPE) == 6
    with pytest.raises(ConfigError, match="format='dgl' is written to a folder"):
        partition_graph(ring(), "ring", 2, f"s3://{bucket}/graphs", format="dgl")


def test_overwrite_is_needed_and_removes_old_parts(store: StandIn, bucket: str, cache: Path) -> None:
    folder = f"s3://{bucket}/graphs"
    partition_graph(ring(), "ring", 3, folder, part_method="random")
    with pytest.raises(
        StorageError, match=f"{folder}/ring exists already; choose another address, or give --over"
    ):
        partition_graph(ring(), "ring", 2, folder)
    partition_graph(ring(), "ring", 2, folder, part_method="random", overwrite=True)
    names = keys(store, bucket, "graphs/ring/")
    assert {name.split("/")[0] for name in names} == {"manifest.json", "part0", "part1"}

    foreign = ("notes.txt", "part1/mydata.parquet", "part1/nodes/_N/data/mine.arrow", "part9/a/indptr.arrow")
    for name in foreign:
        store.client().put_object(Bucket=bucket, Key=f"graphs/ring/{name}", Body=b"mine")
        with pytest.raises(
            StorageError, match=rf"ring/{name} is not part of a dataset, so .* not overwritten"
        ):
            partition_graph(ring(), "ring", 2, folder, overwrite=True)
        store.client().delete_object(Bucket=bucket, Key=f"graphs/ring/{name}")
    store.client().put_object(Bucket=bucket, Key="other/ring/part1/mydata.parquet", Body=b"mine")
    with pytest.raises(StorageError, match=r"mydata.parquet is not part of a dataset"):
        partition_graph(ring(), "ring", 2, f"s3://{bucket}/other", overwrite=True)
    store.client().put_object(Bucket=bucket, Key="other/ring/manifest.json", Body=b"[]")
    with pytest.raises(StorageError, match=r"is not part of a dataset"):
        partition_graph(ring(), "ring", 2, f"s3://{bucket}/other", overwrite=True)
    assert len(keys(store, bucket, "other/")) == 2


def test_denied_delete_does_not_lock_the_address(store: StandIn, bucket: str, cache: Path) -> None:
    """The test object is left, which is no reason to ask for --overwrite when the permission is there."""
    folder = f"s3://{bucket}/graphs"
    store.fail("DELETE", "probe", answer("403 Forbidden", "AccessDenied"))
    with pytest.raises(StorageError, match=r"no permission for .*part0/probe"):
        partition_graph(ring(), "ring", 2, folder)
    assert keys(store, bucket, "graphs/ring/") == ["part0/probe"]
    partition_graph(ring(), "ring", 2, folder, part_method="random")
    assert "part0/probe" not in keys(store, bucket, "graphs/ring/")


def test_upload_to_a_busy_store_has_as_many_requests_as_its_message(
    store: StandIn, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.0)
    (tmp_path / "a").write_text("x")
    store.fail("PUT", "busy", *[answer("503 Slow Down", "SlowDown")] * object_store.MAX_TRIES)
    with pytest.raises(StorageError, match=r"busy/a cannot be reached \(SlowDown, 5 attempts\)"):
        object_store.open_store(f"s3://{bucket}/busy").put("a", tmp_path / "a")


def test_reader_of_a_half_written_dataset_finds_none(
    store: StandIn, bucket: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The upload of a new content fails in the middle: the old manifest must not name the new files."""
    folder = f"s3://{bucket}/graphs"
    partition_graph(ring(), "ring", 2, folder, part_method="random")
    reader = open_dataset(f"{folder}/ring")
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.0)
    store.fail("PUT", "ring/part1/.*indices", *[answer("403 Forbidden", "AccessDenied")])
    with pytest.raises(StorageError, match=r"no permission for .*indices.arrow") as error:
        partition_graph(ring(), "ring", 2, folder, part_method="random", seed=5, overwrite=True)
    (left,) = cache.rglob("upload/ring")
    assert f"The finished dataset is in {left}: copy it to {folder}/ring, manifest.json last" in str(
        error.value
    )
    assert open_dataset(left).manifest.seed == 5
    with pytest.raises(StorageError, match=r"is not a partitioned dataset: it has no manifest.json"):
        open_dataset(f"{folder}/ring")
    # A reader that has the old manifest notices new files by their checksums.
    with pytest.raises(StorageError, match=r"is damaged: .*If it was replaced meanwhile, start again"):
        reader.fetch_parts([0, 1])
    # The next command writes it again.
    partition_graph(ring(), "ring", 2, folder, part_method="random", seed=5, overwrite=True)
    assert open_dataset(f"{folder}/ring").manifest.seed == 5


def test_missing_permission_is_found_before_work(
    store: StandIn, bucket: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.fail("PUT", "", answer("403 Forbidden", "AccessDenied"))
    with (
        pytest.raises(StorageError, match=f"no permission for s3://{bucket}/a/part0/probe"),
        remote.stage_dataset(f"s3://{bucket}/a", overwrite=False),
    ):
        raise AssertionError("it must not begin")
    with (
        pytest.raises(StorageError, match="no bucket 'no-such-bucket'"),
        remote.stage_dataset("s3://no-such-bucket/a", overwrite=False),
    ):
        raise AssertionError("it must not begin")


def test_throttled_upload_is_repeated(store: StandIn, bucket: str, cache: Path) -> None:
    store.fail("PUT", "indptr", *[answer("503 Slow Down", "SlowDown")] * 2)
    partition_graph(ring(), "ring", 2, f"s3://{bucket}/graphs", part_method="random")
    open_dataset(f"s3://{bucket}/graphs/ring").fetch_parts([0, 1])


def test_second_writer_of_an_address_is_refused(store: StandIn, bucket: str, cache: Path) -> None:
    address = f"s3://{bucket}/a"
    first = remote.stage_dataset(address, overwrite=False)
    first.__enter__()
    with (
        pytest.raises(StorageError, match="another job uses"),
        remote.stage_dataset(address, overwrite=False),
    ):
        raise AssertionError("it must not begin")
    assert not keys(store, bucket, "a/")


def test_files_of_this_machine_cannot_be_addresses() -> None:
    refused = (
        (TrainConfig, {"data": "d", "trace": "s3://a/t.json"}, "--trace s3://a/t.json is an address"),
        (PartitionPlan, {"num_parts": 2, "scratch": Path("s3://a/b")}, "--scratch s3://a/b is an address"),
        (IngestPlan, {"workspace": Path("s3://a/b")}, "--workspace s3://a/b is an address"),
    )
    for record, values, message in refused:
        with pytest.raises(ConfigError, match=message):
            record(**values)  # type: ignore[arg-type]  # values of several records


def test_addresses_of_fsspec_are_written(tmp_path: Path, cache: Path) -> None:
    for overwrite in (False, True):
        partition_graph(
            ring(), "ring", 2, f"file://{tmp_path}/graphs", part_method="random", overwrite=overwrite
        )
    expected: Any = open_dataset(tmp_path / "graphs" / "ring")
    assert_same_graph(read_back(open_dataset(f"file://{tmp_path}/graphs/ring")), read_back(expected))


def test_time_out_of_fsspec_names_the_address(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    from fsspec.implementations.local import LocalFileSystem

    monkeypatch.setattr(object_store, "READ_TIMEOUT_S", 0.05)
    monkeypatch.setattr(object_store, "_FSSPEC_CHUNK_BYTES", 1000)
    monkeypatch.setattr(object_store, "MAX_TRIES", 2)
    monkeypatch.setattr(object_store, "PAUSE_S", 0.0)
    monkeypatch.setattr(LocalFileSystem, "cat_file", lambda *_args, **_options: time.sleep(3))
    with pytest.raises(StorageError, match=r"file:///a/b/manifest.json cannot be reached \(no answer in"):
        open_dataset("file:///a/b")
