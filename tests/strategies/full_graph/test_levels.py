import numpy as np

from dglx_dist.comm.session import start_session
from dglx_dist.strategies.full_graph.plan_builder import Mailbox, ServerLeaders, grow_levels
from tests.strategies.full_graph.test_closure import PATH


def test_ids_are_cut_by_owner() -> None:
    leaders = ServerLeaders(ranks=(0, 2, 4), server=1, bounds=np.array([0, 3, 3, 9]))
    assert leaders.own == (3, 3)
    pieces = leaders.split(np.array([0, 2, 3, 8]))
    assert {rank: ids.tolist() for rank, ids in pieces.items()} == {0: [0, 2], 2: [], 4: [3, 8]}


def test_one_server_computes_the_same_for_any_hops() -> None:
    """4 <- 3 <- 2, 5: with one server all nodes are its own."""
    done: list[int] = []
    with start_session() as session:
        mailbox = Mailbox(session, "test")
        for hops in (0, 1, 2):
            leaders = ServerLeaders(ranks=(0,), server=0, bounds=np.array([0, 6]))
            with mailbox.job():
                found = grow_levels(PATH, np.array([4]), (2, hops), leaders, mailbox, advance=done.append)
            assert found.nodes.tolist() == [4, 3, 2, 5]
            assert found.counts.tolist() == [4, 2, 1]
    assert done == [1] * 6
