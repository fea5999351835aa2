"""Traces of real runs: one file with all ranks on one clock, or a file of each rank that failed."""

import json
import re
import resource
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from dglx_dist.comm.collectives import measure_clock
from dglx_dist.comm.ledger import WORKER
from dglx_dist.comm.session import start_session
from dglx_dist.comm.trace import COMPUTE, LOADER, NETWORK, RankSpans, read_trace, write_trace
from dglx_dist.errors import StorageError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.records import EpochRecord
from dglx_dist.training.fit import train
from dglx_dist.training.fit_config import FitConfig
from dglx_dist.training.models import build_model
from dglx_dist.training.tracing import format_live_figures, hide_credentials, open_scalars_writer
from tests.helpers.ranks import run_ranks
from tests.report.records import epoch
from tests.report.traces import span, trace_of
from tests.strategies import equality
from tests.training.test_fit import prepare

BATCH = 40


def _fit(
    g: DistGraph, trace: Path, stop_after: int | None = None, trained: int = 0, **options: Any
) -> tuple[int, list[Any]]:
    topology = g.session.topology
    ids = equality.cut(equality.new_ids_of_training(g), (3.0, 1.0), topology.rank, topology.world_size)
    torch.manual_seed(11)
    plain = build_model("sage", equality.WIDTH, equality.HIDDEN, equality.CLASSES, 2, 0.0).double()
    loader, model = prepare(g, plain, [-1, 4], ids, batch_size=BATCH)
    # Epochs that the loader has had in an earlier call.
    loader.set_epoch(trained)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def stop(record: EpochRecord) -> None:
        if record.epoch == stop_after:
            raise RuntimeError("stopped by the test")

    config = FitConfig(epochs=2, trace=trace, show_progress=False, **options)
    train(model, loader, optimizer, g, config, callbacks=[stop])
    return len(loader), [p.detach().numpy().tolist() for p in model.parameters()]


def _record_traces(folder: str, out: str) -> dict[str, Any]:
    """Return a rank's results of a good run, a short one, a refused one and one that fails."""
    session = start_session(timeout_s=60)
    g = DistGraph(folder)
    record: dict[str, Any] = {"clock": measure_clock(session)}
    record["steps"], record["weights"] = _fit(g, Path(out) / "good.json")
    record["on after"] = session.timeline.on
    _, record["weights of the short one"] = _fit(g, Path(out) / "short.json", trace_steps=1)
    for name in ("mine.json", "failed.json"):
        try:
            _fit(g, Path(out) / name, stop_after=0, trained=3)
        except (StorageError, RuntimeError) as error:
            record[name] = f"{type(error).__name__}: {error}"
    return record


Traced: TypeAlias = tuple[Path, list[dict[str, Any]]]


