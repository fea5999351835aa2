"""Run folders and predictions at an address: ranks that share no disk write them, and commands read them."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.errors import StorageError
from dglx_dist.records import NODE_TYPE, Assignment
from dglx_dist.report.run_store import RunStore
from dglx_dist.training.export import check_target
from tests.data.storage.graphs import random_homogeneous
from tests.helpers.commands import dglx
from tests.helpers.object_store import StandIn, answer
from tests.stores.conftest import SECRET


def run(*words: str) -> str:
    done = dglx(*words)
    assert done.returncode == 0, done.stderr
    return " ".join(done.stdout.split())


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    graph = random_homogeneous(5, num_nodes=200, num_edges=900, width=8)
    part_of = {NODE_TYPE: np.arange(200, dtype=np.int32) % 2}
    write_dataset(
        graph, Assignment(num_parts=2, part_of=part_of, method="by hand", seed=0), tmp_path / "data"
    )
    return tmp_path / "data"


def read_table(store: StandIn, bucket: str, prefix: str, folder: Path) -> dict[int, int]:
    """Return the predicted class of each id in the Parquet objects below ``prefix``."""
    entries = store.client().list_objects_v2(Bucket=bucket, Prefix=prefix)["Contents"]
    values = {}
    for number, entry in enumerate(entries):
        if entry["Key"].endswith(".parquet"):
            store.client().download_file(bucket, entry["Key"], str(folder / f"{number}.parquet"))
            rows = pq.read_table(folder / f"{number}.parquet").to_pydict()
            values |= dict(zip(rows["id"], rows["prediction"], strict=True))
    return values


def test_run_resumes_from_the_store_alone(
    store: StandIn, bucket: str, cache: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second command has an empty cache, as on another machine, and continues the first."""
    address = f"s3://{bucket}/runs/a"
    common = ("train", str(dataset), "--ranks", "2", "--batch-size", "25", "--checkpoint-every", "1")
    run(*common, "--epochs", "2", "--out", address)
    monkeypatch.setenv("DGLX_DATASET_CACHE", str(tmp_path / "other-cache"))
    output = run(*common, "--epochs", "3", "--out", address, "--predictions", f"s3://{bucket}/answers")
    assert f"written to {address}, predictions to s3://{bucket}/answers" in output

    run(*common, "--epochs", "3", "--out", str(tmp_path / "b"), "--predictions", str(tmp_path / "expected"))
    names = ("metrics.jsonl", "summary.json", "config.json", "model.safetensors", "final.safetensors")
    objects = {
        name: store.client().get_object(Bucket=bucket, Key=f"runs/a/{name}")["Body"].read() for name in names
    }
    local_lines = (tmp_path / "b" / "metrics.jsonl").read_text().splitlines()
    lines = objects["metrics.jsonl"].decode().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == [json.loads(line)["loss"] for line in local_lines]
    assert objects["final.safetensors"] == (tmp_path / "b" / "final.safetensors").read_bytes()
    # No file of a run has a secret.
    assert SECRET.encode() not in b"".join(objects.values())

    expected = {}
    for path in (tmp_path / "expected").glob("*.parquet"):
        rows = pq.read_table(path).to_pydict()
        expected |= dict(zip(rows["id"], rows["prediction"], strict=True))
    assert len(expected) == 200
    assert read_table(store, bucket, "answers/", tmp_path) == expected

    assert "epoch" in run("report", address)
    run("predict", address, "--out", f"s3://{bucket}/single/answers.parquet")
    assert read_table(store, bucket, "single/", tmp_path) == expected
    done = dglx("predict", address, "--out", f"s3://{bucket}/single/answers.parquet")
    assert f"--out s3://{bucket}/single/answers.parquet exists" in " ".join(done.stderr.split())


def test_stale_local_files_are_not_uploaded_by_seeds(
    store: StandIn, bucket: str, cache: Path, dataset: Path
) -> None:
    """The folder in the cache has files of an earlier run, and the store one of another machine."""
    address = f"s3://{bucket}/seeds"
    folder = RunStore(address).folder
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("stale")
    store.client().put_object(Bucket=bucket, Key="seeds/other.txt", Body=b"kept")
    run("train", str(dataset), "--ranks", "1", "--seeds", "0,1", "--epochs", "1", "--out", address)
    entries = store.client().list_objects_v2(Bucket=bucket, Prefix="seeds/", Delimiter="/")["Contents"]
    assert [entry["Key"] for entry in entries] == ["seeds/other.txt", "seeds/summary.json"]


def test_failed_upload_of_an_epoch_does_not_end_training(
    store: StandIn, bucket: str, cache: Path, dataset: Path
) -> None:
    address = f"s3://{bucket}/run"
    # The first upload is that of the start. The second epoch uploads what the first one could not.
    store.fail("PUT", "metrics.jsonl", answer("403 Forbidden", "AccessDenied"))
    common = ("train", str(dataset), "--ranks", "2", "--batch-size", "25")
    done = dglx(*common, "--epochs", "2", "--out", address)
    assert done.returncode == 0, done.stderr
    output = " ".join((done.stdout + done.stderr).split())
    assert f"warning: no permission for {address}/metrics.jsonl (AccessDenied)" in output
    body = store.client().get_object(Bucket=bucket, Key="run/metrics.jsonl")["Body"].read()
    assert [json.loads(line)["epoch"] for line in body.decode().splitlines()] == [0, 1]
    # The last upload has no next one, so its error is that of the run, on all ranks.
    store.fail("PUT", "summary.json", answer("403 Forbidden", "AccessDenied"))
    done = dglx(*common, "--epochs", "1", "--out", f"{address}-2")
    assert done.returncode != 0
    assert f"no permission for {address}-2/summary.json" in " ".join(done.stderr.split())


def test_foreign_objects_are_not_replaced_by_predictions(store: StandIn, bucket: str, cache: Path) -> None:
    store.client().put_object(Bucket=bucket, Key="mine/table.parquet", Body=b"rows")
    with pytest.raises(StorageError, match="does not hold exported rows, so it is not overwritten"):
        check_target(Path(f"s3://{bucket}/mine"), overwrite=True)
    with pytest.raises(StorageError, match="exists already"):
        check_target(Path(f"s3://{bucket}/mine"), overwrite=False)
    check_target(Path(f"s3://{bucket}/free"), overwrite=False)


def test_report_of_a_missing_run_names_its_address(store: StandIn, bucket: str, cache: Path) -> None:
    done = dglx("report", f"s3://{bucket}/none")
    assert done.returncode != 0
    assert f"there is no object at or below s3://{bucket}/none" in " ".join(done.stderr.split())


def test_only_changed_files_are_uploaded(store: StandIn, bucket: str, cache: Path) -> None:
    folder = RunStore(f"s3://{bucket}/run")
    folder.pull()
    folder.folder.mkdir(parents=True)
    (folder.folder / "config.json").write_text("{}")
    (folder.folder / "metrics.jsonl").write_text("1\n")
    folder.push()
    (folder.folder / "metrics.jsonl").write_text("1\n2\n")
    (folder.folder / "config.json").unlink()
    store.requests.clear()
    folder.push()
    assert [(method, path) for method, path, _ in store.requests] == [
        ("PUT", f"/{bucket}/run/metrics.jsonl"),
        ("DELETE", f"/{bucket}/run/config.json"),
    ]
    other = RunStore(f"s3://{bucket}/run")
    other.pull()
    assert [path.name for path in other.folder.iterdir()] == ["metrics.jsonl"]
