"""DistTensor: creation, policies, reads, writes, and the search for nonzero rows."""

import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dglx_dist
from dglx_dist.comm.collectives import barrier, gather_int64, gather_json
from dglx_dist.comm.session import Session, start_session
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.dist_tensor import DistTensor
from dglx_dist.graph.split import node_split
from dglx_dist.records import EDGE_TYPE, NODE_TYPE
from tests.graph.small import NUM_NODES
from tests.helpers import wide
from tests.helpers.ranks import run_ranks


def each(folder: Path) -> None:
    for function in (free_in_blocks, relation_tables, find_nonzero, write_each_others_rows):
        with start_session() as session:
            function(DistGraph(folder), session)


@pytest.mark.parametrize(("ranks", "per_server"), [(1, None), (3, 2), *wide((2, 1), (3, 1))])
def test_tensors_agree_on_ranks_and_servers(small_dataset: Path, ranks: int, per_server: int | None) -> None:
    run_ranks(each, ranks, args=(small_dataset,), ranks_per_server=per_server)


def ones(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


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
    full = tensor.to_local().numpy()
    plain = index.numpy() if isinstance(index, torch.Tensor) else index
    expected = (
        full[np.array(plain, dtype=np.int64) if plain == [] else plain]
        if isinstance(plain, list)
        else full[plain]
    )
    assert np.array_equal(tensor[index].numpy(), expected)


def test_shape_dtype_and_length_describe_all_rows(graph: DistGraph) -> None:
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
        (np.zeros((2, 2), int), "Use one dimension"),
    ],
)
def test_a_wrong_index_is_named(graph: DistGraph, index: Any, message: str) -> None:
    with pytest.raises(IndexError, match=message):
        graph.ndata["feat"][index]


def calls_of_a_pull(folder: Path) -> list[str]:
    """The package's functions that rank 0 calls in its thread for a pull from both servers: module names."""
    package = str(Path(dglx_dist.__file__).parent)
    pulls: list[list[str]] = [[], [], []]

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            pulls[0].append(Path(frame.f_code.co_filename).relative_to(package).as_posix())

    with start_session() as session:
        g = DistGraph(folder)
        ids = torch.arange(NUM_NODES)
        expected = g.ndata["feat"][ids]  # connects, and compiles kernels
        for _ in pulls if g.rank() == 0 else []:
            pulls = [pulls[-1], *pulls[:-1]]
            sys.setprofile(note)
            rows = g.ndata["feat"][ids]
            sys.setprofile(None)
            assert torch.equal(rows, expected)
            assert session.ledger.total(phase="features", outside=True) > 0
        barrier(session, "the other rank answers")
    # Each tenth of a second of waiting for the answer makes two calls more.
    return min(pulls, key=len)


def test_a_pull_from_two_servers_goes_through_few_modules_and_calls(small_dataset: Path) -> None:
    called, _ = run_ranks(calls_of_a_pull, 2, args=(small_dataset,), ranks_per_server=1)
    assert {"graph/dist_tensor.py", "graph/kvstore.py", "comm/rpc.py"} <= set(called)
    assert len(set(called)) <= 12, sorted(set(called))
    assert len(called) <= 70, called


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
    with pytest.raises(ConfigError, match=r"holds torch.int64\. Convert the torch.float32"):
        tensor[[0]] = torch.ones(1, 2)
    with pytest.raises(ConfigError, match=r"takes shape \(2, 2\)"):
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
def test_integers_refuse_other_values(graph: DistGraph, dtype: torch.dtype, values: Any, lost: str) -> None:
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
    assert DistTensor((NUM_NODES, 5), torch.float32, "feat").to_local().abs().sum() > 0


def test_a_deleted_tensor_frees_its_name(graph: DistGraph) -> None:
    graph.new_tensor((NUM_NODES,), torch.float32, "h")
    del graph.ndata["h"]
    assert "h" not in graph.ndata
    assert graph.new_tensor((NUM_NODES, 3), torch.float32, "h").shape == (NUM_NODES, 3)


@pytest.mark.parametrize(
    "remove",
    [lambda data: data.pop("feat"), lambda data: data.popitem(), lambda data: data.__delitem__("feat")],
)
def test_refuses_to_remove_a_column_of_the_dataset(graph: DistGraph, remove: Any) -> None:
    names = list(graph.ndata)
    with pytest.raises(ConfigError, match="is data of the dataset and cannot be removed"):
        remove(graph.ndata)
    assert list(graph.ndata) == names
    assert graph.ndata["feat"][:].shape == (NUM_NODES, 5)


