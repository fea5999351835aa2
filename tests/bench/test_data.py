from dataclasses import replace
from pathlib import Path

import pytest

from dglx_dist.data.storage.reader import open_dataset
from dglx_dist.errors import StorageError
from scripts.bench import data
from tests.bench.helpers import HALVES, SMALL


def test_a_dataset_is_made_once_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = data.prepare(SMALL, {"halves": HALVES}, tmp_path)["halves"]
    manifest = open_dataset(first).manifest
    assert (manifest.num_parts, manifest.num_nodes("_N")) == (2, 600)
    second = data.prepare(SMALL, {"halves": replace(HALVES, seed=1)}, tmp_path)["halves"]
    assert second != first
    cost_s = data.facts(first)["seconds_to_cut_and_write"]
    monkeypatch.setattr(data, "generate", lambda _: pytest.fail("it was drawn again"))
    assert data.prepare(SMALL, {"another name": HALVES}, tmp_path) == {"another name": first}
    assert data.facts(first)["seconds_to_cut_and_write"] == cost_s


def test_a_dataset_that_was_cut_short_is_told(tmp_path: Path) -> None:
    folder = data.prepare(SMALL, {"halves": HALVES}, tmp_path)["halves"]
    largest = max(
        (path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )
    largest.write_bytes(largest.read_bytes()[:-64])
    with pytest.raises(StorageError, match=largest.name):
        data.prepare(SMALL, {"halves": HALVES}, tmp_path)
