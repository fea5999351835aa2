"""Any name makes a file name of its own that stays inside the folder."""

from hypothesis import given
from hypothesis import strategies as st

from dglx_dist.data.storage.columns import edge_type_name, part_files, safe_name
from dglx_dist.records import ColumnInfo

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)


def test_usual_names_stay_readable() -> None:
    assert safe_name("train_mask") == "train_mask"
    assert edge_type_name(("_N", "_E", "_N")) == "_N._E._N"


def test_odd_names_are_harmless() -> None:
    assert [safe_name(name) for name in ("..", "a/b", "", "A b", "ü")] == [
        "%2E%2E",
        "a%2Fb",
        "%",
        "A%20b",
        "%C3%BC",
    ]


@given(names, names)
def test_different_names_stay_different(one: str, other: str) -> None:
    assert (safe_name(one) == safe_name(other)) == (one == other)


@given(names)
def test_it_is_a_file_name(name: str) -> None:
    found = safe_name(name)
    assert 0 < len(found) <= 80
    assert found.isascii()
    assert not set(found) & set("./\\:~ \0")


@given(st.tuples(names, names, names))
def test_an_edge_type_fits_into_one_name(etype: tuple[str, str, str]) -> None:
    assert len(edge_type_name(etype)) <= 255


def test_all_files_of_a_part() -> None:
    info = ColumnInfo(dtype="float32", row_shape=())
    files = part_files(1, {"u": {"feat": info}, "i": {}}, {("u", "b", "i"): {"w": info}}, ("i",))
    assert list(files) == [
        "part1/nodes/u/original_ids.arrow",
        "part1/nodes/u/data/feat.arrow",
        "part1/nodes/i/original_ids.arrow",
        "part1/nodes/i/user_ids.arrow",
        "part1/edges/u.b.i/indptr.arrow",
        "part1/edges/u.b.i/indices.arrow",
        "part1/edges/u.b.i/original_ids.arrow",
        "part1/edges/u.b.i/data/w.arrow",
    ]
