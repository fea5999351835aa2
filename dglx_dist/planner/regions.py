"""Where each strategy wins: the choice at every hidden width and bandwidth, from one dry run. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dglx_dist.planner.choose import Wishes, choose, worth
from dglx_dist.planner.measured import Measured
from dglx_dist.planner.model_shape import ModelShape
from dglx_dist.planner.records import Candidate, Choice


@dataclass(frozen=True, kw_only=True)
class Regions:
    """The grid, and who wins at each point."""

    hidden: tuple[int, ...]
    """(H,) ascending."""
    bytes_per_s: tuple[float, ...]
    """(B,) ascending, payload of a server's card."""
    winners: tuple[tuple[str, ...], ...]
    """(H, B) names of candidates; "" where nothing fits."""
    gains: tuple[tuple[float, ...], ...]
    """(H, B) seconds of the usual strategy, the first that may be taken, by the winner's; 1 where it
    does not fit."""
    usual: str
    """Name of that candidate."""

    def to_json(self) -> dict[str, object]:
        """Return JSON values."""
        return {
            "hidden": list(self.hidden),
            "bytes_per_s": list(self.bytes_per_s),
            "winners": [list(row) for row in self.winners],
            "gains": [list(row) for row in self.gains],
            "usual": self.usual,
        }


def find_regions(
    known: Measured,
    candidates: Iterable[Candidate],
    wishes: Wishes,
    shapes: Mapping[int, ModelShape],
    bytes_per_s: Sequence[float],
) -> Regions:
    """Return who wins at every hidden width of ``shapes`` and every bandwidth.

    Rates of work are those measured at one width; batches and plans are the same at all.

    Args:
        known: Measured at one width and bandwidth.
        candidates: What is compared.
        wishes: What may win.
        shapes: Hidden width to the model of that width.
        bytes_per_s: (B,) ascending.
    """
    compared = tuple(candidates)
    winners, gains, usual = [], [], ""
    for hidden in sorted(shapes):
        names, factors = [], []
        for rate in bytes_per_s:
            found = choose(compared, _moved(known, shapes[hidden], rate), wishes)
            usual = usual or _usual(compared, wishes)
            taken = found.taken
            names.append("" if taken is None else taken.candidate.name)
            factors.append(_gain(found, usual, wishes))
        winners.append(tuple(names))
        gains.append(tuple(factors))
    return Regions(
        hidden=tuple(sorted(shapes)),
        bytes_per_s=tuple(bytes_per_s),
        winners=tuple(winners),
        gains=tuple(gains),
        usual=usual,
    )


def _gain(found: Choice, usual: str, wishes: Wishes) -> float:
    base = next((one for one in found.predictions if one.candidate.name == usual), None)
    if found.taken is None or base is None or not base.feasible:
        return 1.0
    return worth(base, wishes) / max(worth(found.taken, wishes), 1e-12)


def _moved(known: Measured, shape: ModelShape, bytes_per_s: float) -> Measured:
    cluster = replace(known.cluster, external_bytes_per_s=bytes_per_s)
    memory = replace(known.memory, shape=shape, cluster=cluster)
    if shape.hidden != known.shape.hidden:
        # What a step allocates was rehearsed at the other width.
        memory = replace(memory, of_batches=None, of_graphs=None)
    return replace(known, shape=shape, cluster=cluster, memory=memory)


def _usual(candidates: Sequence[Candidate], wishes: Wishes) -> str:
    return next((one.name for one in candidates if wishes.unit in ("any", one.unit)), "")
