from dataclasses import replace

from dglx_dist.report.tables import RunFacts, run_title, summarise
from tests.report.records import epoch

FACTS = RunFacts(
    strategy="data_parallel", ranks=2, servers=1, test_accuracy=0.8, val_accuracy=None, peak_memory_bytes=7
)


def test_the_first_epoch_counts_in_no_figure() -> None:
    epochs = [epoch(0, seconds=60.0), epoch(1, seconds=2.0), epoch(2, seconds=4.0), epoch(3, seconds=5.0)]
    summary = summarise(FACTS, epochs)
    assert summary["epoch_seconds"] == 4.0
    assert summary["samples_per_second"] == 25.0
    assert summary["bytes_inside"] == 2000
    assert summary["bytes_outside"] == 20


def test_the_only_epoch_counts() -> None:
    assert summarise(FACTS, [epoch(3, seconds=5.0)])["epoch_seconds"] == 5.0


def test_every_promised_field_is_there() -> None:
    summary = summarise(FACTS, [epoch(0), epoch(1)])
    assert {
        "strategy", "ranks", "servers", "test_accuracy", "val_accuracy", "epoch_seconds",
        "samples_per_second", "bytes_inside", "bytes_outside", "peak_memory_bytes", "phase_seconds",
    } <= summary.keys()  # fmt: skip
    assert summary["phase_seconds"] == {
        "sample": 0.5, "fetch": 0.25, "wait": 0.125, "compute": 1.0, "exchange": 0.0625,
    }  # fmt: skip


def test_no_epoch_has_no_time() -> None:
    summary = summarise(FACTS, [])
    assert (summary["epoch_seconds"], summary["bytes_inside"], summary["phase_seconds"]) == (None, 0, {})


def test_the_title_counts_ranks_and_servers() -> None:
    config = {"graph": "drawn", "model": "sage"}
    summary = {"strategy": "data_parallel", "ranks": 2, "servers": 1}
    assert run_title(summary, config) == "drawn: sage by data_parallel, 2 ranks on 1 server"


def test_the_hit_rate_is_over_all_rows_of_the_epochs_that_count() -> None:
    hits = [(0, 9), (3, 1), (1, 5)]
    epochs = [replace(epoch(i), cache_hits=hit, cache_misses=miss) for i, (hit, miss) in enumerate(hits)]
    assert summarise(FACTS, epochs)["cache_hit_rate"] == 0.4
    assert "cache_hit_rate" not in summarise(FACTS, [epoch(0), epoch(1)])
