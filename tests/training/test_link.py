"""Decoders, losses, split and filtered ranking of link prediction beside their formulas in plain NumPy."""

from __future__ import annotations

from typing import Any

import dgl
import numpy as np
import pytest
import torch
from torch import Tensor

import dglx_dist as dx
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.errors import ConfigError
from dglx_dist.records import Assignment, RawGraph
from dglx_dist.training.fit import FitConfig, LinkPrediction
from dglx_dist.training.link import (
    LinkEvaluation,
    LinkModel,
    bpr_loss,
    check_link_metric,
    softmax_loss,
    split_edges,
)
from dglx_dist.training.models import DECODERS, ComplEx, RotatE, TransE
from dglx_dist.training.relational import EntityInputs
from tests.helpers.ranks import run_ranks

R, D = 3, 6


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
    return decoder.margin - float(np.linalg.norm(s + row - o, decoder.norm))


@pytest.mark.parametrize("name", [*DECODERS, "transe2"])
def test_decoders_are_their_formulas(name: str) -> None:
    """Pair by pair, and all objects and all subjects of a query."""
    torch.manual_seed(0)
    decoder = (TransE(R, D, norm=2) if name == "transe2" else DECODERS[name](R, D)).double()
    rows, candidates = torch.randn(5, D).double(), torch.randn(7, D).double()
    relation = torch.tensor([0, 2, 2, 1, 0])
    with torch.no_grad():
        pairs = decoder(rows, relation, candidates[:5])
        objects, subjects = (
            one(rows, relation, candidates) for one in (decoder.all_objects, decoder.all_subjects)
        )
        assert objects.shape == subjects.shape == (5, 7)
        for b, r in enumerate(relation.tolist()):
            kind = name.removesuffix("2")
            assert float(pairs[b]) == pytest.approx(
                scores_by_formula(kind, decoder, rows[b], r, candidates[b]), abs=1e-12
            )
            for c in range(7):
                right = scores_by_formula(kind, decoder, rows[b], r, candidates[c])
                assert float(objects[b, c]) == pytest.approx(right, abs=1e-12)
                left = scores_by_formula(kind, decoder, candidates[c], r, rows[b])
                assert float(subjects[b, c]) == pytest.approx(left, abs=1e-12)
        assert decoder.all_objects(rows[:0], relation[:0], candidates).shape == (0, 7)


def test_rotate_scores_pieces_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, rows, others = RotatE(R, D), torch.randn(5, D), torch.randn(4, D)
    whole = decoder.all_objects(rows, torch.tensor([0, 1, 2, 0, 1]), others)
    monkeypatch.setattr("dglx_dist.training.models._MAX_DIFFERENCES", 2 * others.numel())
    assert torch.equal(decoder.all_objects(rows, torch.tensor([0, 1, 2, 0, 1]), others), whole)


def test_gradient_is_finite_where_ends_meet() -> None:
    rows = torch.zeros(2, D, requires_grad=True)
    decoder = RotatE(1, D)
    decoder(rows, torch.zeros(2, dtype=torch.int64), rows).sum().backward()
    assert rows.grad is not None
    assert bool(rows.grad.isfinite().all())


def test_wrong_decoders_are_refused() -> None:
    for kind in (ComplEx, RotatE):
        with pytest.raises(ConfigError, match="not of width 5; make it even"):
            kind(R, 5)
    with pytest.raises(ConfigError, match="norm=3 of TransE must be 1 or 2"):
        TransE(R, D, norm=3)  # type: ignore[arg-type]


def test_losses_by_hand() -> None:
    positive, negative = torch.tensor([1.0, -2.0]).double(), torch.tensor([[0.0, 3.0], [1.0, -1.0]]).double()
    s, n = positive.numpy()[:, None], negative.numpy()
    expected = np.log(1 + np.exp(n - s)).mean()
    assert float(bpr_loss(positive, negative)) == pytest.approx(expected, abs=1e-12)
    shares = np.exp(s[:, 0]) / (np.exp(s[:, 0]) + np.exp(n).sum(1))
    assert float(softmax_loss(positive, negative)) == pytest.approx(-np.log(shares).mean(), abs=1e-12)


class Scores(torch.nn.Module):
    def forward(self, blocks: Any, rows: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        return positive, negative


def step_of(positive: Tensor, negative: Tensor) -> Any:
    task = LinkPrediction(inputs=lambda _: {}, pair_loss=softmax_loss)  # type: ignore[arg-type]
    model: Any = Scores()
    model.weight = torch.nn.Parameter(torch.zeros(1))
    return task(model, (None, positive, negative, [None]))


def test_edges_above_all_their_negatives_are_correct() -> None:
    found = step_of(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.5, 1.0, 3.0]))
    assert int(found.num_correct) == 1
    assert found.num_targets == 2
    nothing = step_of(torch.empty(0), torch.empty(0))
    assert nothing.num_targets == 0
    with pytest.raises(ConfigError, match="3 negatives of 2 edges: pair_loss needs as many of each edge"):
        step_of(torch.zeros(2), torch.zeros(3))


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


def written(folder: Any, raw: RawGraph, parts: int) -> str:
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
        f"{name}{parts}": written(root / f"{name}{parts}", raw_graph(masks=name == "masked"), parts)
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
    assert {sum(one) for one in sides["next"].values()} == {1}
    assert all(sides["back"][v, u] == side for (u, v), side in sides["next"].items())
    train, validation, test = (sum(one[k] for one in sides["next"].values()) for k in range(3))
    assert train > 4 * max(validation, test)
    assert min(validation, test) > 0


