"""Which source a spec means, and what a user sees who mistypes it."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dglx_dist.data.sources import load_dataset
from dglx_dist.errors import ConfigError, DatasetError, UnknownNameError
from dglx_dist.records import EDGE_TYPE


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    np.savez(tmp_path / "friends.npz", src=np.array([0, 1]), dst=np.array([1, 2]))
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "edges.csv").write_text("src,dst\n0,1\n1,2\n")
    return tmp_path


def test_a_path_says_its_source_by_its_kind(folder: Path) -> None:
    by_file, by_name = load_dataset(folder / "friends.npz"), load_dataset(f"npz:{folder / 'friends.npz'}")
    by_folder = load_dataset(str(folder))
    for graph in (by_file, by_name, by_folder):
        assert [ids.tolist() for ids in graph.edges[EDGE_TYPE]] == [[0, 1], [1, 2]]
    assert by_file.name == "friends"


def test_a_folder_may_be_called_as_a_source_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "tables").mkdir()
    (folder / "tables" / "edges.csv").write_text("src,dst\n0,2\n")
    monkeypatch.chdir(folder)
    assert [ids.tolist() for ids in load_dataset("tables").edges[EDGE_TYPE]] == [[0], [1]]


def test_settings_stand_in_the_spec_or_in_options() -> None:
    in_spec = load_dataset("synthetic:nodes=200,degree=4,classes=2,seed=5")
    by_option = load_dataset("synthetic", nodes=200, degree=4, classes=2, seed=5)
    assert np.array_equal(in_spec.edges[EDGE_TYPE][0], by_option.edges[EDGE_TYPE][0])


def test_a_wrong_path_is_named_with_its_neighbours_and_what_is_expected(folder: Path) -> None:
    with pytest.raises(DatasetError) as caught:
        load_dataset(folder / "freinds.npz")
    message = str(caught.value)
    assert str(folder / "freinds.npz") in message
    assert "near it: friends.npz" in message
    assert "expected a .npz file" in message.lower()


def test_a_missing_folder_is_named(folder: Path) -> None:
    with pytest.raises(DatasetError, match=r"the folder .*nowhere does not exist either"):
        load_dataset(folder / "nowhere" / "a.npz")


def test_a_mistyped_source_gets_the_nearest_name() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'synthetic'"):
        load_dataset("sinthetic:nodes=10")
    with pytest.raises(DatasetError, match="near it: synthetic"):
        load_dataset("sinthetic")


def test_a_file_of_no_known_kind_is_refused(folder: Path) -> None:
    with pytest.raises(DatasetError, match=r"notes\.txt: the suffix '\.txt' belongs to no dataset source"):
        load_dataset(folder / "notes.txt")


def test_an_unknown_option_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="'npz' has no option 'seed'"):
        load_dataset(folder / "friends.npz", seed=3)


def test_an_option_named_like_our_argument_is_the_sources_to_refuse() -> None:
    with pytest.raises(ConfigError, match="no option 'spec'"):
        load_dataset("synthetic", **{"spec": "x"})


def test_what_a_source_returns_is_checked(folder: Path) -> None:
    np.savez(folder / "bad.npz", src=np.array([0]), dst=np.array([5]), num_nodes=np.array(2))
    with pytest.raises(DatasetError, match=r"bad\.npz: column 'dst', row 0: node id 5"):
        load_dataset(folder / "bad.npz")


def test_reading_a_file_needs_neither_dgl_nor_torch(folder: Path) -> None:
    code = (
        "import sys; from dglx_dist.data.sources import load_dataset; "
        f"load_dataset({str(folder / 'friends.npz')!r}); "
        "assert not {'dgl', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
