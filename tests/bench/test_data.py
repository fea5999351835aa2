from dataclasses import replace
from pathlib import Path

import pytest

from dglx_dist.data.storage.columns import MANIFEST
from dglx_dist.data.storage.reader import open_dataset
from dglx_dist.errors import StorageError
from dglx_dist.prepare import PartitionPlan, partition_to_disk
from scripts.bench import data
from tests.bench.helpers import HALVES, SMALL


def test_a_dataset_is_made_once_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = data.prepare(SMALL, {"halves": HALVES}, tmp_path)["halves"]
    manifest = open_dataset(first).manifest
    assert (manifest.num_parts, manifest.num_nodes("_N")) == (2, 600)
    monkeypatch.setattr(data, "generate", lambda _: pytest.fail("it was drawn again"))
    assert data.prepare(SMALL, {"another name": HALVES}, tmp_path) == {"another name": first}


def test_another_recipe_has_another_key() -> None:
    keys = {
        data.recipe_key(SMALL, HALVES),
        data.recipe_key(replace(SMALL, seed=4), HALVES),
        data.recipe_key(SMALL, replace(HALVES, num_parts=3)),
        data.recipe_key(SMALL, replace(HALVES, method="metis")),
        data.recipe_key(SMALL, replace(HALVES, seed=1)),
    }
    assert len(keys) == 5


def test_a_dataset_that_was_cut_short_is_told(tmp_path: Path) -> None:
    folder = data.prepare(SMALL, {"halves": HALVES}, tmp_path)["halves"]
    largest = max(
        (path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )
    largest.write_bytes(largest.read_bytes()[:-64])
    with pytest.raises(StorageError, match=largest.name):
        data.prepare(SMALL, {"halves": HALVES}, tmp_path)


def test_who_loses_the_race_takes_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def beaten(raw: object, folder: Path, cut: PartitionPlan) -> None:
        partition_to_disk(raw, folder, cut)  # type: ignore[arg-type]
        raise StorageError("there already")

    monkeypatch.setattr(data, "partition_to_disk", beaten)
    folder = data.prepare(SMALL, {"halves": HALVES}, tmp_path)["halves"]
    assert (folder / MANIFEST).is_file()


def test_what_a_cut_took_is_told_also_when_it_is_found_again(tmp_path: Path) -> None:
    costs = [
        data.facts(data.prepare(SMALL, {"halves": HALVES}, tmp_path)["halves"])["seconds_to_cut_and_write"]
        for _ in range(2)
    ]
    assert isinstance(costs[0], float)
    assert costs[0] == costs[1] > 0
