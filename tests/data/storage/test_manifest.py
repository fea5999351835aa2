"""Every field of the manifest is checked; the error names the file and the key."""

import functools
import json
import operator
from pathlib import Path
from typing import Any

import pytest

from dglx_dist.data.json_fields import Fields
from dglx_dist.data.storage.manifest import from_json, read_manifest, to_json, write_manifest
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.errors import ConfigError, StorageError
from tests.data.storage.graphs import ODD_ONES_OUT, TWO_TRIANGLES
from tests.helpers.schema import check_every_field


@pytest.fixture(scope="module")
def value(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    manifest = write_dataset(TWO_TRIANGLES, ODD_ONES_OUT, tmp_path_factory.mktemp("manifest") / "d")
    return to_json(manifest)


MISSING = object()
WRONG = [
    ("format", "tar", "'format' is 'tar'"),
    ("version", 9, "format version 9"),
    ("num_parts", MISSING, "'num_parts' is missing, expected a whole number of at least 1"),
    ("num_parts", 0, "'num_parts' is 0, expected a whole number of at least 1"),
    ("num_parts", 3, r"'node_types\[0\]\.offsets' is \[0, 3, 6\], expected a list of 4"),
    # Its parts would be counted up to num_parts.
    ("node_types", [], r"'node_types' is \[\], expected a list of at least 1"),
    ("name", 5, "'name' is 5, expected a text"),
    ("node_types 0 offsets", [0, 4, 3], r"offsets' is \[0, 4, 3\], expected .*never fall"),
    ("node_types 0 offsets", [1, 4, 6], "start at 0"),
    ("node_types 0 offsets", [0, 4, 10**30], f"from 0 to {2**63 - 1}"),
    ("node_types 0 user_ids", "float", "'float', expected one of 'int64', 'string', None"),
    ("node_types 0 columns feat dtype", "float3", r"columns\.feat\.dtype' is 'float3'"),
    ("edge_types 0 name", ["_N", "_N"], r"'edge_types\[0\]\.name' .*expected a list of 3"),
    ("edge_types 0 name", ["_N", "_E", "user"], "no node type is 'user'"),
    ("files x.arrow", {"bytes": -1, "crc32": "0"}, r"'files\.x\.arrow\.bytes' is -1"),
    ("files x.arrow", {"bytes": 1}, r"'files\.x\.arrow\.crc32' is missing"),
    ("files ../x", {"bytes": 1, "crc32": "0"}, r"'files' has the unexpected '\.\./x'"),
    ("files", {}, r"'files' lacks 'part0/edges/_N\._E\._N/data/weight\.arrow'"),
    ("colour", "red", "'colour' is not supported"),
]


@pytest.mark.parametrize(("path", "to", "message"), WRONG)
def test_a_wrong_field_is_named(value: dict[str, Any], path: str, to: object, message: str) -> None:
    copy = json.loads(json.dumps(value))
    *outer, key = (int(word) if word.isdigit() else word for word in path.split())
    inner = functools.reduce(operator.getitem, outer, copy)
    inner[key] = to
    if to is MISSING:
        del inner[key]
    with pytest.raises(StorageError, match=f"somewhere/manifest.json.*{message}"):
        from_json(copy, "somewhere/manifest.json")


def test_every_field_is_checked_or_kept(value: dict[str, Any]) -> None:
    check_every_field(
        value, lambda changed: to_json(from_json(changed, "the/file")), StorageError, "the/file"
    )


@pytest.mark.parametrize("text", ["", "[]", "{", "3", "\x00\xff", "[" * 100_000])
def test_something_else_than_a_manifest_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(StorageError, match=r"manifest\.json"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("stated", ["CHECKSUM", "", "00000000", "x" * 8, "\\ud800"])
def test_refuses_an_edited_manifest_or_checksum(tmp_path: Path, value: dict[str, Any], stated: str) -> None:
    checksum = write_manifest(from_json(value, "x"), tmp_path).checksum
    path = tmp_path / "manifest.json"
    edit = ('"seed": 7', '"seed": 8') if stated == "CHECKSUM" else (f'"{checksum}"', f'"{stated}"')
    path.write_text(path.read_text().replace(*edit))
    with pytest.raises(StorageError, match=r"manifest\.json does not match its checksum"):
        read_manifest(tmp_path)


def test_a_folder_of_dgl_is_told_apart(tmp_path: Path) -> None:
    config = tmp_path / "shop.json"
    config.write_text('{"part_method": "metis", "node_map": {}, "part-0": {}}')
    for path in (tmp_path, config):
        with pytest.raises(StorageError, match="format of DGL") as refused:
            read_manifest(path)
        assert f'dx.DistGraph(part_config="{config}")' in str(refused.value)


def test_a_missing_folder_is_named_once(tmp_path: Path) -> None:
    for folder, reason in ((tmp_path / "absent", "does not exist"), (tmp_path, r"has no manifest\.json")):
        with pytest.raises(StorageError, match=f"{reason}; write one with `dglx partition") as refused:
            read_manifest(folder)
        assert str(refused.value).count(str(folder)) == 1


def test_a_raw_graph_is_to_be_partitioned_first(tmp_path: Path) -> None:
    graph = tmp_path / "my graph.npz"
    graph.write_bytes(b"PK")
    with pytest.raises(StorageError, match="is a file, not a partitioned dataset") as refused:
        read_manifest(graph)
    assert f"`dglx partition '{graph}' --out DIR`" in str(refused.value)


def test_the_path_leads_into_lists_and_objects() -> None:
    inner = Fields({"a": [{"b": {"c": "x" * 100}}]}, "file").nested_list("a")[0].nested_fields("b")
    with pytest.raises(ConfigError, match=r"^file: key 'a\[0\]\.b\.c' is 'x+\.\.\.x+', expected a whole"):
        inner.integer("c")
    with pytest.raises(ConfigError, match=r"'a\[0\]\.b\.d' is missing"):
        inner.text("d")
    with pytest.raises(ConfigError, match=r"'a\[0\]\.b\.c' is not supported"):
        Fields({"c": 1}, "file", "a[0].b").reject_unread()


@pytest.mark.parametrize("value", [True, 1.0, "1"])
def test_one_is_not_true(value: object) -> None:
    """Python takes 1, True and 1.0 for equal; a manifest does not."""
    with pytest.raises(ConfigError, match="whole number"):
        Fields({"a": value}, "file").integer("a")
    with pytest.raises(ConfigError, match="one of 1"):
        Fields({"a": value}, "file").choice("a", (1,))
