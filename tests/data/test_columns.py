import numpy as np
import pytest

from dglx_dist.data.sources import count_classes, masks_of_split, standard_columns
from dglx_dist.errors import DatasetError
from dglx_dist.records import Array


def test_names_and_dtypes_become_standard() -> None:
    given: dict[str, Array] = {
        "features": np.array([[1], [2]]),
        "labels": np.array([[3], [-1]], dtype=np.int16),
        "val_mask": np.array([0, 1], dtype=np.uint8),
        "year": np.array([2001, 2002], dtype=np.int16),
    }
    columns = {name: np.asarray(column) for name, column in standard_columns(given, "here").items()}
    assert {name: column.dtype for name, column in columns.items()} == {
        "feat": np.float32,
        "label": np.int64,
        "val_mask": np.bool_,
        "year": np.int16,
    }
    assert columns["label"].tolist() == [3, -1]
    assert columns["val_mask"].tolist() == [False, True]


def test_a_standard_name_that_is_taken_is_not_overwritten() -> None:
    given = {"feat": np.array([1.0]), "features": np.array([2.0])}
    columns = standard_columns(given, "here")
    assert set(columns) == {"feat", "features"}
    assert np.asarray(columns["feat"]).tolist() == [1.0]


def test_double_precision_features_stay() -> None:
    assert standard_columns({"feat": np.array([1.0])}, "here")["feat"].dtype == np.float64


def test_floating_labels_are_whole_numbers_with_gaps() -> None:
    assert np.asarray(standard_columns({"label": np.array([1.0, np.nan])}, "x")["label"]).tolist() == [1, -1]
    with pytest.raises(DatasetError, match=r"x: column 'label', row 1: 0\.5 is not a whole number"):
        standard_columns({"label": np.array([1.0, 0.5])}, "x")
    with pytest.raises(DatasetError, match="x: column 'label' must hold numbers"):
        standard_columns({"label": np.array(["red"])}, "x")


def test_classes_are_the_largest_label_or_the_width() -> None:
    assert count_classes({"label": np.array([0, 4, -1])}) == 5
    assert count_classes({"label": np.zeros((3, 7))}) == 7
    assert count_classes({"label": np.array([-1, -1])}) is None
    assert count_classes({}) is None


def test_codes_become_masks() -> None:
    masks = masks_of_split(np.array([2, 0, 1, 0, -1]))
    assert {name: np.flatnonzero(mask).tolist() for name, mask in masks.items()} == {
        "train_mask": [1, 3],
        "val_mask": [2],
        "test_mask": [0],
    }
