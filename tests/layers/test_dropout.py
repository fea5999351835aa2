"""Dropout with masks keyed by node and edge."""

import copy
import gc
from typing import Any

import dgl
import pytest
import torch
from dgl.nn import GATConv, SAGEConv
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dglx_dist.errors import ConfigError
from dglx_dist.layers import dropout, masks
from dglx_dist.layers.convolutions import make_stages
from dglx_dist.layers.dropout import (
    ColumnRange,
    DropDraws,
    NodeDropout,
    deal_out_columns,
    deal_out_concatenated,
    draw_kept_entries,
    drop_attention,
    drop_entries,
    has_rows,
    install_node_dropouts,
)
from tests.layers.test_convolutions import block_and_rows, close, part_of, run_parts, summed_gradient

NODES = torch.randperm(10_000, generator=torch.Generator().manual_seed(0))[:400]


def all_columns(width: int) -> tuple[ColumnRange, ...]:
    return deal_out_columns(width, 1)


def mask(runs: tuple[ColumnRange, ...], number: int = 3, **other: int) -> Tensor:
    return draw_kept_entries(other.get("seed", 7), number, other.get("stream", 1 << 32), NODES, runs, 0.3)


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_parts_have_the_columns_of_the_uncut_mask(parts: int) -> None:
    full = mask(all_columns(9))
    cut = [mask((columns,)) for columns in deal_out_columns(9, parts)]
    assert torch.equal(torch.cat(cut, 1), full)
    for runs in deal_out_concatenated([5, 4], parts):
        assert torch.equal(mask(runs), torch.cat([full[:, run.cut] for run in runs], 1))


@pytest.mark.parametrize("other", [{"number": 4}, {"seed": 8}, {"stream": 1 << 33}])
def test_other_batches_seeds_and_modules_drop_other_entries(other: dict[str, int]) -> None:
    """Two independent masks that keep 0.7 agree on 0.58 of the entries."""
    agreed = (mask(all_columns(100)) == mask(all_columns(100), **other)).double().mean()
    assert abs(agreed - 0.58) < 0.01


def test_entries_are_kept_with_the_given_probability_and_their_mean_stays() -> None:
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
    assert not drop_entries(x, 1.0, draws).any()
    none = DropDraws(seed=0, number=0, nodes=NODES, runs=(ColumnRange(first=4, last=4, width=4),))
    out = drop_entries(torch.ones(400, 0, dtype=torch.float16), 0.5, none)
    assert (out.shape, out.dtype) == ((400, 0), torch.float16)


@pytest.mark.parametrize(
    "conv",
    [
        SAGEConv(7, 5, "mean", feat_drop=0.4),
        SAGEConv(7, 9, "gcn", feat_drop=0.4),
        GATConv(7, 5, 2, feat_drop=0.4, attn_drop=0.3),
        GATConv(7, 5, 2, attn_drop=0.3),
    ],
)
def test_parts_drop_the_same_entries_as_one_part(conv: nn.Module) -> None:
    """Outputs and gradients of the parts, attention dropped too, are those of one part with all columns."""
    staged = make_stages(conv.double())
    block, x, _ = block_and_rows(7)

    def drops(columns: ColumnRange) -> DropDraws:
        return DropDraws(seed=1, number=2, nodes=NODES[: len(x)], runs=(columns,))

    results = []
    for parts in (1, 2, 3, 4):
        layers = [part_of(staged, [columns]) for columns in deal_out_columns(7, parts)]
        out = run_parts(layers, block, x, drops)
        out.cos().sum().backward()
        results.append((out, summed_gradient(layers, next(iter(staged.cut)))))
    for out, gradient in results[1:]:
        close(out, results[0][0])
        close(gradient, results[0][1])
    undropped = staged.eval()(block, x)
    assert (undropped - results[0][0]).abs().max() > 1e-2
    close(run_parts([staged], block, x, drops), undropped)


def test_alone_a_layer_drops_as_torch_does() -> None:
    block, x, _ = block_and_rows(7)
    for conv in (SAGEConv(7, 5, "mean", feat_drop=0.4), GATConv(7, 5, 2, feat_drop=0.4, attn_drop=0.3)):
        staged = make_stages(conv.double())
        torch.manual_seed(5)
        expected = conv(block, x)
        torch.manual_seed(5)
        close(staged(block, x), expected)


