"""Tables of runs, and units."""

import io
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from dglx_dist.report.tables import build_epoch_table, build_summary_table, format_run_title, summarise
from tests.report.records import epoch

FACTS = {"strategy": "data_parallel", "ranks": 2, "servers": 1, "peak_memory_bytes": 7}


def test_the_first_epoch_counts_in_no_figure() -> None:
    epochs = [epoch(0, seconds=60.0), epoch(1, seconds=2.0), epoch(2, seconds=4.0), epoch(3, seconds=5.0)]
    summary = summarise(FACTS, epochs)
    assert summary["epoch_seconds"] == 4.0
    assert summary["samples_per_second"] == 25.0
    assert summary["bytes_inside"] == 2000
    assert summary["bytes_outside"] == 20
    # Unless there is no other.
    assert summarise(FACTS, [epoch(0, seconds=60.0)])["epoch_seconds"] == 60.0
    none = summarise(FACTS, [])
    assert (none["epoch_seconds"], none["bytes_inside"], none["phase_seconds"]) == (None, 0, {})


def test_the_title_counts_ranks_and_servers() -> None:
    config = {"graph": "drawn", "model": "sage"}
    summary = {"strategy": "data_parallel", "ranks": 2, "servers": 1}
    assert format_run_title(summary, config) == "drawn: sage by data_parallel, 2 ranks on 1 server"


def test_the_hit_rate_is_over_all_rows_of_the_epochs_that_count() -> None:
    hits = [(0, 9), (3, 1), (1, 5)]
    epochs = [replace(epoch(i), cache_hits=hit, cache_misses=miss) for i, (hit, miss) in enumerate(hits)]
    assert summarise(FACTS, epochs)["cache_hit_rate"] == 0.4
    assert "cache_hit_rate" not in summarise(FACTS, [epoch(0), epoch(1)])
    saved = [replace(item, checkpoint_s=0.25) for item in epochs]
    assert summarise(FACTS, saved)["checkpoint_seconds"] == 0.75
    assert "checkpoint_seconds" not in summarise(FACTS, epochs)
    assert "0.250" in text(build_epoch_table(saved))


def text(table: Table) -> str:
    buffer = io.StringIO()
    Console(file=buffer, width=140).print(table)
    return buffer.getvalue()


def test_an_epoch_is_one_line_with_its_figures() -> None:
    (line,) = [
        line for line in text(build_epoch_table([epoch(3)])).splitlines() if line.lstrip().startswith("3 ")
    ]
    cells = line.split()
    assert cells[:2] == ["3", "1.0000"]
    assert "50.0" in cells
    assert line.rstrip().endswith("30 B")
    assert "3 KB" in line
    assert text(build_epoch_table([epoch(0, val=None)])).count("%") == 1


def test_summary_spells_units_out() -> None:
    shown = text(
        build_summary_table(
            {
                "test_accuracy": 0.8125,
                "cache_hit_rate": 0.25,
                "bytes_inside": 2_500_000,
                "phase_seconds": {"wait": 0.5},
                "auto": {"predicted_bytes_outside": 3e6, "predicted_epoch_seconds": 0.75, "exact": True},
                "predicted_by_measured": 1.25,
            }
        )
    )
    for part in ("81.2 %", "25.0 %", "2.5 MB", "phase_seconds.wait", "0.500 s", "3 MB", "0.750 s"):
        assert part in shown
    assert [word for word in ("True", "1.25") if word not in shown] == []


def test_the_hit_rate_is_shown_only_where_there_was_a_cache() -> None:
    shown = text(build_epoch_table([epoch(0), replace(epoch(1), cache_hits=3, cache_misses=1)]))
    assert ("hits" in shown, "75.0 %" in shown) == (True, True)
    assert "hits" not in text(build_epoch_table([epoch(0)]))


def test_a_narrow_table_keeps_metrics_and_says_what_it_leaves_out() -> None:
    buffer = io.StringIO()
    wide = {f"val_{name}": 0.25 for name in ("mrr", "hits@1", "hits@3", "hits@10", "auc")}
    epochs = [replace(epoch(number, val=None), metrics=wide, checkpoint_s=0.5) for number in range(3)]
    Console(file=buffer, width=80).print(build_epoch_table(epochs, 80))
    shown = buffer.getvalue()
    assert "…" not in shown
    assert shown.count("0.2500") == 15
    assert " ".join(shown.split()).endswith("saving")
    assert "no room for" not in text(build_epoch_table(epochs))
    free = [replace(item, checkpoint_s=0.0) for item in epochs]
    assert len(build_epoch_table(epochs).columns) == len(build_epoch_table(free).columns) + 1


def test_evaluations_are_counted_apart_from_training() -> None:
    epochs = [epoch(0), replace(epoch(1), evaluation_s=0.5, evaluation_bytes_outside=3_000_000), epoch(2)]
    epochs.append(replace(epoch(3), evaluation_s=0.25, evaluation_bytes_outside=1_000_000))
    summary = summarise(FACTS, epochs)
    assert (summary["evaluation_seconds"], summary["evaluation_bytes_outside"]) == (0.75, 2_000_000)
    assert summary["bytes_outside"] == summarise(FACTS, [epoch(i) for i in range(4)])["bytes_outside"]
    assert "3 MB" in text(build_epoch_table(epochs))
    assert "evaluation_seconds" not in summarise(FACTS, [epoch(0)])