def test_pop_returns_rows_and_deletes(graph: DistGraph) -> None:
    graph.new_tensor((NUM_NODES,), torch.float32, "h", init_func=ones)
    assert torch.equal(graph.ndata.pop("h"), torch.ones(NUM_NODES))
    assert "h" not in graph.ndata
    assert graph.ndata.pop("h", None) is None
    with pytest.raises(KeyError, match="no tensor 'h'"):
        graph.ndata.pop("h")


def test_reads_and_writes_by_uint8_masks_as_torch_does(graph: DistGraph) -> None:
    mask = (torch.arange(NUM_NODES) % 3 == 1).to(torch.uint8)
    plain = graph.ndata["feat"][:]
    assert torch.equal(graph.ndata["feat"][mask], plain[mask.bool()])
    tensor = graph.new_tensor((NUM_NODES,), torch.float32, "marked")
    tensor[mask] = 1.0
    assert torch.equal(tensor[:], mask.float())
    assert torch.equal(graph.in_degrees(mask), graph.in_degrees()[mask.bool()])


@pytest.mark.parametrize("index", [torch.tensor([3, 1], dtype=torch.uint8), np.ones(NUM_NODES, np.uint8)])
def test_refuses_uint8_that_could_be_ids_or_a_mask(graph: DistGraph, index: Any) -> None:
    with pytest.raises(IndexError, match="Convert a mask to bool, or ids to int64"):
        graph.ndata["feat"][index]


def write_each_others_rows(g: DistGraph, session: Session) -> None:
    rank, world, every = g.rank(), session.topology.world_size, torch.arange(NUM_NODES)
    tensor = g.new_tensor((NUM_NODES, 2), torch.bfloat16, "h", init_func=ones)
    assert [name for name in os.listdir(session.scratch) if "tensor" in name] == []
    g.barrier()
    ids = every[every % world == rank]
    tensor[ids] = (10 * rank + torch.zeros(len(ids), 2)).to(torch.bfloat16)
    g.barrier()
    first, last = tensor.local_range
    assert torch.equal(tensor.local_rows(), tensor[first:last])
    assert torch.equal(tensor.to_local()[:, 1].float(), 10.0 * (every % world))
    assert session.ledger.total(phase="push", outside=False) == 0


