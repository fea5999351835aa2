"""Norms, sums and checks for infinity of pieces of gradients are those of the uncut gradient."""

import copy
import io
import math

import pytest
import torch
from torch import Tensor, nn

from dglx_dist.comm.session import start_session
from dglx_dist.errors import ConfigError
from dglx_dist.strategies.push_pull.exchange import CutGradient
from tests.helpers.ranks import run_ranks


def check_pieces(columns: tuple[int, ...]) -> None:
    """Compare with the uncut gradient, of which rank 0 has the first ``columns[0]`` columns, and so on."""
    with start_session(timeout_s=30) as session:
        rank, random = session.topology.rank, torch.Generator().manual_seed(1)
        uncut = torch.randn(4, sum(columns), generator=random, dtype=torch.float64) - 3.0
        own = torch.split(uncut, columns, dim=1)[rank]
        piece = CutGradient.wrap(own.clone(), session, len(columns))
        for order in (1.0, 2.0, 3.5, math.inf):
            assert_equal(piece.norm(order), uncut.norm(order))
            assert_equal(torch.linalg.vector_norm(piece.detach(), order), uncut.norm(order))
            dense = nn.Parameter(torch.zeros_like(own))
            dense.grad = CutGradient.wrap(own.clone(), session, len(columns))
            assert_equal(nn.utils.clip_grad_norm_([dense], 0.5, order, foreach=True), uncut.norm(order))
            assert_equal(torch._foreach_norm([piece, uncut], ord=order)[1], uncut.norm(order))
        assert_equal(torch.norm(piece.data), uncut.norm())
        assert_equal((piece**2).sum(), (uncut**2).sum())
        assert_equal(piece.max(), uncut.max())
        assert_equal(piece.abs().max(), uncut.abs().max())
        with pytest.raises(ConfigError, match="must be above 0"):
            piece.norm(0)
        # Sums over rows or columns, copies and files are of the piece.
        assert torch.equal(piece.sum(0), own.sum(0))
        torch.save(copy.deepcopy(piece), io.BytesIO())
        torch.save(piece, io.BytesIO())
        sparse = torch.sparse_coo_tensor([[0, 2, 3]], own[[0, 2, 3]], own.shape, check_invariants=True)
        weight = nn.Parameter(torch.zeros_like(own))
        weight.grad = CutGradient.wrap(sparse.coalesce(), session, len(columns))
        total = nn.utils.clip_grad_norm_([weight], 0.5)
        assert_equal(total, uncut[[0, 2, 3]].norm())
        if rank == 0:
            weight.grad._values()[0, 0] = math.inf
        optimizer, scaler = torch.optim.SparseAdam([weight]), torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.zeros(()))
        scaler.step(optimizer)
        scaler.update()
        assert not weight.any()
        assert scaler.get_scale() == 2.0


def assert_equal(value: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(torch.as_tensor(value), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("columns", [(3, 2), (2, 0), (1, 1, 0)])
def test_norms_and_infinities_of_pieces_are_those_of_the_uncut_gradient(columns: tuple[int, ...]) -> None:
    run_ranks(check_pieces, len(columns), args=(columns,))
