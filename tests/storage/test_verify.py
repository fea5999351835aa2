"""One damaged byte in any file is an error that names the file; whole files are read once only."""

import json
import logging
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dglx_dist.errors import StorageError
from dglx_dist.storage import verify
from dglx_dist.storage.reader import open_dataset
from dglx_dist.storage.writer import write_dataset
from tests.helpers import wide
from tests.storage.graphs import ODD_ONES_OUT, TWO_TRIANGLES


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify") / "d"
    write_dataset(TWO_TRIANGLES, ODD_ONES_OUT, folder)
    open_dataset(folder)
    return folder


def stored_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and "cache" not in path.parts)


def test_every_file_but_the_manifest_is_listed_in_it(stored: Path) -> None:
    listed = json.loads((stored / "manifest.json").read_text())["files"]
    assert {str(path.relative_to(stored)) for path in stored_files(stored)} == {"manifest.json", *listed}


@given(st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("how", ["auto", *wide("full")])
def test_one_flipped_byte_anywhere_is_found(stored: Path, how: verify.Verify, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(stored_files(stored)))
    content = path.read_bytes()
    position = data.draw(st.integers(0, len(content) - 1))
    damaged = bytearray(content)
    damaged[position] ^= data.draw(st.integers(1, 255))
    path.write_bytes(damaged)
    try:
        with pytest.raises(StorageError) as caught:
            open_dataset(stored, verify=how)
        assert str(path) in str(caught.value)
    finally:
        path.write_bytes(content)
    open_dataset(stored, verify=how)


def test_a_shortened_file_is_found(stored: Path) -> None:
    path = stored / "part0/nodes/_N/data/feat.arrow"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    try:
        with pytest.raises(StorageError, match=r"feat\.arrow has \d+ bytes instead of"):
            open_dataset(stored)
    finally:
        path.write_bytes(content)


@pytest.fixture
def read_files(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are read to verify them."""
    names: list[str] = []
    real = verify.checksum

    def recording(path: Path) -> object:
        names.append(path.name)
        return real(path)

    monkeypatch.setattr(verify, "checksum", recording)
    return names


def test_whole_files_are_read_once(tmp_path: Path, read_files: list[str]) -> None:
    manifest = write_dataset(TWO_TRIANGLES, ODD_ONES_OUT, tmp_path / "d")
    open_dataset(tmp_path / "d", verify="never")
    assert read_files == []
    open_dataset(tmp_path / "d")
    assert len(read_files) == len(manifest.files)
    open_dataset(tmp_path / "d")
    assert len(read_files) == len(manifest.files)
    open_dataset(tmp_path / "d", verify="full")
    assert len(read_files) == 2 * len(manifest.files)


def test_only_a_changed_file_is_read_again(tmp_path: Path, read_files: list[str]) -> None:
    write_dataset(TWO_TRIANGLES, ODD_ONES_OUT, tmp_path / "d")
    open_dataset(tmp_path / "d")
    read_files.clear()
    path = tmp_path / "d/part1/nodes/_N/data/label.arrow"
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    open_dataset(tmp_path / "d")
    assert read_files == ["label.arrow"]


def test_a_damaged_stamp_only_costs_time(tmp_path: Path, read_files: list[str]) -> None:
    manifest = write_dataset(TWO_TRIANGLES, ODD_ONES_OUT, tmp_path / "d")
    open_dataset(tmp_path / "d")
    (tmp_path / "d/cache/verified.json").write_text("[")
    open_dataset(tmp_path / "d")
    assert len(read_files) == 2 * len(manifest.files)


def test_a_folder_that_cannot_be_written_is_read_each_time(
    tmp_path: Path, read_files: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    manifest = write_dataset(TWO_TRIANGLES, ODD_ONES_OUT, tmp_path / "d")
    # A file where the cache folder would be stops root too, whom permissions do not.
    (tmp_path / "d/cache").write_text("")
    with caplog.at_level(logging.WARNING):
        open_dataset(tmp_path / "d")
        open_dataset(tmp_path / "d")
    assert len(read_files) == 2 * len(manifest.files)
    assert "reads all its files" in caplog.text
