"""Optimisers of embeddings against torch's in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dglx_dist.comm.session import start_session
from dglx_dist.graph.dist_graph import DistGraph
from tests.graph.sparse_cases import DIM, KINDS, STEPS, embeddings, expected, make_optimizer, train
from tests.helpers import wide
from tests.helpers.ranks import run_ranks


def train_all_kinds(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with start_session(seed=3) as session:
        g = DistGraph(folder)
        for kind in KINDS:
            embed = embeddings(g, kind)
            before = [e.weight.to_local() for e in embed]
            optimizer = make_optimizer(kind, embed)
            g.barrier()
            snapshot = session.ledger.snapshot()
            train(g, embed, optimizer, range(STEPS))
            sent = [row for row in session.ledger.since(snapshot) if row.phase == "sparse_gradients"]
            untouched = [state[30:] for e in embed for state in e.optm_state]
            found[kind] = {
                "before": [rows.tolist() for rows in before],
                "after": [e.weight.to_local().tolist() for e in embed],
                "untouched_state": sum(float(rows.abs().sum()) for rows in untouched),
                "sent": sum(row.num_bytes for row in sent),
            }
            g.barrier()
    return found


@pytest.mark.parametrize(("ranks", "per_server"), [(1, 1), (2, 1), (4, 2), *wide((2, 2), (3, 3))])
def test_equal_to_torch_on_one_process(small_dataset: Path, ranks: int, per_server: int) -> None:
    results = run_ranks(train_all_kinds, ranks, args=(small_dataset,), ranks_per_server=per_server)
    for kind in KINDS:
        before = [torch.tensor(rows, dtype=torch.float64) for rows in results[0][kind]["before"]]
        reference = expected(kind, before, ranks)
        for result in results:
            for first, wanted, rows in zip(before, reference, result[kind]["after"], strict=True):
                after = torch.tensor(rows, dtype=torch.float64)
                torch.testing.assert_close(after, wanted, rtol=0, atol=1e-10)
                assert torch.equal(after[30:], first[30:])
                assert not torch.equal(after[:30], first[:30])
            assert result[kind]["untouched_state"] == 0.0
        assert ranks == 1 or sum(result[kind]["sent"] for result in results) > 0
    assert DIM == 3
