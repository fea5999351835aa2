"""Modules before the first layer: computed from the columns of the parts, equal to the whole module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import dgl
import pytest
import torch
from torch import Tensor, nn

from dglx_dist.errors import ConfigError
from dglx_dist.layers.dropout import Columns, deal_out_columns, deal_out_concatenated
from dglx_dist.strategies.push_pull.exchange import GroupBatch, PartInput
from dglx_dist.strategies.push_pull.input_layers import (
    ColumnEmbedding,
    Converted,
    Features,
    InputLayout,
    InputModule,
    InputProvenance,
    Origin,
    find_input_modules,
)

V, F, H = 12, 7, 4
TABLE = torch.randn(V, F, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
OWNERS = (torch.tensor([3, 1, 4, 9]), torch.tensor([2, 4, 8]), torch.tensor([], dtype=torch.int64))
"""Node ids of the batches of three owners; both of the first have node 4."""
PARTS = pytest.mark.parametrize("parts", [1, 2, 3, 4])


class Model(nn.Module):
    """What stands before a first layer, by name; and one."""

    def __init__(self, **before: nn.Module) -> None:
        super().__init__()
        for name, module in before.items():
            self.add_module(name, module)
        self.conv = dgl.nn.SAGEConv(F, H, "mean")


@dataclass(kw_only=True)
class Part:
    """One part of a model in this process, and the batch that it computes as the first owner."""

    modules: dict[str, InputModule]
    group_batch: GroupBatch
    x: Tensor
    provenance: InputProvenance

    def origin_of(self, rows: Tensor) -> Origin:
        found = self.provenance.find(rows)
        assert found is not None
        return found


def moments(names: Sequence[str]) -> tuple[Tensor, Tensor]:
    assert tuple(names) == ("feat",)
    return TABLE.mean(1), TABLE.var(1, correction=0)


def layout(runs: tuple[Columns, ...]) -> InputLayout:
    return InputLayout(features=("feat",), runs=runs, num_nodes=V, seed=5)


def make_parts(make: Callable[[], nn.Module], parts: int, number: int = 0, owner: int = 0) -> list[Part]:
    """Cut a new model for each part, and begin the batch ``number`` on each, as ``owner``."""
    made = []
    for columns in deal_out_columns(F, parts):
        modules = find_input_modules(make(), "conv", layout((columns,)), moments)
        block: Any = None
        inputs = [
            PartInput(block=block, nodes=nodes, columns={"feat": TABLE[nodes][:, columns.cut]}, number=number)
            for nodes in OWNERS
        ]
        provenance, group_batch = InputProvenance(), GroupBatch(number, tuple(inputs))
        for module in modules.values():
            module.provenance = provenance
        provenance.begin(group_batch, owner)
        x = inputs[owner].columns["feat"]
        provenance.add(x, Features(names=("feat",), pieces=(columns,)))
        made.append(Part(modules=modules, group_batch=group_batch, x=x, provenance=provenance))
    return made


def joined(pieces: Sequence[Tensor | None]) -> Tensor:
    return torch.cat([piece for piece in pieces if piece is not None], -1)


def normed() -> nn.LayerNorm:
    norm = nn.LayerNorm(F, eps=0.1).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in norm.parameters():
        nn.init.uniform_(parameter, -1, 1, generator=generator)
    return norm


@PARTS
def test_norm_of_columns_is_the_norm_of_rows(parts: int) -> None:
    """For every owner, and the gradients of its weights over all owners."""
    whole = normed()
    made = make_parts(lambda: Model(norm=normed()), parts)
    for owner, nodes in enumerate(OWNERS):
        expected = whole(TABLE[nodes])
        expected.cos().sum().backward()
        rows = []
        for part in made:
            norm = part.modules["norm"]
            called = norm(part.x)
            assert not called.requires_grad
            origin = part.origin_of(called)
            assert origin.runs == norm.runs  # type: ignore[attr-defined]  # of a norm
            rows.append(origin.rows(part.group_batch.inputs[owner]))
            if owner == 0:
                torch.testing.assert_close(called, rows[-1].detach(), rtol=0, atol=0)
        torch.testing.assert_close(joined(rows), expected, rtol=1e-12, atol=1e-12)
        joined(rows).cos().sum().backward()
    for name in ("weight", "bias"):
        found = joined([part.modules["norm"].get_parameter(name).grad for part in made])
        torch.testing.assert_close(found, whole.get_parameter(name).grad, rtol=1e-12, atol=1e-12)
        assert made[0].modules["norm"].cut[name] == 0
        assert made[0].modules["norm"].by_rows == ()


def test_an_owner_without_nodes_tells_what_the_others_tell() -> None:
    """All its rows lie at one place of memory: none."""

    def rows(owner: int) -> Tensor:
        make = lambda: Model(norm=normed(), drop=nn.Dropout(0.4))  # noqa: E731 - for make_parts
        (part,) = make_parts(make, 1, owner=owner)
        called = part.modules["drop"](part.modules["norm"](part.x))
        assert len(called) == len(OWNERS[owner])
        return part.origin_of(called).rows(part.group_batch.inputs[0])

    assert torch.equal(rows(2), rows(0))
    assert (rows(2) == 0).any(), "dropped, not the raw features"


def test_norm_without_weights_and_of_other_dtypes() -> None:
    (part,) = make_parts(lambda: Model(norm=nn.LayerNorm(F, elementwise_affine=False)), 1)
    norm = part.modules["norm"]
    assert dict(norm.cut) == {}
    rows = norm(part.x.float())
    assert rows.dtype == torch.float32
    expected = nn.functional.layer_norm(TABLE[OWNERS[1]].float(), (F,))
    torch.testing.assert_close(part.origin_of(rows).rows(part.group_batch.inputs[1]), expected)


def test_norm_uses_the_weights_that_are_placed() -> None:
    """A batch in flight has leaves of its own in place of the parameters."""
    (part,) = make_parts(lambda: Model(norm=normed()), 1)
    norm = part.modules["norm"]
    origin = part.origin_of(norm(part.x))
    before = origin.rows(part.group_batch.inputs[0])
    leaf = torch.zeros(F, dtype=torch.float64, requires_grad=True)
    norm._parameters["weight"] = leaf  # type: ignore[assignment]  # any tensor computes
    rows = origin.rows(part.group_batch.inputs[0])
    assert torch.equal(rows.detach(), norm.get_parameter("bias").detach().expand(4, F))
    assert not torch.equal(rows, before)
    (gradient,) = torch.autograd.grad(rows.sum(), [leaf])
    assert gradient.abs().sum() > 0


def test_norm_refuses_what_is_not_the_features() -> None:
    (part, _) = make_parts(lambda: Model(norm=normed(), drop=nn.Dropout(0.5)), 2)
    norm = part.modules["norm"]
    with pytest.raises(
        ConfigError, match=r"LayerNorm\(7\) was cut .* shape \(3, 7\) .* after the first layer"
    ):
        norm(torch.zeros(3, F))
    with pytest.raises(ConfigError, match="something has changed before"):
        norm(part.modules["drop"](part.x))
    part.provenance.begin(None, 0)
    with pytest.raises(ConfigError, match="was cut by input columns"):
        norm(part.x)


@PARTS
def test_dropped_entries_are_those_of_one_part(parts: int) -> None:
    def rows(count: int, number: int) -> list[Tensor]:
        made = make_parts(lambda: Model(drop=nn.Dropout(0.4)), count, number)
        called = [part.modules["drop"](part.x) for part in made]
        origins = [part.origin_of(one) for part, one in zip(made, called, strict=True)]
        found = [
            joined([o.rows(part.group_batch.inputs[owner]) for part, o in zip(made, origins, strict=True)])
            for owner in range(3)
        ]
        assert torch.equal(joined(called), found[0])
        return found

    cut, whole = rows(parts, 2), rows(1, 2)
    for one, other in zip(cut, whole, strict=True):
        assert torch.equal(one, other)
    # Node 4 is the third of the first owner and the second of the second.
    assert torch.equal(whole[0][2], whole[1][1])
    assert not torch.equal(whole[0] == 0, rows(1, 3)[0] == 0)
    kept = whole[0] != 0
    torch.testing.assert_close(whole[0][kept], (TABLE[OWNERS[0]] / 0.6)[kept])


def test_dropout_of_anything_else_is_torchs() -> None:
    dropout = nn.Dropout(0.5)
    (part,) = make_parts(lambda: Model(first=dropout, second=dropout), 1)
    module = part.modules["first"]
    assert part.modules["second"] is module, "one module of two names stays one"
    hidden = torch.randn(4, F, dtype=torch.float64)
    torch.manual_seed(3)
    expected = nn.functional.dropout(hidden, 0.5)
    torch.manual_seed(3)
    assert torch.equal(module(hidden), expected)
    assert part.provenance.find(expected) is None
    module.eval()
    assert module(part.x) is part.x
    module.train()
    part.provenance.begin(None, 0)
    assert part.provenance.find(module(part.x)) is None


def test_two_dropouts_drop_independently_and_in_place_is_refused() -> None:
    (part,) = make_parts(lambda: Model(a=nn.Dropout(0.5), b=nn.Dropout(0.5)), 1)
    first, second = (part.modules[name](part.x) for name in "ab")
    assert not torch.equal(first == 0, second == 0)
    (part,) = make_parts(lambda: Model(drop=nn.Dropout(0.5, inplace=True)), 1)
    with pytest.raises(ConfigError, match="inplace=False"):
        part.modules["drop"](part.x)


@PARTS
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("dropped", [False, True])
def test_embedding_by_columns_learns_what_the_uncut_one_learns(
    parts: int, sparse: bool, dropped: bool
) -> None:
    """Two steps of SGD over all owners; the first two share node 4, and node 2 is the padding."""

    def embedding() -> nn.Embedding:
        found = nn.Embedding(V, F, padding_idx=2, sparse=sparse).double()
        found.weight.data.copy_(TABLE)
        return found

    whole = embedding()
    made = make_parts(lambda: Model(rows=embedding(), drop=nn.Dropout(0.3 if dropped else 0.0)), parts)
    single = make_parts(lambda: Model(rows=embedding(), drop=nn.Dropout(0.3)), 1)[0]
    optimizers = [torch.optim.SGD(part.modules["rows"].parameters(), lr=0.5) for part in made]
    for _ in range(2):
        whole.zero_grad()
        for owner, nodes in enumerate(OWNERS):
            rows = whole(nodes)
            if dropped:
                called = single.modules["drop"](single.modules["rows"](OWNERS[0]))
                ones = single.origin_of(called).rows(single.group_batch.inputs[owner])
                rows = rows * (ones != 0) / 0.7
            rows.cos().sum().backward()
        for part, optimizer in zip(made, optimizers, strict=True):
            optimizer.zero_grad()
            origin = part.origin_of(part.modules["drop"](part.modules["rows"](OWNERS[0])))
            gradients = []
            for one in part.group_batch.inputs:
                taken = origin.rows(one)
                assert taken.is_leaf
                assert taken.requires_grad
                taken.cos().sum().backward()
                gradients.append((one, taken.grad))
            origin.accumulate(gradients)
            assert part.modules["rows"].get_parameter("weight").grad.is_sparse == sparse
            optimizer.step()
        with torch.no_grad():
            whole.weight -= 0.5 * whole.weight.grad.to_dense()  # type: ignore[union-attr]  # just computed
        found = torch.cat([part.modules["rows"].get_parameter("weight") for part in made], 1)
        torch.testing.assert_close(found, whole.weight, rtol=1e-12, atol=1e-12)
    assert torch.equal(found[0], TABLE[0]), "nobody asked for node 0"
    assert torch.equal(found[2], TABLE[2]), "padding is not trained"


def test_embedding_keeps_the_rows_that_a_batch_began_with_and_adds_up_gradients() -> None:
    (part,) = make_parts(lambda: Model(rows=nn.Embedding(V, F, sparse=True).double()), 1)
    module = part.modules["rows"]
    assert isinstance(module, ColumnEmbedding)
    assert (dict(module.cut), module.by_rows) == ({"weight": 1}, ("weight",))
    origin = part.origin_of(module(OWNERS[0]))
    rows = origin.rows(part.group_batch.inputs[0])
    kept = rows.detach().clone()
    module.weight.data.zero_()
    assert torch.equal(rows, kept)
    ones = torch.ones(4, F, dtype=torch.float64)
    for _ in range(2):
        origin.accumulate([(part.group_batch.inputs[0], ones), (part.group_batch.inputs[1], None)])
    assert module.weight.grad is not None
    assert torch.equal(module.weight.grad.to_dense()[[3, 0]], torch.tensor([[2.0], [0.0]]).expand(2, F))


@pytest.mark.parametrize("optimizer", [torch.optim.SparseAdam, torch.optim.Adagrad, torch.optim.SGD])
def test_optimizers_take_sparse_gradients_of_parts_without_columns(optimizer: Any) -> None:
    module = ColumnEmbedding(nn.Embedding(V, 2, sparse=True), (Columns(first=2, last=2, width=2),))
    module.add_gradients(OWNERS[0], torch.zeros(4, 0))
    optimizer([module.weight], lr=0.1).step()
    assert module.weight.shape == (V, 0)


def test_embedding_refuses_other_ids_and_what_needs_whole_rows() -> None:
    (part,) = make_parts(lambda: Model(rows=nn.Embedding(V, F)), 1)
    for ids in (torch.tensor([3, 1]), torch.tensor([1, 3, 4, 9])):
        with pytest.raises(ConfigError, match="only be asked for the rows of a batch's input nodes"):
            part.modules["rows"](ids)
    for options in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}):
        with pytest.raises(ConfigError, match=f"{next(iter(options))}=.*data_parallel"):
            make_parts(lambda options=options: Model(rows=nn.Embedding(V, F, **options)), 1)


def found_in(model: nn.Module, first: str = "conv", width: int = F) -> dict[str, str]:
    modules = find_input_modules(model, first, layout((Columns(first=0, last=width, width=width),)), moments)
    return {name: type(module).__name__ for name, module in modules.items()}


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


def test_what_is_inside_the_first_layer_is_its_own() -> None:
    model = nn.Module()
    model.add_module("conv", dgl.nn.SAGEConv(F, F, "mean", feat_drop=0.5, norm=nn.LayerNorm(F)))
    assert found_in(model) == {}
    assert found_in(model.conv, first="") == {}


def test_what_cannot_work_on_columns_is_refused_when_wrapped() -> None:
    with pytest.raises(ConfigError, match=r"'norm' is a BatchNorm1d of the 7 input columns.*data_parallel"):
        found_in(Model(norm=nn.BatchNorm1d(F)))
    with pytest.raises(ConfigError, match=r"'norm' normalizes .* embedding 'rows'.*data_parallel"):
        found_in(Model(rows=nn.Embedding(V, F), norm=nn.LayerNorm(F)))
    hidden = Model()
    hidden.add_module("norm", nn.BatchNorm1d(F))
    hidden.add_module("last", nn.Linear(F, 2))
    assert found_in(hidden) == {}


@PARTS
def test_features_side_by_side_and_in_another_dtype(parts: int) -> None:
    """Runs of [a | b] are columns of the whole; a copy in another dtype has the same."""
    rows = []
    for runs in deal_out_concatenated([5, 2], parts):
        block: Any = None
        columns = {"a": TABLE[OWNERS[0]][:, runs[0].cut], "b": TABLE[OWNERS[0]][:, runs[1].cut]}
        given = PartInput(block=block, nodes=OWNERS[0], columns=columns, number=0)
        origin = Features(names=("a", "b"), pieces=runs)
        rows.append((origin.rows(given), runs))
        other = Converted(origin=origin, dtype=torch.float32)
        assert (other.runs, other.is_raw, other.rows(given).dtype) == (runs, True, torch.float32)
    order = [place for _, runs in rows for run in runs for place in range(run.first, run.last)]
    assert torch.equal(joined([piece for piece, _ in rows]), TABLE[OWNERS[0]][:, order])
    assert sorted(order) == list(range(F))
