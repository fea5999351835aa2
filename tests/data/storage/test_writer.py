"""read(write(x)) == x, in every precision with original ids; a killed write leaves nothing that loads."""

import dataclasses
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dglx_dist.data.storage import writer
from dglx_dist.data.storage.reader import open_dataset
from dglx_dist.data.storage.writer import FeatureDtype, relabel_edges, relabel_nodes, write_dataset
from dglx_dist.errors import ConfigError, DatasetError, StorageError
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Array, Assignment, ColumnInfo, RawGraph, SparseRows
from tests.data.storage.graphs import (
    ODD_ONES_OUT,
    TWO_TRIANGLES,
    assert_same_graph,
    random_heterogeneous,
    random_homogeneous,
    random_owners,
    read_back,
    store,
)

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
dtypes = st.sampled_from(["bool", "uint8", "int16", "int64", "uint32", "float16", "float32", "float64"])


@st.composite
def graphs(draw: st.DrawFn) -> tuple[RawGraph, Assignment]:
    """Any types, sizes, columns and user ids; empty ones among them."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 20)))
    num_nodes = draw(st.dictionaries(names, st.integers(0, 12), min_size=1, max_size=3))
    edges = {}
    for etype in draw(st.lists(st.tuples(names, names, names), max_size=3)):
        ends = [list(num_nodes)[len(piece) % len(num_nodes)] for piece in (etype[0], etype[2])]
        count = draw(st.integers(0, 30)) if all(num_nodes[end] for end in ends) else 0
        sampled = [rng.integers(0, max(1, num_nodes[end]), count) for end in ends]
        edges[ends[0], etype[1], ends[1]] = tuple(sampled)

    def columns(count: int) -> dict[str, np.ndarray]:
        shape = draw(st.sampled_from([(), (3,), (2, 2), (0,)]))
        chosen = draw(st.dictionaries(names, dtypes, max_size=2))
        return {name: rng.integers(0, 2, (count, *shape)).astype(dtype) for name, dtype in chosen.items()}

    user_ids = {
        ntype: np.array([f"{ntype}{node}" for node in range(count)], dtype=np.str_)
        if draw(st.booleans())
        else rng.permutation(count) - 5
        for ntype, count in num_nodes.items()
        if draw(st.booleans())
    }
    graph = RawGraph(
        name=draw(names),
        num_nodes=num_nodes,
        edges=edges,
        node_data={ntype: columns(count) for ntype, count in num_nodes.items()},
        edge_data={etype: columns(len(src)) for etype, (src, _) in edges.items()},
        num_classes={ntype: 3 for ntype in num_nodes if draw(st.booleans())},
        user_ids=user_ids,
    )
    return graph, random_owners(graph, draw(st.integers(1, 4)), draw(st.integers(0, 99)))


@given(graphs())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_reading_gives_what_was_written(tmp_path_factory, case) -> None:
    graph, assignment = case
    dataset = store(graph, assignment, tmp_path_factory.mktemp("any") / "d")
    assert_same_graph(read_back(dataset), graph)
    for ntype, part_of in assignment.part_of.items():
        assert (
            np.diff(dataset.manifest.node_offsets[ntype]).tolist()
            == np.bincount(part_of, minlength=assignment.num_parts).tolist()
        )


def test_small_chunks_write_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_homogeneous(3)
    assignment = random_owners(graph, 3, 4)
    expected = write_dataset(graph, assignment, tmp_path / "whole")
    monkeypatch.setattr(writer, "CHUNK_BYTES", 20)
    assert write_dataset(graph, assignment, tmp_path / "chunked").checksum == expected.checksum


def test_sparse_features_are_stored_dense(tmp_path: Path) -> None:
    owners = Assignment(num_parts=2, part_of={NODE_TYPE: np.array([1, 0, 0])}, method="", seed=0)
    dataset = store(graph(SPARSE), owners, tmp_path / "d")
    first, second, third = [1, 0, 0, 2], [0, 0, 0, 0], [0, 1e6, 3, 0]
    assert dataset.part(0).node_data(NODE_TYPE, "feat").tolist() == [second, third]
    assert dataset.part(1).node_data(NODE_TYPE, "feat").tolist() == [first]
    assert SPARSE.dense(np.array([2, 0, 2])).tolist() == [third, first, third]
    assert SPARSE.dense(np.empty(0, np.int64)).shape == (0, 4)


def test_bfloat16_is_kept_as_its_bits(tmp_path: Path) -> None:
    graph = random_homogeneous(0)
    bits = np.arange(40, dtype=np.uint16)
    graph.node_data[NODE_TYPE]["half"] = bits
    manifest = write_dataset(
        graph, random_owners(graph, 2, 0), tmp_path / "d", bfloat16=[(NODE_TYPE, "half")]
    )
    assert manifest.node_columns[NODE_TYPE]["half"] == ColumnInfo(dtype="bfloat16", row_shape=())
    part = open_dataset(tmp_path / "d").part(0)
    assert part.node_data(NODE_TYPE, "half").tolist() == bits[part.original_node_ids(NODE_TYPE)].tolist()


def owned_by(part_of: object, num_parts: int = 2) -> Assignment:
    return Assignment(num_parts=num_parts, part_of={NODE_TYPE: np.array(part_of)}, method="", seed=0)


ROWS = SparseRows(indptr=np.arange(7), indices=np.zeros(6, np.int32), values=np.ones(6), num_columns=1)


@pytest.mark.parametrize(
    ("change", "how", "message"),
    [
        ({}, {"quality": {"edge_cut": math.nan}}, r"quality\['edge_cut'\] is nan"),
        ({}, {"bfloat16": [(NODE_TYPE, "feat")]}, r"feat is float32; the bits of bfloat16"),
        (
            {"node_data": {NODE_TYPE: {"x": ROWS}}},
            {"bfloat16": [(NODE_TYPE, "x")]},
            "x is float64; the",
        ),
        ({"node_data": {NODE_TYPE: {"x": np.zeros(5)}}}, {}, r"_N/x has shape \(5,\), but there are 6"),
        ({"user_ids": {NODE_TYPE: np.full(6, 2**63, np.uint64)}}, {}, "'_N' have dtype uint64"),
        ({"user_ids": {NODE_TYPE: np.arange(6.0)}}, {}, "'_N' have dtype float64"),
        ({"user_ids": {NODE_TYPE: np.arange(5)}}, {}, r"'_N' have shape \(5,\), but there are 6"),
        ({"edges": {EDGE_TYPE: (np.arange(7), np.zeros(7, int))}}, {}, "'src', row 6: node id 6"),
        ({"edges": {EDGE_TYPE: (np.zeros(7, int), np.arange(7))}}, {}, "'dst', row 6: node id 6"),
        ({"edges": {EDGE_TYPE: (np.ones(7), np.ones(7, int))}}, {}, "'src' must hold one whole number a row"),
        ({"edges": {EDGE_TYPE: (np.ones(7, int), np.ones((7, 1), int))}}, {}, "'dst' must hold one whole"),
        ({}, {"assignment": owned_by([0, 1, 0, 1, 0, 2])}, "node 5 .* part 2"),
        ({}, {"assignment": owned_by([0, -1, 0, 1, 0, 1])}, "node 1 .* part -1"),
        ({}, {"assignment": owned_by([0, 1])}, "6 nodes"),
        ({}, {"assignment": owned_by([0.0] * 6)}, "whole number"),
        ({}, {"assignment": owned_by([0] * 6, 0)}, "at least 1"),
        ({}, {"assignment": Assignment(num_parts=1, part_of={}, method="", seed=0)}, "no owners .*'_N'"),
    ],
)
def test_what_cannot_be_stored_is_named_and_leaves_nothing(
    tmp_path: Path, change: dict[str, Any], how: dict[str, Any], message: str
) -> None:
    graph = dataclasses.replace(TWO_TRIANGLES, **change)
    with pytest.raises((ConfigError, DatasetError), match=message):
        write_dataset(graph, **({"assignment": ODD_ONES_OUT, "folder": tmp_path / "d"} | how))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("state", ["whole", "damaged", "newer", "empty"])
def test_overwriting_replaces_all_of_a_dataset(tmp_path: Path, state: str) -> None:
    folder, manifest = tmp_path / "d", tmp_path / "d/manifest.json"
    first = write_dataset(random_heterogeneous(0), random_owners(random_heterogeneous(0), 3, 0), folder)
    if state == "whole":
        with pytest.raises(StorageError, match="exists already"):
            write_dataset(TWO_TRIANGLES, ODD_ONES_OUT, folder)
        assert open_dataset(folder).manifest.checksum == first.checksum
    elif state == "damaged":
        manifest.write_bytes(manifest.read_bytes()[:-9])
    elif state == "newer":
        manifest.write_text('{"format": "dglx-dataset", "version": 99}')
    else:
        shutil.rmtree(folder)
        folder.mkdir()
    write_dataset(TWO_TRIANGLES, ODD_ONES_OUT, folder, overwrite=state != "empty")
    assert_same_graph(read_back(open_dataset(folder)), TWO_TRIANGLES)
    assert sorted(path.name for path in tmp_path.rglob("part*")) == ["part0", "part1"]
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


@pytest.mark.parametrize("name", ["thesis.tex", "manifest.json", None])
def test_overwriting_never_touches_anything_else(tmp_path: Path, name: str | None) -> None:
    folder = tmp_path / "home"
    if name is None:  # a dataset with a stranger in it
        write_dataset(TWO_TRIANGLES, ODD_ONES_OUT, folder)
    folder.mkdir(exist_ok=True)
    stranger = folder / (name or "notes.txt")
    stranger.write_text("{}")
    with pytest.raises(StorageError, match=r"home .*not overwritten"):
        write_dataset(TWO_TRIANGLES, ODD_ONES_OUT, folder, overwrite=True)
    assert stranger.read_text() == "{}"


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"file/d cannot be written: .*file'; choose"):
        write_dataset(TWO_TRIANGLES, ODD_ONES_OUT, tmp_path / "file" / "d")


# Writes the dataset named by its argument, and stops for good after the file number given second.
KILLED = """
import os, signal, sys
from pathlib import Path
from dglx_dist.data.storage import writer
from tests.data.storage.graphs import ODD_ONES_OUT, TWO_TRIANGLES
wanted, real = int(sys.argv[2]), (writer.write_column, writer.write_manifest)
written = 0
def counting(function):
    def write(*args):
        global written
        result = function(*args)
        written += 1
        if written == wanted:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return write
