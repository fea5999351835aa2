"""Traces of ranks, read back and added up."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dglx_dist.comm.ledger import WORKER, Ledger
from dglx_dist.comm.topology import Topology
from dglx_dist.comm.trace import Pass, TraceWriter
from dglx_dist.errors import ConfigError, StorageError
from scripts.netlab.base import Card, LabSpec, LoopbackLab
from scripts.netlab.traces import Trace, compare, find_outcome, read_trace
from tests.bench.helpers import epoch
from tests.netlab.helpers import make_run, rank_trace, row, trace_of

SERVERS = (0, 0, 1)


def _write(folder: Path, rank: int, *, job: str = "a", epochs: int = 2) -> None:
    topology = Topology(rank, len(SERVERS), SERVERS)
    ledger = Ledger(topology)
    ledger.add("features", 1, (rank + 1) % 3, rank, 100 * (rank + 1))
    ledger.add("sampling", 2, rank, (rank + 1) % 3, 8)
    writer = TraceWriter(folder, rank)
    for number in range(epochs):
        writer.note_epoch(epoch(number, 1.5 + number))
    writer.note_pass(Pass(loader=writer.new_loader(), steps=4, seconds=2.0, wait_s=0.5))
    writer.write(job, topology, ledger, failed=False)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    for rank in range(3):
        _write(tmp_path, rank)
    trace = read_trace(tmp_path)
    ((*ranks,),) = trace.sessions
    assert [item.rank for item in ranks] == [0, 1, 2]
    assert ranks[1].server_of_rank == SERVERS
    assert ranks[1].epochs == (epoch(0, 1.5), epoch(1, 2.5))
    assert ranks[1].passes == (Pass(loader=0, steps=4, seconds=2.0, wait_s=0.5),)
    assert ranks[0].ledger[0] == row(1, 0, 100, inside=True)
    assert trace.num_servers == 2
    assert trace.epoch_seconds() == [1.5, 2.5]


def test_bytes_between_servers_are_added_up_by_server() -> None:
    """Ranks 0 and 1 on server 0, rank 2 on server 1; what workers send and get is their servers' alone."""
    trace = trace_of(
        SERVERS,
        [
            [row(0, 1, 1000, inside=True), row(0, 2, 10)],
            [row(1, 2, 20), row(2, 1, 300)],  # asked for by rank 1, which counts both ways
            [row(2, 0, 40), row(2, WORKER, 7), row(WORKER, 2, 5)],
        ],
    )
    assert trace.ledger_outside_by_server() == {0: (30, 340), 1: (347, 35)}


def test_passes_count_where_there_are_no_epochs() -> None:
    """The slowest rank's, of the first loader that made any; one rank was interrupted in its last pass."""
    ranks = [
        rank_trace(0, (0, 1), passes=[_pass(1, 2.0), _pass(2, 9.0), _pass(1, 3.0), _pass(1, 4.0)]),
        rank_trace(1, (0, 1), passes=[_pass(1, 2.5), _pass(1, 2.0)]),
    ]
    assert Trace(sessions=(tuple(ranks),)).epoch_seconds() == [2.5, 3.0]
    assert Trace(sessions=()).epoch_seconds() == []


def _pass(loader: int, seconds: float) -> Pass:
    return Pass(loader=loader, steps=1, seconds=seconds, wait_s=0.0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rank": 1}, "damaged .rank 1 of 3"),
        ({"world_size": 0}, "rank 0 of 0"),
        ({"server_of_rank": [0]}, r"on servers \(0,\)"),
        ({"failed": "no"}, "failed is a str"),
        ({"ledger": [{"phase": "x"}]}, "missing .* 'layer'"),
        ({"passes": [{"loader": 0, "steps": 1, "seconds": "1"}]}, "seconds is a str"),
        ({"epochs": [{"epoch": 0}]}, "missing .* 'loss'"),
        ({"job": "other"}, "no trace of rank 1, 2 of 3"),
        ({"server_of_rank": [0, 1, 1]}, "do not fit together"),
        ('{"job": "half', r"rank-0\.json is damaged"),
        ("[" * 100_000, r"rank-0\.json is damaged"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value[:9],
)
def test_damage_is_named(tmp_path: Path, values: dict[str, Any] | str, message: str) -> None:
    for rank in range(3):
        _write(tmp_path, rank)
    path = tmp_path / "rank-0.json"
    path.write_text(values if isinstance(values, str) else json.dumps(json.loads(path.read_text()) | values))
    with pytest.raises(StorageError, match=message):
        read_trace(tmp_path)


MB = 1_000_000
BEFORE = (Card(sent=500, received=700), Card(sent=0, received=90))


def _after(*mb: tuple[float, float]) -> tuple[Card, ...]:
    return tuple(
        Card(sent=before.sent + int(sent * MB), received=before.received + int(received * MB))
        for before, (sent, received) in zip(BEFORE, mb, strict=True)
    )


def _trace(there: int, back: int) -> Trace:
    return trace_of((0, 1), [[row(0, 1, there * MB)], [row(1, 0, back * MB)]])


def test_within_eight_percent_agrees() -> None:
    """10 MB there and 20 MB back, with 5 % of headers: only what came between the readings counts."""
    first, second, total = compare(BEFORE, _after((10.5, 21.0), (21.0, 10.5)), _trace(10, 20))
    assert (first.server, second.server, total.server) == (0, 1, None)
    assert first.card == Card(sent=10_500_000, received=21_000_000)
    assert first.ledger == Card(sent=10 * MB, received=20 * MB)
    assert second.ledger == Card(sent=20 * MB, received=10 * MB)
    assert total.card == Card(sent=31_500_000, received=31_500_000)
    assert first.ratio == second.ratio == total.ratio == pytest.approx(1.05)
    assert {case.verdict for case in (first, second, total)} == {"agrees"}
    for factor, verdict in ((1.079, "agrees"), (1.081, "differs"), (0.919, "differs")):
        after = _after((10 * factor, 10 * factor), (10 * factor, 10 * factor))
        assert [witness.verdict for witness in compare(BEFORE, after, _trace(10, 10))] == [verdict] * 3


def test_more_servers_than_cards_is_an_error() -> None:
    three = trace_of((0, 1, 2), [[], [], []])
    with pytest.raises(ConfigError, match=r"2 and 2 cards .* 3 servers.*DGLX_RANKS_PER_SERVER"):
        compare(BEFORE, BEFORE, three)


@pytest.fixture
def lab() -> LoopbackLab:
    return LoopbackLab(LabSpec(servers=2), "no root")


@pytest.mark.parametrize(("seconds", "shown"), [((), None), ((9.0,), 9.0), ((9.0, 1.0, 3.0), 2.0)])
def test_the_first_epoch_compiles_and_does_not_count(
    lab: LoopbackLab, seconds: tuple[float, ...], shown: float | None
) -> None:
    epochs = [epoch(number, second) for number, second in enumerate(seconds)]
    outcome = replace(
        find_outcome(lab, ["a.py"], 1, make_run(0, None)),
        trace=Trace(sessions=((rank_trace(0, [0], epochs=epochs),),)),
    )
    assert outcome.epoch_seconds == shown
    assert outcome.to_json()["epoch_seconds"] == list(seconds)