@pytest.fixture(scope="module", params=[1, 2])
def recorded_runs(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Traced:
    out = tmp_path_factory.mktemp(f"traces-{request.param}")
    (out / "mine.json").write_text("of somebody else")
    # Of an earlier run that failed: goes when the next one starts.
    write_trace(out / "good.rank-0.json", trace_of([]))
    return out, run_ranks(_record_traces, request.param, args=(str(folder), str(out)), ranks_per_server=1)


def names_of(rank: RankSpans, row: str) -> set[str]:
    return {span.name for span in rank.spans if span.row == row}


def test_every_rank_is_in_the_file_with_every_step(recorded_runs: Traced) -> None:
    out, message = recorded_runs
    trace = read_trace(out / "good.json")
    assert len(trace.ranks) == len(message)
    steps = list(range(2 * message[0]["steps"]))
    for rank in trace.ranks:
        for name in ("forward", "backward", "step"):
            spans = [span for span in rank.spans if span.name == name]
            assert [span.batch for span in spans] == steps
            assert all(a.end_s <= b.begin_s for a, b in pairwise(spans))
        assert sorted(s.batch for s in rank.spans if s.name == "sample" and s.batch is not None) == steps
        assert "wait for a batch" in names_of(rank, COMPUTE)
        assert names_of(rank, LOADER) == {"sample"}
        assert names_of(rank, NETWORK) == ({"all-reduce D"} if len(message) > 1 else set())
    assert trace.facts["strategy"] == "data_parallel"
    assert trace.facts["steps_recorded"] == len(steps)
    assert set(trace.facts["versions"]) == {"dglx_dist", "torch", "dgl"}


def test_a_trace_follows_the_schema_of_chromes_trace_events(recorded_runs: Traced) -> None:
    """Perfetto reads it: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU."""
    out, message = recorded_runs
    content = json.loads((out / "good.json").read_text(), parse_float=Decimal)
    assert content["displayTimeUnit"] == "ms"
    events = content["traceEvents"]
    names: dict[tuple[str, int, int], str] = {}
    threads: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in events:
        assert type(event["pid"]) is type(event["tid"]) is int
        assert isinstance(event["name"], str)
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            names[event["name"], event["pid"], event["tid"]] = next(iter(event["args"].values()))
            continue
        assert event["ph"] == "X"
        assert set(event) == {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"}
        assert min(event["ts"], event["dur"]) >= 0
        threads.setdefault((event["pid"], event["tid"]), []).append(event)
    assert {pid for pid, _ in threads} == set(range(len(message)))
    for (pid, tid), spans in threads.items():
        assert str(names["process_name", pid, 0]).startswith(f"rank {pid} on ")
        assert str(names["thread_name", pid, tid]).split()[0] == spans[0]["cat"].split()[0]
        assert names["thread_sort_index", pid, tid] == tid
        # Timestamps rise, and spans of a thread are disjoint or one within the other, to the last nanosecond.
        assert all(before["ts"] <= after["ts"] for before, after in pairwise(spans))
        open_until: list[Decimal | int] = []
        for event in spans:
            while open_until and open_until[-1] <= event["ts"]:
                open_until.pop()
            assert not open_until or event["ts"] + event["dur"] <= open_until[-1], event
            open_until.append(event["ts"] + event["dur"])


def test_rounding_of_a_trace_keeps_spans_within_others(tmp_path: Path) -> None:
    # Begin and duration rounded on their own, the inner span ended 1 ns after the outer one.
    spans = [span("outer", COMPUTE, 0.0, 1.4e-9), span("inner", COMPUTE, 0.6e-9, 1.4e-9)]
    write_trace(tmp_path / "trace.json", trace_of(spans))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    ends = {
        event["name"]: round(1e3 * (event["ts"] + event["dur"])) for event in events if event["ph"] == "X"
    }
    assert ends == {"outer": 1, "inner": 1}


def test_sums_of_gradients_end_on_all_ranks_only_after_all_began(recorded_runs: Traced) -> None:
    """A sum needs all ranks, which shows only on a common clock."""
    trace = read_trace(recorded_runs[0] / "good.json")
    error_s = sum(rank.clock_error_s for rank in trace.ranks)
    sums = [[span for span in rank.spans if span.name == "all-reduce D"] for rank in trace.ranks]
    for together in zip(*sums, strict=True):
        assert max(span.begin_s for span in together) <= min(span.end_s for span in together) + error_s


def test_recording_changes_no_weight_and_stops_when_asked(recorded_runs: Traced) -> None:
    out, message = recorded_runs
    for rank in message:
        assert rank["weights"] == rank["weights of the short one"] == message[0]["weights"]
        assert not rank["on after"]
    short = read_trace(out / "short.json")
    assert (short.facts["steps"], short.facts["steps_recorded"]) == (2 * message[0]["steps"], 1)
    assert [span.batch for span in short.ranks[0].spans if span.name == "step"] == [0]


def test_what_is_no_trace_is_not_overwritten_and_all_ranks_hear_it(recorded_runs: Traced) -> None:
    out, message = recorded_runs
    assert (out / "mine.json").read_text() == "of somebody else"
    for rank in message:
        assert "something other than a trace" in rank["mine.json"]


def test_ranks_that_fail_leave_what_they_have(recorded_runs: Traced) -> None:
    out, message = recorded_runs
    assert not (out / "failed.json").exists()
    for rank, seen in enumerate(message):
        assert seen["failed.json"] == "RuntimeError: stopped by the test"
        (own,) = read_trace(out / f"failed.rank-{rank}.json").ranks
        assert own.rank == rank
        numbers = list(range(3 * seen["steps"], 4 * seen["steps"]))
        for name in ("sample", "step"):
            assert sorted(s.batch for s in own.spans if s.name == name and s.batch is not None) == numbers
    failed = {f"failed.rank-{rank}.json" for rank in range(len(message))}
    assert {path.name for path in out.iterdir()} == {"good.json", "short.json", "mine.json"} | failed


def test_a_trace_tells_no_key_of_an_endpoint() -> None:
    options = {"url": "https://me:word@host:8443/run?code=key#key", "headers": {"x-key": "key"}, "workers": 4}
    message = hide_credentials(options)
    assert message == {"url": "https://host:8443/run", "headers": ["x-key"], "workers": 4}


def test_live_figures_have_speed_memory_and_bytes() -> None:
    with start_session() as session:
        session.ledger.add("features", 0, 0, WORKER, 3000)
        result = format_live_figures(13, 153, 4, 2.0, [epoch(2)], session)
        first = format_live_figures(0, 153, 4, 0.0, [], session)
    assert re.fullmatch(r"[\d.]+ [MG]B", result.pop("memory (rank 0)"))
    # 100 samples in the four steps of an epoch.
    expected = ("3", "1/4", "2", "50", "0:01:10", "3 KB")
    assert tuple(result.items()) == tuple(
        zip(("epoch", "step", "steps/s", "samples/s", "time left", "bytes (rank 0)"), expected, strict=True)
    )
    assert (first["samples/s"], first["time left"]) == ("-", "-")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's thread
def test_a_full_disk_ends_figures_for_tensorboard_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("tensorboard")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with start_session() as session, open_scalars_writer(tmp_path, 0, session) as write:
        write(epoch(0))
        (events,) = tmp_path.iterdir()
        size = events.stat().st_size
        # Writes beyond this fail as on a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            write(epoch(1))
            write(epoch(2))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "no figures from epoch 1 on" in message
    assert size > 100
