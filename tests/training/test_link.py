"""Decoders, losses, split and filtered ranking of link prediction beside their formulas in plain NumPy."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dgl
import numpy as np
import pytest
import torch
from torch import Tensor

import dglx_dist as dx
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.dataloading.edge_loader import build_pairs
from dglx_dist.errors import ConfigError
from dglx_dist.graph.partition_book import resolve_etype
from dglx_dist.records import Assignment, RawGraph
from dglx_dist.training.link import (
    DECODERS,
    ComplEx,
    DotProduct,
    LinkEvaluation,
    LinkModel,
    RotatE,
    bpr_loss,
    compute_rows,
    edge_scores,
    link_loader,
    link_targets,
    softmax_loss,
    split_edges,
)
from dglx_dist.training.models import build_model
from dglx_dist.training.relational import RGCN, EntityInputs
from dglx_dist.training.tasks import LinkPrediction
from tests.helpers.ranks import run_ranks

R, D = 3, 6


def test_targets_are_found_by_names_with_colons() -> None:
    odd, even = ("_N", "/a.b/c:d:e", "_N"), ("u", "buys", "v")
    known = {"canonical_etypes": [odd, even], "ntypes": ["_N", "u", "v"]}
    graph: Any = SimpleNamespace(**known, to_canonical_etype=lambda name: resolve_etype(name, [odd, even]))
    result = link_targets(graph, ["/a.b/c:d:e", "buys", "_N:/a.b/c:d:e:_N", "u:buys:v"])
    assert result == [odd, even, odd, even]
    with pytest.raises(ConfigError, match="u:buys:_N"):
        link_targets(graph, ["u:buys:_N"])


def scores_by_formula(name: str, decoder: Any, s: Any, r: int, o: Any) -> float:
    """One score in NumPy, from the formula of the paper."""
    s, o = s.numpy(), o.numpy()
    if name == "dot":
        return float(s @ o)
    if name == "rotate":
        turned = (s[: D // 2] + 1j * s[D // 2 :]) * np.exp(1j * decoder.angles[r].detach().numpy())
        return decoder.margin - float(np.abs(turned - (o[: D // 2] + 1j * o[D // 2 :])).sum())
    row = decoder.relations[r].detach().numpy()
    if name == "distmult":
        return float((s * row * o).sum())
    if name == "complex":
        of_subject, relation, of_object = (x[: D // 2] + 1j * x[D // 2 :] for x in (s, row, o))
        return float((of_subject * relation * of_object.conj()).sum().real)
    return decoder.margin - float(np.abs(s + row - o).sum())


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_are_their_formulas(name: str) -> None:
    """Pair by pair, and all objects and all subjects of a query."""
    torch.manual_seed(0)
    decoder = DECODERS[name](R, D).double()
    rows, candidates = torch.randn(5, D).double(), torch.randn(7, D).double()
    relation = torch.tensor([0, 2, 2, 1, 0])
    with torch.no_grad():
        pairs = decoder(rows, relation, candidates[:5])
        objects, subjects = (
            case(rows, relation, candidates) for case in (decoder.all_objects, decoder.all_subjects)
        )
        assert objects.shape == subjects.shape == (5, 7)
        for b, r in enumerate(relation.tolist()):
            assert float(pairs[b]) == pytest.approx(
                scores_by_formula(name, decoder, rows[b], r, candidates[b]), abs=1e-12
            )
            for c in range(7):
                right = scores_by_formula(name, decoder, rows[b], r, candidates[c])
                assert float(objects[b, c]) == pytest.approx(right, abs=1e-12)
                left = scores_by_formula(name, decoder, candidates[c], r, rows[b])
                assert float(subjects[b, c]) == pytest.approx(left, abs=1e-12)
        assert decoder.all_objects(rows[:0], relation[:0], candidates).shape == (0, 7)


def test_rotate_scores_pieces_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, rows, tensor = RotatE(R, D), torch.randn(5, D), torch.randn(4, D)
    full = decoder.all_objects(rows, torch.tensor([0, 1, 2, 0, 1]), tensor)
    monkeypatch.setattr("dglx_dist.training.link._MAX_DIFFERENCES", 2 * tensor.numel())
    assert torch.equal(decoder.all_objects(rows, torch.tensor([0, 1, 2, 0, 1]), tensor), full)


def test_gradient_is_finite_where_ends_meet() -> None:
    rows = torch.zeros(2, D, requires_grad=True)
    decoder = RotatE(1, D)
    decoder(rows, torch.zeros(2, dtype=torch.int64), rows).sum().backward()
    assert rows.grad is not None
    assert bool(rows.grad.isfinite().all())


def test_wrong_decoders_are_refused() -> None:
    for kind in (ComplEx, RotatE):
        with pytest.raises(ConfigError, match=r"Make the width 5 even"):
            kind(R, 5)


def test_losses_by_hand() -> None:
    positive, negative = torch.tensor([1.0, -2.0]).double(), torch.tensor([[0.0, 3.0], [1.0, -1.0]]).double()
    s, n = positive.numpy()[:, None], negative.numpy()
    expected = np.log(1 + np.exp(n - s)).mean()
    assert float(bpr_loss(positive, negative)) == pytest.approx(expected, abs=1e-12)
    shares = np.exp(s[:, 0]) / (np.exp(s[:, 0]) + np.exp(n).sum(1))
    assert float(softmax_loss(positive, negative)) == pytest.approx(-np.log(shares).mean(), abs=1e-12)


def pairs_of(*scores: list[float]) -> Any:
    """A pair graph with an edge type for each list of scores."""
    zeros = [torch.zeros(len(item), dtype=torch.int64) for item in scores]
    graph = dgl.heterograph({("_N", f"r{k}", "_N"): (ids, ids) for k, ids in enumerate(zeros)}, {"_N": 1})
    graph.scores = torch.tensor([score for item in scores for score in item])
    return graph


class Scores(torch.nn.Module):
    def forward(self, blocks: Any, rows: Tensor, positive: Any, negative: Any) -> tuple[Tensor, Tensor]:
        return positive.scores, negative.scores


def step_of(positive: Any, negative: Any) -> Any:
    task = LinkPrediction(inputs=lambda _: {}, pair_loss=softmax_loss)  # type: ignore[arg-type]
    model: Any = Scores()
    model.weight = torch.nn.Parameter(torch.zeros(1))
    return task(model, (None, positive, negative, [None]))


def test_edges_above_all_their_negatives_are_correct() -> None:
    result = step_of(pairs_of([1.0, 2.0]), pairs_of([0.0, 0.5, 1.0, 3.0]))
    assert int(result.num_correct) == 1
    assert result.num_targets == 2
    nothing = step_of(pairs_of([]), pairs_of([]))
    assert nothing.num_targets == 0
    with pytest.raises(ConfigError, match=r"3 negatives for 2 edges of .* pair_loss needs as many for each"):
        step_of(pairs_of([0.0] * 2), pairs_of([0.0] * 3))
    with pytest.raises(ConfigError, match=r"1 negatives for 1 edges of .*r0.*, and 6 for 3 in total"):
        step_of(pairs_of([0.0], [0.0] * 2), pairs_of([0.0], [0.0] * 5))


def test_scores_take_the_rows_of_each_type() -> None:
    """Longer rows do not shift those of the next type, and shorter ones are refused."""
    etype = ("a", "r", "b")
    graph = dgl.heterograph({etype: (torch.tensor([0, 1]), torch.tensor([1, 0]))}, {"a": 2, "b": 2})
    rows = {"a": torch.randn(5, D), "b": torch.randn(3, D)}
    result = edge_scores(DotProduct(), graph, rows, [etype])[etype]
    assert torch.allclose(result, (rows["a"][:2] * rows["b"][[1, 0]]).sum(1))
    with pytest.raises(ConfigError, match="1 rows for the 2 nodes of type 'a'"):
        edge_scores(DotProduct(), graph, {**rows, "a": rows["a"][:1]}, [etype])


def test_scores_are_those_of_edges_added_to_a_pair_graph() -> None:
    etype, ends = ("_N", "r", "_N"), (np.array([0, 1]), np.array([1, 2]))
    *_, (graph,) = build_pairs(["_N"], {etype: np.arange(2)}, {etype: ends}, None)
    rows = torch.randn(3, D)
    graph.add_edges([2], [0])
    result = edge_scores(DotProduct(), graph, rows, [etype])[etype]
    assert torch.allclose(result, (rows * rows[[1, 2, 0]]).sum(1))


def test_degrees_of_the_whole_graph_are_refused() -> None:
    for norm in ("both", "left"):
        with pytest.raises(ConfigError, match=r"count validation and test edges\. Use --model sage"):
            LinkModel(dgl.nn.GraphConv(2, 2, norm=norm), DotProduct(), [])


NUM_NODES, RELATIONS = 40, 2
CYCLIC = np.arange(NUM_NODES)


def raw_graph(*, masks: bool) -> RawGraph:
    """``next`` leads from i to i + 1 and i + 2; ``back`` its reverse; modulo 40."""
    u = np.concatenate([CYCLIC, CYCLIC])
    v = np.concatenate([CYCLIC + 1, CYCLIC + 2]) % NUM_NODES
    etypes = [("_N", "back", "_N"), ("_N", "next", "_N")]
    side = (7 * u + v) % 10
    columns = {"train_mask": side > 2, "val_mask": side == 1, "test_mask": (side == 0) | (side == 2)}
    return RawGraph(
        name="cycle",
        num_nodes={"_N": NUM_NODES},
        edges={etypes[0]: (v, u), etypes[1]: (u, v)},
        edge_data=dict.fromkeys(etypes, columns) if masks else {},
        node_data={"_N": {"feat": np.eye(NUM_NODES, dtype=np.float32)}},
    )


def partition_randomly(folder: Any, raw: RawGraph, parts: int) -> str:
    part_of = {
        ntype: np.random.default_rng(parts).integers(parts, size=count).astype(np.int32)
        for ntype, count in raw.num_nodes.items()
    }
    write_dataset(raw, Assignment(num_parts=parts, part_of=part_of, method="test", seed=0), folder)
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("link")
    return {
        f"{name}{parts}": partition_randomly(
            root / f"{name}{parts}", raw_graph(masks=name == "masked"), parts
        )
        for name in ("masked", "plain")
        for parts in (1, 2)
    }


def split_of(folder: str) -> dict[str, Any]:
    """The masks of every edge by type and original ends, and the counts."""
    with dx.init(seed=3, timeout=60):
        g = dx.DistGraph(folder)
        made = split_edges(g, g.canonical_etypes)
        sides = {}
        for etype in g.canonical_etypes:
            ends = [
                g.orig_ids(ends).tolist() for ends in g.find_edges(torch.arange(g.num_edges(etype)), etype)
            ]
            masks = [g.edges[etype].data[f"{name}_mask"][:].tolist() for name in ("train", "val", "test")]
            sides[etype[1]] = dict(zip(zip(*ends, strict=True), zip(*masks, strict=True), strict=True))
        return {"made": made, "sides": sides}


def test_split_does_not_depend_on_parts_and_ranks(folders: dict[str, str]) -> None:
    """Both directions of an edge are on the same side, and every edge on one."""
    (alone,) = run_ranks(split_of, 1, args=(folders["plain1"],))
    for rank in run_ranks(split_of, 2, args=(folders["plain2"],), ranks_per_server=1):
        assert rank == alone
    assert alone["made"]
    sides = alone["sides"]
    assert {sum(item) for item in sides["next"].values()} == {1}
    assert all(sides["back"][v, u] == side for (u, v), side in sides["next"].items())
    train, validation, test = (sum(item[k] for item in sides["next"].values()) for k in range(3))
    assert train > 4 * max(validation, test)
    assert min(validation, test) > 0


METRICS = ("mrr", "hits@1", "hits@3", "auc", "roc_auc", "average_precision")


def brute_force(triples: Any, side: Any, rows: Any, decoder: Any) -> list[float]:
    """Filtered ranks of the (Q,) ``side`` of triples, of both ends, candidate by candidate."""
    known, ranks = set(map(tuple, triples.tolist())), []
    for s, r, o in triples[side].tolist():
        for name in ("object", "subject"):
            results = []
            for candidate in range(NUM_NODES):
                triple = (s, r, candidate) if name == "object" else (candidate, r, o)
                if triple == (s, r, o) or triple not in known:
                    score = decoder(rows[triple[0]][None], torch.tensor([r]), rows[triple[2]][None])
                    results.append((float(score), triple == (s, r, o)))
            (own,) = (score for score, is_own in results if is_own)
            remaining = [score for score, is_own in results if not is_own]
            ranks.append(1 + sum(x > own for x in remaining) + 0.5 * sum(x == own for x in remaining))
    return ranks


def evaluate_model(folder: str, name: str) -> dict[str, Any]:
    with dx.init(seed=3, timeout=60):
        g = dx.DistGraph(folder)
        split_edges(g, g.canonical_etypes)
        # Rows by the original ids, since those of the parts differ.
        torch.manual_seed(1)
        start = torch.randn(NUM_NODES, D).double()
        rows = dx.DistEmbedding(NUM_NODES, D, "rows", dtype=torch.float64, graph=g)
        own = torch.arange(*rows.part_policy.owned_range)
        rows.weight[own] = start[g.orig_ids(own)]
        g.barrier()
        inputs = EntityInputs(g, embeddings={"_N": rows})
        model = LinkModel(
            None, DECODERS[name](len(g.canonical_etypes), D).double(), g.canonical_etypes
        ).double()
        result = LinkEvaluation(g=g, targets=g.canonical_etypes, inputs=inputs, metrics=METRICS)(
            dx.wrap(model, g)
        )
        triples, masks = [], []
        for number, etype in enumerate(g.canonical_etypes):
            u, v = (g.orig_ids(ends) for ends in g.find_edges(torch.arange(g.num_edges(etype)), etype))
            triples.append(torch.stack([u, torch.full_like(u, number), v], 1))
            masks.append(g.edges[etype].data["test_mask"][:].bool())
        with torch.no_grad():
            ranks = np.array(brute_force(torch.cat(triples), torch.cat(masks), start, model.decoder))
        return {"found": result, "expected": [(1 / ranks).mean(), (ranks <= 1).mean(), (ranks <= 3).mean()]}


@pytest.mark.parametrize("name", ["complex", "transe"])
def test_ranks_are_those_of_brute_force(name: str, folders: dict[str, str]) -> None:
    """Both ends, filtered by the edges of all splits; the same on two ranks with other ids."""
    (alone,) = run_ranks(evaluate_model, 1, args=(folders["masked1"], name))
    record = alone["found"]
    assert [record[f"test_{m}"] for m in ("mrr", "hits@1", "hits@3")] == pytest.approx(
        alone["expected"], abs=1e-12
    )
    assert set(record) == {f"{split}_{m}" for split in ("val", "test") for m in METRICS}
    assert 0 < record["test_auc"] < 1
    assert record["test_roc_auc"] == record["test_auc"]
    # Half of the pairs are edges, so that the precision of guesses is one half, too.
    assert abs(record["test_average_precision"] - record["test_auc"]) < 0.2
    for rank in run_ranks(evaluate_model, 2, args=(folders["masked1"], name), ranks_per_server=2):
        assert rank["found"] == pytest.approx(record, abs=1e-12)
    for rank in run_ranks(evaluate_model, 3, args=(folders["masked2"], name), ranks_per_server=2):
        ranked = {key: value for key, value in rank["found"].items() if "mrr" in key or "hits" in key}
        assert ranked == pytest.approx({key: record[key] for key in ranked}, abs=1e-12)


def judge_rows(folder: str, broken: int) -> Any:
    """Metrics of rows of zeros, or the error where the rows of one rank's decoder are nan."""
    with dx.init(seed=3, timeout=60) as session:
        g = dx.DistGraph(folder)
        split_edges(g, g.canonical_etypes)
        rows = dx.DistEmbedding(
            NUM_NODES, D, "rows", init_func=lambda shape, dtype: torch.zeros(shape, dtype=dtype), graph=g
        )
        model = LinkModel(None, DECODERS["distmult"](RELATIONS, D), g.canonical_etypes)
        if session.topology.rank == broken:
            torch.nn.init.constant_(model.decoder.relations, torch.nan)
        evaluation = LinkEvaluation(
            g=g, targets=g.canonical_etypes, inputs=EntityInputs(g, embeddings={"_N": rows})
        )
        try:
            return evaluation(model)
        except ConfigError as error:
            return str(error)


