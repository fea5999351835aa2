"""Modules before the first layer on a part's columns: what is taken for one, and what is refused.

That they train as in one process is in test_models.py.
"""

from collections.abc import Callable
from typing import Any

import dgl
import pytest
import torch
from torch import Tensor, nn

from dglx_dist.errors import ConfigError
from dglx_dist.layers.base import cut_in_place
from dglx_dist.layers.dropout import LATER_MODULES, ColumnRange, NodeDropouts, deal_out_columns
from dglx_dist.records import NODE_TYPE
from dglx_dist.strategies.push_pull.exchange import GroupBatch, PartInput
from dglx_dist.strategies.push_pull.split_model import (
    ColumnEmbedding,
    Converted,
    InputModule,
    InputProvenance,
    Origin,
    find_dropouts,
    find_input_modules,
)

V, F, H = 12, 7, 4
NODES = torch.tensor([3, 1, 4, 9])
"""Ids of the input nodes of a batch."""


class Model(nn.Module):
    """Modules by name before a first layer, and that layer."""

    def __init__(self, **before: nn.Module) -> None:
        super().__init__()
        for name, module in before.items():
            self.add_module(name, module)
        self.conv = dgl.nn.SAGEConv(F, H, "mean")


def modules_of(
    model: nn.Module, first: nn.Module, columns: ColumnRange, provenance: InputProvenance
) -> dict[nn.Module, InputModule]:
    def moments() -> tuple[Tensor, Tensor]:
        return torch.zeros(V), torch.ones(V)

    runs = (columns,)
    modules = find_input_modules(model, first, provenance, NODE_TYPE, runs, moments, num_nodes=V)
    modules |= dict(find_dropouts(model, provenance, seed=5))
    return {module: modules[module] for module in modules.keys() - set(first.modules())}


def begin_batch(
    model: Any, parts: int = 1
) -> tuple[dict[str, Callable[[Tensor], Tensor]], Tensor, InputProvenance]:
    """Begin a batch on the first of ``parts``: what replaces modules, the features, and the origins."""
    provenance, columns = InputProvenance(0), deal_out_columns(F, parts)[0]
    replacements = modules_of(model, model.conv, columns, provenance)
    for module, replacement in replacements.items():
        cut_in_place(module, replacement.cut, (columns,))
    block: Any = None
    x = torch.randn(len(NODES), len(columns), dtype=torch.float64)
    columns_by_type = {NODE_TYPE: {"feat": x}}
    part_input = PartInput(block=block, nodes={NODE_TYPE: NODES}, columns=columns_by_type, number=2)
    provenance.begin(GroupBatch(2, (part_input,)), 0)
    provenance.add(x, Origin(ntype=NODE_TYPE, names=("feat",), runs=(columns,)))
    named = model.named_modules(remove_duplicate=False)
    return (
        {
            name: replacements[replacement].forward
            for name, replacement in named
            if replacement in replacements
        },
        x,
        provenance,
    )


def test_norm_refuses_what_is_not_the_features() -> None:
    modules, x, provenance = begin_batch(Model(norm=nn.LayerNorm(F).double(), drop=nn.Dropout(0.5)), parts=2)
    with pytest.raises(
        ConfigError, match=r"LayerNorm\(7\) was cut .* shape \(3, 7\) .* after the first layer"
    ):
        modules["norm"](torch.zeros(3, F))
    with pytest.raises(ConfigError, match="were changed before"):
        modules["norm"](modules["drop"](x))
    provenance.begin(None, 0)
    with pytest.raises(ConfigError, match="was cut by input columns"):
        modules["norm"](x)


def test_dropout_of_anything_else_is_keyed_by_node_and_in_place_is_refused() -> None:
    dropout = nn.Dropout(0.5)
    modules, x, provenance = begin_batch(Model(first=dropout, second=dropout, third=nn.Dropout(0.5)))
    first = modules["first"]
    assert modules["second"] == first, "one module of two names stays one"
    assert not torch.equal(first(x) == 0, modules["third"](x) == 0)
    hidden = torch.randn(4, F, dtype=torch.float64)
    draws = NodeDropouts(0, LATER_MODULES)
    draws.track(nn.Identity())
    draws.begin(2, NODES)
    dropped = first(hidden)
    assert torch.equal(dropped, draws.drop(hidden, 0.5, module=0, edges=False))
    assert provenance.find(dropped) is None
    dropout.eval()
    assert first(x) is x
    dropout.train()
    dropout.inplace = True
    with pytest.raises(ConfigError, match="inplace=False"):
        first(x)


