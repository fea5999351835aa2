"""Mini-batches of edges: pairs, excluded edges, steps on one rank and several, bytes."""

from collections.abc import Iterator
from itertools import chain
from types import SimpleNamespace
from typing import Any

import dgl
import numpy as np
import pytest
import torch
from dgl.dataloading import NeighborSampler, as_edge_prediction_sampler
from dgl.dataloading import negative_sampler as dgl_negative

from dglx_dist.comm.session import start_session
from dglx_dist.dataloading import negative
from dglx_dist.dataloading.edge_loader import DistEdgeDataLoader, open_exclude, read_rule
from dglx_dist.dataloading.loader import DataLoader
from dglx_dist.errors import ConfigError
from dglx_dist.graph.analysis import reverse_edge_ids
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.records import EDGE_TYPE
from tests.dataloading import bonds
from tests.dataloading.bonds import BOUGHT, BUYING, BUYS, HALF, KNOWING, KNOWS
from tests.helpers.ranks import run_ranks

SAMPLER = NeighborSampler([2, 3], prefetch_node_feats=["feat"])
EDGES = torch.arange(2 * HALF)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("edges")
    return {
        "ring": str(bonds.write(bonds.ring(), folder / "ring", 3)),
        "shop": str(bonds.write(bonds.shop(), folder / "shop", 3)),
    }


@pytest.fixture
def g(folders: dict[str, str]) -> Iterator[DistGraph]:
    with start_session():
        yield DistGraph(folders["ring"])


@pytest.fixture
def shop(folders: dict[str, str]) -> Iterator[DistGraph]:
    with start_session():
        yield DistGraph(folders["shop"])


def loader_of(g: DistGraph, **options: Any) -> DistEdgeDataLoader:
    options = {"batch_size": 16, "shuffle": True, "seed": 3} | options
    return DistEdgeDataLoader(g, options.pop("eids", EDGES), options.pop("sampler", SAMPLER), **options)


def ids_of(graph: dgl.DGLGraph) -> list[int]:
    return graph.edata[dgl.EID].tolist()


def test_pair_graphs_lie_over_the_last_blocks_destinations(g: DistGraph) -> None:
    for input_nodes, pairs, negatives, blocks in loader_of(g, negative_sampler=negative.Uniform(3)):
        seeds = blocks[-1].dstdata[dgl.NID]
        assert torch.equal(pairs.ndata[dgl.NID], seeds)
        assert torch.equal(negatives.ndata[dgl.NID], seeds)
        sources, destinations = (seeds[ends] for ends in pairs.edges())
        expected = g.find_edges(pairs.edata[dgl.EID])
        assert torch.equal(sources, expected[0])
        assert torch.equal(destinations, expected[1])
        assert torch.equal(seeds[negatives.edges()[0]], sources.repeat_interleave(3))
        touched = torch.cat([*pairs.edges(), negatives.edges()[1]])
        assert len(touched.unique()) == len(seeds)
        assert torch.equal(blocks[0].srcdata["feat"], g.ndata["feat"][input_nodes])


def remaining_degrees(g: DistGraph, nodes: torch.Tensor, gone: set[int]) -> torch.Tensor:
    _, destinations = g.find_edges(sorted(gone))
    return g.in_degrees(nodes) - torch.bincount(destinations, minlength=g.num_nodes())[nodes]


def check_excluded(g: DistGraph, loader: Any, reverse: torch.Tensor | None) -> int:
    """No edge of the batch or its reverse in any block, and the fan-out is full from what is left."""
    counted = 0
    for _, pairs, *_, blocks in loader:
        gone = set(ids_of(pairs))
        if reverse is not None:
            gone |= set(reverse[pairs.edata[dgl.EID]].tolist())
        for block, fanout in zip(blocks, (2, 3), strict=True):
            assert not gone & set(ids_of(block))
            left = remaining_degrees(g, block.dstdata[dgl.NID], gone)
            assert torch.equal(block.in_degrees(), left.clamp(max=fanout))
            counted += int((left < g.in_degrees(block.dstdata[dgl.NID])).sum())
    return counted