def test_equal_scores_have_the_mean_rank_and_nan_is_an_error_on_all_ranks(folders: dict[str, str]) -> None:
    """One other answer of each query does not count, so 39 candidates have the rank 20."""
    (record,) = run_ranks(judge_rows, 1, args=(folders["masked1"], -1))
    assert record["test_mrr"] == record["val_mrr"] == pytest.approx(1 / 20)
    assert record["test_auc"] == 0.5
    for message in run_ranks(judge_rows, 2, args=(folders["masked2"], 1), ranks_per_server=2):
        assert "a score is NaN" in message


BUYS, BOUGHT, KNOWS = ("user", "buys", "item"), ("item", "bought-by", "user"), ("user", "knows", "user")


def shop(drop: Any = None) -> RawGraph:
    """``buys`` and its reverse by another name, some twice; ``knows`` has some opposite edges."""
    random = np.random.default_rng(0)
    u, v = np.divmod(random.permutation(900)[:150], 30)
    a, b = np.stack(np.triu_indices(30, 1))[:, random.permutation(435)[:150]]
    edges = {
        BOUGHT: (np.concatenate([v, v[:40]]), np.concatenate([u, u[:40]])),
        BUYS: (u, v),
        KNOWS: (np.concatenate([a, b[:50]]), np.concatenate([b, a[:50]])),
    }
    if drop is not None:
        edges = {e: tuple(ends[~drop[e]] for ends in both) for e, both in edges.items()}  # type: ignore[misc]
    feat = {ntype: {"feat": random.normal(size=(30, D)).astype(np.float32)} for ntype in ("user", "item")}
    return RawGraph(name="shop", num_nodes={"user": 30, "item": 30}, edges=edges, node_data=feat)


