"""Parts that are on this machine or are not, names that do not exist, unknown format versions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from dglx_dist.data.storage.reader import open_dataset
from dglx_dist.errors import ConfigError, StorageError
from dglx_dist.records import EDGE_TYPE, NODE_TYPE
from tests.data.storage.graphs import ODD_ONES_OUT, RATES, TWO_TRIANGLES, store


def test_arrays_are_read_only_maps(tmp_path: Path) -> None:
    part = store(TWO_TRIANGLES, ODD_ONES_OUT, tmp_path / "d").part(0)
    for array in (part.node_data(NODE_TYPE, "feat"), part.indices(EDGE_TYPE), part.indptr(EDGE_TYPE)):
        assert not array.flags.owndata
        with pytest.raises(ValueError, match=r"read-only"):
            array[0] = 0
    assert part.indices(EDGE_TYPE).dtype == np.int32
    assert part.indices(EDGE_TYPE) is part.indices(EDGE_TYPE)


def test_a_part_that_is_elsewhere_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    store(TWO_TRIANGLES, ODD_ONES_OUT, folder)
    shutil.rmtree(folder / "part1")
    dataset = open_dataset(folder, verify="full")
    assert (dataset.has_part(0), dataset.has_part(1)) == (True, False)
    assert dataset.part(0).num_nodes(NODE_TYPE) == 3
    with pytest.raises(StorageError, match=r"part 1 .* part1/nodes/_N/original_ids\.arrow.* copy"):
        dataset.part(1)


def test_one_missing_file_makes_a_part_missing(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    store(TWO_TRIANGLES, ODD_ONES_OUT, folder)
    (folder / "part0/nodes/_N/data/label.arrow").unlink()
    dataset = open_dataset(folder)
    assert not dataset.has_part(0)
    with pytest.raises(StorageError, match=r"label\.arrow missing"):
        dataset.part(0)


@pytest.mark.parametrize("part", [-1, 2])
def test_there_is_no_such_part(tmp_path: Path, part: int) -> None:
    dataset = store(TWO_TRIANGLES, ODD_ONES_OUT, tmp_path / "d")
    with pytest.raises(ConfigError, match=rf"parts 0\.\.1, not {part}"):
        dataset.part(part)


def test_unknown_names_list_what_exists(tmp_path: Path) -> None:
    part = store(TWO_TRIANGLES, ODD_ONES_OUT, tmp_path / "d").part(0)
    with pytest.raises(ConfigError, match=r"'features' .*known: 'feat', 'label', 'train_mask'"):
        part.node_data(NODE_TYPE, "features")
    with pytest.raises(ConfigError, match=r"node type 'user' .*known: '_N'"):
        part.original_node_ids("user")
    with pytest.raises(ConfigError, match=r"edge type .*'rates'"):
        part.indices(RATES)
    with pytest.raises(ConfigError, match=r"known: 'weight'"):
        part.edge_data(EDGE_TYPE, "w")


def test_an_unknown_way_to_verify_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'maybe'"):
        open_dataset(tmp_path, verify="maybe")  # type: ignore[arg-type]  # the point of the test


def test_a_newer_format_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    store(TWO_TRIANGLES, ODD_ONES_OUT, folder)
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 2, "more": 1}))
    with pytest.raises(StorageError, match=r"manifest\.json is of format version 2.* up to version 1;"):
        open_dataset(folder)
