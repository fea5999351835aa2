"""A real run leaves moves, tasks and updates on rows of their own, by the paper's names."""

from pathlib import Path

import dglx_dist as dx
from dglx_dist.comm.trace import read_trace
from dglx_dist.training.fit import FitConfig
from tests.strategies import equality


def test_a_trace_has_every_task_of_every_interval(tmp_path: Path) -> None:
    folder = equality.write_parts(tmp_path / "parts")
    with dx.init("lambda", timeout=60, executor="inline", intervals=2, workers=2, threads=1):
        g = dx.DistGraph(folder)
        dx.fit(
            equality.model_of("gcn", g),
            g,
            config=FitConfig(epochs=2, eval_every=0, trace=tmp_path / "t.json", show_progress=False),
        )
        g.close()
    (rank,) = read_trace(tmp_path / "t.json").ranks
    names = {
        row: {span.name for span in rank.spans if span.row == row} for row in {s.row for s in rank.spans}
    }
    assert names["graph server"] == {
        "GA1", "open AV1", "GA2", "open AV2", "publish GA2", "collect SC1",
    }  # fmt: skip
    assert names["network"] == {"SC1", "gradSC1"}
    assert names["parameter server"] == {"WU"}
    assert names["worker"] - {"wait for rows"} == {"AV1", "AV2+grad", "gradAV1"}
    tasks = [
        (span.name, span.batch, span.interval)
        for span in rank.spans
        if span.row == "worker" and span.name != "wait for rows"
    ]
    assert sorted(tasks) == sorted(
        (name, epoch, interval)
        for name in ("AV1", "AV2+grad", "gradAV1")
        for epoch in (0, 1)
        for interval in (0, 1)
    )
    # A worker begins with interval 0 before interval 1 is summed, or they would take turns.
    made = [
        (span.name, span.interval) for span in rank.spans if span.row == "graph server" and span.batch == 1
    ]
    assert made[:4] == [("GA1", 0), ("open AV1", 0), ("GA1", 1), ("open AV1", 1)]
