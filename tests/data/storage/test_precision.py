import math
from pathlib import Path

import numpy as np
import pytest
import torch

from dglx_dist.data.partition.base import PARTITIONERS, PartitionOptions
from dglx_dist.data.storage.reader import open_dataset
from dglx_dist.data.storage.writer import in_precision, write_dataset
from dglx_dist.errors import ConfigError
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Array, RawGraph, SparseRows

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


def bits(values: torch.Tensor) -> Array:
    return values.view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize("stored", [np.float32, np.float64, np.float16])
def test_bfloat16_has_torchs_bits(stored: type) -> None:
    values = np.array(HARD, dtype=stored)
    random = np.random.default_rng(0).normal(size=300).astype(stored)
    features = np.concatenate([values, random]).reshape(3, -1)
    converted, marked = in_precision(graph(features), "bfloat16")
    got = converted.node_data[NODE_TYPE]["feat"]
    assert isinstance(got, np.ndarray)
    wanted = torch.from_numpy(features).to(torch.bfloat16)
    assert np.array_equal(got[~np.isnan(features)], bits(wanted)[~np.isnan(features)])
    assert np.isnan(torch.from_numpy(got.view(np.int16)).view(torch.bfloat16).float().numpy()[0, 9])
    assert marked == {(NODE_TYPE, "feat"), (EDGE_TYPE, "e")}


@pytest.mark.parametrize("sign", [1, -1])
def test_float64_is_rounded_once(sign: int) -> None:
    """Halfway between two bfloat16, and a hair beside it that float32 cannot hold: torch rounds it twice."""
    tie, hair = 1 + 2.0**-8, 2.0**-40
    features = sign * np.array([[tie - hair], [tie], [tie + hair]])
    converted, _ = in_precision(graph(features), "bfloat16")
    got = converted.node_data[NODE_TYPE]["feat"]
    assert isinstance(got, np.ndarray)
    rounded = torch.from_numpy(got.view(np.int16)).view(torch.bfloat16).double()
    assert (sign * rounded).reshape(-1).tolist() == [1, 1, 1 + 2.0**-7]


def test_float16_rounds_to_the_nearest_and_keeps_what_is_infinite() -> None:
    features = np.array(HARD, dtype=np.float32).reshape(3, 4)
    converted, marked = in_precision(graph(features), "float16")
    assert converted.node_data[NODE_TYPE]["feat"].dtype == np.float16
    np.testing.assert_array_equal(
        converted.node_data[NODE_TYPE]["feat"], torch.from_numpy(features).half().numpy()
    )
    assert marked == set()


def test_one_dtype_for_all_goes_to_features_only() -> None:
    columns = {
        "label": np.ones((3, 2), np.float32),
        "train_mask": np.ones(3, dtype=bool),
        "time": np.ones(3, np.float32),
        "other": np.ones((3, 1), np.float64),
    }
    before = graph(np.ones((3, 2), np.float32), **columns)
    converted, _ = in_precision(before, "float16")
    assert {name: column.dtype.name for name, column in converted.node_data[NODE_TYPE].items()} == {
        "feat": "float16",
        "label": "float32",
        "train_mask": "bool",
        "time": "float32",
        "other": "float16",
    }
    assert {name: column.dtype.name for name, column in converted.edge_data[EDGE_TYPE].items()} == {
        "w": "float32",
        "e": "float16",
    }
    assert before.node_data[NODE_TYPE]["feat"].dtype == np.float32


def test_columns_by_name_and_nothing_else() -> None:
    converted, marked = in_precision(graph(np.ones((3, 2), np.float32)), {"w": "bfloat16", "feat": "float16"})
    assert converted.node_data[NODE_TYPE]["feat"].dtype == np.float16
    assert converted.edge_data[EDGE_TYPE]["e"].dtype == np.float32
    assert marked == {(EDGE_TYPE, "w")}


@pytest.mark.parametrize(
    ("dtype", "value", "remedy"),
    [("float16", 65520.0, "bfloat16 or float32"), ("bfloat16", 3.4e38, "float32")],
)
def test_a_value_that_does_not_fit_is_named(dtype: str, value: float, remedy: str) -> None:
    features = np.ones((3, 4), np.float32)
    features[2, 1] = value
    with pytest.raises(
        ConfigError, match=rf"'feat' has .* in row 2, too large for {dtype}; store it as {remedy}"
    ):
        in_precision(graph(features), dtype)


def test_the_row_of_a_sparse_value_is_named() -> None:
    sparse = SparseRows(
        indptr=np.array([0, 2, 2, 4]),
        indices=np.array([0, 3, 1, 2], dtype=np.int32),
        values=np.array([1.0, 2.0, 1e6, 3.0], dtype=np.float32),
        num_columns=4,
    )
    with pytest.raises(ConfigError, match=r"'feat' has 1000000\.0 in row 2"):
        in_precision(graph(sparse), "float16")
    converted, _ = in_precision(graph(sparse), "bfloat16")
    column = converted.node_data[NODE_TYPE]["feat"]
    assert isinstance(column, SparseRows)
    dense = torch.from_numpy(column.dense(np.arange(3)).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(dense, torch.from_numpy(sparse.dense(np.arange(3))).to(torch.bfloat16))


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        ("float8", "feature dtype of all features is 'float8'"),
        ({"feat": "int8"}, "feature dtype of feat is 'int8'"),
        ({"feet": "float16"}, "names 'feet', which ring does not have; did you mean 'feat'"),
        ({"train_mask": "float16"}, "names 'train_mask', which is bool"),
    ],
)
def test_what_cannot_be_stored_so(wanted: str | dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        in_precision(graph(np.ones((3, 2), np.float32), train_mask=np.ones(3, dtype=bool)), wanted)


def test_written_and_read_again(tmp_path: Path) -> None:
    features = np.array(HARD[:9], dtype=np.float32).reshape(3, 3)
    converted, marked = in_precision(graph(features), "bfloat16")
    assignment = PARTITIONERS.get("contiguous")(PartitionOptions()).assign(converted, 1, 0)
    manifest = write_dataset(converted, assignment, tmp_path / "d", bfloat16=marked)
    assert manifest.node_columns[NODE_TYPE]["feat"].dtype == "bfloat16"
    stored = open_dataset(tmp_path / "d").part(0).node_data(NODE_TYPE, "feat")
    assert np.array_equal(stored, bits(torch.from_numpy(features).to(torch.bfloat16)))
