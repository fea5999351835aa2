"""Traces made by hand."""

from dglx_dist.comm.trace import RankSpans, Span, TraceFile


def span(name: str, row: str, begin_s: float, end_s: float, batch: int | None = None) -> Span:
    return Span(name=name, row=row, begin_s=begin_s, end_s=end_s, batch=batch)


def trace_of(*ranks: list[Span], strategy: str = "push_pull") -> TraceFile:
    return TraceFile(
        ranks=tuple(
            RankSpans(rank=number, host=f"host{number}", spans=tuple(spans), clock_error_s=number * 1e-4)
            for number, spans in enumerate(ranks)
        ),
        facts={"strategy": strategy, "options": {"depth": 3}},
    )