def friends(drop: Any = None) -> RawGraph:
    """``knows`` alone."""
    raw = shop(drop)
    return RawGraph(
        name="friends",
        num_nodes={"user": 30},
        edges={KNOWS: raw.edges[KNOWS]},
        node_data={"user": raw.node_data["user"]},
    )


def encode_nodes(folder: str, kind: str) -> Any:
    """Rows of an encoder by type, and by edge type which edges of the source it must not see."""
    with dx.init(seed=3, timeout=60):
        g = dx.DistGraph(folder)
        targets = [BUYS, KNOWS] if kind == "rgcn" else [KNOWS]
        assert split_edges(g, targets)
        assert split_edges(g, targets)
        torch.manual_seed(1)
        inputs = EntityInputs(g, as_tensor=kind == "sage")
        encoder: Any = (
            build_model("sage", D, 8, 8, 2) if kind == "sage" else RGCN(g, inputs.feature_widths, 8, 8)
        )
        model = LinkModel(encoder, DotProduct(), g.canonical_etypes).eval()
        with compute_rows(model, g, inputs) as result:
            rows = {ntype: value[:][g.new_ids(torch.arange(30), ntype)] for ntype, value in result.items()}
        drop = {}
        for etype in g.canonical_etypes:
            hidden = ~g.edges[etype].data["train_mask"][:].bool().numpy()
            drop[etype] = np.zeros(len(hidden), np.bool_)
            drop[etype][g.orig_edge_ids(torch.arange(len(hidden)), etype).numpy()] = hidden
        leaks, loader = 0, link_loader(g, targets, fanouts=[-1], batch_size=40, inputs=inputs)
        for _, pairs, _, (block,) in loader:
            batch = {etype: set(zip(*ends_of(pairs, etype), strict=True)) for etype in targets}
            chosen = {KNOWS: batch[KNOWS] | {(b, a) for a, b in batch[KNOWS]}}
            if kind == "rgcn":
                chosen |= {BUYS: batch[BUYS], BOUGHT: {(v, u) for u, v in batch[BUYS]}}
            for etype in chosen:
                seen = set(zip(*ends_of(block, etype), strict=True))
                # Of parallel edges, one is the reverse.
                count = Counter(zip(*(e.tolist() for e in g.find_edges(every(g, etype), etype)), strict=True))
                leaks += sum(count[ends] == 1 for ends in chosen[etype] & seen)
        return rows, drop, leaks


