"""Files of SciPy, torch (PyG), NetworkX and SNAP, written by these libraries; and what of them is refused."""

import gzip
import json
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import networkx as nx
import numpy as np
import pytest
import scipy.sparse as sp
import torch

from dglx_dist.data.external_memory import Budget, Workspace
from dglx_dist.data.sources import load_dataset
from dglx_dist.errors import ConfigError, DatasetError
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Array, RawGraph
from tests.data.raw_graphs import columns_of, edges_of
from tests.helpers import refusal


def matrix() -> Any:
    return sp.random(40, 40, density=0.1, random_state=0, format="coo")


@pytest.mark.parametrize("kind", ["csr", "csc", "coo", "bsr", "dia"])
def test_a_sparse_matrix_is_a_weighted_graph(tmp_path: Path, kind: str) -> None:
    sparse = matrix().asformat(kind)
    sp.save_npz(tmp_path / "a.npz", sparse)
    graph = load_dataset(tmp_path / "a.npz")
    loaded = sp.coo_array((graph.edge_data[EDGE_TYPE]["weight"], graph.edges[EDGE_TYPE]), shape=(40, 40))
    assert graph.num_nodes == {NODE_TYPE: 40}
    assert (loaded != sparse).nnz == 0
    sp.save_npz(tmp_path / "ones.npz", (sparse != 0).astype(np.int8))
    assert load_dataset(tmp_path / "ones.npz").edge_data[EDGE_TYPE] == {}


@pytest.mark.parametrize(
    "wrong",
    [
        {"indptr": np.array([0, 9, 1, 2])},
        {"indices": np.array([0, 5])},
        {"shape": np.array(3)},
        {"data": np.ones(1)},
        {"format": np.array(b"os")},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_refuses_an_unsound_matrix_before_compiled_code(tmp_path: Path, wrong: dict[str, Array]) -> None:
    sound = {"indptr": np.array([0, 1, 1, 2]), "indices": np.array([0, 2]), "data": np.ones(2)}
    sound |= {"shape": np.array([3, 3]), "format": np.array(b"csr")}
    np.savez(tmp_path / "a.npz", **(sound | wrong))
    with pytest.raises(DatasetError, match=r"a\.npz: not a readable \.npz file of plain arrays"):
        load_dataset(tmp_path / "a.npz")
    sp.save_npz(tmp_path / "b.npz", sp.random(3, 4, density=0.9, format="csr"))
    with pytest.raises(DatasetError, match=r"b\.npz: .* shape \(3, 4\), but the matrix of a graph is square"):
        load_dataset(tmp_path / "b.npz")


def test_arrays_that_fit_nowhere_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    arrays = {"src": np.array([0, 1]), "dst": np.array([1, 2]), "num_nodes": np.array(3)}
    np.savez(tmp_path / "a.npz", **arrays, age=np.arange(3), year=np.arange(7), names=np.array([None] * 3))
    graph = load_dataset(tmp_path / "a.npz")
    assert columns_of(graph).keys() == {"age"}
    assert [record.getMessage().partition("a.npz: ")[2] for record in caplog.records] == [
        "ignored names: pickled objects, which are never loaded",
        "ignored year (7,): a row neither for each of the 3 nodes nor for each of the 2 edges",
    ]
    np.savez(tmp_path / "b.npz", **arrays, labels=np.arange(7))
    with pytest.raises(DatasetError, match=r"array 'labels' has shape \(7,\), which is neither one row"):
        load_dataset(tmp_path / "b.npz")


def pyg() -> dict[str, Any]:
    """Return a dict like that of ``torch_geometric.data.Data.to_dict``."""
    return {
        "x": torch.arange(8, dtype=torch.float32).reshape(4, 2),
        "edge_index": torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]),
        "edge_attr": torch.ones(4, 3),
        "y": torch.tensor([0, 1, 0, 1]),
        "train_mask": torch.tensor([True, False, False, False]),
        "num_nodes": 4,
        "name": "ring",
    }