def test_without_exclusion_a_batch_sees_its_own_edges(g: DistGraph) -> None:
    sampler = NeighborSampler([-1])
    for _, pairs, (block,) in loader_of(g, sampler=sampler):
        assert set(ids_of(pairs)) <= set(ids_of(block))


def in_rank(ring: str, structure: Any, shares: list[list[int]]) -> dict[str, Any]:
    """Two epochs for each kind of exclusion; what was visited, drawn and shared."""
    with start_session(timeout_s=60) as session:
        g = DistGraph(ring, structure=structure)
        reverse = reverse_edge_ids(g)
        own_edges = torch.tensor(shares[session.topology.rank], dtype=torch.int64)
        draws: dict[str, list[list[int]]] = {}
        counted = 0
        for mode, options in (
            ("self", {"exclude": "self"}),
            ("reverse_id", {"exclude": "reverse_id", "reverse_eids": reverse}),
            ("list", {"exclude": "reverse_id", "reverse_eids": reverse[:]}),
            ("function", {"exclude": lambda ids: torch.cat([ids, reverse[ids]])}),
        ):
            loader = loader_of(
                g, eids=own_edges, batch_size=1, negative_sampler=negative.Uniform(2), **options
            )
            counted += check_excluded(g, loader, None if mode == "self" else reverse[:])
            for _, pairs, negatives, blocks in loader:
                assert session.step_share is pairs.step_share is negatives.step_share is blocks[-1].step_share
                for edge in ids_of(pairs):
                    sources = [*negatives.ndata[dgl.NID][negatives.edges()[1]].tolist(), *ids_of(blocks[0])]
                    draws.setdefault(f"{mode} {edge}", []).append(sources)
        loader = loader_of(g, eids=own_edges, batch_size=16)
        shares_seen = [
            (pairs.num_edges(), session.step_share.num_local, session.step_share.num_global)
            for _, pairs, _ in loader
        ]
        return {"draws": draws, "counted": counted, "shares": shares_seen}


def test_on_any_ranks_the_same_is_drawn_and_excluded(folders: dict[str, str]) -> None:
    """30 edges on one rank; 25 and 5 on two, cut and whole; 20, 0 and 10 on three."""
    ids = EDGES[::8].tolist()
    results_of_one = run_ranks(in_rank, 1, args=(folders["ring"], "replicated", [ids]))
    two = run_ranks(
        in_rank, 2, args=(folders["ring"], "partitioned", [ids[:25], ids[25:]]), ranks_per_server=1
    )
    three = run_ranks(in_rank, 3, args=(folders["ring"], "replicated", [ids[:20], [], ids[20:]]))
    for results in (two, three):
        draws = {key: value for result in results for key, value in result["draws"].items()}
        assert draws == results_of_one[0]["draws"]
    assert results_of_one[0]["counted"] > 100
    assert results_of_one[0]["shares"] == [(16, 16, 16), (14, 14, 14)]
    assert [result["shares"] for result in two] == [[(16, 16, 21), (9, 9, 9)], [(5, 5, 21), (0, 0, 9)]]
    assert three[1]["shares"] == [(0, 0, 26), (0, 0, 4)]


def test_a_resumed_loader_goes_on_where_it_was(g: DistGraph) -> None:
    options = {"exclude": "self", "negative_sampler": negative.PerSourceUniform(2), "num_threads": 2}

    def rows(loader: Any, num: int | None = None) -> list[Any]:
        out = []
        for _, pairs, negatives, blocks in loader:
            out.append((ids_of(pairs), negatives.edges()[1].tolist(), ids_of(blocks[0]), loader.state_dict()))
            if len(out) == num:
                break
        return out

    loader = loader_of(g, **options)
    loader.set_epoch(4)
    all_rows = rows(loader)
    again = loader_of(g, **options)
    again.load_state_dict(all_rows[5][-1])
    assert rows(again) == all_rows[6:]
    assert again.epoch == 5
    later = loader_of(g, **options)
    later.set_epoch(5)
    assert rows(later, 2) == rows(again, 2) != all_rows[:2]


