"""Which tables a folder or a description stands for."""

import json
from pathlib import Path

import pytest

from dglx_dist.data.tables import find_layout
from dglx_dist.errors import DatasetError
from dglx_dist.records import EDGE_TYPE, NODE_TYPE


def touch(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def test_one_type_by_file_names(tmp_path: Path) -> None:
    layout = find_layout(touch(tmp_path, "nodes.csv", "edges.parquet", "notes.txt"), ())
    assert layout.name == tmp_path.name
    assert layout.nodes[NODE_TYPE].path == tmp_path / "nodes.csv"
    assert layout.edges[EDGE_TYPE].path == tmp_path / "edges.parquet"


def test_several_types_by_folder_names(tmp_path: Path) -> None:
    layout = find_layout(touch(tmp_path, "nodes/a.csv", "edges/a__to__b.csv"), ("x",))
    assert set(layout.nodes) == {"a"}
    assert set(layout.edges) == {("a", "to", "b")}
    assert layout.nodes["a"].ignore == ("x",)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["readme.txt"], r"has no table of edges; expected nodes\.csv \(optional\) and edges\.csv"),
        (["edges.csv", "edges.parquet"], r"has both edges\.csv and edges\.parquet; remove one"),
        (["edges/a-b.csv"], "an edge type is SOURCE__RELATION__DESTINATION, not 'a-b'"),
        (["manifest.json"], "is a partitioned dataset"),
    ],
)
def test_other_folders_are_refused(tmp_path: Path, names: list[str], message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        find_layout(touch(tmp_path, *names), ())


EDGES = {"a:to:b": {"file": "e.csv"}}


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ({"nodes": {}}, "the description lacks 'edges'"),
        ({"edges": EDGES, "vertices": {}}, "has no setting 'vertices'"),
        ({"edges": {"a:b": {"file": "e.csv"}}}, "an edge type is SOURCE:RELATION:DESTINATION, not 'a:b'"),
        ({"edges": {"a:to:b": {}}}, "edges 'a:to:b' lacks 'file'"),
        ({"edges": {"a:to:b": {"file": "e.csv", "src": "x"}}}, "has no setting 'src'"),
        ({"edges": {"a:to:b": {"file": "e.csv", "source": "x"}}}, "both or none of source, destination"),
        ({"edges": EDGES, "nodes": {"a": {"file": "n.csv", "features": "x"}}}, "'features' must be a list"),
        (
            {"edges": EDGES, "nodes": {"a": {"file": "n.csv", "classes": 0}}},
            "'classes' must be a whole number",
        ),
        ({"edges": ["e.csv"]}, "'edges' must be an object"),
        (["e.csv"], "the description must be a JSON object"),
    ],
)
def test_wrong_descriptions_are_refused(tmp_path: Path, description: object, message: str) -> None:
    path = tmp_path / "shop.json"
    path.write_text(json.dumps(description))
    with pytest.raises(DatasetError, match=rf"shop\.json: .*{message}"):
        find_layout(path, ())


def test_what_is_not_json_or_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shop.json").write_text("{")
    with pytest.raises(DatasetError, match=r"shop\.json: not valid JSON"):
        find_layout(tmp_path / "shop.json", ())
    with pytest.raises(DatasetError, match="there is no folder or description"):
        find_layout(tmp_path / "absent", ())