def brute_force(triples: Any, side: Any, rows: Any, decoder: Any) -> list[float]:
    """Filtered ranks of the (Q,) ``side`` of triples, of both ends, candidate by candidate."""
    known, ranks = set(map(tuple, triples.tolist())), []
    for s, r, o in triples[side].tolist():
        for asked in ("object", "subject"):
            found = []
            for candidate in range(NUM_NODES):
                triple = (s, r, candidate) if asked == "object" else (candidate, r, o)
                if triple == (s, r, o) or triple not in known:
                    score = decoder(rows[triple[0]][None], torch.tensor([r]), rows[triple[2]][None])
                    found.append((float(score), triple == (s, r, o)))
            (own,) = (score for score, is_own in found if is_own)
            others = [score for score, is_own in found if not is_own]
            ranks.append(1 + sum(x > own for x in others) + 0.5 * sum(x == own for x in others))
    return ranks


def evaluated(folder: str, name: str) -> dict[str, Any]:
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
        found = LinkEvaluation(
            g=g, targets=g.canonical_etypes, inputs=inputs, metrics=["mrr", "hits@1", "hits@3", "auc"]
        )(dx.wrap(model, g))
        triples, masks = [], []
        for number, etype in enumerate(g.canonical_etypes):
            u, v = (g.orig_ids(ends) for ends in g.find_edges(torch.arange(g.num_edges(etype)), etype))
            triples.append(torch.stack([u, torch.full_like(u, number), v], 1))
            masks.append(g.edges[etype].data["test_mask"][:].bool())
        with torch.no_grad():
            scaled = start * model.decoder.row_scale
            ranks = np.array(brute_force(torch.cat(triples), torch.cat(masks), scaled, model.decoder))
        return {"found": found, "expected": [(1 / ranks).mean(), (ranks <= 1).mean(), (ranks <= 3).mean()]}


@pytest.mark.parametrize("name", ["complex", "transe"])
def test_ranks_are_those_of_brute_force(name: str, folders: dict[str, str]) -> None:
    """Both ends, filtered by the edges of all splits; the same on two ranks with other ids."""
    (alone,) = run_ranks(evaluated, 1, args=(folders["masked1"], name))
    found = alone["found"]
    assert [found[f"test_{m}"] for m in ("mrr", "hits@1", "hits@3")] == pytest.approx(
        alone["expected"], abs=1e-12
    )
    assert found["val_mask"] == found["val_mrr"]
    assert 0 < found["test_auc"] < 1
    for rank in run_ranks(evaluated, 2, args=(folders["masked1"], name), ranks_per_server=2):
        assert rank["found"] == pytest.approx(found, abs=1e-12)
    for rank in run_ranks(evaluated, 3, args=(folders["masked2"], name), ranks_per_server=2):
        ranked = {key: value for key, value in rank["found"].items() if not key.endswith("auc")}
        assert ranked == pytest.approx({key: found[key] for key in ranked}, abs=1e-12)


def test_names_of_metrics() -> None:
    assert [check_link_metric(name) for name in ("mrr", "auc", "hits@10")] == [None, None, 10]
    for name in ("hits@0", "hits@", "accuracy"):
        with pytest.raises(ConfigError, match="must be mrr, auc or hits@K, like hits@10"):
            check_link_metric(name)


def fitted(folder: str, kind: str) -> list[float]:
    """Losses and test MRR of a SAGE encoder on features (``sage``), or of TransE on trainable rows."""
    with dx.init(seed=3, timeout=60):
        g = dx.DistGraph(folder)
        etypes = g.canonical_etypes
        split_edges(g, etypes)
        torch.manual_seed(1)
        rows = dx.DistEmbedding(NUM_NODES, D, "rows", dtype=torch.float64, graph=g)
        inputs = EntityInputs(g, embeddings={"_N": rows})
        model = LinkModel(None, DECODERS[kind](len(etypes), D), etypes).double()
        evaluation = LinkEvaluation(g=g, targets=etypes, inputs=inputs)
        loader = dx.DistEdgeDataLoader(
            g,
            {etype: dx.edge_split(g.edges[etype].data["train_mask"], etype=etype) for etype in etypes},
            dgl.dataloading.NeighborSampler([0]),
            negative_sampler=dx.negative.Uniform(2, "both"),
            batch_size=1000,
        )
        config = FitConfig(
            epochs=15,
            task=LinkPrediction(inputs=inputs, pair_loss=softmax_loss),
            evaluate=evaluation,
            show_progress=False,
        )
        sparse = dx.optim.SparseAdam([rows], lr=0.2)
        _, result = dx.fit(model, g, config=config, loader=loader, sparse=sparse, lr=0.1)
        return [record.loss for record in result.epochs] + [result.accuracy["test_mask"]]


def test_training_is_the_same_on_one_and_two_ranks(folders: dict[str, str]) -> None:
    (alone,) = run_ranks(fitted, 1, args=(folders["masked1"], "transe"))
    assert alone[-2] < 0.7 * alone[0]
    for rank in run_ranks(fitted, 2, args=(folders["masked1"], "transe"), ranks_per_server=2):
        assert rank == pytest.approx(alone, abs=1e-6)