writer.write_column, writer.write_manifest = map(counting, real)
writer.write_dataset(TWO_TRIANGLES, ODD_ONES_OUT, Path(sys.argv[1]), overwrite=True)
"""


@pytest.mark.parametrize("file_number", [1, 10, 17])
def test_a_killed_write_leaves_nothing_that_loads(tmp_path: Path, file_number: int) -> None:
    """17 is the manifest, after two parts of one id, three node and four edge columns (strings apart)."""
    folder = tmp_path / "d"
    before = write_dataset(random_homogeneous(0), random_owners(random_homogeneous(0), 2, 0), folder)
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", KILLED, str(folder), str(file_number)]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    ended = subprocess.run(command, env=environment, cwd=root, timeout=100, check=False, capture_output=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    (left,) = (path for path in tmp_path.iterdir() if path != folder)
    assert (left / "manifest.json").exists() == (file_number == 17)
    with pytest.raises(StorageError, match="left behind"):
        open_dataset(left)
    assert open_dataset(folder).manifest.checksum == before.checksum
    write_dataset(TWO_TRIANGLES, ODD_ONES_OUT, folder, overwrite=True)
    assert_same_graph(read_back(open_dataset(folder)), TWO_TRIANGLES)


@given(st.integers(0, 10_000), st.integers(1, 7), st.integers(1, 30), st.integers(0, 80))
@settings(max_examples=60, deadline=None)
def test_it_is_the_plain_sort(seed: int, num_parts: int, num_nodes: int, num_edges: int) -> None:
    graph = random_homogeneous(seed, num_nodes, num_edges)
    assignment = random_owners(graph, num_parts, seed)
    part_of = assignment.part_of[NODE_TYPE]
    order = relabel_nodes(graph, assignment)[NODE_TYPE]
    assert order.new_to_old.tolist() == sorted(range(num_nodes), key=lambda node: (part_of[node], node))
    assert order.old_to_new[order.new_to_old].tolist() == list(range(num_nodes))
    assert np.diff(order.offsets).tolist() == np.bincount(part_of, minlength=num_parts).tolist()

    edges = relabel_edges(graph, EDGE_TYPE, order, order)
    src, dst = (order.old_to_new[end] for end in graph.edges[EDGE_TYPE])
    expected = sorted(range(num_edges), key=lambda edge: (dst[edge], src[edge], edge))
    assert edges.new_to_old.tolist() == expected
    assert edges.indices.tolist() == src[expected].tolist()
    assert np.diff(edges.indptr).tolist() == np.bincount(dst, minlength=num_nodes).tolist()
    owners = part_of[graph.edges[EDGE_TYPE][1]]
    assert np.diff(edges.offsets).tolist() == np.bincount(owners, minlength=num_parts).tolist()


HARD = [0.0, -0.0, 1.0, 1 / 3, -2.7, 65504.0, 2.0**-24, 1.00390625, 1.01171875, math.nan, math.inf, -math.inf]


def graph(features: Array | SparseRows, **columns: Array) -> RawGraph:
    ring = np.arange(3), np.array([1, 2, 0])
    return RawGraph(
        name="ring",
        num_nodes={NODE_TYPE: 3},
        edges={EDGE_TYPE: ring},
        node_data={NODE_TYPE: {"feat": features, **columns}},
        edge_data={EDGE_TYPE: {"w": np.ones(3, np.float32), "e": np.full((3, 2), 0.1, np.float32)}},
    )


def stored_as(graph: RawGraph, wanted: FeatureDtype) -> tuple[Array, dict[str, str]]:
    """Write ``graph`` in another precision; return the features as they are stored, and all dtypes."""
    with tempfile.TemporaryDirectory() as folder:
        written = write_dataset(graph, owned_by([0, 0, 0], 1), Path(folder) / "g", feature_dtype=wanted)
        features = np.array(open_dataset(Path(folder) / "g").part(0).node_data(NODE_TYPE, "feat"))
    columns = {**written.node_columns[NODE_TYPE], **written.edge_columns[EDGE_TYPE]}
    return features, {name: info.dtype for name, info in columns.items()}


def bits(values: torch.Tensor) -> Array:
    return values.view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize("stored", [np.float32, np.float64, np.float16])
def test_bfloat16_has_torchs_bits(stored: type) -> None:
    values = np.array(HARD, dtype=stored)
    random = np.random.default_rng(0).normal(size=300).astype(stored)
    features = np.concatenate([values, random]).reshape(3, -1)
    got, dtypes = stored_as(graph(features), "bfloat16")
    expected = torch.from_numpy(features).to(torch.bfloat16)
    assert np.array_equal(got[~np.isnan(features)], bits(expected)[~np.isnan(features)])
    assert np.isnan(torch.from_numpy(got.view(np.int16)).view(torch.bfloat16).float().numpy()[0, 9])
    assert dtypes == {"feat": "bfloat16", "w": "float32", "e": "bfloat16"}


@pytest.mark.parametrize("sign", [1, -1])
def test_float64_is_rounded_once(sign: int) -> None:
    """Halfway between two bfloat16, and a hair beside it that float32 cannot hold: torch rounds it twice."""
    tie, hair = 1 + 2.0**-8, 2.0**-40
    features = sign * np.array([[tie - hair], [tie], [tie + hair]])
    got, _ = stored_as(graph(features), "bfloat16")
    rounded = torch.from_numpy(got.view(np.int16)).view(torch.bfloat16).double()
    assert (sign * rounded).reshape(-1).tolist() == [1, 1, 1 + 2.0**-7]


def test_float16_rounds_to_the_nearest_and_keeps_what_is_infinite() -> None:
    features = np.array(HARD, dtype=np.float32).reshape(3, 4)
    column, _ = stored_as(graph(features), "float16")
    assert column.dtype == np.float16
    np.testing.assert_array_equal(column, torch.from_numpy(features).half().numpy())


@pytest.mark.parametrize(
    ("wanted", "changed"),
    [
        ("float16", {"feat": "float16", "other": "float16", "e": "float16"}),
        ({"w": "bfloat16", "feat": "float16"}, {"w": "bfloat16", "feat": "float16"}),
    ],
)
def test_one_dtype_for_all_goes_to_features_only_and_by_name_to_nothing_else(
    wanted: FeatureDtype, changed: dict[str, str]
) -> None:
    columns = {
        "label": np.ones((3, 2), np.float32),
        "train_mask": np.ones(3, dtype=bool),
        "time": np.ones(3, np.float32),
        "other": np.ones((3, 1), np.float64),
    }
    before = graph(np.ones((3, 2), np.float32), **columns)

    both = before.node_data[NODE_TYPE] | before.edge_data[EDGE_TYPE]
    expected = {name: column.dtype.name for name, column in both.items()} | changed
    assert stored_as(before, wanted)[1] == expected
    assert before.node_data[NODE_TYPE]["feat"].dtype == np.float32


SPARSE = SparseRows(
    indptr=np.array([0, 2, 2, 4]),
    indices=np.array([0, 3, 1, 2], dtype=np.int32),
    values=np.array([1.0, 2.0, 1e6, 3.0], dtype=np.float32),
    num_columns=4,
)


def test_sparse_values_are_rounded_as_dense_ones() -> None:
    expected = torch.from_numpy(SPARSE.dense(np.arange(3))).to(torch.bfloat16)
    assert np.array_equal(stored_as(graph(SPARSE), "bfloat16")[0], bits(expected))


@pytest.mark.parametrize(
    ("features", "wanted", "named"),
    [
        (
            65520.0,
            "float16",
            "'feat' of '_N' has .* in row 2, too large for float16; store it as bfloat16 or float32",
        ),
        (3.4e38, "bfloat16", "'feat' of '_N' has .* in row 2, too large for bfloat16; store it as float32"),
        (SPARSE, "float16", r"'feat' of '_N' has 1000000\.0 in row 2"),
        (1.0, "float8", "feature dtype of all features is 'float8'"),
        (1.0, {"feat": "int8"}, "feature dtype of feat is 'int8'"),
        (1.0, {"feat": None}, "feature dtype of feat is None, not"),
        (1.0, {"feet": "float16"}, "names 'feet', which ring does not have; did you mean 'feat'"),
        (1.0, {"train_mask": "float16"}, "names 'train_mask', which is bool"),
    ],
)
def test_what_cannot_be_stored_so_is_named(features: Any, wanted: Any, named: str) -> None:
    if isinstance(features, float):
        features = np.array([[1, 1], [1, 1], [1, features]], np.float32)
    with pytest.raises(ConfigError, match=named):
        stored_as(graph(features, train_mask=np.ones(3, dtype=bool)), wanted)
