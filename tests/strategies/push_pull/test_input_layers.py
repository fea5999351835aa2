"""Modules before the first layer on a part's columns: what is taken for one, and what is refused.

That they train as in one process is in test_models.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import dgl
import pytest
import torch
from torch import Tensor, nn

from dglx_dist.errors import ConfigError
from dglx_dist.layers.base import cut_in_place
from dglx_dist.layers.dropout import Columns, deal_out_columns
from dglx_dist.strategies.push_pull.exchange import GroupBatch, PartInput
from dglx_dist.strategies.push_pull.split_model import (
    ColumnEmbedding,
    InputModule,
    InputProvenance,
    Origin,
    find_input_modules,
)

V, F, H = 12, 7, 4
TABLE = torch.randn(V, F, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
OWNERS = (torch.tensor([3, 1, 4, 9]), torch.tensor([2, 4, 8]), torch.tensor([], dtype=torch.int64))
"""Node ids of the batches of three owners; both of the first have node 4."""


class Model(nn.Module):
    """What stands before a first layer, by name; and one."""

    def __init__(self, **before: nn.Module) -> None:
        super().__init__()
        for name, module in before.items():
            self.add_module(name, module)
        self.conv = dgl.nn.SAGEConv(F, H, "mean")


def moments() -> tuple[Tensor, Tensor]:
    return TABLE.mean(1), TABLE.var(1, correction=0)


def modules_of(
    model: nn.Module, first: nn.Module, columns: Columns, provenance: InputProvenance
) -> dict[nn.Module, InputModule]:
    return find_input_modules(model, first, provenance, (columns,), moments, num_nodes=V, seed=5)


@dataclass(kw_only=True)
class Part:
    """One part of a model in this process, and the batch that it computes."""

    modules: dict[str, InputModule]
    group_batch: GroupBatch
    x: Tensor
    provenance: InputProvenance

    def __getitem__(self, name: str) -> Callable[[Tensor], Tensor]:
        return self.modules[name].forward

    def rows(self, called: Tensor, owner: int) -> Tensor:
        """What the origin of ``called`` gives for an owner."""
        origin, one = self.provenance.find(called), self.group_batch.inputs[owner]
        assert origin is not None
        return origin.rows(origin.source(one), one)


def make_parts(make: Callable[[], nn.Module], parts: int, owner: int = 0) -> list[Part]:
    """Cut a new model for each part, and begin a batch on each, as ``owner``."""
    made = []
    for columns in deal_out_columns(F, parts):
        model: Any = make()
        provenance, block = InputProvenance(), None
        found = modules_of(model, model.conv, columns, provenance)
        for module, one in found.items():
            cut_in_place(module, one.cut, (columns,))
        inputs = [
            PartInput(block=block, nodes=nodes, columns={"feat": TABLE[nodes][:, columns.cut]}, number=2)
            for nodes in OWNERS
        ]
        group_batch = GroupBatch(2, tuple(inputs))
        provenance.begin(group_batch, owner)
        x = inputs[owner].columns["feat"]
        provenance.add(x, Origin(names=("feat",), runs=(columns,)))
        modules = {
            name: found[one] for name, one in model.named_modules(remove_duplicate=False) if one in found
        }
        made.append(Part(modules=modules, group_batch=group_batch, x=x, provenance=provenance))
    return made


def normed() -> nn.LayerNorm:
    return nn.LayerNorm(F, eps=0.1).double()


def test_an_owner_without_nodes_tells_what_the_others_tell() -> None:
    """All its rows lie at one place of memory: none."""

    def rows(owner: int) -> Tensor:
        (part,) = make_parts(lambda: Model(norm=normed(), drop=nn.Dropout(0.4)), 1, owner)
        called = part["drop"](part["norm"](part.x))
        assert len(called) == len(OWNERS[owner])
        return part.rows(called, 0)

    assert torch.equal(rows(2), rows(0))
    assert (rows(2) == 0).any(), "dropped, not the raw features"


def test_norm_without_weights_and_of_other_dtypes() -> None:
    (part,) = make_parts(lambda: Model(norm=nn.LayerNorm(F, elementwise_affine=False)), 1)
    assert dict(part.modules["norm"].cut) == {}
    rows = part["norm"](part.x.float())
    assert rows.dtype == torch.float32
    expected = nn.functional.layer_norm(TABLE[OWNERS[1]].float(), (F,))
    torch.testing.assert_close(part.rows(rows, 1), expected)


def test_norm_refuses_what_is_not_the_features() -> None:
    (part, _) = make_parts(lambda: Model(norm=normed(), drop=nn.Dropout(0.5)), 2)
    with pytest.raises(
        ConfigError, match=r"LayerNorm\(7\) was cut .* shape \(3, 7\) .* after the first layer"
    ):
        part["norm"](torch.zeros(3, F))
    with pytest.raises(ConfigError, match="something has changed before"):
        part["norm"](part["drop"](part.x))
    part.provenance.begin(None, 0)
    with pytest.raises(ConfigError, match="was cut by input columns"):
        part["norm"](part.x)


def test_dropout_of_anything_else_is_torchs_and_in_place_is_refused() -> None:
    dropout = nn.Dropout(0.5)
    (part,) = make_parts(lambda: Model(first=dropout, second=dropout, third=nn.Dropout(0.5)), 1)
    assert part.modules["second"] is part.modules["first"], "one module of two names stays one"
    assert not torch.equal(part["first"](part.x) == 0, part["third"](part.x) == 0)
    hidden = torch.randn(4, F, dtype=torch.float64)
    torch.manual_seed(3)
    expected = nn.functional.dropout(hidden, 0.5)
    torch.manual_seed(3)
    assert torch.equal(part["first"](hidden), expected)
    assert part.provenance.find(expected) is None
    dropout.eval()
    assert part["first"](part.x) is part.x
    dropout.train()
    dropout.inplace = True
    with pytest.raises(ConfigError, match="inplace=False"):
        part["first"](part.x)


@pytest.mark.parametrize("sparse", [False, True])
def test_embedding_by_columns_learns_what_the_uncut_one_learns(sparse: bool) -> None:
    """Over all owners; the first two share node 4, and node 2 is the padding."""

    def embedding() -> nn.Embedding:
        found = nn.Embedding(V, F, padding_idx=2, sparse=sparse).double()
        found.weight.data.copy_(TABLE)
        return found

    whole, made = embedding(), make_parts(lambda: Model(rows=embedding()), 3)
    for nodes in OWNERS:
        whole(nodes).cos().sum().backward()
    pieces = []
    for part in made:
        module = part.modules["rows"]
        assert isinstance(module, ColumnEmbedding)
        part["rows"](OWNERS[0])
        leaves = [Origin(runs=(), embedding=module).source(one) for one in part.group_batch.inputs]
        module.weight.data.zero_()  # a batch keeps the rows that it began with
        for leaf in leaves:
            leaf.cos().sum().backward()
        module.add_gradients([(nodes, leaf.grad) for nodes, leaf in zip(OWNERS, leaves, strict=True)])
        module.add_gradients([(OWNERS[0], None)])
        assert module.weight.grad is not None
        assert module.weight.grad.is_sparse == sparse
        pieces.append(module.weight.grad.to_dense())
    assert whole.weight.grad is not None
    torch.testing.assert_close(torch.cat(pieces, 1), whole.weight.grad.to_dense(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("optimizer", [torch.optim.SparseAdam, torch.optim.Adagrad, torch.optim.SGD])
def test_optimizers_take_sparse_gradients_of_parts_without_columns(optimizer: Any) -> None:
    embedding, none = nn.Embedding(V, 2, sparse=True), (Columns(first=2, last=2, width=2),)
    module = ColumnEmbedding(embedding, InputProvenance(), none)
    cut_in_place(embedding, module.cut, none)
    module.add_gradients([(OWNERS[0], torch.zeros(4, 0))])
    optimizer([embedding.weight], lr=0.1).step()
    assert embedding.weight.shape == (V, 0)


def test_embedding_refuses_other_ids_and_what_needs_whole_rows() -> None:
    (part,) = make_parts(lambda: Model(rows=nn.Embedding(V, F)), 1)
    for ids in (torch.tensor([3, 1]), torch.tensor([1, 3, 4, 9])):
        with pytest.raises(ConfigError, match="only be asked for the rows of a batch's input nodes"):
            part["rows"](ids)
    for options in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}):
        with pytest.raises(ConfigError, match=f"{next(iter(options))}=.*data_parallel"):
            make_parts(lambda options=options: Model(rows=nn.Embedding(V, F, **options)), 1)


def found_in(model: nn.Module, first: str = "conv") -> dict[str, str]:
    columns = Columns(first=0, last=F, width=F)
    modules = modules_of(model, model.get_submodule(first), columns, InputProvenance())
    return {name: type(modules[one]).__name__ for name, one in model.named_modules() if one in modules}


def test_what_is_taken_for_an_input_module() -> None:
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
