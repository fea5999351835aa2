"""Gate and barriers: which interval may go on, of programs whose course is written down here."""

import pytest

from dglx_dist.errors import ConfigError
from dglx_dist.strategies.serverless.graph_server import Barrier, TaskKind, epoch_schedule
from dglx_dist.strategies.serverless.options import StalenessPolicy
from dglx_dist.strategies.serverless.scheduler import Progress
from tests.serverless.programs import gat, gcn, sage

GCN = ["GA1 gather", "AV1 f", "SC1 scatter", "GA2 gather |", "AV2 fb"]
GCN += ["GA2 publish", "SC1 send_back ,", "SC1 collect |", "AV1 b"]
GAT = [
    "AV1 f",
    "SC1 scatter",
    "AE1 f |",
    "GA1 gather",
    "AV2 f",
    "SC2 scatter",
    "AE2 f |",
    "GA2 gather",
    "AV3 fb",
]
GAT += ["GA2 publish", "AE2 b", "SC2 send_back ,", "SC2 collect |", "AV2 b"]
GAT += ["GA1 publish", "AE1 b", "SC1 send_back ,", "SC1 collect |", "AV1 b"]
MARK = {Barrier.NONE: "", Barrier.LOCAL: " ,", Barrier.GLOBAL: " |"}


def words(program, fused: bool = True) -> list[str]:
    return [
        f"{program.steps[task.step].name} "
        f"{task.direction.value if task.kind is TaskKind.WORK else task.kind.value}{MARK[task.barrier]}"
        for task in epoch_schedule(program, fused)
    ]


def test_schedules() -> None:
    """Layer 1 of a graph convolution has no gradient of its input; attention has one of everything."""
    assert words(gcn()) == words(sage()) == GCN
    assert words(gat()) == GAT
    at = GCN.index("AV2 fb")
    assert words(gcn(), fused=False) == [*GCN[:at], "AV2 f", "AV2 loss", "AV2 b", *GCN[at + 1 :]]
    assert words(gcn((5, 3))) == ["GA1 gather", "AV1 fb"]


def progress(mode: str, staleness: int = 0, intervals: int = 2, peers: tuple[int, ...] = (1,)) -> Progress:
    policy = StalenessPolicy(mode=mode, staleness=staleness)  # type: ignore[arg-type]
    found = Progress(epoch_schedule(gcn(), True), intervals, policy, peers)
    found.end = 3
    return found


def go(one: Progress, interval: int, num_tasks: int) -> None:
    for _ in range(num_tasks):
        one.start(interval)
        one.finish(interval)


def test_a_scatter_waits_for_all_intervals_of_all_graph_servers() -> None:
    one = progress("pipe")
    go(one, 0, 3)
    assert one.startable() == [1]
    go(one, 1, 3)
    assert one.startable() == []
    assert one.behind(3) == [1]
    assert one.new_barrier() == 3
    assert one.new_barrier() is None
    one.record_peer(1, 3)
    assert one.startable() == [0, 1]
    go(one, 0, 3)
    # Gradients of ghosts: all own intervals first; gradients of own rows: all graph servers.
    assert one.task_of(0)[1].kind is TaskKind.SEND_BACK
    assert one.startable() == [1]
    go(one, 1, 3)
    assert one.startable() == [0, 1]
    go(one, 0, 1)
    go(one, 1, 1)
    assert one.startable() == []
    one.record_peer(1, 7)
    go(one, 0, 2)
    go(one, 1, 2)
    assert one.startable() == []
    one.updates = 1
    assert one.startable() == [0, 1]


def test_without_a_pipeline_every_move_waits_for_the_one_before() -> None:
    one = progress("no_pipe", peers=())
    go(one, 0, 1)
    assert one.startable() == [1]
    one.start(1)
    assert one.startable() == []
    one.finish(1)
    assert one.startable() == [0, 1]


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_the_gate_of_bounded_asynchrony(staleness: int) -> None:
    one = progress("async", staleness)
    one.end = 9
    one.record_peer(1, 100)
    for num_tasks in (3, 3, 1):
        go(one, 0, num_tasks)
        assert one.startable() == [1]
        go(one, 1, num_tasks)
    while one.can_start(0):
        go(one, 0, 1)
    # Epoch 0 has barriers; then S more may begin before the first update, whatever interval 1 does.
    assert divmod(one.position[0], 9) == (1 + staleness, 0)
    assert one.position[1] == 7
    one.updates = 1
    assert one.can_start(0)


def test_the_first_epoch_and_those_after_the_switch_are_synchronous() -> None:
    policy = StalenessPolicy(mode="async", staleness=2, first_epoch=5)
    assert [policy.is_synchronous(epoch) for epoch in (5, 6, 7)] == [True, False, False]
    assert [policy.lead(epoch) for epoch in (5, 6)] == [0, 2]
    policy.synchronous_from = 7
    assert policy.is_synchronous(7)
    assert all(StalenessPolicy(mode=mode).is_synchronous(9) for mode in ("pipe", "no_pipe"))
    with pytest.raises(ConfigError, match="staleness=-1"):
        StalenessPolicy(staleness=-1)


def test_news_are_told_once_and_of_synchronous_epochs_only() -> None:
    one = progress("async", 5, intervals=1, peers=(1,))
    one.record_peer(1, 10**6)
    told = []
    while one.can_start(0):
        go(one, 0, 1)
        told.append(one.new_barrier())
    assert [position for position in told if position is not None] == [3, 7]
    with pytest.raises(ConfigError, match="graph server 4 is not one of the peers"):
        one.record_peer(4, 1)


def test_the_end_is_where_intervals_and_weights_are_there() -> None:
    one = progress("pipe", intervals=1, peers=())
    for epoch in range(3):
        assert not one.is_done
        go(one, 0, 9)
        assert one.startable() == []
        one.updates = epoch + 1
    assert one.is_done