def test_reads_tensors_of_pyg(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.save(pyg(), tmp_path / "ring.pt")
    graph = load_dataset(tmp_path / "ring.pt")
    assert edges_of(graph) == [[0, 1, 2, 3], [1, 2, 3, 0]]
    assert columns_of(graph)["feat"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert columns_of(graph).keys() == {"feat", "label", "train_mask"}
    # There are as many edges as nodes.
    assert graph.edge_data[EDGE_TYPE]["edge_attr"].shape == (4, 3)
    assert graph.num_classes == {NODE_TYPE: 2}
    assert "ignored name: no dense tensor" in caplog.text
    relations = pyg() | {"edge_type": torch.tensor([0, 1, 0, 1])}
    torch.save(relations, tmp_path / "two.pt")
    assert [etype[1] for etype in load_dataset(tmp_path / "two.pt").edges] == ["r0", "r1"]


def test_no_class_is_unpickled(tmp_path: Path) -> None:
    torch.save(SimpleNamespace(x=torch.ones(2)), tmp_path / "object.pt")
    torch.save(pyg(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.save([torch.ones(2)], tmp_path / "list.pt")
    torch.save(pyg() | {"paper": {"x": torch.ones(2)}}, tmp_path / "types.pt")
    torch.save(pyg() | {"edge_index": torch.ones(3, 2)}, tmp_path / "index.pt")
    for name, message in (
        ("object", r"holds the class types\.SimpleNamespace, which is never loaded; save a dict of tensors"),
        ("old", r"not a torch\.save file, or cut off"),
        ("list", "does not hold a dict of tensors"),
        ("types", "a dict of tensors of one type"),
        ("index", r"edge_index has shape \(3, 2\); expected \(2, edges\)"),
        ("absent", "is missing, not a torch"),
    ):
        with pytest.raises(DatasetError, match=rf"{name}\.pt.*{message}"):
            load_dataset(f"torch:{tmp_path / name}.pt")


def networkx_graph(*, directed: bool) -> Any:
    graph = nx.gnp_random_graph(12, 0.3, seed=0, directed=directed)
    for node in graph:
        graph.nodes[node].update(
            feat_0=node / 2, feat_1=1.0, label=node % 3, split=("train", "test")[node % 2]
        )
        graph.nodes[node]["note"] = "text"
    for number, (u, v) in enumerate(graph.edges):
        graph.edges[u, v]["weight"] = number + 0.5
    return graph


@pytest.mark.parametrize("directed", [True, False])
@pytest.mark.parametrize("kind", ["graphml", "graphml.gz", "json"])
def test_reads_networkx_graphs(
    tmp_path: Path, kind: str, directed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    original, path = networkx_graph(directed=directed), tmp_path / f"my.graph.{kind}"
    if kind == "json":
        path.write_text(json.dumps(nx.node_link_data(original)))
    else:
        getattr(nx, f"write_{kind.removesuffix('.gz')}")(original, path)
    graph = load_dataset(path)
    assert graph.name == "my.graph"
    expected = {(u, v): data["weight"] for u, v, data in nx.DiGraph(original).edges(data=True)}
    ends, weights = zip(*edges_of(graph), strict=True), graph.edge_data[EDGE_TYPE]["weight"].tolist()
    assert dict(zip(ends, weights, strict=True)) == expected
    columns = columns_of(graph)
    assert columns["feat"].tolist() == [[node / 2, 1.0] for node in range(12)]
    assert columns["label"].tolist() == [node % 3 for node in range(12)]
    assert columns["train_mask"].tolist() == [node % 2 == 0 for node in range(12)]
    assert graph.user_ids == {}
    assert ["ignored note: not a number in each" in record.getMessage() for record in caplog.records] == [
        True
    ]


@pytest.mark.parametrize("names", [{}, {0: "Ann", 1: "b'c"}])
def test_reads_nx_edge_lists(tmp_path: Path, names: dict[int, str], caplog: pytest.LogCaptureFixture) -> None:
    original = nx.relabel_nodes(nx.path_graph(4, create_using=nx.DiGraph), names)
    nx.write_edgelist(original, tmp_path / "plain.txt")
    assert load_dataset(tmp_path / "plain.txt").edge_data[EDGE_TYPE] == {}
    for number, (_, _, data) in enumerate(original.edges(data=True)):
        data |= {
            "src": 7,
            "weight": number / 2 - 1e-9,
            "note": "{'w': __import__('os'), 'v': 9, }",
            "times": number,
        }
    nx.write_edgelist(original, tmp_path / "a.edgelist")
    graph = load_dataset(tmp_path / "a.edgelist")
    assert len(edges_of(graph)[0]) == 3
    columns = {name: column.tolist() for name, column in graph.edge_data[EDGE_TYPE].items()}
    assert columns == {"weight": [-1e-9, 0.5 - 1e-9, 1 - 1e-9], "times": [0, 1, 2]}
    assert "ignored note: not a number in each" in caplog.text


def test_braces_in_a_list_of_networkx_may_be_of_an_id(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a b {}\n{c} d {}\n")
    assert load_dataset(tmp_path / "a.txt").user_ids[NODE_TYPE].tolist() == ["a", "b", "d", "{c}"]


def test_a_tail_in_braces_is_no_dictionary(tmp_path: Path) -> None:
    (tmp_path / "kg.txt").write_text("a likes {b}\n{b} likes a\n")
    graph = load_dataset(tmp_path / "kg.txt")
    assert (list(graph.edges), graph.total_edges) == ([("_N", "likes", "_N")], 2)


def test_names_of_nodes_become_their_ids(tmp_path: Path) -> None:
    original = nx.karate_club_graph()
    nx.write_graphml(nx.relabel_nodes(original, {0: "hi"}), tmp_path / "club.graphml")
    graph = load_dataset(tmp_path / "club.graphml")
    assert sorted(graph.user_ids[NODE_TYPE].tolist()) == sorted(["hi", *map(str, range(1, 34))])
    assert "label" not in graph.node_data[NODE_TYPE]
    assert graph.total_edges == 2 * original.number_of_edges()


SNAP = (
    "# Directed graph: web.txt\n# Nodes: 4 Edges: 4\n# FromNodeId\tToNodeId\n30\t7\n7\t30\n7\t1000000\n0\t7\n"
)


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz"])
@pytest.mark.parametrize("between", ["\t", "  ", ","])
def test_reads_edge_lists_of_snap(tmp_path: Path, suffix: str, between: str) -> None:
    path = tmp_path / f"web{suffix}"
    text = SNAP.replace("\t", between).encode()
    path.write_bytes(gzip.compress(text) if suffix == ".txt.gz" else text)
    graph = load_dataset(path)
    users = graph.user_ids[NODE_TYPE]
    assert (graph.name, users.tolist()) == ("web", [0, 7, 30, 1_000_000])
    assert users[np.stack(graph.edges[EDGE_TYPE])].T.tolist() == [[30, 7], [7, 30], [7, 1_000_000], [0, 7]]


def test_further_columns_of_a_list_are_kept(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("% bip weighted\n1 0 0.5\n0 1 2\n")
    graph = load_dataset(tmp_path / "a.txt")
    assert (edges_of(graph), graph.user_ids) == ([[1, 0], [0, 1]], {})
    assert graph.edge_data[EDGE_TYPE]["weight"].tolist() == [0.5, 2.0]
    (tmp_path / "a.txt").write_text("1 0 3 1380000000\n0 1 -2 1380000001\n")
    assert {
        name: column.tolist()
        for name, column in load_dataset(tmp_path / "a.txt").edge_data[EDGE_TYPE].items()
    } == {
        "column2": [3, -2],
        "column3": [1380000000, 1380000001],
    }


def gzipped(text: str) -> bytes:
    return gzip.compress(text.encode(), mtime=0)


NO_LIST = "it needs a list 'nodes' of objects with an id, and a list 'links' or 'edges'"
NOT_COMPRESSED = r"not a readable .*it ends in \.gz, but is not compressed by gzip"
CUT_OFF = "not a readable .*its compressed content is damaged or incomplete"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        *((f"a.{suffix}", "", "is empty; write the graph again")
          for suffix in ("txt", "mtx", "json", "npz", "pt", "bin")),
        # Lists of edges.
        ("a.txt", "0 1\n2 -3\n", "column 'dst', row 1: node id -3 is negative"),
        ("a.txt", "0 1\n1 2 3\n",
         "not a readable list of edges, or cut off: Expected 2 fields in line 2, saw 3"),
        ("a.txt", "0 1\n1\n", "column 'dst', row 1: is empty"),
        ("a.txt", "0 1\n1 1.5\n", "column 'dst' must hold integer or string ids"),
        ("a.txt", "0 1\nx 2\n", "use both integers and strings for its ids"),
        ("a.txt", "# nothing\n\n", "not a readable list of edges.*it has no line with two ids; write"),
        ("a.txt", "7\n8\n", "the line '7' does not have two ids"),
        ("a.txt", "node_1,node_2\n0,1\n1,2\n", "the line 'node_1,node_2' is a header; begin it with #"),
        ("a.txt", b"a b\nb \xff\n", "not a readable .*the text is not UTF-8; save it as UTF-8"),
        *(("a.txt", f"{text}\n", "is not an id; write the ids of an edge with a space")
          for text in ("(0, 1)\n(1, 2)", "[0, 1]", "0 -> 1\n1 -> 2", "0; 1", '"a" "b"', "a b\nb (c)",
                       "a\t=>\tb", "{0: [1, 2]}", "{0,1}\n{1,2}", "edge(a,b).\nedge(b,c).", "a ->b",
                       "<a> <b>", "[a](0\t1)[b]", "1,000\t2,000")),
        ("a.txt.gz", gzipped(SNAP)[:-20], "not a readable list of edges, or cut off"),
        ("a.txt.gz", "0 1\n", f"{NOT_COMPRESSED}; remove the suffix"),
        ("a.mtx.gz", "1 0\n", NOT_COMPRESSED),
        ("a.txt.gz", gzipped("0 1\n")[:-6], f"{CUT_OFF}; copy it"),
        # Triples.
        *(("a.tsv", f"{text}\n", "is not an id")
          for text in ("(a\tr\tb)", "[a]\tr\tb", "a\t->\tb", "('a', 'b', 'c')", '"a"\tr\tb')),
        *(("a.txt", f"a likes b\n{second}\nc likes a\n",
           f"the line '{second}' is not head, relation and tail like 'a likes")
          for second in ("c likes", "c 1 2")),
        ("train.txt", "head\trelation\ttail\na\tb\tc\n", "is not head, relation and tail; remove a header"),
        ("train.txt", "a\tb\tc\nd\tb\tc\na\tb\t\n", "column 'tail', row 2: is empty"),
        ("train.txt", "0\t1\t2\t3\n", "is not head, relation and tail"),
        ("train.txt", "0 1\n", "is not head, relation and tail"),
        ("train2id.txt", "2\n0 1 0\n1 2 0\n", "line 2 is a count, as in OpenKE's files"),
        # NetworkX.
        ("a.graphml", "<graphml><graph>", "not a readable .graphml of NetworkX, or cut off"),
        ("a.graphml", '<!DOCTYPE g [<!ENTITY a "aa">]><graphml>&a;</graphml>', "declares entities"),
        ("a.graphml", '<!DOCTYPE g [<!ENTITY a "aa">]><g>&a;</g>'.encode("utf-16"), "declares entities"),
        ("a.gexf", "no", r"the suffix '.gexf' .*read_gexf"),
        ("a.json", '{"nodes": [{"id": 0}]}', "not a readable .json of NetworkX"),
        ("a.json", '{"nodes": [], "links": []}', "the graph has no nodes"),
        ("a.json", '{"nodes": [{"id": 1}, {"id": "1"}], "links": [{"source": 1, "target": "1"}]}', "already"),
        ("a.json", '{"nodes": [{"id": "\\ud800"}], "edges": []}', "not a readable .json"),
        ("a.json", '{"edges": [[0, 1]], "features": {}}', NO_LIST),
        ("a.json", '{"nodes": [{"id": 0}], "links": [{"from": 0, "to": 0}]}', NO_LIST),
        ("a.json", '{"nodes": [0, 1], "links": [{"source": 0, "target": 1}]}', NO_LIST),
        ("a.json", '{"elements": {"nodes": []}}', NO_LIST),
        ("a.json", "[[0, 1]]", NO_LIST),
    ],
)  # fmt: skip
def test_refuses_files_without_graph(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DatasetError, match=rf"{name}.*{message}"):
        load_dataset(tmp_path if name == "train.txt" else path)


def test_no_damaged_byte_ends_in_another_error(tmp_path: Path) -> None:
    torch.save(pyg(), tmp_path / "a.pt")
    nx.write_graphml(networkx_graph(directed=True), tmp_path / "a.graphml.gz")
    sp.save_npz(tmp_path / "a.npz", matrix().tocsr())
    for path in list(tmp_path.iterdir()):
        original, refused = path.read_bytes(), 0
        places = range(0, len(original), len(original) // 60)
        damaged = [original[:at] + bytes([original[at] ^ 255]) + original[at + 1 :] for at in places]
        for content in (original[: len(original) // 2], *damaged):
            path.write_bytes(content)
            refused += refusal(lambda path=path: load_dataset(path), DatasetError) != ""
        assert refused > 0


@pytest.mark.parametrize("stored", [np.array([0, 2**63], np.uint64), np.array([0, 1e19])])
def test_labels_beyond_int64_are_of_a_regression(tmp_path: Path, stored: Array) -> None:
    np.savez(tmp_path / "a.npz", src=np.array([0]), dst=np.array([1]), labels=stored)
    label = columns_of(load_dataset(tmp_path / "a.npz"))["label"]
    assert (label.dtype, label.tolist()) == (np.float64, stored.tolist())


def test_tensors_of_pyg_count_nodes_where_there_are_as_many_edges(tmp_path: Path) -> None:
    # Node 3 has no edge, so that the ids do not tell how many nodes there are.
    index = torch.tensor([[0, 1, 2, 0], [1, 2, 0, 2]])
    torch.save({"x": torch.ones(4, 2), "y": torch.arange(4), "edge_index": index}, tmp_path / "a.pt")
    graph = load_dataset(tmp_path / "a.pt")
    assert graph.num_nodes == {NODE_TYPE: 4}
    assert columns_of(graph).keys() == {"feat", "label"}


def test_an_older_file_of_torch_with_an_archive_behind_it_is_refused(tmp_path: Path) -> None:
    torch.save(pyg(), tmp_path / "new.pt")
    torch.save(pyg(), tmp_path / "both.pt", _use_new_zipfile_serialization=False)
    with (tmp_path / "both.pt").open("ab") as file:
        file.write((tmp_path / "new.pt").read_bytes())
    assert zipfile.is_zipfile(tmp_path / "both.pt")
    with pytest.raises(DatasetError, match=r"both\.pt is missing, not a torch\.save file"):
        load_dataset(tmp_path / "both.pt")


def test_the_opposite_edge_of_networkx_is_no_target(tmp_path: Path) -> None:
    original = nx.path_graph(3)
    original.edges[0, 1].update(train_mask=True, split="train")
    original.edges[1, 2].update(train_mask=False, split="val")
    for name in ("train_mask", "split"):
        undirected = nx.Graph()
        undirected.add_nodes_from(original)
        undirected.add_edges_from((u, v, {name: data[name]}) for u, v, data in original.edges(data=True))
        nx.write_graphml(undirected, tmp_path / f"{name}.graphml")
        graph = load_dataset(tmp_path / f"{name}.graphml")
        assert edges_of(graph) == [[0, 1, 1, 2], [1, 2, 0, 1]]
        assert graph.edge_data[EDGE_TYPE]["train_mask"].tolist() == [True, False, False, False]


@pytest.mark.parametrize("text", ["a, b\nb, NA\n", 'a, b\nb, "\n'])
def test_blanks_quotes_and_na_in_an_edge_list_are_ids(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    graph = load_dataset(tmp_path / "a.txt")
    third = text.split()[-1]
    assert sorted(graph.user_ids[NODE_TYPE]) == sorted(["a", "b", third])
    assert graph.total_edges == 2


BODY = "1 2 0.5\n2 3 1.5\n3 1 2.5\n"


@pytest.mark.parametrize("name", ["a.mtx", "a.txt", "a.edges.gz"])
@pytest.mark.parametrize(
    ("header", "body", "edges", "weights"),
    [
        ("coordinate real general", BODY, [[0, 1, 2], [1, 2, 0]], [0.5, 1.5, 2.5]),
        ("coordinate pattern general", "1 2\n2 3\n3 1\n", [[0, 1, 2], [1, 2, 0]], None),
        ("coordinate real symmetric", "2 1 0.5\n3 2 1.5\n3 3 2.5\n", None, [0.5, 0.5, 1.5, 1.5, 2.5]),
    ],
)
def test_reads_matrix_market(
    tmp_path: Path, name: str, header: str, body: str, edges: Any, weights: Any
) -> None:
    content = f"%%MatrixMarket matrix {header}\n% a comment\n3 3 3\n{body}".encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    graph = load_dataset(tmp_path / name)
    assert graph.num_nodes == {NODE_TYPE: 3}
    if edges is not None:
        assert edges_of(graph) == edges
    stored = graph.edge_data[EDGE_TYPE].get("weight")
    assert (stored is None) == (weights is None)
    assert stored is None or sorted(stored.tolist()) == weights


@pytest.mark.parametrize("text", ["3 3\n0 1\n1 2\n2 0\n", "3 3\n2 3\n1 3\n1 2\n", "3 3 2\n1 2 7\n3 1 8\n"])
def test_refuses_a_line_of_sizes_before_the_edges(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(DatasetError, match="could be a header with the numbers of nodes and edges"):
        load_dataset(tmp_path / "a.txt")
    (tmp_path / "b.txt").write_text("# " + text)
    assert load_dataset(tmp_path / "b.txt").total_edges == text.count("\n") - 1


def test_refuses_edges_to_unknown_nodes(tmp_path: Path) -> None:
    graph = nx.path_graph(4)
    for name, change in (
        ("a.json", lambda text: text.replace('"target": 3', '"target": 9')),
        ("a.graphml", lambda text: text.replace('target="3"', 'target="9"')),
    ):
        path = tmp_path / name
        if name.endswith("json"):
            path.write_text(json.dumps(nx.node_link_data(graph, edges="links")))
        else:
            nx.write_graphml(graph, path)
        assert load_dataset(path).num_nodes == {NODE_TYPE: 4}
        path.write_text(change(path.read_text()))
        with pytest.raises(DatasetError, match=r"an edge ends in '?9'?, which is not among the nodes"):
            load_dataset(path)


@pytest.mark.parametrize("comment", ["# source, target\n", "% sym\n", ""])
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_skips_a_byte_order_mark_before_a_comment(tmp_path: Path, comment: str, name: str) -> None:
    content = b"\xef\xbb\xbf" + f"{comment}0 1\n1 2\n2 0\n".encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    graph = load_dataset(tmp_path / name)
    assert (graph.num_nodes, graph.total_edges) == ({NODE_TYPE: 3}, 3)


def test_more_nodes_or_relations_than_can_be_are_refused(tmp_path: Path) -> None:
    for name, arrays, message in (
        ("count", {"src": [0], "dst": [1], "num_nodes": 2**50}, "there are 1125899906842624 nodes"),
        ("id", {"src": [0], "dst": [2**50]}, "number them from 0 without gaps"),
        ("relation", {"src": [0], "dst": [1], "etype": [2**40]}, "relation 1099511627776 is outside"),
    ):
        np.savez(tmp_path / f"{name}.npz", **{key: np.array(array) for key, array in arrays.items()})
        with pytest.raises(DatasetError, match=message):
            load_dataset(tmp_path / f"{name}.npz")


def test_memory_for_a_compressed_file_is_that_of_its_content(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"0 1\n" * 100_000))
    workspace = Workspace(folder=tmp_path, budget=Budget(work=1 << 20))
    with pytest.raises(ConfigError, match=r"a\.txt\.gz would take about 1\.6 MB of memory"):
        load_dataset(path, workspace=workspace)


def triples_of(graph: RawGraph, mask: str) -> set[tuple[str, str, str]]:
    users = graph.user_ids[NODE_TYPE]
    return {
        (users[u], name, users[v])
        for (_, name, _), (sources, ends) in graph.edges.items()
        for u, v, chosen in zip(
            sources, ends, graph.edge_data["_N", name, "_N"].get(mask, np.zeros(len(ends))), strict=True
        )
        if chosen
    }


def test_a_folder_of_triples_is_a_knowledge_graph_with_its_split(tmp_path: Path) -> None:
    # Ids of WN18RR are digits with zeros before them; a name may have blanks, commas and a #.
    (tmp_path / "train.txt").write_text("007\t_hyper \t12\n12\t_also see\tA #1, b\n", "utf-8")
    (tmp_path / "valid.txt").write_text("A #1, b\t_hyper\tnew\n")
    (tmp_path / "test.txt").write_text("12\t_hyper\t007\n")
    graph = load_dataset(tmp_path)
    assert graph.name == tmp_path.name
    assert graph.user_ids[NODE_TYPE].tolist() == ["007", "12", "A #1, b", "new"]
    assert triples_of(graph, "train_mask") == {("007", "_hyper", "12"), ("12", "_also see", "A #1, b")}
    assert triples_of(graph, "val_mask") == {("A #1, b", "_hyper", "new")}
    assert triples_of(graph, "test_mask") == {("12", "_hyper", "007")}


def test_relations_keep_their_names(tmp_path: Path) -> None:
    names = [
        "/a.b/c:d",
        "/p/place of birth",
        "<http://a.org/x#y>",
        "foo-rev",
        "geboren in",
        "geboren_in",
        "größe",
    ]
    text = "".join(f"u\t{name}\tv\n" for name in names)
    (tmp_path / "kg.txt").write_text(text, "utf-8")
    assert [relation for _, relation, _ in load_dataset(tmp_path / "kg.txt").edges] == names


@pytest.mark.parametrize("between", ["\t", " ", ","])
def test_triples_of_a_folder_may_be_numbers(tmp_path: Path, between: str) -> None:
    (tmp_path / "train.txt").write_text("0 5 03\n03 is 1.5\n".replace(" ", between))
    (tmp_path / "test.txt").write_text("a likes 0\n".replace(" ", between))
    graph = load_dataset(tmp_path)
    assert graph.user_ids[NODE_TYPE].tolist() == ["0", "03", "1.5", "a"]
    assert triples_of(graph, "train_mask") == {("0", "5", "03"), ("03", "is", "1.5")}
    assert triples_of(graph, "test_mask") == {("a", "likes", "0")}


@pytest.mark.parametrize("between", ["\t", " ", ","])
def test_triples_of_one_file_have_no_split(tmp_path: Path, between: str) -> None:
    (tmp_path / "kg.tsv").write_text(
        "# of the web\na likes b#1\nb#1 likes NA\na knows b#1\n".replace(" ", between)
    )
    graph = load_dataset(tmp_path / "kg.tsv")
    assert (graph.name, graph.user_ids[NODE_TYPE].tolist()) == ("kg", ["NA", "a", "b#1"])
    assert list(graph.edges) == [("_N", "knows", "_N"), ("_N", "likes", "_N")]
    assert not any(graph.edge_data.values())


def test_two_files_of_one_split_are_refused(tmp_path: Path) -> None:
    # Their triples would count twice.
    for name in ("train.txt", "val.tsv", "valid.txt"):
        (tmp_path / name).write_text("a likes b\n")
    with pytest.raises(DatasetError, match=r"val\.tsv and valid\.txt are the same split; remove one"):
        load_dataset(tmp_path)


@pytest.mark.parametrize("third", ["0.5", "1e-5", "2020-01-01", "2020-01-01T10:00:00Z"])
def test_numbers_and_dates_after_two_ids_are_no_tails(tmp_path: Path, third: str) -> None:
    (tmp_path / "a.txt").write_text(f"x y {third}\ny z {third}\n")
    if third[:4] == "2020":
        with pytest.raises(DatasetError, match="column 'weight' holds"):
            load_dataset(tmp_path / "a.txt")
    else:
        assert edges_of(load_dataset(tmp_path / "a.txt")) == [[0, 1], [1, 2]]


@pytest.mark.parametrize("dtype", [np.str_, object])
def test_texts_as_ids_of_arrays_are_for_tables(tmp_path: Path, dtype: type) -> None:
    np.savez(tmp_path / "a.npz", src=np.array(["x"], dtype), dst=np.array(["y"], dtype), num_nodes=2)
    with pytest.raises(DatasetError, match=r"texts as ids are for tables|text ids are for tables"):
        load_dataset(tmp_path / "a.npz")


TRIPLES = "0 1 2\n1 1 0\n2 0 1\n"
"""Lines of whole numbers that may be triples, weighted edges or ratings."""


@pytest.mark.parametrize("between", [" ", "\t", ",", "::"])
def test_refuses_three_whole_numbers_unless_the_format_is_given(tmp_path: Path, between: str) -> None:
    path = tmp_path / "a.txt"
    path.write_text(TRIPLES.replace(" ", between))
    with pytest.raises(DatasetError, match=r"a\.txt: .* '0.{1,2}1.{1,2}2'.*--format (edges|interactions)"):
        load_dataset(path)
    graph = load_dataset(path, format="edges")
    assert edges_of(graph) == [[0, 1, 2], [1, 1, 0]]
    assert graph.edge_data[EDGE_TYPE]["weight"].tolist() == [2, 0, 1]
    graph = load_dataset(path, format="interactions")
    assert graph.num_nodes == {"item": 2, "user": 3}
    assert edges_of(graph, ("user", "interacts", "item")) == [[0, 1, 2], [1, 1, 0]]
    assert graph.edge_data["user", "interacts", "item"]["weight"].tolist() == [2, 0, 1]
    graph = load_dataset(path, format="triples")
    assert graph.num_nodes == {NODE_TYPE: 3}
    assert edges_of(graph, ("_N", "1", "_N")) == [[0, 1], [2, 0]]
    assert edges_of(graph, ("_N", "0", "_N")) == [[2], [1]]
    with pytest.raises(ConfigError, match=r"format is 'triple'; it is one of triples, edges, interactions"):
        load_dataset(path, format="triple")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("0 1 0.5\n1 2 2\n", "weight"),
        ("0 1 1\n1 2 1\n", "weight"),
        ("0 1 1380000000\n1 2 1380000001\n", "weight"),
        ("u1 i1 5\nu2 i1 3\n", "weight"),
        ("196 242 3 881250949\n186 302 4 891717742\n", "column2"),
    ],
)
def test_says_how_columns_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, name: str
) -> None:
    (tmp_path / "a.txt").write_text(text)
    assert name in load_dataset(tmp_path / "a.txt").edge_data[EDGE_TYPE]
    assert len(caplog.records) == 1
    assert (
        f"columns 1 and 2 are read as the ends of edges, and further columns as {name[:2]}"
        in caplog.text.replace("as a we", "as we")
    )
    assert "give --format triples or interactions" in caplog.text
    caplog.clear()
    load_dataset(tmp_path / "a.txt", format="edges")
    (tmp_path / "a.txt").write_text("0 1\n1 2\n")
    load_dataset(tmp_path / "a.txt")
    assert not caplog.records


def test_reads_ids_as_numpy_and_pandas_write_them(tmp_path: Path) -> None:
    np.savetxt(tmp_path / "a.txt", [[10, 1], [1, 2]])
    graph = load_dataset(tmp_path / "a.txt")
    assert (graph.user_ids[NODE_TYPE].tolist(), edges_of(graph)) == ([1, 2, 10], [[2, 0], [0, 1]])
    np.savetxt(tmp_path / "a.txt", [[0, 1, 2], [1, 1, 0]])
    with pytest.raises(DatasetError, match="three whole numbers"):
        load_dataset(tmp_path / "a.txt")
    (tmp_path / "a.txt").write_text("0.0 9007199254740992.0\n")
    with pytest.raises(DatasetError, match="'dst' must hold integer or string ids; it holds double"):
        load_dataset(tmp_path / "a.txt")


@pytest.mark.parametrize("relation", ["[red]x[/red]", "(a)", '"likes"', "works at:", "'s"])
def test_reads_relations_of_any_signs(tmp_path: Path, relation: str) -> None:
    (tmp_path / "a.tsv").write_text(f"Paris (France)\t{relation}\t(R)-carvone\nb\tr\t[18F]FDG\n")
    graph = load_dataset(tmp_path / "a.tsv")
    assert {etype[1] for etype in graph.edges} == {relation, "r"}
    assert graph.user_ids[NODE_TYPE].tolist() == ["(R)-carvone", "Paris (France)", "[18F]FDG", "b"]


def test_names_the_format_of_two_columns_that_are_no_triples(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("0 1\n1 2\n")
    with pytest.raises(DatasetError, match=r"the line '0 1' is not .* --format edges if it is an edge"):
        load_dataset(tmp_path / "a.txt", format="triples")


@pytest.mark.parametrize("lines", ["triples", "edges", "interactions"])
def test_refuses_a_format_of_lines_for_what_is_in_its_own_format(tmp_path: Path, lines: str) -> None:
    matrix = "%%MatrixMarket matrix coordinate pattern general\n2 2 1\n1 2\n"
    for name in ("a.mtx", "a.txt"):
        path = tmp_path / name
        path.write_text(matrix)
        with pytest.raises(ConfigError, match=rf"{name} defines its own format; leave out --format {lines}"):
            load_dataset(path, format=lines)
    nx.write_graphml(networkx_graph(directed=True), tmp_path / "a.graphml")
    with pytest.raises(
        ConfigError, match=r"'networkx' has no option 'format' \(its options: none: leave it out\)"
    ):
        load_dataset(tmp_path / "a.graphml", format=lines)


def test_refuses_the_format_edges_for_a_folder_of_splits(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"has no train\.txt, valid\.txt or test\.txt"):
        load_dataset(f"edge_list:{tmp_path}")
    (tmp_path / "train.txt").write_text("a r b\n")
    with pytest.raises(ConfigError, match="holds triples or interactions; give --format"):
        load_dataset(tmp_path, format="edges")


def test_reads_ncol_and_names_the_way_to_read_pajek(tmp_path: Path) -> None:
    (tmp_path / "a.ncol").write_text("ann bob 2.5\nbob cid 1\n")
    graph = load_dataset(tmp_path / "a.ncol")
    assert graph.user_ids[NODE_TYPE].tolist() == ["ann", "bob", "cid"]
    assert graph.edge_data[EDGE_TYPE]["weight"].tolist() == [2.5, 1]
    (tmp_path / "a.net").write_text('*Vertices 1\n1 "a"\n')
    with pytest.raises(DatasetError, match=r"networkx\.write_graphml\(networkx\.read_pajek"):
        load_dataset(tmp_path / "a.net")


@pytest.mark.parametrize(
    ("content", "ids", "edges"),
    [
        ({"nodes": [{"id": "b", "group": 1}, {"id": "a", "group": 2}],
          "links": [{"source": "a", "target": "b", "value": 3}]}, ["b", "a"], [[0, 1], [1, 0]]),
        ({"nodes": [{"name": "x"}, {"name": "y"}], "links": [{"source": 0, "target": 1}]},
         None, [[0, 1], [1, 0]]),
        ({"directed": True, "nodes": [{"id": 0}, {"id": 1}], "edges": [{"source": 1, "target": 0}]},
         None, [[1], [0]]),
    ],
)  # fmt: skip
def test_reads_nodes_and_links_of_other_tools(tmp_path: Path, content: Any, ids: Any, edges: Any) -> None:
    (tmp_path / "a.json").write_text(json.dumps(content))
    graph = load_dataset(tmp_path / "a.json")
    assert edges_of(graph) == edges
    assert graph.num_nodes == {NODE_TYPE: 2}
    assert ids is None or graph.user_ids[NODE_TYPE].tolist() == ids
