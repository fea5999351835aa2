"""Reading the description: what is understood, and what is refused by name."""

from pathlib import Path
from typing import Any

import pytest

from dglx_dist.data.ingest.config import read_config
from dglx_dist.errors import ConfigError
from tests.data.ingest.shop import describe, put_at, write_shop


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": []}, "'nodes' is \\[\\], expected a list of at least 1"),
        ({"version": "gsprocessing-v1.0"}, "'gsprocessing-v1.0', expected one of 'gconstruct-v0.1'"),
        ({"edgs": []}, "key 'edgs' is not supported; did you mean 'edges'"),
        ({"nodes.0.node_type": 3}, "node_type' is 3"),
        ({"nodes.0.files": "none-*.parquet"}, "there is no file 'none-\\*.parquet' in "),
        ({"nodes.0.format": {"name": "HDF5"}}, "name' is 'HDF5', expected one of 'csv', 'parquet'"),
        ({"nodes.0.format": {"name": "csv", "separator": "::"}}, "'::', expected one ASCII character"),
        ({"nodes.0.features.0.transform": {"name": "bert_hf"}}, "transform 'bert_hf' is not supported"),
        ({"nodes.0.features.0.transform.max_bond": 1}, "max_bond' is not.*did you mean 'max_bound'"),
        ({"nodes.0.features.0.feature_col": ["a", "b"], "nodes.0.features.0.feature_name": None},
         "several columns need a feature_name"),
        ({"nodes.0.features.0.feature_name": "label"}, "'label' is the name of labels or splits"),
        ({"nodes.0.features.0.out_dtype": "int8"}, "out_dtype' is 'int8'"),
        ({"nodes.0.labels": [{}, {}]}, "2 labels; only one task per type"),
        ({"nodes.0.labels.0.task_type": "link_prediction", "nodes.0.labels.0.label_col": None},
         "link_prediction is a task for edges"),
        ({"nodes.0.labels.0.label_col": None}, "label_col' is None, expected a column for classification"),
        ({"nodes.0.labels.0.split_pct": [0.9, 0.2, 0]}, "together at most 1"),
        ({"nodes.0.labels.0.split_pct": [0.8, 0.1, 0.1, 0]}, "expected three shares of train"),
        ({"nodes.0.labels.0.split_pct": [0.8, -1, 0.1]}, r"split_pct\[1\]' is -1, expected a number from 0"),
        ({"nodes.0.labels.0.split_pct": [True, 0, 0]}, r"split_pct\[0\]' is True, expected a number from 0"),
        ({"nodes.0.format": {"name": "csv", "separator": "§"}}, "one ASCII character"),
        ({"nodes.0.format": {"name": "csv", "separator": "\n"}}, "other than a quote or an end of line"),
        ({"nodes.0.format": None, "nodes.0.files": ["users-0.parquet", "knows.csv"]}, "files of one format"),
        ({"nodes.0.files": "shop.json", "nodes.0.format": None}, "shop.json has no known format"),
        ({"nodes.0.labels.0.split_pct": None,
          "nodes.0.labels.0.custom_split_filenames": {"train": "", "valid": "knows.csv"}}, "train' is ''"),
        ({"nodes.0.features.0.transform.max_bound": float("nan")}, "not valid JSON"),
        ({"nodes.0.node_type": "\ud800"}, "not valid JSON"),
        ({"nodes.0.labels.0.custom_split_filenames": {"train": "items.parquet"}},
         "split_pct' is .* nothing, because custom_split_filenames"),
        ({"nodes.0.labels.0.split_pct": None,
          "nodes.0.labels.0.custom_split_filenames": {"train": "items.parquet", "column": ["a", "b"]}},
         "one column of ids"),
        ({"nodes.0.files": ["users-0.parquet", "users-*.parquet"]}, "files that are named once each"),
        ({"nodes.0.format": {"name": "parquet", "separator": ";"}}, "nothing for parquet"),
        ({"nodes.0.features.0.out_dtype": "float16", "nodes.0.features.1.out_dtype": "float64"},
         "they have float16, float64"),
        ({"nodes.0.labels.0.mask_field_names": []}, "mask_field_names' is not supported"),
        ({"edges.0.relation": ["user", "buys"]}, r"\[source node type, relation, destination node type\]"),
        ({"edges.0.relation": ["user", "buys", "shop"]}, "use the node type 'shop', which is not among"),
        ({"edges.1.relation": ["user", "buys", "item"]}, "is described twice"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    description = describe()
    for path, value in change.items():
        put_at(description, path, value)
    with pytest.raises(ConfigError, match=message):
        read_config(write_shop(tmp_path, description))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "expected an object with named fields"),
        ('{"nodes": [], "nodes": [{}]}', "the key 'nodes' appears twice"),
        ("[" * 100_000, "not valid JSON"),
        (None, "cannot be read"),
    ],
    ids=["cut", "list", "twice", "deep", "absent"],
)
def test_a_file_that_is_no_description_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "shop.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path / "shop.json")


def test_paths_are_found_below_the_current_folder_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In the name of a folder that nobody wrote as a pattern, signs of patterns stand for themselves.
    folder = tmp_path / "shop[1]"
    folder.mkdir()
    path = write_shop(folder)
    assert len(read_config(path).nodes[0].files.paths) == 2
    (folder / "configs").mkdir()
    moved = path.rename(folder / "configs" / "shop.json")
    monkeypatch.chdir(folder)
    assert read_config(moved).nodes[1].files.paths == (folder / "items.parquet",)
