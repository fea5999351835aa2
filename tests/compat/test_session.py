"""``initialize`` and the names about processes, in one process."""

import copy
import gc
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import dgl
import dgl.nn
import numpy as np
import pytest
import torch
from dgl.data.utils import save_tensors

import dglx_dist as dx
from dglx_dist.api import init
from dglx_dist.comm.session import current_session, get_open_session, start_later
from dglx_dist.compat import namespace as session
from dglx_dist.compat.dataloading import DistDataLoader, DistEdgeDataLoader, DistNodeDataLoader
from dglx_dist.compat.dist_graph import DistGraph
from dglx_dist.compat.dist_tensor import DistEmbedding, DistTensor, find_attached_rows
from dglx_dist.compat.partition import edge_split, load_partition_book, node_split, partition_graph
from dglx_dist.compat.partition_book import RangePartitionBook
from dglx_dist.errors import ConfigError, UnknownNameError

LOOP = ("a", "to", "a")


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    yield
    session.exit_client()


@pytest.fixture
def g(stock_parts: Mapping[str, Path]) -> DistGraph:
    session.initialize()
    return DistGraph("two", part_config=stock_parts["two"])


def test_nothing_is_opened_before_it_is_needed() -> None:
    session.initialize(strategy="dp", seed=3)
    assert get_open_session() is None
    assert not torch.distributed.is_initialized()
    assert (session.get_rank(), session.get_num_client(), session.get_num_machines()) == (0, 1, 1)
    assert (current_session().strategy, current_session().seed) == ("data_parallel", 3)
    with pytest.raises(ConfigError, match="exit_client"):
        session.initialize()
    session.exit_client()
    session.initialize(strategy="push_pull")
    with pytest.raises(ConfigError, match=r"is already open \(dgl.distributed.initialize\(\) requested it\)"):
        init()
    session.exit_client()
    session.exit_client()
    with pytest.raises(ConfigError, match="no session is open"):
        current_session()


