"""Reading JSON field by field: the right kind comes back, the wrong kind is named with its path."""

import pytest

from dglx_dist.data.storage.manifest import Fields
from dglx_dist.errors import StorageError


def test_every_kind_comes_back() -> None:
    top = Fields({"a": "x", "b": 3, "c": [1, 2], "d": ["p", "q"], "e": {"f": None}, "g": [{}]}, "file")
    assert top.text("a") == "x"
    assert top.integer("b", at_least=3) == 3
    assert top.integers("c", count=2) == [1, 2]
    assert top.texts("d", count=2) == ["p", "q"]
    assert top.record("e").optional_integer("f") is None
    assert top.mapping("e") == {"f": None}
    assert len(top.records("g")) == 1
    top.finish()


def test_the_path_leads_into_lists_and_objects() -> None:
    inner = Fields({"a": [{"b": {"c": "x" * 100}}]}, "file").records("a")[0].record("b")
    with pytest.raises(StorageError, match=r"^file: key 'a\[0\]\.b\.c' is 'x+\.\.\., expected a whole"):
        inner.integer("c")
    with pytest.raises(StorageError, match=r"'a\[0\]\.b\.d' is missing"):
        inner.text("d")
    with pytest.raises(StorageError, match=r"'a\[0\]\.b\.c' is unknown"):
        Fields({"c": 1}, "file", "a[0].b").finish()


@pytest.mark.parametrize("value", [1, True, 1.0, "1"])
def test_one_is_not_true(value: object) -> None:
    """Python takes 1, True and 1.0 for equal; a manifest does not."""
    fields = Fields({"a": value}, "file")
    assert (fields.choice("a", (1, True, 1.0, "1"))) is not None
    if type(value) is int:
        assert fields.integer("a") == 1
    else:
        with pytest.raises(StorageError, match="whole number"):
            fields.integer("a")


def test_something_else_than_an_object() -> None:
    with pytest.raises(StorageError, match=r"file: the file holds \[\], expected an object"):
        Fields([], "file")
