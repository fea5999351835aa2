"""State as a dictionary, several embeddings and several optimisers, and how one ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dglx_dist.comm.session import start_session
from dglx_dist.comm.topology import Topology
from dglx_dist.errors import ConfigError
from dglx_dist.graph import optim
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.embedding import DistEmbedding
from tests.graph.small import NUM_NODES


@pytest.fixture
def graph(small_dataset: Path) -> Any:
    with start_session(topology=Topology(0, 1, (0,)), seed=1):
        yield DistGraph(small_dataset)


def trained(names: list[str], steps: int) -> Any:
    params = [DistEmbedding(NUM_NODES, 2, name) for name in names]
    optimizer = optim.SparseAdam(params, lr=0.1)
    for _ in range(steps):
        torch.stack([param([3, 5]) for param in params]).pow(2).sum().backward()
        optimizer.step()
    return optimizer


def test_a_local_state_is_taken_over_with_its_steps(graph: DistGraph) -> None:
    optimizer = trained(["a", "b"], 2)
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
    optimizer = trained(["a", "b"], 1)
    state = optimizer.local_state_dict()
    before = [tensor.to_local() for tensor in optimizer.tables[0].states]
    for entry in state["emb_states"].values():
        entry["states"] = {name: rows + 1.0 for name, rows in entry["states"].items()}
    state["emb_states"]["c"] = state["emb_states"].pop("b")
    with pytest.raises(ConfigError, match=r"this optimiser has no embedding 'c'; build it as it was"):
        optimizer.load_local_state_dict(state)
    after = [tensor.to_local() for tensor in optimizer.tables[0].states]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_the_first_of_two_optimisers_takes_the_gradients(graph: DistGraph) -> None:
    (param,) = params = [DistEmbedding(NUM_NODES, 2, "a")]
    one, other = (optim.SparseAdam(params, lr=0.1) for _ in range(2))
    param([3]).sum().backward()
    other.step()
    one.step()
    assert (one.tables[0].steps, other.tables[0].steps) == (0, 1)
    assert one.tables[0].states[0].name != other.tables[0].states[0].name


def test_a_closed_optimiser_frees_its_state_and_leaves_the_rows(graph: DistGraph) -> None:
    optimizer = trained(["a"], 1)
    names = {state.kvstore_key for state in optimizer.tables[0].states}
    assert names <= set(graph.kvstore.names())
    rows = optimizer.params[0].weight.to_local()
    optimizer.close()
    assert not names & set(graph.kvstore.names())
    assert torch.equal(optimizer.params[0].weight.to_local(), rows)
    again = trained(["a"], 1)
    assert {state.kvstore_key for state in again.tables[0].states} == names
    assert again.tables[0].steps == 1
