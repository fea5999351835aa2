"""What ``dglx plan`` prints: every way to train in a row, the choice and its reasons below."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table

from dglx_dist.planner.records import Choice, Prediction
from dglx_dist.report.units import readable_bytes, readable_count, readable_percent, readable_seconds

_COLUMNS = (
    "", "strategy, options", "s", "compute", "draw", "outside", "inside", "sums", "bytes out", "bytes in",
    "memory", "steps", "",
)  # fmt: skip
_LEGEND = (
    "s: seconds of an epoch, then what takes them: computing, drawing batches, waiting for rows of other "
    "servers and of ranks of the same one, sums of gradients. Then payload of an epoch between servers and "
    "inside of them, ~: expected, else counted; and the peak of a rank. exact: steps give the weights of one "
    "process on the same batches. group_size: N_f of P3; hops: k, external_hops: m, batches: R of GraNNDis; "
    "staleness: S of Dorylus; cache: policy and alpha"
)


def plan_table(choice: Choice) -> Table:
    """Return one row for each candidate in the order of ``choice``, the chosen one marked."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=_LEGEND, caption_justify="left")
    for place, name in enumerate(_COLUMNS):
        left = place in (1, len(_COLUMNS) - 1, len(_COLUMNS) - 2)
        wraps = place in (1, len(_COLUMNS) - 1)
        table.add_column(name, justify="left" if left else "right", no_wrap=not wraps)
    for place, one in enumerate(choice.predictions):
        asked = one.feasible and not one.barred
        style = "bold" if place == choice.picked else ("" if asked else "dim")
        following = choice.predictions[place + 1 : place + 2]
        last = asked and any(other.barred or not other.feasible for other in following)
        table.add_row(*_cells(one, chosen=place == choice.picked), style=style, end_section=last)
    return table


def _cells(one: Prediction, *, chosen: bool) -> tuple[str, ...]:
    only = f"only with {one.barred}" if one.barred else ""
    said = one.why_not or "; ".join(part for part in (only, one.note) if part)
    if not one.seconds.total:
        return ("", one.candidate.name, *[""] * 9, _kind(one), said)
    seconds = one.seconds
    about = "" if one.bytes_exact else "~"
    return (
        "->" if chosen else "",
        one.candidate.name,
        *(
            readable_seconds(value)
            for value in (
                seconds.total,
                seconds.compute,
                seconds.sampling,
                seconds.outside,
                seconds.inside,
                seconds.all_reduce,
            )
        ),
        about + readable_bytes(one.bytes_outside),
        about + readable_bytes(one.bytes_inside),
        readable_bytes(one.memory_bytes),
        _kind(one),
        said,
    )


def _kind(one: Prediction) -> str:
    return "exact" if one.candidate.exact else "estimate"


def plan_head(choice: Choice) -> str:
    """Return what the plan is for."""
    graph, cluster = choice.graph, choice.cluster
    return (
        f"{graph.name}: {readable_count(graph.nodes)} nodes, {readable_count(graph.edges)} edges, "
        f"{graph.features} features, {readable_percent(graph.edge_cut)} of the edges between servers "
        f"({graph.method})\n"
        f"{choice.trained}\n"
        f"{cluster.servers} servers x {cluster.ranks_per_server} ranks, "
        f"{readable_bytes(cluster.external_bytes_per_s)}/s outside, "
        f"{readable_bytes(cluster.internal_bytes_per_s)}/s inside, "
        f"{cluster.cores:g} cores and {readable_bytes(cluster.memory_bytes)} a rank"
    )


def plan_lines(choice: Choice) -> Sequence[str]:
    """Return the choice, why, and what it rests on, a line each."""
    taken = choice.taken
    head = "nothing fits" if taken is None else f"chosen: {taken.candidate.name}"
    return [
        head,
        *_listed(choice.why),
        *(["assumed:"] if choice.assumptions else []),
        *_listed(choice.assumptions),
    ]


def _listed(lines: Iterable[str]) -> list[str]:
    return [f"  - {line}" for line in lines]