def test_dgls_wrapper_says_the_same(g: DistGraph) -> None:
    reverse = reverse_edge_ids(g)[:]
    wrapped = as_edge_prediction_sampler(
        SAMPLER, exclude="reverse_id", reverse_eids=reverse, negative_sampler=dgl_negative.Uniform(3),
        prefetch_labels=["label"],
    )  # fmt: skip
    ours = loader_of(g, exclude="reverse_id", reverse_eids=reverse, negative_sampler=negative.Uniform(3))
    for batch, reference in zip(loader_of(g, sampler=wrapped), ours, strict=True):
        assert ids_of(batch[1]) == ids_of(reference[1])
        assert torch.equal(batch[2].edges()[1], reference[2].edges()[1])
        assert [ids_of(block) for block in batch[3]] == [ids_of(block) for block in reference[3]]
        assert torch.equal(batch[1].edata["label"], g.orig_edge_ids(batch[1].edata[dgl.EID]))
    check_excluded(g, loader_of(g, sampler=wrapped), reverse)
    with pytest.raises(ConfigError, match=r"dx\.DistEdgeDataLoader"):
        DataLoader(g, EDGES, wrapped)


def test_a_type_without_reverse_excludes_its_own_edges(shop: DistGraph) -> None:
    edges = {KNOWS: np.array([1, 2])}
    rule = read_rule(shop, edges, "reverse_types", None, {BUYS: BOUGHT})
    excluded = open_exclude(shop, "reverse_types", rule)(edges)
    assert {etype: ids.tolist() for etype, ids in excluded.items()} == {KNOWS: [1, 2]}


def test_fixed_ids_are_never_drawn(g: DistGraph) -> None:
    for _, _, blocks in loader_of(g, exclude=EDGES[EDGES % 2 == 0]):
        assert all(edge % 2 for block in blocks for edge in ids_of(block))


def shop_in_rank(folder: str, structure: Any) -> dict[str, Any]:
    with start_session(timeout_s=60) as session:
        g = DistGraph(folder, structure=structure)
        rank, world = session.topology.rank, session.topology.world_size
        eids = {"buys": torch.arange(BUYING)[rank::world], KNOWS: torch.arange(KNOWING)[rank::world]}
        reverse = {
            BUYS: reverse_edge_ids(g, BUYS, reverse_etype=BOUGHT)[:],
            KNOWS: reverse_edge_ids(g, KNOWS)[:],
        }
        sampler = as_edge_prediction_sampler(
            NeighborSampler([{BUYS: -1, BOUGHT: -1, KNOWS: 2}, {BUYS: 3, BOUGHT: -1, KNOWS: -1}]),
            exclude=lambda ids: {
                KNOWS: ids.get(KNOWS, torch.empty(0, dtype=torch.int64)),
                "buys": ids.get(BUYS, torch.empty(0, dtype=torch.int64)),
                BOUGHT: reverse[BUYS][ids[BUYS]] if BUYS in ids else [],
            },
            negative_sampler=negative.Uniform(2, corrupt="both"),
            prefetch_labels={"buys": ["stars"]},
        )
        by_types = as_edge_prediction_sampler(
            sampler.sampler, exclude="reverse_types",
            reverse_etypes={"buys": "bought_by"},
        )  # fmt: skip
        seen: dict[str, list[int]] = {"buys": [], "knows": [], "steps": []}
        for input_nodes, pairs, negatives, blocks in loader_of(g, eids=eids, sampler=sampler, batch_size=8):
            check_shop(g, pairs, negatives, blocks, input_nodes)
            gone = {BOUGHT: reverse[BUYS][pairs.edges["buys"].data[dgl.EID]].tolist()}
            gone |= {etype: pairs.edges[etype].data[dgl.EID].tolist() for etype in (BUYS, KNOWS)}
            for block in blocks:
                for etype, ids in gone.items():
                    assert not set(ids) & set(block.edges[etype].data[dgl.EID].tolist())
            seen["buys"] += gone[BUYS]
            seen["knows"] += gone[KNOWS]
            seen["steps"].append(session.step_share.num_local)
        for _, pairs, blocks in loader_of(g, eids={"buys": eids["buys"]}, sampler=by_types, batch_size=8):
            back = set(reverse[BUYS][pairs.edges["buys"].data[dgl.EID]].tolist())
            for block in blocks:
                assert not back & set(block.edges[BOUGHT].data[dgl.EID].tolist())
                assert not set(pairs.edges[BUYS].data[dgl.EID].tolist()) & set(
                    block.edges[BUYS].data[dgl.EID].tolist()
                )
        return seen