def test_without_draws_a_part_among_others_refuses_to_drop() -> None:
    block, x, _ = block_and_rows(7)
    staged = make_stages(SAGEConv(7, 5, "mean", feat_drop=0.4).double())
    staged.run_parts = lambda layer, given: layer.gather(given, layer.transform(given), ())
    with pytest.raises(ConfigError, match=r"drops with probability 0\.4 .*data_parallel"):
        staged(block, x)
    staged.eval()(block, x)


def test_attention_is_dropped_by_destination_and_place_not_by_number_of_the_edge() -> None:
    """A part numbers the edges as the matrix has them, the owner as it likes: the same edges are dropped."""
    block, _, _ = block_and_rows(7)
    indptr, indices, edge_ids = block.adj_tensors("csc")
    assert not torch.equal(edge_ids, torch.arange(len(edge_ids)))
    part = dgl.create_block(("csc", (indptr, indices, [])), block.num_src_nodes(), block.num_dst_nodes())
    draws, ones = DropDraws(seed=0, number=0, nodes=NODES, runs=()), torch.ones(len(indices), 2, 1)
    owners, parts = (drop_attention(case, ones, 0.5, draws) for case in (block, part))
    assert torch.equal(parts, owners[edge_ids])


def test_a_device_drops_the_same_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The torch path, in pieces of rows, for features, attention, no rows and no columns."""
    block, _, _ = block_and_rows(7)
    cases = [
        (NODES, deal_out_concatenated([5, 4], 2)[1]),
        (NODES[:0], all_columns(3)),
        (NODES[:3], (ColumnRange(first=4, last=4, width=4),)),
    ]
    draws, ones = DropDraws(seed=0, number=0, nodes=NODES, runs=()), torch.ones(block.num_edges(), 3, 1)

    def draw() -> list[Tensor]:
        entries = [draw_kept_entries(7, 3, 1 << 32, nodes, runs, 0.3) for nodes, runs in cases]
        return [
            *entries,
            drop_attention(block, ones, 0.4, draws),
            draw_kept_entries(7, 3, 1, NODES, all_columns(3), 1.0),
        ]

    expected = draw()
    monkeypatch.setattr(dropout, "is_on_host", lambda tensor: False)
    monkeypatch.setattr(masks, "_WORDS_AT_ONCE", 100)
    for result, target in zip(draw(), expected, strict=True):
        assert torch.equal(result, target)
    assert not result.any()


# The ring 0 -> 1 -> ... -> 11 -> 0 with chords v -> v + 5.
RING = 12
SOURCES = torch.arange(RING).repeat(2)
TARGETS = torch.cat([(torch.arange(RING) + 1) % RING, (torch.arange(RING) + 5) % RING])


def block_of(targets: list[int]) -> Any:
    """The in-edges of ``targets``, whose sources come after them in descending order, with global ids."""
    expected = torch.tensor(targets)
    edges = torch.isin(TARGETS, expected).nonzero()[:, 0].flip(0)
    remaining = sorted(set(SOURCES[edges].tolist()) - set(targets), reverse=True)
    nodes = torch.tensor([*targets, *remaining])
    place = {int(node): position for position, node in enumerate(nodes)}
    ends = [torch.tensor([place[int(node)] for node in ids[edges]]) for ids in (SOURCES, TARGETS)]
    block = dgl.create_block((ends[0], ends[1]), num_src_nodes=len(nodes), num_dst_nodes=len(targets))
    block.srcdata[dgl.NID], block.dstdata[dgl.NID] = nodes, expected
    block.edata[dgl.EID] = edges
    return block


class Deep(nn.Module):
    """Dropouts in every place: before, inside and between convolutions; one module serves twice."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.4)
        self.first = GATConv(5, 3, 2, feat_drop=0.3, attn_drop=0.3)
        self.second = SAGEConv(6, 4, "mean", feat_drop=0.2)

    def forward(self, blocks: list[Any], h: Tensor) -> Tensor:
        h = self.dropout(self.first(blocks[0], self.dropout(h)).flatten(1))
        return self.second(blocks[1], h)


def scores(targets: list[int]) -> Tensor:
    """Return the scores that a rank that computes ``targets`` gets for them."""
    torch.manual_seed(0)
    model = Deep().double()
    dropouts = install_node_dropouts(model, seed=7)
    second = block_of(targets)
    first = block_of(second.srcdata[dgl.NID].tolist())
    nodes = first.srcdata[dgl.NID]
    x = torch.linspace(-1, 1, RING * 5, dtype=torch.float64).reshape(RING, 5)
    # What ranks draw otherwise, and how often, is their own affair.
    torch.manual_seed(targets[0])
    dropouts.begin(3, nodes)
    return model([first, second], x[nodes])