def differ_on_one_rank(folder: Path) -> None:
    with start_session(timeout_s=30) as session:
        g = DistGraph(folder)
        single = g.rank() == 1

        def out_of_luck(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            if single:
                raise ValueError("no luck")
            return torch.zeros(shape, dtype=dtype)

        right: dict[str, Any] = {"shape": (NUM_NODES,), "dtype": torch.float32, "name": "h"}
        own = {"shape": (5,), "part_policy": g.new_policy("r", 5)}
        for inputs, wrong, message in (
            ({}, {"shape": (39,)}, "no type has 39 rows"),
            (
                {},
                {"shape": (NUM_NODES, 2)},
                "rank 0 has shape=.40., rank 1 has shape=.40, 2.; create it with the same arguments",
            ),
            (
                {},
                {"dtype": torch.int64},
                "rank 0 has dtype=float32, rank 1 has dtype=int64; create it with the same arguments",
            ),
            ({}, {"dtype": torch.complex64}, "cannot have dtype 'complex64'"),
            ({"name": None}, {"shape": ()}, "Start with the number of rows"),
            (
                own,
                {"shape": (6,), "part_policy": g.new_policy("r", 6)},
                "create it with the same arguments on all ranks",
            ),
            (own, {"part_policy": 3}, r"part_policy is 3\. Use g\.get_node_partition_policy"),
            ({"init_func": out_of_luck}, {}, "init_func raised ValueError: no luck"),
        ):
            with pytest.raises(ConfigError, match=message):
                DistTensor(**{**right, **inputs, **(wrong if single else {})})
        assert [name for name in os.listdir(session.scratch) if "tensor" in name] == []
        # Numbers are still in step, and no name is taken.
        assert len(set(gather_json(DistTensor((NUM_NODES,), torch.float32).name, session))) == 1
        made = DistTensor(**right)
        g.barrier()
        is_made = r"float32 of shape \(40,\), server bounds .0, 14, 40., not "
        for wrong, message in (
            ({"shape": (NUM_NODES, 2)}, is_made + r"float32 of shape \(40, 2\)"),
            ({"dtype": torch.int64}, is_made + r"int64 of shape \(40,\)"),
            ({"attach": False}, "already"),
            ({"shape": (39,)}, "no type has 39 rows"),
        ):
            if single:
                with pytest.raises(ConfigError, match=message):
                    DistTensor(**{**right, **wrong})
        if single:
            DistTensor(**right)[[3]] = torch.tensor([4.0])
        g.barrier()
        assert made[3] == 4.0


def test_different_requests_of_one_rank_are_an_error_on_all(
    small_dataset: Path,
) -> None:
    run_ranks(differ_on_one_rank, 2, args=(small_dataset,), ranks_per_server=1)


def free_in_blocks(g: DistGraph, session: Session) -> None:
    """A block frees its tensor, also after an error; and masks are joined and counted."""
    for columns in (1, 2, 3):
        with g.new_tensor((NUM_NODES, columns), torch.float32, "h") as hidden:
            hidden.push(torch.arange(NUM_NODES), torch.ones(1), accumulate=True, wait=False)
            g.barrier()
            assert hidden[5].tolist() == [session.topology.world_size] * columns
    assert "h" not in g.ndata
    with pytest.raises(KeyError), g.new_tensor((NUM_NODES,), torch.float32, "h"):
        raise KeyError("on every rank, but it need not be")
    assert [key for key in g.kvstore.names() if key.endswith("~h")] == []
    train = g.ndata["train_mask"]
    mask = train | g.new_tensor((NUM_NODES,), torch.bool)
    assert torch.equal(mask.to_local(), train.to_local())
    sent = session.ledger.snapshot()
    assert [train.count_nonzero(), g.ndata["feat"].count_nonzero()] == [14, 199]
    num_bytes = sum(row.num_bytes for row in session.ledger.since(sent) if row.phase == "masks")
    assert num_bytes == 2 * 8 * (session.topology.num_servers - 1)


def test_to_moves_read_rows_and_not_the_stored_ones(graph: DistGraph) -> None:
    tensor = graph.ndata["feat"]
    moved = tensor.to("meta")
    assert (moved[[0, 1]].device.type, tensor[[0, 1]].device.type) == ("meta", "cpu")
    assert (moved.shape, moved.name, moved.device.type) == (tensor.shape, "feat", "meta")
    assert tensor.to() is not tensor
    assert tensor.to()[0].device.type == "cpu"


def test_policies_are_named_as_in_dgl(graph: DistGraph) -> None:
    assert graph.get_node_partition_policy(NODE_TYPE).policy_str == "node~_N"
    assert graph.get_edge_partition_policy(EDGE_TYPE).policy_str == "edge~_N:_E:_N"
    own = graph.new_policy("relations", 11)
    assert (own.policy_str, own.get_size(), own.get_part_size()) == ("own~relations", 11, 11)
    assert own.to_partid(torch.tensor([0, 10])).tolist() == [0, 0]
    with pytest.raises(IndexError, match="id 11 at position 0 is outside own~relations"):
        own.to_partid(torch.tensor([11]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda g: g.new_policy("r", -1), "has -1 rows"),
        # "own~a~b" of it would be the tensor "b" of the policy "a".
        (lambda g: g.new_policy("a~b", 3), "contains '~'"),
        (lambda g: g.new_policy("r", [0]), r"for 1 server\(s\)\. Pass 2 ascending"),
        (lambda g: g.new_policy("r", [0, 5, 9]), "Pass 2 ascending"),
        (lambda g: g.new_policy("r", [1, 9]), "Pass 2 ascending"),
        (lambda g: g.new_policy("r", [0, -1]), "Pass 2 ascending"),
        (lambda _: DistTensor((11, 4), torch.float32), r"no type has 11 rows .*new_policy\(name, 11\)"),
        (lambda _: DistTensor((), torch.float32), "shape is"),
        (lambda _: DistTensor((NUM_NODES, -1), torch.float32), "shape is"),
        (lambda _: DistTensor((NUM_NODES, 2.5), torch.float32), "shape is"),
        (lambda _: DistTensor(NUM_NODES, torch.float32), "shape is"),
        (lambda _: DistTensor("ab", torch.float32), "shape is"),
        (
            lambda g: DistTensor((7,), torch.bool, part_policy=g.new_policy("r", 8)),
            "a tensor has 7 rows, but own~r has 8",
        ),
        (lambda _: DistTensor((NUM_NODES, 2), torch.float32, "feat"), "Use another name"),
        (lambda _: DistTensor((NUM_NODES,), torch.int64, "label", attach=False), "already"),
        (
            lambda _: DistTensor((NUM_NODES, 5), torch.float32, "feat", init_func=ones),
            "'feat' is data of the dataset. init_func cannot fill",
        ),
        (lambda g: g.ndata["train_mask"] | g.ndata["label"], r"cannot be joined\. Use two masks"),
        (lambda g: g.ndata["feat"] | g.ndata["feat"], "cannot be joined"),
        (
            lambda g: g.kvstore.nonzero(g.ndata["feat"].kvstore_key),
            r"has rows of shape \(5,\), but a mask has numbers",
        ),
        (lambda g: g.kvstore.count_nonzero("x"), "no tensor 'x'"),
        (lambda g: g.ndata["feat"].push([0], torch.zeros(1, 5)), "read-only. Create a writable tensor"),
    ],
)
def test_refuses_wrong_writes(graph: DistGraph, make: Callable[[DistGraph], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(graph)


def relation_tables(g: DistGraph, session: Session) -> None:
    """Tables of any size lie on the servers."""
    topology = session.topology
    for size in (11, 1, 0):
        policy, name = g.new_policy("relations", size), f"w{size}"
        table = DistTensor((size, 2), torch.float32, name, part_policy=policy)
        values = torch.arange(2.0 * size).reshape(size, 2)
        if g.rank() == 0:
            table[:] = values
        g.barrier()
        assert torch.equal(table.to_local(), values)
        assert name not in g.ndata
        rows = gather_int64([len(table.local_rows()), topology.server], session)
        of_servers = [count for count, _ in sorted({(int(n), int(server)) for n, server in rows})]
        assert max(of_servers) - min(of_servers) <= 1
        assert len(table.local_rows()) == np.diff(policy.bounds)[topology.server]
    by_hand = g.new_policy("by hand", [0, *[5] * topology.num_servers])
    DistTensor((5,), torch.int64, "x", part_policy=by_hand)[:] = 7
    g.barrier()
    again = DistTensor((5,), torch.int64, "x", part_policy=g.new_policy("by hand", by_hand.bounds.tolist()))
    assert again.to_local().tolist() == [7] * 5
    assert again.local_range == ((5, 5) if topology.server else (0, 5))


def test_a_tensor_of_all_nodes_can_be_asked_for_by_policy(graph: DistGraph) -> None:
    policy = graph.get_node_partition_policy(NODE_TYPE)
    assert DistTensor((NUM_NODES,), torch.bool, "seen", part_policy=policy).part_policy is policy
    with pytest.raises(TypeError):
        graph.ndata["train_mask"] | 1  # type: ignore[operator]


def find_nonzero(g: DistGraph, session: Session) -> None:
    """Marked rows are found for one bit a row, and shares of them are disjoint."""
    mask = g.ndata["train_mask"]
    before = session.ledger.snapshot()
    marked = g.kvstore.nonzero(mask.kvstore_key)
    sent = session.ledger.since(before)
    assert marked.tolist() == np.flatnonzero(mask.to_local().numpy()).tolist()
    counts = np.diff(mask.part_policy.bounds).tolist()
    del counts[session.topology.server]
    assert sum(row.num_bytes for row in sent) == sum(-(-count // 8) for count in counts)
    half = g.new_tensor((NUM_NODES,), torch.bfloat16, "half")
    if g.rank() == 0:
        half[[3, 38, 7]] = torch.tensor([1.0, -2.0, -0.0], dtype=torch.bfloat16)
    g.barrier()
    assert g.kvstore.nonzero(half.kvstore_key).tolist() == [3, 38]
    assert half.count_nonzero() == 2
    before = session.ledger.snapshot()
    share = node_split(mask)
    assert {row.phase for row in session.ledger.since(before)} == ({"masks"} if counts else set())
    shares = gather_json(share.tolist(), session)
    assert sorted(itertools.chain(*shares)) == marked.tolist()


def test_no_rows_have_no_nonzero(graph: DistGraph) -> None:
    empty = DistTensor((0,), torch.bool, "none", part_policy=graph.new_policy("none", 0))
    assert graph.kvstore.nonzero(empty.kvstore_key).tolist() == []
    assert empty.count_nonzero() == 0