def test_what_is_not_used_is_said_once() -> None:
    message = (
        "ip_config='hosts', max_queue_size=10, net_type='tensorpipe', num_worker_threads=3, num_servers=2"
    )
    with pytest.warns(UserWarning, match=message) as output:
        session.initialize("hosts", 10, "tensorpipe", 3, num_servers=2)
    assert len(output) == 1
    start_later(None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session.initialize(net_type="socket")


def test_dgls_launcher_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DGL_ROLE", "client")
    monkeypatch.setenv("DGL_NUM_SAMPLER", "4")
    with pytest.warns(UserWarning, match="DGL_ROLE='client', DGL_NUM_SAMPLER='4': not used") as message:
        session.initialize()
    assert len(message) == 1
    start_later(None)
    monkeypatch.setenv("DGL_ROLE", "server")
    with pytest.raises(ConfigError, match="Start the script with torchrun"):
        session.initialize()


def test_what_cannot_be_honoured_is_refused() -> None:
    with pytest.warns(UserWarning, match="use_graphbolt=True: not used"):
        session.initialize(use_graphbolt=True)
    with pytest.raises(UnknownNameError, match="push_pull"):
        session.initialize(strategy="push_pul")
    with pytest.raises(ConfigError, match="run `dglx plan` to find a strategy"):
        session.initialize(strategy="auto")
    session.initialize(depth=2)
    with pytest.raises(ConfigError, match="no option 'depth'"):
        current_session()


def test_a_graph_is_opened_by_its_own_name(stock_parts: Mapping[str, Path]) -> None:
    session.initialize()
    with pytest.warns(UserWarning, match="holds the graph 'two', not 'other'; it is opened"):
        assert DistGraph("other", part_config=stock_parts["two"]).num_nodes() == 60
    with pytest.raises(ConfigError, match="part_config"):
        DistGraph("two")
    with pytest.warns(UserWarning, match="gpb is not used"):
        DistGraph("two", gpb=object(), part_config=stock_parts["two"].with_suffix(".dglx"))


def test_ids_in_the_place_of_a_mask_are_all_rows(g: DistGraph) -> None:
    with pytest.warns(UserWarning, match="DGL would leave out row 0"):
        assert len(node_split(np.arange(60))) == 60
    counts = torch.arange(60) % 3
    assert node_split(counts).tolist() == [row for row in range(60) if row % 3]
    assert len(edge_split(np.ones(g.num_edges()), g.get_partition_book())) == g.num_edges()
    with pytest.raises(ConfigError, match="2 values for 60 rows"):
        node_split([3, 4])


def test_of_two_graphs_the_one_whose_book_is_given(g: DistGraph, stock_parts: Mapping[str, Path]) -> None:
    book, mask, policy = g.get_partition_book(), g.ndata["train_mask"], g.get_node_partition_policy("_N")
    own = DistTensor((60,), torch.int64, "mine")
    typed = DistGraph("typed", part_config=stock_parts["typed"])
    last = typed.get_partition_book()
    every = np.ones(60, dtype=bool)
    for inputs in (book, load_partition_book(stock_parts["two"], 1)[0]):
        assert len(node_split(every, inputs)) == 60
        assert len(edge_split(np.ones(g.num_edges(), dtype=bool), inputs)) == g.num_edges()
        assert len(node_split(mask, inputs)) == len(node_split(mask)) == 36
    assert len(node_split(np.ones(24, dtype=bool), last, "paper")) == 24
    with pytest.raises(ConfigError, match=r"several graphs are open \('two', 'typed'\)"):
        node_split(every)
    with pytest.raises(ConfigError, match="'node~_N~train_mask' belongs to the graph 'two', the book to an"):
        node_split(mask, last)
    with pytest.raises(ConfigError, match="the partition book belongs to none of the open graphs"):
        node_split(every, RangePartitionBook(0, 1, {"a": [[0, 60]]}, {LOOP: [[0, 9]]}, {"a": 0}, {LOOP: 0}))
    with pytest.raises(ConfigError, match="partition_book is a str"):
        node_split(every, "two")  # type: ignore[arg-type]  # what is wrong
    # Tensors too go with the graph of their policy, and names of one are not those of the other.
    tensor = DistTensor((60,), torch.float32, "other", part_policy=policy)
    papers = typed.get_node_partition_policy("paper")
    reference = DistTensor((24,), torch.int64, "mine", part_policy=papers, persistent=True)
    assert {"mine", "other"} <= set(g.ndata)
    assert "other" not in typed.nodes["paper"].data
    assert g._client.pull(tensor.kvstore_key, [3]).tolist() == [0]
    assert g._client.all_possible_part_policy.keys() == {"node~_N", "edge~_N:_E:_N"}
    del own, reference
    DistTensor((60,), torch.int64, "next", part_policy=policy)
    assert ("mine" in g.ndata, "mine" in typed.nodes["paper"].data) == (False, True)


def test_rows_of_a_batch_are_those_on_its_blocks_and_not_those_of_another_graph(
    g: DistGraph, stock_parts: Mapping[str, Path]
) -> None:
    graph = DistGraph("one", part_config=stock_parts["one"])
    sampler = dgl.dataloading.NeighborSampler([2], prefetch_node_feats=["features"])
    (batch,) = DistNodeDataLoader(g, torch.arange(60), sampler, batch_size=60)
    nodes, blocks = batch[0], [block.int() for block in batch[-1]]
    drawn, features = blocks[0].srcdata["features"], g.ndata["features"]
    del batch
    assert features[nodes].data_ptr() == drawn.data_ptr() != features[nodes.clone()].data_ptr()
    assert torch.equal(features[nodes.clone()], drawn)
    assert find_attached_rows(g.ndata["labels"].inner, nodes) is None
    assert torch.equal(graph.ndata["features"][nodes], graph.ndata["features"][nodes.clone()])
    assert not torch.equal(graph.ndata["features"][nodes], drawn)
    # They are not kept for that.
    del blocks, drawn
    assert find_attached_rows(features.inner, nodes) is None


def test_the_only_type_may_have_any_name(tmp_path: Path) -> None:
    ring = torch.arange(5), (torch.arange(5) + 1) % 5
    partition_graph(dgl.heterograph({("user", "follows", "user"): ring}), "ring", 1, tmp_path)
    session.initialize()
    g = DistGraph("ring", part_config=tmp_path / "ring.json")
    assert (g.num_nodes(), g.num_nodes("_N"), g.num_edges("_E"), g.ntypes) == (5, 5, 5, ["user"])
    assert node_split(torch.ones(5), g.get_partition_book()).tolist() == [0, 1, 2, 3, 4]
    assert edge_split(torch.tensor([0, 1, 0, 0, 1])).tolist() == [1, 4]
    # A column that is written into the files of a part after they were read.
    file = tmp_path / "part0" / "node_feat.dgl"
    save_tensors(str(file), {"user/age": torch.arange(5)})
    os.utime(file, (time.time() + 1, time.time() + 1))
    assert "age" not in g.ndata
    session.exit_client()
    session.initialize()
    assert DistGraph("ring", part_config=tmp_path / "ring.json").ndata["age"][[3]].tolist() == [3]


def test_tensors_are_freed_once_nobody_refers_to_them(g: DistGraph) -> None:
    kept = DistTensor((60,), torch.float32, "kept", persistent=True)
    first, second = DistTensor((60,), torch.float32, "first"), DistTensor((60,), torch.float32)
    again = g.ndata["first"]
    del first, kept
    DistTensor((60,), torch.float32, "third")
    assert {"kept", "first"} <= set(g.ndata)
    del again, second
    DistTensor((60,), torch.int64, "fourth")
    assert {name for name in g.ndata if name in ("kept", "first", "third", "fourth")} == {"kept", "fourth"}
    assert not [name for name in g.ndata if name.startswith("unnamed-0")]


@pytest.mark.wide
def test_the_name_of_a_deleted_tensor_is_free(g: DistGraph) -> None:
    tensor = DistTensor((60,), torch.float32, "t", lambda shape, dtype: torch.ones(shape, dtype=dtype))
    key = tensor.kvstore_key
    with pytest.raises(ConfigError, match=r"'t' is float32 .* or delete it on the ranks \[0\]"):
        DistTensor((60, 3), torch.int64, "t")
    assert DistTensor((60,), torch.float32, "t")[[5]].item() == 1
    cycle = [tensor]
    cycle.append(cycle)  # type: ignore[arg-type]  # what only the garbage collector frees
    del tensor, cycle
    gc.collect()
    assert key not in g._client.data_name_list()
    # DGL gives new rows of zeros too, not those of the deleted one.
    assert DistTensor((60,), torch.float32, "t")[[5]].item() == 0
    again = DistTensor((60, 3), torch.int64, "t")
    assert (again.shape, key in g._client.gdata_name_list()) == ((60, 3), True)
    kept = DistTensor((60,), torch.float32, "kept", persistent=True)
    del kept
    with pytest.raises(ConfigError, match="the tensor 'kept' is float32"):
        DistTensor((60, 3), torch.float32, "kept")


def test_a_saved_tensor_is_the_tensor_of_its_rows(g: DistGraph, tmp_path: Path) -> None:
    labels = g.ndata["labels"]
    torch.save({"labels": labels}, tmp_path / "labels.pt")
    loaded = torch.load(tmp_path / "labels.pt", weights_only=True)["labels"]
    assert (loaded == labels[torch.arange(60)]).all()
    assert copy.copy(labels) is copy.deepcopy(labels) is labels


def test_loaders_say_what_they_do_not_do(g: DistGraph) -> None:
    sampler = dgl.dataloading.NeighborSampler([2])
    with pytest.warns(UserWarning, match="num_workers=2 has no effect"):
        loader = DistNodeDataLoader(g, torch.arange(7), sampler, batch_size=3, num_workers=2, queue_size=2)
    assert (len(loader), loader.expected_idxs) == (3, 3)
    assert [len(next(loader)[1]) for _ in range(3)] == [3, 3, 1]
    with pytest.raises(StopIteration):
        next(loader)
    for batches in (loader, DistDataLoader(torch.arange(7), 3)):
        for _ in batches:
            assert g.session.step_share is not None
            break
        assert g.session.step_share is None
    with pytest.raises(ConfigError, match="no option 'batch_sise'"):
        DistNodeDataLoader(g, torch.arange(7), sampler, batch_sise=3)
    with pytest.warns(UserWarning, match="its own reverse"):
        DistEdgeDataLoader(
            g,
            torch.arange(7),
            sampler,
            batch_size=3,
            exclude="reverse_id",
            reverse_eids=torch.arange(g.num_edges()),
        )
    request = []

    def negative(graph: object, edges: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        request.append(graph)
        return graph.find_edges(edges)  # type: ignore[attr-defined]

    for batch in DistEdgeDataLoader(g, torch.arange(4), sampler, batch_size=4, negative_sampler=negative):
        assert batch[2].num_edges() == 4
    assert request == [g]


def test_a_plain_loader_makes_batches_ahead_and_says_how_many_there_are(g: DistGraph) -> None:
    pairs = [("a", torch.tensor(number)) for number in range(5)]
    loader = DistDataLoader(pairs, 2, drop_last=True, queue_size=3)
    assert list(loader) == [[("a", 0), ("a", 1)], [("a", 2), ("a", 3)]]
    assert (len(loader), loader.expected_idxs, g.session.step_share) == (2, 2, None)


def test_strategies_inside_the_model_ask_for_wrap(stock_parts: Mapping[str, Path]) -> None:
    session.initialize(strategy="full_graph")
    g = DistGraph("two", part_config=stock_parts["two"])
    sampler = dgl.dataloading.NeighborSampler([-1])
    loader = DistNodeDataLoader(g, torch.arange(60), sampler, batch_size=100)
    with pytest.raises(ConfigError, match=r"model = dglx_dist.wrap\(model, g\)"):
        next(iter(loader))
    with torch.no_grad():
        assert (
            sum(len(batch[1]) for batch in DistNodeDataLoader(g, torch.arange(60), sampler, batch_size=7))
            == 60
        )


def test_edges_of_one_part_have_the_scripts_ids_wherever_they_come_or_go(tmp_path: Path) -> None:
    # A ring in both directions: edge i and i + 8 are reverse; sorted by destination they are others.
    ends = torch.tensor([3, 0, 6, 5, 1, 7, 2, 4])
    graph = dgl.add_reverse_edges(dgl.graph((ends, (ends + 1) % 8)))
    reverse = torch.arange(16).roll(8)
    partition_graph(graph, "ring", 1, tmp_path)
    session.initialize()
    g = DistGraph("ring", part_config=tmp_path / "ring.json")
    request = []

    def exclude_reverse(edges: torch.Tensor) -> torch.Tensor:
        request.append(edges.tolist())
        return torch.cat([edges, reverse[edges]])

    def are_right(drawn: dgl.DGLGraph) -> bool:
        nodes = drawn.srcdata[dgl.NID], drawn.dstdata[dgl.NID]
        own = [of[at] for of, at in zip(nodes, drawn.edges(), strict=True)]
        return torch.equal(torch.stack(own), torch.stack(graph.find_edges(drawn.edata[dgl.EID])))

    sampler = dgl.dataloading.MultiLayerFullNeighborSampler(2)
    result = dx.reverse_edge_ids(g.inner)
    for how in ({"reverse_eids": reverse}, {"reverse_eids": result}, {"exclude": exclude_reverse}):
        options = {"batch_size": 2, "exclude": "reverse_id", **how}
        for _ in range(2):
            ((_, pairs, blocks),) = DistEdgeDataLoader(g, torch.tensor([3, 12]), sampler, **options)
            assert pairs.edata[dgl.EID].tolist() == [3, 12]
            for block in blocks:
                assert are_right(block)
                assert {3, 11, 12, 4}.isdisjoint(block.edata[dgl.EID].tolist())
    assert request == [[3, 12], [3, 12]]
    some = g.sample_neighbors([0, 5], -1, exclude_edges=[3])
    assert sorted(some.edata[dgl.EID].tolist()) == sorted({*graph.in_edges([0, 5], "eid").tolist()} - {3})
    rows = DistEmbedding(16, 1, "rows", part_policy=g.get_edge_partition_policy("_E"))
    rows.weight[[3]] = torch.tensor([[5.0]])
    assert rows(torch.tensor([2, 3]))[:, 0].tolist() == [0, 5]
    # Values beside the graph, with and without the policy of edges.
    for policy in (None, g.get_edge_partition_policy("_E")):
        made = DistTensor((16,), torch.int64, init_func=lambda *_: torch.arange(16), part_policy=policy)
        assert made[torch.tensor([3, 12])].tolist() == [3, 12]
        assert torch.equal(made.to_local(), torch.arange(16))
    assert torch.equal(g.orig_edge_ids(torch.arange(16)), torch.arange(16))
    session.exit_client()
    session.initialize(strategy="full_graph")
    g = DistGraph("ring", part_config=tmp_path / "ring.json")
    loader = DistNodeDataLoader(g, torch.arange(8), dgl.dataloading.NeighborSampler([-1]))
    dx.wrap(dgl.nn.SAGEConv(2, 2, "mean"), g)
    for _ in range(2):
        for _, _, (block,) in loader:
            assert are_right(block)
