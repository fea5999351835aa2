"""Sparse optimizers: rules, state, several embeddings and several optimizers."""

from typing import Any

import numpy as np
import pytest
import torch

from dglx_dist.errors import ConfigError
from dglx_dist.graph import optim
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.embedding import DistEmbedding
from dglx_dist.graph.sparse_gradient import RowSum
from dglx_dist.graph.sparse_update import OwnedRows, UpdateRule, adagrad_rule, adam_rule, sgd_rule
from tests.graph.small import NUM_NODES


def train(names: list[str], steps: int) -> Any:
    params = [DistEmbedding(NUM_NODES, 2, name) for name in names]
    optimizer = optim.SparseAdam(params, lr=0.1)
    for _ in range(steps):
        torch.stack([param([3, 5]) for param in params]).pow(2).sum().backward()
        optimizer.step()
    return optimizer


def test_a_local_state_is_taken_over_with_its_steps(graph: DistGraph) -> None:
    optimizer = train(["a", "b"], 2)
    state = optimizer.local_state_dict()
    assert state["params"] == {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "world_size": 1}
    assert state["emb_states"]["a"]["ids"].tolist() == list(range(NUM_NODES))
    assert state["emb_states"]["a"]["steps"] == 2
    state["params"]["lr"] = 0.5
    for table in optimizer.tables:
        table.steps = 0
        for tensor in table.states:
            tensor[:] = torch.zeros(NUM_NODES, 2)
    optimizer.load_local_state_dict(state)
    assert optimizer.lr == 0.5
    for table in optimizer.tables:
        entry = state["emb_states"][table.embedding.name]
        assert table.steps == 2
        assert all(torch.equal(tensor.to_local(), entry["states"][tensor.name]) for tensor in table.states)
        assert bool((entry["states"][f"{table.embedding.name}_square"][[3, 5]] > 0).all())


def test_a_state_of_others_is_refused_before_anything_changes(graph: DistGraph) -> None:
    optimizer = train(["a", "b"], 1)
    state = optimizer.local_state_dict()
    before = [tensor.to_local() for tensor in optimizer.tables[0].states]
    for entry in state["emb_states"].values():
        entry["states"] = {name: rows + 1.0 for name, rows in entry["states"].items()}
    state["emb_states"]["c"] = state["emb_states"].pop("b")
    with pytest.raises(ConfigError, match=r"this optimizer has no embedding 'c'\. Build the same optimizer"):
        optimizer.load_local_state_dict(state)
    after = [tensor.to_local() for tensor in optimizer.tables[0].states]
    assert all(torch.equal(left, right) for left, right in zip(before, after, strict=True))


def test_the_first_of_two_optimisers_takes_the_gradients(graph: DistGraph) -> None:
    (param,) = params = [DistEmbedding(NUM_NODES, 2, "a")]
    item, second = (optim.SparseAdam(params, lr=0.1) for _ in range(2))
    param([3]).sum().backward()
    second.step()
    item.step()
    assert (item.tables[0].steps, second.tables[0].steps) == (0, 1)
    assert item.tables[0].states[0].name != second.tables[0].states[0].name


def test_a_closed_optimiser_frees_its_state_and_leaves_the_rows(graph: DistGraph) -> None:
    optimizer = train(["a"], 1)
    names = {state.kvstore_key for state in optimizer.tables[0].states}
    assert names <= set(graph.kvstore.names())
    rows = optimizer.params[0].weight.to_local()
    optimizer.close()
    assert not names & set(graph.kvstore.names())
    assert torch.equal(optimizer.params[0].weight.to_local(), rows)
    again = train(["a"], 1)
    assert {state.kvstore_key for state in again.tables[0].states} == names
    assert again.tables[0].steps == 1


FIRST = {
    "sgd": [1.0 - 0.5 * 2.0],
    "adagrad": [1.0 - 0.5],
    "adam": [1.0 - 0.5],
    # The root of the second moment is 1, and 2 once corrected; an eps of 1 counts in full or by half.
    "adam, eps before": [1.0 - 0.5 / (1.0 + 1.0)],
    "adam, eps behind": [1.0 - 0.5 / (1.0 + 0.5)],
}
RULES = {
    "sgd": sgd_rule(0.5),
    "adagrad": adagrad_rule(0.5, 0.0),
    "adam": adam_rule(0.5, (0.5, 0.75), 0.0),
    "adam, eps before": adam_rule(0.5, (0.5, 0.75), 1.0),
    "adam, eps behind": adam_rule(0.5, (0.5, 0.75), 1.0, corrected=True),
}


@pytest.mark.parametrize("kind", RULES)
def test_a_first_step_of_gradient_2(kind: str) -> None:
    rule: UpdateRule = RULES[kind]
    weight = np.ones((3, 1))
    states = tuple(np.zeros((9, 1)) for _ in rule.state_names)
    # Row 2 of the weights goes with row 7 of the states, and its gradient is half of the second row.
    gradient = RowSum(np.array([7]), np.array([[9.0], [4.0]]), np.array([1]), 0.5)
    rule.update(weight, np.array([2]), states, gradient, 1)
    assert weight[2] == pytest.approx(FIRST[kind])
    assert weight[:2].tolist() == [[1.0], [1.0]]
    assert [np.flatnonzero(state).tolist() for state in states] == [[7]] * len(states)


def sum_rows(ids: list[int], values: list[float], dtype: Any = np.float32) -> RowSum:
    return RowSum(np.array(ids, np.int64), np.array(values, dtype=dtype)[:, None], np.arange(len(ids)), 1.0)


def test_a_gradient_that_does_not_fit_is_refused(graph: DistGraph) -> None:
    table = OwnedRows(DistEmbedding(NUM_NODES, 1, "e"), [], sgd_rule(1.0))
    with pytest.raises(ConfigError, match=r"int64 ids and float32 rows, not int64, float64"):
        table.check(sum_rows([3], [1.0], dtype=np.float64))
    with pytest.raises(ConfigError, match=r"gradients of 2 ids cannot have shape \(1, 1\)"):
        table.check(sum_rows([3, 4], [1.0]))
    with pytest.raises(ConfigError, match="owns the rows 0 to 39 of 'e', not -1 to 40"):
        table.check(sum_rows([40, -1], [1.0, 1.0]))
    table.check(sum_rows([39], [1.0]))


def test_a_step_in_which_nobody_used_rows_of_this_rank_counts(graph: DistGraph) -> None:
    table = OwnedRows(DistEmbedding(NUM_NODES, 1, "e"), [], sgd_rule(1.0))
    for gradients in ([], [sum_rows([], [])]):
        table.apply(gradients)
    assert table.steps == 2


def test_updates_that_read_old_values_take_turns(graph: DistGraph) -> None:
    embedding = DistEmbedding(NUM_NODES, 1, "e")
    tables = [OwnedRows(embedding, [], sgd_rule(1.0)) for _ in range(2)]
    assert tables[0].lock is tables[1].lock is graph.kvstore.column(embedding.weight.kvstore_key).lock