def check_ends(g: DistGraph, pairs: Any) -> None:
    for etype in (BUYS, KNOWS):
        expected = g.find_edges(pairs.edges[etype].data[dgl.EID], etype)
        for ntype, ends, nodes in zip(etype[::2], pairs.edges(etype=etype), expected, strict=True):
            assert torch.equal(pairs.nodes[ntype].data[dgl.NID][ends], nodes)


def check_shop(g: DistGraph, pairs: Any, negatives: Any, blocks: Any, input_nodes: Any) -> None:
    assert set(pairs.canonical_etypes) == set(negatives.canonical_etypes) == set(g.canonical_etypes)
    for ntype in g.ntypes:
        assert torch.equal(pairs.nodes[ntype].data[dgl.NID], blocks[-1].dstnodes[ntype].data[dgl.NID])
        assert torch.equal(negatives.nodes[ntype].data[dgl.NID], pairs.nodes[ntype].data[dgl.NID])
        assert torch.equal(input_nodes[ntype], blocks[0].srcnodes[ntype].data[dgl.NID])
        assert all(negatives.num_edges(etype) == 4 * pairs.num_edges(etype) for etype in g.canonical_etypes)
    check_ends(g, pairs)
    assert pairs.num_edges(BOUGHT) == negatives.num_edges(BOUGHT) == 0
    stars = pairs.edges["buys"].data["stars"]
    assert torch.equal(stars, g.orig_edge_ids(pairs.edges["buys"].data[dgl.EID], BUYS))


def ends_in_rank(folder: str) -> list[str]:
    with start_session(timeout_s=60) as session, pytest.MonkeyPatch.context() as patch:
        g = DistGraph(folder, structure="partitioned")
        eids = {
            etype: torch.arange(g.num_edges(etype))[session.topology.rank :: 2] for etype in (BUYS, KNOWS)
        }
        sampler = NeighborSampler([dict.fromkeys(g.canonical_etypes, 0)])
        loader = loader_of(g, eids=eids, sampler=sampler, batch_size=BUYING + KNOWING, num_threads=0)
        events: list[str] = []
        submit = session.rpc.submit

        def submit_noted(*args: Any, **options: Any) -> Any:
            events.append("ask")
            pending = submit(*args, **options)
            return SimpleNamespace(result=lambda: (events.append("wait"), pending.result())[1])

        patch.setattr(session.rpc, "submit", submit_noted)
        ((_, pairs, _),) = loader
        check_ends(g, pairs)
        g.barrier()
        return events


def test_ends_of_all_types_are_asked_for_before_any_is_waited_for(folders: dict[str, str]) -> None:
    for events in run_ranks(ends_in_rank, 2, args=(folders["shop"],), ranks_per_server=1):
        assert events[:4] == ["ask"] * 2 + ["wait"] * 2


@pytest.mark.parametrize(("ranks", "structure"), [(1, "replicated"), (2, "partitioned")])
def test_batches_hold_edges_of_several_types(folders: dict[str, str], ranks: int, structure: str) -> None:
    results = run_ranks(shop_in_rank, ranks, args=(folders["shop"], structure), ranks_per_server=1)
    assert sorted(chain(*(result["buys"] for result in results))) == list(range(BUYING))
    assert sorted(chain(*(result["knows"] for result in results))) == list(range(KNOWING))
    assert sum(chain(*(result["steps"] for result in results))) == BUYING + KNOWING