def test_a_node_gets_the_same_on_whichever_rank() -> None:
    full = scores(list(range(RING)))
    for targets in ([3, 0, 7], [11], [9, 8, 10, 1, 2]):
        torch.testing.assert_close(scores(targets), full[targets], rtol=0, atol=1e-13)


def test_calls_passes_and_steps_drop_other_entries() -> None:
    model = nn.Sequential(nn.Dropout(0.5))
    dropouts = install_node_dropouts(model, seed=0)
    x, actual = torch.ones(200, 8), []
    for step, calls in ((0, 2), (0, 1), (1, 1)):
        dropouts.begin(step, torch.arange(200))
        actual += [model(x) for _ in range(calls)]
    for number, result in enumerate(actual):
        assert torch.equal(result.unique(), torch.tensor([0.0, 2.0]))
        for second in actual[:number]:
            # 1600 independent entries agree in half of the cases; 5 standard deviations are 0.0625.
            assert abs(((result != 0) == (second != 0)).double().mean() - 0.5) < 0.0625


@pytest.mark.parametrize("shape", [(6,), (6, 4), (6, 2, 3)])
def test_rows_of_any_shape_are_dropped(shape: tuple[int, ...]) -> None:
    ids, some, result = torch.tensor([5, 3, 1, 0, 9, 8]), [2, 4], []
    for places in (list(range(6)), some, []):
        model = nn.Sequential(nn.Dropout(0.5))
        install_node_dropouts(model, seed=0).begin(0, ids[places])
        result.append(model(torch.ones(shape)[places]))
    assert result[0].shape == shape
    assert torch.equal(result[1], result[0][some])
    assert result[2].shape == (0, *shape[1:])
    model = nn.Sequential(nn.Dropout(1.0))
    install_node_dropouts(model, seed=0).begin(0, ids)
    assert not model(torch.ones(shape)).any()


def test_outside_of_a_pass_it_is_torchs_own() -> None:
    model, plain = nn.Sequential(nn.Dropout(0.5)), nn.Dropout(0.5)
    dropouts = install_node_dropouts(model, seed=0)
    x = torch.ones(10, 10)
    torch.manual_seed(1)
    expected = plain(x)
    torch.manual_seed(1)
    assert torch.equal(model(x), expected)
    dropouts.begin(0, torch.arange(10))
    model.eval()
    assert model(x) is x
    # More rows than there are nodes belong to something else.
    model.train()
    assert model(torch.ones(11, 10)).shape == (11, 10)


class Checkpointed(nn.Module):
    def __init__(self, preserve: bool | None) -> None:
        super().__init__()
        self.dropout, self.preserve = nn.Dropout(0.5), preserve
        self.linears = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, h: Tensor) -> Tensor:
        for linear in self.linears:
            run = lambda h, linear=linear: torch.tanh(linear(self.dropout(h)))  # noqa: E731
            if self.preserve is None:
                h = run(h)
            else:
                h = checkpoint(run, h, use_reentrant=False, preserve_rng_state=self.preserve)
        return self.dropout(h)


Passes = list[tuple[int, int]]
"""Step and first node of each."""


def gradients(preserve: bool | None, passes: Passes) -> list[Tensor]:
    torch.manual_seed(0)
    model = Checkpointed(preserve).double()
    dropouts = install_node_dropouts(model, seed=5)
    outputs = []
    for number, first in passes:
        dropouts.begin(number, torch.arange(first, first + 40))
        outputs.append(model(torch.ones(40, 6, dtype=torch.float64)))
    for out in outputs:
        out.square().sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("passes", [[(0, 0)], [(0, 0), (1, 1), (2, 2)], [(0, 0), (0, 70)]])