def test_converted_rows_without_nodes_belong_to_the_type_that_is_asked_for() -> None:
    provenance, columns = InputProvenance(0), deal_out_columns(F, 1)
    origins = {ntype: Origin(ntype=ntype, names=("feat",), runs=columns) for ntype in ("author", "paper")}
    for origin in origins.values():
        provenance.add(torch.zeros(0, F, dtype=torch.float64), origin)
    for ntype, origin in origins.items():
        assert provenance.find(torch.zeros(0, F), ntype) == origin.with_step(Converted(torch.float32))


@pytest.mark.parametrize("optimizer", [torch.optim.SparseAdam, torch.optim.Adagrad, torch.optim.SGD])
def test_optimizers_take_sparse_gradients_of_parts_without_columns(optimizer: Any) -> None:
    embedding, none = nn.Embedding(V, 2, sparse=True), (ColumnRange(first=2, last=2, width=2),)
    module = ColumnEmbedding(embedding, InputProvenance(0), NODE_TYPE, none)
    cut_in_place(embedding, module.cut, none)
    module.add_gradients([(NODES, torch.zeros(4, 0))])
    optimizer([embedding.weight], lr=0.1).step()
    assert embedding.weight.shape == (V, 0)


def test_embedding_refuses_other_ids_and_what_needs_whole_rows() -> None:
    modules, _, _ = begin_batch(Model(rows=nn.Embedding(V, F)))
    for ids in (torch.tensor([3, 1]), torch.tensor([1, 3, 4, 9])):
        with pytest.raises(ConfigError, match="only has the rows of a batch's input nodes"):
            modules["rows"](ids)
    for options in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}):
        with pytest.raises(ConfigError, match=f"{next(iter(options))}=.*data_parallel"):
            begin_batch(Model(rows=nn.Embedding(V, F, **options)))


def found_in(model: nn.Module, first: str = "conv") -> dict[str, str]:
    columns = ColumnRange(first=0, last=F, width=F)
    modules = modules_of(model, model.get_submodule(first), columns, InputProvenance(0))
    return {
        name: type(modules[module]).__name__ for name, module in model.named_modules() if module in modules
    }


def test_only_modules_as_wide_as_the_features_are_input_modules() -> None:
    assert found_in(Model(norm=nn.LayerNorm(F), drop=nn.Dropout(0.1))) == {
        "norm": "ColumnLayerNorm",
        "drop": "ColumnDropout",
    }
    assert found_in(Model(other=nn.Embedding(V, F + 1), rows=nn.Embedding(V, F))) == {
        "rows": "ColumnEmbedding"
    }
    assert found_in(Model(norm=nn.LayerNorm(H), small=nn.Embedding(V - 1, F))) == {}
    later = Model()
    later.add_module("norm", nn.LayerNorm(F))
    assert found_in(later) == {"norm": "ColumnLayerNorm"}, "nothing else is that wide"
    later.add_module("last", nn.Linear(F, 2))
    assert found_in(later) == {}, "it may be the norm of a hidden layer"
    model = nn.Module()
    model.add_module("conv", dgl.nn.SAGEConv(F, F, "mean", feat_drop=0.5, norm=nn.LayerNorm(F)))
    assert found_in(model) == found_in(model.get_submodule("conv"), first="") == {}, "its own"


def test_what_cannot_work_on_columns_is_refused_when_wrapped() -> None:
    with pytest.raises(ConfigError, match=r"'norm' is a BatchNorm1d of the 7 input columns.*data_parallel"):
        found_in(Model(norm=nn.BatchNorm1d(F)))
    with pytest.raises(ConfigError, match=r"'norm' normalizes .* embedding 'rows'.*data_parallel"):
        found_in(Model(rows=nn.Embedding(V, F), norm=nn.LayerNorm(F)))
    hidden = Model()
    hidden.add_module("norm", nn.BatchNorm1d(F))
    hidden.add_module("last", nn.Linear(F, 2))
    assert found_in(hidden) == {}
