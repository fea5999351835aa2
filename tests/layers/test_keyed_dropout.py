"""Keyed masks: any cut gives the uncut mask, and every batch another."""

from __future__ import annotations

from dataclasses import replace

import dgl
import pytest
import torch
from dgl.nn import GATConv, GATv2Conv, SAGEConv
from torch import Tensor, nn

from dglx_dist.errors import ConfigError
from dglx_dist.layers.base import StageInput, Sync, part_of, stages_of
from dglx_dist.layers.dropout import (
    Columns,
    DropDraws,
    deal_out_columns,
    deal_out_concatenated,
    drop_attention,
    drop_entries,
    kept_entries,
)
from tests.layers.test_splittable_conv import add_up, block_and_rows, close

NODES = torch.randperm(10_000, generator=torch.Generator().manual_seed(0))[:400]


def all_columns(width: int) -> tuple[Columns, ...]:
    return deal_out_columns(width, 1)


def mask(runs: tuple[Columns, ...], number: int = 3, nodes: Tensor = NODES, **other: int) -> Tensor:
    return kept_entries(other.get("seed", 7), number, other.get("stream", 1 << 32), nodes, runs, 0.3)


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_parts_have_the_columns_of_the_whole_mask(parts: int) -> None:
    whole = mask(all_columns(9))
    cut = [mask((columns,)) for columns in deal_out_columns(9, parts)]
    assert torch.equal(torch.cat(cut, 1), whole)
    for runs in deal_out_concatenated([5, 4], parts):
        assert torch.equal(mask(runs), torch.cat([whole[:, run.cut] for run in runs], 1))


def test_a_node_drops_the_same_wherever_it_stands() -> None:
    order = torch.randperm(len(NODES), generator=torch.Generator().manual_seed(1))
    assert torch.equal(mask(all_columns(9), nodes=NODES[order]), mask(all_columns(9))[order])


@pytest.mark.parametrize("other", [{"number": 4}, {"seed": 8}, {"stream": 1 << 33}])
def test_other_batches_seeds_and_modules_drop_other_entries(other: dict[str, int]) -> None:
    """Two independent masks that keep 0.7 agree on 0.58 of the entries."""
    agreed = (mask(all_columns(100)) == mask(all_columns(100), **other)).double().mean()
    assert abs(agreed - 0.58) < 0.01


def test_entries_are_kept_as_often_as_said_and_their_mean_stays() -> None:
    """40,000 draws: 5 standard deviations of the share are 0.0115."""
    x = torch.ones(400, 100, dtype=torch.float64)
    draws = DropDraws(seed=0, number=0, nodes=NODES, runs=all_columns(100))
    for probability in (0.1, 0.5, 0.9):
        out = drop_entries(x, probability, draws)
        kept = out != 0
        assert abs(kept.double().mean() - (1 - probability)) < 0.0125
        assert out[kept].unique().tolist() == [1 / (1 - probability)]
        for side in (0, 1):
            share = kept.double().mean(side)
            assert share.min() < 1 - probability < share.max()
    assert drop_entries(x, 0.0, draws) is x
    assert not drop_entries(x, 1.0, draws).any()


def test_half_precision_and_no_columns() -> None:
    draws = DropDraws(seed=0, number=0, nodes=NODES, runs=(Columns(first=4, last=4, width=4),))
    out = drop_entries(torch.ones(400, 0, dtype=torch.float16), 0.5, draws)
    assert (out.shape, out.dtype) == ((400, 0), torch.float16)


