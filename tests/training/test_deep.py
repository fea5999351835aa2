"""ResGCN+ on the graph 0 -> 2, 1 -> 2, 2 -> 0, and on ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dgl
import pytest
import torch
from torch import Tensor

from dglx_dist.cli.train_job import train_dataset
from dglx_dist.errors import ConfigError, UnknownNameError
from dglx_dist.training.config import TrainConfig
from dglx_dist.training.models import build_resgcn, check_kind
from tests.helpers.ranks import run_ranks

WIDTH, HIDDEN, CLASSES = 5, 8, 3


def graph() -> Any:
    return dgl.graph((torch.tensor([0, 1, 2]), torch.tensor([2, 2, 0])), num_nodes=3)


def blocks(count: int) -> list[Any]:
    return [dgl.to_block(graph(), torch.arange(3), include_dst_in_src=True) for _ in range(count)]


def model_of(layers: int, **options: Any) -> Any:
    torch.manual_seed(0)
    return build_resgcn(WIDTH, HIDDEN, CLASSES, layers, **options).double()


def rows() -> Tensor:
    return torch.linspace(-1, 2, 3 * WIDTH, dtype=torch.float64).reshape(3, WIDTH)


def test_one_layer_by_hand() -> None:
    model = model_of(1, dropout=0.0)
    conv, (first, last) = model.layers[0], model.norms
    h = model.encoder(rows())
    x = torch.relu(first(h))
    mean = torch.stack([x[2], torch.zeros(HIDDEN, dtype=torch.float64), (x[0] + x[1]) / 2])
    h = h + conv.fc_self(x) + conv.fc_neigh(mean)
    expected = model.decoder(torch.relu(last(h)))
    torch.testing.assert_close(model(blocks(1), rows()), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("conv", ["sage", "gcn"])
def test_one_graph_stands_for_all_blocks(conv: str) -> None:
    model = model_of(4, dropout=0.0, conv=conv)
    torch.testing.assert_close(model(graph(), rows()), model(blocks(4), rows()), rtol=0, atol=1e-12)


def gradients(recompute: str, layers: int = 6) -> list[Tensor]:
    model = model_of(layers, dropout=0.5, recompute=recompute)
    torch.manual_seed(3)
    model(blocks(layers), rows()).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("recompute", ["exchange", "keep"])
def test_recomputing_changes_no_gradient(recompute: str) -> None:
    for got, expected in zip(gradients(recompute), gradients("none"), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def bytes_saved(recompute: str, layers: int = 28) -> int:
    model, total = model_of(layers, dropout=0.5, recompute=recompute), 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal total
        total += tensor.numel() * tensor.element_size() * (tensor.data_ptr() not in weights)
        return tensor

    weights = {parameter.data_ptr() for parameter in model.parameters()}
    x = rows().repeat(100, 1)
    many = dgl.batch([graph()] * 100)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        model(many, x)
    return total


def test_recomputing_keeps_the_inputs_of_layers_only() -> None:
    """28 layers of 300 rows of 8 float64: one tensor of 19,200 bytes each, where there were several."""
    assert bytes_saved("exchange") < bytes_saved("none") / 4


class Peer:
    """Another rank, as a block sees it: its rows, 2 of width H, come when they are asked for."""

    def __init__(self) -> None:
        self.asked: list[Tensor | None] = []

    def all_rows(self, h: Tensor, kept: Tensor | None = None) -> Tensor:
        if len(h) == 5:
            return h
        self.asked.append(kept)
        halo = torch.full((2, h.shape[1]), float(len(self.asked)), dtype=h.dtype) if kept is None else kept
        return torch.cat([h, halo])


def block_with_halo(peer: Peer) -> Any:
    """0 and 1 take from rows 3 and 4 of another rank, 2 from 0."""
    ends = torch.tensor([3, 4, 0]), torch.tensor([0, 1, 2])
    block = dgl.create_block(ends, num_src_nodes=5, num_dst_nodes=3)
    block.all_rows = peer.all_rows
    return block


def test_kept_rows_are_asked_for_once() -> None:
    """Were they asked for again, other ones would come and torch would not notice."""
    peer = Peer()
    model = model_of(3, dropout=0.5, recompute="keep")
    out = model([block_with_halo(peer) for _ in range(3)], rows())
    assert [kept is None for kept in peer.asked] == [True] * 3
    out.sum().backward()
    again = peer.asked[3:]
    assert len(again) == 3
    # Backward starts with the last layer.
    assert [float(kept[0, 0]) for kept in again if kept is not None] == [3.0, 2.0, 1.0]


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="recompute='all' must be one of none, exchange, keep"):
        model_of(2, recompute="all")
    with pytest.raises(ConfigError, match="layers=0"):
        model_of(0)
    with pytest.raises(ConfigError, match="conv='gat'"):
        model_of(2, conv="gat")
    with pytest.raises(UnknownNameError, match="did you mean 'resgcn'"):
        check_kind("resgnc")


def _train(folder: str, out: str) -> list[float]:
    plan = TrainConfig(
        data=folder, out=out, model="resgcn", layers=6, hidden=8, fanouts=(-1,) * 6, epochs=3,
        batch_size=200, dropout=0.0, recompute="exchange", save_embeddings=f"{out}-rows",
    )  # fmt: skip
    return [epoch.loss for epoch in train_dataset(plan).epochs]


def test_a_run_of_the_command_line(dataset: str, tmp_path: Path) -> None:
    (losses,) = run_ranks(_train, 1, args=(dataset, str(tmp_path / "run")))
    assert losses[-1] < losses[0]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["recompute"] == "exchange"
