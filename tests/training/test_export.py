import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow.dataset
import pytest
import torch

import dglx_dist as dx
from dglx_dist.data.partition.base import PartitionOptions, PartitionPlan
from dglx_dist.data.partition.prepare import partition_to_disk
from dglx_dist.errors import ConfigError, StorageError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.dist_tensor import DistTensor
from dglx_dist.records import RawGraph
from dglx_dist.training import export
from dglx_dist.training.export import write_embeddings
from tests.helpers.ranks import run_ranks

NAMES = np.array([f"paper {i}" for i in range(7)])


def dataset(folder: Path) -> str:
    """Seven papers with names, three authors with numbers, one venue with neither."""
    graph = RawGraph(
        name="library",
        num_nodes={"paper": 7, "author": 3, "venue": 1},
        edges={("author", "writes", "paper"): (np.array([0, 1, 2]), np.array([6, 0, 3]))},
        node_data={"paper": {"feat": np.arange(14, dtype=np.float32).reshape(7, 2)}},
        user_ids={"paper": NAMES, "author": np.array([700, 500, 600])},
    )
    plan = PartitionPlan(num_parts=2, method="random", options=PartitionOptions(), seed=3)
    partition_to_disk(graph, folder, plan)
    return str(folder)


def table(folder: Path) -> dict[Any, Any]:
    read = pyarrow.dataset.dataset(folder).to_table()
    name = next(column for column in read.column_names if column != "id")
    rows = dict(zip(read["id"].to_pylist(), read[name].to_pylist(), strict=True))
    assert len(rows) == len(read)
    return rows


def make_numbered_rows(g: DistGraph, ntype: str, width: int | None, dtype: torch.dtype) -> DistTensor:
    """Row v holds 10 times the original id of v, and then that plus 1, ..."""
    policy = g.get_node_partition_policy(ntype)
    shape = (g.num_nodes(ntype),) if width is None else (g.num_nodes(ntype), width)
    rows = DistTensor(shape, dtype, part_policy=policy, graph=g)
    first = 10 * g.orig_ids(torch.arange(shape[0]), ntype)
    values = first if width is None else first[:, None] + torch.arange(width)
    if g.rank() == 0:
        rows[torch.arange(shape[0])] = values.to(dtype)
    g.barrier()
    return rows


def _write(data: str, out: str) -> None:
    with dx.init():
        g = DistGraph(data)
        rows = {
            "paper": make_numbered_rows(g, "paper", 3, torch.float32),
            "author": make_numbered_rows(g, "author", None, torch.int64),
            "venue": make_numbered_rows(g, "venue", 2, torch.bfloat16),
        }
        # 20 bytes a paper: a row group holds one or two.
        export.ROW_GROUP_BYTES = 45
        assert write_embeddings(rows, g, out) == Path(out)
        write_embeddings(rows["paper"], g, f"{out}-papers", name="h")
        write_embeddings(g.nodes["paper"].data["feat"], g, f"{out}-papers", name="feat", overwrite=True)


@pytest.mark.parametrize(("ranks", "per_server"), [(1, 1), (3, 2)])
def test_every_row_is_found_under_its_own_id(ranks: int, per_server: int, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_ranks(_write, ranks, args=(dataset(tmp_path / "d"), str(out)), ranks_per_server=per_server)
    assert table(out / "paper") == {f"paper {i}": [10.0 * i, 10.0 * i + 1, 10.0 * i + 2] for i in range(7)}
    assert table(out / "author") == {700: 0, 500: 10, 600: 20}
    # The only venue has no id of its own, so it has the one before partitioning; bfloat16 became float32.
    assert table(out / "venue") == {0: [0.0, 1.0]}
    schema = pyarrow.dataset.dataset(out / "paper").schema
    assert [str(field.type) for field in schema] == ["string", "fixed_size_list<element: float>[3]"]
    files = sorted(path.name for path in (out / "paper").iterdir())
    assert files == [f"part-{rank:05d}.parquet" for rank in range(ranks)]
    groups = pyarrow.parquet.ParquetFile(out / "paper" / files[0])
    assert groups.num_row_groups == -(-groups.metadata.num_rows // 2)
    index = json.loads((out / "_index.json").read_text())
    counts = dict.fromkeys(("paper", "author", "venue"), 0)
    for line in index["files"]:
        counts[line["ntype"]] += line["num_rows"]
        assert (out / line["path"]).is_file()
    assert counts == {"paper": 7, "author": 3, "venue": 1}
    # Written over: the feature, as it came.
    assert table(tmp_path / "out-papers") == {f"paper {i}": [2.0 * i, 2.0 * i + 1] for i in range(7)}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "out", "out-papers"]


def _check_refusals(data: str, out: str) -> None:
    with dx.init() as session:
        g = DistGraph(data)
        rank = session.topology.rank
        papers = make_numbered_rows(g, "paper", 3, torch.float32)
        authors = make_numbered_rows(g, "author", 3, torch.float32)
        write_embeddings(authors, g, f"{out}/old")

        def check_refusal(
            kind: type[Exception], said: str, rows: Any, folder: str = "new", **options: Any
        ) -> None:
            with pytest.raises(kind, match=said):
                write_embeddings(rows, g, f"{out}/{folder}", **options)

        check_refusal(StorageError, "give --overwrite .*overwrite=True", papers, "old")
        check_refusal(StorageError, "does not hold exported rows", papers, "foreign", overwrite=True)
        check_refusal(StorageError, "is a file", papers, "foreign/letter.txt", overwrite=True)
        check_refusal(ConfigError, "rows is a Tensor", papers if rank == 0 else papers[:])
        check_refusal(ConfigError, "has the nodes of type 'author'", {"paper": authors})
        check_refusal(ConfigError, "no rows to write", {})
        check_refusal(ConfigError, "printable text other than 'id'", papers, name="id")
        full = OSError(28, "No space left on device")
        with mock.patch.object(export, "_to_arrow", side_effect=full if rank == 1 else export._to_arrow):
            check_refusal(StorageError, "No space left", papers, "old", overwrite=True)


def test_an_error_on_one_rank_is_one_on_all_and_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "letter.txt").write_text("dear")
    run_ranks(_check_refusals, 2, args=(dataset(tmp_path / "d"), str(tmp_path)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "foreign", "old"]
    assert (tmp_path / "foreign" / "letter.txt").read_text() == "dear"
    assert table(tmp_path / "old") == {700: [0.0, 1.0, 2.0], 500: [10.0, 11.0, 12.0], 600: [20.0, 21.0, 22.0]}
