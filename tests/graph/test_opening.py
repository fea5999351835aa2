from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from dglx_dist.comm.session import start_session
from dglx_dist.data.storage.dgl_format import write_dgl_format
from dglx_dist.data.storage.reader import StoredPart
from dglx_dist.errors import DatasetError, StorageError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.records import NODE_TYPE, Array, Assignment, EdgeType
from tests.data.storage.graphs import put_value
from tests.graph.small import NUM_NODES, build, features, part_of
from tests.helpers.ranks import run_ranks


def open_dgl_format(part_config: Path) -> tuple[bool, int]:
    with start_session():
        g = DistGraph(part_config=part_config)
        folder = g.dataset.folder
        again = DistGraph(part_config=part_config)
        assert again.dataset.folder == folder
        order = g.ndata["feat"][:][:, 0].argsort()
        return bool((g.ndata["feat"][:].numpy()[order] == features()).all()), g.num_edges()


def test_dgls_own_files_are_imported_once_and_opened(tmp_path: Path) -> None:
    parts = np.where(part_of() == 2, 1, 0).astype(np.int32)
    assignment = Assignment(num_parts=2, part_of={NODE_TYPE: parts}, method="hand", seed=0)
    part_config = write_dgl_format(build(), assignment, tmp_path / "dgl")
    assert run_ranks(open_dgl_format, 2, args=(part_config,), ranks_per_server=1) == [(True, 45)] * 2
    assert [one.name for one in part_config.parent.glob("*.dglx")] == [f"{part_config.stem}.dglx"]


def damaged_on_one_rank(folder: Path) -> list[str]:
    with start_session() as session:
        opened = StoredPart.indptr

        def read(part: StoredPart, etype: EdgeType) -> Array:
            if session.topology.rank == 1:
                raise StorageError("indptr is damaged")
            return opened(part, etype)

        StoredPart.indptr = read  # type: ignore[method-assign]
        said = []
        for mode in ("replicated", "partitioned"):
            try:
                DistGraph(folder, structure=mode)  # type: ignore[arg-type]
            except StorageError as error:
                said.append(str(error))
        return said


def test_a_file_damaged_for_one_rank_is_an_error_on_all(small_dataset: Path) -> None:
    first, second = run_ranks(damaged_on_one_rank, 2, args=(small_dataset,), ranks_per_server=1)
    assert second[-1] == "indptr is damaged"
    assert first[-1].startswith("rank 1 on ")
    assert first[-1].endswith(": indptr is damaged")


def _opened_with_a_wrong_id(folder: Path) -> tuple[str, str]:
    with start_session():
        try:
            DistGraph(folder)
        except (DatasetError, StorageError) as error:
            return type(error).__name__, str(error)
    return "", ""


def test_an_id_out_of_range_is_an_error_on_all_ranks(small_dataset: Path, tmp_path: Path) -> None:
    folder = tmp_path / "wrong"
    shutil.copytree(small_dataset, folder)
    put_value(folder, "part0/edges/_N._E._N/indices.arrow", 2, 10**6)
    said = f"{folder}: part 0 is wrong: in part0/edges/_N._E._N/indices.arrow, indices[2] is 1000000, "
    first, second = run_ranks(_opened_with_a_wrong_id, 2, args=(folder,), ranks_per_server=1)
    assert first[0] == "DatasetError"
    assert first[1].startswith(said)
    assert second[0] == "StorageError"
    assert said in second[1]


def _open_own_copy(folders: list[Path]) -> int:
    with start_session() as session:
        g = DistGraph(folders[session.topology.rank])
        number = g.num_nodes()
        g.close()
        return number


def test_each_machine_may_have_the_dataset_in_a_folder_of_its_own(
    small_dataset: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "elsewhere"
    shutil.copytree(small_dataset, copy)
    assert run_ranks(_open_own_copy, 2, args=([small_dataset, copy],), ranks_per_server=1) == [NUM_NODES] * 2
