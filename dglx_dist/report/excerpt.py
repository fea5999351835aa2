"""Which part of a trace a picture shows: batches or epochs, their time, and where spans lie in it."""

from __future__ import annotations

from collections.abc import Collection

from dglx_dist.cluster.timeline import Span
from dglx_dist.cluster.trace_events import TraceFile
from dglx_dist.errors import ConfigError
from dglx_dist.report.overlap import is_wait


def choose(
    trace: TraceFile, row: str, asked: tuple[int, int] | None, *, unit: str, usual: int, early: int = 0
) -> tuple[int, int]:
    """Return the first and the last number of the spans of ``row`` that are shown.

    Args:
        trace: What is drawn.
        row: Whose spans have the numbers.
        asked: First and last, as the user wants them; None: ``usual`` many in the middle.
        unit: What is numbered, for messages.
        usual: So many unless told otherwise.
        early: So many more are left out before the middle than behind it.

    Raises:
        ConfigError: there is none, or none that was asked for.
    """
    spans = (span for rank in trace.ranks for span in rank.spans)
    known = sorted({span.batch for span in spans if span.row == row and span.batch is not None})
    if not known:
        raise ConfigError(f"the trace has no {unit} to draw; record more with --trace-steps")
    if asked is None:
        middle = max((len(known) - usual + early) // 2, 0)
        return known[middle], known[min(middle + usual, len(known)) - 1]
    first, last = asked
    if not any(first <= number <= last for number in known):
        raise ConfigError(
            f"the trace has no {unit} from {first} to {last}; it has {known[0]} to {known[-1]}; choose "
            "others with --batches FIRST:LAST"
        )
    return max(first, known[0]), min(last, known[-1])


def window(
    trace: TraceFile, first: int, last: int, rows: Collection[str] | None = None
) -> tuple[float, float]:
    """Return begin and end in seconds of all that is numbered ``first`` to ``last``, with some room.

    ``rows``: whose spans count; None: all.
    """
    shown = [
        span
        for rank in trace.ranks
        for span in rank.spans
        if (rows is None or span.row in rows)
        and span.batch is not None
        and first <= span.batch <= last
        and not is_wait(span)
    ]
    begin, end = min(span.begin_s for span in shown), max(span.end_s for span in shown)
    room = 0.01 * (end - begin)
    return begin - room, end + room


def clipped(span: Span, shown: tuple[float, float]) -> tuple[float, float]:
    """Return begin and end in milliseconds since the picture's begin, as far as they are on it."""
    begin, end = shown
    return 1e3 * (max(span.begin_s, begin) - begin), 1e3 * (min(span.end_s, end) - begin)
