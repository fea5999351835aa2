"""Graphs without edges, and types without rows beside others, from their tables to a trained model."""

from pathlib import Path

import pytest

from tests.data.raw_graphs import write
from tests.helpers import wide
from tests.test_cli import run_dglx

NUM_NODES = 12
SPLIT = ["train", "val", "test"]
ROWS = "".join(f"{n},{n % 2},{n / 9},{SPLIT[n // 4]}\n" for n in range(NUM_NODES))
NODES = f"id,label,feat_0,split\n{ROWS}"
RING = "".join(f"{n},{(n + 1) % NUM_NODES}\n" for n in range(NUM_NODES))


def train(folder: Path, *options: str) -> str:
    common = ["--epochs", "1", "--hidden", "4", "--out", str(folder / "run")]
    return run_dglx("train", str(folder / "parts"), *common, *options)


@pytest.mark.parametrize(
    ("more", "num_edges", "options"),
    [
        (["--add-self-loops"], NUM_NODES, ["--model", "gcn", "--ranks", "2", "--strategy", "full_graph"]),
        *wide(([], 0, ["--model", "mlp", "--ranks", "2"])),
    ],
)
def test_trains_without_edges(tmp_path: Path, more: list[str], num_edges: int, options: list[str]) -> None:
    write(tmp_path / "raw", {"nodes.csv": NODES, "edges.csv": "src,dst\n"})
    message = run_dglx(
        "partition", str(tmp_path / "raw"), "--parts", "2", "--out", f"{tmp_path}/parts", *more
    )
    assert "12 nodes, 0 edges" in message
    assert f"({num_edges} stored)" in message
    assert "test_accuracy" in train(tmp_path, *options)


def test_trains_beside_types_without_rows(tmp_path: Path) -> None:
    files = {
        "nodes/user.csv": NODES,
        "nodes/shop.csv": "id,feat_0\n",
        "edges/user__knows__user.csv": f"src,dst\n{RING}",
        "edges/user__blocks__user.csv": "src,dst,weight\n",
        "edges/shop__serves__user.csv": "src,dst\n",
    }
    write(tmp_path / "raw", files)
    message = run_dglx("partition", str(tmp_path / "raw"), "--parts", "2", "--out", f"{tmp_path}/parts")
    assert "12 nodes, 12 edges" in message
    assert "test_accuracy" in train(tmp_path, "--model", "rgcn", "--ranks", "2")
