"""Creating tensors by name over real ranks: alike on all, or an error on all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


def refused(create: Any) -> str:
    try:
        create()
    except ConfigError as error:
        return str(error)
    return ""


def differ_on_one_rank(folder: Path) -> list[str]:
    with start_session(timeout_s=30):
        g = DistGraph(folder)
        one = g.rank() == 1
        rows, float32 = (NUM_NODES,), torch.float32
        own, other = g.new_policy("r", 5), g.new_policy("r", 6)
        said = [
            refused(lambda: DistTensor((39,) if one else rows, float32, "h")),
            refused(lambda: DistTensor((NUM_NODES, 2) if one else rows, float32, "h")),
            refused(lambda: DistTensor(rows, torch.int64 if one else float32, "h")),
            refused(lambda: DistTensor(rows, torch.complex64 if one else float32, "h")),
            refused(lambda: DistTensor((), float32) if one else DistTensor(rows, float32)),
            refused(lambda: DistTensor((6 if one else 5,), float32, "h", part_policy=other if one else own)),
        ]
        # Numbers are still in step, and no name is taken.
        unnamed = DistTensor(rows, float32)
        DistTensor(rows, float32, "h")
        g.barrier()
        if one:
            said += [
                refused(lambda: DistTensor((NUM_NODES, 2), float32, "h")),
                refused(lambda: DistTensor(rows, torch.int64, "h")),
                refused(lambda: DistTensor(rows, float32, "h", attach=False)),
                refused(lambda: DistTensor((39,), float32, "h")),
            ]
            DistTensor(rows, float32, "h")[[3]] = torch.tensor([4.0])
        g.barrier()
        return [*said, unnamed.name, str(float(g.ndata["h"][3]))]


def test_what_one_rank_asks_for_differently_is_an_error_on_all_and_attaching_on_one_alone(
    small_dataset: Path,
) -> None:
    zero, one = run_ranks(differ_on_one_rank, 2, args=(small_dataset,), ranks_per_server=1)
    assert zero[0].startswith("rank 1: no type has 39 rows")
    assert one[0].startswith("no type has 39 rows")
    for said in (zero, one):
        assert "[40, 2], 'float32'" in said[1]
        assert "[40], 'int64'" in said[2]
        assert all("creating one is collective" in text for text in (said[1], said[2], said[5]))
        assert "cannot have dtype 'complex64'" in said[3]
        assert "give the number of rows first" in said[4]
    assert "is float32 of shape (40,), not float32 of shape (40, 2); choose another name" in one[6]
    assert "is float32 of shape (40,), not int64 of shape (40,)" in one[7]
    assert "already" in one[8]
    assert "no type has 39 rows" in one[9]
    assert zero[6:] == one[10:]
    assert zero[7] == "4.0"


def use_two_graphs(folder: Path) -> list[Any]:
    with start_session():
        first, second = DistGraph(folder), DistGraph(folder)
        one = first.new_tensor((NUM_NODES,), torch.int64, "h")
        two = second.new_tensor((NUM_NODES,), torch.int64, "h")
        one[:] = 1
        second.barrier()
        values = [int(one.to_local().sum()), int(two.to_local().sum())]
        second.barrier()
        two.delete()
        second.close()
        return [*values, "h" in first.ndata, refused(lambda: one | first.ndata["label"])]


def name_what_is_no_policy(folder: Path) -> list[str]:
    with start_session(timeout_s=15):
        g = DistGraph(folder)
        policy: Any = 3 if g.rank() == 1 else g.get_node_partition_policy("_N")
        said = refused(lambda: DistTensor((NUM_NODES,), torch.float32, "h", part_policy=policy))
        # Numbers are still in step.
        return [said, g.new_tensor((NUM_NODES,), torch.float32).name]


def test_what_is_no_policy_on_one_rank_is_an_error_on_all(small_dataset: Path) -> None:
    zero, one = run_ranks(name_what_is_no_policy, 2, args=(small_dataset,), ranks_per_server=1)
    assert zero[0] == f"rank 1: {one[0]}"
    assert one[0] == "part_policy is 3; give what g.get_node_partition_policy gives"
    assert zero[1] == one[1]


def test_two_graphs_have_tensors_of_their_own(small_dataset: Path) -> None:
    joined = [NUM_NODES, 0, True, ""]
    assert run_ranks(use_two_graphs, 2, args=(small_dataset,), ranks_per_server=1) == [joined] * 2


def free_in_blocks(folder: Path) -> list[Any]:
    with start_session() as session:
        g = DistGraph(folder)
        names = []
        for layer in range(3):
            with g.new_tensor((NUM_NODES, 1 + layer), torch.float32, "h") as hidden:
                hidden.push(torch.arange(NUM_NODES), torch.ones(1), accumulate=True, wait=False)
                g.barrier()
                names.append(float(hidden[5].sum()))
        gone = "h" not in g.ndata
        try:
            with g.new_tensor((NUM_NODES,), torch.float32, "h"):
                raise KeyError("on every rank, but it need not be")
        except KeyError:
            pass
        left = [key for key in g.kvstore.names() if key.endswith("~h")]
        mask = g.ndata["train_mask"] | g.new_tensor((NUM_NODES,), torch.bool)
        same = torch.equal(mask.to_local(), g.ndata["train_mask"].to_local())
        sent = session.ledger.snapshot()
        counts = [g.ndata["train_mask"].count_nonzero(), g.ndata["feat"].count_nonzero()]
        num_bytes = sum(row.num_bytes for row in session.ledger.since(sent) if row.phase == "masks")
        return [names, gone, left, same, counts, num_bytes]


@pytest.mark.parametrize(("ranks", "per_server"), [(1, None), (3, 2), *wide((2, 1))])
def test_a_block_frees_its_tensor_and_masks_are_joined_and_counted(
    small_dataset: Path, ranks: int, per_server: int | None
) -> None:
    servers = 1 if per_server is None else 2
    expected = [[ranks * 1.0, ranks * 2.0, ranks * 3.0], True, [], True, [14, 199], 2 * 8 * (servers - 1)]
    assert (
        run_ranks(free_in_blocks, ranks, args=(small_dataset,), ranks_per_server=per_server)
        == [expected] * ranks
    )


def test_masks_of_different_kinds_cannot_be_joined(small_dataset: Path) -> None:
    with start_session(topology=Topology(0, 1, (0,))):
        g = DistGraph(small_dataset)
        with pytest.raises(ConfigError, match="cannot be joined; give two masks"):
            g.ndata["train_mask"] | g.ndata["label"]
        with pytest.raises(ConfigError, match="cannot be joined"):
            g.ndata["feat"] | g.ndata["feat"]
        with pytest.raises(TypeError):
            g.ndata["train_mask"] | 1  # type: ignore[operator]


def test_to_moves_what_is_read_and_not_the_rows(small_dataset: Path) -> None:
    with start_session(topology=Topology(0, 1, (0,))):
        tensor = DistGraph(small_dataset).ndata["feat"]
        moved = tensor.to("meta")
        assert (moved[[0, 1]].device.type, tensor[[0, 1]].device.type) == ("meta", "cpu")
        assert (moved.shape, moved.name, moved.device.type) == (tensor.shape, "feat", "meta")
        assert tensor.to() is not tensor
        assert tensor.to()[0].device.type == "cpu"
