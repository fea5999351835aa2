import itertools
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dglx_dist.data.storage.row_files import (
    INDEX,
    RowFile,
    check_rows,
    read_index,
    read_rows,
    write_index,
    write_rows,
)
from dglx_dist.errors import StorageError
from dglx_dist.records import ColumnInfo

TABLE = np.arange(22, dtype=np.float32).reshape(11, 2)


def save(folder: Path, cuts: list[int], **facts: object) -> list[RowFile]:
    """Write ``TABLE`` cut before the rows ``cuts``, each run by a writer of its own."""
    starts = [0, *cuts, 11]
    files = [write_rows(folder, "w/x", a, TABLE[a:b]) for a, b in itertools.pairwise(starts)]
    write_index(folder, reversed(files), facts)
    return files


@pytest.mark.parametrize("cuts", [[], [3], [3, 3, 9], [0, 11]])
@pytest.mark.parametrize("readers", [[], [5], [2, 2, 4]])
def test_any_number_of_ranks_reads_the_files(tmp_path: Path, cuts: list[int], readers: list[int]) -> None:
    save(tmp_path, cuts, epoch=3)
    index = read_index(tmp_path)
    saved = index.tensor("w/x", tmp_path)
    assert (saved.shape, saved.info.dtype, index.facts) == ((11, 2), "float32", {"epoch": 3})
    out = np.full_like(TABLE, -1)
    for first, last in zip([0, *readers], [*readers, 11], strict=True):
        check_rows(tmp_path, saved, first, last)
        read_rows(tmp_path, saved, first, last, out[first:last])
    assert out.tolist() == TABLE.tolist()
    with pytest.raises(StorageError, match="has 11 rows of 'w/x', but not rows 10 to 11"):
        read_rows(tmp_path, saved, 10, 12, out)


def test_several_tensors_of_any_dtype_share_a_folder(tmp_path: Path) -> None:
    half = np.array([0x3F80, 0x4000], dtype=np.uint16)
    files = [
        write_rows(tmp_path, "half", 0, half, info=ColumnInfo(dtype="bfloat16", row_shape=())),
        write_rows(tmp_path, "mask", 0, np.array([True, False, True])),
        write_rows(tmp_path, "empty", 0, np.empty((0, 4), np.int64)),
    ]
    write_index(tmp_path, files, {})
    index = read_index(tmp_path)
    assert {name: (tensor.shape, tensor.info.dtype) for name, tensor in index.tensors.items()} == {
        "half": ((2,), "bfloat16"),
        "mask": ((3,), "bool"),
        "empty": ((0, 4), "int64"),
    }
    bits, flags = np.empty(2, np.uint16), np.empty(3, np.bool_)
    read_rows(tmp_path, index.tensors["half"], 0, 2, bits)
    read_rows(tmp_path, index.tensors["mask"], 0, 3, flags)
    read_rows(tmp_path, index.tensors["empty"], 0, 0, np.empty((0, 4), np.int64))
    assert (bits.tolist(), flags.tolist()) == (half.tolist(), [True, False, True])
    with pytest.raises(StorageError, match=r"no tensor 'x' \(known: 'half', 'mask', 'empty'\)"):
        index.tensor("x", tmp_path)


def test_every_flipped_byte_of_a_file_is_found_by_who_reads_it_and_by_nobody_else(tmp_path: Path) -> None:
    _, second = save(tmp_path, [6])
    saved = read_index(tmp_path).tensors["w/x"]
    path = tmp_path / second.path
    content = path.read_bytes()
    for at in range(0, len(content), 37):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(StorageError, match="is damaged"):
            check_rows(tmp_path, saved, 5, 7)
        check_rows(tmp_path, saved, 0, 6)
    path.write_bytes(content[:-1])
    with pytest.raises(StorageError, match=f"has {len(content) - 1} bytes instead of {len(content)}"):
        check_rows(tmp_path, saved, 10, 11)
    path.unlink()
    with pytest.raises(StorageError, match="cannot be read"):
        check_rows(tmp_path, saved, 10, 11)


@pytest.mark.parametrize(
    "wrong",
    [{"num_rows": -6}, {"first": 0.5}, {"row_shape": ["2"]}, {"more": 1}, {"path": "../w"}, {"dtype": "f9"}],
)
def test_an_index_that_is_damaged_or_makes_no_sense_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    save(tmp_path, [6])
    path = tmp_path / INDEX
    text = path.read_text()
    body = json.loads(text)
    body["files"][0].update(wrong)
    del body["checksum"]
    value = f"{zlib.crc32(json.dumps(body, sort_keys=True).encode()):08x}"
    resigned = json.dumps({"checksum": value, **body})
    for changed in (
        resigned,
        text.replace('"first": 6', '"first": 5'),
        text[:-5],
        resigned.replace("path", "p"),
        "[]",
    ):
        path.write_text(changed)
        with pytest.raises(StorageError, match="is damaged"):
            read_index(tmp_path)
    path.unlink()
    with pytest.raises(StorageError, match=r"has no index\.json: nothing was saved there"):
        read_index(tmp_path)


def test_runs_must_make_up_the_tensor(tmp_path: Path) -> None:
    first, second, third = save(tmp_path, [3, 6])
    for files in ([first, third], [second, third], [first, first, second, third]):
        with pytest.raises(StorageError, match="should be next"):
            write_index(tmp_path, files, {})
    wide_rows = write_rows(tmp_path, "w/x", 11, np.zeros((1, 2)))
    with pytest.raises(StorageError, match=r"has float64 rows of shape \(2,\)"):
        write_index(tmp_path, [first, second, third, wide_rows], {})
