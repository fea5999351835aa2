"""DGL's DistGraph, its store, policies and optimizers in one process, typed graphs too."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import dgl
import pytest
import torch

from dglx_dist.compat import dataloading as sampling
from dglx_dist.compat import namespace as session
from dglx_dist.compat.dataloading import DistEdgeDataLoader, DistNodeDataLoader
from dglx_dist.compat.dist_graph import DistGraph, find_edges
from dglx_dist.compat.dist_tensor import DistEmbedding, DistTensor, KVClient, SparseAdagrad, SparseAdam
from dglx_dist.compat.namespace import SUPPORTED_SUBMODULES
from dglx_dist.compat.partition_book import EdgePartitionPolicy, NodePartitionPolicy, PartitionPolicy
from dglx_dist.errors import ConfigError


@pytest.fixture(scope="module")
def g(stock_parts: Mapping[str, Path]) -> Iterator[DistGraph]:
    session.initialize()
    yield DistGraph("typed_two", part_config=stock_parts["typed_two"])
    session.exit_client()


def test_tensors_by_name(g: DistGraph) -> None:
    client, policy = g._client, g.get_node_partition_policy("author")
    name = policy.get_data_name("mine")
    client.init_data(
        name, (15, 2), torch.float32, policy, lambda shape, dtype: torch.ones(shape, dtype=dtype)
    )
    client.push(name, torch.tensor([3, 1]), torch.tensor([[5.0, 6], [7, 8]]))
    client.barrier()
    assert client.pull(name, torch.tensor([1, 2, 3])).tolist() == [[7, 8], [1, 1], [5, 6]]
    assert client.get_data_meta(name)[:2] == (torch.float32, (15, 2))
    assert client.data_store[name][3].tolist() == [5, 6]
    assert client.get_partid(name, torch.tensor([1, 14])).tolist() == [0, 0]
    assert (client.num_servers, client.client_id, client.machine_id, client.role) == (1, 0, 0, "default")
    with pytest.raises(ConfigError, match="there is already a tensor 'mine'"):
        client.init_data(name, (15, 2), torch.float32, policy)
    with pytest.raises(ConfigError, match="must be 'node~author~<tensor>'"):
        client.init_data("mine", (15, 2), torch.float32, policy)
    hidden = policy.get_data_name("hidden")
    client.init_data(hidden, (15,), torch.int64, policy, is_gdata=False)
    client.push(hidden, [2], torch.tensor([9]))
    assert (client.pull(hidden, [2]).tolist(), client.count_nonzero(hidden)) == ([9], 1)
    assert hidden in client.data_name_list()
    assert hidden not in client.gdata_name_list()
    assert hidden in client.data_store
    assert "hidden" not in g.nodes["author"].data
    client.delete_data(hidden)
    client.delete_data(name)
    assert name not in client.data_name_list()
    with pytest.raises(ConfigError, match=r"g\._client"):
        KVClient("hosts", 1, "default")
    with pytest.raises(ConfigError, match="Leave map_shared_data"):
        client.map_shared_data(None)


def test_handlers_and_unions(g: DistGraph) -> None:
    masks = [DistTensor((24,), torch.bool, f"mask {number}") for number in range(3)]
    masks[0][torch.tensor([1, 2])] = torch.tensor([True, True])
    masks[1][torch.tensor([2, 9])] = torch.tensor([True, True])
    client, names = g._client, [mask.name for mask in masks]
    client.union(*names)
    assert masks[2].local_partition.nonzero()[:, 0].tolist() == [1, 2, 9]
    assert client.count_nonzero(names[2]) == 3
    sums = DistTensor((24,), torch.float32, "sums")

    def add(store: Mapping[str, torch.Tensor], name: str, ids: torch.Tensor, rows: torch.Tensor) -> None:
        store[name].index_add_(0, ids, rows)

    client.register_push_handler(sums.name, add)
    client.register_pull_handler(sums.name, lambda store, name, ids: store[name][ids] * 10)
    sums[torch.tensor([4, 4])] = torch.tensor([1.0, 2.0])
    assert sums[torch.tensor([4, 5])].tolist() == [30, 0]


def test_functions_of_submodules_ask_this_run(g: DistGraph) -> None:
    result = SUPPORTED_SUBMODULES["kvstore"]["get_kvstore"]()
    assert result.data_name_list() == g._client.data_name_list()
    assert SUPPORTED_SUBMODULES["dist_context"]["is_initialized"]()


def test_policies(g: DistGraph) -> None:
    book = g.get_partition_book()
    node, edge = NodePartitionPolicy(book, "paper"), EdgePartitionPolicy(book, ("paper", "cites", "paper"))
    assert (node.policy_str, edge.policy_str) == ("node~paper", "edge~paper:cites:paper")
    assert PartitionPolicy("edge~cites", book).type_name == ("paper", "cites", "paper")
    assert (node.get_size(), edge.get_size(), edge.get_part_size(), edge.is_node) == (24, 48, 48, False)
    tensor = DistTensor((48,), torch.int64, "of edges", part_policy=edge)
    assert tensor.part_policy.policy_str == edge.policy_str
    for wrong, reason in (
        ("row~paper", "must begin with"),
        ("node~nobody", "nobody"),
        ("edge~nothing", "nothing"),
        ("edge~paper:a:b:paper", "paper:a:b:paper"),
    ):
        with pytest.raises(ConfigError, match=reason):
            PartitionPolicy(wrong, book)
    with pytest.raises(ConfigError, match="get_node_partition_policy"):
        DistTensor((24,), torch.int64, part_policy="paper")  # type: ignore[arg-type]  # what is wrong


def test_the_local_partition_has_the_types_and_ids_of_the_book(g: DistGraph) -> None:
    local, book = g.local_partition, g.get_partition_book()
    kinds, typed = book.map_to_per_etype(local.edata[dgl.EID])
    assert (kinds == local.edata[dgl.ETYPE]).all()
    assert sorted(local.ndata[dgl.NID].tolist()) == list(range(39))
    source, destination = (local.ndata[dgl.NID][ends] for ends in local.edges())
    for edge, ends in zip(find_edges(g, local.edata[dgl.EID]), (source, destination), strict=True):
        assert (edge == ends).all()
    for number, etype in enumerate(book.canonical_etypes):
        edge = g.find_edges(typed[kinds == number], etype)
        assert (book.map_to_homo_nid(edge[0], etype[0]) == source[kinds == number]).all()
        assert (book.map_to_homo_nid(edge[1], etype[2]) == destination[kinds == number]).all()


@pytest.mark.parametrize("kind", [SparseAdagrad, SparseAdam])
def test_state_of_optimizers_goes_out_and_in(g: DistGraph, tmp_path: Path, kind: Any) -> None:
    policy = g.get_node_partition_policy("author")
    embedding = DistEmbedding(15, 2, f"rows {kind.__name__}", part_policy=policy)
    optimizer = kind([embedding], lr=0.5)

    def step() -> torch.Tensor:
        embedding(torch.tensor([2, 5])).pow(2).sum().add(embedding(torch.tensor([5])).sum()).backward()
        optimizer.step()
        return embedding.weight[torch.arange(15)]

    first = step()
    optimizer.save(tmp_path / "state")
    record = optimizer.local_state_dict()
    second = step()
    optimizer.load(tmp_path / "state")
    assert (embedding.weight[torch.arange(15)] == first).all()
    assert (step() == second).all()
    optimizer.load_local_state_dict(record)
    assert len(embedding.optm_state) == (1 if kind is SparseAdagrad else 2)
    assert record["emb_states"][embedding.name]["ids"].tolist() == list(range(15))
    # A script reads the state by DGL's name of it.
    name = "sum" if kind is SparseAdagrad else "power"
    state = DistTensor((15, 2), torch.float32, f"{embedding.name}_{name}", part_policy=policy)
    assert torch.equal(state[torch.arange(15)], embedding.optm_state[-1][torch.arange(15)])
    assert (state[[5]] > 0).all()
    assert state.name in g._client.data_name_list()
    embedding(torch.tensor([2])).sum().backward()
    embedding.reset_trace()
    optimizer.step()
    assert (embedding.weight[torch.arange(15)] == second).all()


WRITES, WRITTEN_BY = ("author", "writes", "paper"), ("paper", "written_by", "author")


def test_types_of_which_nothing_is_drawn_are_left_out(g: DistGraph) -> None:
    papers = {"paper": torch.arange(5)}
    for drawn in (sampling.sample_neighbors(g, papers, 2), sampling.in_subgraph(g, papers)):
        assert (set(drawn.etypes), drawn.ntypes) == ({"cites", "writes"}, ["author", "paper"])
        assert (g.find_edges(drawn.edges["writes"].data[dgl.EID], "writes")[1] < 5).all()
    nothing = g.sample_neighbors(papers, 0)
    assert (nothing.num_edges(), len(nothing.etypes)) == (0, 3)
    sampler = dgl.dataloading.NeighborSampler([2, 2], prefetch_labels={"paper": ["labels"]})
    (batch,) = DistNodeDataLoader(g, papers, sampler, batch_size=5)
    last = batch[-1][-1]
    assert (last.is_block, set(last.etypes), last.num_dst_nodes("author")) == (True, {"cites", "writes"}, 0)
    assert last.step_share.num_global == 5
    assert (last.dstnodes["paper"].data["labels"] == g.nodes["paper"].data["labels"][papers["paper"]]).all()
    assert (last.srcnodes["author"].data[dgl.NID] == batch[-1][0].dstnodes["author"].data[dgl.NID]).all()
    edges = g.find_edges(last.edges["writes"].data[dgl.EID], "writes")
    ends = last.edges(etype="writes", order="eid")
    assert (last.srcnodes["author"].data[dgl.NID][ends[0]] == edges[0]).all()
    assert (last.dstnodes["paper"].data[dgl.NID][ends[1]] == edges[1]).all()


def test_weights_that_the_script_hung_on_the_edges(g: DistGraph) -> None:
    for etype in g.canonical_etypes:
        policy = g.get_edge_partition_policy(etype)
        data, every = g.edges[etype].data, torch.arange(g.num_edges(etype))
        # Nobody else refers to them, and creating the next one frees what nobody refers to.
        data["chance"] = DistTensor((len(every),), torch.float32, part_policy=policy)
        data["chance"][every] = (every % 3 > 0).float()
    papers = {"paper": torch.arange(24)}
    sampler = dgl.dataloading.NeighborSampler([-1], prob="chance")
    ((*_, blocks),) = DistNodeDataLoader(g, papers, sampler, batch_size=24)
    for drawn in (blocks[0], sampling.sample_neighbors(g, papers, -1, prob="chance")):
        assert sorted(drawn.edges["writes"].data[dgl.EID].tolist()) == [
            index for index in range(72) if index % 3
        ]


def test_what_scripts_index_by_and_edges_that_need_no_graphbolt(g: DistGraph) -> None:
    mask, rows = DistTensor((24,), torch.bool, "odd"), DistTensor((24, 2), torch.float32, "rows")
    mask[torch.tensor([3, 5])] = torch.ones(2, dtype=torch.bool)
    rows[torch.tensor([5])] = torch.ones(1, 2)
    assert rows[mask].tolist() == [[0, 0], [1, 1]]
    g.add_edge_attribute("weight")
    drawn = sampling.sample_neighbors(g, {"paper": torch.arange(5)}, 2, use_graphbolt=True)
    assert dgl.EID in drawn.edges["cites"].data


def test_an_unknown_type_is_an_error_of_dgl_too(g: DistGraph) -> None:
    for views in (g.nodes, g.edges):
        with pytest.raises(dgl.DGLError, match="type 'xxx'") as raised:
            views["xxx"].data  # noqa: B018 - reading it raises
        assert isinstance(raised.value, ConfigError)


def test_reverse_edges_of_another_type_are_kept_out(g: DistGraph) -> None:
    edges = torch.arange(10)
    loader = DistEdgeDataLoader(
        g,
        {"writes": edges},
        dgl.dataloading.MultiLayerFullNeighborSampler(1),
        batch_size=10,
        exclude="reverse_types",
        reverse_etypes={"writes": "written_by", "written_by": "writes"},
    )
    ((_, _, blocks),) = loader
    every = Counter(pairs(g.find_edges(torch.arange(g.num_edges(WRITES)), WRITES)))
    own = Counter(pairs(g.find_edges(edges, WRITES)))
    back = g.find_edges(blocks[0].edges["written_by"].data[dgl.EID], WRITTEN_BY)
    seen = Counter(pairs(back[::-1]))
    # Of parallel edges those stay that are not in the batch; and authors of the batch wrote other papers too.
    assert {pair: seen[pair] for pair in own} == {pair: every[pair] - own[pair] for pair in own}
    assert seen.keys() - own.keys()


def pairs(ends: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    return list(zip(*(end.tolist() for end in ends), strict=True))


def test_batches_without_data_keep_their_ids(g: DistGraph, stock_parts: Mapping[str, Path]) -> None:
    """On the device `meta` whatever reads a value fails: ids of edges in one part, types without edges."""
    sampler = dgl.dataloading.NeighborSampler([2, 2])
    item = DistGraph("one", part_config=stock_parts["one"])  # now the graph that was opened last
    for graph, papers in ((item, torch.arange(24)), (g, {"paper": torch.arange(24)})):
        for _, _, blocks in DistNodeDataLoader(graph, papers, sampler, batch_size=24, device="meta"):
            for block in blocks:
                for etype in block.canonical_etypes:
                    ids = block.edges[etype].data[dgl.EID]
                    assert ids.is_meta
                    assert len(graph.find_edges(ids, etype)[0]) == block.num_edges(etype) > 0
                    assert block.in_degrees(etype=etype).is_meta
