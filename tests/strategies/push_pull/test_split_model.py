"""The whole model from its parts: joined, split, copied, and the norm of its gradients."""

from __future__ import annotations

import copy
import math
from typing import Any

import dgl
import pytest
import torch
from torch import Tensor, nn

from dglx_dist.comm.session import Session, Shared, start_session
from dglx_dist.errors import ConfigError
from dglx_dist.layers.base import cut_out, part_of
from dglx_dist.layers.convolutions import stages_of
from dglx_dist.layers.dropout import deal_out_concatenated
from dglx_dist.strategies.push_pull.exchange import make_group
from dglx_dist.strategies.push_pull.split_model import PHASE, Cut, CutState, without_weights
from tests.helpers.ranks import run_ranks

WIDTHS, HIDDEN = (3, 2), 4
WIDTH = sum(WIDTHS)


class Knows(Shared):
    """Stands for a graph, which must not be copied."""

    def degrees(self) -> None: ...


class Net(nn.Module):
    """A norm and a convolution that are cut, a convolution that is not, and things a user keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first = dgl.nn.SAGEConv(WIDTH, HIDDEN, "mean", norm=nn.LayerNorm(HIDDEN))
        self.second = dgl.nn.SAGEConv(HIDDEN, 2, "mean")
        self.graph = (Knows().degrees,)
        self.seen: Tensor | None = None

    def forward(self, block: Any, h: Tensor) -> Tensor:
        self.seen = self.first(block, self.norm(h))
        out: Tensor = self.second(block, self.seen)
        return out


class PartNorm(nn.Module):
    """What may stand in the place of a norm."""

    def __init__(self, norm: nn.LayerNorm, runs: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(cut_out(norm.weight.detach(), runs, 0))
        self.bias = nn.Parameter(cut_out(norm.bias.detach(), runs, 0))


def split(session: Session, size: int) -> tuple[nn.Module, CutState, dict[str, Tensor]]:
    """Return a part, its state, and the weights of the uncut model."""
    torch.manual_seed(5)
    net = Net().double()
    uncut = {name: value.clone() for name, value in net.state_dict().items()}
    group = make_group(session, size)
    runs = deal_out_concatenated(WIDTHS, size)
    whole = stages_of(net.first)
    cuts = {
        f"first.{name}": Cut(shape=tuple(uncut[f"first.{name}"].shape), dimension=dimension, runs=runs)
        for name, dimension in whole.cut.items()
    } | {f"norm.{name}": Cut(shape=(WIDTH,), dimension=0, runs=runs) for name in ("weight", "bias")}
    originals = {
        "first": without_weights(net.first, whole.cut),
        "norm": without_weights(net.norm, ("weight", "bias")),
    }
    net.norm = PartNorm(net.norm, runs[group.part])
    net.first = part_of(whole, runs[group.part])
    net.eval()
    return net, CutState(session, group, cuts, originals), uncut


def check_joining(session: Session, size: int) -> None:
    net, state, uncut = split(session, size)
    joined = net.state_dict(prefix="a.")
    state.join_all(joined, "a.")
    assert joined.keys() == {f"a.{name}" for name in uncut}
    assert all(torch.equal(joined[f"a.{name}"], value) for name, value in uncut.items())
    assert hasattr(joined, "_metadata")
    pieces = net.state_dict()
    for name, value in uncut.items():
        assert torch.equal(state.cut(name, value), pieces[name])
    steps = torch.tensor(3.0)
    assert state.join("first.fc_neigh.weight", steps) is steps
    assert state.cut("first.fc_neigh.weight", steps) is steps
    loaded = state.cut_all({name: value + 1 for name, value in uncut.items()})
    net.load_state_dict(loaded)
    again = net.state_dict()
    state.join_all(again)
    assert all(torch.equal(again[name], value + 1) for name, value in uncut.items())
    if size > 1:
        with pytest.raises(RuntimeError, match=r"first\.fc_neigh\.weight.*uncut shape .*\(4, 5\)"):
            state.cut_all(pieces)


def check_whole(session: Session, size: int) -> None:
    net, state, uncut = split(session, size)
    graph = dgl.create_block(([0, 1, 2, 2], [0, 0, 1, 2]), num_src_nodes=3, num_dst_nodes=3)
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    plain = Net().double().eval()
    plain.load_state_dict(uncut)
    net.seen = net.second.fc_self.weight * 2  # type: ignore[operator]  # a result with a history
    whole = state.whole(net)
    assert type(whole) is Net
    assert type(whole.first) is dgl.nn.SAGEConv
    assert type(whole.norm) is nn.LayerNorm
    assert not any(module.training for module in whole.modules())
    assert torch.equal(whole(graph, x), plain(graph, x))
    assert whole.graph[0].__self__ is net.graph[0].__self__  # type: ignore[index, union-attr]
    # A copy: training the parts does not reach it, and it shares nothing with the next.
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    assert torch.equal(whole(graph, x), plain(graph, x))
    assert not any(parameter.any() for parameter in state.whole(net).parameters())
    net.lock = copy  # type: ignore[assignment]  # a module of Python's, which nothing can copy
    with pytest.raises(ConfigError, match="cannot be copied"):
        state.whole(net)


def check_clipping(session: Session, size: int) -> None:
    uncut = split(session, size)[2]
    random = torch.Generator().manual_seed(2)
    gradients = {
        name: torch.randn(value.shape, generator=random, dtype=torch.float64) for name, value in uncut.items()
    }
    for norm_type in (1.0, 2.0, 3.5, math.inf):
        net, state, _ = split(session, size)
        plain = Net().double()
        for name, parameter in plain.named_parameters():
            parameter.grad = gradients[name].clone()
        for name, parameter in net.named_parameters():
            parameter.grad = state.cut(name, gradients[name]).clone()
        for bound in (0.5, 1e6):
            expected = nn.utils.clip_grad_norm_(plain.parameters(), bound, norm_type)
            found = state.clip_grad_norm_(net.named_parameters(), bound, norm_type)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
            assert len(set(_everyone(found, session))) == 1
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            own = dict(net.named_parameters())[name].grad
            torch.testing.assert_close(own, state.cut(name, parameter.grad), rtol=1e-12, atol=0)
    net, state, _ = split(session, size)
    assert state.clip_grad_norm_(net.named_parameters(), 1.0, 2.0) == 0
    net.norm.bias.grad = torch.full_like(net.norm.bias, math.nan)  # type: ignore[arg-type, union-attr]
    assert state.clip_grad_norm_(net.named_parameters(), 1.0, math.inf).isnan()
    with pytest.raises(ConfigError, match="norm_type=0"):
        state.clip_grad_norm_(net.named_parameters(), 1.0, 0)
    weight = nn.Parameter(torch.zeros(3, 2))
    weight.grad = torch.sparse_coo_tensor([[1, 1]], [[3.0, 0.0], [0.0, 4.0]], (3, 2), check_invariants=True)
    assert state.clip_grad_norm_([("rows", weight)], 1.0, 2.0) == 5
    torch.testing.assert_close(weight.grad.to_dense()[1], torch.tensor([0.6, 0.8]))


def _everyone(value: Tensor, session: Session) -> list[float]:
    from dglx_dist.comm.collectives import gather_json

    return [float(str(one)) for one in gather_json(float(value), session)]


def on_rank(sizes: tuple[int, ...]) -> int:
    with start_session(timeout_s=30) as session:
        for size in sizes:
            check_joining(session, size)
            check_whole(session, size)
            check_clipping(session, size)
        before = session.ledger.snapshot()
        net, state, _ = split(session, sizes[-1])
        state.join("first.fc_self.weight", net.first.fc_self.weight)  # type: ignore[union-attr, arg-type]
        moved = [row for row in session.ledger.since(before) if row.phase == PHASE]
        return sum(row.num_bytes for row in moved)


def test_one_rank() -> None:
    assert run_ranks(on_rank, 1, args=((1,),)) == [0]


def test_two_ranks_alone_and_as_replicas() -> None:
    # One column of the first feature and one of the second go to the second rank, 3 to the first.
    assert run_ranks(on_rank, 2, args=((1, 2),)) == [3 * HIDDEN * 8, 2 * HIDDEN * 8]


def test_four_ranks_of_which_the_last_has_no_columns() -> None:
    # (1, 1, 1, 0) columns of the first feature and (1, 1, 0, 0) of the second.
    columns = (2, 2, 1, 0)
    assert run_ranks(on_rank, 4, args=((2, 4),)) == [3 * HIDDEN * 8 * count for count in columns]
