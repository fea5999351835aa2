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
from dglx_dist.records import EDGE_TYPE, NODE_TYPE
from tests.graph.small import NUM_NODES
from tests.helpers import wide
from tests.helpers.ranks import run_ranks


@pytest.fixture
def graph(small_dataset: Path) -> Any:
    with start_session(topology=Topology(0, 1, (0,))):
        yield DistGraph(small_dataset)


def test_policies_are_named_as_in_dgl(graph: DistGraph) -> None:
    assert graph.get_node_partition_policy(NODE_TYPE).policy_str == "node~_N"
    assert graph.get_edge_partition_policy(EDGE_TYPE).policy_str == "edge~_N:_E:_N"
    own = graph.new_policy("relations", 11)
    assert (own.policy_str, own.get_size(), own.get_part_size()) == ("own~relations", 11, 11)
    assert own.to_partid(torch.tensor([0, 10])).tolist() == [0, 0]
    with pytest.raises(IndexError, match="id 11 at position 0 is outside own~relations"):
        own.to_partid(torch.tensor([11]))


def test_wrong_sizes_and_bounds_are_refused(graph: DistGraph) -> None:
    with pytest.raises(ConfigError, match="was given -1 rows"):
        graph.new_policy("r", -1)
    # "own~a~b" of it would be the tensor "b" of the policy "a".
    with pytest.raises(ConfigError, match="has a '~'"):
        graph.new_policy("a~b", 3)
    for bounds in ([0], [0, 5, 9], [1, 9], [0, -1]):
        with pytest.raises(ConfigError, match=r"for 1 server\(s\); give 2 ascending"):
            graph.new_policy("r", bounds)


def test_a_number_of_rows_that_fits_no_type_names_the_remedy(graph: DistGraph) -> None:
    with pytest.raises(ConfigError, match=r"no type has 11 rows .* part_policy=g.new_policy\(name, 11\)"):
        DistTensor((11, 4), torch.float32)


def relation_tables(folder: Path) -> dict[str, Any]:
    with start_session() as session:
        g = DistGraph(folder)
        servers = session.topology.num_servers
        seen: dict[str, Any] = {}
        for size in (11, 1, 0):
            table = DistTensor(
                (size, 2), torch.float32, f"w{size}", part_policy=g.new_policy("relations", size)
            )
            if g.rank() == 0:
                table[:] = torch.arange(2 * size, dtype=torch.float32).reshape(size, 2)
            g.barrier()
            seen[f"w{size}"] = (table.to_local().tolist(), len(table.local_rows()))
            assert f"w{size}" not in g.ndata
        by_hand = g.new_policy("by hand", [0, *[5] * servers])
        only_first = DistTensor((5,), torch.int64, "x", part_policy=by_hand)
        only_first[:] = g.rank() * 0 + 7
        g.barrier()
        again = DistTensor((5,), torch.int64, "x", part_policy=g.new_policy("by hand", [0, *[5] * servers]))
        seen["x"] = (again.to_local().tolist(), again.local_range)
        return seen


@pytest.mark.parametrize(("ranks", "per_server"), [(1, None), (3, 2), *wide((2, 1), (3, 1))])
def test_tables_of_any_size_lie_on_the_servers(
    small_dataset: Path, ranks: int, per_server: int | None
) -> None:
    outcomes = run_ranks(relation_tables, ranks, args=(small_dataset,), ranks_per_server=per_server)
    servers = -(-ranks // per_server) if per_server else 1
    first_of_server = [outcomes[server * (per_server or 1)] for server in range(servers)]
    for size in (11, 1, 0):
        table = torch.arange(2.0 * size).reshape(size, 2).tolist()
        assert all(seen[f"w{size}"][0] == table for seen in outcomes)
        rows = [seen[f"w{size}"][1] for seen in first_of_server]
        assert sum(rows) == size
        assert max(rows) - min(rows) <= 1
    assert [seen["x"][1] for seen in first_of_server] == [(0, 5)] + [(5, 5)] * (servers - 1)
    assert all(seen["x"][0] == [7] * 5 for seen in outcomes)


def test_a_tensor_of_all_nodes_can_be_asked_for_by_policy(graph: DistGraph) -> None:
    policy = graph.get_node_partition_policy(NODE_TYPE)
    assert DistTensor((NUM_NODES,), torch.bool, "seen", part_policy=policy).part_policy is policy
    with pytest.raises(ConfigError, match="a tensor of 7 rows does not go with own~r, of which there are 8"):
        DistTensor((7,), torch.bool, part_policy=graph.new_policy("r", 8))