# One for each place where ranks tell each other of mistakes: options, the makers of blocks, of negatives.
WRONG_ON_ONE = {
    "missing": ([3], {"exclude": "reverse_id"}, ConfigError, "needs reverse_eids="),
    "range": ([240], {}, IndexError, "id 240 at position 0"),
    "column": ([3], {"sampler": NeighborSampler([2], prefetch_node_feats=["fest"])}, ConfigError, "'fest'"),
    "fixed": ([3], {"exclude": [240]}, IndexError, "240"),
}  # fmt: skip


def wrong_in_rank(folder: str) -> dict[str, str]:
    """Rank 1 makes each mistake while the others do well; nobody hangs."""
    messages = {}
    with start_session(timeout_s=60) as session:
        g = DistGraph(folder)
        for name, (eids, options, error, message) in WRONG_ON_ONE.items():
            if session.topology.rank == 1:
                with pytest.raises(error, match=message):
                    loader_of(g, eids=eids, **options)
            else:
                with pytest.raises(ConfigError, match=r"rank 1 on .*: ") as caught:
                    loader_of(g, eids=[0])
                messages[name] = str(caught.value)
        mode = [None, "self"][session.topology.rank]
        with pytest.raises(ConfigError, match="disagree on exclude=: rank 0 has None, rank 1 has 'self'"):
            loader_of(g, eids=[session.topology.rank], exclude=mode)
        assert len(loader_of(g, eids=[session.topology.rank])) == 1
    return messages


def test_a_mistake_on_one_rank_is_an_error_on_all(folders: dict[str, str]) -> None:
    messages = run_ranks(wrong_in_rank, 2, args=(folders["ring"],))[0]
    assert set(messages) == set(WRONG_ON_ONE)
    assert "needs reverse_eids=" in messages["missing"]


def test_own_code_of_a_sampler_gets_excluded_edges(g: DistGraph) -> None:
    class Every(NeighborSampler):
        def sample_blocks(self, g: Any, seed_nodes: Any, exclude_eids: Any = None) -> Any:
            frontier = g.sample_neighbors(seed_nodes, -1, exclude_edges=exclude_eids)
            block = dgl.to_block(frontier, seed_nodes)
            block.edata[dgl.EID] = frontier.edata[dgl.EID][block.edata[dgl.EID]]
            return block.srcdata[dgl.NID], seed_nodes, [block]

    total = 0
    for _, pairs, (block,) in loader_of(g, sampler=Every([2]), exclude="self"):
        assert not set(ids_of(pairs)) & set(ids_of(block))
        total += block.num_edges()
    assert total > 1000


def test_no_edges_ask_for_no_negatives(g: DistGraph) -> None:
    options = dict.fromkeys(("exclude", "negative_sampler"), lambda *_: pytest.fail("called for no edges"))
    loader = loader_of(g, **options)
    # As of a rank that has run out of edges.
    batch = loader.open_stages(0, lambda: iter(())).make(len(loader))
    assert [pairs.num_edges() for pairs in batch.pairs] == [0, 0]


def exclude_edges(g: DistGraph, edges: dict[Any, list[int]], **options: Any) -> dict[Any, list[int]]:
    positive = {etype: np.array(ids, np.int64) for etype, ids in edges.items()}
    rule = read_rule(g, positive, **{"reverse_eids": None, "reverse_etypes": None, **options})
    excluded = open_exclude(g, options["exclude"], rule)(positive)
    return {etype: ids.tolist() for etype, ids in excluded.items()}


@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy, lambda ids: {"_E": ids}])
def test_reverse_ids_can_be_lists(g: DistGraph, make: Any) -> None:
    reverse = reverse_edge_ids(g)[:].numpy()
    reverse[5] = -1
    rule = {"exclude": "reverse_id", "reverse_eids": make(reverse)}
    expected = sorted({130, 3, 10, 5, *reverse[[130, 3, 10]].tolist()})
    assert exclude_edges(g, {EDGE_TYPE: [130, 3, 10, 5]}, **rule) == {EDGE_TYPE: expected}


