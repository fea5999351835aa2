from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dglx_dist.comm.session import start_session
from dglx_dist.comm.topology import Topology
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.dist_tensor import DistTensor
from tests.graph.small import NUM_NODES
from tests.helpers import wide
from tests.helpers.ranks import run_ranks


def ones(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


@pytest.fixture
def graph(small_dataset: Path) -> Any:
    with start_session(topology=Topology(0, 1, (0,))):
        yield DistGraph(small_dataset)


@pytest.mark.parametrize(
    "index",
    [
        torch.tensor([3, 1, 1]),
        torch.tensor([3, 1, 1], dtype=torch.int32),
        np.array([3, 1, 1], dtype=np.uint8),
        [3, 1, 1],
        [],
        np.arange(NUM_NODES) % 7 == 0,
        torch.arange(NUM_NODES) < 3,
        slice(5, 30, 3),
        slice(None, None, -1),
        4,
    ],
)
def test_every_kind_of_index_reads_as_numpy_does(graph: DistGraph, index: Any) -> None:
    tensor = graph.ndata["feat"]
    whole = tensor.to_local().numpy()
    plain = index.numpy() if isinstance(index, torch.Tensor) else index
    expected = (
        whole[np.array(plain, dtype=np.int64) if plain == [] else plain]
        if isinstance(plain, list)
        else whole[plain]
    )
    assert np.array_equal(tensor[index].numpy(), expected)


def test_shape_dtype_and_length_are_of_the_whole(graph: DistGraph) -> None:
    assert (graph.ndata["feat"].shape, graph.ndata["feat"].dtype) == ((NUM_NODES, 5), torch.float32)
    assert (graph.ndata["train_mask"].dtype, len(graph.ndata["train_mask"])) == (torch.bool, NUM_NODES)
    assert graph.ndata["train_mask"].to_local().sum() == 14


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([0, 40], "id 40 at position 1"),
        (-1, "id -1 at position 0"),
        (np.zeros(3, bool), "40 rows but the mask has 3"),
        ([0.5], "float64 values"),
        (np.zeros((2, 2), int), "one of one dimension"),
    ],
)
def test_a_wrong_index_is_named(graph: DistGraph, index: Any, message: str) -> None:
    with pytest.raises(IndexError, match=message):
        graph.ndata["feat"][index]


def test_tensors_of_the_dataset_cannot_be_written(graph: DistGraph) -> None:
    with pytest.raises(ConfigError, match="read-only; create a tensor"):
        graph.ndata["feat"][[0]] = torch.zeros(1, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.float16])
def test_write_then_read_in_every_dtype(graph: DistGraph, dtype: torch.dtype) -> None:
    tensor = graph.new_tensor((NUM_NODES, 2), dtype)
    values = torch.tensor([[1, 0], [0, 1]]).to(dtype)
    tensor[[7, 3]] = values
    assert torch.equal(tensor[[3, 7]], values.flip(0))
    assert tensor.to_local().float().sum() == 2


def test_values_are_broadcast_and_a_narrowing_dtype_is_refused(graph: DistGraph) -> None:
    tensor = graph.new_tensor((NUM_NODES, 2), torch.int64)
    tensor[:] = 3
    assert tensor.to_local().sum() == 240
    with pytest.raises(ConfigError, match=r"holds torch.int64; convert the torch.float32"):
        tensor[[0]] = torch.ones(1, 2)
    with pytest.raises(ConfigError, match=r"values of shape \(2, 2\)"):
        tensor[[0, 1]] = torch.ones(3, 2, dtype=torch.int64)
    values: Any
    for values in ("x", None, [[1, 2], [3]]):
        with pytest.raises(ConfigError, match=f"takes no {type(values).__name__} here"):
            tensor.push([0, 1], values)


@pytest.mark.parametrize(
    ("dtype", "values", "lost"),
    [
        (torch.int64, 1.5, "1.5"),
        (torch.int8, 300, "300"),
        (torch.bool, 2, "2"),
        (torch.int32, torch.tensor([[1, 2**40]]), str(2**40)),
        (torch.uint8, torch.tensor([[0, -1]]), "-1"),
        (torch.int64, float("nan"), "nan"),
    ],
)
def test_values_that_integers_cannot_hold_are_refused(
    graph: DistGraph, dtype: torch.dtype, values: Any, lost: str
) -> None:
    tensor = graph.new_tensor((NUM_NODES, 2), dtype)
    with pytest.raises(ConfigError, match=f"holds {dtype}, which cannot hold {lost}"):
        tensor[[0]] = values
    tensor[[1]] = 1.0
    tensor[[2]] = torch.tensor([[1, 0]]).to(torch.int64 if dtype != torch.bool else torch.bool)
    assert tensor.count_nonzero() == 3


