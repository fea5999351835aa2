"""The parts put together are the graph, whoever does it, however often."""

import logging
import shutil
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from dglx_dist.data.storage.files import STAMP
from dglx_dist.data.storage.reader import CSC, StoredDataset, open_dataset, open_structure
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.errors import ConfigError, StorageError
from dglx_dist.records import EDGE_TYPE, EdgeType
from tests.data.storage.graphs import (
    FOLLOWS,
    ODD_ONES_OUT,
    RATES,
    TWO_TRIANGLES,
    flipped_bits,
    put_together,
    random_heterogeneous,
    random_homogeneous,
    random_owners,
    store,
)


def edges_of(structure: CSC, dataset: StoredDataset, etype: EdgeType) -> list[tuple[int, int]]:
    """Original (source, destination) of every edge, sorted."""
    destinations = np.repeat(np.arange(len(structure.indptr) - 1), np.diff(structure.indptr))
    sources = put_together(dataset, etype[0])[structure.indices]
    return sorted(zip(sources.tolist(), put_together(dataset, etype[2])[destinations].tolist(), strict=True))


def test_two_triangles(tmp_path: Path) -> None:
    structure = open_structure(store(TWO_TRIANGLES, ODD_ONES_OUT, tmp_path / "d"), EDGE_TYPE)
    assert structure.indptr.tolist() == [0, 1, 2, 3, 4, 6, 7]
    assert structure.indices.tolist() == [1, 3, 4, 0, 1, 5, 2]
    assert (structure.indptr.dtype, structure.indices.dtype) == (np.int64, np.int32)
    assert not structure.indices.flags.owndata


@pytest.mark.parametrize("num_parts", [1, 2, 5])
@pytest.mark.parametrize("etype", [RATES, FOLLOWS])
def test_it_has_the_edges_of_the_source(tmp_path: Path, num_parts: int, etype: EdgeType) -> None:
    graph = random_heterogeneous(num_parts)
    dataset = store(graph, random_owners(graph, num_parts, 0), tmp_path / "d")
    structure = open_structure(dataset, etype)
    expected = sorted(zip(*(end.tolist() for end in graph.edges[etype]), strict=True))
    assert edges_of(structure, dataset, etype) == expected
    for first, last in zip(structure.indptr[:-1], structure.indptr[1:], strict=True):
        assert (np.diff(structure.indices[first:last]) >= 0).all()


def test_one_part_needs_no_copy(tmp_path: Path) -> None:
    graph = random_homogeneous(0)
    dataset = store(graph, random_owners(graph, 1, 0), tmp_path / "d")
    assert open_structure(dataset, EDGE_TYPE).indices is dataset.part(0).indices(EDGE_TYPE)
    assert list(tmp_path.rglob("structure-*")) == []


def copies(folder: Path) -> list[Path]:
    return sorted(folder.glob("cache/structure-*/*"))


def test_the_second_opening_uses_the_copy(tmp_path: Path) -> None:
    dataset = store(TWO_TRIANGLES, ODD_ONES_OUT, tmp_path / "d")
    open_structure(dataset, EDGE_TYPE)
    (copy,) = copies(tmp_path / "d")
    before = (copy / "indices.arrow").stat()
    open_structure(open_dataset(tmp_path / "d"), EDGE_TYPE)
    after = (copy / "indices.arrow").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_a_copy_of_an_older_dataset_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    graph = random_homogeneous(0)
    open_structure(store(graph, random_owners(graph, 2, 0), folder), EDGE_TYPE)
    shutil.copytree(folder / "cache", tmp_path / "old")
    write_dataset(graph, random_owners(graph, 2, 1), folder, overwrite=True)
    shutil.copytree(tmp_path / "old", folder / "cache")
    dataset = open_dataset(folder)
    expected = sorted(zip(*(end.tolist() for end in graph.edges[EDGE_TYPE]), strict=True))
    assert edges_of(open_structure(dataset, EDGE_TYPE), dataset, EDGE_TYPE) == expected
    assert len(copies(folder)) == 2


@pytest.mark.parametrize("damage", ["shorten", "remove"])
def test_a_damaged_copy_is_made_again(tmp_path: Path, damage: str) -> None:
    dataset = store(TWO_TRIANGLES, ODD_ONES_OUT, tmp_path / "d")
    expected = open_structure(dataset, EDGE_TYPE).indices.tolist()
    (copy,) = copies(tmp_path / "d")
    path = copy / "indices.arrow"
    if damage == "shorten":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    assert open_structure(dataset, EDGE_TYPE).indices.tolist() == expected
    assert copies(tmp_path / "d") == [copy]


@pytest.mark.parametrize("name", ["indptr.arrow", "indices.arrow", STAMP])
def test_a_flipped_bit_in_the_copy_is_told_once_and_mended(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = store(TWO_TRIANGLES, ODD_ONES_OUT, tmp_path / "d")
    expected = open_structure(dataset, EDGE_TYPE)
    expected_values = expected.indptr.tolist(), expected.indices.tolist()
    (copy,) = copies(tmp_path / "d")
    for _ in flipped_bits(copy / name, every=7 if name == STAMP else 331):
        caplog.clear()
        found = open_structure(open_dataset(tmp_path / "d"), EDGE_TYPE)
        assert (found.indptr.tolist(), found.indices.tolist()) == expected_values
        assert [
            one.message for one in caplog.records if str(copy) in one.message and "damaged" in one.message
        ]
        assert len(caplog.records) == 1
    caplog.clear()
    open_structure(dataset, EDGE_TYPE)
    assert not caplog.records


def test_it_works_in_memory_where_nothing_can_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = store(TWO_TRIANGLES, ODD_ONES_OUT, tmp_path / "d")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with caplog.at_level(logging.WARNING):
        structure = open_structure(dataset, EDGE_TYPE)
    assert structure.indices.tolist() == [1, 3, 4, 0, 1, 5, 2]
    assert "copied to memory" in caplog.text


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = store(TWO_TRIANGLES, ODD_ONES_OUT, tmp_path / "d")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(StorageError, match="No space left"):
        open_structure(dataset, EDGE_TYPE)


def test_every_part_is_needed(tmp_path: Path) -> None:
    dataset = store(TWO_TRIANGLES, ODD_ONES_OUT, tmp_path / "d")
    shutil.rmtree(tmp_path / "d/part1")
    with pytest.raises(StorageError, match=r"part 1 .* is not on this machine"):
        open_structure(dataset, EDGE_TYPE)
    assert copies(tmp_path / "d") == []
    with pytest.raises(ConfigError, match="rates"):
        open_structure(dataset, RATES)


def _indices(folder: str) -> list[int]:
    return open_structure(open_dataset(folder), EDGE_TYPE).indices.tolist()


def test_processes_may_race(tmp_path: Path) -> None:
    graph = random_homogeneous(5, num_nodes=2000, num_edges=20_000)
    folder = tmp_path / "d"
    write_dataset(graph, random_owners(graph, 3, 0), folder)
    with ProcessPoolExecutor(3, mp_context=get_context("forkserver")) as pool:
        found = list(pool.map(_indices, [str(folder)] * 6))
    dataset = open_dataset(folder)
    expected = np.concatenate([dataset.part(part).indices(EDGE_TYPE) for part in range(3)]).tolist()
    assert found == [expected] * 6
    (copy,) = copies(folder)
    assert sorted(path.name for path in copy.iterdir()) == ["indices.arrow", "indptr.arrow", "stamp.json"]