@pytest.mark.parametrize(
    ("name", "sync"),
    [
        ("sage", "columns"),
        ("sage-gcn", "columns"),
        ("gat", "columns"),
        ("gat", "inputs"),
        ("gatv2", "inputs"),
        ("pool", "inputs"),
    ],
)
def test_parts_drop_what_one_part_drops(name: str, sync: Sync) -> None:
    """Outputs and gradients of the parts, attention dropped too, are those of one part with all columns."""
    conv = {
        "sage": lambda: SAGEConv(7, 5, "mean", feat_drop=0.4),
        "sage-gcn": lambda: SAGEConv(7, 9, "gcn", feat_drop=0.4),
        "gat": lambda: GATConv(7, 5, 2, feat_drop=0.4, attn_drop=0.3 if sync == "columns" else 0.0),
        "gatv2": lambda: GATv2Conv(7, 5, 2, feat_drop=0.4),
        "pool": lambda: SAGEConv(7, 5, "pool", feat_drop=0.4),
    }[name]()
    staged = stages_of(conv.double(), sync)
    block, x, _ = block_and_rows(7)
    nodes = NODES[: len(x)]
    found, gradients = [], []
    for parts in (1, 2, 3, 4):
        cuts = deal_out_columns(7, parts)
        layers = [part_of(staged, [columns]) for columns in cuts]
        given = [
            StageInput(
                block=block,
                x=x[:, columns.cut],
                edges={},
                draws=DropDraws(seed=1, number=2, nodes=nodes, runs=(columns,)),
            )
            for columns in cuts
        ]
        rows = [layer.transform(one) for layer, one in zip(layers, given, strict=True)]
        logits = add_up([a.scatter(b, c) for a, b, c in zip(layers, given, rows, strict=True)])
        sums = add_up([a.gather(b, c, logits) for a, b, c in zip(layers, given, rows, strict=True)])
        out = layers[0].apply_edges(given[0], sums)
        out.cos().sum().backward()
        found.append(out)
        weight = next(iter(staged.cut))
        pieces = [layer.get_parameter(weight).grad for layer in layers]
        gradients.append(torch.cat([piece for piece in pieces if piece is not None], 1))
    for out, gradient in zip(found[1:], gradients[1:], strict=True):
        close(out, found[0])
        close(gradient, gradients[0])
    undropped = staged.eval()(block, x)
    assert (undropped - found[0]).abs().max() > 1e-2
    quiet = replace(given[0], x=x, draws=replace(given[0].draws, runs=all_columns(7)))  # type: ignore[type-var,arg-type]  # set above
    close(staged.apply_edges(quiet, staged.sync(quiet)), undropped)


def test_alone_a_layer_drops_as_torch_does() -> None:
    block, x, _ = block_and_rows(7)
    for conv in (SAGEConv(7, 5, "mean", feat_drop=0.4), GATConv(7, 5, 2, feat_drop=0.4, attn_drop=0.3)):
        staged = stages_of(conv.double())
        torch.manual_seed(5)
        expected = conv(block, x)
        torch.manual_seed(5)
        close(staged(block, x), expected)


def test_without_draws_a_part_among_others_refuses_to_drop() -> None:
    block, x, _ = block_and_rows(7)
    staged = stages_of(SAGEConv(7, 5, "mean", feat_drop=0.4).double())
    staged.run_parts = lambda layer, given: layer.gather(given, layer.transform(given), ())
    with pytest.raises(ConfigError, match=r"drops with probability 0\.4 .*data_parallel"):
        staged(block, x)
    staged.eval()(block, x)


def test_attention_is_dropped_by_destination_and_place_not_by_number_of_the_edge() -> None:
    """A part numbers the edges as the matrix has them, the owner as it likes: the same edges are dropped."""
    block, _, _ = block_and_rows(7)
    nodes = NODES[: block.num_src_nodes()]
    draws = DropDraws(seed=0, number=0, nodes=nodes, runs=())
    ones = torch.ones(block.num_edges(), 2, 1)
    owners = drop_attention(block, ones, 0.5, draws)
    indptr, indices, edge_ids = block.adj_tensors("csc")
    assert not torch.equal(edge_ids, torch.arange(len(edge_ids)))
    part = dgl.create_block(("csc", (indptr, indices, [])), block.num_src_nodes(), block.num_dst_nodes())
    assert torch.equal(drop_attention(part, ones, 0.5, draws), owners[edge_ids])
    assert 0.3 < (owners != 0).double().mean() < 0.7
    assert drop_attention(part, ones, 0.0, draws) is ones


def test_it_is_a_module_s_mask_that_the_gradient_sees() -> None:
    x = nn.Parameter(torch.randn(400, 9, dtype=torch.float64))
    draws = DropDraws(seed=7, number=3, nodes=NODES, runs=all_columns(9))
    drop_entries(x, 0.3, draws).sum().backward()
    close(x.grad, mask(all_columns(9)).double() / 0.7)