def test_recomputation_drops_the_same_entries(passes: Passes) -> None:
    """Also when backward comes after the next forward passes, of other steps or on other nodes."""
    for got, expected in zip(gradients(True, passes), gradients(None, passes), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_a_checkpoint_that_forgets_the_generator_is_refused() -> None:
    with pytest.raises(ConfigError, match="preserve_rng_state=True"):
        gradients(False, [(0, 0)])


class Layer(nn.Module):
    """Drops rows of all sources of its block, which are others than the first nodes of the pass."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.dropout, self.linear, self.again = nn.Dropout(0.5), nn.Linear(6, 6), again

    def forward(self, block: Any, h: Tensor) -> Tensor:
        return checkpoint(self.run, h, use_reentrant=False) if self.again else self.run(h)

    def run(self, h: Tensor) -> Tensor:
        return torch.tanh(self.linear(self.dropout(h)))


class LayerOfRows(Layer):
    def forward(self, h: Tensor, block: Any) -> Tensor:
        return super().forward(block, h)


def of_a_layer(model: Layer, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Return what ``model`` gives of arguments with a block, and the gradient of its weight."""
    torch.manual_seed(0)
    model.double().linear.reset_parameters()
    install_node_dropouts(model, seed=1).begin(0, torch.arange(100, 100 + RING))
    out = model(*args, **kwargs)
    out.square().sum().backward()
    return out, model.linear.weight.grad


def test_a_layer_may_have_its_block_anywhere_and_compute_a_part_of_itself_again() -> None:
    block = block_of([3, 0, 7])
    x = torch.ones(block.num_src_nodes(), 6, dtype=torch.float64)
    out, gradient = of_a_layer(Layer(), block, x)
    for case in (
        of_a_layer(Layer(again=True), block, x),
        of_a_layer(LayerOfRows(), x, block),
        of_a_layer(Layer(), h=x, block=block),
    ):
        close(case[0], out)
        close(case[1], gradient)


def test_freed_block_of_a_recomputed_layer_is_an_error() -> None:
    model, block = Layer(again=True), block_of([3, 0, 7])
    install_node_dropouts(model, seed=1).begin(0, torch.arange(RING))
    out = model(block, torch.ones(block.num_src_nodes(), 6))
    del block
    gc.collect()
    with pytest.raises(ConfigError, match="Keep the blocks until backward is done"):
        out.sum().backward()


def test_all_names_of_a_dropout_stay_one_module_and_state_stays() -> None:
    model = Deep()
    model.alias = model.dropout
    names = list(model.state_dict())
    install_node_dropouts(model, seed=0)
    assert isinstance(model.alias, NodeDropout)
    assert model.alias is model.dropout
    assert isinstance(model.first.feat_drop, NodeDropout)
    assert list(model.state_dict()) == names
    assert str(model.dropout) == "NodeDropout(p=0.4, inplace=False)"
    block = block_of(list(range(RING)))
    assert copy.deepcopy(model).eval()([block, block], torch.ones(RING, 5)).shape == (RING, 4)
    assert model.training


def test_dropouts_that_are_there_are_replaced() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 8))
    install_node_dropouts(model, seed=0).begin(0, torch.arange(9))
    second = install_node_dropouts(model, seed=0)
    assert [len(module._forward_hooks) for module in model.modules()] == [1, 0, 1]
    torch.manual_seed(0)
    plain = nn.Dropout(0.5)(torch.ones(9, 8))
    torch.manual_seed(0)
    # No pass of the new ones has begun.
    assert torch.equal(model[0](torch.ones(9, 8)), plain)
    second.begin(0, torch.arange(9))
    assert not torch.equal(model[0](torch.ones(9, 8)), plain)


def test_dropouts_of_a_copy_are_replaced_in_the_copy_alone() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 8))
    install_node_dropouts(model, seed=0).begin(0, torch.arange(9))
    copied, rows = copy.deepcopy(model), torch.ones(9, 8)
    torch.manual_seed(0)
    plain = nn.Dropout(0.5)(rows)
    torch.manual_seed(0)
    # The copy knows no pass.
    assert torch.equal(copied[0](rows), plain)
    assert not torch.equal(model[0](rows), plain)
    install_node_dropouts(copied, seed=0)
    for case in (model, copied):
        assert [len(module._forward_hooks) for module in case.modules()] == [1, 0, 1]


def test_a_graph_of_unknown_nodes_is_dropped_as_torch_does() -> None:
    conv = SAGEConv(3, 2, "mean", feat_drop=0.5)
    install_node_dropouts(nn.ModuleList([conv]), seed=0).begin(0, torch.arange(RING))
    graph = dgl.graph((SOURCES, TARGETS))
    torch.manual_seed(0)
    first = conv(graph, torch.ones(RING, 3))
    torch.manual_seed(0)
    # A keyed mask would be another one, as that of the next call.
    assert torch.equal(first, conv(graph, torch.ones(RING, 3)))


def test_a_graph_of_the_user_has_no_rows_of_layers_whatever_its_attributes() -> None:
    graph = dgl.rand_graph(3, 4)
    assert not has_rows(graph)
    graph.step_number = 0
    assert not has_rows(graph)
    assert has_rows(dgl.to_block(graph))