def every(g: Any, etype: Any) -> Tensor:
    return torch.arange(g.num_edges(etype))


def ends_of(graph: Any, etype: Any) -> list[list[int]]:
    kinds = (graph.srcnodes, graph.dstnodes)
    return [
        nodes[ntype].data[dgl.NID][ends.long()].tolist()
        for nodes, ntype, ends in zip(kinds, (etype[0], etype[2]), graph.edges(etype=etype), strict=True)
    ]


@pytest.mark.parametrize("kind", ["sage", "rgcn"])
def test_rows_do_not_see_validation_and_test_edges(kind: str, tmp_path: Path) -> None:
    """They are bit-equal without these edges in the graph, whatever their reverse edges are called."""
    raw = friends if kind == "sage" else shop
    (full,) = run_ranks(encode_nodes, 1, args=(partition_randomly(tmp_path / "whole", raw(), 1), kind))
    rows, drop, leaks = full
    none = {etype: np.zeros(len(ends[0]), np.bool_) for etype, ends in shop().edges.items()}
    assert all(hidden.any() for hidden in drop.values())
    assert leaks == 0
    (least,) = run_ranks(
        encode_nodes, 1, args=(partition_randomly(tmp_path / "least", raw({**none, **drop}), 1), kind)
    )
    assert not any(hidden.any() for hidden in least[1].values())
    for ntype, of_type in rows.items():
        assert torch.equal(of_type, least[0][ntype])
