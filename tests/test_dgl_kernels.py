"""Operators of DGL on graphs without edges, corrected."""

import dgl
import dgl.function as fn
import pytest
import torch

from dglx_dist.internals.cpu_kernels import correct_kernels


@pytest.mark.parametrize("how", ["max", "min", "sum"])
@pytest.mark.parametrize("num_src", [3, 0])
def test_reductions_of_no_edges_are_zeros_without_gradient(how: str, num_src: int) -> None:
    correct_kernels()
    none = torch.empty(0, dtype=torch.int64)
    block = dgl.create_block((none, none), num_src_nodes=num_src, num_dst_nodes=2)
    rows = torch.ones(num_src, 4, requires_grad=True)
    block.srcdata["h"] = rows
    block.update_all(fn.copy_u("h", "m"), getattr(fn, how)("m", "h"))
    (block.dstdata["h"] + 1).sum().backward()
    assert torch.equal(block.dstdata["h"], torch.zeros(2, 4))
    assert rows.grad is not None
    assert not rows.grad.any()