def test_a_function_is_called_as_dgl_calls_it(g: DistGraph) -> None:
    def find_next(ids: torch.Tensor) -> torch.Tensor:
        assert isinstance(ids, torch.Tensor)
        return torch.cat([ids, ids + 1, ids + 1])

    assert exclude_edges(g, {EDGE_TYPE: [9, 3]}, exclude=find_next) == {EDGE_TYPE: [3, 4, 9, 10]}
    assert exclude_edges(g, {EDGE_TYPE: []}, exclude=find_next) == {}
    assert exclude_edges(g, {EDGE_TYPE: [1]}, exclude=lambda _: None) == {}
    with pytest.raises(IndexError, match="id 240"):
        exclude_edges(g, {EDGE_TYPE: [239]}, exclude=find_next)


def test_exclude_function_gets_edges_of_several_types(shop: DistGraph) -> None:
    def several(ids: Any) -> Any:
        assert set(ids) == {BUYS}
        return {"knows": ids[BUYS]}

    assert exclude_edges(shop, {BUYS: [2], KNOWS: []}, exclude=several) == {KNOWS: [2]}
    with pytest.raises(ConfigError, match="several edge types"):
        exclude_edges(shop, {BUYS: [2]}, exclude=lambda ids: ids[BUYS])


class Own(dgl.dataloading.EdgePredictionSampler):
    def sample(self, g: Any, seed_edges: Any) -> Any:
        return super().sample(g, seed_edges)


def by_id(reverse: Any) -> dict[str, Any]:
    return {"exclude": "reverse_id", "reverse_eids": reverse}


def by_types(reverse: Any) -> dict[str, Any]:
    return {"exclude": "reverse_types", "reverse_etypes": reverse}


REVERSED = np.r_[HALF : 2 * HALF, 0:HALF]
WRAPPED = as_edge_prediction_sampler(SAMPLER)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eids": {"likes": [1]}}, "'likes'"),
        ({"eids": [3, 4, 3]}, "contain edge 3 more than once"),
        ({"exclude": "both"}, r"exclude='both'\. Choose None, 'self', 'reverse_id', 'reverse_types'"),
        ({"exclude": "reverse_id"}, r"needs reverse_eids=\. dx.reverse_edge_ids\(g\)"),
        ({"exclude": "reverse_types"}, "needs reverse_etypes="),
        ({"exclude": "self", "reverse_eids": REVERSED}, "Pass exclude='reverse_id'"),
        ({"reverse_etypes": {}}, "Pass exclude='reverse_types'"),
        (by_id(REVERSED[:-1]), r"\(239,\)\. Pass int64 of shape \(240,\), one per edge"),
        (by_id(REVERSED.astype(float)), "are float64"),
        (by_id(REVERSED + 1), "id 240 at position 119"),
        (by_id({"likes": REVERSED}), "likes"),
        (by_id(EDGES.roll(HALF)), "Ids change when"),
        (by_types({"_E": "_E"}), "must be another type"),
        ({"negative_sampler": dgl_negative.Uniform(-2)}, "k=-2"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"seed": -1}, "seed=-1"),
        ({"batchsize": 3}, "no option 'batchsize'"),
        ({"sampler": "all"}, "str makes no blocks"),
        ({"exclude": "self", "sampler": WRAPPED}, "not to both"),
        ({"sampler": as_edge_prediction_sampler(SAMPLER, prefetch_labels=["star"])}, "star"),
        ({"sampler": Own(SAMPLER)}, "Own samples edges with its own code"),
    ],
)
def test_unsupported_options_are_refused(g: DistGraph, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loader_of(g, **options)


@pytest.mark.parametrize(
    ("eids", "rule", "message"),
    [
        ([1], {}, "several edge types"),
        ({"buys": [1]}, by_id({"knows": np.full(KNOWING, -1)}), r"reverse of \('user', 'buys', 'item'\)"),
        ({"buys": [1]}, by_id(REVERSED), "Pass a dict"),
        ({"buys": [1]}, by_types({"buys": "knows"}), "from 'item' to 'user'"),
        ({"buys": [1]}, by_types(["buys"]), "Pass {edge type"),
    ],
)
def test_refuses_unsupported_options_over_types(shop: DistGraph, eids: Any, rule: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loader_of(shop, eids=eids, **rule)
