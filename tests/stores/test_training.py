"""Ranks train on a dataset in an object store. Each server fetches its own parts, once."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dglx_dist as dx
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Assignment
from tests.data.storage.graphs import random_homogeneous
from tests.helpers.commands import dglx
from tests.helpers.object_store import StandIn
from tests.helpers.ranks import run_ranks

NUM_PARTS = 4


@pytest.fixture
def address(store: StandIn, bucket: str, cache: Path, tmp_path: Path) -> str:
    """The address of a graph in four parts."""
    graph = random_homogeneous(5, num_nodes=400, num_edges=3000, width=512)
    part_of = {NODE_TYPE: np.arange(400, dtype=np.int32) % NUM_PARTS}
    assignment = Assignment(num_parts=NUM_PARTS, part_of=part_of, method="by hand", seed=0)
    write_dataset(graph, assignment, tmp_path / "local")
    store.put_folder(tmp_path / "local", bucket, "graph")
    return f"s3://{bucket}/graph"


def ranks_environment() -> dict[str, str]:
    """Return the settings of the store, which processes of the fork server do not have."""
    return {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "DGLX_DATASET"))}


def count_part_bytes(folder: Path, parts: range) -> int:
    files = json.loads((folder / "manifest.json").read_text())["files"]
    names = tuple(f"part{part}/" for part in parts)
    return sum(info["bytes"] for path, info in files.items() if path.startswith(names))


def read_rows(folder: str, structure: str, rank_caches: str) -> dict[str, Any]:
    """Read all features and the in-edges of all nodes; with a cache of its own for each rank if wanted."""
    rank = int(os.environ["RANK"])
    os.environ["AWS_SDK_UA_APP_ID"] = f"rank-{rank}"
    if rank_caches:
        os.environ["DGLX_DATASET_CACHE"] = f"{rank_caches}/{rank}"
    with dx.init("data_parallel"):
        g = dx.DistGraph(folder, structure=structure)  # type: ignore[arg-type]  # a StructureMode
        ids = torch.arange(g.num_nodes())
        block = g.sample_neighbors(ids, -1)
        src, dst = block.edges()
        return {
            "feat": np.asarray(g.ndata["feat"][ids]).tobytes(),
            "edges": sorted(zip(src.tolist(), dst.tolist(), strict=True)),
            "replicated": g._structures[EDGE_TYPE].is_replicated,
        }


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_each_server_fetches_its_own_parts(
    world_size: int, address: str, store: StandIn, tmp_path: Path
) -> None:
    """Servers share nothing but the store: bytes for each are at most 1.05 times those of its parts."""
    args = (address, "partitioned", str(tmp_path / "caches"))
    results = run_ranks(read_rows, world_size, args=args, ranks_per_server=1, environment=ranks_environment())
    expected = run_ranks(read_rows, 1, args=(str(tmp_path / "local"), "auto", ""))[0]
    for rank, result in enumerate(results):
        assert result["feat"] == expected["feat"]
        assert result["edges"] == expected["edges"]
        parts = range(rank * NUM_PARTS // world_size, (rank + 1) * NUM_PARTS // world_size)
        fetched = store.count_bytes("/graph/", f"rank-{rank}")
        assert fetched <= 1.05 * count_part_bytes(tmp_path / "local", parts)
        assert store.count_bytes("/part", f"rank-{rank}") == count_part_bytes(tmp_path / "local", parts)


def test_servers_of_one_machine_share_the_cache(address: str, store: StandIn, tmp_path: Path) -> None:
    results = run_ranks(
        read_rows, 4, args=(address, "auto", ""), ranks_per_server=2, environment=ranks_environment()
    )
    assert len({result["feat"] for result in results}) == 1
    assert all(result["replicated"] for result in results)
    assert store.count_bytes("/part") == count_part_bytes(tmp_path / "local", range(NUM_PARTS))


def test_replicated_structure_adds_the_edges_only(address: str, store: StandIn, tmp_path: Path) -> None:
    args = (address, "replicated", str(tmp_path / "caches"))
    run_ranks(read_rows, 2, args=args, ranks_per_server=1, environment=ranks_environment())
    files = json.loads((tmp_path / "local" / "manifest.json").read_text())["files"]
    structure = {
        path: info["bytes"]
        for path, info in files.items()
        if path.endswith(("indptr.arrow", "indices.arrow"))
    }
    foreign = sum(num_bytes for path, num_bytes in structure.items() if path.startswith(("part2/", "part3/")))
    assert store.count_bytes("/part", "rank-0") == count_part_bytes(tmp_path / "local", range(2)) + foreign
    assert foreign > 0


def test_commands_take_an_address(address: str, store: StandIn, bucket: str, tmp_path: Path) -> None:
    """The launcher reads the manifest before it forks the ranks."""
    runs = []
    for data in (address, str(tmp_path / "local")):
        run = tmp_path / f"run-{len(runs)}"
        words = ("--ranks", "2", "--epochs", "2", "--out", str(run), "--batch-size", "50")
        done = dglx("train", data, *words)
        assert done.returncode == 0, done.stderr
        lines = (run / "metrics.jsonl").read_text().splitlines()
        runs.append([json.loads(line)["loss"] for line in lines])
    assert runs[0] == runs[1]
    assert json.loads((tmp_path / "run-0" / "config.json").read_text())["data"] == address
    done = dglx("inspect", address, "--picture", str(tmp_path / "a.png"))
    assert done.returncode == 0, done.stderr
    assert f"{NUM_PARTS} parts" in " ".join(done.stdout.split())


def test_inspect_draws_into_the_cache(address: str, cache: Path) -> None:
    done = dglx("inspect", address)
    assert done.returncode == 0, done.stderr
    (picture,) = cache.rglob("cache/partition.png")
    assert str(picture) in "".join(done.stdout.split())
    assert not Path("s3:").exists()