def test_a_name_attaches_if_shape_and_dtype_match(graph: DistGraph) -> None:
    first = DistTensor((NUM_NODES,), torch.float32, "h", init_func=ones, part_policy=None)
    second = DistTensor((NUM_NODES,), torch.float32, "h")
    second[[0]] = 5.0
    assert (first[0], float(graph.ndata["h"].to_local().sum())) == (5.0, 44.0)
    with pytest.raises(ConfigError, match="choose another name"):
        DistTensor((NUM_NODES, 2), torch.float32, "h")
    with pytest.raises(ConfigError, match="already"):
        DistTensor((NUM_NODES,), torch.float32, "h", attach=False)
    with pytest.raises(ConfigError, match="no type has 39 rows"):
        DistTensor((39,), torch.float32)


def test_first_values_for_a_column_of_the_dataset_are_refused(graph: DistGraph) -> None:
    assert DistTensor((NUM_NODES, 5), torch.float32, "feat").to_local().abs().sum() > 0
    with pytest.raises(ConfigError, match="'feat' is data of the dataset, which init_func cannot fill"):
        DistTensor((NUM_NODES, 5), torch.float32, "feat", init_func=ones)


def test_a_deleted_tensor_frees_its_name(graph: DistGraph) -> None:
    graph.new_tensor((NUM_NODES,), torch.float32, "h")
    del graph.ndata["h"]
    assert "h" not in graph.ndata
    assert graph.new_tensor((NUM_NODES, 3), torch.float32, "h").shape == (NUM_NODES, 3)


def write_each_others_rows(folder: Path) -> Any:
    with start_session() as session:
        g = DistGraph(folder)
        rank, world = g.rank(), session.topology.world_size
        tensor = g.new_tensor((NUM_NODES, 2), torch.bfloat16, "h", init_func=ones)
        left = [name for name in os.listdir(session.scratch) if "tensor" in name]
        g.barrier()
        ids = torch.arange(rank, NUM_NODES, world)
        tensor[ids] = (10 * rank + torch.zeros(len(ids), 2)).to(torch.bfloat16)
        g.barrier()
        first, last = tensor.local_range
        shared = tensor.local_rows()
        assert torch.equal(shared, tensor[first:last])
        return (
            tensor.to_local()[:, 1].float().tolist(),
            left,
            session.ledger.total(phase="push", outside=False),
        )


@pytest.mark.parametrize(("ranks", "per_server"), [(4, 2), *wide((2, 2), (3, 1))])
def test_ranks_write_rows_of_all_servers(small_dataset: Path, ranks: int, per_server: int) -> None:
    expected = [10.0 * (node % ranks) for node in range(NUM_NODES)]
    for values, left, inside in run_ranks(
        write_each_others_rows, ranks, args=(small_dataset,), ranks_per_server=per_server
    ):
        assert values == expected
        assert left == []
        assert inside == 0


def create_in_vain(folder: Path) -> list[Any]:
    with start_session() as session:
        g = DistGraph(folder)

        def out_of_luck(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            if g.rank() == 1:
                raise ValueError("no luck")
            return torch.zeros(shape, dtype=dtype)

        said: list[Any] = []
        for width, init in ((1 + g.rank(), None), (1, out_of_luck)):
            try:
                g.new_tensor((NUM_NODES, width), torch.float32, "h", init)
            except ConfigError as error:
                said.append(str(error))
        return [*said, [name for name in os.listdir(session.scratch) if "tensor" in name]]


def test_what_one_rank_cannot_create_all_hear_of(small_dataset: Path) -> None:
    for different, raised, left in run_ranks(create_in_vain, 2, args=(small_dataset,), ranks_per_server=1):
        assert "creating one is collective" in different
        assert raised == "init_func raised ValueError: no luck"
        assert left == []


@pytest.mark.parametrize("shape", [(), (NUM_NODES, -1), (NUM_NODES, 2.5), NUM_NODES, "ab"])
def test_a_shape_that_is_none_is_refused(graph: DistGraph, shape: Any) -> None:
    with pytest.raises(ConfigError, match="shape is"):
        DistTensor(shape, torch.float32)
