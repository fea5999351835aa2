"""A wrong argument on one rank of a collective call is an error on all ranks, and the run goes on."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import dglx_dist as dx
from dglx_dist.comm.session import start_session
from dglx_dist.graph.analysis import reverse_edge_ids
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.training import metrics
from tests.graph import small
from tests.helpers.ranks import run_ranks

Calls = dict[str, tuple[Callable[[], Any], Callable[[], Any]]]
"""From the name of a call to (the call of the right ranks, the call of the wrong rank)."""


def refuse(*_: object) -> None:
    raise ValueError("refused by the handler")


def embedding(**wrong: Any) -> dx.DistEmbedding:
    inputs: dict[str, Any] = {"num_embeddings": small.NUM_NODES, "embedding_dim": 3, "name": "new"}
    return dx.DistEmbedding(**(inputs | wrong))


def calls(g: DistGraph, folder: str) -> Calls:
    trained = embedding(name="trained")
    rows = dx.DistTensor((small.NUM_NODES, 2), torch.float32, "rows")
    refused = dx.DistTensor((small.NUM_NODES, 2), torch.float32, "refused")
    g.kvstore.register_push_handler(refused.kvstore_key, refuse)
    ones, session = torch.ones(3), g.session
    adam = partial(dx.optim.SparseAdam, params=[trained], lr=0.1)
    by_degree = partial(g.cache_rows, "feat", alpha=0.5, policy="degree")
    by_access = partial(g.cache_rows, "feat", alpha=0.5, fanouts=[2], batch_size=2)
    reverse = partial(reverse_edge_ids, g)
    written = partial(dx.write_embeddings, rows=rows, g=g, folder=f"{folder}/out")
    handled = partial(g.kvstore.register_push_handler, handler=None)
    saved, optimizer = f"{folder}/saved", adam()
    rows.save(f"{saved}/rows")
    optimizer.save(f"{saved}/adam")

    def unheard(then: Callable[[], Any]) -> Callable[[], Any]:
        def push_and_go_on() -> None:
            of_others = torch.ones(small.NUM_NODES, dtype=torch.bool)
            of_others[slice(*refused.local_range)] = False
            refused.push(of_others, torch.ones(1, 2), wait=False)
            then()

        return push_and_go_on

    wrongly: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        (embedding, {"dtype": torch.int32}),
        (embedding, {"embedding_dim": 0}),
        (embedding, {"embedding_dim": "three"}),
        (embedding, {"num_embeddings": small.NUM_NODES + 1}),
        (adam, {"lr": -1}),
        (adam, {"lr": "much"}),
        (adam, {"betas": (2,)}),
        (adam, {"mode": "neither"}),
        (adam, {"mode": "async", "staleness": -1}),
        (adam, {"params": None}),
        (adam, {"params": [ones]}),
        (by_degree, {"ntype": "nobody"}),
        (by_access, {"fanouts": 5}),
        (written, {"folder": None}),
        (written, {"name": "\ud800"}),
    ]
    results: Calls = {f"{call}, {wrong}": (call, partial(call, **wrong)) for call, wrong in wrongly}
    results |= {
        "export: a push that failed": (written, unheard(written)),
        "a push that failed before a barrier": (g.barrier, unheard(g.barrier)),
        "a push that failed before closing": (g.close, unheard(g.close)),
        **{
            f"{label}: folder": (partial(call, f"{saved}/{name}"), partial(call, None))
            for label, name, call in (
                ("saving a tensor", "rows", rows.save),
                ("loading a tensor", "rows", rows.load),
                ("saving an optimiser", "adam", optimizer.save),
                ("loading an optimiser", "adam", optimizer.load),
            )
        },
        "reverse edges: type": (reverse, partial(reverse, etype="sells")),
        "reverse edges: by": (reverse, partial(reverse, by="name")),
        "handler: name": (partial(handled, rows.kvstore_key), partial(handled, [])),
    }
    for metric, right, wrong_one in (
        (metrics.hits_at, (3, ones), (0, ones)),
        (metrics.roc_auc, (ones, ones), (ones, torch.ones(4))),
        (metrics.f1, (ones.long(), ones.long(), 2), (ones.long(), ones.long(), 1)),
        (metrics.rmse, (ones, ones), (ones, ones[:, None])),
        (metrics.accuracy, (ones, ones), (ones, torch.ones(4))),
    ):
        results[str(metric)] = partial(metric, *right, session), partial(metric, *wrong_one, session)
    return results


def call_all(folder: str) -> list[str]:
    with start_session(timeout_s=20) as session:
        g = DistGraph(f"{folder}/data")
        missed = []
        for number, (name, pair) in enumerate(calls(g, folder).items()):
            wrong, started = number % 2 == session.topology.rank, time.monotonic()
            try:
                pair[wrong]()
                missed.append(f"{name}: no error")
            except dx.PeerError as error:
                missed.append(f"{name}: {error}")
            except (dx.DglxError, TypeError) as error:
                if not wrong and not str(error).startswith("rank "):
                    missed.append(f"{name}: {error}")
            if time.monotonic() - started > 10:
                missed.append(f"{name}: slow")
        g.barrier()
        return missed


def test_all_ranks_hear_of_it_and_go_on(tmp_path: Path) -> None:
    small.write(small.build(), tmp_path / "data")
    assert run_ranks(call_all, 2, args=(str(tmp_path),), ranks_per_server=1) == [[], []]
