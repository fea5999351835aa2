"""Machines without a home folder, with a package that cannot be written, and with names that are no text."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest

import dglx_dist as dx
from dglx_dist.cli.train_job import train_dataset
from dglx_dist.data.partition.base import PartitionPlan
from dglx_dist.data.partition.prepare import partition_to_disk
from dglx_dist.data.sources import load_dataset
from dglx_dist.data.storage.reader import open_dataset
from dglx_dist.errors import StorageError
from dglx_dist.keyed_random import mix
from dglx_dist.training.config import TrainConfig
from tests.graph import small
from tests.helpers import refusal

PACKAGE = Path(dx.__file__).parent
READ_ONLY = f'mount --bind {PACKAGE} {PACKAGE} && mount -o remount,bind,ro {PACKAGE} && exec "$@"'
COMPILE = """
import dglx_dist, numpy, os
from dglx_dist.keyed_random import mix
import dgl, matplotlib
print(mix(numpy.uint64(7)), os.environ["NUMBA_CACHE_DIR"], os.environ["MPLCONFIGDIR"])
"""


def in_namespace(*command: str) -> list[str]:
    """Return ``command`` for a mount namespace in which the package cannot be written."""
    inside = ["unshare", "-m", "bash", "-c", READ_ONLY, "bash"]
    if shutil.which("unshare") is None or subprocess.run([*inside, "true"], check=False).returncode != 0:
        pytest.skip("no mount namespaces can be made here")
    return [*inside, *command]


@pytest.mark.wide
@pytest.mark.parametrize("foreign", ["", "somebody's"], ids=["none", "foreign"])
def test_caches_go_to_a_folder_of_their_user(foreign: str, tmp_path: Path) -> None:
    usual = tmp_path / f"dglx-cache-{os.getuid()}"
    if foreign:
        # Numba unpickles what lies in its cache: a folder that others may write is not used.
        usual.mkdir()
        usual.chmod(0o777)
    variables = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path), "HOME": "/proc/nowhere"}
    command = in_namespace(sys.executable, "-c", COMPILE)
    done = subprocess.run(
        command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    number, *caches = done.stdout.split()
    assert int(number) == int(mix(np.uint64(7)))
    for cache in map(Path, caches):
        assert (cache == usual) != bool(foreign)
        assert cache.stat().st_mode & 0o777 == 0o700
    (line,) = done.stderr.splitlines()
    assert line.endswith(f"The cache of numba is in {caches[0]}. Set NUMBA_CACHE_DIR to choose another.")


def test_names_that_are_not_utf_8(tmp_path: Path) -> None:
    """Such names are usual in a C locale, where every name is bytes."""
    folder = tmp_path / os.fsdecode(b"d\xff\xe4")
    (folder / "tables" / "nodes").mkdir(parents=True)
    (folder / "tables" / "edges").mkdir()
    nodes = "".join(f"{i},{i % 3},{i},{i % 2},{'train' if i < 20 else 'test'}\n" for i in range(30))
    (folder / "tables" / "nodes" / "a.csv").write_text(f"id,feat_0,feat_1,label,split\n{nodes}")
    table = pyarrow.table({"src": list(range(30)), "dst": [*range(1, 30), 0]})
    with (folder / "tables" / "edges" / "a__to__a.parquet").open("wb") as file:
        pyarrow.parquet.write_table(table, file)
    plan = PartitionPlan(num_parts=2, method="hash")
    partition_to_disk(load_dataset(folder / "tables"), folder / "g", plan)
    request = {"epochs": 1, "fanouts": (3, 3), "checkpoint_every": 1, "predictions": str(folder / "rows")}
    out = str(folder / "run")
    trained = train_dataset(TrainConfig(data=str(folder / "g"), out=out, **request))  # type: ignore[arg-type]
    assert [epoch.num_samples for epoch in trained.epochs] == [20]
    with next((folder / "rows").rglob("*.parquet")).open("rb") as file:
        assert pyarrow.parquet.read_table(file).num_rows == 30
    command = [sys.executable, "-m", "dglx_dist.cli", "report", out]
    variables = {**os.environ, "LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "d\\udcff\\udce4" in done.stdout


def test_a_part_that_this_user_may_not_read_is_named() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small.write(small.build(), folder / "d")
        shutil.rmtree(folder / "d" / "cache", ignore_errors=True)
        folder.chmod(0o755)
        (folder / "d" / "part1").chmod(0)
        user = os.geteuid()
        # Root may read everything.
        os.seteuid(user or 65534)
        try:
            message = refusal(lambda: open_dataset(folder / "d"), StorageError)
        finally:
            os.seteuid(user)
            (folder / "d" / "part1").chmod(0o755)
    assert message.startswith(f"{folder}/d/part1/")
    assert "cannot be read by this user" in message
